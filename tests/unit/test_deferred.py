"""A model that is built without memory gets the initial values of a plain construction, bit for bit."""

from __future__ import annotations

import copy
import math
import pickle
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional, init
from torch.nn.utils import parametrizations

import paceline
from paceline.checkpoint.weights.deferred import recorder
from paceline.checkpoint.weights.deferred.model import initial_hashes, materialize, move_into, write_values
from paceline.checkpoint.weights.deferred.operations import Conditions
from paceline.checkpoint.weights.deferred.tensors import deferred_in
from paceline.errors import InputError


class Sines(nn.Module):
    """Sinusoids as in the first transformer, a causal mask and constants, all of them buffers."""

    def __init__(self, length: int = 96, width: int = 64) -> None:
        super().__init__()
        position = torch.arange(length).unsqueeze(1)
        frequency = torch.exp(torch.arange(0, width, 2) * (-math.log(10000.0) / width))
        table = torch.zeros(length, width)
        table[:, 0::2] = torch.sin(position * frequency)
        table[:, 1::2] = torch.cos(position * frequency)
        self.register_buffer("table", table)
        self.register_buffer("mask", torch.tril(torch.ones(length, length)).view(1, 1, length, length))
        self.register_buffer("constants", torch.tensor([1.5, 2.5]))
        self.register_buffer("filled", torch.full((length, width), 3.5), persistent=False)


class Gpt(nn.Module):
    """Tied weights, and initial values by ``apply`` and by name, as GPT-2 sets them."""

    def __init__(self, layers: int = 2, width: int = 64, words: int = 128) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(32, width)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"norm": nn.LayerNorm(width), "up": nn.Linear(width, 256), "proj": nn.Linear(256, width)})
            for _ in range(layers)
        )
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight
        self.apply(self.initialize)
        for name, value in self.named_parameters():
            if name.endswith("proj.weight"):
                init.normal_(value, std=0.02 / math.sqrt(2 * layers))

    def initialize(self, module: nn.Module) -> None:
        """Set the values of one layer."""
        if isinstance(module, nn.Linear):
            init.normal_(module.weight, std=0.02)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            module.weight.data.normal_(0, 0.02)


def changed(change: Callable[[nn.Parameter], object]) -> Callable[[], nn.Module]:
    """A layer whose weight is changed after its construction."""

    def build() -> nn.Module:
        layer = nn.Linear(96, 64)
        with torch.no_grad():
            change(layer.weight)
        return layer

    return build


def made(make: Callable[[], torch.Tensor]) -> Callable[[], nn.Module]:
    """A module with one parameter."""
    return lambda: nn.ParameterList([nn.Parameter(make(), requires_grad=False)])


def from_numpy(weight: nn.Parameter) -> None:
    weight.copy_(torch.from_numpy(np.random.RandomState(0).randn(64, 96)))


def written_by_numpy(weight: nn.Parameter) -> None:
    weight.numpy()[3] = 7.0


def read_on_the_host(weight: nn.Parameter) -> None:
    if weight.std() > 0:
        weight.mul_(weight.abs().max().item())
    weight[0, 0] = weight[1].tolist()[1]


def seeded_inside(weight: nn.Parameter) -> None:
    torch.manual_seed(5)
    weight.uniform_()


def own_generator(weight: nn.Parameter) -> None:
    generator = torch.Generator().manual_seed(3)
    init.xavier_normal_(weight, generator=generator)
    weight[:8].normal_(generator=generator)


def overlapping(weight: nn.Parameter) -> None:
    weight.copy_(weight.flip(0))
    before = weight.clone()
    weight.zero_()
    weight[1:].add_(before[1:])


def row_by_row() -> torch.Tensor:
    table = torch.empty(64, 64)
    for row in range(64):
        table[row] = row * torch.ones(64)
    return table


def default_dtype() -> torch.Tensor:
    torch.set_default_dtype(torch.float64)
    try:
        return torch.randn(64, 64)
    finally:
        torch.set_default_dtype(torch.float32)


def trained() -> nn.Module:
    layer = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    layer(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return layer


def two_blocks() -> nn.Module:
    block = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(2048))
    return nn.Sequential(block, copy.deepcopy(block))


def deep_copies() -> nn.Module:
    """Buffers that are copied by address when their memory has been freed."""
    first = nn.Module()
    first.register_buffer("mask", torch.rand(64, 64))
    others = [nn.Linear(256, 256) for _ in range(3)]
    second = copy.deepcopy(first)
    return nn.ModuleList([first, *others, second, nn.Linear(64, 64)])


