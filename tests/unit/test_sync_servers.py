"""The servers of synchronous steps: the updates of one process, whoever makes them, and what is left after a loss."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo  # an optimizer imports it, and it sets a variable of the environment
from thread_world import run
from torch import nn

from paceline.errors import ConfigError, WorkerLost
from paceline.settings import Settings
from paceline.step.optimizer import OptimizerStep, Scaling
from paceline.strategies.parameter_server.sync_server import Servers


def model_of(value: float) -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(2, 2))
    for number, parameter in enumerate(model.parameters()):
        parameter.data.fill_(value + number)
    return model


def update_of(model: nn.Module) -> OptimizerStep:
    return OptimizerStep(
        model,
        lambda parameters: torch.optim.Adam(parameters, lr=0.5),
        lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
        None,
        Scaling(),
    )


def gradients(model: nn.Module, step: int) -> None:
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, 0.1 * (step + 1) * (-1) ** number)


def state_of(update: OptimizerStep) -> list[Any]:
    values = list(update.parameters.values())
    states = [update.optimizer.state.get(value, {}) for value in values]
    held = [*values, *(state[key] for state in states for key in sorted(state))]
    return [*(value.detach().flatten().tolist() for value in held), update.optimizer.param_groups[0]["lr"]]


NORM = torch.tensor(1.0)


def alone(steps: int) -> list[Any]:
    model = model_of(1.0)
    update = update_of(model)
    for step in range(steps):
        gradients(model, step)
        update.apply(step, norm=NORM)
    return state_of(update)


class Worker:
    """A worker with its part of the servers."""

    def __init__(self, world: Any, count: int) -> None:
        self.model = model_of(1.0)
        self.update = update_of(self.model)
        settings = Settings.model_validate({"server": {"count": count}})
        context: Any = SimpleNamespace(
            world=world, update=self.update, compute=SimpleNamespace(model=self.model), settings=settings
        )
        self.servers = Servers(context)

    def lose(self, step: int) -> None:
        """Make an update, and hear of a loss while the others make theirs."""

        def wait(*_: Any, **__: Any) -> None:
            raise WorkerLost

        memory: Any = self.servers._memory
        gradients(self.model, step)
        self.servers.keep()
        self.servers._memory = SimpleNamespace(announce=lambda *_: None, wait=wait)  # type: ignore[assignment]
        with pytest.raises(WorkerLost):
            self.servers.apply(step, NORM)
        self.servers._memory = memory

    def step(self, step: int) -> float:
        gradients(self.model, step)
        self.servers.keep()
        norm, rate = self.servers.apply(step, NORM)
        assert norm is NORM
        return rate


@pytest.mark.parametrize("count", [1, 2, 3])
def test_updates_are_those_of_one_process(count: int) -> None:
    def act(world: Any) -> tuple[list[Any], list[float], int, set[str]]:
        worker = Worker(world, count)
        rates = [worker.step(step) for step in range(3)]
        held = sum(bool(state) for state in worker.update.optimizer.state.values())
        assert held == len(worker.servers.own)
        worker.servers.read_states()
        return state_of(worker.update), rates, worker.servers.version, worker.servers.own

    found = run(3, act, hosts=[(0, 1, 2)])
    for state, rates, version, _ in found:
        assert state == alone(3) and version == 3 and rates == [0.5, 0.25, 0.125]
    assert sorted(name for *_, own in found for name in own) == sorted(dict(model_of(0).named_parameters()))
    assert [bool(own) for *_, own in found] == [rank < count for rank in range(3)]


def test_the_state_after_the_last_whole_step_is_put_back() -> None:
    fresh = dict(model_of(1.0).named_parameters())

    def act(world: Any) -> list[list[Any]]:
        worker, found = Worker(world, 2), []
        for step in range(3):
            if step == 2:
                worker.servers.read_states()  # as before an evaluation
            worker.lose(step)
            world.gather(None, "step")
            worker.servers.put_back()
            found.append(state_of(worker.update))
            if not step:
                assert worker.update.learning_rate == 0.5
                assert all(torch.equal(worker.update.parameters[name], fresh[name]) for name in worker.servers.own)
                assert not worker.servers.own or not worker.update.optimizer.state
            world.gather(None, "step")
            if step < 2:
                worker.step(step)
        return found

    for _, *found in run(3, act, hosts=[(0, 1, 2)]):
        assert found == [alone(1), alone(2)]


def test_workers_that_share_no_memory_are_refused() -> None:
    def act(world: Any) -> None:
        with pytest.raises(ConfigError, match="These 2 are not on one"):
            Worker(world, 1)

    run(2, act)
