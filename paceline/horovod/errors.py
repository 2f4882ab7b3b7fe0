"""Errors of Horovod operations."""

from __future__ import annotations

from paceline.errors import PacelineError


class HorovodInternalError(PacelineError, RuntimeError):
    """Failed operation: the workers disagree about it, a worker left, or the deadline has passed."""

    exit_code = 5


class InvalidRequest(HorovodInternalError, ValueError):
    """Invalid request of this worker. The other workers get a :class:`HorovodInternalError` that names it."""

    exit_code = 2


class NotInitialized(HorovodInternalError, ValueError):
    """Use of Horovod before ``init`` or after ``shutdown``."""

    exit_code = 2


class HostsUpdatedInterrupt(RuntimeError):
    """Interrupt of all workers because workers join or leave. ``hvd.elastic.run`` then calls its function again.

    Args:
        skip_sync: whether the state need not be synchronized because no worker joins. Defaults to False.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("Workers come or go; hvd.elastic.run continues with those that remain or have joined.")
        self.skip_sync = skip_sync
