"""Files of untrusted folders: only regular ones are read, so that a pipe or device cannot block the process."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a directory",
    stat.S_IFLNK: "a symbolic link",
}
_NOT_OPENED: dict[int | None, int] = {errno.ELOOP: stat.S_IFLNK, errno.ENXIO: stat.S_IFSOCK}


class NotRegularError(OSError):
    """The path is not a regular file."""


def open_regular(path: Path | str, folder: int | None = None, *, links: bool = True) -> BinaryIO:
    """Open a regular file for reading.

    Args:
        folder: file descriptor of a directory. Defaults to the current directory.
        links: whether to follow a symbolic link in the last component of the path. Defaults to True.

    Raises:
        NotRegularError: the path is a pipe, device, directory, socket, or a link that is not followed.
        OSError: the file cannot be opened.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | (0 if links else os.O_NOFOLLOW)
    descriptor = None
    try:
        descriptor = os.open(path, flags, dir_fd=folder)
        kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
    except OSError as error:
        if error.errno not in _NOT_OPENED:
            raise
        kind = _NOT_OPENED[error.errno]
    if descriptor is not None and kind == stat.S_IFREG:
        return os.fdopen(descriptor, "rb")
    if descriptor is not None:
        os.close(descriptor)
    raise NotRegularError(errno.EINVAL, f"{_KINDS.get(kind, 'something else')}, not a regular file", str(path))


def read_text(path: Path | str, errors: str = "strict") -> str:
    """Read a regular file as UTF-8 text; ``errors`` as in ``bytes.decode``.

    Raises:
        NotRegularError: the path is not a regular file.
        OSError: the file cannot be read.
        UnicodeDecodeError: the file is not UTF-8 and ``errors`` is ``"strict"``.
    """
    with open_regular(path) as file:
        return file.read().decode(errors=errors)


def without_link(path: Path) -> Path:
    """Return a path of an untrusted folder to write to, without the symbolic link there whose target would be lost.

    Raises:
        OSError: the link cannot be removed.
    """
    if path.is_symlink():
        path.unlink()
    return path
