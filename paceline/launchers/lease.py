"""Lock of a run directory, which only one launcher at a time may write.

The launcher holds a lock on a file in the directory. The kernel, or the server on NFS, releases the lock when the
launcher ends for any reason. File systems without locks are not protected.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import platform
import time
from collections.abc import Iterator
from pathlib import Path

from paceline.errors import ConfigError

FILE = "lock"
_WITHOUT_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}


@contextlib.contextmanager
def lease(run: Path) -> Iterator[None]:
    """Hold the exclusive right to write a run directory during the ``with`` block."""
    with (run / FILE).open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if isinstance(error, BlockingIOError | PermissionError):
                raise ConfigError(
                    f"The run {run} is in use by another launcher{_read_holder(run)}. Wait until that has ended, or "
                    f"end it, or choose another --name."
                ) from None
            if error.errno not in _WITHOUT_LOCKS:
                raise
        mine = {"host": platform.node(), "pid": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        file.truncate(0)
        file.write(json.dumps(mine) + "\n")
        file.flush()
        yield


def _read_holder(run: Path) -> str:
    try:
        known = json.loads((run / FILE).read_text())
        return f": process {known['pid']} on {known['host']}, since {known['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return ""  # the other launcher has just taken the lock