BUILD: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(96, 64),
    "convolution": lambda: nn.Sequential(nn.Conv2d(8, 16, 3), nn.ConvTranspose1d(16, 16, 5)),
    "embedding": lambda: nn.Embedding(200, 16, padding_idx=3),
    "norms": lambda: nn.Sequential(nn.LayerNorm(4096), nn.BatchNorm1d(4096), nn.GroupNorm(4, 2048)),
    "attention": lambda: nn.MultiheadAttention(64, 4, kdim=32, add_bias_kv=True),
    "recurrent": lambda: nn.ModuleList([nn.LSTM(32, 64, 2, bidirectional=True), nn.GRU(32, 64)]),
    "transformer": lambda: nn.Transformer(64, 4, 2, 1, 128, batch_first=True),
    "gpt": Gpt,
    "gpt in bfloat16": lambda: Gpt().to(torch.bfloat16),
    "buffers": Sines,
    "copied": two_blocks,
    "copied after a while": deep_copies,
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(96, 64)),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(96, 64)),
    "orthogonal parametrization": lambda: parametrizations.orthogonal(nn.Linear(64, 64)),
    "trunc_normal_": changed(init.trunc_normal_),
    "orthogonal_": changed(init.orthogonal_),
    "kaiming": changed(lambda weight: init.kaiming_normal_(weight, nonlinearity="relu")),
    "sparse_": changed(lambda weight: init.sparse_(weight, 0.3)),
    "scaled": changed(lambda weight: weight.mul_(3).add_(weight.mean())),
    "scaled data": changed(lambda weight: setattr(weight, "data", weight.data * 0.5)),
    "numpy": changed(from_numpy),
    "written by numpy": changed(written_by_numpy),
    "read": changed(read_on_the_host),
    "seeded": changed(seeded_inside),
    "generator": changed(own_generator),
    "overlapping": changed(overlapping),
    "small tensor": changed(lambda weight: weight.mul_(torch.tensor(0.5)).sub_(torch.linspace(0, 1, 96))),
    "resized": changed(lambda weight: weight.data.resize_(64, 96).mul_(2)),
    "python": made(lambda: torch.tensor([random.Random(1).random() for _ in range(3000)])),
    "permutation": made(lambda: torch.randperm(5000)),
    "dropout": made(lambda: functional.dropout(torch.ones(64, 64))),
    "distribution": made(lambda: torch.distributions.Dirichlet(torch.ones(64)).sample(torch.Size([64]))),
    "rows": made(row_by_row),
    "dtype": made(default_dtype),
    "complex": made(lambda: torch.randn(64, 64, dtype=torch.complex64).conj().resolve_conj()),
    "trained": trained,
    "sparse": made(lambda: torch.randn(64, 64).relu().to_sparse().to_dense()),
    "view": made(lambda: torch.randn(64, 96).t()[3:]),
}


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers()])


