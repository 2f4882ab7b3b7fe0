"""Workers are lost under strategies that do not promise bits: each sample is used as often as the pages say."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from launching import BATCH, LENGTH, Ran

from paceline.data.order import Order
from paceline.observe import ledger
from paceline.testing import faults

ELASTIC = "-n", 3, "--elastic", "1:3"
COUNTED = """
import json, os, signal
import sample_counts, scripted

scripted.hold_back(int(os.environ.get("WORKERS", 3)), "end")
settings, end = json.loads(os.environ["SETTINGS"]), int(os.environ.get("END", -1))
data = sample_counts.TensorDataset(sample_counts.inputs())
if settings["strategy"] == "hogwild":
    data = sample_counts.rows()
    settings |= {"forward": sample_counts.picked, "model": sample_counts.table(), "data": data}
session = sample_counts.start(**settings | {"timeout_seconds": 120})

def kill_both_holders():
    for member in session._context.world.coordinator._members[1::-1]:
        os.kill(member.pid, signal.SIGKILL)

for batch in session.batches(epochs=2):
    if "BOTH" in os.environ and (session.rank, session._context.world.generation, batch.step) == (0, 0, 6):
        kill_both_holders()
    scripted.end_launcher(session, batch, end)
    report = session.step(batch)
    if session.position == 8:
        session.evaluate(data)
(weight,) = session._context.compute.model.parameters()
wanted = [-2 * 2.0**-10] if settings["strategy"] == "hogwild" else sample_counts.expected(2)
scripted.end(session, weights=sorted(set(weight.flatten().tolist())), wanted=sorted(wanted))
"""
"""The weights tell how often each sample was used."""
NETWORK = """
import paceline.comm.shm.arena, paceline.training.recovery.formation
paceline.training.recovery.formation.can_share = lambda: False
"""
STEPS = 16


def settings(strategy: str, **more: Any) -> dict[str, str]:
    return {"SETTINGS": json.dumps({"strategy": strategy, **more})}


ASYNC = settings("parameter-server", server={"mode": "async"})
BOUNDED = settings("parameter-server", server={"mode": "bounded", "staleness": 1, "drop_after": 2})
DEDICATED = settings("parameter-server", server={"mode": "async", "dedicated": True})


def check_counts(ran: Ran, finishers: int) -> Ran:
    """Check that each step was applied once, and that each sample was used once in each epoch."""
    assert ran.code == 0, ran.report()
    found = ran.printed()
    assert len(found) >= finishers and len({one["fingerprint"] for one in found}) == 1, ran.report()
    assert all(one["weights"] == one["wanted"] for one in found), ran.report()
    assert ledger.check(ledger.read(ran.run / "events"), STEPS) == [], ran.report()
    return ran


@pytest.mark.promise(
    "docs/asynchronous.md",
    "With `paceline run --elastic` a lost worker only makes training slower: the step that it had claimed is free "
    "again.",
    "is left out if that had not begun, and another worker computes the step;",
)
def test_hogwild_and_kills_before_a_step_and_in_an_evaluation(launched: Any) -> None:
    plan = faults.kill(rank=0, step=5) + faults.kill(rank=1, step=8, point="in evaluate")
    words = "-n", 4, "--elastic", "1:4"
    ran = check_counts(launched(COUNTED, *words, faults=plan, WORKERS="4", **settings("hogwild")), 2)
    assert len(ran.launcher("lost")) == 2, ran.report()


@pytest.mark.promise(
    "docs/asynchronous.md",
    "A lost server loses nothing: shared memory holds two copies of the state, an update is written into the spare one",
)
def test_a_worker_is_killed_in_its_update_at_a_server(launched: Any) -> None:
    plan = faults.kill(rank=1, step=4, point="between reduction and update")
    check_counts(launched(COUNTED, *ELASTIC, faults=plan, **ASYNC), 2)


@pytest.mark.promise(
    "docs/asynchronous.md",
    "With `server.copies = 2` another worker, of another machine if there is one, holds a copy of each shard and of "
    "the table, and has every update before it counts.",
)
def test_a_dedicated_server_of_the_network_is_killed(launched: Any) -> None:
    plan = faults.kill(rank=0, step=4, point="after update")
    check_counts(launched(NETWORK + COUNTED, *ELASTIC, faults=plan, **DEDICATED), 2)


@pytest.mark.promise(
    "docs/asynchronous.md",
    "Every worker's loop comes to every step and takes the lowest one that no worker computes yet",
    "each sample is used exactly once, and a slow worker computes fewer steps.",
)
def test_two_of_four_are_killed_in_bounded_mode(launched: Any) -> None:
    """Two are left, as one that is alone does not number its updates."""
    plan = faults.kill(rank=0, step=5, point="in the loader") + faults.kill(rank=1, step=6)
    check_counts(launched(COUNTED, "-n", 4, "--elastic", "1:4", faults=plan, WORKERS="4", **BOUNDED), 2)


@pytest.mark.promise(
    "docs/asynchronous.md",
    "A checkpoint also records which steps are done and which are open, so each sample is used exactly once even then.",
)
def test_asynchronous_steps_that_are_open_in_a_checkpoint(launched: Any) -> None:
    ended = launched(COUNTED, *ELASTIC, END="5", **ASYNC)
    assert ended.code == 75 and len(ended.saved()) == 1, ended.report()
    check_counts(launched(COUNTED, "-n", 2, "--resume", "auto", after=ended, **ASYNC), 2)


@pytest.mark.promise(
    "docs/asynchronous.md",
    "If both are lost at once, or with `server.copies = 1`, all go back to the newest checkpoint; without one the run "
    "ends.",
)
def test_both_holders_of_a_shard_are_killed(launched: Any) -> None:
    words = "--set", "checkpoint.every=4", "--set", "checkpoint.background=false"
    ran = launched(NETWORK + COUNTED, *ELASTIC, *words, BOTH="1", **ASYNC)
    assert ran.code == 0, ran.report()
    assert ran.printed() and all(one["weights"] == one["wanted"] for one in ran.printed()), ran.report()
    assert {one["step"] for one in ran.events() if one["event"] == "resume"} == {4}, ran.report()


PLAIN = """
import json, os
import scripted
from subjects import images

