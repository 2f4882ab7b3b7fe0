"""The small numbers that all workers tell each other in each step: losses, counts, parameters without a gradient."""

from __future__ import annotations

import torch

from paceline.comm.world import Message, Transfer, World
from paceline.errors import DisagreementError

LOSSES, MISSING = 1, 2
"""Tags of the two notes."""


class Note:
    """One tensor of the same shape from each worker to each other one."""

    def __init__(self, world: World, own: torch.Tensor, tag: int) -> None:
        self._world = world
        self._all = [own if rank == world.rank else torch.empty_like(own) for rank in range(world.size)]
        peers = [rank for rank in range(world.size) if rank != world.rank]
        sends = [Message(own, peer, tag) for peer in peers]
        self._transfers: list[Transfer] = world.post(sends, [Message(self._all[peer], peer, tag) for peer in peers])

    def wait(self) -> list[torch.Tensor]:
        """The tensors of all workers, in the order of ranks."""
        for transfer in self._transfers:
            transfer.wait()
        self._transfers = []
        return self._all


class Losses:
    """The sums of losses and counts of all pieces of a step.

    Args:
        world: the workers.
        step: the number of the step.
        pieces: how many pieces each rank computes.
        pairs: for each piece of this worker a float64 tensor [sum, count].
    """

    def __init__(self, world: World, step: int, pieces: list[int], pairs: list[torch.Tensor]) -> None:
        self._step = step
        self._pieces = pieces
        own = torch.zeros(max(pieces) + 1, 2, dtype=torch.float64, device=world.device)
        own[0] = torch.tensor([step, len(pairs)])
        if pairs:
            own[1 : len(pairs) + 1] = torch.stack(pairs)
        self._note = Note(world, own, LOSSES)
        self._table: torch.Tensor | None = None

    def table(self) -> torch.Tensor:
        """Float64 tensor of shape [pieces of all workers, 2], in the order of microbatches."""
        if self._table is None:
            notes = self._note.wait()
            self._table = torch.cat([note[1 : held + 1] for note, held in zip(notes, self._pieces, strict=True)])
        return self._table

    def count(self) -> torch.Tensor:
        """What the sum of all gradients is to be divided by: a float64 scalar tensor."""
        return self.table()[:, 1].sum()

    def check_step(self) -> None:
        """Refuse workers that are at different steps.

        Raises:
            DisagreementError: names the ranks and their steps.
        """
        steps = [int(note[0, 0]) for note in self._note.wait()]
        if any(step != self._step for step in steps):
            told = ", ".join(f"rank {rank} at step {step}" for rank, step in enumerate(steps))
            raise DisagreementError(
                f"The workers are not at the same step: {told}. Every worker must take the same batches from "
                f"session.batches; look for a loop that leaves or skips early on some ranks only."
            )
