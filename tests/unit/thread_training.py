"""A few steps of a strategy on workers that are threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo  # an optimizer imports it, and it sets a variable of the environment
import torch.distributed as dist
from thread_world import run
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

from paceline.comm.assignment import store as stores
from paceline.config import Resolved
from paceline.environments.start import Identity
from paceline.events import EventLog
from paceline.partition import model_checks
from paceline.settings import Settings
from paceline.step import forward, optimizer
from paceline.step.probes import optimizer_probe
from paceline.strategies import registry
from paceline.strategies.pipeline import executor
from paceline.training import build as jobs
from paceline.training.build import Components

STEPS = 4
LENGTH, BATCH = 40, 16  # the third batch of an epoch has half as many


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3), nn.Linear(3, 2)
    )


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))
    model[2].weight = model[0].weight
    return model


Result = tuple[dict[str, list[float]], list[float]]


def train(
    make: Callable[[], nn.Module],
    workers: int,
    hosts: Sequence[tuple[int, ...]] | None = None,
    steps: int = STEPS,
    **settings: Any,
) -> list[Result]:
    """The state and the losses that each worker has after some steps."""
    torch.manual_seed(0)
    inputs = torch.randn(LENGTH, 6)
    models = [make() for _ in range(workers)]
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    data = TensorDataset(inputs, inputs[:, :2] * 2)
    resolved = Resolved(
        settings=Settings.model_validate({"batch": BATCH, "microbatches": 4, "threads": 1} | settings), sources={}
    )
    building = threading.Lock()

    def work(world: Any) -> Result:
        model = models[world.rank]
        given = Components(model, partial(torch.optim.AdamW, lr=0.05), data, mse_loss, None, None, None)
        who = Identity(world.rank, world.size, world.rank, world.size)
        with building, pytest.MonkeyPatch.context() as patch:
            patch.setattr(jobs, "Formation", lambda *_: SimpleNamespace(world=world))
            context, *_ = jobs.build_context(given, resolved, who, EventLog(None, world.rank))
        world.gather(None, "built")  # no worker seeds the generators while another one builds
        strategy = registry.build(context)
        losses = []
        for step in range(steps):
            groups = context.feed.load(step, strategy.groups(step))
            losses.append(strategy.step(step, groups).loss)
        strategy.synchronize(steps)
        state = {name: value.flatten().tolist() for name, value in model.state_dict().items()}
        strategy.close()
        world.gather(None, "end")
        world.end_servers()
        return state, losses

    return run(workers, work, hosts=hosts)


@pytest.fixture(autouse=True)
def no_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads share the global generators, so another one's seed would look like a draw; these models draw nothing."""
    for module in (executor, forward, model_checks, optimizer, optimizer_probe):
        monkeypatch.setattr(module, "same_states", lambda *_: True)


@pytest.fixture(autouse=True)
def store(monkeypatch: pytest.MonkeyPatch) -> None:
    """What workers on several machines read and write, which torch's process group would have."""
    made = dist.HashStore()
    monkeypatch.setattr(stores, "default_store", lambda: made)
