"""Sample order of a data set that grows: epochs of different lengths, each fixed when the epoch begins.

::

    step      0   1   2   3   4   5   6   7        batches of 4
    epoch     0───────1───────2───────────────
    length    8       8   ▲   14                   6 samples are added after step 2, in epoch 1

Each addition is an entry of the log: when the script made it, the first epoch that has the samples, and their number
from then on. The log and the samples are the state. They only grow, and follow from the script alone, so of two states
of a run the shorter one is the beginning of the longer one. A checkpoint has the samples added when its last step
returned: a resumed script runs the code after that step again.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import islice
from typing import Any, NamedTuple

import torch

from paceline.data.growing.samples import Growing, samples_in
from paceline.data.order import UNKNOWN, BatchOrder, Order
from paceline.errors import InputError
from paceline.schedule import feistel

Call = tuple[int, int, int]
"""Position of a call in the script, see ``training.progress``."""


class Entry(NamedTuple):
    """Entry of the log."""

    asked: int  # position of the call in the script: these three numbers
    epoch: int
    among_batches: int
    steps: int  # number of completed steps when the samples were added
    first: int  # first epoch that has the samples
    samples: int  # number of added samples from then on


class Additions(NamedTuple):
    """Samples to add, encoded."""

    samples: list[bytes]
    steps: int  # number of completed steps
    begun: int  # number of steps whose batch the script has received or passed


class Epochs(NamedTuple):
    """Epochs of one length, from an epoch and its first step on."""

    epoch: int
    step: int
    before: int  # number of samples in all earlier steps
    order: Order


class GrowingOrder(BatchOrder):
    """Shuffled order of a data set that grows. Without additions it is the order of a data set of fixed length."""

    grows = True

    def __init__(self, data: Growing, batch: int, microbatches: int, seed: int, drop_last: bool) -> None:
        self.batch, self.microbatches, self.seed, self.drop_last = batch, microbatches, seed, drop_last
        self.data, self._initial = data, len(data.initial)
        self._log: list[Entry] = []
        self._calls: dict[Call, list[int]] = {}  # numbers of the entries by position in the script
        self._epochs = [Epochs(0, 0, 0, self._order_of(self._initial))]

    def _order_of(self, length: int) -> Order:
        return Order(length, self.batch, self.microbatches, self.seed, self.drop_last)

    def facts(self) -> dict[str, int]:
        return {"growing": self._initial, "feistel": feistel.ROUNDS, **super().facts()}

    def agreed(self) -> dict[str, object]:
        return {"data length before training": self._initial, **super().agreed()}

    def place_of(self, step: int) -> tuple[int, int]:
        epochs = self._epochs_of(step)
        steps = epochs.order.steps_per_epoch
        epoch, index = divmod(step - epochs.step, steps) if steps else (0, 0)
        return epochs.epoch + epoch, index

    def _epochs_of(self, step: int) -> Epochs:
        return self._epochs[bisect_right(self._epochs, step, key=lambda one: one.step) - 1]

    def first_of(self, epoch: int) -> int:
        epochs = self._epochs[bisect_right(self._epochs, epoch, key=lambda one: one.epoch) - 1]
        steps = epochs.order.steps_per_epoch
        return epochs.step + (epoch - epochs.epoch) * steps if steps or epoch == epochs.epoch else UNKNOWN

    def steps_at(self, step: int) -> int:
        return self._fixed(step)[0].steps_per_epoch

    def _check(self, order: Order) -> None:
        """Raise InputError if an epoch of this order has no batch."""
        if order.steps_per_epoch:
            return
        what = "is empty"
        if order.length:
            what = f"has {order.length} samples, less than one batch of {self.batch}, and drop_last leaves nothing"
        raise InputError(
            f"The data set {what}: call session.extend(samples) before the first batch, or give Growing(samples) "
            f"enough at the start. A pipeline needs samples at the start, to measure its stages."
        )

    def samples_of(self, step: int) -> int:
        order, same = self._fixed(step)
        return order.samples_of(same)

    def _fixed(self, step: int) -> tuple[Order, int]:
        """Return the order of a data set of the length of this epoch, and the step that has the same batch in it."""
        order, (epoch, index) = self._epochs_of(step).order, self.place_of(step)
        self._check(order)
        return order, order.first_of(epoch) + index

    def samples_before(self, step: int) -> int:
        epochs = self._epochs_of(step)
        return epochs.before + (epochs.order.samples_before(step - epochs.step) if step > epochs.step else 0)

    def numbers_of(self, step: int) -> list[int]:
        order, same = self._fixed(step)
        return order.numbers_of(same)

    def _compared(self) -> list[int]:
        return super()._compared() if self._epochs[0].order.steps_per_epoch else []

    def _of_cut(self) -> dict[str, int]:
        first = self._order_of(self._initial)  # the same before and after samples are added
        first.cut = self.cut if first.steps_per_epoch else None
        return first._of_cut()

    def results(self, kind: str, call: Call) -> list[int]:
        """Return the numbers of the entries that were added by calls at this position in the script, in order."""
        return self._calls.get(call, [])

    def add_result(self, kind: str, call: Call, additions: Additions) -> None:
        """Append samples to the data set, for a call at this position in the script."""
        epoch, index = self.place_of(additions.begun)
        self.data.added.add(additions.samples)
        self._add(Entry(*call, additions.steps, epoch + (index > 0), self.data.added.count))

    def _add(self, entry: Entry) -> None:
        step = self.first_of(entry.first)
        begin = Epochs(entry.first, step, self.samples_before(step), self._order_of(self._initial + entry.samples))
        if self._epochs[-1].epoch == entry.first:
            self._epochs.pop()
        self._epochs.append(begin)
        self._calls.setdefault(entry[:3], []).append(len(self._log))
        self._log.append(entry)

    @property
    def entries(self) -> int:
        """Number of entries of the log."""
        return len(self._log)

    def count_at(self, given: int, epoch: int | None, made: int) -> int:
        """Return the number of samples that were added up to a position in the script.

        Args:
            given: last step whose batch the script received.
            epoch: epoch of ``session.epochs``, if the script is in that loop.
            made: number of entries up to that of the script's last call.
        """
        before = len(self._log)
        while before > made and not self._is_before(self._log[before - 1], given, -1 if epoch is None else epoch):
            before -= 1
        return self._log[before - 1].samples if before else 0

    @staticmethod
    def _is_before(entry: Entry, given: int, epoch: int) -> bool:
        """Return whether a resumed script that has come this far has skipped the call of an entry, or made it."""
        return entry.steps <= given or 0 <= entry.epoch < epoch

    def state(self, step: int) -> dict[str, Any]:
        """Return the state when ``step`` steps had returned."""
        return self.state_from(0, bisect_left(self._log, step, key=lambda one: one.steps))

    def state_from(self, start: int, stop: int | None = None) -> dict[str, Any]:
        """Return the entries ``start`` to ``stop`` (exclusive) of the log, or to its end, with their samples."""
        if not (log := self._log[start:stop]):
            return {}
        first = self._log[start - 1].samples if start else 0
        blocks = self.data.added.tensors(first, log[-1].samples)
        return {"start": start, "log": torch.tensor(log), "blocks": blocks}

    def load(self, state: dict[str, Any]) -> None:
        """Append the entries of a state that this worker does not have."""
        if not state:
            return
        new = [Entry(*one) for one in state["log"].tolist()[len(self._log) - state["start"] :]]
        added = self.data.added
        first = state["start"] and self._log[state["start"] - 1].samples
        if new:
            added.add(islice(samples_in(state["blocks"]), added.count - first, None))
        for entry in new:
            self._add(entry)
