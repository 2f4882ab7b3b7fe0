"""Loading of microbatches, from sample numbers to tensors on the device.

Loading uses torch's DataLoader. Each of its items is a *group*: a group of neighboring microbatches computed in one
pass, in most cases a single microbatch. Random numbers that a data set draws for a sample (augmentation) are keyed by
(seed, epoch, sample), so they do not depend on the worker or loader process that draws them.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, Sampler, TensorDataset

from paceline.data.growing.samples import Growing
from paceline.data.keys import COLLATE, SAMPLE, preserve_generators, seed_all, seed_of, seed_untouched, was_drawn
from paceline.data.located.shards import Located
from paceline.data.nested import CollatedSizes, default_collate, rows
from paceline.data.objects.attributes import Attributes, same
from paceline.data.objects.values import PlainValues, Values
from paceline.data.order import BatchOrder
from paceline.data.prefetch import Upload, rows_of, upload_stream
from paceline.data.streams.order import StreamOrder
from paceline.errors import InputError, name_microbatches
from paceline.launchers.local.child import end_with_parent
from paceline.launchers.local.kernel import is_ending
from paceline.system import fault_points
from paceline.system.user_code import in_user_call

_log = logging.getLogger("paceline")


@dataclass(frozen=True)
class MicrobatchGroup:
    """Group of microbatches of a step that are loaded together: their range, number of samples, and data."""

    microbatches: range
    samples: int
    data: Any


def split_group(group: MicrobatchGroup, parts: Sequence[range], at: int | None = None) -> list[MicrobatchGroup]:
    """Split a group into its microbatches, or only before and after the microbatch ``at``.

    ``parts`` are the positions of all microbatches in the batch.
    """
    own = group.microbatches
    if len(own) == 1 or (at is not None and at not in own):
        return [group]
    first, found = parts[own.start].start, []
    for start, stop in pairwise([*own, own.stop] if at is None else sorted({own.start, at, at + 1, own.stop})):
        begin, end = parts[start].start - first, parts[stop - 1].stop - first
        found.append(MicrobatchGroup(range(start, stop), end - begin, rows(group.data, begin, end)))
    return found


class _Loaded(NamedTuple):
    """Microbatch group whose data may still be in transfer to the device."""

    microbatches: range
    samples: int
    upload: Upload

    def group(self) -> MicrobatchGroup:
        return MicrobatchGroup(self.microbatches, self.samples, self.upload.wait())


class LoadRequest(NamedTuple):
    """Request to a loader for samples of an epoch, and the step that needs them, if any."""

    epoch: int
    samples: list[int]
    step: int | None = None


class Feed:
    """Loader of the microbatch groups that this worker computes."""

    def __init__(
        self,
        data: Any,
        order: BatchOrder,
        device: torch.device,
        loaders: int = 0,
        collate: Callable[[list[Any]], Any] | None = None,
        stops: bool = False,
    ) -> None:
        self._order = order
        self._device = device
        self._stream = upload_stream(device)
        self._requests = _Requests()
        self._data: KeyedDataset | StreamSamples
        if isinstance(order, StreamOrder):
            self._data = StreamSamples(order, collates=collate is not None)
        else:
            self._data = KeyedDataset(data, order.seed, collates=collate is not None, stops=stops)
        self._given = fixed_part(data)
        self._length = len(self._given) if isinstance(self._data, KeyedDataset) else None
        self._plain: PlainValues | None = None
        if isinstance(self._data, KeyedDataset) and not (self._data.is_plain and collate is None):
            self._plain = PlainValues(collate=collate, **({} if self._data.is_plain else {"data": self._given}))
        # mappings of values in the data set and collate function, by name; empty with loader processes
        self.owners = {} if self._plain is None or loaders else self._plain.owners
        # sizes of the batches from the user's collate function; None without such a function
        self.sizes = None if collate is None else CollatedSizes()
        self._values: dict[int, Values] = {}  # plain values with which the newest batches were read, by step
        self._collate = partial(collated, collate=collate or default_collate)
        self._loader: DataLoader[Any] = DataLoader(
            self._data,
            batch_sampler=self._requests,
            num_workers=loaders,
            collate_fn=self._collate,
            pin_memory=device.type == "cuda" and loaders > 0,  # in a loader thread; else Upload pins
            persistent_workers=loaders > 0,
            prefetch_factor=2 if loaders else None,
        )

    def move_to(self, device: torch.device) -> None:
        """Use another target device from now on."""
        self._device, self._stream = device, upload_stream(device)

    def steps(self, start: int, stop: int, groups_of: Callable[[int], list[range]]) -> Iterator[list[MicrobatchGroup]]:
        """Yield the microbatch groups ``groups_of(step)`` of this worker for each step from ``start`` to ``stop``.

        On a device other than the CPU, the groups of the next step are copied to the device during a step.
        """
        asked: dict[int, list[range]] = {}  # groups_of may return other groups after the loader got its requests
        oldest = start  # of the steps in ``asked``

        def groups_asked(step: int) -> list[range]:
            if step < oldest:  # it had no groups, so the loader comes to it only with the next request
                return []
            return asked.setdefault(step, groups_of(step))

        self._requests.make = lambda: self._requests_of(start, stop, groups_asked)
        if threading.current_thread() is threading.main_thread():  # PR_SET_PDEATHSIG follows the thread that forks
            self._loader.worker_init_fn = partial(_end_with_rank, os.getpid())
        items = iter(self._loader)
        ahead = 0 if self._device.type == "cpu" else 1
        loaded: deque[list[_Loaded]] = deque()
        for step in range(start, stop + ahead):
            if step < stop:
                self._check_length(step)
                self._remember(step)
                loaded.append(
                    [self._loaded(step, group, self._next(items, step, group)) for group in groups_asked(step)]
                )
            if step >= start + ahead:
                yield [one.group() for one in loaded.popleft()]
                del asked[step - ahead]
                oldest += 1

    def _check_length(self, step: int) -> None:
        if isinstance(self._given, Located):
            self._given.check_lengths(step)
        elif self._length is not None and len(self._given) != self._length:
            raise InputError(
                f"The data set had {self._length} samples at the start and has {len(self._given)} in step {step}. Its "
                f"length must not change, because the order of samples depends on it. To add samples during training, "
                f"give start(data=paceline.data.Growing(samples)) and call session.extend, or give a stream "
                f"(torch.utils.data.IterableDataset)."
            )

    def _next(self, items: Iterator[Any], step: int, group: range) -> Any:
        """Return the data of the next microbatch group. Raises RuntimeError if a loader process has ended."""
        try:
            item = next(items)
        except Exception as error:
            if self._loader.num_workers and has_ended(error):
                raise RuntimeError(
                    "A loader process (workers_per_loader) ended: it was killed, perhaps by the kernel "
                    "for lack of memory. Use fewer loader processes, or none (workers_per_loader=0)."
                ) from error
            in_user_call(error, f"This was the loading of {name_microbatches(group)} of step {step}.")
            raise
        request = self._requests.made.popleft()
        assert request.step == step, f"these are samples of step {request.step}, not of step {step}"
        return item

    def load(self, step: int, groups: list[range]) -> list[MicrobatchGroup]:
        """Load microbatch groups of a step in this process, with the plain values with which its batch was read."""
        requests = self._requests_of(step, step + 1, lambda _: groups)
        values = self._values.get(step)
        with nullcontext() if self._plain is None or values is None else self._plain.set_to(values):
            return [
                self._loaded(step, group, self._collate(self._data.__getitems__(request))).group()
                for group, request in zip(groups, requests, strict=True)
            ]

    def _remember(self, step: int) -> None:
        """Record the plain values with which the batch of a step is read. Loader processes keep their first values."""
        if self._plain is not None:
            began = next(iter(self._values.values()), None) if self._loader.num_workers else None
            self._values = {one: values for one, values in self._values.items() if one >= step - 1}
            self._values[step] = self._plain.now() if began is None else began

    def _loaded(self, step: int, group: range, data: Any) -> _Loaded:
        parts = self._order.parts_of(step)
        samples = parts[group[-1]].stop - parts[group[0]].start
        if self.sizes is not None:
            self.sizes.add(samples, data)
        return _Loaded(group, samples, Upload(data, self._device, self._stream))

    def _requests_of(self, start: int, stop: int, groups_of: Callable[[int], list[range]]) -> Iterator[LoadRequest]:
        for step in range(start, stop):
            microbatches = self._order.microbatches_of(step)
            epoch = self._order.epoch_of(step)
            for group in groups_of(step):
                yield LoadRequest(epoch, [sample for part in group for sample in microbatches[part]], step)


def _end_with_rank(rank: int, _: int) -> None:
    """Have the kernel kill this loader process when its rank ends, as it keeps the rank's sockets and locks open."""
    end_with_parent()
    if is_ending(rank):  # the rank ended before the call above took effect
        os._exit(1)


