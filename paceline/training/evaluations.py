"""Collective calls of the script other than steps: ``evaluate``, ``predict``, ``map`` and ``once``.

If a worker is lost during a call, the remaining workers repeat it. Results of all but ``predict`` are stored for
resumed runs and for workers that reach the call later. Predictions are too large to store, so a worker that reaches
``predict`` later computes them alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, cast

import torch

from paceline.checkpoint import encoding
from paceline.comm import values
from paceline.comm.world import World
from paceline.data.growing.agreement import agree, encoded
from paceline.data.growing.order import Additions, GrowingOrder
from paceline.data.located.shards import Located
from paceline.data.nested import map_tensors
from paceline.errors import ConfigError, InputError
from paceline.evaluation.gathering import attempt, share_failure
from paceline.evaluation.mapping import Known, map_items
from paceline.evaluation.measure import Measure, evaluate, evaluate_alone
from paceline.step.loss import described
from paceline.training.loop import TrainingLoop
from paceline.training.progress import EVALUATE, EXTEND, MAP, ONCE, PREDICT, Call

_log = logging.getLogger("paceline")
_NO_RESULT = (
    "evaluate: the checkpoint has no result of this call after step %d, because the script was different then, or the "
    "checkpoint is of an older version: the model of step %d is evaluated instead."
)
_NO_MAP = "map: the run has no results of this call, which follows step %d: the model of step %d computes them instead."
_PAST = "predict: the run has continued after this call, which follows step %d: the model of step %d predicts instead."


class Evaluations:
    """Evaluation, prediction and rank-0 calls at the script's current position."""

    def __init__(self, loop: TrainingLoop) -> None:
        self._loop = loop
        self._context = loop.context
        self._growing: GrowingOrder | None = None
        self._entries = 0  # of the data set's log, up to that of the script's last call of extend
        if isinstance(loop.context.order, GrowingOrder):
            self._growing = loop.context.order
            self._growing.data.visible = self._visible

    def evaluate(self, measure: Measure, data: Any) -> Any:
        """Evaluate a measure on a data set. A worker that joined later gets the stored results of earlier evaluations.

        Raises:
            InputError, DisagreementError: as for :func:`paceline.evaluation.measure.evaluate`.
        """
        loop = self._loop

        def act(call: Call) -> tuple[Any, int]:
            self._warn_of_past(_NO_RESULT, call)
            with self._context.update.averages.in_place():
                return evaluate(self._context, loop.progress.steps, measure, data)

        with self._context.events.span("evaluate", step=loop.position.steps):
            value = loop.make(EVALUATE, "evaluating", act)
        loop.position.stay()
        return value

    def predict(self, measure: Measure, data: Any, everywhere: bool) -> Any:
        """Return the outputs for all samples, or None on ranks other than 0 unless ``everywhere``.

        Raises:
            InputError, DisagreementError, WorkerLost: as for :meth:`evaluate`.
        """
        loop, context = self._loop, self._context
        found: list[Any] = []

        def act(call: Call) -> tuple[None, int]:
            self._warn_of_past(_PAST, call)
            with context.update.averages.in_place():
                outputs, notice = evaluate(
                    context, loop.progress.steps, measure, data, "predict", everywhere=everywhere
                )
            found[:] = [outputs] if everywhere or context.world.rank == 0 else []
            return None, notice

        def come_later(call: Call) -> None:
            """Compute the outputs alone, on a worker that joined later or became rank 0 after the call."""
            if not found and (everywhere or context.world.rank == 0):
                self._warn_of_past(_PAST, call)
                loop.activity.begin("predicting", busy=True)
                with context.update.averages.in_place(alone=True):
                    found.append(evaluate_alone(context, loop.progress.steps, measure, data, "predict"))

        with context.events.span("predict", step=loop.position.steps):
            loop.make(PREDICT, "predicting", act, come_later)
        loop.position.stay()
        return found[0] if found else None

    def map(self, function: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
        """Return ``function(item)`` for all items, in order. See :meth:`paceline.Session.map`."""
        if not callable(function) or not isinstance(items, Iterable):
            raise InputError(
                f"session.map takes a function and items, but it got {described(function)} and {described(items)}. "
                f"Write session.map(function, items), where function(item) returns the result for an item."
            )
        loop, given = self._loop, items if isinstance(items, Located) else list(items)
        found: dict[tuple[int, ...], Known] = {}

        def compute(name: str, item: Any) -> Any:
            # a worker is late if one item takes too long, but a pass over a shard takes as long as it is large
            loop.activity.begin(f"in {name} of session.map", busy=isinstance(items, Located))
            return function(item)

        def act(call: Call) -> tuple[list[Any], int]:
            self._warn_of_past(_NO_MAP, call)
            progress = loop.progress
            key = *call, len(progress.results(MAP, call))
            progress.forget_maps(self._context.order.epoch_of(max(0, progress.steps - 1)))
            with self._context.update.averages.in_place():
                return map_items(self._context, key, progress.steps, compute, given, found.setdefault(key, Known()))

        with self._context.events.span("map", step=loop.position.steps):
            results = loop.make(MAP, "in session.map", act)
        loop.position.stay()
        return cast("list[Any]", map_tensors(torch.clone, results))  # the script may change tensors in place

    def once(self, act: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``act`` on rank 0 and return its result on all workers. See :meth:`paceline.Session.once`."""
        if not callable(act):
            raise InputError(
                f"session.once takes a function, which rank 0 calls, and not its result, but it got "
                f"{described(act)}. Write session.once(function, its, arguments)."
            )
        loop = self._loop

        def act_alone(_: Call) -> tuple[Any, int]:
            loop.activity.begin("in session.once", busy=True)
            return _on_rank_0(self._context.world, partial(act, *args, **kwargs))

        value = loop.make(ONCE, "in session.once", act_alone)
        loop.position.stay()
        return value

    def extend(self, samples: Any) -> None:
        """Add samples to the data set, the same on all workers. See :meth:`paceline.Session.extend`."""
        loop, order = self._loop, self._growing
        if order is None:
            raise ConfigError(
                "session.extend adds samples to a data set that grows: give start(data=paceline.data.Growing(samples))."
            )

        def act(call: Call) -> tuple[Additions, int]:
            if loop.position.given < loop.progress.received - 1:
                raise InputError(
                    f"session.extend after step {call[0] - 1}: the run is at step {loop.progress.steps} and has no "
                    f"such call, so the script was different before. Start a new run."
                )
            given, error = attempt(lambda: encoded(samples))
            share_failure(self._context, error, "extend")
            assert given is not None
            notice = agree(self._context.world, given)
            begun = max(loop.position.steps, loop.position.given + 1)
            return Additions(given, loop.progress.steps, begun), notice

        with self._context.events.span("extend", step=loop.position.steps):
            self._entries = 1 + loop.make(EXTEND, "in session.extend", act, calls=order)

    def _visible(self) -> int:
        """Return the number of samples that were added up to the position of the script."""
        assert self._growing is not None
        return self._growing.count_at(self._loop.position.given, self._loop.position.epoch, self._entries)

    def _warn_of_past(self, text: str, call: Call) -> None:
        progress = self._loop.progress
        if call[0] < progress.received and self._context.world.rank == 0:
            _log.warning(text, call[0] - 1, progress.steps - 1)


def _on_rank_0(world: World, act: Callable[[], Any]) -> tuple[Any, int]:
    """Call ``act`` on rank 0. Return its result on all workers, and the largest notice of any worker (``comm.world``).

    If ``act`` raises, rank 0 raises that error and the other ranks raise an error that quotes it.
    """
    value, failed, error = None, "", None
    if world.rank == 0:
        try:
            value = act()
            failed = _unsendable(value)
        except Exception as raised:  # noqa: BLE001 - raised again as soon as the others know
            value, error, failed = None, raised, f"{type(raised).__name__}: {raised}"
    everyone = world.gather((None if failed else value, failed, world.notice()), "once")
    value, failed, _ = everyone[0]
    if error is not None:
        raise error
    if failed:
        raise InputError(f"session.once failed on rank 0: {failed}")
    return value, max(notice for *_, notice in everyone)


def _unsendable(value: Any) -> str:
    """Return why a value cannot be sent to other workers or saved in a checkpoint; empty if it can."""
    try:
        encoding.encode(value, {}, "what it returned")
        values.encode(value)
    except (encoding.EncodingError, TypeError) as error:
        return f"{error}; it may return numbers, text, tensors, and containers of these, or nothing."
    return ""
