"""Price of a way to exchange gradients: the size of buckets, and the format on the wire.

::

    compute     F0 B0 F1 B1 ─── last backward pass ───┐
    bucket 0                            └ exchange ───────┐
    bucket 1                                              └ exchange ───┐
    bucket 2                                                            └ exchange ─┐ decode, update

Buckets become ready during the last backward pass and are exchanged one after the other, so a step ends when the last
bucket has arrived. What is not known in advance is measured: a way that seems good is tried for some steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

CLOSE = 1.15  # a way is tried if its price is at most this multiple of the lowest
_TRIALS = 4
_WORTH = 0.98  # a way that rounds more is taken if a step takes at most this fraction of the time


class Way(NamedTuple):
    """Way to exchange gradients: the format, and the size of buckets in MB. None stands for the default size."""

    wire: str
    megabytes: float | None = None

    def __str__(self) -> str:
        return f"{self.wire}, buckets of {'the default size' if self.megabytes is None else f'{self.megabytes:g} MB'}"


class Coding(NamedTuple):
    """Seconds that a format takes on a worker: to encode a microbatch and add it, and to decode the sum."""

    encode: float = 0.0
    decode: float = 0.0


class Computing(NamedTuple):
    """Seconds that the slowest worker computes before its last backward pass, which may overlap, and in that pass."""

    before: float
    last: float


class Link(NamedTuple):
    """Seconds that a bucket takes whatever its size, and bytes of a bucket per second."""

    latency: float
    rate: float


def computing(seconds: float, groups: int) -> Computing:
    """Return the parts of a step's computation from the seconds until the last backward pass.

    A backward pass takes twice as long as a forward pass.

    >>> computing(7.0, groups=3)
    Computing(before=7.0, last=2.0)
    """
    return Computing(seconds, 2 * seconds / (3 * groups - 2))


def link_of(buckets: Sequence[int], seconds: float, latency: float) -> Link:
    """Return the link on which an exchange of buckets, with nothing else to do, takes ``seconds``."""
    return Link(latency, sum(buckets) / max(seconds - len(buckets) * latency, 1e-6))


def price(buckets: Sequence[int], work: Computing, link: Link, coding: Coding, microbatches: int) -> float:
    """Return the seconds until the gradients of a step are decoded.

    Args:
        buckets: bytes of each bucket, in the order in which they become ready.
        microbatches: number of microbatches that a worker encodes one by one.

    >>> price([10, 10], Computing(4.0, 2.0), Link(0.0, 10.0), Coding(), 1)
    7.0
    """
    before, last = work.before + (microbatches - 1) * coding.encode, work.last + coding.encode
    whole, ready, end = max(sum(buckets), 1), 0, 0.0
    for nbytes in buckets:
        ready += nbytes
        end = max(end, before + last * ready / whole) + link.latency + nbytes / link.rate
    return end + coding.decode


def trials(prices: Mapping[Way, float], current: Way) -> list[Way]:
    """Return the ways that are worth a trial: the cheapest of each format, then other buckets of the cheapest format.

    >>> prices = {Way("float32"): 3.0, Way("int8"): 1.02, Way("int8", 1): 1.01, Way("int4"): 1.0}
    >>> [str(way) for way in trials(prices, Way("float32"))]
    ['int4, buckets of the default size', 'int8, buckets of 1 MB']
    """
    ways = sorted(prices, key=prices.__getitem__)
    close = [way for way in ways if prices[way] <= CLOSE * prices[ways[0]]]
    firsts = [next(way for way in close if way.wire == wire) for wire in dict.fromkeys(way.wire for way in close)]
    more = [way for way in close if way.wire == ways[0].wire]
    return [way for way in dict.fromkeys([*firsts, *more]) if way != current][:_TRIALS]


def best(seconds: Mapping[Way, float], wires: Sequence[str]) -> Way:
    """Return the way with the shortest measured step. A way that rounds more has to be worth it.

    Args:
        wires: formats, from the finest to the coarsest.

    >>> best({Way("float32"): 1.0, Way("int8"): 0.99, Way("float32", 1): 1.01}, ["float32", "int8"])
    Way(wire='float32', megabytes=None)
    """
    found: Way | None = None
    for wire in wires:
        own = [way for way in seconds if way.wire == wire]
        fastest = min(own, key=seconds.__getitem__, default=None)
        if fastest is not None and (found is None or seconds[fastest] <= _WORTH * seconds[found]):
            found = fastest
    assert found is not None
    return found
