"""Interleaved 1F1B (Narayanan et al. 2021, arXiv 2104.04473): each worker holds several stages.

Two workers with two stages each, four microbatches; a backward pass is drawn as long as a forward pass::

    0  F0.0 F0.1 F2.0 F2.1 F0.2 B2.0 F0.3 B2.1 F2.2 B0.0 F2.3 B0.1      B2.2      B2.3 B0.2 B0.3
    1       F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 F1.2 B1.0 F1.3 B1.1 F3.2 B3.2 F3.3 B3.3 B1.2 B1.3

The pipeline is filled after P - 1 small stages instead of P - 1 large stages. With v stages per worker, the workers are
idle for 1 / v of the idle time of 1F1B, keep more activations, and send v times as much.
"""

from __future__ import annotations

from paceline.schedule.pipeline.operations import Kind, Operation, Schedule
from paceline.schedule.pipeline.transfers import Order, build_schedule, check_at_least, replicated_orders
from paceline.schedule.shares import even


def interleaved(workers: int, microbatches: int, chunks: int, replicas: int = 1) -> Schedule:
    """Build 1F1B with ``chunks`` stages per worker: worker w holds stages w, w + workers, w + 2 workers, ...

    Args:
        workers: number of workers of each pipeline.
        microbatches: number of microbatches of all pipelines, not necessarily a multiple of the workers.
        chunks: number of stages of each worker.
        replicas: number of pipelines that share the microbatches.

    Raises:
        ConfigError: no workers, fewer than two chunks, or fewer microbatches than replicas.
    """
    check_at_least(1, workers=workers)
    check_at_least(2, chunks=chunks)

    def order(worker: int, count: int) -> Order:
        return _order(worker, workers, count, chunks)

    orders = replicated_orders(order, workers, microbatches, replicas)
    return build_schedule("interleaved", workers * chunks, microbatches, orders)


def _order(worker: int, workers: int, microbatches: int, chunks: int) -> Order:
    """Return a worker's operations in rounds: all microbatches of a round pass a stage, then the worker's next stage.

    A round has at least one microbatch per worker. So the last worker's output for the round's first microbatch reaches
    the first worker by the time that it has finished the round's last microbatch.
    """
    rounds = even(microbatches, max(1, microbatches // workers))
    forwards = [
        Operation(Kind.FORWARD, worker + workers * chunk, microbatch)
        for batch in rounds
        for chunk in range(chunks)
        for microbatch in batch
    ]
    backwards = [
        Operation(Kind.BACKWARD, worker + workers * chunk, microbatch)
        for batch in rounds
        for chunk in reversed(range(chunks))
        for microbatch in batch
    ]
    lead = 2 * (workers - 1 - worker) + (chunks - 1) * len(rounds[0])
    if microbatches < workers:
        lead = len(forwards)
    order = forwards[:lead]
    for index, backward in enumerate(backwards):
        order += [*forwards[lead + index : lead + index + 1], backward]
    return order
