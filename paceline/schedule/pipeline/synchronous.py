"""Synchronous pipelines with one stage per worker: layer-wise, GPipe, 1F1B.

Four stages; a backward pass is drawn as long as a forward pass::

    layer-wise    one microbatch at a time: the workers divide the memory, but do not compute in parallel
    0  F0                   B0 F1                   B1
    1     F0             B0       F1             B1
    2        F0       B0             F1       B1
    3           F0 B0                   F1 B1

    GPipe         all forward passes, then all backward passes (Huang et al. 2019, arXiv 1811.06965)
    0  F0 F1 F2 F3                   B0 B1 B2 B3
    1     F0 F1 F2 F3             B0 B1 B2 B3
    2        F0 F1 F2 F3       B0 B1 B2 B3
    3           F0 F1 F2 F3 B0 B1 B2 B3

    1F1B          backward passes as soon as possible (PipeDream-Flush: Narayanan et al. 2021, arXiv 2006.09503)
    0  F0 F1 F2 F3          B0    B1    B2    B3
    1     F0 F1 F2       B0 F3 B1    B2    B3
    2        F0 F1    B0 F2 B1 F3 B2    B3
    3           F0 B0 F1 B1 F2 B2 F3 B3

GPipe and 1F1B take equally long. With P stages and V microbatches, workers idle for (P - 1) / (V + P - 1) of that time.
Stage s keeps the activations of V microbatches in GPipe and of min(V, P - s) in 1F1B.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, repeat

from paceline.schedule.pipeline.operations import Kind, Operation, Schedule
from paceline.schedule.pipeline.replicas import backwards_first, forwards_first, replica_counts
from paceline.schedule.pipeline.transfers import Order, build_schedule, check_at_least, replicated_orders
from paceline.schedule.shares import even


def layerwise(stages: int, microbatches: int, replicas: int = 1) -> Schedule:
    """Build a schedule in which each microbatch passes all stages forward and backward before the next one starts.

    Args:
        stages: number of stages, and workers of each pipeline.
        microbatches: number of microbatches of all pipelines.
        replicas: number of pipelines that share the microbatches.

    Raises:
        ConfigError: no stages, or fewer microbatches than replicas.
    """
    check_at_least(1, stages=stages)

    def order(stage: int, count: int) -> Order:
        return _forwards_and_backwards(stage, range(count), 0)

    return build_schedule("layerwise", stages, microbatches, replicated_orders(order, stages, microbatches, replicas))


def gpipe(stages: int, microbatches: int, replicas: int | Sequence[int] = 1) -> Schedule:
    """Build the GPipe schedule: all forward passes, then all backward passes.

    Args:
        replicas: workers per stage, or of each stage. If they differ, a worker takes microbatches in the order of
            arrival (``replicas.runs``), otherwise in increasing order.

    Raises:
        ConfigError: no stages or workers, fewer microbatches than replicas, or replicas of another number of stages.
    """
    counts = replica_counts(stages, replicas)
    check_at_least(max(counts), microbatches=microbatches)
    if len(set(counts)) > 1:
        return build_schedule("gpipe", stages, microbatches, forwards_first(counts, microbatches))
    orders = [
        _forwards_and_backwards(stage, share, len(share))
        for stage, count in enumerate(counts)
        for share in even(microbatches, count)
    ]
    return build_schedule("gpipe", stages, microbatches, orders)


def one_forward_one_backward(stages: int, microbatches: int, replicas: int | Sequence[int] = 1) -> Schedule:
    """Build the 1F1B schedule: stage s of P alternates forward and backward passes after P - 1 - s forward passes.

    Arguments and errors are those of :func:`gpipe`.
    """
    counts = replica_counts(stages, replicas)
    check_at_least(max(counts), microbatches=microbatches)
    if len(set(counts)) > 1:
        return build_schedule("1f1b", stages, microbatches, backwards_first(counts, microbatches))
    orders = [
        _forwards_and_backwards(stage, share, stages - 1 - stage)
        for stage, count in enumerate(counts)
        for share in even(microbatches, count)
    ]
    return build_schedule("1f1b", stages, microbatches, orders)


def _forwards_and_backwards(stage: int, share: range, lead: int) -> Order:
    """Return both passes of each microbatch, with forward passes ``lead`` microbatches ahead of backward passes."""
    forwards = chain(share, repeat(None))
    backwards = chain(repeat(None, min(lead, len(share))), share)
    order = []
    for forward, backward in zip(forwards, backwards, strict=False):
        if forward is not None:
            order.append(Operation(Kind.FORWARD, stage, forward))
        if backward is not None:
            order.append(Operation(Kind.BACKWARD, stage, backward))
    return order
