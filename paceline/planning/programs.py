"""Programs of the workers for each strategy, for :mod:`paceline.planning.simulate`: what training does, as operations.

They take shares, nodes of the canonical tree, buckets and pipeline schedules from the functions that training uses.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from paceline.planning.simulate import Compute, Exchange, Machine, Program, Send, Step, Wait
from paceline.schedule.balance import LayerCost
from paceline.schedule.link_shares import full
from paceline.schedule.pipeline.operations import Kind, Schedule
from paceline.schedule.shares import even
from paceline.schedule.slices import STAGES
from paceline.schedule.tree import whole_nodes

_HEADER_BYTES = 1024


@dataclass(frozen=True)
class Work:
    """Measured costs of training a model.

    Attributes:
        passes: costs of each layer in a pass over so many microbatches at once, by this number. A backward pass adds
            its gradients to those before it.
        microbatches: microbatches of a batch.
        fused: whether a worker computes its microbatches in one pass.
        update: seconds of the optimizer's update of all parameters.
        overhead: seconds of a step besides all these.
        core_load: cores used while computing; 0 for layers that sleep.
        add: seconds to add the gradients of all parameters to another sum.
        message_seconds: seconds to start a transfer and to wait for it.
    """

    passes: Mapping[int, tuple[LayerCost, ...]]
    microbatches: int
    fused: bool = False
    update: float = 0.0
    overhead: float = 0.0
    core_load: float = 1.0
    add: float = 0.0
    message_seconds: float = 1e-4

    def layers(self, microbatches: int) -> tuple[LayerCost, ...]:
        """Return the cost of each layer in a pass over so many microbatches, along a line between measured numbers."""
        if microbatches in self.passes:
            return self.passes[microbatches]
        sizes = sorted(self.passes)
        if len(sizes) == 1:
            return _line(self.passes[sizes[0]], self.passes[sizes[0]], microbatches / sizes[0] - 1, scale=True)
        above = next((place for place, size in enumerate(sizes) if size > microbatches), len(sizes) - 1)
        low, high = sizes[max(above - 1, 0)], sizes[max(above, 1)]
        return _line(self.passes[low], self.passes[high], (microbatches - low) / (high - low))

    @property
    def add_bytes_per_second(self) -> float:
        """Bytes of a sum that a worker adds to another one in a second."""
        return self.parameter_bytes / self.add if self.add else math.inf

    @property
    def parameter_bytes(self) -> int:
        """Bytes of all weights."""
        return sum(layer.parameter_bytes for layer in self.passes[min(self.passes)])


def _line(
    low: Sequence[LayerCost], high: Sequence[LayerCost], part: float, scale: bool = False
) -> tuple[LayerCost, ...]:
    def between(one: float, other: float) -> float:
        return one * (1 + part) if scale else one + part * (other - one)

    return tuple(
        LayerCost(
            one.name,
            between(one.forward, other.forward),
            between(one.backward, other.backward),
            int(between(one.output_bytes, other.output_bytes)),
            one.parameter_bytes,
            int(between(one.kept_bytes, other.kept_bytes)),
        )
        for one, other in zip(low, high, strict=True)
    )


@dataclass(frozen=True)
class Place:
    """Workers of a run.

    Attributes:
        machines: the machines.
        of_worker: number of the machine of each worker.
        simulated: ranks that are simulated, each for all others that do the same. Defaults to all.
    """

    machines: tuple[Machine, ...]
    of_worker: tuple[int, ...]
    simulated: tuple[int, ...] = ()

    @property
    def workers(self) -> int:
        """Number of workers."""
        return len(self.of_worker)

    @property
    def group(self) -> tuple[int, ...]:
        """Ranks that are simulated."""
        return self.simulated or tuple(range(self.workers))

    def folded(self, microbatches: int) -> Place:
        """Return these workers, of which one machine is simulated for all whose workers have as much to do."""
        shares = even(microbatches, self.workers)
        kinds = {
            (
                self.machines[self.of_worker[host[0]]],
                *((len(shares[one]), len(whole_nodes(shares[one]))) for one in host),
            ): host
            for host in self.hosts()
        }
        return replace(self, simulated=tuple(sorted(rank for host in kinds.values() for rank in host)))

    def hosts(self) -> list[list[int]]:
        """Return the ranks of each machine that has any."""
        found: dict[int, list[int]] = {}
        for rank, at in enumerate(self.of_worker):
            found.setdefault(at, []).append(rank)
        return list(found.values())


class _Buckets:
    """Buckets of gradients in the order in which the backward pass fills them.

    Args:
        owners: number of buckets into which a full one is cut, each for one owner.
    """

    def __init__(self, layers: Sequence[LayerCost], size: int, owners: int = 1) -> None:
        self.nbytes: list[float] = []
        self.full_after: list[int] = []  # number of layers, from the last, after whose backward pass it is full
        held = 0
        for done, layer in enumerate(reversed(layers), start=1):
            held += layer.parameter_bytes
            if held >= size or (held and done == len(layers)):
                self.nbytes += [held / owners] * owners
                self.full_after += [done] * owners
                held = 0


def _overlapped(work: Work, layers: Sequence[LayerCost], buckets: _Buckets, reduction: _Reduction) -> Iterator[Step]:
    """Run a backward pass that sends each full bucket and adds up the one before it, as ``comm.reduction`` does."""
    sizes = buckets.nbytes
    sent = reduced = 0
    for done, layer in enumerate(reversed(layers), start=1):
        yield Compute(layer.backward, work.core_load)
        while sent < len(sizes) and buckets.full_after[sent] == done:
            yield from reduction.scatter(sent, sizes[sent])
            sent += 1
            if reduced < sent - reduction.owners * (sent < len(sizes)):
                yield from reduction.reduce(reduced, sizes[reduced])
                reduced += 1
    for bucket in range(reduced, len(sizes)):
        yield from reduction.reduce(bucket, sizes[bucket])
    yield from reduction.await_means()


def _passes(work: Work, share: Sequence[int]) -> list[int]:
    """Return the number of microbatches of each pass of a worker."""
    return [len(share)] * bool(share) if work.fused else [1] * len(share)


def data_parallel(
    work: Work,
    place: Place,
    rank: int,
    step: int,
    exact: bool = False,
    stage: int = 0,
) -> Program:
    """Compute a share of the batch, average the gradients along the tree, and update.

    Args:
        work: measured costs.
        place: all workers.
        rank: rank of this worker.
        step: number of the step.
        exact: whether each worker sends whole nodes of the canonical tree.
        stage: stage of ZeRO of strategy ``sharded``. With 0, all workers make the whole update.
    """
    shares = even(work.microbatches, place.workers)
    passes = _passes(work, shares[rank])
    yield Compute(work.overhead)
    for size in passes[:-1]:
        yield Compute(_seconds(work, size), work.core_load)
    last = work.layers(passes[-1]) if passes else tuple(replace(one, forward=0, backward=0) for one in work.layers(1))
    if place.workers == 1:
        yield Compute(sum(layer.forward + layer.backward for layer in last), work.core_load)
        yield Compute(work.update)
        return
    yield from _header(place, step, "header")
    yield Compute(sum(layer.forward for layer in last), work.core_load)
    counts = [len(whole_nodes(share)) if exact or not share else 1 for share in shares]
    reduction = _Reduction(
        work, place, rank, step, counts, divided=stage > 0, shared_weights=stage == STAGES["parameters"]
    )
    buckets = _Buckets(last, reduction.bucket_bytes, reduction.owners)
    yield from _overlapped(work, last, buckets, reduction)
    yield Wait(("header", step))
    if not stage:
        yield Compute(work.update)
        return
    yield from _header(place, step, "norms")
    yield Wait(("norms", step))
    yield Compute(work.update / place.workers)
    for bucket, nbytes in enumerate(buckets.nbytes):
        yield from reduction.spread(bucket, nbytes)
    yield from reduction.await_means()


def _header(place: Place, step: int, name: str) -> Iterator[Step]:
    """Start to tell all workers a few numbers."""
    yield Exchange(place.group, (name, step), _HEADER_BYTES, _HEADER_BYTES)


def _seconds(work: Work, size: int) -> float:
    return sum(layer.forward + layer.backward for layer in work.layers(size))


class _Reduction:
    """Average of gradients: in shared memory, between machines, or both (``comm.reduction.choice``).

    Args:
        counts: sums that each worker sends.
        divided: whether each mean stays with its owner.
        shared_weights: whether the workers of a machine share one copy of the weights.
    """

    def __init__(
        self,
        work: Work,
        place: Place,
        rank: int,
        step: int,
        counts: Sequence[int],
        divided: bool = False,
        shared_weights: bool = False,
    ) -> None:
        self._work, self._step, self._counts, self._rank = work, step, counts, rank
        self._divided, self._shared_weights = divided, shared_weights
        hosts = place.hosts()
        self._group, self._own = place.group, tuple(next(host for host in hosts if rank in host))
        self._inside, self._machines = len(self._own), len(hosts)
        self._shared = any(len(host) > 1 for host in hosts) and not (divided and len(hosts) > 1)
        across = self._machines if self._shared else place.workers
        self._peers = across - 1 if self._machines > 1 else 0
        self.owners = place.workers if divided and self._peers else 1
        self._nodes = 1 if self._shared and self._peers else counts[rank]
        self._parts = across if self._shared else sum(counts)
        self._columns = self._inside if self._shared else 1
        self.bucket_bytes = full(across * self._columns if self._peers else 1)
        self._spread: list[Hashable] = []

    def scatter(self, bucket: int, nbytes: float) -> Iterator[Step]:
        """Send a full bucket."""
        if self._shared or not self._peers:
            yield Exchange(self._own, ("gradients", self._step, bucket), 0, 0)
        else:
            yield from self._across(bucket, nbytes)

    def _across(self, bucket: int, nbytes: float) -> Iterator[Step]:
        if self.owners > 1:  # the whole bucket goes to one worker
            mine = bucket % self.owners == self._rank % self.owners
            yield Compute(self._work.message_seconds * self._nodes)
            received = (sum(self._counts) - self._nodes) * nbytes if mine else 0.0
            yield Exchange(self._group, ("sums", self._step, bucket), 0.0 if mine else self._nodes * nbytes, received)
            return
        chunk = nbytes / (self._peers + 1) / self._columns
        yield Compute(self._work.message_seconds * self._nodes * self._peers)
        received = chunk * (self._peers if self._shared else sum(self._counts) - self._counts[self._rank])
        yield Exchange(self._group, ("sums", self._step, bucket), self._nodes * self._peers * chunk, received)

    def reduce(self, bucket: int, nbytes: float) -> Iterator[Step]:
        """Wait for the parts of a bucket, add them up, and send the means."""
        rate = self._work.add_bytes_per_second
        if self._shared or not self._peers:
            yield Wait(("gradients", self._step, bucket))
            parts = sum(self._counts[one] for one in self._own)
            copies = 0 if self._divided else self._inside - 1
            yield Compute((parts + copies) * nbytes / self._inside / rate)
            if not self._peers:
                if not self._divided:
                    yield from self.spread(bucket, nbytes)
                return
            yield from self._across(bucket, nbytes)
        yield Wait(("sums", self._step, bucket))
        yield Compute(self._parts * nbytes / (1 if self.owners > 1 else self._peers + 1) / self._columns / rate)
        if not self._divided:
            yield from self.spread(bucket, nbytes)

    def spread(self, bucket: int, nbytes: float) -> Iterator[Step]:
        """Send the means of a bucket, or the weights, to all others."""
        key = ("means", self._step, bucket)
        self._spread.append(key)
        if not self._peers:
            if self._divided and not self._shared_weights:
                yield Compute((self._inside - 1) * nbytes / self._inside / self._work.add_bytes_per_second)
            yield Exchange(self._own, key, 0, 0)
            return
        if self.owners > 1:
            mine = bucket % self.owners == self._rank % self.owners
            yield Compute(self._work.message_seconds)
            yield Exchange(self._group, key, self._peers * nbytes if mine else 0.0, 0.0 if mine else nbytes)
            return
        chunk = nbytes / (self._peers + 1) / self._columns
        yield Compute(self._work.message_seconds * self._peers)
        yield Exchange(self._group, key, self._peers * chunk, self._peers * chunk)

    def await_means(self) -> Iterator[Step]:
        """Wait for the means of all buckets."""
        for key in self._spread:
            yield Wait(key)


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
        counts = [len(whole_nodes(share)) if exact else int(bool(share)) for share in shares]
        reduction = _Reduction(work, place, rank, step, counts)
        buckets = _Buckets(work.layers(1), reduction.bucket_bytes)
        still = tuple(replace(one, forward=0, backward=0) for one in work.layers(1))
        yield from _overlapped(work, still, buckets, reduction)


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
                yield Compute(sum(layer.forward for layer in cost[stage]), work.core_load)
            case Kind.BACKWARD:
                yield Compute(sum(layer.backward for layer in cost[stage]), work.core_load)
            case Kind.INPUT | Kind.WEIGHT:
                yield Compute(sum(layer.backward for layer in cost[stage]) / 2, work.core_load)
            case Kind.SEND:
                to = schedule.worker_of(peer, microbatch)
                nbytes = cost[min(stage, peer)][-1].output_bytes
                yield Compute(work.message_seconds)
                yield Send(to, ("activations", step, stage, peer, microbatch), nbytes)
            case Kind.RECEIVE:
                yield Wait(("activations", step, peer, stage, microbatch))
            case Kind.REDUCE:
                group = schedule.workers_of(stage)
                count = len(group) * place.workers // len(schedule.workers)
                mean = sum(layer.parameter_bytes for layer in cost[stage]) * (count - 1) / count
                for phase in ("gradients", "means") if count > 1 else ():
                    yield Exchange(group, (phase, step, stage), mean, mean)
                    yield Wait((phase, step, stage))
            case Kind.UPDATE:
                part = sum(layer.parameter_bytes for layer in cost[stage]) / total
                yield Compute(work.update * part)
    yield Exchange(place.group, ("header", step), _HEADER_BYTES, _HEADER_BYTES)
    yield Wait(("header", step))
