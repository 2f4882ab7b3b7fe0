"""The operations of ``paceline.horovod.torch`` on real processes: results, types, gradients, names in any order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from paceline.horovod.engine.adasum import adasum
from paceline.horovod.engine.negotiation import Negotiation
from paceline.horovod.engine.requests import GLOBAL, Request
from paceline.horovod.process_sets import ProcessSet
from paceline.testing.ranks import Ended

Run = Callable[..., list[Ended]]

HEAD = """
import random, time, warnings
import torch
import paceline.horovod.torch as hvd

hvd.init()
rank, size = hvd.rank(), hvd.size()
TYPES = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
         torch.float16, torch.bfloat16, torch.float32, torch.float64]

def same(found, wanted):
    wanted = torch.as_tensor(wanted, dtype=found.dtype)
    assert torch.equal(found, wanted), (rank, found, wanted)
"""

OPERATIONS = """
assert (hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()) == (rank, size, 0, 1)
assert hvd.is_initialized() and hvd.is_homogeneous() and hvd.gloo_built() and hvd.gloo_enabled()
assert not (hvd.mpi_built() or hvd.mpi_enabled() or hvd.nccl_built() or hvd.cuda_built())
first, all_ = size * (size + 1) // 2, range(size)
for dtype in TYPES:
    ones = torch.ones(2, 3).to(dtype) * (rank + 1)
    summed = hvd.allreduce(ones, op=hvd.Sum)
    assert summed.dtype == dtype and (ones == rank + 1).all()
    same(summed, torch.full((2, 3), first))
    same(hvd.allreduce(ones, op=hvd.Max), torch.full((2, 3), size))
    same(hvd.allreduce(ones, op=hvd.Min), torch.ones(2, 3))
    same(hvd.allreduce(ones, op=hvd.Product), torch.full((2, 3), [1, 1, 2, 6][size]))
    same(hvd.allgather(ones[: 1 + rank % 2]), torch.cat([torch.full((1 + r % 2, 3), r + 1) for r in all_]))
    for root in all_:
        same(hvd.broadcast(ones, root), torch.full((2, 3), root + 1))
    rows = torch.arange(size).to(dtype).repeat_interleave(rank + 1)
    got, counts = hvd.alltoall(rows, splits=[rank + 1] * size)
    same(got, torch.full((first,), rank))
    same(counts, [r + 1 for r in all_])
    rows = torch.arange(size + 1).to(dtype)
    own = torch.arange(size + 1) * size
    same(hvd.reducescatter(rows, op=hvd.Sum), own[:2] if rank == 0 else own[rank + 1 : rank + 2])
same(hvd.allreduce(torch.tensor([rank == 0, False]), op=hvd.Max), [True, False])
same(hvd.allgather(torch.tensor([True])), [True] * size)

# means, of whole numbers toward zero; factors
same(hvd.allreduce(torch.tensor([-3.0, 6.0])), [-3.0, 6.0])
if size == 2:
    same(hvd.allreduce(torch.tensor([-3 + rank, 3 - rank])), [-2, 2])
