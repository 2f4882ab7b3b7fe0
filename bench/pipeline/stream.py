"""PipeDream: how busy its workers are in a full pipeline, and the effect of older weights on the loss.

A worker is busy during forward passes, backward passes and updates, according to its events, between the first forward
passes of two steps. The loss is that of a small transformer on characters, over the last steps, after as many samples
as a synchronous pipeline.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from bubble import LAYERS, MICROBATCHES, SAMPLES
from launched import run, span_of
from sleeping import sleepers, targets

import paceline
from paceline.schedule.pipeline.operations import Kind

sys.path.append(str(Path(__file__).resolve().parents[1]))

TEXT = Path(__file__).resolve().parents[3] / "shared" / "data" / "tinyshakespeare"
STEPS = 12
"""Of the sleeping model; the middle half is measured."""
LEARNING_STEPS = 400
LAST = 40
"""So many steps at the end are averaged for the loss."""
LENGTH = 32
WORK = (Kind.FORWARD, Kind.BACKWARD, Kind.UPDATE)


def work(given: dict[str, Any]) -> Any:
    """Sleep, or learn."""
    return learn(given) if "text" in given else sleep(given)


def sleep(given: dict[str, Any]) -> int:
    """The sleeping model under PipeDream."""
    training = paceline.start(
        model=sleepers([given["base"]] * LAYERS, 4096),
        optimizer=partial(torch.optim.SGD, lr=0.01),
        loss=torch.nn.functional.mse_loss,
        data=targets(MICROBATCHES * SAMPLES, 4096),
        batch=MICROBATCHES * SAMPLES,
        microbatches=MICROBATCHES,
        strategy="pipeline",
        pipeline={
            "schedule": "pipedream",
            "update_every": 1,
            "cut": tuple(str(LAYERS // given["workers"] * place) for place in range(1, given["workers"])),
        },
        threads=1,
        timeout_seconds=120,
    )
    for batch in training.batches(steps=STEPS):
        training.step(batch)
    return training.rank


def learn(given: dict[str, Any]) -> list[float]:
    """The losses of a small transformer with a schedule."""
    from peer import Block, Embed, Head, of_characters

    characters = torch.tensor(list(Path(given["text"]).read_bytes()))
    rows = characters[: len(characters) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(Embed(64), *[Block(64, 4) for _ in range(2)], Head(64))
    session = paceline.start(
        model=model,
        optimizer=partial(torch.optim.AdamW, lr=1e-3),
        loss=of_characters,
        data=torch.utils.data.TensorDataset(rows[:, :-1].contiguous(), rows[:, 1:].contiguous()),
        batch=32,
        microbatches=MICROBATCHES,
        strategy="pipeline",
        pipeline={"schedule": given["schedule"], "cut": ("1", "2", "3")},
        threads=1,
        timeout_seconds=120,
    )
    return [session.step(batch).loss for batch in session.batches(steps=LEARNING_STEPS)]


def measure(folder: Path, options: Namespace) -> dict[str, Any]:
    """Print both; the numbers."""
    results: dict[str, Any] = {"busy": busy(folder, options)}
    text = options.data or next(iter(sorted(TEXT.glob("*.txt"))), None)
    if text is None:
        print(f"\nloss: left out, as there is no text in {TEXT}; give one with --data")
        return results
    losses_of = {
        schedule: run(folder, "stream", 4, {"text": str(text), "schedule": schedule}).results[0]
        for schedule in ("1f1b", "pipedream")
    }
    losses = {schedule: fmean(values[-LAST:]) for schedule, values in losses_of.items()}
    ratio = losses["pipedream"] / losses["1f1b"]
    print(
        f"\na small transformer on characters, 4 workers: mean loss of the last {LAST} of {LEARNING_STEPS} steps\n"
        f"1f1b {losses['1f1b']:.4f}, pipedream {losses['pipedream']:.4f}, ratio {ratio:.4f}"
    )
    return {**results, "losses": losses, "ratio": ratio}


def busy(folder: Path, options: Namespace) -> list[float]:
    """The share of the time that each worker computes while the pipeline is full."""
    done = run(folder, "stream", options.workers, {"base": options.base, "workers": options.workers})
    shares = []
    for rank in range(options.workers):
        spans = [span for event in done.events if event["rank"] == rank and (span := span_of(event))]
        begin, end = (_first_forward(done.events, rank, step) for step in (STEPS // 4, STEPS * 3 // 4))
        work = [(max(one.begin, begin), min(one.end, end)) for one in spans if one.operation.kind in WORK]
        shares.append(sum(last - first for first, last in work if last > first) / (end - begin))
    print(
        f"\npipedream, {options.workers} workers, layers asleep for {1e3 * options.base:g} ms three times each: busy "
        f"in steps {STEPS // 4} to {STEPS * 3 // 4 - 1}: " + ", ".join(f"{share:.1%}" for share in shares)
    )
    return shares


def _first_forward(events: Sequence[dict[str, Any]], rank: int, step: int) -> float:
    """When a worker began with the microbatches of a step."""
    of_step = (event for event in events if event["rank"] == rank and event.get("step") == step)
    return min(span.begin for event in of_step if (span := span_of(event)) and span.operation.kind is Kind.FORWARD)
