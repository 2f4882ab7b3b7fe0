"""On which device a worker computes, and that no two workers have the same GPU."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch._C._distributed_c10d import Store

from paceline.engines.start import Identity
from paceline.errors import StartError, name_ranks


def choose_gpu(visible: int, local_rank: int) -> int | None:
    """Choose the number of a worker's GPU among those that it sees; None if it sees none.

    An engine may show each worker all GPUs of the machine, or only its own: one with ``srun --gpus-per-task=1``.
    Too few GPUs for all are found when they come together: see :func:`refuse_shared`.
    """
    return local_rank % visible if visible else None


def device_of(who: Identity) -> torch.device:
    """The device of this worker, which torch uses from now on."""
    number = choose_gpu(torch.cuda.device_count() if torch.cuda.is_available() else 0, who.local_rank)
    if number is None:
        return torch.device("cpu")
    torch.cuda.set_device(number)
    return torch.device("cuda", number)


def compare_gpus(store: Store, rank: int, size: int, device: torch.device) -> None:
    """Find workers that share a GPU, before NCCL blocks or fails on it; all workers on GPUs call this together.

    Raises:
        StartError: some do.
    """
    if device.type != "cuda":
        return
    store.set(f"gpu/{rank}", str(torch.cuda.get_device_properties(device).uuid))
    refuse_shared([gpu.decode() for gpu in store.multi_get([f"gpu/{one}" for one in range(size)])])


def refuse_shared(gpus: Sequence[str]) -> None:
    """Refuse a GPU of several ranks.

    Args:
        gpus: the UUID of the GPU of each rank.

    Raises:
        StartError: two are equal.
    """
    ranks: dict[str, list[int]] = defaultdict(list)
    for rank, gpu in enumerate(gpus):
        ranks[gpu].append(rank)
    for gpu, sharing in ranks.items():
        if len(sharing) > 1:
            raise StartError(
                f"{name_ranks(sharing)} have the same GPU ({gpu}), which NCCL does not allow. Start as many workers as "
                f"GPUs, let each see its own (srun --gpus-per-task=1) or all of the machine, or set "
                f"CUDA_VISIBLE_DEVICES= (empty) to train on the CPU."
            )
