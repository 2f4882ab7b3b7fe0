"""Weighted mean of the updates of sites by secure aggregation over the workers.

An update is multiplied by the weight of its site and rounded to whole numbers, in units of a power of two that follows
from the weights of all sites. So the sum fits into 64 bits, and does not depend on the workers that add.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from itertools import chain
from operator import itemgetter
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from paceline.comm.reduction.choice import Wanted, reduction_for
from paceline.comm.world import World
from paceline.events import EventLog
from paceline.schedule.tree import Node
from paceline.strategies.local.masking.party import Party, Vector, unmask

LARGEST = 8
"""An update may change a weight by less than 2 to the power of this."""
_BITS = 62  # of the sum, without its sign; one is left for rounding

_TAGS = 1 << 23
_T = TypeVar("_T")


class Privacy(NamedTuple):
    """Bound on the update of a site, and the noise in a sum."""

    clip: float | None = None  # largest norm of an update. None: any
    noise: float | None = None  # deviation of the noise in the smallest sum, in multiples of ``clip``

    def of(self, update: torch.Tensor, threshold: int) -> torch.Tensor:
        """Return the clipped update with its site's noise, of the variance of the sum divided by the threshold."""
        norm = float(torch.linalg.vector_norm(update))
        if self.clip is not None and norm > self.clip:
            update = update * (self.clip / norm)
        if not (self.noise and self.clip):
            return update
        generator = np.random.default_rng(int.from_bytes(os.urandom(32), "big"))
        deviation = self.noise * self.clip / math.sqrt(threshold)
        return update + torch.from_numpy(generator.normal(0.0, deviation, len(update)))


NOT_PRIVATE = Privacy()


class MaskedSum:
    """Secure aggregation of vectors of a fixed length.

    Args:
        revealed: steps after which this worker has revealed shares. It must outlive the membership.
        privacy: clipping and noise of a site's update.
    """

    def __init__(
        self, world: World, events: EventLog, length: int, revealed: set[int], privacy: Privacy = NOT_PRIVATE
    ) -> None:
        self._world, self._length, self._revealed, self._privacy = world, length, revealed, privacy
        self._reduction = None
        if world.size > 1:
            example = torch.empty(length, dtype=torch.int64, device=world.device)
            self._reduction = reduction_for(world, [example], events, "masked updates", _TAGS, Wanted("auto"))

    def was_revealed(self, step: int) -> bool:
        """Return whether a worker has revealed shares after this step, before another one was lost.

        Another sum would differ from the first one by the updates of the lost sites.
        """
        return any(self._world.gather(step in self._revealed, f"masked sum after step {step}"))

    def mean(
        self, step: int, updates: Mapping[int, torch.Tensor], weights: Mapping[int, float], threshold: int
    ) -> tuple[torch.Tensor, list[int]] | None:
        """Return the mean of the updates that can be added, and the numbers of their sites. All workers call this.

        Args:
            step: step of the outer step.
            updates: updates of this worker's sites as vectors in double precision, by number.
            weights: weights of all sites of the round.
            threshold: smallest number of sites in a sum.

        Returns:
            None if there are too few sites.
        """
        what = f"masked sum after step {step}"
        if len(weights) < threshold:
            return None
        parties = {site: Party(site, threshold) for site in updates}
        keys = self._everyone({site: one.keys for site, one in parties.items()}, what)
        sealed = self._everyone({site: one.share(keys) for site, one in parties.items()}, what)
        unit = math.ldexp(1.0, math.ceil(math.fsum(weights.values())).bit_length() + LARGEST - _BITS)
        vectors = {
            site: (sent * (weights[site] / unit)).round().to(torch.int64).numpy()
            for site, update in updates.items()
            if bool(((sent := self._privacy.of(update.cpu(), threshold)).abs() < 2**LARGEST).all())  # not if it is NaN
        }
        held = self._world.gather([*vectors], what)
        delivered = sorted(chain(*held))
        if len(delivered) < threshold:
            return None
        total = self._sum([parties[site].mask(vector) for site, vector in vectors.items()], held)
        self._revealed.add(step)
        shares = {
            site: parties[site].reveal({sender: sealed[sender][site] for sender in sealed}, delivered)
            for site in vectors
        }
        whole = unmask(total, keys, self._everyone(shares, what), threshold)
        mean = torch.from_numpy(whole).double() * (unit / math.fsum(weights[site] for site in delivered))
        return mean, delivered

    def _sum(self, masked: list[Vector], held: list[list[int]]) -> Vector:
        """Return the sum of the masked vectors of all workers; ``held`` are the sites of each rank."""
        own = sum(masked, np.zeros(self._length, np.int64))
        if self._reduction is None:
            return own
        self._reduction.begin([[Node(0, rank)] if sites else [] for rank, sites in enumerate(held)], 1.0)
        for slot in self._reduction.slots(0):
            slot.copy_(torch.from_numpy(own))
        self._reduction.written(0)
        self._reduction.finish()
        self._world.synchronize()
        return self._reduction.mean(0).cpu().numpy().copy()

    def _everyone(self, own: Mapping[int, _T], what: str) -> dict[int, _T]:
        """Return the values of all sites."""
        everyone = self._world.gather(dict(own), what)
        return dict(sorted((pair for one in everyone for pair in one.items()), key=itemgetter(0)))
