"""Helpers that Horovod's interfaces share and that scripts import."""

from __future__ import annotations

from contextlib import AbstractContextManager

from paceline.environments import env as environment
from paceline.horovod.runtime import ccl_built, ddl_built, gloo_built, mpi_built, nccl_built


def env(**kwargs: str | None) -> AbstractContextManager[None]:
    """Set environment variables for a ``with`` block. Variables given as None stay unchanged.

    Example:
        >>> import os
        >>> with env(HOROVOD_STALL_CHECK_TIME_SECONDS="2"):
        ...     os.environ["HOROVOD_STALL_CHECK_TIME_SECONDS"]
        '2'
    """
    return environment.changed({name: value for name, value in kwargs.items() if value is not None})
