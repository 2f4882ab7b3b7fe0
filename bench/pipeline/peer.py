"""Two stages that compute, on two workers, compared with ``torch.distributed.pipelining``.

The same model, cut and schedule, in the same two processes of one thread each. Both take turns, step by step; what is
compared is the ratio of the two in the same turn. A step loads the batch, computes, and updates with AdamW.
"""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from launched import run
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as peers

import paceline

sys.path.append(str(Path(__file__).resolve().parents[1]))
from models import CHARACTERS, CONTEXT, Block

PEERS: dict[str, tuple[Any, str]] = {
    "gpipe": (peers.ScheduleGPipe, "one"),
    "1f1b": (peers.Schedule1F1B, "one"),
    "interleaved": (peers.ScheduleInterleaved1F1B, "loop"),
    "zb-v": (peers.ScheduleZBVZeroBubble, "v"),
}
"""torch's schedule, and which stages a worker holds: one, every second one, or as in the letter V."""
MICROBATCHES = 8
WARM = 4
OPTIMIZER = partial(torch.optim.AdamW, lr=1e-4)


class Embed(nn.Module):
    """The beginning of a small transformer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.characters, self.places = nn.Embedding(CHARACTERS, width), nn.Embedding(CONTEXT, width)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        return self.characters(text) + self.places.weight[: text.shape[1]]


class Head(nn.Module):
    """Its end."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.characters = nn.LayerNorm(width), nn.Linear(width, CHARACTERS)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.characters(self.norm(values))


class Layer(nn.Module):
    """A layer of a perceptron."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return nn.functional.relu(self.linear(values))


def mlp() -> nn.Sequential:
    return nn.Sequential(*[Layer(1024) for _ in range(8)])


def gpt() -> nn.Sequential:
    return nn.Sequential(Embed(128), *[Block(128, 4) for _ in range(6)], Head(128))


def of_characters(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def numbers(count: int) -> list[torch.Tensor]:
    return [torch.randn(count, 1024), torch.randn(count, 1024)]


def texts(count: int) -> list[torch.Tensor]:
    text = torch.randint(CHARACTERS, (count, CONTEXT + 1))
    return [text[:, :-1].contiguous(), text[:, 1:].contiguous()]


MODELS: dict[str, tuple[Callable[[], nn.Sequential], Callable[..., Any], Callable[[int], list[torch.Tensor]], int]] = {
    "mlp": (mlp, nn.functional.mse_loss, numbers, 128),
    "gpt": (gpt, of_characters, texts, 16),
}
"""The model, its loss, its data, and the samples of a batch."""


def work(given: dict[str, Any]) -> list[dict[str, Any]]:
    """Each model with each schedule."""
    return [compare(model, schedule, given["turns"]) for model in given["models"] for schedule in PEERS]


def compare(name: str, schedule: str, turns: int) -> dict[str, Any]:
    """The seconds of each step of both."""
    build, loss, data, batch = MODELS[name]
    torch.manual_seed(0)
    tensors = data(batch * 4)
    torch.manual_seed(1)
    model = build()
    stages = 4 if PEERS[schedule][1] != "one" else 2
    bounds = [len(model) * place // stages for place in range(stages + 1)]
    session = paceline.start(
        model=model,
        optimizer=OPTIMIZER,
        loss=loss,
        data=torch.utils.data.TensorDataset(*tensors),
        batch=batch,
        microbatches=MICROBATCHES,
        strategy="pipeline",
        pipeline={"schedule": schedule, "cut": tuple(str(place) for place in bounds[1:-1])},
        threads=1,
        timeout_seconds=120,
    )
    torch.manual_seed(1)
    their_step = theirs(build(), bounds, schedule, loss, tensors, batch)
    batches = session.batches(steps=WARM + turns)
    steps: dict[str, Callable[[], float]] = {
        "ours": lambda: session.step(next(batches)).loss,
        "theirs": their_step,
    }
    seconds: dict[str, list[float]] = {who: [] for who in steps}
    losses = {}
    for turn in range(WARM + turns):
        for who in sorted(steps, reverse=turn % 2 == 1):
            dist.barrier()
            begin = time.perf_counter()
            losses[who] = steps[who]()
            dist.barrier()
            seconds[who].append(time.perf_counter() - begin)
    return {
        "model": name,
        "schedule": schedule,
        **{who: values[WARM:] for who, values in seconds.items()},
        "losses": losses,
    }


def theirs(
    model: nn.Sequential,
    bounds: list[int],
    schedule: str,
    loss: Callable[..., Any],
    tensors: list[torch.Tensor],
    batch: int,
) -> Callable[[], float]:
    """A step of torch's pipelining."""
    rank, stages = dist.get_rank(), len(bounds) - 1
    kind, layout = PEERS[schedule]
    held = {"one": [rank], "loop": [rank, rank + 2], "v": [rank, 3 - rank]}[layout]
    groups = [model[begin:end] for begin, end in pairwise(bounds)]
    parts = [PipelineStage(groups[number], number, stages, torch.device("cpu")) for number in held]
    runner = kind(parts[0] if layout == "one" else parts, MICROBATCHES, loss_fn=loss)
    optimizer = OPTIMIZER([weight for number in held for weight in groups[number].parameters()])
    state = {"step": 0}

    def step() -> float:
        number = state["step"]
        state["step"] += 1
        torch.manual_seed(number // 4)  # an epoch has four batches
        rows = torch.randperm(batch * 4)[number % 4 * batch :][:batch]
        entered = [tensors[0][rows]] if 0 in held else []
        losses: list[torch.Tensor] = []
        if stages - 1 in held:
            runner.step(*entered, target=tensors[1][rows], losses=losses)
        else:
            runner.step(*entered)
        optimizer.step()
        optimizer.zero_grad()
        return float(torch.stack(losses).mean()) if losses else 0.0

    return step


def measure(folder: Path, options: Namespace) -> list[dict[str, Any]]:
    """Print the table; the numbers."""
    done = run(folder, "peer", 2, {"turns": options.turns, "models": options.models.split(",")})
    print(f"\n2 workers, {MICROBATCHES} microbatches, {options.turns} turns; milliseconds of a step, medians")
    print(f"{'':6} {'':12} {'paceline':>9} {'torch':>9} {'ratio':>7} {'quarters':>14}")
    results = []
    for one in done.results[0]:
        ratios = sorted(ours / other for ours, other in zip(one["ours"], one["theirs"], strict=True))
        low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
        ours, other = median(one["ours"]), median(one["theirs"])
        print(
            f"{one['model']:6} {one['schedule']:12} {1e3 * ours:9.1f} {1e3 * other:9.1f} {median(ratios):7.3f} "
            f"{low:7.3f}-{high:.3f}"
        )
        results.append({**one, "ratio": median(ratios)})
    return results
