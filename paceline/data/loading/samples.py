"""Reading of samples by load requests.

Random numbers that a data set draws for a sample (augmentation) are keyed by (seed, epoch, sample), so they do not
depend on the worker or loader process that draws them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils.data import Dataset, TensorDataset

from paceline.data.growing.samples import Growing
from paceline.data.keys import COLLATE, SAMPLE, preserve_generators, seed_all, seed_of, seed_untouched, was_drawn
from paceline.data.loading.prefetch import rows_of
from paceline.data.located.order import LocatedOrder
from paceline.data.located.shards import Located
from paceline.data.objects.attributes import Attributes, same
from paceline.data.streams.order import StreamOrder
from paceline.errors import InputError
from paceline.system import fault_points
from paceline.system.user_code import in_user_call

_log = logging.getLogger("paceline")


class LoadRequest(NamedTuple):
    """Request to a loader for samples of an epoch, and the step that needs them, if any."""

    epoch: int
    samples: list[int]
    step: int | None = None


class TensorRows(NamedTuple):
    """Collated samples of a ``TensorDataset``: a tensor for each tensor of the data set."""

    tensors: list[torch.Tensor]


def collated(items: list[Any] | TensorRows, collate: Callable[[list[Any]], Any]) -> Any:
    """Collate the items of :class:`KeyedDataset`. The rows of a ``TensorDataset`` are already collated."""
    return items.tensors if isinstance(items, TensorRows) else collate(items)


def fixed_part(data: Any) -> Any:
    """Return the samples that a data set has before training: all, or those before the first that was added."""
    return data.initial if isinstance(data, Growing) else data


class KeyedDataset(Dataset[Any]):
    """Map-style data set whose random draws are keyed by (seed, epoch, sample).

    Requests are read without keys until a request uses a global generator of torch, Python or NumPy. From that request
    on, samples are read with a key each. A data set without random draws has no overhead.

    Args:
        collates: whether a function of the user collates.
        stops: whether a sample that differs when it is read again raises InputError (True) or logs a warning (False).
            With None, no sample is read again.
    """

    def __init__(self, data: Any, seed: int, collates: bool, stops: bool | None = None) -> None:
        self._data, self._seed, self._collates = data, seed, collates
        self._fixed = fixed_part(data)
        parts = data.shards.values() if isinstance(data, Located) else (self._fixed,)
        self.is_plain = all(type(part) in (TensorDataset, list, tuple) for part in parts)
        self._tensors: tuple[torch.Tensor, ...] = ()
        if type(data) is TensorDataset and not collates:  # indexing takes less than half the time of single reads
            self._tensors = data.tensors
        self._draws = False
        self._stops = stops

    def __getitems__(self, request: LoadRequest) -> list[Any] | TensorRows:
        if request.step is not None:
            fault_points.reach("in the loader", request.step)
        if self._tensors:
            samples = torch.tensor(request.samples)
            return TensorRows([rows_of(tensor, samples) for tensor in self._tensors])
        first = self._stops is not None and not self.is_plain
        sizes = self._attributes().sizes if first else {}
        items = self._items(request)
        if first:
            self._read_again(request, items[0], sizes)
        if self._collates:  # the collate function may draw, too
            seed_all(seed_of(COLLATE, self._seed, request.epoch, request.samples[0]))
        return items

    def _items(self, request: LoadRequest) -> list[Any]:
        if self.is_plain:
            return self._read(request.samples)
        if not self._draws:
            seed_untouched()
            items = self._read(request.samples)
            if not was_drawn():
                return items
            self._draws = True
        return [self._read_keyed(request.epoch, sample) for sample in request.samples]

    def _read(self, samples: list[int]) -> list[Any]:
        if hasattr(self._data, "__getitems__"):
            items = list(self._data.__getitems__(samples))
            if len(items) != len(samples):
                raise InputError(
                    f"{type(self._data).__name__}.__getitems__ returned {len(items)} samples when it was asked for "
                    f"{len(samples)}. The shares of a batch in its mean are those of the samples asked for: return one "
                    f"for each, in the same order."
                )
            return items
        return [self._read_one(sample) for sample in samples]

    def _read_keyed(self, epoch: int, sample: int) -> Any:
        seed_all(seed_of(SAMPLE, self._seed, epoch, sample))
        return self._read_one(sample)

    def _read_one(self, sample: int) -> Any:
        try:
            return self._data[sample]
        except Exception as error:
            in_user_call(error, f"The data set was asked for sample {sample}.")
            raise

    def _attributes(self) -> Attributes:
        return Attributes({"data": self._fixed}, set(), copies=False)

    def _read_again(self, request: LoadRequest, item: Any, sizes: dict[str, int]) -> None:
        """Read samples of the first request again, and check that they repeat and draw again. Undo all side effects.

        Args:
            sizes: sizes of the containers in the data set before the first read.
        """
        stops, self._stops = self._stops, None
        sample, keeps = request.samples[0], False
        before = self._attributes()
        try:
            with preserve_generators():
                again = self._read_keyed(request.epoch, sample)
                after = self._attributes().values
                if self._draws:
                    seed_untouched()
                    self._read(request.samples)
                    keeps = not was_drawn()
        finally:
            before.put_back()
        drawn = [name for name, value in before.generators() if not same(value, after.get(name, value))]
        if drawn or not same(item, again):
            because = f"it draws from {drawn[0]}" if drawn else "it depends on earlier reads"
            text = (
                f"The data set gives a different sample {sample} when it is read again: {because}. Each worker reads "
                f"other samples, so the result depends on the number of workers. Draw from the global generators of "
                f"torch, random or numpy, which are keyed by (seed, epoch, sample), and do not change samples in place."
            )
        elif keeps:
            grown = [name for name, size in before.sizes.items() if size > sizes.get(name, 0)]
            text = (
                f"The data set keeps what it drew for a sample{f', in {grown[0]}' if grown else ''}: when a sample is "
                f"read again, nothing is drawn. The draw is keyed by the epoch in which a worker first reads the "
                f"sample, so the result depends on the number of workers. Draw each time a sample is read, or for all "
                f"samples in __init__."
            )
        else:
            return
        if stops:
            raise InputError(f"{text} With audit_action='warn' training continues.")
        _log.warning(text)


class StreamSamples(Dataset[Any]):
    """Samples of a stream or of streams that are shards, read by requests for samples of a batch.

    Args:
        collates: whether a function of the user collates.
    """

    def __init__(self, order: StreamOrder | LocatedOrder, collates: bool) -> None:
        self._order, self._collates = order, collates

    def __getitems__(self, request: LoadRequest) -> list[Any]:
        if request.step is not None:
            fault_points.reach("in the loader", request.step)
        items = self._order.read(request.epoch, request.samples)
        if self._collates:
            seed_all(seed_of(COLLATE, self._order.seed, request.epoch, request.samples[0]))
        return items
