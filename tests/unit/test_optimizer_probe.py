"""An optimizer that cannot update a part of the parameters is found before it does; all others are left as they are."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn, optim
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from paceline.errors import InputError
from paceline.step.context import TrainingContext
from paceline.step.probes.optimizer_probe import probe_optimizer


def parameters() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [*nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Conv2d(3, 4, 3)).parameters()]


def job_of(optimizer: optim.Optimizer, exact: bool = True) -> TrainingContext:
    settings = SimpleNamespace(strategy="pipeline", exact=exact)
    update = SimpleNamespace(optimizer=optimizer, parameters={})
    return cast(TrainingContext, SimpleNamespace(update=update, settings=settings, sparse=()))


EACH_BY_ITSELF = {
    "SGD": partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "AdamW": partial(optim.AdamW, lr=0.1, amsgrad=True),
    "AdamW, fused": partial(optim.AdamW, lr=0.1, fused=True),
    "Adam, for each": partial(optim.Adam, lr=0.1, foreach=True),
    "Adagrad": partial(optim.Adagrad, lr=0.1),
    "Adafactor": partial(optim.Adafactor, lr=0.1),
    "RMSprop": partial(optim.RMSprop, lr=0.1, centered=True),
    "Rprop": partial(optim.Rprop, lr=0.1),
    "NAdam": partial(optim.NAdam, lr=0.1),
}


def step(optimizer: optim.Optimizer, values: list[nn.Parameter]) -> None:
    for value in values:
        value.grad = torch.ones_like(value)
    optimizer.step()


@pytest.mark.parametrize("make", EACH_BY_ITSELF.values(), ids=EACH_BY_ITSELF)
def test_the_optimizer_is_left_as_it_is(make: Any) -> None:
    checked, other = parameters(), parameters()
    first, second = make(checked), make(other)
    schedules = [optim.lr_scheduler.LambdaLR(one, lambda number: number / 2) for one in (first, second)]  # from 0 on
    probe_optimizer(job_of(first))
    for _ in range(2):
        step(first, checked)
        step(second, other)
        for schedule in schedules:
            schedule.step()
        drawn = torch.get_rng_state()
        probe_optimizer(job_of(first))
        assert torch.equal(torch.get_rng_state(), drawn)
        assert all(torch.equal(value.grad, torch.ones_like(value)) for value in checked if value.grad is not None)
    for value, alike in zip(checked, other, strict=True):
        assert torch.equal(value, alike)
        assert first.state[value].keys() == second.state[alike].keys()


class Normed(optim.SGD):
    """Makes the norm of all gradients one."""

    def step(self, closure: Any = None) -> None:
        given = [value.grad for group in self.param_groups for value in group["params"] if value.grad is not None]
        norm = torch.stack([gradient.norm() for gradient in given]).norm()
        for gradient in given:
            gradient.div_(norm)
        super().step(closure)


class Clipping(optim.SGD):
    """Makes the norm of all gradients 5, if it is larger."""

    def step(self, closure: Any = None) -> None:
        given = [value.grad for group in self.param_groups for value in group["params"] if value.grad is not None]
        norm = torch.stack([gradient.norm() for gradient in given]).norm()
        for gradient in given if norm > 5 else ():
            gradient.mul_(5 / norm)
        super().step(closure)


class Late(Normed):
    """Makes the norm of all gradients one from the fourth update on."""

    def __init__(self, values: Any, lr: float) -> None:
        super().__init__(values, lr=lr)
        self.updates = 0

    def step(self, closure: Any = None) -> None:
        self.updates += 1
        if self.updates > 3:
            super().step(closure)
        else:
            optim.SGD.step(self, closure)


class Paced(optim.SGD):
    """Its learning rate follows what all gradients were before."""

    def __init__(self, values: Any, lr: float) -> None:
        super().__init__(values, lr=lr)
        self.sum = 0.0

    def step(self, closure: Any = None) -> None:
        given = [value.grad for group in self.param_groups for value in group["params"] if value.grad is not None]
        self.param_groups[0]["lr"] = 0.1 / (1 + self.sum)
        self.sum += sum(float(gradient.square().sum()) for gradient in given)
        super().step(closure)


class Adapting(optim.SGD):
    """Keeps in its group a norm of all gradients, by which it changes the learning rate much later."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            given = [value.grad for value in group["params"] if value.grad is not None]
            group["norm"] = group.get("norm", 0.0) + sum(float(gradient.norm()) for gradient in given)
            group["lr"] = 0.1 if group["norm"] < 1000 else 0.01
        super().step(closure)


