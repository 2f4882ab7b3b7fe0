"""Cost of a checkpoint to training, and whether a run survives a kill while it saves.

Stall: the time for which a save delays ``session.step`` if a thread writes it (``checkpoint.background``), beside a
save that training waits for; the two alternate. Also the slowdown of a step while the thread writes.

Kills: a run that saves every second step is killed with SIGKILL at a random moment of a save, started again, and so
on. Each start must continue from a good checkpoint, no further back than the interval, and the result must have the
bits of an undisturbed run.

    python bench/checkpoints.py
    python bench/checkpoints.py --megabytes 1000 --saves 5 --kills 0
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import paceline
from paceline.checkpoint import save
from paceline.events import EventLog
from paceline.settings import CheckpointSettings

EVERY = 2
SAVES_TO_THE_END = 150


class Facts(EventLog):
    """Keeps what is recorded about checkpoints."""

    def __init__(self) -> None:
        super().__init__(None, 0)
        self.saves: list[dict[str, Any]] = []

    def mark(self, event: str, **fields: object) -> None:
        if event == "checkpoint":
            self.saves.append(fields)


def session_of(megabytes: float, **settings: Any) -> paceline.Session:
    """Training with AdamW, so that parameters and state have this size."""
    torch.manual_seed(0)
    width = 1024
    layers = max(1, round(megabytes * 1e6 / 3 / 4 / width**2))
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])
    data = TensorDataset(torch.randn(512, width), torch.randn(512, width))
    return paceline.start(
        model=model,
        optimizer=partial(torch.optim.AdamW, lr=1e-4),
        loss=functional.mse_loss,
        data=data,
        batch=16,
        **settings,
    )


def stalls(megabytes: float, saves: int, directory: Path) -> None:
    """Print what a save in the background costs, beside one that is waited for."""
    settings = CheckpointSettings(directory=directory)
    session = session_of(megabytes, checkpoint=settings, threads=1)
    checkpointer, state, facts = session._loop._checkpointer, session._state, Facts()
    checkpointer._events = facts
    times: dict[str, list[float]] = {name: [] for name in ("waited", "stall", "whole", "idle", "saving")}
    batches = session.batches(epochs=1_000_000)

    def step() -> float:
        batch = next(batches)
        begin = time.perf_counter()
        session.step(batch)
        return time.perf_counter() - begin

    for turn in range(saves + 1):
        idle = [step() for _ in range(4)]
        begin = time.perf_counter()
        session.save()
        waited = time.perf_counter() - begin
        step()
        begin = time.perf_counter()
        checkpointer.begin_save(state, session.position)
        stall = time.perf_counter() - begin
        saving = []
        while checkpointer._background.busy:
            saving.append(step())
        checkpointer.finish()
        if turn > 0:  # the first turn takes memory and files for the first time
            values = (waited, stall, facts.saves[-1]["seconds"], statistics.median(idle), statistics.mean(saving))
            for name, value in zip(times, values, strict=True):
                times[name].append(value)
    middle = {name: statistics.median(values) for name, values in times.items()}
    slower = statistics.median(b / a for a, b in zip(times["idle"], times["saving"], strict=True))
    ratio = statistics.median(b / a for a, b in zip(times["waited"], times["stall"], strict=True))
    print(f"state of {facts.saves[-1]['bytes'] / 1e6:.0f} MB, {saves} saves of each kind in turn, medians")
    print(f"a save that training waits for      {1e3 * middle['waited']:7.1f} ms")
    print(f"a save in the background: the stall {1e3 * middle['stall']:7.1f} ms   {100 * ratio:.1f} % of the former")
    print(f"                          the whole {1e3 * middle['whole']:7.1f} ms")
    print(f"a step                              {1e3 * middle['idle']:7.1f} ms")
    print(f"a step while the thread writes      {1e3 * middle['saving']:7.1f} ms   x {slower:.2f}", flush=True)


def forked(work: Callable[[], object]) -> tuple[int, str]:
    """Run ``work`` in a process of its own. Return its exit code (negative for a signal) and its output."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ours)
        os.dup2(theirs, 1)
        try:
            work()
            sys.stdout.flush()
            code = 0
        except BaseException:  # noqa: BLE001 - the child must end here
            traceback.print_exc()
            code = 1
        os._exit(code)
    os.close(theirs)
    with os.fdopen(ours) as told:
        text = told.read()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), text


def train(directory: Path, steps: int, moment: int | None) -> None:
    """Train to the end, or until a random moment of the second save."""
    write, begun = save.save, []

    def watched(*arguments: Any) -> Any:
        begun.append(time.perf_counter())
        print("saving", arguments[1].step, flush=True)
        if moment is not None and len(begun) == 2:
            after = random.Random(moment).uniform(0, 1.1) * (begun[1] - begun[0])
            threading.Timer(after, os.kill, (os.getpid(), 9)).start()
        return write(*arguments)

    save.save = watched
    checkpoint = CheckpointSettings(directory=directory, every=EVERY)
    session = session_of(12, checkpoint=checkpoint, resume="auto", exact=True)
    print("start", session.position, flush=True)
    for batch in session.batches(steps=steps):
        session.step(batch)
    session._loop._checkpointer.finish()
    print("end", session.fingerprint())


def kills(count: int, directory: Path) -> None:
    """Print the number of times that the run continued correctly after a kill during a save."""
    steps = EVERY * (count + 5) * 2
    code, whole = forked(lambda: train(directory / "whole", steps, None))
    assert code == 0
    back, least, good = [], 0, 0
    for moment in range(count):
        code, said = forked(partial(train, directory / "killed", steps, moment))
        assert code == -9, f"kill {moment}: exit code {code}\n{said}"
        words = [line.split() for line in said.splitlines()]
        start, begun = int(words[0][1]), int(words[-1][1])
        good += start >= least
        back.append(least + EVERY - start)
        least = begun - EVERY
    code, last = forked(lambda: train(directory / "killed", steps, None))
    damaged = [path.name for path in (directory / "killed").glob("damaged-*")]
    same = code == 0 and last.splitlines()[-1] == whole.splitlines()[-1]
    print(f"killed {count} times while saving every {EVERY} steps: {good} times continued from a good checkpoint no")
    print(f"further back than the interval (steps back from the save that was killed: {json.dumps(tally(back[1:]))});")
    print(f"damaged checkpoints met: {len(damaged)}; the end {'has the same bits' if same else 'IS ANOTHER ONE'}")


def tally(values: list[int]) -> dict[str, int]:
    return {str(value): values.count(value) for value in sorted(set(values))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=200, help="size of the state (200)")
    parser.add_argument("--saves", type=int, default=9, help="saves of each kind (9)")
    parser.add_argument("--kills", type=int, default=100, help="number of kills (100)")
    parser.add_argument("--directory", type=Path, help="on which disk (the one of temporary files)")
    given = parser.parse_args()
    directory = Path(tempfile.mkdtemp(dir=given.directory, prefix="paceline-checkpoints-"))
    torch.set_num_threads(1)
    try:
        if given.kills:
            kills(given.kills, directory)  # first: a process that has computed with threads had better not fork
        if given.saves:
            stalls(given.megabytes, given.saves, directory / "stalls")
    finally:
        shutil.rmtree(directory)


if __name__ == "__main__":
    main()
