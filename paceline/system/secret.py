"""The secret of a run: who knows it may take part.

A launcher makes one for each run. Where launchers of several machines meet, all are given the same one: by a file, or
by the environment. What a process proves itself with is derived from it, so that the key of one worker is good for
nothing but that worker of that run::

    secret ─── agent             the launchers of other machines
      └─ run ─── worker 0, 1...  each in the environment of its worker
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import stat
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from paceline.errors import ConfigError

_SHORTEST = 32
_LONGEST = 4096


@dataclass(frozen=True)
class Secret:
    """Bytes that are never shown: not in a message, a traceback, or a record."""

    _key: bytes = field(repr=False)

    def key(self, purpose: str) -> bytes:
        """Derive the key of one purpose; it tells nothing about the others."""
        return hmac.digest(self._key, purpose.encode(), "sha256")

    def hand_over(self) -> str:
        """Itself, for a pipe to a process of this run."""
        return self._key.hex()

    def of_run(self, run: str) -> Secret:
        """Derive the secret of one run from one that serves several."""
        return Secret(self.key(f"run {run}"))


@dataclass(frozen=True)
class Shared:
    """Where launchers that share a secret find it: in a file, unless it is given."""

    given: Secret | None = None
    file: Path | None = None

    def read(self) -> Secret | None:
        """The secret; none while the file is not there."""
        return self.given if self.file is None else read(self.file)

    def read_or_make(self) -> Secret:
        """The secret; makes the file if it is not there."""
        if self.file is not None:
            return read_or_make(self.file)
        assert self.given is not None
        return self.given


def make() -> Secret:
    """Make the secret of a run on this machine alone."""
    return Secret(secrets.token_bytes(32))


def parse(text: str, source: str) -> Secret:
    """Take a secret as given.

    Raises:
        ConfigError: it is too short, or too long.
    """
    text = text.strip()
    if not _SHORTEST <= len(text) <= _LONGEST:
        raise ConfigError(
            f"{source}: a secret has at least {_SHORTEST} characters, and this one has {len(text)}. "
            f"`openssl rand -hex 32` makes one."
        )
    return Secret(text.encode("utf-8", "surrogateescape"))


def read(path: Path) -> Secret | None:
    """Read the secret in a file; None if there is no such file yet.

    Raises:
        ConfigError: others may read or change the file, or it holds no secret.
    """
    try:
        opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"The secret file {path} cannot be read: {error.strerror}.") from None
    with open(opened, "rb") as file:
        about = os.fstat(opened)
        if not stat.S_ISREG(about.st_mode):
            raise ConfigError(f"The secret file {path} is not a file.")
        _check_owner(path, about, "secret file")
        text = file.read(_LONGEST + 100)
    return parse(text.decode("utf-8", "surrogateescape"), f"The secret file {path}")


def read_or_make(path: Path) -> Secret:
    """Read the secret in a file; write one if there is no such file.

    Raises:
        ConfigError: as in :func:`read`, or the file cannot be written.
    """
    while (found := read(path)) is None:
        try:
            descriptor, new = tempfile.mkstemp(dir=path.parent, prefix=".secret-")  # mode 0600
            try:
                with open(descriptor, "w") as file:
                    file.write(secrets.token_hex(32) + "\n")
                with contextlib.suppress(FileExistsError):  # another launcher was first: the loop reads its file
                    os.link(new, path)
            finally:
                os.unlink(new)
        except OSError as error:
            raise ConfigError(f"The secret file {path} cannot be written: {error.strerror}.") from None
    return found


def own_file() -> Path:
    """The file by which all launchers of one user share a secret when they meet on this machine alone.

    It stays: no launcher knows whether another one is about to read it.

    Raises:
        ConfigError: the folder for it belongs to another user.
    """
    folder = Path(tempfile.gettempdir()) / f"paceline-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    about = folder.lstat()
    if not stat.S_ISDIR(about.st_mode):
        raise ConfigError(f"{folder} is not a folder; give the secret with --secret-file.")
    _check_owner(folder, about, "folder")
    return folder / "secret"


def _check_owner(path: Path, about: os.stat_result, what: str) -> None:
    mode = stat.S_IMODE(about.st_mode)
    if about.st_uid != os.geteuid():
        raise ConfigError(f"The {what} {path} belongs to user {about.st_uid}; it must belong to you ({os.geteuid()}).")
    if mode & 0o077:
        raise ConfigError(
            f"The {what} {path} has mode {mode:04o}, so other users may read or change it. Its secret is no longer "
            f"one: remove it, and give each machine a new one with mode 0600."
        )