def both(build: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    """Build the model as usual, and without memory."""
    models, drawn = [], []
    for way in (False, True):
        torch.manual_seed(1)
        if way:
            with paceline.deferred():
                models.append(build())
        else:
            models.append(build())
        drawn.append(torch.rand(3))
    assert torch.equal(drawn[0], drawn[1])  # what is drawn later does not depend on it
    return models[0], models[1]


def assert_equal(plain: nn.Module, model: nn.Module) -> None:
    wanted, found = state(plain), state(model)
    assert list(wanted) == list(found)
    for name, value in wanted.items():
        other = found[name]
        assert type(other) is type(value) and other.stride() == value.stride() and other.dtype == value.dtype
        assert other.requires_grad == value.requires_grad
        assert torch.equal(value, other), name


@pytest.mark.parametrize("name", BUILD)
def test_the_bits_are_those_of_a_plain_construction(name: str) -> None:
    plain, model = both(BUILD[name])
    before = {name: id(value) for name, value in state(model).items()}
    materialize(model)
    assert_equal(plain, model)
    assert {name: id(value) for name, value in state(model).items()} == before
    assert not any(deferred_in(value) for value in state(model).values())


@pytest.mark.parametrize("name", BUILD)
def test_the_bits_are_the_same_if_memory_is_freed_after_each_operation(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for setting, value in {"_HELD": 0, "_RECORD_BYTES": 1, "_STATE_BYTES": 1}.items():
        monkeypatch.setattr(recorder, setting, value)
    plain, model = both(BUILD[name])
    materialize(model)
    assert_equal(plain, model)


def test_no_memory_until_then() -> None:
    with paceline.deferred():
        model = Gpt()
    assert all(deferred_in(value) for value in model.parameters())
    matrices = [value for value in model.parameters() if value.ndim > 1]
    assert sum(value.untyped_storage().nbytes() for value in matrices) == 0
    materialize(model)
    assert not any(deferred_in(value) for value in model.parameters()) and model.head.weight is model.words.weight
    assert model.words.weight.untyped_storage().nbytes() == 4 * 128 * 64


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_values_are_drawn_and_moved_on_a_gpu() -> None:
    def build() -> nn.Module:
        with torch.device("cuda"):
            drawn_there = nn.Sequential(nn.Linear(64, 64), nn.LSTM(64, 64), nn.Dropout())
        drawn_there[0].weight.data.mul_(2)
        return nn.ModuleList([drawn_there, nn.Linear(64, 64).cuda(), nn.Linear(64, 64)])

    plain, model = both(build)
    assert model[0][0].weight.untyped_storage().nbytes() == model[1].weight.untyped_storage().nbytes() == 0
    assert model[1].weight.is_cuda
    materialize(model, device=torch.device("cuda"))
    assert_equal(plain.cuda(), model)
    assert all(value.is_cuda for value in model.parameters())


def test_other_tensors_have_their_values_at_once() -> None:
    def build() -> nn.Module:
        layer = nn.Linear(64, 64)
        layer.mask = torch.tril(torch.ones(64, 64))
        layer.part = layer.weight.detach()[:8]
        layer.scale = layer.weight.std()
        return layer

    plain, model = both(build)
    assert torch.equal(plain.mask, model.mask) and torch.equal(plain.scale, model.scale)
    with pytest.raises(InputError, match="'weight' of the model has no values yet"):
        model.part.sum()
    materialize(model)
    assert torch.equal(plain.part, model.part) and model.part.data_ptr() == model.weight.data_ptr()


@pytest.mark.parametrize(
    "use",
    [
        lambda model: model(torch.ones(2, 64)),
        lambda model: model[0].weight.sum(),
        lambda model: model[0].weight.data,
        lambda model: model[0].weight[0],
        lambda model: model[1].running_mean + 1,
        lambda model: init.zeros_(model[0].weight),
        lambda model: setattr(model[0].weight, "data", torch.ones(64, 64)),
        lambda model: model.state_dict(),
        lambda model: model.double(),
        lambda model: model[0].weight.numpy(),
        copy.deepcopy,
        pickle.dumps,
    ],
)
def test_a_model_without_values_cannot_be_used(use: Callable[[nn.Module], Any]) -> None:
    with paceline.deferred():
        model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64))
    message = r"'[01]\.\w+' of the model has no values yet.*paceline.start.*inside the with block"
    with pytest.raises(InputError, match=message):
        use(model)


@pytest.mark.parametrize("layer", [nn.LSTM(64, 64), nn.Conv1d(64, 64, 1), nn.MultiheadAttention(64, 2)], ids=repr)
def test_layers_without_values_cannot_be_called(layer: nn.Module) -> None:
    with paceline.deferred():
        model = copy.deepcopy(layer).requires_grad_(False)
    arguments = [torch.ones(64, 64)] * (3 if isinstance(layer, nn.MultiheadAttention) else 1)
    with pytest.raises(InputError, match="has no values yet"):
        model(*arguments)


def test_shapes_and_settings_are_there() -> None:
    with paceline.deferred():
        model = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32))
    weight = model[0].weight
    assert weight.shape == weight.size() == (32, 64) and len(weight) == 32 and isinstance(weight, nn.Parameter)
    assert torch.zeros_like(weight).shape == weight.new_ones(weight.shape).shape == (32, 64)
    assert "size=(32, 64)" in repr(weight) and weight.is_leaf and weight.grad is None
    assert model.to("cpu").float().eval().train() is model and model[0].weight is weight
    model.requires_grad_(False)
    weight.requires_grad_()
    optimizer = torch.optim.AdamW(model.parameters())
    materialize(model)
    assert optimizer.param_groups[0]["params"][0] is weight and not model[0].bias.requires_grad
    assert torch.nn.functional.linear(torch.ones(64), weight).shape == (32,)


def test_a_block_that_fails_leaves_no_tensor_without_memory() -> None:
    kept: list[torch.Tensor] = []
    with pytest.raises(ZeroDivisionError), paceline.deferred():
        kept.append(torch.ones(64, 64))
        kept.extend(torch.randn(64, 64) for _ in range(5))
        raise ZeroDivisionError
    assert kept[0].sum() == 64 * 64


