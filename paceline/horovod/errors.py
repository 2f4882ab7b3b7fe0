"""What the operations raise."""

from __future__ import annotations

from paceline.errors import PacelineError


class HorovodInternalError(PacelineError, RuntimeError):
    """An operation failed: the workers do not agree on it, one of them left, or the deadline has passed."""

    exit_code = 5


class InvalidRequest(HorovodInternalError, ValueError):
    """This worker asked for what cannot be done; the others get a :class:`HorovodInternalError` that names it."""

    exit_code = 2


class NotInitialized(HorovodInternalError, ValueError):
    """``init`` was not called, or ``shutdown`` was."""

    exit_code = 2


class HostsUpdatedInterrupt(RuntimeError):
    """Workers come or go: all workers leave the function that ``hvd.elastic.run`` has called, which calls it again.

    Args:
        skip_sync: whether the state need not be synchronized, as nobody joins.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("Workers come or go; hvd.elastic.run goes on with those that there are then.")
        self.skip_sync = skip_sync
