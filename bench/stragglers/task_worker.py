"""What the workers of the part ``task`` run: training on pictures of digits, computing asleep as elsewhere.

The held-out loss is measured on the way, without stopping anybody: at the beginning of a microbatch, inside the time
that it takes anyway, with the parameters that the worker has then. Where all have the same, worker 0 measures in each
step; under asynchronous rules each worker does, as often, whenever it has new parameters.

When the target is reached there is nothing more to learn from the run: from then on nobody sleeps.
"""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from functools import partial
from pathlib import Path
from typing import Any

import torch
from patterns import Pattern
from torch import nn
from torch.nn import functional
from worker import Emulation, at_end_of_backward, machine_busy, sharpen_sleep

import paceline

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from digits_data import read_digits

HELD_OUT = 360
SMOOTH = 3
"""So many measurements in a row decide."""
_SURE = 0.97
"""A worker ends the race when its own measurements are so far below the target: then those of all are, too."""


def perceptron(side: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(side * side, 64), nn.Tanh(), nn.Linear(64, 10))


def convolutions(side: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * (side // 4) ** 2, 10),
    )


class Race(Emulation):
    """An emulated worker that measures the held-out loss on the way.

    Args:
        pattern, base, slot: as of :class:`Emulation`.
        held_out: pictures and labels.
        target: the loss to reach.
        mark: the file that says that it is reached.
        everywhere: whether all workers measure, and not only worker 0.
    """

    def __init__(
        self,
        pattern: Pattern,
        base: float,
        slot: float | None,
        *,
        held_out: tuple[torch.Tensor, torch.Tensor],
        target: float,
        mark: Path,
        everywhere: bool,
    ) -> None:
        super().__init__(pattern, base, slot)
        self._held_out = held_out
        self._target = target
        self._mark = mark
        self._everywhere = everywhere
        self._interval = slot or 0.0
        self._seen = float("nan")
        self._last: deque[float] = deque(maxlen=SMOOTH)
        self.measured: list[tuple[float, float]] = []

    def forward(self, model: nn.Module, microbatch: Any) -> Any:
        begin, seconds = time.monotonic(), self.seconds()
        over = self._mark.exists()
        if not over and (self._everywhere or self.worker == 0):
            self._measure(model, begin)
        loss = functional.cross_entropy(model(microbatch[0]), microbatch[1])
        if over:
            return loss
        loss.register_hook(lambda _: at_end_of_backward(lambda: self._end(begin + seconds)))
        time.sleep(max(0.0, begin + seconds / 3 - time.monotonic()))
        return loss

    def _measure(self, model: nn.Module, now: float) -> None:
        known = next(model.parameters()).detach().flatten()[:8].sum().item()
        if known == self._seen or (self.measured and now - self.measured[-1][0] < self._interval):
            return
        self._seen = known
        with torch.no_grad():
            loss = functional.cross_entropy(model(self._held_out[0]), self._held_out[1]).item()
        self.measured.append((now, loss))
        self._last.append(loss)
        if len(self._last) == SMOOTH and sum(self._last) / SMOOTH <= _SURE * self._target:
            self._mark.touch()


def train(one: dict[str, Any], mark: Path) -> dict[str, Any]:
    """One race, and what this worker has to say about it."""
    torch.manual_seed(one["seed"])
    training, test = read_digits(one["data"])
    held_out = test.pictures[:HELD_OUT], test.labels[:HELD_OUT]
    pattern = Pattern(**one["pattern"])
    race = Race(
        pattern,
        one["base"],
        one["slot"],
        held_out=held_out,
        target=one["target"],
        mark=mark,
        everywhere=one["slot"] is not None,
    )
    session = paceline.start(
        model={"mlp": perceptron, "conv": convolutions}[one["model"]](training.side),
        optimizer=partial(torch.optim.SGD, lr=one["rate"]),
        forward=race.forward,
        data=torch.utils.data.TensorDataset(training.pictures, training.labels),
        batch=one["batch"],
        drop_last=True,
        threads=1,
        seed=one["seed"],
        nonfinite="skip",  # a rule that diverges loses the race, and does not end it
        **one["settings"],
    )
    race.worker = session.rank
    race.since = begin = time.monotonic()
    busy = machine_busy()
    for batch in session.batches(steps=one["steps"]):
        race.step = batch.step
        session.step(batch)
    return {
        "rank": session.rank,
        "begin": begin,
        "end": time.monotonic(),
        "done": race.done,
        "measured": race.measured,
        "cpu": 0.0,
        "machine": machine_busy() - busy,
    }


def main() -> None:
    plan = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    sharpen_sleep()
    folder = Path(plan["folder"])
    for place, one in enumerate(plan["sessions"]):
        record = train(one, folder / f"reached-{place}")
        (folder / f"{place}-{record['rank']}.json").write_text(json.dumps(record))


if __name__ == "__main__":
    main()
