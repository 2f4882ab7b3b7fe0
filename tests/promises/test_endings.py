"""How runs end: what the console says, which exit code a run has, and what it leaves."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
from fork_server import ForkServer
from launching import Ran, launch

from paceline.observe import ledger
from paceline.testing import faults

HEAD = """
import json, os, signal, socket, sys
from pathlib import Path
import scripted
from subjects import images

run, rank = Path(os.environ["PACELINE_RUN"]), int(os.environ["RANK"])
print("begun by", rank, flush=True)
"""
LOOP = """
session = scripted.begin(timeout_seconds=120)
for batch in session.batches(steps=6):
    # in the loop
    report = session.step(batch)
    session.log({"twice": 2 * report.loss})
session.print("printed once by", session.rank)
scripted.end(session, value=session.evaluate(images(40)))
"""
STRANGER = """
if rank == 0:
    host, port = os.environ["PACELINE_COORDINATOR"].split(":")
    heard = b""
    key = b" " + b"0" * 64
    for words in (b"worker 0" + key + key + b"\\n", b'{"type": "end", "code": 0}\\n', b"\\0" * 5000):
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            connection.settimeout(60)
            try:
                heard += connection.recv(4096)
                connection.sendall(words)
                heard += connection.recv(4096)
            except ConnectionError:
                pass
    (run / "heard").write_bytes(heard)
"""
"""Somebody without a secret speaks to the coordinator."""


def in_loop(what: str) -> str:
    return HEAD + LOOP.replace("# in the loop", what)


# a run in which nothing goes wrong but the loss of rank 0


@pytest.fixture(scope="module")
def good(launched: Any) -> Ran:
    words = "-n", 3, "--elastic", "1:3", "--set", "trackers=csv"
    script = "import scripted\nscripted.hold_back(3, 'end')\n" + HEAD + STRANGER + LOOP
    arguments = "--api-key", "abc-secret-xyz"
    plan = faults.kill(rank=0, step=3, point="after update")
    return launched(script, *words, arguments=arguments, faults=plan, quiet=False, HF_TOKEN="hf-secret-xyz")


@pytest.mark.promise("docs/errors.md", "A worker that was lost and replaced does not change the exit code.")
def test_a_run_ends_well(good: Ran) -> None:
    assert good.code == 0 and not list(good.run.glob("failure.*")), good.report()
    assert ledger.check(ledger.read(good.run / "events"), 6) == [], good.report()


@pytest.mark.promise("docs/survive.md", "lost: rank 1 (process 4243 on node-a) was killed by signal 9 (SIGKILL)")
def test_who_was_lost_is_said(good: Ran) -> None:
    assert "lost: rank 0 (process " in good.said, good.report()


@pytest.mark.promise("docs/launch.md", "Paceline shows the output of rank 0, with `[rank 0]` before each line")
def test_the_console_shows_rank_0(good: Ran) -> None:
    assert "[rank 0] begun by 0" in good.said and "begun by 1" not in good.said, good.report()


@pytest.mark.promise("docs/events.md", "everything that a worker printed;")
def test_each_worker_prints_into_a_file(good: Ran) -> None:
    assert all(f"begun by {rank}" in good.logs[f"rank-{rank}"] for rank in range(3)), good.report()


@pytest.mark.promise("paceline/session.py", "Print ``values`` on rank 0, with ``sep`` and ``end`` as in Python.")
def test_what_the_session_prints(good: Ran) -> None:
    printed = [line for text in good.logs.values() for line in text.splitlines() if line.startswith("printed once")]
    assert printed == ["printed once by 0"], good.report()


@pytest.mark.promise("docs/guarantees.md", "Rank 0 is the first of those that are left, so ranks may become smaller.")
def test_the_next_rank_0(good: Ran) -> None:
    assert good.memberships() == [[0, 1, 2], [1, 2]], good.report()
    assert "printed once by 0" in good.logs["rank-1"], good.report()


@pytest.mark.promise(
    "docs/events.md",
    "In `launch.json`, arguments and settings that look like secrets",
    "The environment is not recorded.",
)
def test_secrets_are_not_recorded(good: Ran) -> None:
    recorded = (good.run / "launch.json").read_text()
    assert "***" in recorded and "secret-xyz" not in recorded
    files = [path for path in good.run.rglob("*") if path.is_file()]
    assert not [path for path in files if b"WORKER_SECRET" in path.read_bytes()]


@pytest.mark.promise(
    "docs/trackers.md", "A run stays one run of the tracker, whatever happens", "Each step is recorded once"
)
def test_the_tracker_through_a_loss(good: Ran) -> None:
    (path,) = good.run.glob("trackers/*/metrics.csv")
    with path.open() as file:
        rows = list(csv.DictReader(file))
    for name in ("loss", "twice"):
        assert [int(row["step"]) for row in rows if row["name"] == name] == list(range(6)), rows
    losses, twice = ([float(row["value"]) for row in rows if row["name"] == name] for name in ("loss", "twice"))
    assert twice == [2 * loss for loss in losses]


@pytest.mark.promise(
    "docs/security.md",
    "A peer without a proof is refused: it learns that a Paceline run listens there, and nothing else.",
    "`events/launcher.jsonl` has a `refused` record with its address and the reason",
)
def test_a_stranger_is_refused(good: Ran) -> None:
    refused = good.launcher("refused")
    assert sum(one["count"] for one in refused) == 3, good.report()
    assert all(one["address"] and one["reason"] for one in refused)
    heard = (good.run / "heard").read_bytes()
    assert heard and b"worker" not in heard and b"train.py" not in heard


# other endings


@pytest.mark.promise("docs/errors.md", "`KeyboardInterrupt`, SIGINT to a worker", "130 is Ctrl-C")
def test_a_keyboard_interrupt(launched: Any) -> None:
    ran = launched(in_loop("if (batch.step, rank) == (2, 1): raise KeyboardInterrupt"), "-n", 2)
    assert ran.code == 130, ran.report()


@pytest.mark.promise(
    "docs/errors.md", "the workers could not start or do not agree", "`rank 1: ended with exit code 3`"
)
def test_an_exit_before_the_start(launched: Any) -> None:
    ran = launched(HEAD + "if rank == 1: os._exit(3)\n" + LOOP, "-n", 2)
    assert ran.code == 3, ran.report()


@pytest.mark.promise("docs/launch.md", "No process stays behind.", "When a worker fails, Paceline stops the others")
def test_no_process_outlives_a_launcher(launched: Any) -> None:
    """The launcher is killed, and one of its workers would sleep for ever: ``launched`` waits until all have ended."""
    what = "if batch.step == 2: os.kill(os.getppid(), signal.SIGKILL) if rank == 0 else signal.pause()"
    ran = launched(in_loop(what), "-n", 2)
    assert ran.code == -9, ran.report()


# a joiner that does not fit

NO_JOINER = """
import os
import scripted

