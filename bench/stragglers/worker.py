"""Script of the workers: the sessions of a plan, one by one. Each worker records the times of its work.

Computing is emulated by sleeping: the forward and backward pass of a microbatch take one third and two thirds of the
pattern's time, including real computation. Everything else that a rule does adds to this time, and counts as its cost.

The model counts the samples that it has seen: beside a small perceptron it has one weight for each sample, whose
gradient is 1, so after an epoch each has fallen by the same amount if each sample has counted exactly once.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from patterns import Pattern
from torch import nn
from torch.nn import functional

import paceline

RATE = 0.5
_SET_TIMER_SLACK = 29


def sharpen_sleep() -> None:
    """Let the kernel wake this process when it asked for it, not up to 50 microseconds later."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_TIMER_SLACK, 1, 0, 0, 0)


def sleep_until(moment: float) -> None:
    """Sleep until a time of the monotonic clock."""
    time.sleep(max(0.0, moment - time.monotonic()))


def at_end_of_backward(act: Callable[[], None]) -> None:
    """Call something when the backward pass that is under way is over, as DistributedDataParallel does."""
    torch.autograd.Variable._execution_engine.queue_callback(act)


class Emulation:
    """A worker that computes as fast as the pattern says.

    Args:
        pattern: of slowness.
        base: seconds of a microbatch of a worker that is not slow.
        slot: seconds of a step of the pattern, for rules without common steps; none: the script tells the step.
    """

    def __init__(self, pattern: Pattern, base: float, slot: float | None) -> None:
        self._pattern = pattern
        self._base = base
        self._slot = slot
        self.worker = 0
        self.step = 0
        self.killed: Killed | None = None
        self.since = time.monotonic()
        self.done: list[float] = []

    def seconds(self) -> float:
        """How long the microbatch that begins now takes."""
        step = self.step if self._slot is None else int((time.monotonic() - self.since) / self._slot)
        return self._base * self._pattern.slowdown(self.worker, step)

    def forward(self, model: nn.Module, microbatch: Any) -> Any:
        """The forward pass; asleep until its time is over, and at the end of the backward pass once more."""
        begin, seconds = time.monotonic(), self.seconds()
        if self.killed is not None:
            self.killed.reach(self.worker, self.step)
        inputs, target, sample = microbatch
        loss = functional.cross_entropy(model.net(inputs), target, reduction="sum") + model.tally[sample].sum()
        loss.register_hook(lambda _: at_end_of_backward(lambda: self._end(begin + seconds)))
        sleep_until(begin + seconds / 3)
        return loss, len(target)

    def _end(self, moment: float) -> None:
        sleep_until(moment)
        self.done.append(time.monotonic())


class Killed:
    """Kills a worker within a microbatch, once in a run: it leaves a file where it did.

    Args:
        mark: the file.
        worker: number of the worker.
        step: number of the step.
        microbatch: number of microbatches of the step before it.
    """

    def __init__(self, mark: Path, worker: int, step: int, microbatch: int) -> None:
        self._mark = mark
        self._due = worker, step
        self._left = microbatch

    def reach(self, worker: int, step: int) -> None:
        """A microbatch begins."""
        if (worker, step) != self._due:
            return
        self._left -= 1
        if self._left < 0:
            with contextlib.suppress(FileExistsError), self._mark.open("x"):
                os.kill(os.getpid(), signal.SIGKILL)


class Counted(nn.Module):
    """A small perceptron, and a weight for each sample."""

    def __init__(self, samples: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
        self.tally = nn.Parameter(torch.zeros(samples))


def train(one: dict[str, Any], folder: Path) -> dict[str, Any]:
    """One session of the plan, and what this worker has to say about it."""
    torch.manual_seed(0)
    length = one["batch"] * one["steps"]
    inputs = torch.randn(length, 16)
    data = torch.utils.data.TensorDataset(inputs, inputs[:, :4].argmax(1), torch.arange(length))
    emulation = Emulation(Pattern(**one["pattern"]), one["base"], one["slot"])
    if "kill" in one:
        emulation.killed = Killed(folder / "killed", **one["kill"])
    model = Counted(length)
    session = paceline.start(
        model=model,
        optimizer=partial(torch.optim.SGD, lr=RATE),
        forward=emulation.forward,
        data=data,
        batch=one["batch"],
        threads=1,
        **one["settings"],
    )
    emulation.worker = session.rank
    busy, used, begin = machine_busy(), resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
    emulation.since, ends, losses = begin, [], []
    remarks: tuple[str, ...] = ()
    for batch in session.batches(steps=one["steps"]):
        emulation.step = batch.step
        report = session.step(batch)
        ends.append(time.monotonic())
        losses.append(report.loss)
        remarks = report.notes
    end, after = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF)
    return {
        "rank": session.rank,
        "begin": begin,
        "end": end,
        "ends": ends,
        "done": emulation.done,
        "losses": losses,
        "remarks": remarks,
        "fingerprint": session.fingerprint(),
        "tally": model.tally.detach().tolist() if session.rank == 0 else None,
        "cpu": after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime,
        "machine": machine_busy() - busy,
    }


def machine_busy() -> float:
    """Seconds that all cores of the machine together have worked so far."""
    user, nice, system, *_ = Path("/proc/stat").read_text().split("\n")[0].split()[1:]
    return (int(user) + int(nice) + int(system)) / 100


def main() -> None:
    plan = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    sharpen_sleep()
    folder = Path(plan["folder"])
    for place, one in enumerate(plan["sessions"]):
        record = train(one, folder)
        (folder / f"{place}-{record['rank']}.json").write_text(json.dumps(record))


if __name__ == "__main__":
    main()
