"""Inner steps of workers of different speeds: each worker claims parts of batches, as many as it can compute.

::

    local.replicas = 3, local.every = 4       ▓ inner step on a part   O outer step

    worker 0   ▓ ▓ ▓ ▓ ▓ ▓ O                  12 parts. Worker 2 takes four times as long: it claims a part, and leaves
    worker 1   ▓ ▓ ▓ ▓ ▓   O                  the last three to the others, which compute them sooner than it would
    worker 2   ▓▓▓▓▓▓▓     O                  compute one.

A part is the share of a batch on which a replica would train if all made the same number of inner steps. These are the
dynamic local updates of asynchronous local SGD (Liu et al. 2024, arXiv 2401.09135), but with synchronous outer steps.

With ``local.quorum`` an outer step proceeds without late workers (Douillard et al. 2026, arXiv 2604.21428). A late one
passes the batches whose parts others have claimed, and sends the update of its replica in its next outer step. With a
quorum no worker leaves parts to others: if they were late, no worker would compute these parts.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from paceline.comm.assignment.part_claims import Enough, claims_for
from paceline.comm.world import World


class ClaimedParts:
    """Parts that this worker claims between two exchanges."""

    def __init__(self, world: World) -> None:
        self._claims, self._rank, self._size, self._met = claims_for(world), world.rank, world.size, False
        self._seconds, self._made = 0.0, 0  # of this worker since the last exchange
        self._paces: Sequence[float] = ()  # of all workers before it

    @property
    def pace(self) -> float:
        """Seconds of this worker for a part since the last exchange. 0 if it has computed none."""
        return self._seconds / self._made if self._made else 0.0

    def claim(self, step: int, shares: Sequence[range], later: int) -> Iterator[range]:
        """Yield the parts of a batch that this worker computes.

        The first batch has a part for each worker, so that each has a loss and a pace to report.

        Args:
            shares: microbatches of each part.
            later: number of parts of later batches before the next exchange.
        """
        own, left = list[int](), len(shares) + later
        kept = 0 if self._met else min(self._size, len(shares))
        if not self._met:
            self._claims.meet()
            self._met, own = True, [self._rank] if self._rank < kept else []
        while not leaves_rest(self._paces, self._rank, left):
            if own:
                part = own.pop()
            elif (claimed := self._claims.claim(step, len(shares) - kept)) is not None:
                part = kept + claimed
            else:
                return
            left = len(shares) - part - 1 + later
            begin = time.perf_counter()
            yield shares[part]
            self._seconds, self._made = self._seconds + time.perf_counter() - begin, self._made + 1

    def arrive(self, step: int, enough: Enough, grace: float) -> list[int]:
        """Return the ranks of the exchange after a step. See :meth:`PartClaims.arrive`."""
        return self._claims.arrive(step, enough, grace)

    def exchanged(self, paces: Sequence[float], complete: bool) -> None:
        """Begin again after an exchange, in which the workers have reported their :attr:`pace`.

        Args:
            paces: seconds of each worker for a part, 0 if unknown. Empty if this worker is to leave no parts to others.
            complete: whether all workers took part. Late ones may still try to claim parts of these batches.
        """
        if complete:
            self._claims.forget()
        self._paces, self._seconds, self._made = paces, 0.0, 0


def leaves_rest(paces: Sequence[float], rank: int, left: int) -> bool:
    """Return whether faster workers would compute all parts that are left before a worker has computed one.

    A faster worker first ends the part on which it is. All workers know the same ``paces``, and the fastest leaves
    nothing to others, so all parts are computed. A worker that had no part before the last exchange tries again.

    Args:
        paces: seconds of each worker for a part. 0 if unknown.
        left: largest possible number of parts that are left.

    >>> [leaves_rest([1.0, 1.0, 4.0], 2, left) for left in (8, 6, 4)]
    [False, False, True]
    """
    own = paces[rank] if paces else 0.0
    faster = [pace for pace in paces if 0 < pace < own]
    return (left + len(faster)) < own * sum(1 / pace for pace in faster)
