"""Secure aggregation: the sum is exact without the parties that drop out, and no message shows a vector."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from paceline.comm.values import encode
from paceline.comm.world import World
from paceline.events import EventLog
from paceline.testing import threads

pytest.importorskip("cryptography")

from paceline.strategies.local.masking import masked_sum, shamir
from paceline.strategies.local.masking.masked_sum import MaskedSum, Privacy
from paceline.strategies.local.masking.party import Party, unmask

GENERATOR = np.random.default_rng(0)


@pytest.mark.parametrize("missing", [(), (2, 5, 9), (0, 1, 2)])
def test_the_sum_is_that_of_the_parties_that_have_delivered(missing: Sequence[int]) -> None:
    """Any seven of ten parties remove the masks that the others have left in the sum, modulo 2**64."""
    vectors = {number: GENERATOR.integers(-(2**62), 2**62, 50) for number in range(10)}
    parties = {number: Party(number, threshold=7) for number in vectors}
    keys = {number: one.keys for number, one in parties.items()}
    sealed = {number: one.share(keys) for number, one in parties.items()}
    masked = {number: parties[number].mask(vectors[number]) for number in vectors if number not in missing}
    shares = {
        number: parties[number].reveal({sender: sealed[sender][number] for sender in sealed}, masked)
        for number in masked
    }
    total = sum(masked.values(), np.zeros(50, np.int64))
    assert (unmask(total, keys, shares, 7) == sum(vectors[number] for number in masked)).all()
    for number, one in masked.items():
        assert not (one == vectors[number]).any()
    with pytest.raises(AssertionError, match="shares of both secrets"):
        parties[3].reveal({}, [])


def test_fewer_shares_than_the_threshold_tell_nothing() -> None:
    secret = 2**256 - 3
    shares = shamir.split(secret, range(1, 6), threshold=3)
    assert shamir.join({point: shares[point] for point in (2, 4, 5)}) == secret
    assert shamir.join({point: shares[point] for point in (2, 4)}) != secret
    assert shamir.split(secret, range(1, 6), threshold=3) != shares


class Recorded:
    """World that records what this worker sends, as bytes and by kind."""

    latency = 0.0  # need not be measured

    def __init__(self, world: World) -> None:
        self._world, self.sent, self.kinds = world, list[bytes](), list[str]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._world, name)

    def gather(self, value: Any, what: str) -> list[Any]:
        held = [*value.values()] if isinstance(value, dict) else [value]
        self.kinds.append(type(held[0]).__name__)
        self.sent.append(encode(value))
        return self._world.gather(value, what)

    def start_transfers(self, sends: Any, receives: Any, *more: Any, **given: Any) -> Any:
        self.kinds.append("tensor")
        self.sent += [one.tensor.numpy().tobytes() for one in sends]
        return self._world.start_transfers(sends, receives, *more, **given)


def test_a_worker_receives_no_update_in_clear(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three workers with one to four sites, each sends keys, encrypted shares, a masked sum and shares only."""
    updates = {site: torch.from_numpy(GENERATOR.normal(size=40)) for site in range(8)}
    updates[6] = torch.full((40,), math.nan, dtype=torch.float64)
    updates[7] = updates[7] + 300
    weights, owners = {site: 3.0 + site for site in updates}, ((0,), (1, 2, 3, 6), (4, 5, 7))

    def act(world: World) -> tuple[Any, Recorded]:
        recorded, own = Recorded(world), {site: updates[site] for site in owners[world.rank]}
        masked = MaskedSum(recorded, EventLog(None, world.rank), 40, set())  # type: ignore[arg-type]
        return masked.mean(9, own, weights, threshold=5), recorded

    found = threads.run(3, act)
    added, total = range(6), sum(weights[site] for site in range(6))
    wanted = sum(updates[site] * weights[site] for site in added) / total
    weighted = [updates[site] * weights[site] for site in added]
    unit = math.ldexp(1.0, math.ceil(sum(weights.values())).bit_length() + masked_sum.LARGEST - 62)
    whole = [(one / unit).round().to(torch.int64) for one in (*weighted, sum(weighted[1:4]), sum(weighted[4:6]))]
    clear = [one.numpy() for one in (*whole, *weighted, *updates.values())]
    for result, recorded in found:
        assert result is not None and result[1] == [*added]
        assert result[0].tolist() == pytest.approx(wanted.tolist(), abs=1e-12)
        assert [kind for kind in recorded.kinds if kind != "tensor"] == ["PublicKeys", "dict", "list", "dict"]
        for sent in recorded.sent:
            for vector in clear:
                assert not any(vector[place : place + 2].tobytes() in sent for place in range(0, 40, 2))


def test_a_round_whose_masks_were_removed_is_not_added_again() -> None:
    """Its second sum without the sites of a lost worker would show their updates."""

    def act(world: World) -> Any:
        masked = MaskedSum(world, EventLog(None, world.rank), 4, {7} if world.rank == 1 else set())
        own, weights = {world.rank: torch.ones(4, dtype=torch.float64)}, {0: 1.0, 1: 1.0}
        few, found = masked.mean(9, own, weights, 3), masked.mean(11, own, weights, 2)
        return few, found, [masked.was_revealed(step) for step in (7, 9, 11)]

    for few, found, revealed in threads.run(2, act):
        assert few is None and found[0].tolist() == [1.0] * 4 and revealed == [True, False, True]


def test_an_update_is_clipped_and_noise_hides_it() -> None:
    """The noise of two sites has the deviation that a sum is to have, and each worker gets the same sum."""
    large, length = torch.full((2500,), 1.0, dtype=torch.float64), 2500

    def act(world: World) -> Any:
        clipped, noisy = (
            MaskedSum(world, EventLog(None, world.rank), length, set(), privacy)
            for privacy in (Privacy(clip=0.5), Privacy(clip=0.5, noise=4.0))
        )
        own, weights = {world.rank: large * world.rank}, {0: 1.0, 1: 1.0}
        return clipped.mean(1, own, weights, 2), noisy.mean(1, own, weights, 2), noisy.mean(2, own, weights, 2)

    for (mean, _), (first, _), (second, _) in (everyone := threads.run(2, act)):
        assert float(mean.norm()) == pytest.approx(0.25) and mean.equal(everyone[0][0][0])
        assert float(first.std()) == pytest.approx(1.0, rel=0.1) and first.equal(everyone[0][1][0])
        assert float((first - second).std()) == pytest.approx(2**0.5, rel=0.1)


@pytest.mark.slow
def test_each_round_spends_privacy() -> None:
    """Against the bound by Renyi divergence: T * a / (2 * noise**2) + log(1 / delta) / (a - 1) for any a."""
    pytest.importorskip("opacus")
    from paceline.strategies.local.masking.accounting import epsilon_of

    spent = [epsilon_of(8.0, rounds, 1e-5) for rounds in (1, 10, 100)]
    bounds = [
        min(rounds * order / 128 + math.log(1e5) / (order - 1) for order in range(2, 64)) for rounds in (1, 10, 100)
    ]
    assert 0 < spent[0] < spent[1] < spent[2]
    assert all(0.7 * bound < found <= bound for found, bound in zip(spent, bounds, strict=True))
