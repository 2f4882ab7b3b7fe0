"""On which device a worker computes: at its start, or a spare when it joins; and whether others have the same."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch._C._distributed_c10d import Store

from paceline.environments import env
from paceline.environments.start import Identity


class Gpus(NamedTuple):
    """The GPUs of a worker, by UUID.

    Attributes:
        own: where it computes; empty: not chosen yet.
        visible: all that it sees.
    """

    own: str
    visible: Sequence[str]


def choose_gpu(visible: int, local_rank: int) -> int | None:
    """Choose the number of a worker's GPU among those that it sees; None if it sees none.

    An engine may show each worker all GPUs of the machine, or only its own: one with ``srun --gpus-per-task=1``.
    """
    return local_rank % visible if visible else None


def device_of(who: Identity) -> torch.device:
    """The device of this worker at its start, which torch uses from now on.

    That of a spare is the CPU until it joins: which GPUs are free then is not known yet (:func:`agree`).
    """
    launched = env.launch_info()
    number = choose_gpu(len(visible_gpus()), who.local_rank)
    if number is None or (launched is not None and launched.spare):
        return torch.device("cpu")
    return use_gpu(number)


def use_gpu(number: int) -> torch.device:
    """Let torch use one of the GPUs from now on."""
    torch.cuda.set_device(number)
    return torch.device("cuda", number)


def visible_gpus() -> list[str]:
    """The UUIDs of the GPUs that this worker sees."""
    if not torch.cuda.is_available():
        return []
    return [str(torch.cuda.get_device_properties(number).uuid) for number in range(torch.cuda.device_count())]


def agree(store: Store, rank: int, size: int, device: torch.device) -> tuple[torch.device, bool]:
    """Choose the GPUs of those that join, and find out whether some have the same; all workers call this together.

    Args:
        store: of this generation.
        rank, size: in it.
        device: of this worker; the CPU where none is chosen yet.

    Returns:
        the device from now on, and whether it or another one has several workers.
    """
    visible = visible_gpus()
    if not visible:
        return device, False
    own = "" if device.type == "cpu" else visible[device.index]
    store.set(f"gpus/{rank}", json.dumps(Gpus(own, visible)))
    everyone = [Gpus(*json.loads(one)) for one in store.multi_get([f"gpus/{one}" for one in range(size)])]
    chosen = choose_free(everyone)
    if not own:
        device = use_gpu(visible.index(chosen[rank]))
    return device, len(set(chosen)) < size


def choose_free(workers: Sequence[Gpus]) -> list[str]:
    """The GPU of each rank: those that have none yet get the ones that the fewest have, in the order of ranks.

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
