"""Who am I, and how many are we?  paceline run -n 4 rank_and_size.py"""

import torch.distributed as dist

dist.init_process_group("gloo")
print(f"rank {dist.get_rank()} of {dist.get_world_size()}", flush=True)
dist.barrier()  # a rank that left while another still connects would break its connections
dist.destroy_process_group()
