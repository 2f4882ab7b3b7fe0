"""Helpers that Horovod's interfaces share and that scripts import."""

from __future__ import annotations

from contextlib import AbstractContextManager

from paceline.environments import env as environment
from paceline.horovod import runtime


def env(**kwargs: str | None) -> AbstractContextManager[None]:
    """Set environment variables for a ``with`` block. Variables given as None stay unchanged.

    Example:
        >>> import os
        >>> with env(HOROVOD_STALL_CHECK_TIME_SECONDS="2"):
        ...     os.environ["HOROVOD_STALL_CHECK_TIME_SECONDS"]
        '2'
    """
    return environment.changed({name: value for name, value in kwargs.items() if value is not None})


def gloo_built(verbose: bool = False) -> bool:
    """Return the value of :func:`paceline.horovod.torch.gloo_built`."""
    return runtime.gloo_built()


def mpi_built(verbose: bool = False) -> bool:
    """Return the value of :func:`paceline.horovod.torch.mpi_built`."""
    return runtime.mpi_built()


def nccl_built(verbose: bool = False) -> int:
    """Return the value of :func:`paceline.horovod.torch.nccl_built`."""
    return runtime.nccl_built()


def ddl_built(verbose: bool = False) -> bool:
    """Return the value of :func:`paceline.horovod.torch.ddl_built`."""
    return runtime.ddl_built()


def ccl_built(verbose: bool = False) -> bool:
    """Return the value of :func:`paceline.horovod.torch.ccl_built`."""
    return runtime.ccl_built()