joins = os.environ["PACELINE_WORKER"] == "3"
session = scripted.begin(seed=1 if joins else 0, timeout_seconds=120)
for batch in session.batches(steps=6):
    if batch.step == 5:
        scripted.await_end_of(3)
    scripted.say(session, session.step(batch))
scripted.end(session)
"""


@pytest.mark.promise(
    "docs/guarantees.md",
    "**A joiner fits.** It must have the script, settings, versions and data of the others",
    "One that does not is refused, and the others continue.",
)
def test_a_joiner_that_does_not_fit(launched: Any, undisturbed: Any) -> None:
    ran = launched(NO_JOINER, "-n", 3, "--elastic", "1:3", faults=faults.kill(rank=1, step=2))
    assert ran.code == 0, ran.report()
    assert {one["fingerprint"] for one in ran.printed()} == {undisturbed(NO_JOINER)["fingerprint"]}, ran.report()
    (noted,) = ran.launcher("not-joined")
    assert "setting seed is 1 here and 0 there" in noted["reason"], ran.report()


ONLY_ONE = """
import torch
import scripted
from torch import nn

data = torch.utils.data.TensorDataset(torch.arange(64))
session = scripted.begin(
    model=nn.Embedding(64, 2, max_norm=0.5), data=data, loss=None, forward=lambda model, one: model(one[0]).mean(),
    schedule=None, exact=False,
)
for batch in session.batches(steps=3):
    session.step(batch)
"""


@pytest.mark.promise(
    "docs/guarantees.md", "**What only one worker can train is refused early,** not when a second one joins"
)
def test_what_only_one_worker_can_train(launched: Any) -> None:
    ran = launched(ONLY_ONE, "-n", 1, "--elastic", "1:2")
    assert ran.code == 2, ran.report()


@pytest.mark.promise(
    "docs/asynchronous.md",
    "**For one machine only**: on several, `paceline run --set strategy=hogwild --nodes 2` is refused before any "
    "worker starts",
)
@pytest.mark.promise("docs/security.md", "Without a secret, `paceline run --rendezvous` refuses to start.")
def test_runs_on_several_machines_that_are_refused(fork_server: ForkServer, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("open('started', 'w')")
    for words in (
        ["--set", "strategy=hogwild", "--rendezvous", "localhost:29500"],
        ["--rendezvous", "192.0.2.1:29500"],
    ):
        code, said = launch(fork_server, ["run", "--nodes", "2", *words, "train.py"], tmp_path, 240.0)
        assert code == 2 and ("hogwild" in said or "secret" in said), said
    assert not (tmp_path / "started").exists()
