"""Which reduction fits the workers: by the machines that they are on, and what they can share there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from paceline.comm.reduction.buckets import SMALLEST_BUCKET
from paceline.comm.reduction.collective import CollectiveExchange
from paceline.comm.reduction.direct import DirectExchange
from paceline.comm.reduction.exchange import Exchange
from paceline.comm.reduction.executor import Reduction
from paceline.comm.reduction.hierarchical import HierarchicalExchange
from paceline.comm.reduction.link_rates import measure_links
from paceline.comm.reduction.shared_memory import SharedMemoryExchange
from paceline.comm.world import World
from paceline.events import EventLog
from paceline.schedule.link_shares import bucket_bytes, of_links

_WORTH_MEASURING = 2**23
"""Bytes of what is reduced in each step."""
_MEASUREMENTS = 3
"""After which a link that seems slow is: on a busy machine one may be late by chance."""


class Wanted(NamedTuple):
    """What is asked of a reduction.

    Attributes:
        kind: ``tree``; ``collective``, the all-reduce of the back end; or ``auto``, what is faster.
        megabytes: of a bucket; None: what is best for the kind.
    """

    kind: str = "tree"
    megabytes: float | None = None


def reduction_for(
    world: World, tensors: list[torch.Tensor], events: EventLog, name: str, tags: int = 0, wanted: Wanted | None = None
) -> Reduction:
    """Return the fastest reduction on these machines that does what is wanted.

    The tree sends the fewest bytes between machines that can be, and none inside of one: what the workers of a machine
    can share goes through memory. A machine with a slow link adds up less. Where memory cannot be shared, as on GPUs,
    the collectives of the back end are faster.
    """
    kind, megabytes = wanted or Wanted()
    size = None if megabytes is None else int(megabytes * 1e6)
    exchange: Exchange
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
            exchange = HierarchicalExchange(world, world.host_memory, tags, shares)
        else:
            exchange = DirectExchange(world, tags, _shares_of_ranks(world.hosts, shares))
    return Reduction(world, exchange, tensors, events, name, size)


def _shares_of_ranks(hosts: Sequence[Sequence[int]], shares: list[float]) -> list[float]:
    """Return the share of each rank: the workers of a machine add up equal parts of its share."""
    of_rank = {rank: share / len(ranks) for ranks, share in zip(hosts, shares, strict=False) for rank in ranks}
    return [of_rank[rank] for rank in sorted(of_rank)]


def _link_shares(world: World, nbytes: int, events: EventLog) -> list[float]:
    """Return the share that each machine adds up if a link is slow, else an empty list.

    Of two machines both send all they have, whatever their shares.
    """
    if len(world.hosts) < 3 or nbytes < _WORTH_MEASURING or world.transport.capabilities.ordered:
        return []
    rates = [0.0] * len(world.hosts)
    for _ in range(_MEASUREMENTS):
        rates = [max(pair) for pair in zip(rates, measure_links(world), strict=True)]
        shares = of_links(rates)
        if equal := len({*shares}) == 1:
            break
    events.mark("links", megabytes_per_second=[rate / 1e6 for rate in rates], shares=shares)
    return [] if equal else shares
