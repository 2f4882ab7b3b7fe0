"""One launcher at a time writes the directory of a run.

The launcher holds a lock on a file there. The kernel frees it when the launcher ends, however it ends; on NFS the
server does. Where a file system has no locks, nothing is held.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import time
from pathlib import Path

from paceline.errors import ConfigError

FILE = "lock"
_WITHOUT_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}


class Lease:
    """The sole right to write a directory, until it is closed.

    Raises:
        ConfigError: another launcher has it.
        OSError: the directory cannot be written.
    """

    def __init__(self, run: Path) -> None:
        self._file = (run / FILE).open("a+")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = _read_holder(run)
            if error.errno not in _WITHOUT_LOCKS:
                self._file.close()
            if isinstance(error, BlockingIOError | PermissionError):
                raise ConfigError(
                    f"The run {run} is in use by another launcher{holder}. Wait until that has ended, or end it, or "
                    f"choose another --name."
                ) from None
            if error.errno not in _WITHOUT_LOCKS:
                raise
        mine = {"host": platform.node(), "pid": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        self._file.truncate(0)
        self._file.write(json.dumps(mine) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Give it up."""
        self._file.close()


def _read_holder(run: Path) -> str:
    try:
        known = json.loads((run / FILE).read_text())
        return f": process {known['pid']} on {known['host']}, since {known['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return ""  # it has just taken it
