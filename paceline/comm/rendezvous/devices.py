"""Choice of each worker's device, and detection of GPUs that several workers share."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.distributed.distributed_c10d import Store

from paceline.environments import env
from paceline.environments.start import Identity


class Gpus(NamedTuple):
    """UUIDs of the GPUs of a worker."""

    own: str  # the GPU on which the worker computes. Empty if it has not been chosen.
    visible: Sequence[str]  # all GPUs that the worker sees


def choose_gpu(visible: int, local_rank: int) -> int | None:
    """Return the index of a worker's GPU among the visible GPUs, or None if no GPU is visible.

    A launcher may show each worker all GPUs of the machine or only its own, as ``srun --gpus-per-task=1`` does.
    """
    return local_rank % visible if visible else None


def device_of(who: Identity) -> torch.device:
    """Return the device on which this worker starts. A GPU also becomes torch's current device.

    A spare worker uses the CPU until it joins, because :func:`agree` then chooses among the GPUs that are free.
    """
    launched = env.launch_info()
    number = choose_gpu(len(visible_gpus()), who.local_rank)
    if number is None or (launched is not None and launched.spare):
        return torch.device("cpu")
    return use_gpu(number)


def use_gpu(number: int) -> torch.device:
    """Make a GPU torch's current device and return it."""
    torch.cuda.set_device(number)
    return torch.device("cuda", number)


def visible_gpus() -> list[str]:
    """Return the UUIDs of the GPUs that this worker sees."""
    if not torch.cuda.is_available():
        return []
    return [str(torch.cuda.get_device_properties(number).uuid) for number in range(torch.cuda.device_count())]


def agree(store: Store, rank: int, size: int, device: torch.device) -> tuple[torch.device, bool]:
    """Choose GPUs for joining workers and detect GPUs that several workers share. All workers must call this.

    Args:
        device: device of this worker. The CPU if no GPU has been chosen for it.

    Returns:
        this worker's device, and whether any GPU has several workers.
    """
    if not (visible := visible_gpus()):
        return device, False
    own = "" if device.type == "cpu" else visible[device.index]
    store.set(f"gpus/{rank}", json.dumps(Gpus(own, visible)))
    everyone = [Gpus(*json.loads(one)) for one in store.multi_get([f"gpus/{one}" for one in range(size)])]
    chosen = choose_free(everyone)
    if not own:
        device = use_gpu(visible.index(chosen[rank]))
    return device, len(set(chosen)) < size


def choose_free(workers: Sequence[Gpus]) -> list[str]:
    """Return the GPU of each rank. Ranks without a GPU get the least used visible GPU, in the order of ranks.

    >>> choose_free([Gpus("a", "abc"), Gpus("", "abc"), Gpus("c", "abc"), Gpus("", "d")])
    ['a', 'b', 'c', 'd']
    """
    users = Counter(one.own for one in workers)
    chosen = []
    for one in workers:
        gpu = one.own or min(one.visible, key=lambda visible: users[visible])
        users[gpu] += not one.own
        chosen.append(gpu)
    return chosen
