"""Where checkpoints are kept: a base, with a folder (folder.py) or an object store (object_store.py) behind it.

::

    step-000100/0002-0001-9f2c41ab/manifest.json      launch 2, generation 1, the token of the process that wrote it

A writer has a name of its own for everything that it writes, so two of them never write to one place: nothing is ever
overwritten, and completing a checkpoint needs no lock and no conditional operation. It is one atomic act: the rename of
a directory, or the put of the manifest. Of several complete checkpoints of a step the one of the latest writer counts.

A worker that was stopped and dropped may wake up in the middle of a save. Every writer shows its name before it writes
anything; one that sees the name of a later launch or generation is *fenced* and stops. Should it look just before, its
checkpoint is complete, older, and takes nothing from anyone. Removing has an order as well: a writer touches what is
its own or of an earlier launch or generation, and first takes it away from its writer by one atomic act.
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
"""A file that takes an unfinished checkpoint away from its writer, where a directory cannot be renamed."""
_DAMAGED = "damaged-"
_WRITER = re.compile(r"(\d{4,9})-(\d{4,9})-([0-9a-f]{8})")


class FencedError(CheckpointError):
    """Another worker writes checkpoints now.

    Attributes:
        replaced: it belongs to the same launch, whose workers have changed; else to another launch.
    """

    def __init__(self, text: str, replaced: bool) -> None:
        super().__init__(text)
        self.replaced = replaced


@dataclass(frozen=True, order=True)
class Writer:
    """Who writes a checkpoint.

    Attributes:
        launch: counts how often training was started, or went back to a checkpoint, with this storage.
        generation: of the workers.
        token: of the process.
    """

    launch: int
    generation: int
    token: str

    def __str__(self) -> str:
        return f"{self.launch:04d}-{self.generation:04d}-{self.token}"

    def is_before(self, other: Writer) -> bool:
        """Whether the other has taken the place of this one."""
        return (self.launch, self.generation) < (other.launch, other.generation)

    def may_remove(self, other: Writer | None) -> bool:
        """Whether what the other wrote, or begun to write, may be removed by this one."""
        return other is None or other.is_before(self) or other.token == self.token


def writer_of(name: str) -> Writer | None:
    """The writer in the name of a checkpoint, or of what a writer has begun."""
    found = _WRITER.fullmatch(name.rpartition("/")[2])
    return Writer(int(found[1]), int(found[2]), found[3]) if found else None


class Storage(ABC):
    """The checkpoints of one run, by name: ``step-000100/0002-0001-9f2c41ab``.

    Every method may raise the errors of the file system or store; none takes one for an answer.
    """

    @abstractmethod
    def location(self, name: str = "") -> Path | str:
        """The path or URL of a checkpoint, of a step, or of the whole storage."""

    @abstractmethod
    def names(self, *parts: str) -> list[str]:
        """The names in a directory.

        Raises:
            FileNotFoundError, NotADirectoryError: there is none.
        """

    @abstractmethod
    def writers(self) -> set[Writer]:
        """The writers that have shown their names here; the latest ones at least."""

    @abstractmethod
    def open(self, name: str, file: str) -> AbstractContextManager[BinaryIO]:
        """Open a file of a checkpoint for reading.

        Raises:
            FileNotFoundError: there is none.
            NotRegularError: it is no regular file.
        """

    @abstractmethod
    def begin(self, step: str, writer: Writer, size: int) -> None:
        """Show the name of the writer, remove what interrupted saves left, and begin a checkpoint of ``size`` bytes.

        Raises:
            FencedError: a later writer is at work.
            OSError: there is no room for it.
        """

    @abstractmethod
    def create(self, step: str, writer: Writer, file: str) -> AbstractContextManager[BinaryIO]:
        """Create a file of the checkpoint that was begun; closing it makes it durable, as far as the store can."""

    def begun(self, step: str, launch: int, generation: int) -> Writer | None:
        """Who has begun a checkpoint of a step, of this launch and generation.

        None also where other ranks than rank 0 cannot write to what it has begun.
        """
        return None

    def read_begun(self, step: str, writer: Writer, file: str, most: int) -> bytes | None:
        """A file of the checkpoint that was begun, at most so many bytes; none if it is not there."""
        return None

    @abstractmethod
    def commit(self, step: str, writer: Writer, manifest: str, keep: Collection[str]) -> None:
        """Complete the checkpoint that was begun, with these files and no others.

        Raises:
            FencedError: a later writer is at work.
        """

    @abstractmethod
    def abandon(self, step: str, writer: Writer) -> None:
        """Remove the checkpoint that was begun."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove a complete checkpoint; a kill on the way leaves no damaged one."""

    @abstractmethod
    def set_aside(self, name: str) -> Path | str:
        """Rename a damaged checkpoint to something that is not taken for one; return its new location."""

    def manifest(self, name: str) -> str:
        """The text of a manifest.

        Raises:
            FileNotFoundError: there is none.
            ValueError: it is too long, or no text.
        """
        with self.open(name, FILE) as file:
            text = file.read(LARGEST + 1)
        if len(text) > LARGEST:
            raise ValueError(f"it has more than {LARGEST:,} bytes")
        return text.decode()

    def complete(self) -> list[str]:
        """The names of the complete checkpoints, the newest first.

        A step that holds none is one that is being written, or one that was removed after a newer one was completed,
        which may not have been there yet when the list was made. So then it looks until nothing changes.
        """
        before = None
        while True:
            steps = {name: self.complete_in(name) for name in self.steps()}
            if all(steps.values()) or steps == before:
                return sorted((name for names in steps.values() for name in names), key=_order, reverse=True)
            before = steps

    def steps(self) -> list[str]:
        """The names of the steps that may have a checkpoint."""
        try:
            return [name for name in self.names() if step_of(name) >= 0]
        except (FileNotFoundError, NotADirectoryError):
            return []

    def complete_in(self, step: str) -> list[str]:
        """The names of the complete checkpoints of a step, the latest first."""
        found = []
        for name in self.attempts(step):
            files = self.files_of(name)
            if FILE in files and FENCED not in files:
                found.append(name)
        return sorted(found, key=_order, reverse=True)

    def attempts(self, step: str) -> list[str]:
        """The names of the checkpoints of a step, complete or not; the step itself if it is one without a writer."""
        names = self.files_of(step)
        found = [f"{step}/{name}" for name in names if writer_of(name)]
        return [step] if FILE in names and not found else found

    def files_of(self, name: str) -> list[str]:
        """The names of what belongs to a checkpoint; none if it is not there any more."""
        try:
            return self.names(name)
        except (FileNotFoundError, NotADirectoryError):
            return []

    def latest(self) -> int:
        """The step that a note in the storage says is the newest; -1 if there is no note."""
        try:
            with self.open("", LATEST) as file:
                return step_of(file.read(100).decode(errors="replace").strip())
        except (FileNotFoundError, NotRegularError):
            return -1

    def next_launch(self) -> int:
        """A number for a launch, above those that have written here."""
        known = self.writers() | {writer for name in self.complete() if (writer := writer_of(name))}
        return 1 + max((writer.launch for writer in known), default=0)

    def check_fence(self, writer: Writer) -> None:
        """Refuse to let a writer go on whose place another one has taken.

        Raises:
            FencedError: another one has.
        """
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
    """The step of a checkpoint, and the name of its writer; empty if it has none."""
    step, _, writer = name.partition("/")
    return step, writer


def _order(name: str) -> tuple[int, Writer]:
    return step_of(split(name)[0]), writer_of(name) or Writer(-1, -1, "")


def free_name(step: str, taken: Iterable[str]) -> str:
    """``damaged-step-000006``, or with a number behind it if that is taken."""
    wanted = f"{_DAMAGED}{step}"
    number = 2
    while wanted in taken:
        wanted = f"{_DAMAGED}{step}-{number}"
        number += 1
    return wanted
