"""A model that is cut computes the same bits as the whole model, whatever the model and the cut."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._inductor.compiler_bisector  # sets a variable of the environment, which a trace would do else
from torch import nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from paceline.errors import ConfigError, InputError
from paceline.strategies.layers import bounds_of, layers_of
from paceline.strategies.stage import Layers


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
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output = model(data)
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
