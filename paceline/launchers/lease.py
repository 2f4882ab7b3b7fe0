"""Lock of a run directory, which only one launcher at a time may write.

The launcher holds a lock on a file in the directory. The kernel, or the server on NFS, releases the lock when the
launcher ends for any reason. File systems without locks are not protected.
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
    """Exclusive right to write a run directory, held until ``close``."""

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
        self._file.close()


def _read_holder(run: Path) -> str:
    try:
        known = json.loads((run / FILE).read_text())
        return f": process {known['pid']} on {known['host']}, since {known['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return ""  # the other launcher has just taken the lock
