"""The small numbers that all workers tell each other in each step: losses, counts, parameters without a gradient."""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

import torch

from paceline.comm.shm.arena import SharedMemory
from paceline.comm.world import Message, Transfer, World
from paceline.errors import DisagreementError

LOSSES, MISSING = 1, 2
"""Tags of the two notes."""

HEADER, ROW_BYTES = 3, 24
"""Of a note of losses: the rows before those of the pieces, and the bytes of each row."""


class Note(Protocol):
    """One tensor of the same shape from each worker."""

    def wait(self) -> list[torch.Tensor]:
        """The tensors of all workers, in the order of ranks."""
        ...


class Notes:
    """Sends the notes of a kind, one after the other.

    Args:
        world: the workers.
        tag: of the kind.
        size: bytes of the largest note.
    """

    def __init__(self, world: World, tag: int, size: int) -> None:
        self.world = world
        self._tag = tag
        self.size = size
        self._board = HeaderBoard(world.shared_memory, size) if world.shared_memory else None

    def send(self, own: torch.Tensor) -> Note:
        """Tell all other workers; they tell something of the same shape."""
        return self._board.write(self.world.rank, own) if self._board else Letters(self.world, own, self._tag)


class Letters:
    """A note over the network."""

    def __init__(self, world: World, own: torch.Tensor, tag: int) -> None:
        self._all = [own if rank == world.rank else torch.empty_like(own) for rank in range(world.size)]
        peers = [rank for rank in range(world.size) if rank != world.rank]
        receives = [Message(self._all[peer], peer, tag) for peer in peers]
        self._transfers: list[Transfer] = world.post([Message(own, peer, tag) for peer in peers], receives)

    def wait(self) -> list[torch.Tensor]:
        for transfer in self._transfers:
            transfer.wait()
        self._transfers = []
        return self._all


class HeaderBoard:
    """Notes through shared memory.

    A worker writes its next note of a kind but one only after an exchange in which all others took part, and they took
    part after reading this one: so two places for each worker are enough.
    """

    def __init__(self, memory: SharedMemory, size: int) -> None:
        self._memory = memory
        self._blocks = memory.share(size), memory.share(size)
        self._flag = memory.reserve(1)
        self._written = 0

    def write(self, rank: int, own: torch.Tensor) -> Note:
        self._written += 1
        block = self._blocks[self._written % 2][rank]
        torch.frombuffer(block, dtype=own.dtype, count=own.numel()).copy_(own.reshape(-1))
        self._memory.announce(self._flag, self._written)
        return _Written(self, own, self._written)

    def read(self, example: torch.Tensor, written: int) -> list[torch.Tensor]:
        """A copy of what each worker wrote, once all have."""
        self._memory.wait(self._flag, written)
        count = example.numel()
        return [
            torch.frombuffer(block, dtype=example.dtype, count=count).view(example.shape).clone()
            for block in self._blocks[written % 2]
        ]


class _Written:
    def __init__(self, board: HeaderBoard, own: torch.Tensor, written: int) -> None:
        self._board = board
        self._own = own
        self._written = written
        self._read: list[torch.Tensor] | None = None

    def wait(self) -> list[torch.Tensor]:
        if self._read is None:
            self._read = self._board.read(self._own, self._written)
        return self._read


class Result(NamedTuple):
    """What a piece gave: its first microbatch, who computed it, the sum of its losses, what it is divided by."""

    start: int
    rank: int
    loss: float
    counted: float


class Losses:
    """The sums of losses and counts of all pieces of a step, and whether all workers did the same before it.

    A note has three rows before those of the pieces: the step, a notice about the world, and how long this worker
    computed; what the script did with ``torch.distributed`` so far (``comm.desync.recorder``), and whether a gradient
    is missing; how many pieces follow.

    Args:
        notes: sends them.
        step: the number of the step.
        starts: the first microbatch of each piece that this worker has computed.
        pairs: for each of them a float64 tensor [sum, count].
        device: of the worker.
        seconds: that this worker has computed.
        missing: whether one of its pieces gave no gradient to a parameter, if that is known.
    """

    def __init__(
        self,
        notes: Notes,
        step: int,
        starts: list[int],
        pairs: list[torch.Tensor],
        device: torch.device,
        seconds: float = 0.0,
        missing: bool = True,
    ) -> None:
        self._step = step
        self._world = notes.world
        self._calls = notes.world.recorder
        made = self._calls.meet("session.step", f"step {step}") if self._calls else (0.0, 0.0)
        header = ((step, notes.world.notice(), seconds), (*made, missing), (len(pairs), 0.0, 0.0))
        rows = notes.size // ROW_BYTES  # the same in all steps: workers at different steps must be able to tell others
        own = torch.zeros((rows, 3), dtype=torch.float64, device=device)
        own[:HEADER] = torch.tensor(header, dtype=torch.float64)
        if pairs:
            own[HEADER : HEADER + len(pairs), 0] = torch.tensor(starts, dtype=torch.float64)
            own[HEADER : HEADER + len(pairs), 1:] = torch.stack(pairs)
        self._note = notes.send(own)
        self._results: list[Result] = []
        self.notice = 0
        """What a worker said of the world: that it is about to change, or that it leaves; known with the results."""
        self.seconds: list[float] = []
        """How long each worker computed; known with the results."""
        self.missing = True
        """Whether a worker said that a piece gave no gradient to a parameter; known with the results."""

    def results(self) -> list[Result]:
        """The results of the pieces of all workers, in the order of microbatches.

        Raises:
            DisagreementError: workers are at different steps, or called different operations of
                ``torch.distributed`` before; names the ranks and what they did.
        """
        if not self._results:
            with self._world.awaiting("in the exchange of losses"):
                notes = self._note.wait()
            headers = [note[:HEADER].tolist() for note in notes]
            self._check(headers)
            self._results = sorted(
                Result(int(start), rank, loss, count)
                for rank, note in enumerate(notes)
                for start, loss, count in note[HEADER : HEADER + int(headers[rank][2][0])].tolist()
            )
        return self._results

    def count(self) -> float:
        """What the sum of all gradients is to be divided by."""
        return math.fsum(result.counted for result in self.results())

    def _check(self, headers: list[list[list[float]]]) -> None:
        steps = [int(header[0][0]) for header in headers]
        if any(step != self._step for step in steps):
            told = ", ".join(f"rank {rank} at step {step}" for rank, step in enumerate(steps))
            raise DisagreementError(
                f"The workers are not at the same step: {told}. Every worker must take the same batches from "
                f"session.batches; look for a loop that leaves or skips early on some ranks only."
            )
        self.notice = max(int(header[0][1]) for header in headers)
        self.seconds = [header[0][2] for header in headers]
        self.missing = any(header[1][2] for header in headers)
        if self._calls is not None:
            self._calls.agree([(header[1][0], header[1][1]) for header in headers])
