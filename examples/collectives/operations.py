"""What each collective does: paceline run -n 4 operations.py"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()


def show(name, tensors):
    """Print what every rank has, by rank 0."""
    mine = torch.cat([one.flatten() for one in tensors]) if tensors else torch.zeros(0)
    everyone = [None] * size
    dist.all_gather_object(everyone, [int(value) for value in mine])
    if rank == 0:
        print(f"{name:15}", *everyone, flush=True)


own = torch.tensor([rank + 1.0])
show("start", [own])

one = own.clone()
dist.broadcast(one, src=0)  # everyone has what rank 0 had
show("broadcast", [one])

one = own.clone()
dist.reduce(one, dst=0)  # rank 0 has the sum
show("reduce", [one] if rank == 0 else [])

one = own.clone()
dist.all_reduce(one)  # everyone has the sum
show("all_reduce", [one])

many = [torch.zeros(1) for _ in range(size)]
dist.gather(own, many if rank == 0 else None, dst=0)  # rank 0 has all
show("gather", many if rank == 0 else [])

dist.all_gather(many, own)  # everyone has all
show("all_gather", many)

one = torch.zeros(1)
dist.scatter(one, [torch.tensor([10.0 * to]) for to in range(size)] if rank == 0 else None, src=0)
show("scatter", [one])  # rank r has part r of what rank 0 had

dist.reduce_scatter(one, [torch.tensor([10.0 * to + rank]) for to in range(size)])
show("reduce_scatter", [one])  # rank r has the sum of all parts r

many = torch.zeros(size)
dist.all_to_all_single(many, torch.tensor([10.0 * rank + to for to in range(size)]))
show("all_to_all", [many])  # rank r has part r of everyone

dist.barrier()  # no rank continues until all are here
dist.destroy_process_group()
