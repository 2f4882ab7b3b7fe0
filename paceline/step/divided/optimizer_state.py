"""State of an optimizer of which each worker has a share, hashed and saved without putting it together on any worker.

::

    hash    worker 0   a ── hash of a ┐              each tensor on the worker with the most elements of it
            worker 1   b ── hash of b ┴ fingerprint
    save    worker 0   a ─ b ─ file                  one tensor after the other, in rounds (step.divided.tensors)
            worker 1   b ──┘
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch

from paceline.checkpoint.tensors import StreamedTensors, hash_of
from paceline.checkpoint.weights.deferred.heap import FreedMemory
from paceline.step.context import TrainingContext
from paceline.step.divided.consolidate import shape_of
from paceline.step.divided.tensors import Division

_SAVING = "saving a checkpoint"


class DividedOptimizerState:
    """See ``checkpoint.training_state.DividedState``.

    Args:
        own: function that returns this worker's tensors and slices of tensors by name (``schedule.slices``).
        prefix: prefix of their names, or prefixes.
    """

    def __init__(
        self,
        context: TrainingContext,
        own: Callable[[], Mapping[str, torch.Tensor]],
        prefix: str | tuple[str, ...] = "optimizer/",
    ) -> None:
        self._context, self._world, self._own, self.prefix = context, context.world, own, prefix
        self._coming: Iterator[tuple[str, torch.Tensor]] = iter(())
        self.hashes: Mapping[str, str] | None = None
        self._collecting = False

    def _division(self, what: str) -> Division:
        FreedMemory().trim()  # memory that steps have freed, before tensors are put together in new memory
        return Division(self._world, self._own(), partial(shape_of, self._context), what)

    def hash(self) -> None:
        """Hash all tensors, each on one worker, for ``hashes``. All workers call this together."""
        what = "synchronizing"
        division = self._division(what)
        tensors = division.put_together([*division.parts], lambda name: (division.owner_of(name),))
        found = {}
        for name, value in tensors:
            found[name] = hash_of(value).hex()
            del value  # before the next one arrives
        everyone = self._world.gather(found, what)
        self.hashes = {name: text for one in everyone for name, text in one.items()}

    def collect(self, local: Mapping[str, torch.Tensor]) -> StreamedTensors:
        self._collecting = True
        division = self._division(_SAVING)
        return StreamedTensors(local, division.kinds, partial(self._receive, division))

    def _receive(self, division: Division, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        self._drain()
        self._world.gather([*names], _SAVING)
        self._coming = division.put_together(names, _to_rank_0)
        return self._coming

    def _drain(self) -> None:
        """Receive the remaining messages of the others, because the last reader did not read to the end."""
        for _ in self._coming:
            pass

    def send(self) -> None:
        division = self._division(_SAVING)
        while (names := self._world.gather(None, _SAVING)[0]) is not None:
            for _ in division.put_together(names, _to_rank_0):
                pass

    def end(self) -> None:
        """See ``DividedState``. The others may wait for a :meth:`collect` that an error has prevented."""
        if not self._collecting:
            self._division(_SAVING)
        self._collecting = False
        self._drain()
        self._world.gather(None, _SAVING)


def _to_rank_0(_: str) -> tuple[int]:
    return (0,)
