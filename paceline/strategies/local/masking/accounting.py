"""Privacy that noisy sums have spent, by the accountant of opacus (Mironov 2017, Renyi differential privacy)."""

from __future__ import annotations

import warnings

from opacus.accountants import RDPAccountant


def epsilon_of(noise: float, rounds: int, delta: float) -> float:
    """Return epsilon of a number of sums with Gaussian noise.

    Sites are drawn by a seed that all workers know, so each counts as if it took part in every round.

    Args:
        noise: deviation of the noise in a sum, in multiples of the largest norm of an update.
    """
    accountant = RDPAccountant()
    accountant.history = [(noise, 1.0, rounds)]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Optimal order")  # then epsilon is an upper bound that is not tight
        return float(accountant.get_epsilon(delta=delta))
