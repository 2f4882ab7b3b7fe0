"""A token goes round by blocking calls, then all exchange at once by others: paceline run -n 4 send_and_receive.py"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
right, left = (rank + 1) % size, (rank - 1) % size

# Blocking: one sends while the next one waits. Rank 0 begins; if all began to receive, all would wait for ever.
token = torch.zeros(1)
if rank == 0:
    dist.send(token + 1, right)
    dist.recv(token, left)
else:
    dist.recv(token, left)
    dist.send(token + 1, right)
if rank == 0:
    print(f"the token was counted {int(token)} times", flush=True)

# Not blocking: all start both at once. Until wait() returns, neither tensor may be touched.
mine, theirs = torch.tensor([float(rank)]), torch.zeros(1)
works = [dist.irecv(theirs, left), dist.isend(mine, right)]
for work in works:
    work.wait()
print(f"rank {rank} got {int(theirs)}", flush=True)
dist.destroy_process_group()
