"""What each of several processes does with MPI as a back end, compared with what must come."""

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import paceline.comm.mpi.register

assert paceline.comm.mpi.register
dist.init_process_group("mpi")
RANK, SIZE = dist.get_rank(), dist.get_world_size()
TOTAL = SIZE * (SIZE + 1) // 2
ROW = list(range(SIZE))


def same(tensor: torch.Tensor, value: object) -> None:
    assert torch.equal(tensor, torch.as_tensor(value, dtype=tensor.dtype).expand_as(tensor)), (tensor, value)


def types() -> None:
    halves, whole = (torch.float16, torch.bfloat16), (torch.int8, torch.uint8, torch.int32, torch.int64)
    for dtype in (torch.float32, torch.float64, *halves, *whole, torch.complex64):
        dist.all_reduce(tensor := torch.full((5,), RANK + 1, dtype=dtype))
        same(tensor, TOTAL)
    dist.all_reduce(truth := torch.tensor([RANK == 0, True, False]), dist.ReduceOp.MAX)
    same(truth, [True, True, False])
    for dtype in (torch.bool, torch.float8_e4m3fn, torch.complex128):
        sent = torch.arange(6).fmod(2).to(dtype)
        dist.broadcast(tensor := sent.clone() if RANK == SIZE - 1 else torch.zeros(6).to(dtype), SIZE - 1)
        assert torch.equal(tensor.view(torch.uint8), sent.view(torch.uint8))


def reductions() -> None:
    results = {"AVG": TOTAL / SIZE, "MAX": SIZE, "MIN": 1, "PRODUCT": torch.arange(1, SIZE + 1).prod()}
    for name, expected in results.items():
        dist.all_reduce(tensor := torch.full((3,), RANK + 1.0), getattr(dist.ReduceOp, name))
        same(tensor, expected)
    dist.all_reduce(bits := torch.tensor([1 << RANK]), dist.ReduceOp.BOR)
    same(bits, (1 << SIZE) - 1)
    dist.all_reduce(strided := torch.full((4, 6), RANK + 1.0).t()[::2])
    same(strided, TOTAL)
    dist.all_reduce(scalar := torch.tensor(RANK + 1.0))
    same(scalar, TOTAL)
    dist.reduce(tensor := torch.full((3,), RANK + 1.0), 0)
    same(tensor, RANK + 1 if RANK else TOTAL)
    dist.reduce_scatter(part := torch.zeros(RANK + 1), [torch.full((to + 1,), float(to + RANK)) for to in ROW])
    same(part, SIZE * RANK + TOTAL - SIZE)
    dist.reduce_scatter_single(two := torch.zeros(2), torch.ones(2 * SIZE), op=dist.ReduceOp.AVG)
    same(two, 1)
    tensors = [torch.full((1000,), RANK + 1.0 + number) for number in range(50)]
    for work in reversed([dist.all_reduce(one, async_op=True) for one in tensors]):
        assert work is not None
        work.wait()
    for number, one in enumerate(tensors):
        same(one, TOTAL + SIZE * number)


def moves() -> None:
    dist.all_gather(uneven := [torch.zeros(of + 1) for of in ROW], torch.full((RANK + 1,), float(RANK)))
    dist.all_gather_single(rows := torch.zeros(SIZE, 2), torch.full((1, 2), float(RANK)))
    for of in ROW:
        same(uneven[of], of)
        same(rows[of], of)
    gathered = [torch.zeros(2) for _ in ROW] if RANK == 1 else None
    dist.gather(torch.full((2,), float(RANK)), gathered, dst=1)
    for of, one in enumerate(gathered or []):
        same(one, of)
    dist.scatter(mine := torch.zeros(2), [torch.full((2,), float(to)) for to in ROW] if RANK == 1 else None, src=1)
    same(mine, RANK)
    dist.all_to_all_single(exchanged := torch.zeros(SIZE), torch.arange(SIZE) + 10.0 * RANK)
    same(exchanged, [10.0 * of + RANK for of in ROW])
    dist.all_to_all(lists := [torch.zeros(of + 1) for of in ROW], [torch.full((RANK + 1,), float(RANK)) for _ in ROW])
    for of in ROW:
        same(lists[of], of)
    objects: list[object] = [None] * SIZE
    dist.all_gather_object(objects, {"rank": RANK})
    assert objects == [{"rank": of} for of in ROW]
    dist.barrier()


