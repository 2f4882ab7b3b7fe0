"""Choice of the reduction by the machines of the workers and the memory that they can share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from paceline.comm.reduction.collective import CollectiveExchange
from paceline.comm.reduction.direct import DirectExchange
from paceline.comm.reduction.exchange import Exchange
from paceline.comm.reduction.executor import Reduction
from paceline.comm.reduction.hierarchical import HierarchicalExchange
from paceline.comm.reduction.link_rates import measure_latency, measure_links
from paceline.comm.reduction.shared_memory import SharedMemoryExchange
from paceline.comm.world import World
from paceline.events import EventLog
from paceline.schedule.link_shares import SMALLEST_BUCKET, bucket_bytes, of_links

_WORTH_MEASURING = 2**23  # number of reduced bytes per step from which on links are measured
_MEASUREMENTS = 3
"""Maximum number of measurements, because a link of a busy machine may seem slow in some of them by chance."""


class Wanted(NamedTuple):
    """Requested kind of reduction and size of its buckets."""

    # ``tree``, ``collective`` for the all-reduce of the back end, or ``auto`` for the faster of the two
    kind: str = "tree"
    megabytes: float | None = None  # size of a bucket in MB. Defaults to the best size for the kind.
    widen: bool = False  # whether workers add up sums in half precision in float32


def reduction_for(
    world: World, tensors: list[torch.Tensor], events: EventLog, name: str, tags: int = 0, wanted: Wanted | None = None
) -> Reduction:
    """Return the fastest reduction of the wanted kind for these machines.

    The tree sends the minimum number of bytes between machines. Workers of one machine exchange their bytes through
    memory if they can share it. A machine with a slow link adds up less. If memory cannot be shared, as on GPUs, the
    collectives of the back end are faster.
    """
    kind, megabytes, widen = wanted or Wanted()
    size = None if megabytes is None else int(megabytes * 1e6)
    exchange: Exchange
    _measure_latency(world, events)
    if kind == "collective" or (kind == "auto" and world.transport.capabilities.ordered):
        exchange = CollectiveExchange(world)
    elif world.shared_memory is not None:
        exchange = SharedMemoryExchange(world.shared_memory)
    else:
        nbytes = sum(one.nbytes for one in tensors)
        shares = _link_shares(world, nbytes, events)
        if shares and size is None:
            size = min(SMALLEST_BUCKET, bucket_bytes(nbytes, len(world.hosts)))
        if world.host_memory is not None:
            exchange = HierarchicalExchange(world, world.host_memory, tags, shares, widen)
        else:
            exchange = DirectExchange(world, tags, _shares_of_ranks(world.hosts, shares))
    return Reduction(world, exchange, tensors, events, name, size, widen)


def _shares_of_ranks(hosts: Sequence[Sequence[int]], shares: list[float]) -> list[float]:
    """Return the share of each rank. The workers of a machine divide its share equally."""
    if not shares:
        return []
    of_rank = {rank: share / len(ranks) for ranks, share in zip(hosts, shares, strict=True) for rank in ranks}
    return [of_rank[rank] for rank in sorted(of_rank)]


def _measure_latency(world: World, events: EventLog) -> None:
    """Measure the latency of the network between the machines, once."""
    if len(world.hosts) > 1 and world.latency is None:
        world.latency = measure_latency(world)
        events.mark("latency", seconds=world.latency)


def _link_shares(world: World, nbytes: int, events: EventLog) -> list[float]:
    """Return the share that each machine adds up if a link is slow, otherwise an empty list.

    Shares have no effect for two machines, because both always send all their bytes.
    """
    if len(world.hosts) < 3 or nbytes < _WORTH_MEASURING or world.transport.capabilities.ordered:
        return []
    if world.link_shares is not None:
        return world.link_shares
    rates = [0.0] * len(world.hosts)
    for _ in range(_MEASUREMENTS):
        rates = [max(pair) for pair in zip(rates, measure_links(world), strict=True)]
        shares = of_links(rates)
        if equal := len({*shares}) == 1:
            break
    events.mark("links", megabytes_per_second=[rate / 1e6 for rate in rates], shares=shares)
    world.link_shares = [] if equal else shares
    return world.link_shares
