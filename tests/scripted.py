"""What the scripts of these tests do besides training: tell each step, wait for a joiner, look at the clock."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from subjects import CASES, tell

import paceline

SECONDS = 240.0
"""As long as a run may take: some waits end with the run."""


def begin(case: str = "batch norm, dropout, short batch", **more: Any) -> paceline.Session:
    """Start with the arguments of a case, of the script and of the test."""
    given = CASES[case]() | {"exact": True, "timeout_seconds": 30, "schedule": cosine} | more
    return paceline.start(**given | json.loads(os.environ.get("GIVEN", "{}")))


def cosine(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=30)


def say(session: paceline.Session, report: paceline.Report) -> None:
    """One line for a step that was done."""
    print("step", report.step, "rank", session.rank, "of", session.workers, flush=True)


def wait_until(true: Callable[[], object], what: str) -> None:
    """Wait, but not without end."""
    deadline = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.005)


def await_joiner(session: paceline.Session) -> None:
    """Until this worker is told that another one waits to join, which it does after the next step.

    A joiner itself does not wait: it comes into this step after the others have done it. On a busy machine it may have
    joined before.
    """
    coordinator, workers = session._context.world.coordinator, session._context.world.membership.workers
    assert coordinator is not None
    there = any(worker >= 3 for worker in workers) or (len(workers) == 3 and coordinator.generation > 0)
    if "ALONE" not in os.environ and session._loop.progress.received == 0 and not there:
        wait_until(lambda: coordinator.pending > coordinator.generation, "a worker that joins")


def refill(session: paceline.Session, workers: int) -> None:
    """Until as many workers as that are there, or the next one waits to join, which it does after the next step."""
    coordinator = session._context.world.coordinator
    if "ALONE" not in os.environ and session.workers < workers:
        assert coordinator is not None
        wait_until(lambda: coordinator.pending > coordinator.generation, "a worker that joins")


def end(session: paceline.Session, **more: object) -> None:
    """The last line: what came out."""
    tell(fingerprint=session.fingerprint(), position=session.position, **more)


def leave(session: paceline.Session, batch: paceline.Batch, rank: int, step: int) -> None:
    """A worker is told that its machine goes away."""
    if (session.rank, batch.step) == (rank, step) and session.workers > rank:
        os.kill(os.getpid(), signal.SIGTERM)


_ending: list[int] = []


def end_launcher(session: paceline.Session, batch: paceline.Batch, step: int) -> None:
    """The launcher is told to end; no worker that was there then begins a step after it before it has heard of that."""
    world = session._context.world
    if batch.step == step and "ALONE" not in os.environ:
        _ending.append(step)
        if session.rank == 0:
            os.kill(os.getppid(), signal.SIGTERM)
    if _ending and batch.step > step:
        wait_until(
            lambda: world.leaving or (world.coordinator is not None and world.coordinator.pending > world.generation),
            "the end of the launcher",
        )


def await_end_of(number: int) -> None:
    """Until a worker that was started later has failed and its launcher knows that."""
    if "ALONE" not in os.environ:
        wait_until(lambda: _recorded("not-joined"), f"the end of worker {number}")


def await_refused(session: paceline.Session) -> None:
    """Until a worker is ready to join, which it does in the next step, or its launcher knows that it has failed."""
    world = session._context.world
    if world.coordinator is not None:
        client = world.coordinator
        wait_until(lambda: client.pending > world.generation or _recorded("not-joined"), "a worker that joins")


def hold_back(first: int, event: str, count: int = 1) -> None:
    """Workers from this number on come when the launcher has recorded an event so often; after the end not at all.

    Else they come at any time: into the generation after a loss, a later one, or none.
    """
    if "ALONE" not in os.environ and int(os.environ["PACELINE_WORKER"]) >= first:
        wait_until(lambda: _recorded(event) >= count or _recorded("end"), f"the event {event}")
        if event == "end":
            sys.exit()


def _recorded(event: str) -> int:
    path = Path(os.environ["PACELINE_RUN"]) / "events" / "launcher.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return sum(json.loads(line)["event"] == event for line in lines if line.endswith("\n"))
