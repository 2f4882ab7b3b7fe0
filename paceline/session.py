"""The public training interface: :func:`start` and :class:`Session`. Read this module first.

``start`` runs the rendezvous and checks that all workers agree. ``batches`` yields this worker's microbatches, ``step``
trains on them with the configured strategy, ``evaluate`` computes metrics, and ``save`` writes a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar, Unpack, cast

import torch
from torch import nn

from paceline.data.sampler import SampleNumbers
from paceline.evaluation.metrics import Metrics, numbers_in
from paceline.evaluation.predictions import Predictions
from paceline.schedule.microbatch_orders import MicrobatchOrder
from paceline.step.context import Batch
from paceline.step.optimizers.factory import OptimizerFactory, ScheduleFactory
from paceline.system.usage import explained, with_usage
from paceline.training.batches import Batches
from paceline.training.build import Components, phase_of
from paceline.training.evaluations import Evaluations
from paceline.training.exports import Exports
from paceline.training.report import Report, report_of
from paceline.training.script_state import Registered
from paceline.training.setup import Arguments, Run, set_up

__all__ = ["Batch", "Report", "Session", "start"]

_T = TypeVar("_T")
_NO_BATCH = cast("Batch", None)  # answered by an error of ours, where a missing argument would be one of Python


@with_usage("paceline.start", "paceline.start(model=..., optimizer=..., loss=..., data=..., batch=...)")
def start(  # noqa: PLR0913 - keyword-only; they describe the whole training
    *,
    model: nn.Module,
    optimizer: OptimizerFactory,
    data: Any,
    loss: Callable[[Any, Any], Any] | None = None,
    forward: Callable[[nn.Module, Any], Any] | Mapping[str, Callable[[nn.Module, Any], Any]] | None = None,
    batch_loss: Callable[[Any, Batch], Any] | None = None,
    schedule: ScheduleFactory | Mapping[str, ScheduleFactory | None] | None = None,
    collate: Callable[[list[Any]], Any] | None = None,
    sampler: SampleNumbers | None = None,
    microbatch_order: MicrobatchOrder | None = None,
    **settings: Unpack[Arguments],
) -> Session:
    """Start a training session: run the rendezvous, check that all workers agree, and return the session.

    A script that is started directly trains in one process. Under ``paceline run`` or ``torchrun`` every worker must
    call this function with the same arguments.

    Args:
        model: model, built identically on every worker (set the seed first), or under :func:`paceline.deferred`. Moved
            to the worker's device.
        optimizer: factory that is called with the list of trainable parameters, such as
            ``partial(torch.optim.SGD, lr=0.1)``. If its first parameter is named ``named_parameters``, it receives
            (name, parameter) pairs; if it is named ``model``, the model. It returns a torch optimizer, or several
            optimizers of disjoint parameters as a dictionary or list.
        data: map-style data set with ``__len__`` and ``__getitem__``, or a stream of unknown length that can be
            iterated over repeatedly. With ``loss``, each item is a pair (input, target).
        loss: ``loss(output, target)``. Returns a scalar tensor, the mean over the given samples, or a pair (sum, count)
            for a mean over other units, such as tokens. To report metrics, return (loss, dictionary of metrics).
        forward: ``forward(model, microbatch)``, given instead of ``loss``, with the same return values. For losses that
            alternate, a dictionary with one function per optimizer name. ``forward(model, microbatch, state)`` returns
            (loss, next state), for the microbatch with this index in the next batch; samples are then not shuffled.
        batch_loss: ``batch_loss(outputs, batch)``, a loss over the whole batch, such as a contrastive loss, with the
            same return values as ``loss``. It needs ``forward``, which then returns the outputs of a microbatch: a
            tensor of shape [samples, ...], a :class:`paceline.Sum`, or a dictionary of these.
        schedule: factory that is called with the optimizer and returns a torch learning-rate scheduler, which is
            stepped once per update without a metric. With several optimizers, one factory for all or one per name.
        collate: function from a list of items to a microbatch. Defaults to torch's ``default_collate``.
        sampler: ``sampler(seed, epoch)``, a pure function that returns the sample indices of an epoch in order, or its
            batches as lists of indices; or a torch sampler. Defaults to a new shuffle in each epoch.
        microbatch_order: how a batch is cut into microbatches: :func:`paceline.in_turn`, ``paceline.by_length(...)``,
            ``by_tokens(...)`` or ``by_class(...)``, or a pure function of (sample indices, number of microbatches) that
            returns the indices of each microbatch. Defaults to slices of the batch.
        settings: fields of :class:`paceline.Settings`. Command-line options, environment variables and the plan file
            take precedence.

    Raises:
        ConfigError, InputError: a setting or an argument is invalid.
        StartError: the workers could not connect, or they disagree (:class:`paceline.DisagreementError`).
        CheckpointError: the checkpoint in ``resume`` or the weights in ``weights`` cannot be read or do not match.
    """
    given = Components(model, optimizer, data, loss, forward, schedule, collate, sampler, batch_loss, microbatch_order)
    return Session(set_up(given, settings), by_loss=loss is not None)


@explained
class Session:
    """This worker's handle on a training run. Created by :func:`paceline.start`."""

    def __init__(self, run: Run, *, by_loss: bool) -> None:
        self._context, self._loop, self._tracking = run.context, run.loop, run.tracking
        self._by_loss = by_loss
        self._state, self._script, self._notes = run.state, run.script, run.notes
        self._batches, self._evaluations, self._exports = Batches(run.loop), Evaluations(run.loop), Exports(run.loop)

    @property
    def rank(self) -> int:
        """Rank of this worker, from 0. In an elastic run it may change between steps."""
        return self._context.world.rank

    @property
    def is_main(self) -> bool:
        """Whether this worker has rank 0. Another worker becomes rank 0 if rank 0 is lost."""
        return self.rank == 0

    @property
    def workers(self) -> int:
        """Number of workers."""
        return self._context.world.size

    @property
    def device(self) -> torch.device:
        """Device of this worker's model."""
        return self._context.world.device

    @property
    def position(self) -> int:
        """Number of steps since the beginning of training. A resumed run continues from this step."""
        return self._loop.position.steps

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps in the current epoch. Epochs may differ in length.

        Raises:
            ConfigError: the data is a stream whose end has not been reached.
        """
        return self._context.order.steps_at(self.position)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Optimizer, for reading hyperparameters or changing them between steps, equally on all workers.

        Raises:
            ConfigError: with this strategy, not every worker makes every update.
        """
        return self._exports.optimizer

    def epochs(self, first: int, end: int | None = None) -> Iterator[int]:
        """Return an iterator over epoch numbers. ``epochs(end)`` and ``epochs(first, end)`` count like ``range``.

        ``first`` is the number of the first epoch of the run. After a resume, or on a worker that joins, iteration
        begins with the current epoch of the run and skips completed epochs.

        Raises:
            ConfigError: an argument is not a non-negative integer.
        """
        return self._batches.epochs(first, end)

    def batches(self, *, epochs: int | None = None, steps: int | None = None) -> Iterator[Batch]:
        """Return an iterator over batches: the rest of the current epoch, or the next ``epochs`` or ``steps``.

        A second call continues where the first one stopped, and closes the first iterator. A resumed run makes the same
        calls and skips completed batches, except the last one, which it yields again because the code after its
        :meth:`step` call had not run when the checkpoint was saved. A batch that is not passed to :meth:`step` is left
        out of training.

        Raises:
            ConfigError: both ``epochs`` and ``steps`` are given, or the value is not a non-negative integer.
        """
        return self._batches.batches(epochs=epochs, steps=steps)

    def step(self, batch: Batch = _NO_BATCH, optimizer: str | None = None) -> Report:
        """Train on a batch: forward, backward, reduce gradients, update; then save a checkpoint if one is due.

        Args:
            batch: batch from :meth:`batches`.
            optimizer: name of an optimizer, if the session has one forward function per optimizer. Call step once for
                each, with the same batch. Only that optimizer's parameters get gradients and are updated.

        Raises:
            ConfigError: ``optimizer`` is missing, unknown or not applicable, or the call is inside :meth:`averaged`.
            NonFiniteLoss: a loss is NaN or infinite, unless ``nonfinite`` is ``"skip"``.
            InputError: the batch is out of date; the loss is not a scalar; a parameter gets no gradient from some
                microbatches, or a sparse one; the forward pass changes a weight; the optimizer or model does not
                support several workers.
            DisagreementError: the workers are at different steps.
            WorkerLost: another worker has exited or has not responded before the timeout.
            CheckpointError: a checkpoint that was due could not be written, or an earlier background save failed.
        """
        self._context.update.averages.check_training()
        result, seconds = self._loop.step(batch, phase_of(self._context, optimizer))
        return report_of(self._context, batch, result, seconds, self._loop.records.throughput, self._notes)

    def evaluate(
        self,
        data: Any,
        metric: Callable[..., Any] | Mapping[str, Any] | Any = None,
        *,
        forward: Callable[[nn.Module, Any], Any] | None = None,
    ) -> Any:
        """Return the mean of a metric over a data set, equal on all workers. Every worker must call it.

        Args:
            data: map-style data set or stream, with items like the training data. Each sample is used exactly once.
            metric: ``metric(output, target)``, or ``metric(model, microbatch)`` in a session with ``forward``. Returns
                a number, the mean over the given samples, or a pair (sum, count). Alternatively an object with
                ``update(output, target)``, ``compute()`` and ``reset()``, as in torchmetrics, or a dictionary of
                metrics by name. Defaults to the loss.
            forward: ``forward(model, microbatch)``. Returns the arguments for ``metric``, such as (output, target).

        Returns:
            the mean or ``compute()`` value of the metric, or a dictionary of them with the keys of ``metric``.

        Raises:
            InputError: the data set is empty, a metric does not return a number or changes a weight of the model, or
                the call failed on another rank, whose error is quoted.
            DisagreementError: samples of a stream, or weights (checked only with ``exact``), differ between workers.
            WorkerLost: another worker has exited or has not responded before the timeout.
        """
        metrics = Metrics(self._context, metric, forward, by_loss=self._by_loss)
        value = self._evaluations.evaluate(metrics, data)
        self._tracking.evaluated(
            metric, value if isinstance(value, float) else numbers_in(value, ""), self._loop.position.last
        )
        return value

    def predict(
        self, data: Any, forward: Callable[[nn.Module, Any], Any] | None = None, *, everywhere: bool = True
    ) -> Any:
        """Return the model's outputs for a data set, in sample order. Every worker must call it.

        Args:
            data: data set, as for :meth:`evaluate`.
            forward: ``forward(model, microbatch)``. Returns tensors of shape [samples, ...], lists with one entry per
                sample, or tuples and dictionaries of these. Defaults to the model's output in a session with ``loss``;
                required in a session with ``forward``.
            everywhere: whether all ranks receive the outputs. If false, ranks other than 0 return None.

        Returns:
            the outputs of all microbatches, concatenated along the sample dimension, in host memory.

        Raises:
            InputError: the data set is empty, the outputs cannot be gathered, or ``forward`` is required.
            DisagreementError, WorkerLost: as for :meth:`evaluate`.
        """
        return self._evaluations.predict(Predictions(forward, by_loss=self._by_loss), data, everywhere)

    def map(self, function: Callable[[Any], _T], items: Iterable[Any]) -> list[_T]:
        """Return ``[function(item) for item in items]``, computed on all workers. Every worker must call it.

        Each item is computed once, with random numbers of its own and the model in evaluation mode, without gradients.
        Others compute the items of a lost worker. Checkpoints keep the results of the current epoch, or outside of
        :meth:`epochs` those of all calls.

        Args:
            function: function of an item. It returns numbers, strings, tensors or containers of these, may read the
                model, and must not change it or call methods of the session.
            items: items, the same on all workers, or the shards of a :class:`paceline.data.Located`, by their names.

        Returns:
            the results in the order of the items, the same on all workers, with tensors in host memory.

        Raises:
            DisagreementError, InputError, WorkerLost: as for :meth:`evaluate`, or a result cannot be sent.
        """
        return self._evaluations.map(function, items)

    def log(self, values: Mapping[str, Any]) -> None:
        """Record numbers, strings and images of the script, by name, at the last completed step.

        Rank 0 writes an event and passes the values to the trackers. Other ranks only record the numbers, in their own
        event files, in case rank 0 is lost. A name is recorded at most once per step. Texts and images become files.

        Args:
            values: mapping of names to numbers, tensors of one element, strings, or images. An image is a tensor
                [channels, height, width] of uint8, or of floats from 0 to 1, with 1 to 4 channels.

        Raises:
            InputError: a name or value cannot be recorded.
        """
        self._tracking.log(values, self._loop.position.last)

    def register(self, **values: Any) -> Registered:
        """Add values of the script to the checkpoints. They are restored on resume and sent to workers that join.

        Args:
            values: numbers, strings, tensors, containers of these, or objects with ``state_dict`` and
                ``load_state_dict``. All workers must register the same. Copied after each step, so keep them small.

        Returns:
            an object with the values as attributes. To change a plain value, assign to its attribute.

        Raises:
            InputError: a name is already registered, a value cannot be saved, or its type differs from the checkpoint.
        """
        self._script.register(values)
        return Registered(self._script, tuple(values))

    def once(self, act: Callable[..., _T], *args: Any, **kwargs: Any) -> _T:
        """Call a function, such as a download, on rank 0 only, and return its result on all workers. Others wait.

        Workers that join later receive the stored result, as does a resumed run, which repeats only calls made before
        the first batch or epoch. If rank 0 is lost during the call, the next rank 0 calls the function again.

        Args:
            act: function that is called with ``args`` and ``kwargs``. It must return numbers, strings, tensors,
                containers of these, or None, must finish within ``timeout_seconds``, and must not call methods of the
                session that all workers take part in.

        Raises:
            InputError: the function raised (rank 0 raises the error itself), or its result has an unsupported type.
            WorkerLost: not enough workers are left.
        """
        return cast("_T", self._evaluations.once(act, *args, **kwargs))

    def extend(self, samples: list[Any]) -> None:
        """Append samples to the data, a :class:`paceline.data.Growing`. Every worker must call it.

        The epoch that is running stays as it is; the next one has the samples. Checkpoints contain them, and workers
        that join receive them. A resumed script repeats only the additions after the checkpoint's last step.

        Args:
            samples: list of samples, the same on all workers: tensors, arrays, numbers, strings, containers of these.

        Raises:
            ConfigError, InputError: the data is not ``Growing``, or a sample has another type.
            DisagreementError, WorkerLost: the samples differ between workers, or another worker has exited.
        """
        self._evaluations.extend(samples)

    def print(self, *values: object, sep: str = " ", end: str = "\n") -> None:
        """Print ``values`` on rank 0, with ``sep`` and ``end`` as in Python. A resumed script repeats no output."""
        if self.is_main and self._loop.position.asked >= self._loop.progress.received:
            print(*values, sep=sep, end=end, flush=True)  # noqa: T201 - the script's own output

    def save(self) -> Path | str:
        """Write a checkpoint of the current state and return its directory or URL. Every worker must call it.

        Rank 0 writes the checkpoint, which is durable when the call returns on rank 0. Other ranks wait for it only
        with ``--elastic``, and write it if rank 0 is lost. A complete checkpoint of this step is left as it is.

        Raises:
            CheckpointError: no checkpoint directory is set, or this save or an earlier background save failed.
        """
        return self._loop.save()

    def averaged(self) -> AbstractContextManager[None]:
        """Return a context manager in which :meth:`evaluate`, :meth:`model_state` and :meth:`export` use the average.

        The setting ``average`` enables averaging. The model keeps the trained weights; :meth:`step` raises ConfigError.

        Raises:
            ConfigError: ``average`` is not set.
        """
        return self._context.update.averages.choose()

    def model_state(self, *, everywhere: bool = True) -> dict[str, Any]:
        """Return the complete weights, with the keys of ``model.state_dict()``, as copies in host memory.

        Every worker must call it. In a pipeline, ``model.state_dict()`` has current values for this worker's stages
        only; this method returns all weights. A tensor with several names, such as a tied weight, is copied once.

        Args:
            everywhere: whether all ranks receive the weights. If false, ranks other than 0 return an empty dictionary.

        Raises:
            WorkerLost: another worker has exited or has not responded before the timeout.
        """
        return self._exports.weights(everywhere)

    def export(
        self, path: Path | str, *, dtype: torch.dtype | None = None, max_shard_size: int = 5_000_000_000
    ) -> Path | str:
        """Write the complete weights to a file on rank 0, atomically, and return when it is complete. All must call it.

        Args:
            path: path or URL that ends in ``.safetensors``, or in ``.pt``, ``.pth`` or ``.bin`` for a torch state_dict.
            dtype: type of floating-point tensors in the file, such as ``torch.bfloat16``. Defaults to their own types.
            max_shard_size: bytes above which safetensors go to several files with an index, as with Hugging Face.

        Returns:
            the absolute path, or the URL, from which :func:`paceline.start` reads the weights, even in several files.

        Raises:
            ConfigError, CheckpointError: an argument is not valid, the file cannot be written, or a package is missing.
            WorkerLost: another worker has exited or has not responded before the timeout.
        """
        return self._exports.export(path, dtype, max_shard_size)

    def fingerprint(self) -> str:
        """Return the SHA-256 of parameters, buffers and optimizer state, as 64 hexadecimal digits.

        The value is equal on all ranks, and a rank may call this without the others. With an asynchronous strategy,
        local SGD or a pipeline, call it after the last batch of :meth:`batches`, :meth:`evaluate` or :meth:`save`,
        and with sharded training after the last batch of :meth:`batches` or :meth:`save`.

        Raises:
            InputError: in sharded training the call is after another step.
        """
        return self._state.fingerprint()
