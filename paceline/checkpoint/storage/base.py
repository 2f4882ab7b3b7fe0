"""Checkpoint storage: base class of the folder (folder.py) and the object store (object_store.py).

::

    step-000100/0002-0001-9f2c41ab/manifest.json      launch 2, generation 1, the token of the process that wrote it

Every writer uses a unique name for everything that it writes, so two writers never write to the same path. Nothing is
overwritten, and a checkpoint is completed without locks or conditional operations, by a single atomic operation: the
rename of a directory, or the put of the manifest. If a step has several complete checkpoints, the latest writer wins.

A worker that was stopped and dropped may wake up in the middle of a save. Every writer publishes its name before it
writes anything. A writer that sees the name of a later launch or generation is *fenced* and stops. If it looked just
before that name appeared, its checkpoint is complete but older, and harms nothing. A writer removes only files that are
its own or of an earlier launch or generation, after an atomic operation that takes them away from their writer.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from paceline.checkpoint.manifest import FILE, LARGEST, step_of
from paceline.errors import CheckpointError
from paceline.system.regular_files import NotRegularError

LATEST = "latest"
FENCED = "fenced"
"""Name of the file that takes an unfinished checkpoint away from its writer if directories cannot be renamed."""
_DAMAGED = "damaged-"
_WRITER = re.compile(r"(\d{4,9})-(\d{4,9})-([0-9a-f]{8})")


class FencedError(CheckpointError):
    """Raised if another worker writes checkpoints now."""

    def __init__(self, text: str, replaced: bool) -> None:
        super().__init__(text)
        # whether that worker belongs to a later generation of the same launch, not to another launch
        self.replaced = replaced


@dataclass(frozen=True, order=True)
class Writer:
    """Identity of the writer of a checkpoint."""

    launch: int  # number of the launch. Each start or resume of training with this storage has a higher number.
    generation: int  # generation of the membership
    token: str  # random token of the process

    def __str__(self) -> str:
        return f"{self.launch:04d}-{self.generation:04d}-{self.token}"

    def is_before(self, other: Writer) -> bool:
        return (self.launch, self.generation) < (other.launch, other.generation)

    def may_remove(self, other: Writer | None) -> bool:
        """Return whether this writer may remove complete or unfinished checkpoints of the other writer."""
        return other is None or other.is_before(self) or other.token == self.token


def writer_of(name: str) -> Writer | None:
    """Return the writer in the name of a complete or unfinished checkpoint, or None if the name has none."""
    found = _WRITER.fullmatch(name.rpartition("/")[2])
    return Writer(int(found[1]), int(found[2]), found[3]) if found else None


class Storage(ABC):
    """Checkpoints of a run by name, such as ``step-000100/0002-0001-9f2c41ab``.

    Every method may raise errors of the file system or store. No method treats an error as a result.
    """

    @abstractmethod
    def location(self, name: str = "") -> Path | str:
        """Return the path or URL of a checkpoint, of a step, or of the whole storage."""

    @abstractmethod
    def names(self, *parts: str) -> list[str]:
        """Return the names in a directory.

        Raises:
            FileNotFoundError, NotADirectoryError: there is no such directory.
        """

    @abstractmethod
    def writers(self) -> set[Writer]:
        """Return the writers that have published their names, at least the latest."""

    @abstractmethod
    def open(self, name: str, file: str) -> AbstractContextManager[BinaryIO]:
        """Open a file of a checkpoint for reading.

        Raises:
            FileNotFoundError: there is no such file.
            NotRegularError: the path is not a regular file.
        """

    @abstractmethod
    def begin(self, step: str, writer: Writer, size: int) -> None:
        """Publish the name of the writer and begin a checkpoint of ``size`` bytes. May remove unfinished checkpoints.

        Raises:
            FencedError: a later writer is active.
            OSError: the storage is known to have too little space.
        """

    @abstractmethod
    def create(self, step: str, writer: Writer, file: str) -> AbstractContextManager[BinaryIO]:
        """Create a file of an unfinished checkpoint. Closing makes it durable, as far as the store supports that."""

    def begun(self, step: str, launch: int, generation: int) -> Writer | None:
        """Return the writer of this launch and generation that has begun a checkpoint of a step.

        Returns None if there is none, or if ranks other than 0 cannot write to unfinished checkpoints.
        """
        return None

    def create_part(self, step: str, writer: Writer, file: str) -> AbstractContextManager[BinaryIO]:
        """Create a file of an unfinished checkpoint on another rank. Only :meth:`commit` can keep it."""
        raise NotImplementedError

    def read_part(self, step: str, writer: Writer, file: str, most: int) -> bytes | None:
        """Read at most ``most`` bytes of a file that another rank has created. Return None if it does not exist."""
        return None

    @abstractmethod
    def commit(self, step: str, writer: Writer, manifest: str, keep: Collection[str]) -> None:
        """Complete the checkpoint that was begun. It consists of the files in ``keep``, of any rank, and the manifest.

        Raises:
            FencedError: a later writer is active.
        """

    @abstractmethod
    def abandon(self, step: str, writer: Writer) -> None:
        """Remove the checkpoint that was begun."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove a complete checkpoint. A kill during removal leaves no damaged checkpoint."""

    @abstractmethod
    def set_aside(self, name: str) -> Path | str:
        """Rename a damaged checkpoint so that it no longer counts as a checkpoint. Return its new location."""

    def manifest(self, name: str) -> str:
        """Return the text of a manifest.

        Raises:
            FileNotFoundError: the checkpoint has no manifest.
            ValueError: the manifest is too long or not text.
        """
        with self.open(name, FILE) as file:
            if (size := file.seek(0, 2)) > LARGEST:
                raise ValueError(f"it has more than {LARGEST:,} bytes")
            file.seek(0)
            return file.read(size).decode()  # a buffer of the largest size would count towards RLIMIT_DATA

    def complete(self) -> list[str]:
        """Return the names of the complete checkpoints, newest first.

        A step without a complete checkpoint is in progress, or was removed after a newer checkpoint was completed,
        perhaps after the listing. In that case the listing is repeated until it does not change.
        """
        before = None
        while True:
            steps = {name: self.complete_in(name) for name in self.steps()}
            if all(steps.values()) or steps == before:
                return sorted((name for names in steps.values() for name in names), key=_order, reverse=True)
            before = steps

    def steps(self) -> list[str]:
        try:
            return [name for name in self.names() if step_of(name) >= 0]
        except (FileNotFoundError, NotADirectoryError):
            return []

    def complete_in(self, step: str) -> list[str]:
        """Return the names of the complete checkpoints of a step, latest first."""
        found = []
        for name in self.attempts(step):
            files = self.files_of(name)
            if FILE in files and FENCED not in files:
                found.append(name)
        return sorted(found, key=_order, reverse=True)

    def attempts(self, step: str) -> list[str]:
        """Return the names of a step's checkpoints, complete or not. Without a writer, the name is that of the step."""
        names = self.files_of(step)
        found = [f"{step}/{name}" for name in names if writer_of(name)]
        return [step] if FILE in names and not found else found

    def files_of(self, name: str) -> list[str]:
        """Return the names of the files of a checkpoint, empty if it no longer exists."""
        try:
            return self.names(name)
        except (FileNotFoundError, NotADirectoryError):
            return []

    def latest(self) -> int:
        """Return the newest step according to the file ``latest``, or -1 if there is no valid file."""
        try:
            with self.open("", LATEST) as file:
                return step_of(file.read(100).decode(errors="replace").strip())
        except (FileNotFoundError, NotRegularError):
            return -1

    def next_launch(self) -> int:
        """Return a launch number above those of all earlier writers to this storage."""
        known = self.writers() | {writer for name in self.complete() if (writer := writer_of(name))}
        return 1 + max((writer.launch for writer in known), default=0)

    def check_fence(self, writer: Writer) -> None:
        """Raise FencedError if a later writer has published its name."""
        later = max((one for one in self.writers() if writer.is_before(one)), default=None)
        if later is not None:
            who = "a worker of a later generation" if later.launch == writer.launch else "another run, started later,"
            raise FencedError(
                f"Checkpoints in {self.location()} are written by {who} now (launch {later.launch}, generation "
                f"{later.generation}; this is launch {writer.launch}, generation {writer.generation}). Give each run "
                f"its own checkpoint.directory.",
                replaced=later.launch == writer.launch,
            )


def split(name: str) -> tuple[str, str]:
    """Split the name of a checkpoint into its step and its writer. The writer may be empty."""
    step, _, writer = name.partition("/")
    return step, writer


def _order(name: str) -> tuple[int, Writer]:
    return step_of(split(name)[0]), writer_of(name) or Writer(-1, -1, "")


def free_name(step: str, taken: Iterable[str]) -> str:
    """Return ``damaged-<step>``, with a number appended if that name is taken."""
    wanted = f"{_DAMAGED}{step}"
    number = 2
    while wanted in taken:
        wanted = f"{_DAMAGED}{step}-{number}"
        number += 1
    return wanted
