"""Validation of the ``data`` and ``sampler`` arguments, and the sample order for them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sized
from types import FunctionType
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from paceline.data.growing.order import GrowingOrder
from paceline.data.growing.samples import Growing
from paceline.data.located.order import LocatedOrder
from paceline.data.located.shards import Located
from paceline.data.order import BatchOrder, Order
from paceline.data.sampler import SampleNumbers, order_by
from paceline.data.streams.order import StreamOrder
from paceline.data.streams.reader import is_stream as is_stream
from paceline.data.tables.engines import writer_of
from paceline.errors import ConfigError, InputError
from paceline.schedule.microbatch_orders import MicrobatchOrder
from paceline.schedule.shares import default_microbatches
from paceline.settings import Settings
from paceline.system.torch_internals import StreamSampler


def order_of(
    data: Any,
    sampler: SampleNumbers | None,
    settings: Settings,
    batch: int,  # number of samples in a step over all workers
    microbatch_order: MicrobatchOrder | None = None,
) -> BatchOrder:
    """Return the sample order for a data set or a stream."""
    order = _order_of(data, sampler, settings, batch)
    if microbatch_order is not None:
        order.cut_by(microbatch_order)
    return order


def _order_of(data: Any, sampler: SampleNumbers | None, settings: Settings, batch: int) -> BatchOrder:
    parts = settings.microbatches or default_microbatches(batch)
    if batch < parts:
        raise ConfigError(
            f"batch = {batch} cannot be cut into {parts} microbatches: use a larger batch or fewer microbatches."
        )
    if isinstance(data, DataLoader):
        raise _loader_given(data)
    if is_stream(data):
        if sampler is not None:
            raise ConfigError(
                f"sampler numbers samples, but this {type(data).__name__} is a stream, whose samples come in an order "
                f"of its own: give a data set with a length and items by number, or leave sampler out."
            )
        return _stream(data, settings, batch, parts)
    if isinstance(data, Growing):
        return _growing(data, sampler, settings, batch, parts)
    if isinstance(data, Located):
        return _located(data, sampler, settings, batch, parts)
    _check_data_set(data)
    if sampler is not None:
        return order_by(sampler, len(data), batch, parts, settings.seed, settings.drop_last)
    if settings.drop_last and len(data) < batch:
        raise InputError(
            f"The data set has {len(data)} samples, less than one batch of {batch}, and drop_last leaves nothing. "
            f"Give a smaller batch, or leave drop_last out."
        )
    return Order(len(data), batch, parts, settings.seed, settings.drop_last)


def _check_data_set(data: Any) -> None:
    """Raise InputError if the data set has no samples, or none with numbers."""
    if isinstance(data, str | bytes | os.PathLike) or not isinstance(data, Sized) or not hasattr(data, "__getitem__"):
        raise _no_data_set(data)
    refuse_columns("data", data)
    if len(data) == 0:
        raise InputError(
            f"The data set is empty. data, of type {type(data).__name__}, has the length 0: look at the path, the "
            f"split or the filter that it was made from."
        )


def refuse_columns(what: str, data: Any) -> None:
    """Raise InputError if ``data`` holds columns (inputs and targets) instead of samples."""
    if isinstance(data, Mapping) and data and 0 not in data:
        raise InputError(
            f"{what} is a {type(data).__name__} with the keys {', '.join(map(repr, list(data)[:5]))}, and samples have "
            f"numbers. Of columns by name make torch.utils.data.TensorDataset(inputs, targets), or a list with a "
            f"dictionary for each sample."
        )
    if not isinstance(data, tuple) or not all(getattr(one, "shape", ()) for one in data):
        return
    shapes = {tuple(one.shape) for one in data}
    lengths = {shape[0] for shape in shapes}
    is_columns = len(lengths) == 1 and (len(shapes) > 1 or len(data) == 2)
    if is_columns and (samples := lengths.pop()) > len(data):
        raise InputError(
            f"{what} is a tuple of {len(data)} tensors or arrays with {samples} entries each, which would count as "
            f"{len(data)} samples. Give torch.utils.data.TensorDataset(inputs, targets); convert arrays with "
            f"torch.as_tensor."
        )


def _stream(data: Any, settings: Settings, batch: int, parts: int) -> StreamOrder:
    if settings.workers_per_loader:
        raise ConfigError(
            f"workers_per_loader = {settings.workers_per_loader} is for data sets with items by number: of a stream, "
            f"such as this {type(data).__name__}, each loader process would read all samples. Leave it out; the data "
            f"set may read ahead by itself."
        )
    order = StreamOrder(data, batch, parts, settings.seed, settings.drop_last)
    if hasattr(data, "__next__"):  # an iterator may be exhausted after one pass
        order.check_repeats()
    return order


def _growing(data: Growing, sampler: SampleNumbers | None, settings: Settings, batch: int, parts: int) -> GrowingOrder:
    refuse_columns("The argument of Growing", data.initial)
    if sampler is not None:
        raise ConfigError(
            "The epochs of a Growing data set are shuffled, because their lengths are not known beforehand: leave out "
            "sampler, and a forward(model, microbatch, state) that needs an order of its own."
        )
    if settings.workers_per_loader:
        raise ConfigError(
            f"workers_per_loader = {settings.workers_per_loader} is for data sets that do not change: a loader process "
            f"does not see the samples that session.extend adds. Leave it out."
        )
    if data.added.count:
        raise InputError(
            f"This Growing data set has {data.added.count} samples that an earlier session added. Give the new "
            f"session a data set of its own: paceline.data.Growing(list(earlier))."
        )
    return GrowingOrder(data, batch, parts, settings.seed, settings.drop_last)


def check_shards(data: Located) -> None:
    """Raise InputError if a shard is empty, or neither a stream nor a data set with a length and items by number."""
    for name, shard in data.shards.items():
        if isinstance(shard, DataLoader | Growing | Located):
            raise InputError(
                f"Shard {name!r} of Located is a {type(shard).__name__}, but the order of samples needs a data set "
                f"with a fixed length and items by number, or a stream."
            )
        if writer_of(shard) is not None:
            raise InputError(
                f"Shard {name!r} of Located is a {type(shard).__name__}, which only the process that made it can read. "
                f"Write its rows to files on the machines that have them, by paceline.data.write_shards, and give a "
                f"paceline.ParquetDataset of each file, as docs/located-tables.md shows."
            )
        try:
            if not is_stream(shard):
                _check_data_set(shard)
        except InputError as error:
            raise InputError(f"Shard {name!r} of Located cannot be used: {error}") from None


def _located(data: Located, sampler: SampleNumbers | None, settings: Settings, batch: int, parts: int) -> LocatedOrder:
    check_shards(data)
    if sampler is not None or settings.drop_last:
        raise ConfigError(
            "The order of Located data follows from the shards, and an epoch has every sample once: leave out "
            "sampler, drop_last, and a forward(model, microbatch, state) that needs an order of its own."
        )
    if not data.shards and settings.memory_gigabytes is not None:
        raise ConfigError(
            "memory_gigabytes measures a microbatch before training, but this worker has no shard of Located: give it "
            "one, or leave out memory_gigabytes."
        )
    if streams := [name for name, shard in data.shards.items() if is_stream(shard)]:
        _check_streams(streams[0], data, settings)
    if data.lost == "leave out" and settings.exact:
        raise ConfigError(
            "exact promises the bits of all shards, so Located(..., lost='leave out') cannot continue without a lost "
            "one: leave out exact or lost."
        )
    exact, all_present = bool(settings.exact), not settings.local.sites
    return LocatedOrder(data, batch, parts, settings.seed, exact=exact, all_present=all_present)


def _check_streams(name: str, data: Located, settings: Settings) -> None:
    unknown = "its number of samples is unknown"
    refused = {
        "workers_per_loader": settings.workers_per_loader and "each loader process would read all of its samples",
        "memory_gigabytes": settings.memory_gigabytes and unknown,
        "local.sites": settings.local.sites and unknown,
        "lost='leave out'": data.lost != "stop" and unknown,
    }
    for setting, why in refused.items():
        if why:
            raise ConfigError(f"Shard {name!r} of Located is a stream, and {why}: leave out {setting}.")


def _no_data_set(data: Any) -> InputError:
    if isinstance(data, str | bytes | os.PathLike):
        return InputError(
            f"data is {data!r}, a {type(data).__name__}, and Paceline does not open files: give a data set that reads "
            f"them, such as torchvision.datasets.ImageFolder(path), or paceline.ParquetDataset(path)."
        )
    if isinstance(data, type):
        return InputError(f"data is the class {data.__name__}: give an object of it, {data.__name__}(...).")
    if isinstance(data, FunctionType):
        return InputError(
            f"data is the function {data.__name__}: give the data set that it returns, or if it yields samples, an "
            f"object of a class whose __iter__ yields them."
        )
    writer = writer_of(data)
    cure = "Give it __len__ and __getitem__, or __iter__ for a stream."
    if writer is not None:
        cure = f"Write it once to files that all workers see, by paceline.ParquetDataset.{writer}."
    return InputError(
        f"data must be a data set with a length and items by number, or one that can be iterated over, but "
        f"{type(data).__name__} has {'no length' if hasattr(data, '__getitem__') else 'no items by number'}. {cure}"
    )


def _loader_given(loader: DataLoader[Any]) -> InputError:
    """Build the error for a DataLoader as ``data``: it names the arguments to give instead."""
    given = [f"data=loader.dataset ({type(loader.dataset).__name__})"]
    given.append("batch=..." if loader.batch_size is None else f"batch={loader.batch_size}")
    if loader.drop_last:
        given.append("drop_last=True")
    if loader.num_workers:
        given.append(f"workers_per_loader={loader.num_workers}")
    collate = loader.collate_fn
    if not getattr(collate, "__module__", "").startswith("torch.utils.data"):
        given.append(f"collate={getattr(collate, '__name__', type(collate).__name__)}")
    if not isinstance(loader.sampler, RandomSampler | SequentialSampler | DistributedSampler | StreamSampler):
        given.append(f"sampler=loader.sampler ({type(loader.sampler).__name__})")
    return InputError(
        f"data is a DataLoader, but Paceline loads the samples itself, so that each worker gets its share of each "
        f"batch. Give what the loader was made of: {', '.join(given)}; batch is the number of samples over all workers."
    )
