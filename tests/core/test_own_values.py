"""What an optimizer keeps in attributes is saved, restored and sent, or it is named."""

from __future__ import annotations

from collections import defaultdict, deque
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.utils.data import TensorDataset

import paceline
from paceline.errors import InputError
from paceline.settings import Settings
from paceline.step.optimizer import OptimizerStep, Scaling
from paceline.step.optimizers.own_values import OwnValues, check_own_tensors
from paceline.strategies.registry import capabilities, check_optimizer

EACH_UPDATES_ALL = ("allreduce",)


class Lookahead(Optimizer):
    """Keeps slow weights and a counter in attributes, as published versions do (arXiv 1907.08610)."""

    def __init__(self, base: Optimizer, steps: int = 3) -> None:
        self.base, self.steps, self.count = base, steps, 0
        self.param_groups, self.defaults, self.state = base.param_groups, base.defaults, defaultdict(dict)
        self.slow = [[value.detach().clone() for value in group["params"]] for group in self.param_groups]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.base.step()
        self.count += 1
        if self.count % self.steps == 0:
            for group, slow in zip(self.param_groups, self.slow, strict=True):
                for value, kept in zip(group["params"], slow, strict=True):
                    kept.add_(value - kept, alpha=0.5)
                    value.copy_(kept)


def trained(folder: Path, steps: int, resume: str | None = None) -> str:
    torch.manual_seed(0)
    model, data = nn.Linear(4, 2), TensorDataset(torch.randn(32, 4), torch.randn(32, 2))
    session = paceline.start(
        model=model, optimizer=lambda values: Lookahead(SGD(values, lr=0.1)), loss=nn.functional.mse_loss, data=data,
        batch=8, exact=True, checkpoint={"every": 4, "directory": folder, "background": False}, resume=resume,
    )  # fmt: skip
    for batch in session.batches(steps=steps):
        session.step(batch)
    return session.fingerprint()


def test_a_resumed_run_goes_on_with_them(tmp_path: Path) -> None:
    whole = trained(tmp_path / "whole", 11)
    trained(tmp_path / "parts", 4)
    assert trained(tmp_path / "parts", 11, resume="auto") == whole


class History:
    def __init__(self) -> None:
        self.norms = deque([1.0], maxlen=3)


class Several(SGD):
    """Keeps values of several types."""

    def __init__(self, values: Any) -> None:
        super().__init__(values, lr=0.1)
        first, second = self.param_groups[0]["params"]
        self.mine = [first, second]
        self.means = {first: torch.zeros(4), "other": (1, torch.ones(2))}
        self.counts, self.rate, self.phase = numpy.zeros(2), numpy.float64(0.1), "begin"
        self.generator = torch.Generator().manual_seed(1)
        self.history = History()
        self.rule = torch.relu
        self.device: torch.device | None = None
        self.drawing: Any = None
        self.later: Any = None


def several() -> tuple[Several, dict[str, nn.Parameter]]:
    model = nn.Linear(4, 2)
    return Several(model.parameters()), dict(model.named_parameters())


def test_values_of_several_types() -> None:
    made, parameters = several()
    own = OwnValues(made, parameters)
    first = parameters["weight"]
    made.means[first].add_(3)
    made.means["other"], made.means["new"] = (2, torch.zeros(2)), torch.ones(1)
    made.counts[1], made.rate, made.phase = 7, numpy.float64(0.5), "end"
    made.history.norms.append(2.0)
    drawn = torch.rand(3, generator=made.generator)
    state = own.state(4)
    expected = torch.rand(3, generator=made.generator)
    other, others = several()
    held, norms, counts = other.means[others["weight"]], other.history.norms, other.counts
    OwnValues(other, others).load(own.state(4) | {name: value for name, value in state.items() if "generator" in name})
    assert held is other.means[others["weight"]] and torch.equal(held, torch.full((4,), 3.0))
    assert other.means["other"][0] == 2 and torch.equal(other.means["other"][1], torch.zeros(2))
    assert torch.equal(other.means["new"], torch.ones(1)) and list(other.means) == [others["weight"], "other", "new"]
    assert other.counts is counts and counts.tolist() == [0, 7] and (other.rate, other.phase) == (0.5, "end")
    assert other.history.norms is norms and (list(norms), norms.maxlen) == ([1.0, 2.0], 3)
    assert [id(value) for value in other.mine] == [id(value) for value in others.values()]
    assert torch.equal(torch.rand(3, generator=other.generator), expected) and not torch.equal(drawn, expected)


