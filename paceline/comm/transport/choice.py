"""Choice of a worker's transport. No other module chooses by the device of tensors."""

from __future__ import annotations

from collections.abc import Callable

import torch

from paceline.comm.transport.base import Transport
from paceline.comm.transport.gloo import Gloo
from paceline.comm.transport.mpi import Mpi
from paceline.comm.transport.nccl import Nccl
from paceline.comm.transport.through_host import ThroughHost
from paceline.errors import ConfigError

_other: Callable[[torch.device], Transport] | None = None


def transport_for(device: torch.device, same_host: bool, shared: bool = False, wanted: str = "auto") -> Transport:
    """Return the transport for tensors on a device.

    Args:
        same_host: whether workers of one machine can share host memory.
        shared: whether some workers have the same device, which NCCL does not allow.
    """
    if wanted == "mpi" and device.type == "cpu":
        return Mpi()
    if wanted == "mpi":
        raise ConfigError(f"transport='mpi' moves tensors on the CPU, and this worker computes on {device}.")
    if shared:
        return ThroughHost(device)
    if _other is not None:
        return _other(device)
    return Gloo(same_host) if device.type == "cpu" else Nccl(device)


def use(make: Callable[[torch.device], Transport] | None) -> None:
    """Replace the transport of every device that workers do not share. None restores the default choice."""
    global _other
    _other = make
