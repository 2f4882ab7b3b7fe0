"""A model that is cut computes the same bits as the whole model, whatever the model and the cut."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from paceline.errors import ConfigError, InputError
from paceline.partition.base import Layers
from paceline.partition.cut import bounds_of, layers_of


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.Linear(width, 3 * width)
        self.layers = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        batch, length, width = values.shape
        heads = self.mix(self.first(values)).view(batch, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True)
        values = values + self.dropout(mixed.transpose(1, 2).reshape(batch, length, width))
        return values + self.dropout(self.layers(self.second(values)))


class Transformer(nn.Module):
    """Tied embeddings; sizes of the batch are used in every block."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.embed_place = nn.Embedding(16, 8), nn.Embedding(6, 8)
        self.dropout = nn.Dropout(0.1)
        self.blocks = nn.ModuleList(Block(8) for _ in range(3))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        values = self.dropout(self.embed(tokens) + self.embed_place(places))
        for block in self.blocks:
            values = block(values)
        return self.head(self.norm(values))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 3)
        self.head = nn.Linear(8, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.head(self.encoder(self.embed(tokens), mask=mask, is_causal=True).mean(1))


class Residual(nn.Module):
    """What the first layer gives is used again by the last, and in place in between."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.middle, self.late = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1)
        self.dropout, self.head = nn.Dropout(0.2), nn.Linear(4, 4)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        stem = self.stem(image)
        values = self.relu(self.norm(stem))
        values = self.relu(self.middle(values)) + values
        values = self.relu(self.late(values) + stem) * stem
        return self.head(self.dropout(values.mean((2, 3))))


class Vgg(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(True), nn.MaxPool2d(2), nn.Conv2d(4, 6, 3, padding=1), nn.ReLU(True)
        )
        self.avgpool = nn.AdaptiveAvgPool2d((2, 2))
        self.classifier = nn.Sequential(
            nn.Linear(24, 8), nn.ReLU(True), nn.Dropout(), nn.Linear(8, 8), nn.ReLU(True), nn.Dropout(), nn.Linear(8, 4)
        )

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.classifier(torch.flatten(self.avgpool(self.features(image)), 1))


class OfDict(nn.Module):
    """Takes and returns a dictionary; counts its calls in buffers, in place and by assignment."""

    calls: torch.Tensor
    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.head = nn.Linear(6, 8), nn.Linear(3, 8), nn.Linear(8, 4)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(8))
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, given: dict[str, Any]) -> dict[str, torch.Tensor]:
        left = self.left(given["left"])
        with torch.no_grad():
            self.calls += 1
            self.mean = 0.9 * self.mean + 0.1 * left.mean(0)
        values = (left + self.right(given["pair"][0])) * self.scale
        return {"logits": self.head(values.tanh()), "seen": given["pair"][1]}


class Flat(nn.Module):
    """Between its layers no tensor has the size of the batch, and a layer is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(12, 4)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        batch, length, width = values.shape
        values = self.first(values).reshape(batch * length, width)
        values = self.again(self.again(values).relu())
        return self.head(values.view(batch, length * width))


class MovingAverage(nn.Module):
    """The gradient needs the value of a buffer that another one replaces."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        values = self.first(values)
        scaled = values / self.scale
        self.scale = 0.9 * self.scale + 0.1 * values.detach().abs().mean(0)
        return self.last(scaled)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.memory = nn.Embedding(16, 8), nn.LSTM(8, 8, 2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(8, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.memory(self.embed(tokens))[0][:, -1])


class Pair(nn.Module):
    def forward(self, values: torch.Tensor) -> dict[str, Any]:
        return {"values": values, "more": (values * 2, None)}


class OfPair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, given: dict[str, Any]) -> torch.Tensor:
        assert given["more"][1] is None
        return self.layer(given["values"]) + given["more"][0]


class Twice(nn.Module):
    def forward(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return values, values.view(-1)


class ChangeFirst(nn.Module):
    def forward(self, given: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return given[0].relu_() + given[1].sum()


def mlp() -> nn.Module:
    layers = nn.Sequential(nn.Linear(12, 16), nn.Flatten(), nn.ReLU(inplace=True), Pair(), OfPair())
    return nn.Sequential(layers, nn.Dropout(0.2), nn.Linear(16, 4))


def convnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Dropout(0.2),
        nn.Conv2d(4, 4, 3, stride=2),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(16, 4),
    )


def tied() -> nn.Module:
    model = nn.Sequential(nn.Embedding(16, 8), Block(8), Block(8), nn.Linear(8, 16, bias=False))
    model[3].weight = model[0].weight  # type: ignore[assignment]
    return model


def tokens(samples: int) -> torch.Tensor:
    return torch.randint(0, 16, (samples, 6))


def images(samples: int) -> torch.Tensor:
    return torch.randn(samples, 2, 6, 6)


Model = tuple[Callable[[], nn.Module], Callable[[int], Any], list[str]]
MODELS: dict[str, Model] = {
    "mlp": (mlp, lambda n: torch.randn(n, 12), ["0.0", "0.1", "0.2", "0.3", "0.4", "1", "2"]),
    "convnet": (convnet, images, [str(place) for place in range(10)]),
    "tied list": (tied, tokens, ["0", "1", "2", "3"]),
    "transformer": (
        Transformer,
        tokens,
        ["embed", "embed_place", "dropout", "blocks.0", "blocks.1", "blocks.2", "norm", "head"],
    ),
    "encoder": (
        Encoder,
        tokens,
        ["embed", "encoder.layers.0", "encoder.layers.1", "encoder.layers.2", "head"],
    ),
    "residual": (
        Residual,
        images,
        ["stem", "norm", "relu", "middle", "relu:2", "late", "relu:3", "dropout", "head"],
    ),
    "vgg": (
        Vgg,
        images,
        [f"features.{n}" for n in range(5)] + ["avgpool"] + [f"classifier.{n}" for n in range(7)],
    ),
    "dictionary": (
        OfDict,
        lambda n: {"left": torch.randn(n, 6), "pair": (torch.randn(n, 3), torch.ones(n, dtype=torch.long))},
        ["left", "right", "head"],
    ),
    "flat": (Flat, lambda n: torch.randn(n, 3, 4), ["first", "again", "again:2", "head"]),
    "moving average": (MovingAverage, lambda n: torch.randn(n, 4), ["first", "last"]),
    "recurrent": (Recurrent, tokens, ["embed", "memory", "head"]),
}


def made(name: str) -> tuple[nn.Module, Callable[[int], Any], list[str]]:
    torch.manual_seed(3)
    make, data, names = MODELS[name]
    return make(), data, names


def scalar(output: Any) -> torch.Tensor:
    values = [leaf for leaf in tree_leaves(output) if leaf.is_floating_point()]
    return torch.stack([(value.float() ** 2).sum() for value in values]).sum()


def whole(model: nn.Module, data: Any, autocast: bool) -> Any:
    try:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output = model(data)
    except RuntimeError as error:
        if "could not create a primitive" not in str(error):
            raise
        pytest.skip("torch has no LSTM in bfloat16 for this processor")
    scalar(output).backward()
    return output


def in_stages(layers: Layers, bounds: list[tuple[int, int]], data: Any, autocast: bool) -> Any:
    """Forward and backward, stage by stage; nothing but the tensors that cross goes from one to the next."""
    stages = [layers.stage(begin, end) for begin, end in bounds]
    entered: list[tuple[torch.Tensor, ...]] = []
    left: list[tuple[torch.Tensor, ...]] = []
    values = data
    for place, stage in enumerate(stages):
        if place:
            assert all(isinstance(value, torch.Tensor) for value in values)
            left.append(values)
            values = tuple(value.detach().clone() for value in values)  # as if received from another process
            values = tuple(value.requires_grad_(value.is_floating_point()) for value in values)
            entered.append(values)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            values = stage(values)
    scalar(values).backward()
    for outgoing, incoming in zip(reversed(left), reversed(entered), strict=True):
        pairs = [
            (value, given.grad)
            for value, given in zip(outgoing, incoming, strict=True)
            if value.requires_grad and given.grad is not None
        ]
        torch.autograd.backward([value for value, _ in pairs], [gradient for _, gradient in pairs])
    return values


def assert_same(left: dict[str, Any], right: dict[str, Any]) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        other = right[name]
        assert (value is None) == (other is None), name
        assert value is None or (value.dtype == other.dtype and torch.equal(value, other)), name


def gradients(model: nn.Module) -> dict[str, Any]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.crossed
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_stages_give_the_same_bits(name: str, autocast: bool) -> None:
    model, data, names = made(name)
    layers = layers_of(model, data(4))
    assert layers.names == names
    reference = copy.deepcopy(model)
    cuts = [
        [(n, n + 1) for n in range(len(names))],
        [(0, 1), (1, len(names))],
        [(0, len(names) - 1), (len(names) - 1, len(names))],
    ]
    if name == "flat" and autocast:  # autocast casts a weight once, and adds up what its uses give in bfloat16
        cuts = [[(0, 1), (1, 3), (3, 4)]]
    for bounds in cuts:
        for samples in (4, 3, 1, 7) if name not in ("residual", "convnet") else (4, 3, 7):
            given = data(samples)
            torch.manual_seed(11)
            expected = whole(reference, copy.deepcopy(given), autocast)
            state = torch.get_rng_state()
            torch.manual_seed(11)
            output = in_stages(layers, bounds, given, autocast)
            assert torch.equal(torch.get_rng_state(), state)
            assert_same(dict(enumerate(tree_leaves(output))), dict(enumerate(tree_leaves(expected))))
            assert_same(gradients(model), gradients(reference))
            assert_same(dict(model.named_buffers()), dict(reference.named_buffers()))
            for one in (model, reference):
                one.zero_grad()


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        output = self.layer(values)
        return output if values[0, 0] > 0 else output * 2


class Number(nn.Module):
    def forward(self, values: torch.Tensor) -> int:
        return 3


class Counts(Gated):
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        output = self.layer(values)
        for number in range(int(values.shape[0])):
            output = output + number
        return output


@dataclass
class Out:
    """Not registered with torch."""

    values: torch.Tensor


class InClass(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, values: torch.Tensor) -> Out:
        return Out(self.layer(values))


@dataclass
class Known:
    """Registered with torch."""

    values: torch.Tensor


torch.export.register_dataclass(Known)


class InKnownClass(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, values: torch.Tensor) -> Known:
        return Known(self.last(self.first(values)))


@pytest.mark.parametrize("model", [InKnownClass, lambda: nn.Sequential(nn.Linear(4, 4), InKnownClass())])
def test_a_dataclass_that_torch_knows(model: Callable[[], nn.Module]) -> None:
    layers = layers_of(model(), torch.randn(4, 4))
    assert isinstance(layers.stage(1, 2)(layers.stage(0, 1)(torch.randn(4, 4))), Known)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (Number, "Number returns no tensor but int"),
        (lambda: nn.Sequential(nn.Linear(4, 4), Number()), r"Layer '1' \(Number\) returns no tensor but int"),
        (
            lambda: nn.Sequential(nn.Linear(4, 4), InClass()),
            r"Layer '1' \(InClass\) returns no tensor but Out. .* torch.export.register_dataclass\(Out\)",
        ),
        (
            lambda: nn.Sequential(nn.Linear(4, 4), Twice(), ChangeFirst()),
            "Layer '1' returns two tensors that share memory",
        ),
    ],
)
def test_what_cannot_be_cut(model: Callable[[], nn.Module], said: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match=said) as raised:
        layers_of(model(), torch.randn(4, 4))
    assert "\n" not in str(raised.value)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("name", MODELS)
def test_to_find_the_layers_changes_nothing(name: str) -> None:
    model, data, _ = made(name)
    reference = copy.deepcopy(model)
    buffers = dict(model.named_buffers())
    given = data(1)
    torch.manual_seed(5)
    state = torch.get_rng_state(), random.getstate()
    layers_of(model, given)
    assert torch.equal(torch.get_rng_state(), state[0])
    assert random.getstate() == state[1]
    assert_same(model.state_dict(), reference.state_dict())
    assert all(buffers[name] is buffer for name, buffer in model.named_buffers())
    assert all(parameter.grad is None for parameter in model.parameters())
    model(given)


def test_a_stage_names_its_parameters_and_buffers() -> None:
    model, data, names = made("transformer")
    layers = layers_of(model, data(2))
    first, last = layers.stage(0, 3), layers.stage(3, len(names))
    assert first.parameters == ["embed.weight", "embed_place.weight"]
    assert last.parameters == [name for name, _ in model.named_parameters() if name != "embed_place.weight"]
    model, data, _ = made("convnet")
    stage = layers_of(model, data(2)).stage(1, 3)
    assert stage.parameters == ["1.weight", "1.bias"]
    assert stage.buffers == ["1.running_mean", "1.running_var", "1.num_batches_tracked"]
    model, data, _ = made("residual")
    assert layers_of(model, data(2)).stage(1, 2).buffers == [
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
    ]


def test_a_stage_sees_updates_of_the_model() -> None:
    model, data, names = made("vgg")
    stage = layers_of(model, data(2)).stage(0, len(names))
    given = data(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    torch.manual_seed(1)
    expected = model(given)
    torch.manual_seed(1)
    assert torch.equal(stage(given), expected)


@pytest.mark.parametrize("name", MODELS)
def test_a_stage_follows_the_mode_of_the_model(name: str) -> None:
    model, data, names = made(name)
    layers = layers_of(model, data(4))
    given = data(3)
    model.eval()
    expected = copy.deepcopy(model)(given)  # with gradients: without, nn.TransformerEncoder takes a kernel of its own
    values = given
    for place in range(len(names)):
        values = layers.stage(place, place + 1)(values)
    assert_same(dict(enumerate(tree_leaves(values))), dict(enumerate(tree_leaves(expected))))


class Reverse(torch.autograd.Function):
    """Ganin et al. 2016: the domain is to be unlearned."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return -gradients[0]


reverse = Reverse.apply


class Adversarial(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.label, self.domain = nn.Linear(4, 8), nn.Linear(8, 4), nn.Linear(8, 2)

    def forward(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values = self.body(values)
        reversed_values = reverse(values)
        return self.label(values), self.domain(reversed_values)


class Hooked(nn.Module):
    """Hooks on activations and modules, a straight-through estimator, a region without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third, self.last = (nn.Linear(4, 4) for _ in range(4))
        self.second.register_full_backward_hook(lambda module, given, made: tuple(3 * one for one in given))
        self.third.register_forward_hook(lambda module, given, made: 2 * made)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        values = self.first(values)
        if values.requires_grad:
            values.register_hook(lambda gradient: 0.5 * gradient)
        rounded = values + (values.round() - values).detach()
        with torch.no_grad():
            teacher = self.third(values)
        return self.last(self.third(self.second(rounded)) + teacher + values)


@torch.library.custom_op("paceline_tests::double", mutates_args=())
def double(values: torch.Tensor) -> torch.Tensor:
    return 2 * values


double.register_autograd(lambda ctx, gradient: 5 * gradient)  # no gradient of a trace would be this


@dataclass
class Hidden:
    """As the outputs of Hugging Face's models, but not registered with torch."""

    states: torch.Tensor
    steps: int


class Expert(nn.Module):
    """Which rows go where depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(4, 2), nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, states: torch.Tensor, mask: torch.Tensor) -> Hidden:
        choice = self.gate(states).argmax(-1)
        outputs = torch.zeros_like(states)
        for number, expert in enumerate(self.experts):
            rows = choice == number
            if rows.any():
                outputs[rows] = expert(states[rows]).to(outputs.dtype)
        return Hidden(states + outputs * mask, steps=1)


class Dynamic(nn.Module):
    """A mask made from the input goes to each block, and values are read between the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(16, 4), nn.ModuleList(Expert() for _ in range(3))
        self.head = nn.Linear(4, 4)

    def forward(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        mask = (tokens > 3)[..., None].float()
        if mask.all():
            mask = torch.ones_like(mask)
        states = double(self.embed(tokens))
        for block in self.blocks:
            states = block(states, mask=mask).states
            if not torch.isfinite(states).all():
                raise ValueError("not finite")
        return {"logits": self.head(states), "length": mask.sum(1)}


UNTRACED: dict[str, Model] = {
    "reversed gradient": (Adversarial, lambda n: torch.randn(n, 4), ["body", "label", "domain"]),
    "hooks": (Hooked, lambda n: torch.randn(n, 4), ["first", "third", "second", "third:2", "last"]),
    "dynamic": (Dynamic, tokens, ["embed", "blocks.0", "blocks.1", "blocks.2", "head"]),
}
MODELS |= UNTRACED


def test_a_decision_between_layers_that_falls_otherwise() -> None:
    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.middle, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, values: torch.Tensor) -> torch.Tensor:
            values = self.first(values)
            return self.last(values if values.sum() > 1e3 else self.middle(values))

    model = Skips()
    layers = layers_of(model, torch.zeros(2, 4))
    stage = layers.stage(0, 2)
    stage(torch.zeros(2, 4))
    with torch.no_grad():
        model.first.bias.fill_(1e3)
    with pytest.raises(InputError, match="After layer 'first' the model calls layer 'last' where it called 'middle'"):
        stage(torch.zeros(2, 4))


def test_a_decision_behind_the_last_layer_that_falls_otherwise() -> None:
    class Doubles(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, values: torch.Tensor) -> torch.Tensor:
            values = self.last(self.first(values))
            return values * 2 if values.sum() > 1e3 else values

    model = Doubles()
    layers = layers_of(model, torch.zeros(2, 4))
    with torch.no_grad():
        model.last.bias.fill_(1e3)
    given = layers.stage(0, 1)(torch.zeros(2, 4))
    assert torch.equal(layers.stage(1, 2)(given), model(torch.zeros(2, 4)))


def test_a_layer_that_keeps_a_tensor_for_its_next_call() -> None:
    class Integrate(nn.Module):
        total: torch.Tensor

        def forward(self, values: torch.Tensor) -> torch.Tensor:
            self.total = self.total + values
            return self.total.tanh()

    class Spikes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.neuron, self.last = nn.Linear(4, 4), Integrate(), nn.Linear(4, 4)

        def forward(self, values: torch.Tensor) -> torch.Tensor:
            values = self.first(values)
            self.neuron.total = torch.zeros_like(values)
            return self.last(self.neuron(values) + self.neuron(values))

    assert layers_of(Spikes(), torch.randn(2, 4)).names == ["first", "neuron", "last"]


class Nested(nn.Module):
    """A model in a wrapper, a list of blocks deep inside, and a layer whose weights are made by modules."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.inner.first = nn.utils.parametrizations.weight_norm(nn.Linear(4, 8))
        self.inner.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), 2)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.inner.encoder(self.inner.first(values))


def test_modules_that_hold_blocks_are_opened() -> None:
    layers = layers_of(Nested(), torch.randn(2, 3, 4))
    assert layers.names == ["inner.first", "inner.encoder.layers.0", "inner.encoder.layers.1"]


class SharedNorm(nn.Module):
    """Each of its norms changes the same statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second, self.head = (
            nn.Linear(4, 4),
            nn.BatchNorm1d(4),
            nn.Linear(4, 4),
            nn.Linear(4, 4),
        )

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.second(self.norm(self.first(values)))))


class Views(nn.Module):
    """Two values that share memory cross every place before the second ReLU, which changes both."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        values = self.first(values)
        view = values.view(-1)
        middle = self.middle(view[:4].clone())
        values = self.relu(values)
        return self.last(values + view.sum() + middle)


@pytest.mark.parametrize(("model", "names"), [(SharedNorm, ["first", "norm", "head"]), (Views, ["first", "last"])])
def test_layers_that_change_the_same_memory_are_one(model: Callable[[], nn.Module], names: list[str]) -> None:
    cut, whole_one = model(), model()
    whole_one.load_state_dict(cut.state_dict())
    given = torch.randn(4, 4)
    layers = layers_of(cut, given)
    assert layers.names == names
    in_stages(layers, [(n, n + 1) for n in range(len(names))], given, autocast=False)
    whole(whole_one, given, autocast=False)
    assert_same(gradients(cut), gradients(whole_one))
    assert_same(dict(cut.named_buffers()), dict(whole_one.named_buffers()))


def test_an_input_unlike_the_one_it_was_cut_with() -> None:
    model = Transformer()
    stage = layers_of(model, tokens(4)).stage(0, 2)
    with pytest.raises(InputError, match=r"cut with a tensor of shape \[4, 6\] .* got a tensor of shape \[4, 5\]"):
        stage(tokens(4)[:, :5])
    stage = layers_of(Counts(), torch.randn(4, 4)).stage(0, 1)
    with pytest.raises(InputError, match="must be alike, because its forward depends on the number of samples"):
        stage(torch.randn(3, 4))


def test_what_is_no_tensor_in_an_input_stays_as_it_was_cut_with() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, values: dict[str, Any]) -> torch.Tensor:
            return self.second(self.first(values["inputs"])) * values["scale"]

    given = torch.randn(4, 4)
    stage = layers_of(model := Scaled(), {"inputs": given, "scale": 2}).stage(0, 2)
    assert torch.equal(stage({"inputs": given, "scale": 2}), model({"inputs": given, "scale": 2}))
    with pytest.raises(InputError, match="may differ only in the number of samples"):
        stage({"inputs": given, "scale": 3})


def test_a_block_that_returns_something_else_later() -> None:
    class Sized(nn.Module):
        def forward(self, values: torch.Tensor) -> dict[str, Any]:
            return {"values": values, "samples": len(values)}

    class Last(nn.Module):
        def forward(self, given: dict[str, Any]) -> torch.Tensor:
            return given["values"]

    stage = layers_of(nn.Sequential(nn.Linear(4, 4), Sized(), Last()), torch.randn(4, 4)).stage(0, 2)
    assert len(stage(torch.randn(4, 4))) == 1
    with pytest.raises(InputError, match=r"Layer '1' returned \{'values': tensor, 'samples': 3\} for this microbatch"):
        stage(torch.randn(3, 4))


@pytest.mark.parametrize(
    ("stages", "cut", "said"),
    [
        (4, ["1", "2"], "4 stages need as many layers, but the model has 3: 0, 1, 2"),
        (3, ["1"], "names 1 layers, but 3 stages need 2"),
        (2, ["blocks.1"], "no layer 'blocks.1' to cut at; closest: '1'"),
        (3, ["2", "1"], "Stage 2 must begin after stage 1, but layer '1' is not after '2'"),
        (2, ["0"], "Stage 1 must begin after stage 0"),
    ],
)
def test_cuts_that_are_none(stages: int, cut: list[str], said: str) -> None:
    layers = layers_of(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), torch.randn(2, 4))
    with pytest.raises(ConfigError, match=said):
        bounds_of(layers, stages, cut)


def test_bounds_of_a_cut() -> None:
    layers = layers_of(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), torch.randn(2, 4))
    assert bounds_of(layers, 2, ["2"]) == [(0, 2), (2, 3)]
    assert bounds_of(layers, 1, []) == [(0, 3)]
