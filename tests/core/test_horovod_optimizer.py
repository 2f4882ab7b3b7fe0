"""``DistributedOptimizer`` and what goes with it: the weights of one process, and of DDP."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import paceline.horovod.torch as hvd
from paceline.testing.ranks import Ended

Run = Callable[..., list[Ended]]

HEAD = """
import copy, warnings
import torch
from torch import nn
import paceline.horovod.torch as hvd

hvd.init()
rank, size = hvd.rank(), hvd.size()
torch.manual_seed(rank)

def net():
    return nn.Sequential(nn.Linear(6, 400), nn.Tanh(), nn.Linear(400, 400), nn.Tanh(), nn.Linear(400, 2)).double()

def batch(step, r):
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(100 * step + r), dtype=torch.float64)

def loss_of(model, x):
    return model(x).square().mean()

def alike(model):
    for name, value in model.state_dict().items():
        first = hvd.broadcast(value, 0, name="alike." + name)
        assert torch.equal(first, value), (rank, name)

def train(steps=6, passes=1, **options):
    model = net()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    reference = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    options["backward_passes_per_step"] = passes
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), **options)
    plain = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    assert isinstance(optimizer, torch.optim.SGD)
    for step in range(steps):
        for one in range(passes):
            loss_of(model, batch(step * passes + one, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
        sums = options.get("op") == hvd.Sum
        for one in range(passes):
            for r in range(size):
                (loss_of(reference, batch(step * passes + one, r)) / (1 if sums else size)).backward()
        plain.step()
        plain.zero_grad()
    alike(model)
    return model, reference, optimizer

def near(model, reference, **tolerance):
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a, b, **tolerance)
"""

TRAINING = """
for options in ({}, {"op": hvd.Sum}, {"gradient_predivide_factor": 2.0}, {"passes": 2}, {"groups": 2},
                {"compression": hvd.Compression.none, "process_set": hvd.global_process_set}):
    model, reference, optimizer = train(**options)
    near(model, reference)
    assert ("groups" in options) == (optimizer._gradients._plan is None)  # by negotiation, or in fixed buckets
for kind in (hvd.Compression.fp16, hvd.Compression.bf16):
    model, reference, _ = train(compression=kind)
    near(model, reference, rtol=0.1, atol=2e-2)
train(op=hvd.Adasum)

# a rank without a gradient, clipping, a closure, a warning, refusals
class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
    def forward(self, x):
        return self.a(x) if rank == 0 else self.b(x)

model = Two()
hvd.broadcast_parameters(model.named_parameters(), root_rank=0)
optimizer = hvd.DistributedOptimizer(torch.optim.AdamW(model.parameters()), model.named_parameters())
for step in range(4):
    model(torch.ones(2, 3)).sum().backward()
    optimizer.synchronize()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    with optimizer.skip_synchronize():
        optimizer.step()
    optimizer.zero_grad()
alike(model)
model(torch.ones(2, 3)).sum().backward()
try:
    optimizer.zero_grad()
    raise SystemExit("no error")
except AssertionError as error:
    assert "under way" in str(error)
try:
    model(torch.ones(2, 3)).sum().backward()
    raise SystemExit("no error")
except AssertionError as error:
    assert "backward_passes_per_step" in str(error)
optimizer.synchronize()
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    optimizer.step()
assert "optimizer.step() called without optimizer.skip_synchronize()" in str(seen[0].message)

model = net()
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = hvd.DistributedOptimizer(torch.optim.LBFGS(model.parameters(), max_iter=3), model.named_parameters())
def closure():
    optimizer.zero_grad()
    loss = loss_of(model, batch(0, rank))
    loss.backward()
    return hvd.allreduce(loss.detach())  # a line search needs the loss of all
optimizer.step(closure)
alike(model)

# sparse gradients
for dense in (False, True):
    table = nn.Embedding(5, 2, sparse=True)
    hvd.broadcast_parameters(table.state_dict(), root_rank=0)
    start = table.weight.detach().clone()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(table.parameters(), lr=1.0), table.named_parameters(), sparse_as_dense=dense)
    for step in range(3):
        table(torch.tensor([rank, 4])).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    wanted = torch.tensor([1.0 / size] * size + [0.0] * (4 - size) + [1.0])
    torch.testing.assert_close(start - table.weight, 3 * wanted.unsqueeze(1).expand(5, 2))

# the state of the root, as it is
model = net()
for make in (lambda p: torch.optim.Adam(p, lr=0.1 + rank), lambda p: torch.optim.SGD(p, lr=0.1 + rank, momentum=0.5)):
    optimizer = make(model.parameters())
    if rank == 0:
        loss_of(model, batch(0, 0)).backward()
        optimizer.step()
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert optimizer.param_groups[0]["lr"] == 0.1 and len(optimizer.state) == len(list(model.parameters()))
    for state in optimizer.state.values():
        for key, value in state.items():
            same = hvd.broadcast(value, 0) if torch.is_tensor(value) else hvd.broadcast_object(value)
            assert torch.equal(torch.as_tensor(same), torch.as_tensor(value)), key
fresh = torch.optim.Adam(model.parameters())
before = [one.detach().clone() for one in model.parameters()]
hvd.broadcast_optimizer_state(fresh, root_rank=0)
assert not fresh.state and all(map(torch.equal, before, model.parameters()))

# uneven data: ranks run out of it, the others go on
for round_ in range(2):
    model = net()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    for epoch in range(2):
        for step in range(4 + 3 * rank):
            optimizer.zero_grad()
            loss_of(model, batch(step, rank)).backward()
            optimizer.step()
        assert hvd.join() == size - 1
        hvd.broadcast_parameters(model.state_dict(), root_rank=size - 1)
    alike(model)
"""


@pytest.mark.promise(
    "docs/horovod.md",
    "**`broadcast_optimizer_state` takes no step.**",
    "hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())",
)
@pytest.mark.parametrize("workers", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_training_gives_the_weights_of_one_process(ranks: Run, tmp_path: Path, workers: int) -> None:
    for one in ranks(HEAD + TRAINING, workers, tmp_path, deadline=200):
        assert one.code == 0, one.err


def test_bad_arguments_are_refused() -> None:
    one, two = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD([*one.parameters(), *two.parameters()], lr=0.1)
    both = [*one.named_parameters(), *two.named_parameters()]
    with pytest.raises(ValueError, match="names twice: bias, weight"):
        hvd.DistributedOptimizer(optimizer, both)
    with pytest.raises(ValueError, match=r"at group\.place 0\.2, 0\.3 are missing"):
        hvd.DistributedOptimizer(optimizer, one.named_parameters())
    with pytest.raises(ValueError, match="must be pairs"):
        hvd.DistributedOptimizer(optimizer, one.parameters())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least 1"):
        hvd.DistributedOptimizer(optimizer, backward_passes_per_step=0)
    with pytest.raises(ValueError, match="is for op=Average"):
        hvd.DistributedOptimizer(optimizer, op=hvd.Sum, gradient_predivide_factor=2.0)
    with pytest.raises(ValueError, match="call hvd"):
        hvd.allreduce(torch.ones(1))
