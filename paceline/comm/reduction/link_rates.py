"""Measurement of the latency of the network, and of the rate of each machine's link, before the first step."""

from __future__ import annotations

from itertools import pairwise
from statistics import median
from time import perf_counter

import torch

from paceline.comm.transport.base import Message
from paceline.comm.world import World

TAG = (1 << 28) - 10  # below the tags of the MPI back end
_BYTES = 2**21  # size of a message: larger than the network's buffers, small compared to the gradients of a step
_ROUNDS = (1, 2, 1, 2)
"""Distance in machines between sender and receiver, by round. A neighbor of a slow link is fast in other rounds."""
_MESSAGES = 3  # small messages, of whose times the median is the latency


def measure_latency(world: World) -> float:
    """Return the seconds until a small message of each worker has reached all others. All must call this together."""
    times = [perf_counter()]
    for _ in range(_MESSAGES + 1):  # the first one only brings the workers together
        world.gather(None, "start")
        times.append(perf_counter())
    return median(after - before for before, after in pairwise(times[1:]))


def measure_links(world: World) -> list[float]:
    """Measure the bytes per second that each machine can send or receive. All workers must call this together.

    Args:
        world: workers on at least three machines. The first worker of each machine sends 2 MB four times.
    """
    leaders = [ranks[0] for ranks in world.hosts]
    seen = [0.0] * len(leaders)
    for distance in _ROUNDS:
        world.gather(distance, "start")
        if world.rank in leaders:
            place = leaders.index(world.rank)
            source = (place - distance) % len(leaders)
            rate = _exchange(world, leaders[(place + distance) % len(leaders)], leaders[source])
            seen[source], seen[place] = max(seen[source], rate), max(seen[place], rate)
    return [max(rates) for rates in zip(*world.gather(seen, "start"), strict=True)]


def _exchange(world: World, target: int, source: int) -> float:
    """Send to one rank, receive from another, and return the received bytes per second."""
    sent, got = torch.zeros(_BYTES, dtype=torch.uint8), torch.empty(_BYTES, dtype=torch.uint8)
    begin = perf_counter()
    with world.awaiting("while the links of the machines were measured"):
        receive, send = world.start_transfers([Message(sent, target, TAG)], [Message(got, source, TAG)])
        receive.wait()
        seconds = perf_counter() - begin
        send.wait()
    return _BYTES / seconds
