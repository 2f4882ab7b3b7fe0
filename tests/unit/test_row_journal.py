"""Rows of tables that an update in place has changed, and whose worker was lost before the update counted."""

import mmap

import pytest
import torch
from torch import nn

from paceline.comm.servers.row_journal import RowJournal


class Shared:
    """Memory that both journals of a test map."""

    def __init__(self) -> None:
        self._map = mmap.mmap(-1, 1 << 20)

    def share(self, size: int) -> list[memoryview]:
        return [memoryview(self._map)[:size]]


def worker(shared: Shared, rows: torch.Tensor, total: torch.Tensor) -> tuple[RowJournal, nn.Parameter]:
    """Return a worker's journal and table. The memory of rows and of the optimizer's state is that of all workers."""
    table = nn.Parameter(torch.zeros(0))
    table.data = rows
    optimizer = torch.optim.Adagrad([nn.Parameter(torch.zeros(1))])
    optimizer.state[table] = {"sum": total}
    return RowJournal(shared, [table], optimizer), table


@pytest.mark.parametrize("shape", [(6, 2), (6,), (6, 1)])
def test_an_update_of_a_worker_that_was_lost_is_not_in_the_next_one(shape: tuple[int, ...]) -> None:
    """Its lock goes to a worker that does not know of the loss yet, which updates other rows with the same number."""
    shared, rows, total = Shared(), torch.zeros(6, 2), torch.ones(shape)
    (lost, its), (next_one, own) = (worker(shared, rows, total) for _ in range(2))
    lost.begin()

    def update(journal: RowJournal, table: nn.Parameter, places: list[int], version: int) -> None:
        table.grad = torch.sparse_coo_tensor([places], torch.ones(len(places), 2), (6, 2), check_invariants=True)
        journal.keep(version)
        rows[places] += 1
        total[places] += 1

    update(lost, its, [0, 3], 4)  # counts
    update(lost, its, [3, 5], 5)  # is lost before it counts
    update(next_one, own, [1, 3], 5)
    assert rows[:, 0].tolist() == [1, 1, 0, 2, 0, 0]
    assert total.view(6, -1)[:, 0].tolist() == [2, 2, 1, 3, 1, 1]
    next_one.restore(4)
    assert rows[:, 0].tolist() == [1, 0, 0, 1, 0, 0]
    assert total.view(6, -1)[:, 0].tolist() == [2, 1, 1, 2, 1, 1]
    next_one.restore(5)  # version 5 counts
    assert rows[:, 0].tolist() == [1, 0, 0, 1, 0, 0]
