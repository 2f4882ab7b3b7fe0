"""All workers that have the newest state send a part of it to one that joins."""

import doctest
import json
import re
from typing import Any

import pytest
from launching import Run
from test_join_and_leave import JOINED, PATHS, on
from test_recovery import ELASTIC, check

from paceline.comm.collectives import exchange
from paceline.comm.collectives.exchange import even_shares
from paceline.testing import faults

TELL_SHARES = """
import paceline.training.recovery.state_transfer as state_transfer
inner = state_transfer.exchange
def exchange(world, shares, receivers, fill):
    print("shares", [len(share) for share in shares], "to", list(receivers), "at", world.rank, flush=True)
    return inner(world, shares, receivers, fill)
state_transfer.exchange = exchange
"""


@pytest.mark.sampled(1)
@PATHS
def test_each_of_the_others_sends_a_part(run: Run, undisturbed: Any, path: str) -> None:
    ran = run(TELL_SHARES + on(path, JOINED), *ELASTIC, faults=faults.kill(rank=2, step=2), arguments=(4,))
    check(ran, undisturbed(JOINED, (4,)), 3)
    told = {line for text in ran.logs.values() for line in text.splitlines() if line.startswith("shares")}
    sent = {match[1]: match[2] for line in told if (match := re.fullmatch(r"shares (.*) to (.*) at \d", line))}
    parts = [
        [size for rank, size in enumerate(json.loads(shares)) if rank not in json.loads(receivers)]
        for shares, receivers in sent.items()
    ]
    assert all(max(sizes) - min(sizes) <= 128 for sizes in parts), ran.report()
    # A survivor that was a step behind the killed worker may have got the state of the other one before.
    assert [len(sizes) for sizes in parts if len(sizes) > 1] == [2], ran.report()


@pytest.mark.slow(turns=6)
@pytest.mark.parametrize(("victim", "path"), [(1, "memory"), (0, "network")])
def test_one_is_killed_while_it_sends(run: Run, undisturbed: Any, victim: int, path: str) -> None:
    """The other one sends everything, at the same bits."""
    plan = faults.kill(rank=2, step=2) + faults.kill(rank=victim, step=0, point="sending the state")
    ran = run(on(path, JOINED), *ELASTIC, faults=plan, arguments=(4,))
    check(ran, undisturbed(JOINED, (4,)), 2)
    assert len(ran.launcher("lost")) == 2, ran.report()
    assert 3 in ran.memberships()[-1], ran.report()


@pytest.mark.parametrize("total", [1, 63, 64, 65, 1000, 1 << 20])
@pytest.mark.parametrize("senders", [(0,), (1, 2), (0, 1, 3, 4)], ids=str)
def test_shares_are_even_and_make_the_whole(total: int, senders: tuple[int, ...]) -> None:
    shares = even_shares(total, senders, 5)
    assert [byte for share in shares for byte in share] == list(range(total))
    sizes = [len(shares[rank]) for rank in senders]
    assert max(sizes) - min(sizes) <= 128
    assert sum(sizes) == total


def test_the_example_is_true() -> None:
    assert doctest.testmod(exchange).failed == 0
