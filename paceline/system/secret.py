"""Secret of a run, which authenticates its processes to each other.

A launcher creates a secret for each run. Launchers on several machines share a secret through a file or the
environment. Each process authenticates with a key derived from the secret, so a worker's key is valid only for that
worker of that run::

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
    """Secret bytes, which never appear in messages, tracebacks or records."""

    _key: bytes = field(repr=False)

    def key(self, purpose: str) -> bytes:
        """Derive the key for one purpose. The key reveals nothing about other keys."""
        return hmac.digest(self._key, purpose.encode(), "sha256")

    def hand_over(self) -> str:
        """Return the secret in hexadecimal, to send it through a pipe to a process of this run."""
        return self._key.hex()

    def of_run(self, run: str) -> Secret:
        """Derive the secret of one run from a secret that several runs share."""
        return Secret(self.key(f"run {run}"))


@dataclass(frozen=True)
class Shared:
    """Source of a secret that several launchers share: a file, or a given secret."""

    given: Secret | None = None
    file: Path | None = None

    def read(self) -> Secret | None:
        """Return the secret, or None while its file does not exist."""
        return self.given if self.file is None else read(self.file)

    def read_or_make(self) -> Secret:
        """Return the secret. Create its file if it does not exist."""
        if self.file is not None:
            return read_or_make(self.file)
        assert self.given is not None
        return self.given


def make() -> Secret:
    """Create a random secret for a run on this machine only."""
    return Secret(secrets.token_bytes(32))


def parse(text: str, source: str) -> Secret:
    """Return the secret in `text`. Raises ConfigError if the secret is too short or too long."""
    text = text.strip()
    if not _SHORTEST <= len(text) <= _LONGEST:
        raise ConfigError(
            f"{source}: a secret has at least {_SHORTEST} characters, and this one has {len(text)}. "
            f"`openssl rand -hex 32` makes one."
        )
    return Secret(text.encode("utf-8", "surrogateescape"))


def read(path: Path) -> Secret | None:
    """Read a secret file. Return None if the file does not exist."""
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
    """Read a secret file. Create it with a random secret if it does not exist."""
    while (found := read(path)) is None:
        try:
            descriptor, new = tempfile.mkstemp(dir=path.parent, prefix=".secret-")  # mode 0600
            try:
                with open(descriptor, "w") as file:
                    file.write(secrets.token_hex(32) + "\n")
                with contextlib.suppress(FileExistsError):  # another launcher was faster: the loop reads its file
                    os.link(new, path)
            finally:
                os.unlink(new)
        except OSError as error:
            raise ConfigError(f"The secret file {path} cannot be written: {error.strerror}.") from None
    return found


def own_file() -> Path:
    """Return the secret file that all launchers of this user share for runs on this machine only.

    The file is never removed, because no launcher knows whether another launcher is about to read it.
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
            f"secret: remove it, and give each machine a new one with mode 0600."
        )
