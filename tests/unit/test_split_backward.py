"""The two halves of a backward pass give the gradients of a whole one, to the bit."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from paceline.strategies.pipeline.split_backward import backward_input, backward_weight


class Stage(nn.Module):
    """Computes something with two linear layers, of which the second one's weights are those of the first."""

    def __init__(self, compute: Callable[..., Any]) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.randn(4))
        self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.attention = nn.MultiheadAttention(4, 2)
        self.compute = compute

    def forward(self, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        made = self.compute(self, *values)
        return made if isinstance(made, tuple) else (made,)


class BiasesFirst(nn.Module):
    """One weight in two places, each with a bias; the biases come first."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.high = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4))
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, values: torch.Tensor) -> tuple[torch.Tensor]:
        middle = nn.functional.linear(values, self.weight, self.low).tanh()
        return (nn.functional.linear(middle, self.weight, self.high),)


def _decoded(stage: Any, query: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """What a decoder does: it attends from one branch to another."""
    made: torch.Tensor = query + stage.attention(query, memory, memory, need_weights=False)[0]
    return made


STAGES: dict[str, Callable[..., Any]] = {
    "two layers": lambda self, x: self.second(self.first(x).tanh()),
    "a loss": lambda self, x: self.second(self.first(x)).square().mean(),
    "a view": lambda self, x: self.first(x).transpose(0, 1),
    "nothing to train": lambda self, x: x.sin(),
    "nothing to train, a view": lambda self, x: x.flatten(),
    "the weights at the end of all": lambda self, x: x + self.own,
    "a value without an input": lambda self, x: (self.first(x), self.own.exp()),
    "a weight used three times": lambda self, x: self.first(self.first(self.first(x).tanh()).tanh()),
    "weights that meet before the input": lambda self, x: self.second(x * (self.own @ self.first.weight)),
    "a weight with and without the input": lambda self, x: (self.own * x, self.own.exp()),
    "a query without the input": lambda self, x: self.third(_decoded(self, self.second(self.first.weight), x)),
    "a query from the input": lambda self, x: self.third(_decoded(self, self.second(x), x)),
    "an input used twice": lambda self, x: self.first(x) + x.sin() * self.second(x),
    "a value used twice": lambda self, x: (lambda y: (y, self.second(y), y * self.own))(self.first(x)),
    "a change in place": lambda self, x: self.second(self.first(x).relu_()),
    "two inputs": lambda self, x, y: self.first(x) * self.second(y),
    "an input without a gradient": lambda self, x, n: self.first(x) * n,
    "two inputs, one not used": lambda self, x, y: self.first(x),
    "parts of a layer": lambda self, x: self.first(x).chunk(2, dim=1),
}


def inputs_of(name: str) -> list[torch.Tensor]:
    values = [torch.randn(3, 4, requires_grad=True), torch.randn(3, 4, requires_grad="without" not in name)]
    return values[: 2 if "two inputs" in name or "without a gradient" in name else 1]


def check(stage: nn.Module, inputs: list[torch.Tensor], leave_out: int | None = None) -> None:
    parameters = list(stage.parameters())

    def run() -> tuple[list[torch.Tensor], list[torch.Tensor | None] | None]:
        outputs = [*stage(*inputs)]
        if outputs[0].ndim == 0:
            return outputs, None
        given: list[torch.Tensor | None] = [torch.ones_like(value).cumsum(0) for value in outputs]
        if leave_out is not None:
            given[leave_out] = None
        return outputs, given

    def taken() -> list[torch.Tensor | None]:
        values = [one.grad for one in (*inputs, *parameters)]
        for one in (*inputs, *parameters):
            one.grad = None
        return values

    outputs, given = run()
    pairs = [(value, given[place] if given else None) for place, value in enumerate(outputs)]
    pairs = [pair for place, pair in enumerate(pairs) if place != leave_out and pair[0].requires_grad]
    torch.autograd.backward([value for value, _ in pairs], [gradient for _, gradient in pairs])
    whole = taken()
    split = backward_input(*run(), inputs, parameters)
    early = [value.grad for value in inputs]
    assert all(parameter.grad is None for parameter in parameters)
    backward_weight(parameters, split)
    for place, (found, expected) in enumerate(zip(taken(), whole, strict=True)):
        assert (found is None) == (expected is None), place
        if found is not None and expected is not None:
            assert torch.equal(found, expected), place
    assert [value is None for value in early] == [value is None for value in whole[: len(inputs)]]


@pytest.mark.parametrize("name", STAGES)
def test_both_halves_are_the_whole(name: str) -> None:
    check(Stage(STAGES[name]), inputs_of(name))


def test_nothing_before_the_stage_is_trained() -> None:
    check(Stage(STAGES["two layers"]), [torch.randn(3, 4)])


def test_a_weight_that_meets_other_weights_in_two_places_counts_once() -> None:
    check(BiasesFirst(), inputs_of(""))


def test_a_value_that_nobody_uses() -> None:
    check(Stage(STAGES["a value without an input"]), inputs_of(""), leave_out=1)
    check(Stage(STAGES["a value used twice"]), inputs_of(""), leave_out=1)


def test_the_second_half_adds_to_what_is_there() -> None:
    for name in ("two layers", "the weights at the end of all"):
        stage, values = Stage(STAGES[name]), [torch.randn(3, 4)]  # no gradient goes on from here
        parameters = list(stage.parameters())
        stage(*values)[0].sum().backward()
        once = [parameter.grad for parameter in parameters]
        outputs = [*stage(*values)]
        backward_weight(parameters, backward_input(outputs, [torch.ones_like(outputs[0])], values, parameters))
        for place, gradient in enumerate(once):
            assert gradient is None or torch.equal(gradient, 2 * _of(stage, values, place)), (name, place)


def _of(stage: nn.Module, values: list[torch.Tensor], place: int) -> torch.Tensor:
    """The gradient of one whole pass for one parameter."""
    stage.zero_grad()
    stage(*values)[0].sum().backward()
    gradient = list(stage.parameters())[place].grad
    assert gradient is not None
    return gradient


def test_frozen_weights() -> None:
    stage = Stage(STAGES["two layers"])
    stage.first.requires_grad_(requires_grad=False)
    parameters = [*stage.parameters()]
    values = inputs_of("")[0]
    stage(values)[0].sum().backward()
    expected, second = values.grad, stage.second.weight.grad
    values.grad = stage.second.weight.grad = stage.second.bias.grad = None
    outputs = [*stage(values)]
    backward_weight(parameters, backward_input(outputs, [torch.ones(3, 4)], [values], parameters))
    assert expected is not None and values.grad is not None and torch.equal(values.grad, expected)
    assert second is not None and stage.second.weight.grad is not None
    assert torch.equal(stage.second.weight.grad, second) and stage.first.weight.grad is None


def test_what_can_wait_does() -> None:
    stage, (values,) = Stage(STAGES["a query without the input"]), inputs_of("")
    late = {stage.third.weight, stage.third.bias, stage.attention.out_proj.weight, stage.attention.out_proj.bias}
    outputs = [*stage(values)]
    split = backward_input(outputs, [torch.ones_like(outputs[0])], [values], [*stage.parameters()])
    assert {parameter for group in split.groups for parameter in group.parameters} == late
    early = {stage.attention.in_proj_weight, stage.attention.in_proj_bias, stage.first.weight}
    assert split.ready.keys() == early | {stage.second.weight, stage.second.bias}


class Counted(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(context: Any, values: torch.Tensor) -> torch.Tensor:
        return values.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        Counted.calls += 1
        return gradient


@pytest.mark.parametrize("layers", [("first", "second"), ("first", "first")], ids="-".join)
def test_nothing_is_computed_twice(layers: tuple[str, str]) -> None:
    def compute(self: Stage, x: torch.Tensor) -> torch.Tensor:
        return getattr(self, layers[1])(Counted.apply(getattr(self, layers[0])(x)))

    stage, (values,), Counted.calls = Stage(compute), inputs_of(""), 0
    parameters, outputs = [*stage.parameters()], [*stage(values)]
    backward_weight(parameters, backward_input(outputs, [torch.ones(3, 4)], [values], parameters))
    assert Counted.calls == 1


def test_hooks_of_values_count_once() -> None:
    def compute(self: Stage, x: torch.Tensor) -> torch.Tensor:
        made = self.first(x)
        made.register_hook(lambda gradient: 3 * gradient)
        return self.second(made)

    check(Stage(compute), inputs_of(""))


@pytest.mark.parametrize("seed", range(10))
def test_any_graph_of_shared_values(seed: int) -> None:
    """Twice one after the other, as the second time adds to the first; what was given out must not change by that."""
    for number in range(40):
        make, inputs, parameters = _graph(100 * seed + number)
        whole, halves = (_twice(make, inputs, parameters, both) for both in (False, True))
        for place, (found, expected) in enumerate(zip(halves, whole, strict=True)):
            assert (found is None) == (expected is None), (number, place)
            if found is not None and expected is not None:
                assert torch.equal(found, expected), (number, place)
                assert place < len(inputs) or found.stride() == expected.stride(), (number, place)


def _graph(seed: int) -> tuple[Callable[[], list[torch.Tensor]], list[torch.Tensor], list[nn.Parameter]]:
    drawn = random.Random(seed)
    torch.manual_seed(seed)
    parameters = [nn.Parameter(torch.randn(4, 4)) for _ in range(drawn.randint(1, 4))]
    inputs = [torch.randn(4, 4, requires_grad=drawn.random() < 0.8) for _ in range(drawn.randint(0, 2))]
    plan = [(drawn.randrange(6), drawn.random(), drawn.random()) for _ in range(drawn.randint(2, 14))]
    outputs = drawn.randint(1, 3)

    def make() -> list[torch.Tensor]:
        values = [*inputs, *parameters]
        for operation, first, second in plan:
            left, right = values[int(first * len(values))], values[int(second * len(values))]
            if operation < 3:
                values.append((left.tanh(), left.sin(), left.t())[operation])
            else:
                values.append((left + right, left * right, (left @ right).sigmoid())[operation - 3])
        return values[-outputs:]

    return make, inputs, parameters


def _twice(
    make: Callable[[], list[torch.Tensor]], inputs: list[torch.Tensor], parameters: list[nn.Parameter], both: bool
) -> list[torch.Tensor | None]:
    """The gradients for the inputs after the first time, and those for the weights after the second."""
    early: list[torch.Tensor | None] = []
    for _ in range(2):
        outputs = make()
        given = [torch.linspace(-1, place, 16).view(4, 4) for place in range(len(outputs))]
        if both:
            split = backward_input(outputs, given, inputs, parameters)
            backward_weight(parameters, split)
        else:
            pairs = [pair for pair in zip(outputs, given, strict=True) if pair[0].requires_grad]
            if pairs:
                torch.autograd.backward([value for value, _ in pairs], [gradient for _, gradient in pairs])
        early = early or [value.grad for value in inputs]
        for value in inputs:
            value.grad = None
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    return early + gradients
