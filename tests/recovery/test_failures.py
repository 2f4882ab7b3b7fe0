"""What a run that ends before its time says, in its first lines, of the first cause; with real workers."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest

from paceline.testing import faults

if TYPE_CHECKING:
    from launching import Ran, Run

TRAIN = """
import os, signal, sys, time
import torch
import scripted

session = scripted.begin(checkpoint={"every": 4})
for batch in session.batches(steps=12):
    if session.position == 6:
        pass
        # HERE
    scripted.say(session, session.step(batch))
"""
ON_RANK_1 = "session.rank == 1 and "


def script(here: str) -> str:
    """Training with a line that is run before step 6."""
    return TRAIN.replace("# HERE", here)


def check(ran: Ran, code: int, kind: str, says: str, rank: int | None = 1) -> dict[str, Any]:
    """The first ten lines name cause, rank and remedy; the files say the same; nothing comes after it."""
    assert ran.code == code, ran.report()
    text = (ran.run / "failure.txt").read_text()
    assert ran.said.endswith(text), ran.report()
    told: dict[str, Any] = json.loads((ran.run / "failure.json").read_text())
    lines = text.splitlines()[:10]
    assert re.fullmatch(says, lines[0]), ran.report()
    assert (told["kind"], told["code"], told["rank"], told["message"]) == (kind, code, rank, lines[0]), ran.report()
    assert any(line.startswith("output of every worker: runs/one/output") for line in lines)
    if told["checkpoint"] is not None:
        assert f"resume with: {told['resume']}" in lines
    return told


def lines_of(ran: Ran) -> list[str]:
    return (ran.run / "failure.txt").read_text().splitlines()


FIXED = "-n", 3
LOST = "ranks 0, 2 stopped because they lost rank 1; what they report follows from that"


@pytest.mark.promise("docs/errors.md", "rank 1: ValueError: bad batch (train.py:41)", "`consequences`")
@pytest.mark.promise("docs/errors.md", "`failure.txt` holds the message, and `failure.json` its content as data.")
@pytest.mark.promise(
    "docs/survive.md",
    "Without them a lost worker ends the run: the others save a checkpoint first, and `paceline run` "
    "prints the command that resumes from it.",
)
@pytest.mark.promise(
    "docs/errors.md", "ranks 0, 2 stopped because they lost rank 1; what they report follows from that"
)
def test_an_exception(run: Run) -> None:
    ran = run(script("if session.rank == 1: raise ValueError('bad batch')"), *FIXED)
    told = check(ran, 1, "exception", r"rank 1: ValueError: bad batch \(train.py:10\)")
    assert lines_of(ran)[-1] == "ValueError: bad batch"
    assert LOST in lines_of(ran)[:10]
    assert "fix: look at train.py:10; the traceback is at the end" in lines_of(ran)[:10]
    assert told["exception"] == {"type": "ValueError", "message": "bad batch", "line": "train.py:10"}
    assert (told["step"], told["checkpoint"]["step"], ran.saved()[-1]) == (6, 6, 6)
    assert told["done"] == "the other workers were ended; the state was saved first"
    assert [one["rank"] for one in told["consequences"]] == [0, 2] and not told["others"]


@pytest.mark.promise("docs/errors.md", "a worker was lost for good: killed, out of memory, its machine out of reach")
def test_killed_in_a_run_of_fixed_size(run: Run) -> None:
    ran = run(TRAIN, *FIXED, faults=faults.kill(rank=1, step=6))
    told = check(ran, 5, "killed", r"rank 1: was killed by signal 9 \(SIGKILL\)")
    assert (told["signal"], told["exit_code"], told["step"], told["checkpoint"]["step"]) == (9, None, 6, 6)
    assert LOST in lines_of(ran)[:10]
    assert any(line.startswith("fix: find out who ended it") for line in lines_of(ran)[:10])
    assert [one["rank"] for one in told["consequences"]] == [0, 2]


@pytest.mark.slow
def test_killed_and_too_few_are_left(run: Run) -> None:
    late = "import os, time\nif int(os.environ['PACELINE_WORKER']) > 1:\n    time.sleep(60)\n"
    few = "-n", 2, "--elastic", "2:2", "--patience", 0.1, "--grace", 1
    ran = run(late + TRAIN, *few, faults=faults.kill(rank=1, step=6))
    told = check(ran, 5, "killed", r"rank 1: was killed by signal 9 \(SIGKILL\)")
    assert told["done"].startswith("1 of at least 2 workers are left")
    assert "--elastic 2:2 --patience 0.1 --grace 1" in told["resume"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("here", "says"),
    [
        ("session.rank == 1 and os.kill(os.getpid(), signal.SIGSTOP)", r".*stopped by a signal: process \d+ of rank 1"),
        (
            "while session.rank == 1: time.sleep(0.01)",
            r"a hang: ranks 0, 2 have waited \d+ s .* at step 6; rank 1 has been in the script at step 6 for \d+ s, "
            r"train.py:10",
        ),
    ],
    ids=["stopped", "busy"],
)
def test_a_hang(run: Run, here: str, says: str) -> None:
    ran = run(script(here), *FIXED, "--set", "hang_seconds=2", "--set", "timeout_seconds=10")
    told = check(ran, 124, "hang", says)
    assert "\nstill waiting: ranks 0, 2 have waited" in ran.said, ran.report()
    assert ran.said.count("still waiting: ") >= 2, ran.report()
    assert (told["step"], told["waited"]["ranks"], ran.saved()[-1]) == (6, [0, 2], 6)


@pytest.mark.slow
def test_a_hang_and_too_few_are_left(run: Run) -> None:
    stop = faults.stop(rank=1, step=6)
    ran = run(TRAIN, "-n", 3, "--elastic", "3:4", "--grace", 1, "--set", "hang_seconds=10", faults=stop)
    check(ran, 124, "hang", r"a hang: rank 1 \(process \d+ on .*\) was late for more than 10 s: .*")


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("call", "names"),
    [
        (
            "all_reduce(torch.zeros(3 + session.rank // 2))",
            r"all_reduce of float32 \[3\] .*all_reduce of float32 \[4\]",
        ),
        ("all_reduce(torch.zeros(3, dtype=[torch.int32, torch.int64][session.rank // 2]))", "int32 .*int64"),
        ("barrier() if session.rank == 2 else torch.distributed.all_reduce(torch.zeros(3))", "all_reduce.*barrier"),
    ],
    ids=["shape", "type", "operation"],
)
def test_calls_that_differ(run: Run, call: str, names: str) -> None:
    ran = run(script(f"torch.distributed.{call}"), *FIXED)
    check(
        ran,
        3,
        "disagreement",
        rf"The workers called different operations since step 5: .*{names}.*",
        rank=rank_in(ran),
    )
    assert "DisagreementError: The workers called different operations" in lines_of(ran)[-1]


def rank_in(ran: Ran) -> int:
    rank: int = json.loads((ran.run / "failure.json").read_text())["rank"]
    return rank


def test_workers_that_build_different_models(run: Run) -> None:
    text = TRAIN.replace("session =", "os.environ['GIVEN'] = json.dumps({'seed': int(os.environ['RANK'])})\nsession =")
    ran = run("import json\n" + text, *FIXED)
    check(ran, 3, "disagreement", r"The workers do not agree on setting seed: rank 0: .*", rank=0)


@pytest.mark.promise("docs/errors.md", "the same on some ranks, while others still train", "1 (`ended-early`)")
def test_out_of_data(run: Run) -> None:
    ran = run(script("if session.rank == 1: break"), *FIXED)
    check(ran, 1, "ended-early", "rank 1: the script ended while the other workers were still training")
    assert any("all workers must take the same batches" in line for line in lines_of(ran)[:10])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("end", ["sys.exit", "os._exit"])
def test_an_exit_code_of_its_own(run: Run, end: str) -> None:
    ran = run(script(f"session.rank == 1 and {end}(7)"), *FIXED)
    told = check(ran, 7, "exit", "rank 1: ended with exit code 7")
    assert (told["exit_code"], told["step"]) == (7, 6)


@pytest.mark.slow
def test_all_exit_with_a_code_at_the_end(run: Run) -> None:
    ran = run(TRAIN + "sys.exit(3)", "-n", 2)
    check(ran, 3, "exit", "all 2 workers: ended with exit code 3", rank=0)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("raises", "says"),
    [
        ("[0] * (1 << 60)", r"rank 1: ran out of memory: MemoryError \(train.py:10\)"),
        ("torch.empty(1 << 60)", r"rank 1: ran out of memory: RuntimeError: .*memory.*\(train.py:10\)"),
        (
            "raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 20.00 GiB.')",
            r"rank 1: ran out of GPU memory: OutOfMemoryError: CUDA out of memory. Tried .* \(train.py:10\)",
        ),
    ],
    ids=["python", "torch", "cuda"],
)
def test_out_of_memory(run: Run, raises: str, says: str) -> None:
    ran = run(script(f"if session.rank == 1: {raises}"), *FIXED)
    check(ran, 1, "out-of-memory", says)
    cure = "take more microbatches" if "GPU" in says else "give each worker less to hold"
    assert any(f"What to do: {cure}" in line for line in lines_of(ran)[:10])


@pytest.mark.slow
def test_a_rank_that_does_not_start(run: Run) -> None:
    head = "import os, time\nif os.environ['RANK'] == '1':\n    print('downloading', flush=True)\n    time.sleep(60)\n"
    ran = run(head + TRAIN, *FIXED, "--set", "hang_seconds=2", "--set", "timeout_seconds=10")
    told = check(ran, 3, "not-started", r"rank 1: did not reach paceline.start in \d+ s")
    assert re.search(  # another one may have come later than hang_seconds
        r"^still waiting: rank 1 \(process \d+\) has not reached paceline.start for \d+ s; ranks 0, 2 have; the "
        r"process sleeps, its last output: 'downloading'\n",
        ran.said,
        re.MULTILINE,
    ), ran.report()
    assert told["waited"]["ranks"] == [0, 2]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("number", "code", "kind", "says"),
    [
        ("SIGTERM", 75, "preempted", r"preempted by SIGTERM at step \d+"),
        ("SIGUSR1", 75, "preempted", r"preempted by SIGUSR1 at step \d+"),
        ("SIGINT", 130, "stopped", "stopped by SIGINT"),
    ],
)
def test_a_signal_to_the_launcher(run: Run, number: str, code: int, kind: str, says: str) -> None:
    text = script(f"session.rank == 0 and os.kill(os.getppid(), signal.{number})\n        time.sleep(0.5)")
    ran = run(text.replace("steps=12", "steps=4000"), *FIXED)
    told = check(ran, code, kind, says, rank=None)
    assert told["done"] == "all workers have ended; the state was saved first"
    assert told["checkpoint"]["step"] == ran.saved()[-1] >= 6
    again = run(script("pass"), "--resume", "auto", *FIXED)
    assert again.code == 0, again.report()
    assert not list(again.run.glob("failure.*"))


@pytest.mark.slow
def test_a_worker_is_asked_to_end(run: Run) -> None:
    ran = run(script("session.rank == 1 and os.kill(os.getpid(), signal.SIGTERM)"), *FIXED)
    check(ran, 75, "preempted", "preempted at step 7: rank 1 was asked to end", rank=None)
