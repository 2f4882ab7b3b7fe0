"""Pipelines without a flush: PipeDream and PipeDream-2BW.

Harlap et al. 2018, arXiv 1806.03377, and Narayanan et al. 2021, arXiv 2006.09503. Microbatches flow continuously, and a
stage updates its weights while other microbatches are in flight. A stage keeps older versions of its weights (weight
stashing), so that the backward pass of a microbatch uses the weights of its forward pass::

    PipeDream, three stages; the version follows the colon: F3:1 uses the weights after the first update
    0  F0 F1 F2 B0 U:1 F3:1 B1 U:2 F4:2 B2 U:3 F5:3 B3:1 ...
    1  F0 F1 B0 U:1 F2:1 B1 U:2 F3:2 B2:1 U:3 F4:3 B3:2 ...
    2  F0 B0 U:1 F1:1 B1:1 U:2 F2:2 B2:2 U:3 F3:3 B3:3 ...

    with vertical sync: in all stages the version that stage 0 had when the microbatch entered
    2  F0 B0 U:1 F1 B1 U:2 F2 B2 U:3 F3:1 B3:1 ...

    2BW, an update after every three microbatches; the microbatches of group g use version g - 1
    0  F0 F1 F2 B0 F3 B1 F4 B2 U:1 F5 B3 F6:1 B4 F7:1 B5 U:2 F8:1 ...
    2  F0 B0 F1 B1 F2 B2 U:1 F3 B3 F4 B4 F5 B5 U:2 F6:1 B6:1 F7:1 B7:1 F8:1 ...

Stage s of P keeps at most P - s versions in PipeDream, P with vertical sync, and two in 2BW. A training step executes a
window of the stream. Draining finishes all microbatches in flight.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from paceline.errors import ConfigError
from paceline.schedule.pipeline.operations import Kind, Operation, Schedule
from paceline.schedule.pipeline.replicas import replica_counts
from paceline.schedule.pipeline.transfers import Order, check_at_least, with_transfers


@dataclass(frozen=True)
class AsyncPipeline:
    """A pipeline that is not flushed between updates."""

    name: str
    replicas: tuple[int, ...]  # number of workers of each stage. Microbatch m goes to replica m mod replicas.
    every: int  # backward passes of a stage per update
    vertical_sync: bool = False  # whether all stages use the same version for a microbatch
    # whether the microbatches of group g use version g - 1, the newest version that all stages are sure to have, so
    # that a stage keeps two versions
    two_buffers: bool = False

    @property
    def stages(self) -> int:
        return len(self.replicas)

    def lag(self, stage: int) -> int:
        """Return the lead of a stage's forward passes over its backward passes, in whole rounds of its replicas."""
        replicas = self.replicas[stage]
        return (sum(self.replicas[stage:]) - 1) // replicas * replicas

    def version(self, stage: int, microbatch: int) -> int:
        """Return the weight version that a stage uses for a microbatch.

        The version never decreases, so versions older than that of a worker's next backward pass can be dropped.
        """
        if self.two_buffers:
            return max(0, microbatch // self.every - 1)
        return max(0, microbatch - self.lag(0 if self.vertical_sync else stage)) // self.every

    def worker(self, stage: int, microbatch: int) -> int:
        return sum(self.replicas[:stage]) + microbatch % self.replicas[stage]


def pipedream_pipeline(
    stages: int, every: int = 1, vertical_sync: bool = False, replicas: int | tuple[int, ...] = 1
) -> AsyncPipeline:
    """Return a PipeDream pipeline, with weight stashing and without a flush.

    Args:
        every: backward passes of a stage per update.
        vertical_sync: whether all stages use the version that stage 0 had when the microbatch entered.
        replicas: workers per stage, or of each stage.

    Raises:
        ConfigError: no stages, replicas for another number of stages, or microbatches per update that replicas cannot
            share evenly.
    """
    return _checked(AsyncPipeline("pipedream", replica_counts(stages, replicas), every, vertical_sync=vertical_sync))


def pipedream_2bw_pipeline(stages: int, every: int, replicas: int | tuple[int, ...] = 1) -> AsyncPipeline:
    """Return a PipeDream-2BW pipeline, with an update after each group of microbatches and two weight versions.

    Args:
        every: number of microbatches of a group, at least one per worker.
        replicas: workers per stage, or of each stage.
    """
    stream = _checked(AsyncPipeline("2bw", replica_counts(stages, replicas), every, two_buffers=True))
    if every < sum(stream.replicas):
        raise ConfigError(
            f"with two versions of the weights, {sum(stream.replicas)} workers need at least as many microbatches from "
            f"one update to the next, not {every}: set every to {sum(stream.replicas)} or more"
        )
    return stream


def _checked(stream: AsyncPipeline) -> AsyncPipeline:
    check_at_least(1, every=stream.every)
    for stage, count in enumerate(stream.replicas):
        if stream.every % count:
            raise ConfigError(
                f"the {count} replicas of stage {stage} cannot share the {stream.every} microbatches from one update "
                f"to the next evenly: set every to a multiple of {count}"
            )
    return stream


def window(stream: AsyncPipeline, begin: int, end: int) -> Schedule:
    """Return the operations while microbatches ``begin <= m < end`` enter, numbered since the pipeline was last empty.

    Values still in flight at the end are received in the next window or by :func:`drain`.

    Raises:
        ConfigError: the window ends before it begins.
    """
    check_at_least(0, begin=begin)
    check_at_least(begin, end=end)
    orders: list[Order] = [[] for _ in range(sum(stream.replicas))]
    for stage in range(stream.stages):
        lag = stream.lag(stage)
        for microbatch in range(begin, end):
            order = orders[stream.worker(stage, microbatch)]
            order.append(Operation(Kind.FORWARD, stage, microbatch, stream.version(stage, microbatch)))
            if microbatch >= lag:
                order += _backward(stream, stage, microbatch - lag)
    return _schedule(stream, end, orders)


def drain(stream: AsyncPipeline, end: int) -> Schedule:
    """Return the operations that empty the pipeline after microbatch ``end - 1``, the last to enter.

    The last microbatches make an update even if they are fewer than ``every``.
    """
    check_at_least(0, end=end)
    orders: list[Order] = [[] for _ in range(sum(stream.replicas))]
    for stage in range(stream.stages):
        for microbatch in range(max(0, end - stream.lag(stage)), end):
            orders[stream.worker(stage, microbatch)] += _backward(stream, stage, microbatch)
        full, rest = divmod(end, stream.every)
        for last in range((full + 1) * stream.every - stream.replicas[stage], (full + 1) * stream.every):
            if rest and last >= end:
                orders[stream.worker(stage, last)] += _update(stream, stage, full + 1)
    return _schedule(stream, end, orders)


def _backward(stream: AsyncPipeline, stage: int, microbatch: int) -> Iterator[Operation]:
    """Yield a backward pass, and the update if this is the worker's last backward pass before an update."""
    yield Operation(Kind.BACKWARD, stage, microbatch, stream.version(stage, microbatch))
    version = (microbatch + stream.replicas[stage]) // stream.every
    if version > microbatch // stream.every:
        yield from _update(stream, stage, version)


def _update(stream: AsyncPipeline, stage: int, version: int) -> Iterator[Operation]:
    if stream.replicas[stage] > 1:
        yield Operation(Kind.REDUCE, stage)
    yield Operation(Kind.UPDATE, stage, version=version)


def _schedule(stream: AsyncPipeline, end: int, orders: list[Order]) -> Schedule:
    workers = tuple(tuple(with_transfers(order, stream.stages)) for order in orders)
    return Schedule(stream.name, stream.stages, end, workers)
