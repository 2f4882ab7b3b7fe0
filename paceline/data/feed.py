"""Loading of microbatches, from sample numbers to tensors on the device.

Loading uses torch's DataLoader. Each of its items is a *group*: a group of neighboring microbatches computed in one
pass, in most cases a single microbatch. With located data, a worker may also load microbatches for others, and get some
from others (``located.exchange``).
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Sampler

from paceline.data.loading.prefetch import Upload, upload_stream
from paceline.data.loading.samples import KeyedDataset, LoadRequest, StreamSamples, collated, fixed_part
from paceline.data.located.exchange import SampleExchange
from paceline.data.located.order import LocatedOrder
from paceline.data.located.shards import Located
from paceline.data.nested import CollatedSizes, default_collate, map_tensors, rows
from paceline.data.objects.values import PlainValues, Values
from paceline.data.order import BatchOrder
from paceline.data.streams.order import StreamOrder
from paceline.errors import InputError, WorkerLost, name_microbatches
from paceline.events import EventLog
from paceline.launchers.local.child import end_with_parent
from paceline.launchers.local.kernel import is_ending
from paceline.system.user_code import in_user_call


@dataclass(frozen=True)
class MicrobatchGroup:
    """Group of microbatches of a step that are loaded together: their range, number of samples, and data.

    Attributes:
        shard: name of the shard of located data to which all of them belong, for errors.
    """

    microbatches: range
    samples: int
    data: Any
    shard: str = ""


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
        found.append(MicrobatchGroup(range(start, stop), end - begin, rows(group.data, begin, end), group.shard))
    return found


_AWAITED = object()
"""Data of a microbatch that another worker sends, until :meth:`Feed.receive`."""


class _Loaded(NamedTuple):
    """Microbatch group whose data may still be in transfer to the device, or from another worker."""

    microbatches: range
    samples: int
    upload: Upload | None
    shard: str

    def group(self) -> MicrobatchGroup:
        data = self.upload.wait() if self.upload else _AWAITED
        return MicrobatchGroup(self.microbatches, self.samples, data, self.shard)


class _Asked(NamedTuple):
    """Microbatch groups of a step that this worker computes, and the microbatches that it sends to others."""

    computed: list[range]
    sent: list[range]


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
        self._order, self._device = order, device
        self._stream = upload_stream(device)
        self._requests = _Requests()
        self._data: KeyedDataset | StreamSamples
        if isinstance(order, StreamOrder) or (isinstance(order, LocatedOrder) and order.streams):
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
        self._newest = 0  # newest step whose groups were asked for
        self._seconds = 0.0  # that load() has read data, since they were last taken
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

        During a step, the groups of the next step are copied to the device unless it is the CPU, and samples of the
        next step are sent to other workers. Groups with samples from others have no data before :meth:`receive`.
        """
        asked: dict[int, _Asked] = {}  # groups_of may return other groups after the loader got its requests
        oldest = start  # of the steps in ``asked``

        def groups_asked(step: int) -> _Asked:
            if step < oldest:  # it had no groups, so the loader comes to it only with the next request
                return _Asked([], [])
            if step not in asked:
                self._newest = max(step, self._newest)
                asked[step] = _Asked(groups_of(step), [] if self._exchange is None else self._exchange.sent(step))
            return asked[step]

        def groups_read(step: int) -> list[range]:
            computed, sent = groups_asked(step)
            return sent + [group for group in computed if not self._awaits(step, group)]

        self._requests.make = lambda: self._requests_of(start, stop, groups_read)
        if threading.current_thread() is threading.main_thread():  # PR_SET_PDEATHSIG follows the thread that forks
            self._loader.worker_init_fn = partial(_end_with_rank, os.getpid())
        items = iter(self._loader)
        ahead = 0 if self._device.type == "cpu" and self._exchange is None else 1
        loaded: deque[list[_Loaded]] = deque()
        step = start
        while step < stop + ahead:
            # the next epoch may have no samples: end here, to be called again if training continues
            stop = min(stop, step) if ahead and step > start and step >= self._order.known else stop
            if step < stop:
                self._check_length(step)
                self._remember(step)
                if isinstance(self._order, LocatedOrder):
                    self._order.read_ahead(step)  # or else others would wait for it in receive()
                loaded.append(self._load_ahead(step, groups_asked(step), items))
            if step >= start + ahead:
                yield [one.group() for one in loaded.popleft()]
                del asked[step - ahead]
                oldest += 1
            step += 1

    def _load_ahead(self, step: int, asked: _Asked, items: Iterator[Any]) -> list[_Loaded]:
        sent = {group.start: self._next(items, step, group) for group in asked.sent}
        if self._exchange is not None and not self._exchange.is_begun(step):
            with suppress(WorkerLost):  # which the step raises again, where the workers can re-form
                self._exchange.begin(step, sent)
        return [
            self._loaded(step, group, _AWAITED if self._awaits(step, group) else self._next(items, step, group))
            for group in asked.computed
        ]

    @property
    def _exchange(self) -> SampleExchange | None:
        return self._order.exchange if isinstance(self._order, LocatedOrder) else None

    def _awaits(self, step: int, group: range) -> bool:
        return self._exchange is not None and self._exchange.awaits(step, group)

    def receive(self, step: int, groups: list[MicrobatchGroup], events: EventLog) -> list[MicrobatchGroup]:
        """Return the groups of a step with the samples from other workers, and send samples to others.

        All workers call this at the beginning of a step.

        Raises:
            WorkerLost: another worker was lost.
        """
        if isinstance(self._order, LocatedOrder):
            self._order.read_on(step)
        if self._exchange is None or not isinstance(self._order, LocatedOrder):
            return groups
        self._order.choose(step, max(step, self._newest), events)
        arrived = self._arrived(step, self._exchange)
        if sent := self._exchange.bytes[step]:
            events.mark("samples-sent", step=step, bytes=sent)
        return [self._received(step, one.microbatches, arrived) if one.data is _AWAITED else one for one in groups]

    def _arrived(self, step: int, exchange: SampleExchange) -> Mapping[int, Any]:
        if not exchange.is_begun(step):
            sent = exchange.sent(step)
            exchange.begin(step, {group.start: data for group, data in zip(sent, self._read(step, sent), strict=True)})
        return exchange.take(step)

    def _received(self, step: int, group: range, arrived: Mapping[int, Any]) -> MicrobatchGroup:
        data = map_tensors(torch.clone, arrived[group.start])  # which the forward pass may change
        return self._loaded(step, group, data).group()

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
            shard = f" of shard {one!r}" if (one := self._order.shard_of(step, group)) else ""
            in_user_call(error, f"This was the loading of {name_microbatches(group)}{shard} of step {step}.")
            raise
        request = self._requests.made.popleft()
        assert request.step == step, f"these are samples of step {request.step}, not of step {step}"
        return item

    def load(self, step: int, groups: list[range]) -> list[MicrobatchGroup]:
        """Load microbatch groups of a step in this process, with the plain values with which its batch was read."""
        own = [group for group in groups if not self._awaits(step, group)]
        read = {
            group.start: self._loaded(step, group, data) for group, data in zip(own, self._read(step, own), strict=True)
        }
        if len(own) == len(groups) or self._exchange is None:
            return [one.group() for one in read.values()]
        arrived = self._arrived(step, self._exchange)
        return [
            read[group.start].group() if group.start in read else self._received(step, group, arrived)
            for group in groups
        ]

    def _read(self, step: int, groups: list[range]) -> list[Any]:
        requests, begin = self._requests_of(step, step + 1, lambda _: groups), time.perf_counter()
        values = self._values.get(step)
        with nullcontext() if self._plain is None or values is None else self._plain.set_to(values):
            items = [self._collate(self._data.__getitems__(request)) for request in requests]
        self._seconds += time.perf_counter() - begin
        return items

    def take_seconds(self) -> float:
        """Return the seconds for which :meth:`load` has read data since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _remember(self, step: int) -> None:
        """Record the plain values with which the batch of a step is read. Loader processes keep their first values."""
        if self._plain is not None:
            began = next(iter(self._values.values()), None) if self._loader.num_workers else None
            self._values = {one: values for one, values in self._values.items() if one >= step - 1}
            self._values[step] = self._plain.now() if began is None else began

    def _loaded(self, step: int, group: range, data: Any) -> _Loaded:
        parts = self._order.parts_of(step)
        samples = parts[group[-1]].stop - parts[group[0]].start
        shard = self._order.shard_of(step, group)
        if data is _AWAITED:
            return _Loaded(group, samples, None, shard)
        if self.sizes is not None:
            self.sizes.add(samples, data)
        return _Loaded(group, samples, Upload(data, self._device, self._stream), shard)

    def _requests_of(self, start: int, stop: int, groups_of: Callable[[int], list[range]]) -> Iterator[LoadRequest]:
        for step in range(start, stop):
            microbatches = self._order.microbatches_of(step)
            epoch = self._order.epoch_of(step)
            for group in groups_of(step):
                yield LoadRequest(epoch, [sample for part in group for sample in microbatches[part]], step)


def _end_with_rank(rank: int, _: int) -> None:
    """Have the kernel kill this loader process when its rank ends, because it holds the rank's sockets and locks."""
    end_with_parent()
    if is_ending(rank):  # the rank ended before the call above took effect
        os._exit(1)


def has_ended(error: Exception) -> bool:
    """Return whether an error means that a loader process has ended: torch does not always raise a class of its own."""
    if "DataLoader worker process" in str(error):  # raised by the data set in a loader process
        return False
    return isinstance(error, EOFError | ConnectionError) or "exited unexpectedly" in str(error)


class _Requests(Sampler[Any]):
    """Batch sampler of load requests. ``make`` returns the requests of a pass; ``made`` are still without data."""

    make: Callable[[], Iterator[LoadRequest]]

    def __iter__(self) -> Iterator[LoadRequest]:
        self.made = deque[LoadRequest]()
        for request in self.make():
            self.made.append(request)
            yield request
