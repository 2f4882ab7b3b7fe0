"""Traces in the format of Perfetto, written with its own package."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError
from paceline.observe.records import encodable
from paceline.observe.tracing.slices import Instant, Slice, Worker
from paceline.system.regular_files import without_link

_SEQUENCE = 1  # all packets are of one sequence, because one program writes them


def write(workers: Mapping[str, Worker], path: Path, links: bool = True) -> None:
    """Write a trace, even through a symbolic link if ``links``."""
    try:
        from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TracePacket
        from perfetto.trace_builder.proto_builder import StreamingTraceProtoBuilder
    except ImportError:
        raise ConfigError("paceline trace needs perfetto: install it with pip install 'paceline[trace]'.") from None
    try:
        with (path if links else without_link(path)).open("wb") as file:
            builder = StreamingTraceProtoBuilder(file)
            for packet in _packets(workers, TracePacket):
                packet.trusted_packet_sequence_id = _SEQUENCE
                builder.write_packet(packet)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}. Name another file with --output.") from None


def _packets(workers: Mapping[str, Worker], new: Any) -> Iterator[Any]:
    numbers = itertools.count(1)
    for name, worker in workers.items():
        parent = next(numbers)
        yield _descriptor(new, parent, name)
        for instant in sorted(worker.instants, key=lambda one: one.time):
            yield _event(new, instant.time, parent, new().track_event.TYPE_INSTANT, instant)
        for counter, values in worker.counters.items():
            track = next(numbers)
            packet = _descriptor(new, track, counter, parent)
            packet.track_descriptor.counter.SetInParent()
            yield packet
            for time, value in sorted(values):
                packet = _event(new, time, track, packet.track_event.TYPE_COUNTER)
                packet.track_event.double_counter_value = value
                yield packet
        for title, slices in worker.tracks.items():
            track = next(numbers)
            yield _descriptor(new, track, title, parent)
            yield from _nested(new, track, slices)


def _nested(new: Any, track: int, slices: list[Slice]) -> Iterator[Any]:
    """Yield the begins and ends of slices in order, ends before begins at the same time."""
    kinds, ends = new().track_event, list[int]()
    for one in slices:
        while ends and ends[-1] <= one.begin:
            yield _event(new, ends.pop(), track, kinds.TYPE_SLICE_END)
        packet = _event(new, one.begin, track, kinds.TYPE_SLICE_BEGIN, one)
        packet.track_event.flow_ids.extend([] if one.sends is None else [one.sends])
        packet.track_event.terminating_flow_ids.extend([] if one.receives is None else [one.receives])
        yield packet
        ends.append(one.end)
    while ends:
        yield _event(new, ends.pop(), track, kinds.TYPE_SLICE_END)


def _descriptor(new: Any, track: int, name: str, parent: int | None = None) -> Any:
    packet = new()
    packet.track_descriptor.uuid = track
    packet.track_descriptor.name = encodable(name)
    if parent is not None:
        packet.track_descriptor.parent_uuid = parent
    return packet


def _event(new: Any, time: int, track: int, kind: int, about: Slice | Instant | None = None) -> Any:
    packet = new()
    packet.timestamp = max(0, time)
    packet.track_event.type = kind
    packet.track_event.track_uuid = track
    if about is not None:
        packet.track_event.name = encodable(about.name)
        for key, value in about.values.items():
            _annotate(packet.track_event.debug_annotations.add(), encodable(key), value)
    return packet


def _annotate(annotation: Any, key: str, value: Any) -> None:
    annotation.name = key
    if isinstance(value, bool):
        annotation.bool_value = value
    elif isinstance(value, int) and abs(value) < 2**63:
        annotation.int_value = value
    elif isinstance(value, float):
        annotation.double_value = value
    else:
        annotation.string_value = encodable(value if isinstance(value, str) else json.dumps(value))
