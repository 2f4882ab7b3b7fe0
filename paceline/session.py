"""The page to read first: what a script writes, and what happens then.

``start`` brings the workers together and checks that they agree. ``batches`` hands out the microbatches of this worker,
``step`` lets the strategy train on them, ``evaluate`` measures, ``save`` keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import Any, TypeVar, Unpack, cast

import torch
from torch import nn

from paceline.checkpoint.tensors import fingerprint
from paceline.config import quoted
from paceline.data.sampler import SampleNumbers
from paceline.errors import ConfigError, InputError
from paceline.evaluation.metrics import Metrics, numbers_in
from paceline.evaluation.predictions import Predictions
from paceline.settings import Arguments
from paceline.step.job import Batch
from paceline.step.optimizers.factory import OptimizerFactory, ScheduleFactory
from paceline.training.batches import Batches
from paceline.training.build import Components, phase_of
from paceline.training.evaluations import Evaluations
from paceline.training.exports import Exports
from paceline.training.report import Report
from paceline.training.script_state import Registered
from paceline.training.setup import Run, set_up

__all__ = ["Batch", "Report", "Session", "start"]

_T = TypeVar("_T")


def _count_in(call: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < 0:
        raise ConfigError(f"{call}{quoted(value)}): give a whole number from 0 on.")
    return int(value)


def start(  # noqa: PLR0913 - all by name; what a script says of its training
    *,
    model: nn.Module,
    optimizer: OptimizerFactory,
    data: Any,
    loss: Callable[[Any, Any], Any] | None = None,
    forward: Callable[[nn.Module, Any], Any] | Mapping[str, Callable[[nn.Module, Any], Any]] | None = None,
    schedule: ScheduleFactory | Mapping[str, ScheduleFactory | None] | None = None,
    collate: Callable[[list[Any]], Any] | None = None,
    sampler: SampleNumbers | None = None,
    **settings: Unpack[Arguments],
) -> Session:
    """Bring the workers together to train a model.

    Alone, the script trains in one process; under ``paceline run`` or ``torchrun`` every worker calls this with the
    same arguments, and they train together.

    Args:
        model: the model, built alike on every worker (seed before you build it). It is moved to the worker's device.
        optimizer: a factory, called with the list of the model's trainable parameters, such as
            ``partial(torch.optim.SGD, lr=0.1)``. If its first parameter is called ``named_parameters`` it gets pairs of
            names and parameters, and if it is called ``model`` the model. It returns a torch optimizer, or several of
            different parameters, by name or in a list.
        data: a data set with a length and items by number, or a stream of unknown length that can be iterated over
            again; with ``loss`` its items are pairs (input, target).
        loss: ``loss(output, target)``: a scalar, the mean over the samples given, or a pair (sum, count), for a mean
            over something else than samples, such as tokens.
        forward: ``forward(model, microbatch)``, instead of ``loss``, with the same choice of results. For losses that
            take turns: one for each of several optimizers, by name. With a third parameter,
            ``forward(model, microbatch, state)``, it returns (loss, next state): the state goes from a microbatch to
            the one in its place in the next batch, and samples come in order, not shuffled.
        schedule: a factory, called with the optimizer, that returns a torch learning-rate scheduler; stepped once for
            each update, without a metric. Of several optimizers each gets its own, by this factory or by one for each
            name.
        collate: makes a microbatch from a list of items; torch's default if none.
        sampler: ``sampler(seed, epoch)`` gives the sample numbers of an epoch in order, the same whenever it is called
            (or one of torch's samplers); a new shuffle in each epoch if none.
        settings: the fields of :class:`paceline.Settings`; the command line and the environment go before them.

    Raises:
        ConfigError: a setting cannot be used.
        InputError: an argument cannot be used.
        StartError: the workers did not come together or do not agree.
        CheckpointError: ``resume`` names something that cannot be used.
    """
    given = Components(model, optimizer, data, loss, forward, schedule, collate, sampler)
    return Session(set_up(given, settings), by_loss=loss is not None)


class Session:
    """A training run, as one of its workers sees it. Made by :func:`paceline.start`."""

    def __init__(self, run: Run, *, by_loss: bool) -> None:
        self._job, self._loop, self._tracking = run.job, run.loop, run.tracking
        self._by_loss = by_loss
        self._state, self._script, self._notes = run.state, run.script, run.notes
        self._batches = Batches(run.loop)
        self._evaluations = Evaluations(run.loop)
        self._exports = Exports(run.loop)

    @property
    def rank(self) -> int:
        """The number of this worker, from 0."""
        return self._job.world.rank

    @property
    def is_main(self) -> bool:
        """Whether this worker has rank 0; another one has it when that one is lost."""
        return self.rank == 0

    @property
    def workers(self) -> int:
        """How many workers there are."""
        return self._job.world.size

    @property
    def device(self) -> torch.device:
        """Where this worker's model is: for what the script itself computes with it."""
        return self._job.world.device

    @property
    def position(self) -> int:
        """Steps done since the beginning of training; from here a resumed run goes on."""
        return self._loop.position.steps

    @property
    def steps_per_epoch(self) -> int:
        """Steps in one pass over the data: in the present epoch, if they have not all as many.

        Raises:
            ConfigError: the data are a stream, whose end is not known yet.
        """
        return self._job.order.steps_at(self.position)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer, to read its hyper-parameters, or to change them: alike on all workers, between two steps.

        Raises:
            ConfigError: with this strategy others make updates, too: servers, or workers that do not wait.
        """
        if not self._job.replicated:
            raise ConfigError(
                f"session.optimizer: with strategy {self._job.settings.strategy!r} not every worker makes every "
                f"update, so hyper-parameters cannot be changed by hand. Give a schedule, or use 'allreduce' "
                f"or 'stealing'."
            )
        return self._job.update.optimizer

    def epochs(self, first: int, end: int | None = None) -> Iterator[int]:
        """The numbers of the epochs, as ``range(end)`` or ``range(first, end)`` has them: the first epoch is ``first``.

        A resumed run, or a worker that joins, begins in the epoch in which the run is: what is done is not entered.

        Raises:
            ConfigError: a number is no whole one from 0 on.
        """
        if end is None:
            return self._batches.epochs(_count_in("epochs(", first))
        count = _count_in("epochs(..., ", end) - _count_in("epochs(", first)
        return (first + epoch for epoch in self._batches.epochs(max(0, count)))

    def batches(self, *, epochs: int | None = None, steps: int | None = None) -> Iterator[Batch]:
        """The batches of the present epoch, up to its end; or of the next epochs or steps.

        Calls with ``epochs`` or ``steps`` add up; each call ends the one before. A resumed run goes through the same
        calls, and gets no batches from those that are already done, but the last one: the lines behind its
        :meth:`step` had not run when the checkpoint was saved. A batch not given to :meth:`step` is left out.

        Raises:
            ConfigError: both ``epochs`` and ``steps`` are given, or one that is no whole number from 0 on.
        """
        if epochs is None and steps is None:
            return self._batches.batches(None)
        if epochs is not None and steps is not None:
            raise ConfigError("batches() takes either epochs= or steps=.")
        what, count = ("epochs=", epochs) if steps is None else ("steps=", steps)
        return self._batches.batches(_count_in(f"batches({what}", count), epochs=steps is None)

    def step(self, batch: Batch, optimizer: str | None = None) -> Report:
        """Train on a batch: forward, backward, synchronise, update.

        Args:
            batch: from :meth:`batches`.
            optimizer: in a session with a forward for each optimizer, which of them to take; one after the other on
                the same batch. Only its parameters get gradients, and are updated.

        Raises:
            ConfigError: an ``optimizer`` is missing, unknown, or given in a session with one forward.
            NonFiniteLoss: a loss is NaN or infinite (unless ``nonfinite`` is ``skip``).
            InputError: the batch is over; the loss is no scalar; a parameter gets no gradient from some microbatches,
                or a sparse one; the forward pass changes a weight; several workers cannot use the optimizer or model.
            DisagreementError: the workers are not at the same step.
            WorkerLost: another worker went away or stayed silent.
            CheckpointError: a checkpoint was due and could not be written, now or in the background before.
        """
        self._job.update.averages.check_training()
        result, seconds = self._loop.step(batch, phase_of(self._job, optimizer))
        return Report.of(self._job, batch, result, seconds, self._notes)

    def evaluate(
        self,
        data: Any,
        metric: Callable[..., Any] | Mapping[str, Any] | Any = None,
        *,
        forward: Callable[[nn.Module, Any], Any] | None = None,
    ) -> Any:
        """The mean of a metric over a data set, or several; every worker must call it, and all get the same values.

        Args:
            data: a map-style data set like the one trained on, or a stream. Each sample is visited exactly once.
            metric: ``metric(output, target)``, or ``metric(model, microbatch)`` in a session with ``forward``: a
                number, the mean over the samples given, or a pair (sum, count). Or an object with ``update(output,
                target)``, ``compute()`` and ``reset()``, as those of torchmetrics. None: the loss. Several: a
                dictionary of these.
            forward: ``forward(model, microbatch)`` returns what metrics are called with, such as (output, target).

        Returns:
            the mean, or what the object computes; of a dictionary one with the same keys.

        Raises:
            InputError: the data set is empty, a metric returns no number, or it changes a weight of the model.
            DisagreementError: the weights are not the same on all workers (only looked for with ``exact``), or the
                samples of a stream.
            WorkerLost: another worker went away or stayed silent.
        """
        metrics = Metrics(self._job, metric, forward, by_loss=self._by_loss)
        value = self._evaluations.evaluate(metrics, data)
        self._tracking.evaluated(metric, value if isinstance(value, float) else numbers_in(value, ""), self._last_step)
        return value

    def predict(
        self, data: Any, forward: Callable[[nn.Module, Any], Any] | None = None, *, everywhere: bool = True
    ) -> Any:
        """The outputs of the model for a data set, in the order of its samples; every worker must call it.

        Args:
            data: see :meth:`evaluate`.
            forward: ``forward(model, microbatch)`` returns tensors whose first dimension is that of the samples, lists
                with one entry for each, or tuples and dictionaries of these. None: the output of the model, in a
                session with ``loss``.
            everywhere: false: rank 0 gets them, and the other ranks None.

        Returns:
            the outputs of all microbatches as one, in host memory.

        Raises:
            InputError: the data set is empty, or the outputs cannot be gathered.
            DisagreementError, WorkerLost: see :meth:`evaluate`.
        """
        if forward is None and not self._by_loss:
            raise InputError(
                "In a session with forward= nothing says what the model's output is: give predict(data, forward), a "
                "function of (model, microbatch) that returns it."
            )
        return self._evaluations.predict(Predictions(forward), data, everywhere)

    def log(self, values: Mapping[str, Any]) -> None:
        """Record values of the script at the last step done: numbers, texts and images by name.

        They are an event, and go to the trackers. Rank 0 records them; the call does nothing on other ranks. A name is
        recorded once for a step. Texts and images become files.

        Args:
            values: a number or a tensor of one element; a string; or an image: a tensor [channels, height, width] of
                uint8, or of floats from 0 to 1, with 1 to 4 channels.

        Raises:
            InputError: a name or a value cannot be recorded.
        """
        self._tracking.log(values, self._last_step)

    def register(self, **values: Any) -> Registered:
        """Save what the script keeps itself with each checkpoint, restore it on resume, and give it to joiners.

        Args:
            values: numbers, text, tensors and containers of these; or objects with ``state_dict`` and
                ``load_state_dict``. All workers register the same. They are copied after each step: keep them small.

        Returns:
            an object with these values as attributes; assign new plain values there.

        Raises:
            InputError: a name is taken, a value cannot be saved, or it was of another type in the checkpoint.
        """
        self._script.register(values)
        return Registered(self._script, tuple(values))

    def once(self, act: Callable[..., _T], *args: Any, **kwargs: Any) -> _T:
        """Do something on rank 0 alone, such as a download or an export; all others wait, and get what it returned.

        A worker that joins later gets the result without doing it again, and so does a resumed run, but for calls
        before the first batch or epoch. If rank 0 is lost in it, the next rank 0 does it.

        Args:
            act: called with ``args`` and ``kwargs``. It returns numbers, text, tensors, containers of these, or None,
                and must not call methods of the session that others take part in. It may take ``timeout_seconds``.

        Raises:
            InputError: it raised an error (on rank 0 that error), or its result is of another type.
            WorkerLost: there are not enough workers left.
        """
        return cast("_T", self._evaluations.once(partial(act, *args, **kwargs)))

    def print(self, *values: object, sep: str = " ", end: str = "\n") -> None:
        """Print on rank 0 alone, and not again what a run printed before it was resumed."""
        loop = self._loop
        if self.is_main and loop.position.asked >= loop.progress.received:
            print(*values, sep=sep, end=end, flush=True)  # noqa: T201 - the script's own output

    def save(self) -> Path | str:
        """Write a checkpoint of the state after the steps done; returns its directory, or its URL.

        It is in its place when this returns on rank 0, which writes it.

        Raises:
            CheckpointError: there is nowhere to save to, or writing failed, now or in the background before.
        """
        return self._loop.save()

    def averaged(self) -> AbstractContextManager[None]:
        """Inside this block :meth:`evaluate`, :meth:`model_state` and :meth:`export` take the averaged weights.

        The setting ``average`` keeps them. The model itself has those that are trained, and :meth:`step` is refused.

        Raises:
            ConfigError: no average is kept.
        """
        return self._job.update.averages.choose()

    def model_state(self, *, everywhere: bool = True) -> dict[str, Any]:
        """The complete weights, by the names of ``model.state_dict()``, as copies in host memory.

        Every worker must call it. With a pipeline ``model.state_dict()`` has the values of this worker's stages only;
        this has all. A tensor with several names, such as a tied weight, is one copy.

        Args:
            everywhere: false: rank 0 gets them, and the other ranks an empty dictionary.

        Raises:
            WorkerLost: another worker went away or stayed silent.
        """
        return self._exports.weights(everywhere)

    def export(self, path: Path | str, *, dtype: torch.dtype | None = None) -> Path | str:
        """Write the complete weights to a file; every worker must call it, and rank 0 writes.

        The file is there when this returns, on every rank. One with this name is replaced at once, by a rename.

        Args:
            path: ending in ``.safetensors``, or in ``.pt``, ``.pth`` or ``.bin`` for a state_dict of torch; or a URL.
            dtype: of the floating-point tensors in the file, such as ``torch.bfloat16``; none: as they are.

        Returns:
            where it is.

        Raises:
            ConfigError: the path has another ending, or the type is none.
            CheckpointError: it cannot be written, or safetensors or the package for the URL is not installed.
            WorkerLost: another worker went away or stayed silent.
        """
        return self._exports.export(path, dtype)

    def fingerprint(self) -> str:
        """SHA-256 over parameters, buffers and optimizer state, as 64 hex digits.

        It is the same on every rank; any rank may call it alone. (With an asynchronous strategy, local SGD or a
        pipeline: after the last batch of :meth:`batches`, :meth:`evaluate` or :meth:`save`.)
        """
        return fingerprint(self._state.tensors())

    @property
    def _last_step(self) -> int:
        """The step to which what the script records now belongs."""
        return max(self.position - 1, 0)