def has_ended(error: Exception) -> bool:
    """Return whether an error means that a loader process has ended: torch does not always raise a class of its own."""
    if "DataLoader worker process" in str(error):  # raised by the data set in a loader process
        return False
    return isinstance(error, EOFError | ConnectionError) or "exited unexpectedly" in str(error)


class TensorRows(NamedTuple):
    """Collated samples of a ``TensorDataset``: a tensor for each tensor of the data set."""

    tensors: list[torch.Tensor]


def collated(items: list[Any] | TensorRows, collate: Callable[[list[Any]], Any]) -> Any:
    """Collate the items of :class:`KeyedDataset`. The rows of a ``TensorDataset`` are already collated."""
    return items.tensors if isinstance(items, TensorRows) else collate(items)


def fixed_part(data: Any) -> Any:
    """Return the samples that a data set has before training: all, or those before the first that was added."""
    return data.initial if isinstance(data, Growing) else data


class _Requests(Sampler[Any]):
    """Batch sampler of load requests. ``make`` returns those of a pass, ``made`` are those whose data is not there."""

    make: Callable[[], Iterator[LoadRequest]]

    def __iter__(self) -> Iterator[LoadRequest]:
        self.made = deque[LoadRequest]()
        for request in self.make():
            self.made.append(request)
            yield request


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
        self._data = data
        self._seed = seed
        self._collates = collates
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
        """Read samples of the first request again, and check that they repeat and draw anew. Undo all side effects.

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
            because = f"it draws from {drawn[0]}" if drawn else "it depends on what was read before"
            text = (
                f"The data set gives another sample {sample} when it is read again: {because}. Each worker reads other "
                f"samples, so the result depends on the number of workers. Draw from the global generators of torch, "
                f"random or numpy, which are keyed by (seed, epoch, sample), and do not change samples in place."
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
            raise InputError(f"{text} With audit_action='warn' training goes on.")
        _log.warning(text)


class StreamSamples(Dataset[Any]):
    """Samples of a stream, read by requests for samples of a batch.

    Args:
        collates: whether a function of the user collates.
    """

    def __init__(self, order: StreamOrder, collates: bool) -> None:
        self._order = order
        self._collates = collates

    def __getitems__(self, request: LoadRequest) -> list[Any]:
        if request.step is not None:
            fault_points.reach("in the loader", request.step)
        items = self._order.read(request.epoch, request.samples)
        if self._collates:
            seed_all(seed_of(COLLATE, self._order.seed, request.epoch, request.samples[0]))
        return items