def sends() -> None:
    right, left = (RANK + 1) % SIZE, (RANK - 1) % SIZE
    sent, received = torch.full((300_000,), float(RANK)), torch.zeros(300_000)
    for _ in range(2):  # receives first: nobody waits for a send that comes after them
        works = [dist.irecv(received, left, tag=7), dist.isend(sent, right, tag=7)]
        for work in works:
            assert work is not None
            work.wait()
        same(received, left)
    if RANK == 0:
        dist.send(sent, 1)
        dist.send(torch.ones(4), 1, tag=1)
        dist.send(2 * torch.ones(4), 1, tag=2)
    if RANK == 1:
        assert dist.recv(received) == 0
        first, second = torch.zeros(4), torch.zeros(4)
        dist.recv(second, 0, tag=2)
        dist.recv(first, 0, tag=1)
        same(torch.cat([first, second]), 4 * [1.0] + 4 * [2.0])
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, right), dist.P2POp(dist.irecv, received, left)]):
        work.wait()
    same(received, left)


def groups() -> None:
    first, last = dist.new_group([0, 1]), dist.new_group([SIZE - 1])
    for group, members in ((first, [0, 1]), (last, [SIZE - 1])):
        if RANK in members:
            dist.all_reduce(tensor := torch.ones(1), group=group)
            same(tensor, len(members))


def functions() -> None:
    same(functional.all_reduce(torch.full((3,), RANK + 1.0), "sum", dist.group.WORLD), TOTAL)
    same(functional.all_gather_tensor(torch.ones(3), 0, dist.group.WORLD), 3 * SIZE * [1.0])
    same(functional.reduce_scatter_tensor(torch.ones(2 * SIZE), "sum", 0, dist.group.WORLD), SIZE)
    with dist.distributed_c10d._coalescing_manager():
        for one in (tensors := [torch.full((3,), RANK + 1.0) for _ in range(4)]):
            dist.all_reduce(one)
    for one in tensors:
        same(one, TOTAL)


def refusals() -> None:
    for bad in (torch.ones(2, dtype=torch.int64), torch.ones(2).to_sparse()):
        try:
            dist.all_reduce(bad, dist.ReduceOp.AVG)
        except ValueError as error:
            assert "MPI" in str(error)
        else:
            raise AssertionError(bad)


def training() -> None:
    torch.manual_seed(0)
    inputs, targets = torch.randn(4 * SIZE, 8), torch.randn(4 * SIZE, 4)
    mine = slice(4 * RANK, 4 * RANK + 4)

    def trained(wrap: Callable[[torch.nn.Module], torch.nn.Module], part: slice) -> list[torch.Tensor]:
        torch.manual_seed(1)
        plain = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
        model = wrap(plain)
        optimizer = torch.optim.SGD(plain.parameters(), 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            (model(inputs[part]) - targets[part]).square().mean().backward()
            optimizer.step()
        return [getattr(one, "full_tensor", lambda one=one: one)().detach() for one in plain.parameters()]

    mesh = init_device_mesh("cpu", (SIZE,))
    alone = trained(lambda model: model, slice(None))
    for wrap in (torch.nn.parallel.DistributedDataParallel, lambda model: fully_shard(model, mesh=mesh)):
        for one, expected in zip(trained(wrap, mine), alone, strict=True):
            torch.testing.assert_close(one, expected, atol=1e-5, rtol=0)


for check in (types, reductions, moves, sends, groups, functions, refusals, training):
    check()
print("all operations", flush=True)
dist.destroy_process_group()