scripted.hold_back(3, "end")
session = scripted.begin(exact=False, timeout_seconds=120, **json.loads(os.environ["SETTINGS"]))
for batch in session.batches(steps=8):
    if "LEAVE" in os.environ:
        scripted.leave(session, batch, 1, int(os.environ["LEAVE"]))
    scripted.say(session, session.step(batch))
    if session.position == 4:
        session.evaluate(images(40))
scripted.end(session)
"""
ORDER = Order(LENGTH, BATCH, 8, seed=0)
BACKUP = settings("backup")
LOCAL = settings("local-sgd", local={"every": 3})


def check_together(ran: Ran, finishers: int) -> Ran:
    """Check that each step was done once, and that all ended with the same model."""
    assert ran.code == 0, ran.report()
    found = ran.printed()
    assert len(found) >= finishers and found == [found[0]] * len(found), ran.report()
    assert ledger.check(ledger.read(ran.run / "events"), 8, ORDER.samples_of) == [], ran.report()
    return ran


def check_epochs(ran: Ran) -> None:
    """Check that what the last workers of each step used makes each epoch."""
    used: dict[int, tuple[int, Any]] = {}
    for one in ran.events():
        if one["event"] == "backup":
            used[one["step"]] = max(used.get(one["step"], (-1, None)), (one["generation"], one["used"]))
    assert sorted(used) == list(range(8)), ran.report()
    for first in (0, 4):
        members = [pair for step in range(first, first + 4) for _, group in used[step][1] for pair in group]
        samples = [sample for step, number in members for sample in ORDER.microbatches_of(step)[number]]
        assert Counter(samples) == Counter(range(LENGTH)), ran.report()


@pytest.mark.promise(
    "docs/backup.md",
    "A worker may be lost, come back or be replaced, and a run may continue from a checkpoint with other "
    "workers: each sample is still used once.",
)
def test_backup_and_a_kill_between_exchange_and_update(launched: Any) -> None:
    plan = faults.kill(rank=1, step=6, point="between reduction and update")
    check_epochs(check_together(launched(PLAIN, *ELASTIC, faults=plan, **BACKUP), 2))


@pytest.mark.promise("docs/backup.md", "all tensors of a step are summed over the same workers.")
def test_backup_over_the_network_and_a_kill_in_an_evaluation(launched: Any) -> None:
    plan = faults.kill(rank=0, step=4, point="in evaluate")
    check_epochs(check_together(launched(NETWORK + PLAIN, *ELASTIC, faults=plan, **BACKUP), 2))


@pytest.mark.promise("docs/diloco.md", "When a worker is lost, all go back to that state.")
def test_local_sgd_and_a_kill_before_the_outer_step(launched: Any) -> None:
    check_together(launched(PLAIN, *ELASTIC, faults=faults.kill(rank=0, step=5, point="after update"), **LOCAL), 2)


@pytest.mark.promise(
    "docs/diloco.md",
    "A worker that joins, or a notice that a machine goes away, is handled at the next outer step",
)
def test_local_sgd_and_sigterm(launched: Any) -> None:
    ran = check_together(launched(PLAIN, *ELASTIC, LEAVE="3", **LOCAL), 2)
    assert ran.memberships() == [[0, 1, 2], [0, 2]] and not ran.launcher("lost"), ran.report()