same(hvd.allreduce(torch.tensor([3, 5]), op=hvd.Sum, prescale_factor=0.5), [size, 2 * size])
same(hvd.allreduce(torch.tensor([3, 5]), op=hvd.Sum, postscale_factor=0.5), [3 * size // 2, 5 * size // 2])
half = torch.tensor([3.0], dtype=torch.float16)
same(hvd.allreduce(half, op=hvd.Sum, postscale_factor=0.1), (half.float() * size * 0.1).half())
with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    same(hvd.allreduce(torch.ones(1), average=False), [size])
assert [one.filename for one in warned] == [same.__code__.co_filename], warned

# in place, started, grouped, of no rows, of no dimension, compressed
tensor = torch.full((3,), rank + 1.0)
assert hvd.allreduce_(tensor, op=hvd.Sum) is tensor
same(tensor, [first] * 3)
tensor = torch.full((3,), float(rank))
hvd.broadcast_(tensor, size - 1)
same(tensor, [size - 1] * 3)
pair = [torch.ones(2), torch.ones(3, dtype=torch.int64)]
a, b = hvd.grouped_allreduce(pair, op=hvd.Sum)
same(a, [size] * 2), same(b, [size] * 3)
a, b = hvd.synchronize(hvd.grouped_allgather_async([torch.full((rank, 1), rank), torch.ones(1)]))
assert a.flatten().tolist() == [r for r in all_ for _ in range(r)] and b.tolist() == [1.0] * size
a, b = hvd.grouped_reducescatter([torch.ones(size), torch.ones(2 * size, 2)], op=hvd.Sum)
assert a.shape == (1,) and b.shape == (2, 2) and (b == size).all()
hvd.grouped_allreduce_(pair, op=hvd.Sum)
same(pair[0], [size] * 2)
same(hvd.allreduce(torch.tensor(2.0), op=hvd.Sum), 2.0 * size)
assert hvd.allgather(torch.empty(0, 4)).shape == (0, 4) and hvd.allreduce(torch.empty(0)).numel() == 0
assert hvd.alltoall(torch.empty(0, 2)).shape == (0, 2)
for kind in (hvd.Compression.fp16, hvd.Compression.bf16):
    same(hvd.allreduce(torch.full((2,), 1.5), op=hvd.Sum, compression=kind), [1.5 * size] * 2)
names = [("a", 0.0), ("b", 10.0)]
handles = {name: hvd.allreduce_async(torch.tensor([rank + add]), name=name, op=hvd.Sum)
           for name, add in (names if rank else names[::-1])}
same(hvd.synchronize(handles["a"]), [float(sum(all_))]), same(hvd.synchronize(handles["b"]), [sum(all_) + 10.0 * size])
handle = hvd.allreduce_async(torch.ones(4), name="started")
same(hvd.synchronize(handle), [1.0] * 4)
assert hvd.poll(handle)
sparse = torch.sparse_coo_tensor([[rank, size]], [1.0, 2.0], (size + 1,), check_invariants=True)
with warnings.catch_warnings():
    warnings.simplefilter("error")
    summed = hvd.synchronize(hvd.sparse_allreduce_async(sparse, "sparse", hvd.Sum))
same(summed.to_dense(), [1.0] * size + [2.0 * size])
hvd.barrier()
assert hvd.broadcast_object({"from": rank}, root_rank=size - 1) == {"from": size - 1}
assert hvd.allgather_object(list(range(rank))) == [list(range(r)) for r in all_]

# gradients
x = torch.ones(3, requires_grad=True)
(hvd.allreduce(x, op=hvd.Sum) * 2).sum().backward()
same(x.grad, [2.0 * size] * 3)
x = torch.ones(rank + 1, 2, requires_grad=True)
(hvd.allgather(x) * torch.arange(first).unsqueeze(1)).sum().backward()
before = rank * (rank + 1) // 2
same(x.grad[:, 0], torch.arange(before, before + rank + 1))
x = torch.ones(2, requires_grad=True)
hvd.broadcast(x, 1).sum().backward()
same(x.grad, [1.0, 1.0] if rank == 1 else [0.0, 0.0])
x = torch.ones(size, requires_grad=True)
(hvd.alltoall(x) * (rank + 1)).sum().backward()
same(x.grad, [r + 1.0 for r in all_])
x = torch.ones(size, requires_grad=True)
hvd.reducescatter(x, op=hvd.Sum, prescale_factor=0.5).sum().backward()
same(x.grad, [size * 0.5] * size)

# names, submitted in another order on each rank; fused, and known after the first round
for turn in range(30):
    names, value = list(range(40)), lambda n, r: float(n + turn + r)
    random.Random(rank * 1000 + turn).shuffle(names)
    handles = {n: hvd.allreduce_async(torch.full((5,), value(n, rank)), name=f"n{n}", op=hvd.Sum) for n in names}
    for n, handle in handles.items():
        same(hvd.synchronize(handle), [sum(value(n, r) for r in all_)] * 5)

# process sets
even, last = hvd.add_process_set([0]), hvd.add_process_set(range(1, size))
assert (even.size(), last.size(), last.included(), even.rank()) == (1, size - 1, rank > 0, 0 if rank == 0 else -1)
mine = even if rank == 0 else last
for _ in range(2):
    same(hvd.allreduce(torch.ones(2), op=hvd.Sum, process_set=mine, name="in both"), [mine.size()] * 2)
assert hvd.allgather(torch.tensor([rank]), process_set=mine).tolist() == mine.ranks
if rank:
    same(hvd.broadcast(torch.tensor([rank]), 1, process_set=last), [1])
try:
    hvd.allreduce(torch.ones(1), process_set=last if rank == 0 else even)
except ValueError as error:
    assert f"Rank {rank}" in str(error) and "not in it" in str(error)
try:
    hvd.add_process_set([0])
except ValueError as error:
    assert "there already is a process set" in str(error)
for _ in range(1 + rank):  # operations without a name are counted in each set by itself
    alone = even if rank == 0 else last
    if alone.size() == 1:
        hvd.allreduce(torch.ones(1), process_set=alone)
same(hvd.allreduce(torch.ones(1), op=hvd.Sum), [size])
assert hvd.remove_process_set(last) and last.process_set_id is None and not hvd.remove_process_set(last)
assert not hvd.remove_process_set(hvd.global_process_set)

# the last to join; zeros from who has; once more after all have
for leader in range(2):
    for _ in range(2):
        if rank != leader:
            same(hvd.allreduce(torch.ones(2, dtype=torch.int64), name="joined", op=hvd.Sum), [size - 1] * 2)
            same(hvd.allreduce(torch.full((2,), 6.0), name="mean"), [6.0 * (size - 1) / size] * 2)
    if rank != leader:
        try:
            hvd.allgather(torch.ones(1))
            raise SystemExit("no error")
        except hvd.HorovodInternalError as error:
            assert f"rank {leader} has called join" in str(error), error
    assert hvd.join() in range(size)
    same(hvd.allreduce(torch.ones(1), name="joined", op=hvd.Sum), [size])
    same(hvd.allreduce(torch.ones(1), op=hvd.Sum), [size])

# again
hvd.shutdown()
try:
    hvd.rank()
except ValueError as error:
    assert "hvd.init()" in str(error)
hvd.init(process_sets=[hvd.ProcessSet([0])])
same(hvd.allreduce(torch.ones(1), op=hvd.Sum), [size])

# how much is processed, rank 0 says
sampler = hvd.elastic.ElasticSampler(range(4 * size), shuffle=False)
state = hvd.elastic.TorchState(sampler=sampler)
sampler.record_batch(rank, 1 + rank)
state.sync()
assert sampler.processed_num == size and list(sampler) == [size * k + rank for k in (1, 2, 3)]

# batch norm over all workers is that of the whole batch, with batches of different sizes
torch.manual_seed(0)
whole = torch.randn(2 * size + 1, 4, 3, dtype=torch.float64)
parts = [whole[:1], *whole[1 : 2 * size - 1].split(2), whole[2 * size - 1 :]][:size] if size > 1 else [whole]
parts[-1] = whole[sum(len(one) for one in parts[:-1]) :]
plain, synced = torch.nn.BatchNorm1d(4).double(), hvd.SyncBatchNorm(4).double()
x, y = whole.clone().requires_grad_(), parts[rank].clone().requires_grad_()
wanted, found = plain(x), synced(y)
wanted.square().mul(torch.arange(3)).sum().backward()
found.square().mul(torch.arange(3)).sum().backward()
place = sum(len(one) for one in parts[:rank])
near = lambda a, b: torch.testing.assert_close(a, b)
near(found, wanted[place : place + len(y)]), near(y.grad, x.grad[place : place + len(y)])
near(synced.running_mean, plain.running_mean), near(synced.running_var, plain.running_var)
near(hvd.allreduce(synced.weight.grad, op=hvd.Sum), plain.weight.grad)
"""


@pytest.mark.promise("docs/horovod.md", "Operations are matched by name, whatever the order in which ranks submit them")
@pytest.mark.parametrize("workers", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_operations_give_what_they_promise(ranks: Run, tmp_path: Path, workers: int) -> None:
    for one in ranks(HEAD + OPERATIONS, workers, tmp_path, deadline=120):
        assert one.code == 0, one.err


def test_adasum_of_parallel_and_of_orthogonal_vectors() -> None:
    x = torch.tensor([3.0, 4.0])
    assert torch.equal(adasum([x, x]), x)
    assert torch.equal(adasum([x, torch.zeros(2)]), x)
    assert torch.equal(adasum([torch.tensor([1.0, 0.0]), torch.tensor([0.0, 2.0])]), torch.tensor([1.0, 2.0]))
    assert torch.equal(adasum([x, x, x, x]), x)
    assert torch.equal(adasum([x, x, torch.tensor([-4.0, 3.0])]), torch.tensor([-1.0, 7.0]))  # one without a partner


def test_what_is_fused_has_no_more_bytes_than_the_threshold() -> None:
    table = Negotiation(1, threshold=16, capacity=8)
    for number in range(5):
        request = Request(GLOBAL, f"n{number}", "allreduce", op="Sum", dtypes=("float32",), shapes=((2,),))
        table.submit(0, request, 0.0)
    assert [len(one.items) for one in table.take_ready()] == [2, 2, 1]


def test_the_members_of_a_process_set_are_in_order() -> None:
    assert ProcessSet([2, 0, 1]).ranks == [0, 1, 2]
