"""Interleaved 1F1B (Narayanan et al. 2021, arXiv 2104.04473): each worker holds several stages, P apart."""

from __future__ import annotations

from paceline.schedule.operations import Kind, Operation, Schedule
from paceline.schedule.shares import even
from paceline.schedule.transfers import Order, at_least, connected, side_by_side


def interleaved(workers: int, microbatches: int, chunks: int, replicas: int = 1) -> Schedule:
    """1F1B with ``chunks`` stages for each worker: worker w holds the stages w, w + workers, w + 2 workers, ...

    Args:
        workers: of one pipeline.
        microbatches: of all pipelines; any number.
        chunks: stages of each worker.
        replicas: how many pipelines share the microbatches.

    Raises:
        ConfigError: no workers, fewer than two chunks, or fewer microbatches than replicas.
    """
    at_least(1, workers=workers)
    at_least(2, chunks=chunks)

    def order(worker: int, count: int) -> Order:
        return _order(worker, workers, count, chunks)

    orders = side_by_side(order, workers, microbatches, replicas)
    return connected("interleaved", workers * chunks, microbatches, orders)


def _order(worker: int, workers: int, microbatches: int, chunks: int) -> Order:
    """Microbatches go in groups: all of a group through one stage of the worker, then through its next one.

    Groups have at least as many microbatches as there are workers: what the last worker has done with the first one of
    a group is then back at the first worker when it is done with the last one.
    """
    groups = even(microbatches, max(1, microbatches // workers))
    forwards = [
        Operation(Kind.FORWARD, worker + workers * chunk, microbatch)
        for group in groups
        for chunk in range(chunks)
        for microbatch in group
    ]
    backwards = [
        Operation(Kind.BACKWARD, worker + workers * chunk, microbatch)
        for group in groups
        for chunk in reversed(range(chunks))
        for microbatch in group
    ]
    lead = 2 * (workers - 1 - worker) + (chunks - 1) * len(groups[0])
    if microbatches < workers:
        lead = len(forwards)
    order = forwards[:lead]
    for index, backward in enumerate(backwards):
        order += [*forwards[lead + index : lead + index + 1], backward]
    return order
