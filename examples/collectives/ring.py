"""An all-reduce by hand, as a ring, against the library's: paceline run -n 4 ring.py [--elements N]"""

import argparse
import time

import torch
import torch.distributed as dist


def exchange(outgoing, incoming, right, left):
    """Send to the right while receiving from the left."""
    works = [dist.irecv(incoming, left), dist.isend(outgoing, right)]
    for work in works:
        work.wait()


def ring_all_reduce(tensor):
    """Add up a tensor over all ranks, in place.

    It is cut into one chunk for each rank. In each of the first size - 1 steps a rank adds to a chunk what its left
    neighbour has added up so far, and passes that on in the next one: then it has the whole sum of one chunk. In as
    many steps more the sums go round. So each rank sends 2 (size - 1) / size of the tensor, however many there are.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % size, (rank - 1) % size
    chunks = list(tensor.tensor_split(size))
    for step in range(size - 1):
        target = chunks[(rank - step - 1) % size]
        incoming = torch.empty_like(target)
        exchange(chunks[(rank - step) % size], incoming, right, left)
        target += incoming
    for step in range(size - 1):
        exchange(chunks[(rank - step + 1) % size], chunks[(rank - step) % size], right, left)


def seconds(call, tensor, times=5):
    """The shortest of some calls."""
    shortest = float("inf")
    for _ in range(times):
        dist.barrier()
        begin = time.perf_counter()
        call(tensor)
        shortest = min(shortest, time.perf_counter() - begin)
    return shortest


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--elements", type=int, default=1_000_003)
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    by_hand = torch.randn(arguments.elements)
    by_library = by_hand.clone()
    ring_all_reduce(by_hand)
    dist.all_reduce(by_library)
    difference = (by_hand - by_library).abs().max()
    times = [seconds(call, torch.zeros(arguments.elements)) for call in (ring_all_reduce, dist.all_reduce)]
    if dist.get_rank() == 0:
        print(f"largest difference {float(difference):.1e}")  # other orders of the sum round differently
        print(f"by hand {1000 * times[0]:.1f} ms, by the library {1000 * times[1]:.1f} ms")
    dist.destroy_process_group()