class Led(optim.SGD):
    """Scales the gradients of all other parameters by the norm of the leader's gradient."""

    def __init__(self, values: list[nn.Parameter], lr: float, leader: int) -> None:
        super().__init__(values, lr=lr)
        self.leader = leader

    def step(self, closure: Any = None) -> None:
        values = self.param_groups[0]["params"]
        leading = values[self.leader].grad
        for place, value in enumerate(values):
            if place != self.leader and value.grad is not None and leading is not None:
                value.grad.mul_(leading.norm())
        super().step(closure)


class Noisy(optim.SGD):
    """Adds noise to the gradients."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for value in group["params"]:
                if value.grad is not None:
                    value.grad.add_(torch.randn_like(value))
        super().step(closure)


@pytest.mark.parametrize("kind", [Normed, Clipping, Late, Paced])
@pytest.mark.parametrize("exact", [True, False])
def test_an_optimizer_that_looks_at_several_gradients_is_refused(kind: type[optim.Optimizer], exact: bool) -> None:
    with pytest.raises(InputError, match=rf"{kind.__name__} updates a parameter differently .*clip_norm"):
        probe_optimizer(job_of(kind(parameters(), lr=0.1), exact))  # type: ignore[call-arg]


def test_a_warm_up_from_nothing_hides_nothing() -> None:
    optimizer = Normed(parameters(), lr=0.1)
    optim.lr_scheduler.LambdaLR(optimizer, lambda number: number / 2)
    assert optimizer.param_groups[0]["lr"] == 0.0
    with pytest.raises(InputError, match="Normed updates"):
        probe_optimizer(job_of(optimizer))


@pytest.mark.parametrize("leader", [0, 1])
def test_an_optimizer_in_which_one_parameter_leads_is_refused(leader: int) -> None:
    """Gradients of the even parameters show a leader at an even index only to the odd ones, and the reverse."""
    with pytest.raises(InputError, match="Led updates a parameter differently"):
        probe_optimizer(job_of(Led(parameters(), lr=0.1, leader=leader)))


def test_an_optimizer_that_lets_the_type_of_the_first_parameter_decide_is_refused() -> None:
    """Adafactor takes the epsilon of the type of the first parameter that has a gradient for all."""
    values = [nn.Parameter(torch.ones(3, dtype=kind)) for kind in (torch.float32,) * 2 + (torch.bfloat16,) * 2]
    with pytest.raises(InputError, match="Adafactor updates a parameter differently"):
        probe_optimizer(job_of(optim.Adafactor(values)))


def test_an_optimizer_with_a_number_for_all_parameters_is_refused() -> None:
    with pytest.raises(InputError, match=r"Adapting has 'norm of group 0' for all parameters, .*clip_norm"):
        probe_optimizer(job_of(Adapting(parameters(), lr=0.1)))


def test_one_that_needs_all_gradients_is_refused() -> None:
    class Careless(optim.SGD):
        def step(self, closure: Any = None) -> None:
            for value in self.param_groups[0]["params"]:
                value.grad.mul_(2.0)
            super().step(closure)

    with pytest.raises(InputError, match=r"Careless fails when some .*AttributeError.*grad is None") as refused:
        probe_optimizer(job_of(Careless(parameters(), lr=0.1)))
    assert isinstance(refused.value.__cause__, AttributeError)


def test_one_that_draws_random_numbers_is_refused_where_bits_count() -> None:
    probe_optimizer(job_of(Noisy(parameters(), lr=0.1), exact=False))
    with pytest.raises(InputError, match=r"Noisy draws random numbers.*exact=True"):
        probe_optimizer(job_of(Noisy(parameters(), lr=0.1)))


def test_of_one_that_cannot_be_tried_the_user_is_warned(caplog: pytest.LogCaptureFixture) -> None:
    class Closed(optim.SGD):
        def step(self, closure: Any = None) -> None:
            closure()

    probe_optimizer(job_of(Closed(parameters(), lr=0.1)))
    (record,) = caplog.records
    assert "The optimizer Closed cannot be tried on small parameters (TypeError" in record.getMessage()


def test_hooks_are_for_the_steps_of_training() -> None:
    """What they belong to is not copied, either."""

    class Owner:
        calls = 0

        def __deepcopy__(self, memo: Any) -> None:
            raise AssertionError

        def __call__(self, *_: Any) -> None:
            self.calls += 1

    owner = Owner()
    made: list[optim.Optimizer] = [optim.AdamW(parameters(), lr=0.1), Normed(parameters(), lr=0.1)]
    for one in made:
        one.register_step_pre_hook(owner)
        one.register_step_post_hook(owner)
        one.register_state_dict_pre_hook(owner)
        one.register_load_state_dict_post_hook(owner)
    for_all = [register_optimizer_step_pre_hook(owner), register_optimizer_step_post_hook(owner)]
    try:
        probe_optimizer(job_of(made[0]))
    finally:
        for hook in for_all:
            hook.remove()
    with pytest.raises(InputError, match="Normed updates"):
        probe_optimizer(job_of(made[1]))
    assert owner.calls == 0


def test_a_step_hook_that_looks_at_several_gradients_is_refused() -> None:
    values = parameters()
    optimizer = optim.SGD(values, lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: nn.utils.clip_grad_norm_(values, 5.0))
    before = [value.detach().clone() for value in values]
    with pytest.raises(
        InputError, match=r"A step hook of the optimizer SGD treats a parameter differently .*clip_norm"
    ):
        probe_optimizer(job_of(optimizer))
    assert all(value.grad is None and torch.equal(value, kept) for value, kept in zip(values, before, strict=True))


def test_a_step_hook_that_draws_is_refused_with_exact() -> None:
    values = parameters()
    optimizer = optim.SGD(values, lr=0.1)
    optimizer.register_step_post_hook(lambda *_: torch.randn(1))
    probe_optimizer(job_of(optimizer, exact=False))
    with pytest.raises(InputError, match=r"A step hook of the optimizer SGD draws random numbers"):
        probe_optimizer(job_of(optimizer))


def test_a_step_hook_that_looks_at_each_parameter_is_tried_without_a_trace() -> None:
    values = parameters()
    optimizer = optim.SGD(values, lr=0.1)
    calls: list[int] = []

    def shrink(*_: Any) -> None:
        calls.append(1)
        for value in values:
            value.data.clamp_(-0.5, 0.5)

    optimizer.register_step_post_hook(shrink)
    before = [value.detach().clone() for value in values]
    probe_optimizer(job_of(optimizer))
    assert all(torch.equal(value, kept) for value, kept in zip(values, before, strict=True))
    assert not calls


def test_a_step_hook_that_fails_on_random_gradients_is_warned_of(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    values = parameters()
    optimizer = optim.SGD(values, lr=0.1)

    def guard(*_: Any) -> None:
        print("checked")
        if any(value.grad is not None and value.grad.abs().max() > 50 for value in values):
            raise FloatingPointError("the gradient explodes")

    optimizer.register_step_pre_hook(guard)
    probe_optimizer(job_of(optimizer))
    assert "A step hook of the optimizer SGD cannot be tried on random gradients (FloatingPointError: " in caplog.text
    assert capsys.readouterr().out == ""


def test_a_step_hook_that_needs_all_gradients_is_refused() -> None:
    values = parameters()
    optimizer = optim.SGD(values, lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: [value.grad.clamp_(-1, 1) for value in values])  # type: ignore[union-attr]
    with pytest.raises(InputError, match=r"A step hook of the optimizer SGD fails when some .*grad is None"):
        probe_optimizer(job_of(optimizer))


def test_optimizers_that_share_their_state_are_tried_apart(caplog: pytest.LogCaptureFixture) -> None:
    values = parameters()
    first, second = optim.Adagrad(values[:2], lr=0.1), optim.SGD(values[2:], lr=0.1)
    second.state = first.state
    probe_optimizer(job_of(second))
    assert not caplog.text
