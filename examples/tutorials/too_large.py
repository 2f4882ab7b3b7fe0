"""Schedules of a pipeline, drawn, and the memory of a model divided in seven ways: paceline run -n 4 too_large.py"""

from itertools import accumulate

import torch
from torch import nn

import paceline
from paceline.schedule.pipeline import clock, drawing, synchronous, zero_bubble
from paceline.schedule.pipeline.operations import Kind

STAGES, MICROBATCHES = 4, 6
HELD = {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.WEIGHT: -1}  # what an operation adds to the microbatches in memory
GPIPE, ALTERNATING, ZERO_BUBBLE = synchronous.gpipe, synchronous.one_forward_one_backward, zero_bubble.zero_bubble_h1
SCHEDULES = {"gpipe": GPIPE, "1f1b": ALTERNATING, "zb-h1": ZERO_BUBBLE}
WAYS = {
    "allreduce": {},
    "allreduce, recomputed": {"recompute": ["Block"]},
    "sharded": {"strategy": "sharded"},
    "sharded, recomputed": {"strategy": "sharded", "recompute": ["Block"]},
    **{
        f"pipeline, {name}": {"strategy": "pipeline", "pipeline": {"schedule": name, "cut": ["2.0", "4.0", "6.0"]}}
        for name in SCHEDULES
    },
}


class Block(nn.Sequential):
    """The repeated layer of a model; `recompute` names its class."""


class Saved:
    """A tensor that autograd keeps for the backward pass. The class counts their bytes."""

    now, most, weights = 0, 0, frozenset()

    def __init__(self, tensor):
        self.tensor, self.bytes = tensor, 0 if tensor.data_ptr() in Saved.weights else tensor.nbytes
        Saved.now += self.bytes
        Saved.most = max(Saved.most, Saved.now)

    def __del__(self):
        Saved.now -= self.bytes


def train(settings):
    """Return the session, and in its last step this worker's bytes of optimizer state and most bytes of activations."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(8)))
    made = []
    session = paceline.start(
        model=model,
        optimizer=lambda parameters: made.append(torch.optim.AdamW(parameters)) or made[-1],
        loss=nn.functional.mse_loss,
        data=torch.utils.data.TensorDataset(torch.randn(512, 64), torch.randn(512, 64)),
        batch=192,
        microbatches=MICROBATCHES,
        exact=True,
        **settings,
    )
    with torch.autograd.graph.saved_tensors_hooks(Saved, lambda saved: saved.tensor):
        for batch in session.batches(steps=2):
            Saved.weights = frozenset(parameter.data_ptr() for parameter in model.parameters())
            Saved.most = Saved.now  # the first step also probes the whole model
            session.step(batch)
            state = sum(value.nbytes for values in made[-1].state.values() for value in values.values())
    return session, state, Saved.most


results = {name: train(settings) for name, settings in WAYS.items()}
if next(iter(results.values()))[0].rank == 0:
    for name, build in SCHEDULES.items():
        schedule = build(STAGES, MICROBATCHES)
        timeline = clock.simulate(schedule, clock.Times.equal(STAGES))
        kept = max(max(accumulate(HELD.get(one.kind, 0) for one in worker)) for worker in schedule.workers)
        print(f"{name}: bubble {timeline.bubble:.0%}, {kept} microbatches kept\n{drawing.draw(timeline)}\n")
for name, (session, state, activations) in results.items():
    session.print(f"{name:22} state {state:>9,}   activations {activations:>9,}   {session.fingerprint()[:8]}")
