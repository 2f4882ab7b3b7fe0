"""PipeDream (Harlap et al. 2018, arXiv 1806.03377) and PipeDream-2BW (Narayanan et al. 2021, arXiv 2006.09503)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from paceline.errors import ConfigError
from paceline.schedule.operations import Kind, Operation, Schedule
from paceline.schedule.transfers import Order, at_least, with_transfers


@dataclass(frozen=True)
class Stream:
    """A pipeline that is not emptied between updates.

    Attributes:
        name: of the algorithm.
        replicas: the number of workers of each stage; microbatch m goes to replica m mod replicas.
        every: backward passes of a stage from one update to the next.
        vertical_sync: all stages use the same version for a microbatch.
        two_buffers: a microbatch uses the version before the newest one that could be there at all stages, so that a
            stage never keeps more than two.
    """

    name: str
    replicas: tuple[int, ...]
    every: int
    vertical_sync: bool = False
    two_buffers: bool = False

    @property
    def stages(self) -> int:
        """Into how many parts the model is cut."""
        return len(self.replicas)

    def lag(self, stage: int) -> int:
        """So many forward passes a stage is ahead of its backward passes: the workers behind it, in whole rounds."""
        replicas = self.replicas[stage]
        return (sum(self.replicas[stage:]) - 1) // replicas * replicas

    def version(self, stage: int, microbatch: int) -> int:
        """Which weights a stage uses for a microbatch."""
        if self.two_buffers:
            return max(0, microbatch // self.every - 1)
        return max(0, microbatch - self.lag(0 if self.vertical_sync else stage)) // self.every

    def worker(self, stage: int, microbatch: int) -> int:
        """Who computes a stage for a microbatch."""
        return sum(self.replicas[:stage]) + microbatch % self.replicas[stage]


def pipedream_stream(
    stages: int, every: int = 1, vertical_sync: bool = False, replicas: int | tuple[int, ...] = 1
) -> Stream:
    """PipeDream: weight stashing, no flush.

    Args:
        stages: into how many parts the model is cut.
        every: backward passes of a stage from one update to the next.
        vertical_sync: all stages use the version that stage 0 had when the microbatch entered.
        replicas: the number of workers of a stage; of each stage, if they differ.

    Raises:
        ConfigError: no stages, replicas of another number of stages, or updates that replicas cannot share evenly.
    """
    return _checked(Stream("pipedream", _counts(stages, replicas), every, vertical_sync=vertical_sync))


def two_buffered_stream(stages: int, every: int, replicas: int | tuple[int, ...] = 1) -> Stream:
    """PipeDream-2BW: an update after each group of microbatches, two versions of the weights.

    Args:
        stages: into how many parts the model is cut.
        every: microbatches of a group, at least as many as there are workers.
        replicas: the number of workers of a stage; of each stage, if they differ.

    Raises:
        ConfigError: as of ``pipedream_stream``, or groups smaller than the pipeline.
    """
    stream = _checked(Stream("2bw", _counts(stages, replicas), every, two_buffers=True))
    if every < sum(stream.replicas):
        raise ConfigError(
            f"with two versions of the weights, {sum(stream.replicas)} workers need at least as many microbatches from "
            f"one update to the next, not {every}: set every to {sum(stream.replicas)} or more"
        )
    return stream


def _counts(stages: int, replicas: int | tuple[int, ...]) -> tuple[int, ...]:
    at_least(1, stages=stages)
    counts = (replicas,) * stages if isinstance(replicas, int) else tuple(replicas)
    if len(counts) != stages:
        raise ConfigError(f"replicas {counts} are those of {len(counts)} stages, not of {stages}: name one for each")
    return counts


def _checked(stream: Stream) -> Stream:
    at_least(1, every=stream.every)
    for stage, count in enumerate(stream.replicas):
        at_least(1, replicas=count)
        if stream.every % count:
            raise ConfigError(
                f"the {count} replicas of stage {stage} cannot share the {stream.every} microbatches from one update to "
                f"the next: set every to a multiple of {count}"
            )
    return stream


def window(stream: Stream, begin: int, end: int) -> Schedule:
    """What is done while the microbatches ``begin <= m < end`` enter, numbered since the pipeline was last empty.

    Values that are still under way at the end are received in the next window, or while draining.

    Raises:
        ConfigError: the window ends before it begins.
    """
    at_least(0, begin=begin)
    at_least(begin, end=end)
    orders: list[Order] = [[] for _ in range(sum(stream.replicas))]
    for stage in range(stream.stages):
        lag = stream.lag(stage)
        for microbatch in range(begin, end):
            order = orders[stream.worker(stage, microbatch)]
            order.append(Operation(Kind.FORWARD, stage, microbatch, stream.version(stage, microbatch)))
            if microbatch >= lag:
                order += _backward(stream, stage, microbatch - lag)
    return _schedule(stream, end, orders)


def drain(stream: Stream, end: int) -> Schedule:
    """What is left to do when microbatch ``end`` does not enter any more: the pipeline gets empty.

    Microbatches that do not fill up ``every`` make an update of their own.
    """
    at_least(0, end=end)
    orders: list[Order] = [[] for _ in range(sum(stream.replicas))]
    for stage in range(stream.stages):
        for microbatch in range(max(0, end - stream.lag(stage)), end):
            orders[stream.worker(stage, microbatch)] += _backward(stream, stage, microbatch)
        whole, rest = divmod(end, stream.every)
        for last in range((whole + 1) * stream.every - stream.replicas[stage], (whole + 1) * stream.every):
            if rest and last >= end:
                orders[stream.worker(stage, last)] += _update(stream, stage, whole + 1)
    return _schedule(stream, end, orders)


def _backward(stream: Stream, stage: int, microbatch: int) -> Iterator[Operation]:
    """A backward pass, and the update if it is the last one before it of its worker."""
    yield Operation(Kind.BACKWARD, stage, microbatch, stream.version(stage, microbatch))
    version = (microbatch + stream.replicas[stage]) // stream.every
    if version > microbatch // stream.every:
        yield from _update(stream, stage, version)


def _update(stream: Stream, stage: int, version: int) -> Iterator[Operation]:
    if stream.replicas[stage] > 1:
        yield Operation(Kind.REDUCE, stage)
    yield Operation(Kind.UPDATE, stage, version=version)


def _schedule(stream: Stream, end: int, orders: list[Order]) -> Schedule:
    workers = tuple(tuple(with_transfers(order, stream.stages)) for order in orders)
    return Schedule(stream.name, stream.stages, end, workers)


def _whole(stream: Stream, microbatches: int) -> Schedule:
    at_least(1, microbatches=microbatches)
    parts = window(stream, 0, microbatches), drain(stream, microbatches)
    workers = tuple(first + rest for first, rest in zip(*(part.workers for part in parts), strict=True))
    return Schedule(stream.name, stream.stages, microbatches, workers)


def pipedream(
    stages: int,
    microbatches: int,
    every: int = 1,
    vertical_sync: bool = False,
    replicas: int | tuple[int, ...] = 1,
) -> Schedule:
    """PipeDream from an empty pipeline to an empty pipeline: one window, then drained.

    Args:
        stages: into how many parts the model is cut.
        microbatches: how many go through the pipeline.
        every: backward passes of a stage from one update to the next.
        vertical_sync: all stages use the version that stage 0 had when the microbatch entered.
        replicas: the number of workers of a stage; of each stage, if they differ.

    Raises:
        ConfigError: as of ``pipedream_stream``, or no microbatches.
    """
    return _whole(pipedream_stream(stages, every, vertical_sync, replicas), microbatches)


def two_buffered(stages: int, microbatches: int, every: int, replicas: int | tuple[int, ...] = 1) -> Schedule:
    """PipeDream-2BW from an empty pipeline to an empty pipeline: one window, then drained.

    Args:
        stages: into how many parts the model is cut.
        microbatches: how many go through the pipeline.
        every: microbatches of a group, at least as many as there are workers.
        replicas: the number of workers of a stage; of each stage, if they differ.

    Raises:
        ConfigError: as of ``two_buffered_stream``, or no microbatches.
    """
    return _whole(two_buffered_stream(stages, every, replicas), microbatches)
