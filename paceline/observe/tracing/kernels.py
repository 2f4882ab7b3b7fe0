"""Operators and kernels of profiled steps, on the clock of the records.

::

    rank 0   steps             ├── step 100 ─────────────────────────────┤
             operators         ├ aten::addmm ─────────┤├ aten::relu ┤
                                 ├ cudaLaunchKernel ┤
                                                ╲ flow
             GPU 0 stream 7                      ├ sgemm ┤

torch's profiler writes times of its machine's clock, to within 0.01 ms. The record of a profile has that time in
``clock``, too, so both are moved together to the clock of the coordinator.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from paceline.errors import InputError
from paceline.observe.records import Record, number
from paceline.observe.tracing.slices import NANOSECONDS, Slice
from paceline.system.regular_files import open_regular

_FIRST_FLOW = 1 << 32
"""Number of the first flow from a launch to its kernel. Smaller ones are those from a send to its receive."""
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_ON_CPU = ("cpu_op", "user_annotation", "cuda_runtime", "cuda_driver")
"""Categories of slices. Others repeat these, such as annotations on the GPU."""


def profiled_slices(folders: Iterable[Path], records: Iterable[Record]) -> Iterator[tuple[int, str, Slice]]:
    """Yield rank, track and slice of each operator and kernel in the profiles of a run.

    Args:
        folders: directories of the run on all machines.
        records: records of the event ``profile``, with times of the coordinator's clock.
    """
    flows = itertools.count(_FIRST_FLOW)
    known = {(record.get("step"), record["rank"]): record for record in records}  # the last time that a step was taken
    for (step, rank), record in known.items():
        name = f"step-{step}-rank-{rank}.json"
        path = next((path for folder in folders if (path := folder / "profiles" / name).is_file()), None)
        if path is None or (clock := number(record.get("clock"))) is None:
            continue
        try:
            with open_regular(path) as file:
                yield from _slices(rank, json.load(file), round((record["time"] - clock) * NANOSECONDS), flows)
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise InputError(f"The profile {path} cannot be read: {error!r}. Remove it, or profile again.") from None


def _slices(
    rank: int, profile: Mapping[str, Any], moved: int, flows: Iterator[int]
) -> Iterator[tuple[int, str, Slice]]:
    base = int(profile.get("baseTimeNanoseconds", 0)) + moved
    found = [one for one in profile["traceEvents"] if one.get("ph") == "X" and one.get("cat") in (*_ON_CPU, *_ON_GPU)]
    threads = {_thread(one): "" for one in found if one["cat"] in _ON_CPU}
    threads = {thread: f" {place + 1}" if place else "" for place, thread in enumerate(threads)}
    ends: dict[str, dict[object, int]] = {"sends": {}, "receives": {}}  # first launch and kernel of a correlation
    for place, one in enumerate(found):
        if (correlation := one.get("args", {}).get("correlation")) is not None:
            ends["receives" if one["cat"] in _ON_GPU else "sends"].setdefault(correlation, place)
    numbers = {correlation: next(flows) for correlation in ends["sends"].keys() & ends["receives"].keys()}
    flow = {at: {end: numbers[one]} for end, places in ends.items() for one, at in places.items() if one in numbers}
    for place, one in enumerate(found):
        track = (
            f"operators{threads[_thread(one)]}" if one["cat"] in _ON_CPU else f"GPU {one['pid']} stream {one['tid']}"
        )
        begin = base + round(1000 * one["ts"])
        end = begin + round(1000 * one["dur"])
        yield rank, track, Slice(one["name"], begin, end, one.get("args", {}), **flow.get(place, {}))


def _thread(one: Mapping[str, Any]) -> Any:
    return one.get("pid"), one.get("tid")