def test_blocks_in_each_other_are_one() -> None:
    def build() -> nn.Module:
        with paceline.deferred():
            inner = nn.Linear(64, 64)
        init.normal_(inner.weight)
        return inner

    torch.manual_seed(1)
    with paceline.deferred():
        model = build()
    materialize(model)
    torch.manual_seed(1)
    plain = nn.Linear(64, 64)
    init.normal_(plain.weight)
    assert_equal(plain, model)


def test_values_are_not_given_inside_of_the_block() -> None:
    with paceline.deferred():
        model = nn.Linear(64, 64)
        with pytest.raises(InputError, match="end the block first"):
            materialize(model)
    materialize(model)


class Wrapper(torch.Tensor):
    """Tensor class with operators of its own."""

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


def test_tensors_with_operators_of_their_own_are_refused_with_the_modules_name() -> None:
    class Quantized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.ones(64, 64).as_subclass(Wrapper) * 2

    with pytest.raises(InputError, match="Quantized is built with Wrapper"), paceline.deferred():
        Quantized()


def built_later(seed: int = 0, build: Callable[[], nn.Module] = Gpt) -> nn.Module:
    """A model that gets each value when it is used, or from a strategy."""
    torch.manual_seed(seed)
    with paceline.deferred():
        model = build()
    materialize(model, later=True)
    return model


def test_a_value_is_computed_when_it_is_used() -> None:
    model, generator = built_later(), torch.get_rng_state()
    waiting = [value for value in model.parameters() if deferred_in(value) is not None]
    assert len(waiting) > 5
    assert all(value.untyped_storage().nbytes() == 0 for value in waiting)
    hashes = initial_hashes(model)
    assert [value for value in model.parameters() if deferred_in(value) is not None] == waiting
    torch.manual_seed(0)
    plain = Gpt()
    assert torch.equal(waiting[0].detach(), plain.words.weight)
    assert torch.equal(torch.relu(waiting[1]), torch.relu(plain.places.weight))
    assert [deferred_in(value) is None for value in waiting[:3]] == [True, True, False]
    materialize(model)
    assert_equal(plain, model)
    assert torch.equal(torch.get_rng_state(), generator)
    assert hashes == initial_hashes(built_later())
    other = initial_hashes(built_later(seed=1))
    assert {name for name in hashes if "weight" in name and "norm" not in name} <= {
        name for name, one in other.items() if one != hashes[name]
    }


def test_values_are_written_into_other_memory() -> None:
    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(96, 64), nn.Linear(64, 96))
        model.register_parameter("outer", nn.Parameter(torch.randn(64, 96).t().contiguous().t()))
        model[1].weight.data.copy_(torch.arange(96 * 64).view(96, 64))
        return model

    torch.manual_seed(0)
    plain, generator = build(), torch.get_rng_state()
    model = built_later(build=build)
    for expected, parameter in zip(plain.parameters(), model.parameters(), strict=True):
        memory = torch.empty_like(expected, requires_grad=False)
        write_values(parameter, memory)
        move_into(parameter, memory)
        assert type(parameter) is nn.Parameter
        assert parameter.data_ptr() == memory.data_ptr()
    assert_equal(plain, model)
    assert torch.equal(torch.get_rng_state(), generator)


def test_values_of_shared_memory_are_computed_at_once() -> None:
    views = []

    def build() -> nn.Module:
        layer = nn.Linear(96, 64)
        views.append(layer.weight.detach().view(-1))
        return layer

    model = built_later(build=build)
    assert model.weight.untyped_storage().nbytes()
    assert views[0].data_ptr() == model.weight.data_ptr()


def test_operations_run_again_with_the_threads_of_the_first_time() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        conditions = Conditions()
        torch.set_num_threads(1)
        with conditions.applied():
            assert torch.get_num_threads() == 2
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(threads)


PEAK = """
import resource, sys, torch
from torch import nn
import paceline
from paceline.checkpoint.weights.deferred import recorder
from paceline.checkpoint.weights.deferred.model import materialize

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

def build(width, layers):
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])
    for layer in model:
        nn.init.normal_(layer.weight)
        layer.weight.data *= 0.5
    return model

with paceline.deferred():
    small = build(64, 1)
materialize(small)
before = peak()
with paceline.deferred():
    model = build(1024, 40)                  # 160 MB in parameters of 4 MB
print(peak() - before)
"""


def test_the_peak_is_that_of_few_parameters() -> None:
    """Of 160 MB, and without gaps in the heap, into which gradients would fit badly."""
    ended = subprocess.run(
        [sys.executable, "-c", PEAK], cwd=Path(paceline.__file__).parents[1], capture_output=True, text=True, check=True
    )
    assert float(ended.stdout) < 15
