"""Retries for a storage that fails, if the failure may be transient. A failure is never mistaken for damage.

An error of a disk, network folder or object store says nothing about the content.
"""

from __future__ import annotations

import errno
import io
import logging
import sys
import time
from collections.abc import Iterator

_log = logging.getLogger("paceline")
MISSING_SECONDS = 30.0
"""Longest delay in seconds until a network folder shows a file or its newest entries to another machine."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 10.0
_ABOUT_CONTENT = FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError, io.UnsupportedOperation
_ABOUT_CONTENT_TOO = {errno.ELOOP, errno.ENAMETOOLONG, errno.EINVAL, errno.EOVERFLOW, errno.ENOTEMPTY}
_FINAL = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_PASSING_STATUS = {408, 425, 429, *range(500, 600)}
_NOT_CLIENTS = {*sys.stdlib_module_names, "torch", "numpy", "paceline"}


def is_storage_error(error: BaseException) -> bool:
    """Return whether an error is a failure of the storage, which says nothing about the content."""
    return any(_is_os_error(one) or _status(one) not in (None, 404) or _is_of_client(one) for one in _chain(error))


def may_pass(error: BaseException) -> bool:
    """Return whether a failure may be transient. It is not if the storage denies access or is full."""
    if not is_storage_error(error):
        return False
    statuses = [status for one in _chain(error) if (status := _status(one)) is not None]
    final = any(isinstance(one, PermissionError) or getattr(one, "errno", None) in _FINAL for one in _chain(error))
    return all(status in _PASSING_STATUS for status in statuses) if statuses else not final


class Retries:
    """Exponential backoff between attempts, from 0.1 to 10 seconds."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._begin = time.monotonic()
        self._pause = _FIRST_PAUSE
        self._logged = False

    @property
    def elapsed(self) -> float:
        """Seconds since the first attempt began."""
        return time.monotonic() - self._begin

    def left(self) -> bool:
        """Return whether the timeout allows another attempt."""
        return self.elapsed < self._seconds

    def duration(self, error: BaseException) -> str:
        """Return the time spent on retries, for a message; empty unless the timeout ended the retries."""
        return f" (tried for {self.elapsed:.0f} s)" if may_pass(error) and not self.left() else ""

    def wait(self, why: str) -> None:
        """Wait before the next attempt. Log the reason the first time."""
        if not self._logged:
            _log.warning("%s. Trying again for up to %g s.", why.removesuffix("."), self._seconds)
            self._logged = True
        time.sleep(max(0.0, min(self._pause, self._seconds - self.elapsed)))
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)


def _is_os_error(error: BaseException) -> bool:
    about_content = isinstance(error, _ABOUT_CONTENT) or getattr(error, "errno", None) in _ABOUT_CONTENT_TOO
    return isinstance(error, OSError) and not about_content


def _is_of_client(error: BaseException) -> bool:
    """Return whether the class of the error belongs to a store's client."""
    return type(error).__module__.partition(".")[0] not in _NOT_CLIENTS


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _status(error: BaseException) -> int | None:
    """Return the HTTP status in a client error of botocore, gcsfs, Azure, aiohttp or requests, or None."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        response = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    for value in (getattr(error, "status", None), getattr(error, "status_code", None), response):
        value = getattr(value, "status_code", value)
        if isinstance(value, int):
            return value
    code = getattr(error, "code", None)
    return code if isinstance(code, int) and 400 <= code < 600 else None
