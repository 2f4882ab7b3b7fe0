"""Programs of the workers for each strategy, for :mod:`paceline.planning.simulate`: the operations of training.

They take shares, nodes of the canonical tree, buckets and pipeline schedules from the functions that training uses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

from paceline.planning.costs import Work
from paceline.planning.reductions import Reduction, Updaters
from paceline.planning.simulate import Call, Compute, Exchange, Place, Program, Send, Step, Wait
from paceline.schedule import slices
from paceline.schedule.balance import LayerCost
from paceline.schedule.pipeline.operations import Kind, Schedule
from paceline.schedule.shares import even
from paceline.schedule.tree import nodes_of

_HEADER_BYTES = 1024
_even = lru_cache(even)


def _passes(work: Work, share: Sequence[int]) -> list[int]:
    """Return the number of microbatches of each pass of a worker."""
    return [len(share)] * bool(share) if work.fused else [1] * len(share)


def data_parallel(
    work: Work,
    place: Place,
    rank: int,
    step: int,
    exact: bool = False,
    owners: Updaters | None = None,
    shares: tuple[range, ...] | None = None,
) -> Program:
    """Compute a share of the batch, average the gradients along the tree, and update.

    Args:
        work: measured costs.
        place: all workers.
        rank: rank of this worker.
        step: number of the step.
        exact: whether each worker sends whole nodes of the canonical tree.
        owners: workers that update a part each (``sharded``, ``parameter-server``). None: all make the whole update.
        shares: microbatches of each worker of ``stealing``, which sends gradients when all are computed. Defaults to
            even shares, whose last backward pass sends them.
    """
    stolen, shares = shares is not None, shares or _even(work.microbatches, place.workers)
    passes = [1] * len(shares[rank]) if stolen else _passes(work, shares[rank])
    yield Compute(work.overhead)
    for size in passes if stolen else passes[:-1]:
        if stolen and len(place.machines) > 1:
            yield Compute(2 * place.machines[place.of_worker[rank]].latency, 0.0)  # a lease
        yield Compute(_seconds(work, size), work.core_load)
    last = _still(work) if stolen or not passes else work.layers(passes[-1])
    if place.workers == 1:
        yield Compute(sum(layer.forward + layer.backward for layer in last), work.core_load)
        yield Compute(work.update)
        return
    yield from _header(place, step, "header")
    yield Compute(sum(layer.forward for layer in last), work.core_load)
    counts = _sums(shares, exact)
    reduction = Reduction(work, place, rank, step, counts, last, owners)
    yield from reduction.overlapped(last)
    yield Wait(("header", step))
    if owners is not None:
        yield from _header(place, step, "norms")
        yield Wait(("norms", step))
    yield Compute(work.update * reduction.updated)
    if owners is not None:
        yield from reduction.spread()


@lru_cache
def _sums(shares: tuple[range, ...], exact: bool) -> list[int]:
    """Return the number of sums that each worker sends."""
    return [len(nodes_of(share)) if exact else int(bool(share)) for share in shares]


def _still(work: Work) -> tuple[LayerCost, ...]:
    """Return the layers without their passes."""
    return tuple(replace(one, forward=0, backward=0) for one in work.layers(1))


def asynchronous(work: Work, place: Place, rank: int, step: int, servers: int, copied: bool = False) -> Program:
    """Pull weights, compute a whole batch, and push its gradients (``parameter-server``, mode async).

    The threads of the servers answer, while their workers compute. If shards are ``copied``, a server sends gradients
    on to the next worker of another machine, too.
    """
    sizes = [one.parameter_bytes for one in work.layers(1)]
    shards = [0] * servers
    for one in slices.whole(sizes, servers):
        shards[one.owner] += one.stop - one.start
    yield Compute(work.overhead)
    for home, nbytes in enumerate(shards):
        yield Call(home, ("weights", step, home), 0.0, nbytes)
    for home in range(servers):
        yield Wait(("weights", step, home))
    for size in _passes(work, range(work.microbatches)):
        yield Compute(_seconds(work, size), work.core_load)
    for home, nbytes in enumerate(shards):
        others = (one % place.workers for one in range(home + 1, home + place.workers))
        far = next((one for one in others if place.of_worker[one] != place.of_worker[home]), None)
        seconds = work.update * nbytes / (sum(shards) or 1)
        yield Call(home, ("gradients", step, home), nbytes, 0.0, seconds, far if copied else None)
    for home in range(servers):
        yield Wait(("gradients", step, home))


def _header(place: Place, step: int, name: str) -> Iterator[Step]:
    """Start to send a few numbers to all workers."""
    yield Exchange(place.group, (name, step), _HEADER_BYTES, _HEADER_BYTES)


def _seconds(work: Work, size: int) -> float:
    return sum(layer.forward + layer.backward for layer in work.layers(size))


def local(work: Work, place: Place, rank: int, step: int, replicas: int, every: int, exact: bool = False) -> Program:
    """Make an inner step of each replica of this worker, and an outer step in the last of a period (``diloco``)."""
    held = even(replicas, place.workers)[rank]
    own = work.microbatches // replicas
    passes = _passes(work, range(own)) * len(held)
    yield Compute(work.overhead)
    for size in passes:
        yield Compute(_seconds(work, size), work.core_load)
    yield Compute(work.update * len(held))
    if place.workers == 1:
        return
    yield from _header(place, step, "header")
    yield Wait(("header", step))
    if (step + 1) % every == 0:
        shares = even(replicas, place.workers)
        yield from Reduction(work, place, rank, step, _sums(shares, exact), _still(work)).overlapped(_still(work))


def pipeline(
    work: Work, place: Place, rank: int, step: int, schedule: Schedule, bounds: Sequence[tuple[int, int]]
) -> Program:
    """Perform a worker's operations of a pipeline schedule (strategy ``pipeline``).

    If the place has more workers than the schedule, the schedule is that of one of several equal pipelines.
    """
    layers = work.layers(1)
    cost = [layers[slice(*bound)] for bound in bounds]
    total = sum(layer.parameter_bytes for layer in layers) or 1
    yield Compute(work.overhead)
    for kind, stage, microbatch, _, peer in schedule.workers[rank]:
        match kind:
            case Kind.FORWARD:
                yield Compute(work.pass_seconds)
                yield Compute(sum(layer.forward for layer in cost[stage]), work.core_load)
            case Kind.BACKWARD:
                yield Compute(work.pass_seconds)
                yield Compute(sum(layer.backward for layer in cost[stage]), work.core_load)
            case Kind.INPUT | Kind.WEIGHT:
                part = 0.5 if stage else float(kind is Kind.WEIGHT)  # stage 0 needs no gradient for its input
                yield Compute(work.half_pass_seconds)
                yield Compute(part * sum(layer.backward for layer in cost[stage]), work.core_load)
            case Kind.SEND:
                to = schedule.worker_of(peer, microbatch)
                nbytes = cost[min(stage, peer)][-1].output_bytes
                yield Compute(work.message_seconds)
                yield Send(to, ("activations", step, stage, peer, microbatch), nbytes)
            case Kind.RECEIVE:
                yield Wait(("activations", step, peer, stage, microbatch))
                yield Compute(work.message_seconds)
            case Kind.REDUCE:
                group = schedule.workers_of(stage)
                count = len(group) * place.workers // len(schedule.workers)
                mean = sum(layer.parameter_bytes for layer in cost[stage]) * (count - 1) / count
                for phase in ("gradients", "means") if count > 1 else ():
                    yield Exchange(group, (phase, step, stage), mean, mean, count - 1)
                    yield Wait((phase, step, stage))
            case Kind.UPDATE:
                part = sum(layer.parameter_bytes for layer in cost[stage]) / total
                yield Compute(work.update * part)
    yield Exchange(place.group, ("header", step), _HEADER_BYTES, _HEADER_BYTES)
    yield Wait(("header", step))