def test_values_that_a_step_makes_or_that_are_of_this_worker() -> None:
    made, parameters = several()
    own, told = OwnValues(made, parameters), list[str]()
    made.device, made.counts, made.drawing = torch.device("meta"), numpy.arange(4.0)[::-1], torch.Generator()
    made.drawing.manual_seed(5)
    made.later = History()
    made.later.norms.append(9.0)
    state = own.state(1)
    other, others = several()
    other.device = torch.device("cpu")
    loading = OwnValues(other, others)
    loading.tell = told.append
    loading.load(state)
    assert other.device == torch.device("cpu"), "each worker has its own"
    assert other.counts.tolist() == [3, 2, 1, 0]
    assert torch.equal(torch.rand(2, generator=other.drawing), torch.rand(2, generator=made.drawing))
    assert len(told) == 1 and "optimizer.later.norms" in told[0]


def test_what_is_not_kept_is_named_once() -> None:
    made, parameters = several()
    own, told = OwnValues(made, parameters), list[str]()
    own.tell = told.append
    own.state(1)
    assert told == []
    made.rule = torch.tanh
    own.state(2)
    own.state(3)
    (text,) = told
    assert text.startswith("The update has changed optimizer.rule, a builtin_function_or_method, which checkpoints")


def test_an_optimizer_of_torch_has_none() -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    torch.optim.lr_scheduler.StepLR(optimizer, 2)
    assert OwnValues(optimizer, dict(model.named_parameters())).state(0) == {}


def test_tensors_are_refused_where_no_worker_has_all() -> None:
    made, parameters = several()
    with pytest.raises(InputError, match=r"tensors in optimizer.means, and with strategy 'pipeline' not every worker"):
        check_own_tensors(made, parameters, "pipeline")
    check_own_tensors(SGD(parameters.values(), lr=0.1), parameters, "pipeline")


@pytest.mark.parametrize("strategy", ["allreduce", "diloco", "pipeline", "hogwild", "parameter-server"])
def test_which_strategies_refuse_them(strategy: str) -> None:
    """With all-reduce each worker makes all updates, and so has all tensors. Replicas would share those of DiLoCo."""
    model, settings = nn.Linear(4, 2), Settings.model_validate({"strategy": strategy})
    named = dict(model.named_parameters())
    update = SimpleNamespace(optimizer=Lookahead(SGD(named.values(), lr=0.1)), parameters=named, divided_by="")
    context: Any = SimpleNamespace(
        settings=settings, update=update, compute=SimpleNamespace(model=model), divides_update=False, sparse=frozenset()
    )
    refused = pytest.raises(InputError, match=r"optimizer\.slow") if strategy not in EACH_UPDATES_ALL else nullcontext()
    with refused:
        check_optimizer(context, capabilities(settings, 2))


class Counting(SGD):
    count = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count += 1
        super().step()


@pytest.mark.parametrize("strategy", ["", "parameter-server"])
def test_a_counter_is_refused_where_copies_make_updates(strategy: str) -> None:
    made = OptimizerStep(nn.Linear(4, 2), partial(Counting, lr=0.1), None, None, Scaling())
    made.divided_by = strategy
    for value in made.parameters.values():
        value.grad = torch.ones_like(value)
    if not strategy:
        made.apply(0)
        again = OptimizerStep(nn.Linear(4, 2), partial(Counting, lr=0.1), None, None, Scaling()).optimizer
        OwnValues(again, {}).load(OwnValues(made.optimizer, made.parameters).state(1))
        assert isinstance(again, Counting) and again.count == 1 and Counting.count == 0
        return
    with pytest.raises(InputError, match=r"changed a value in optimizer.count, and with strategy 'parameter-server"):
        made.apply(0)
