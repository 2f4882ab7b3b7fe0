"""Shared memory that is mapped without a descriptor of its own."""

import gc
import os
from pathlib import Path

import pytest
import torch

from paceline.comm.shm import mapping
from paceline.comm.shm.mapping import drop_changes, drop_pages, free_pages, map_pages, map_private, map_shared

PAGE = os.sysconf("SC_PAGE_SIZE")


def mapped(name: str) -> int:
    return sum(name in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_it_stays_while_anything_refers_to_it() -> None:
    name = f"mapped-{os.getpid()}"
    file = os.memfd_create(name)
    os.ftruncate(file, 4 * PAGE)
    held = len(os.listdir("/proc/self/fd"))
    block = map_shared(file, 2 * PAGE, PAGE)
    assert len(os.listdir("/proc/self/fd")) == held and mapped(name) == 1
    block[3:5] = b"ab"
    block.cast("q")[1] = 7
    assert os.pread(file, 2, PAGE + 3) == b"ab" and os.pread(file, 1, PAGE + 8) == b"\x07"
    os.pwrite(file, b"c", PAGE)
    assert block[0] == ord("c") and len(block) == 2 * PAGE
    os.close(file)
    tensor = torch.frombuffer(block, dtype=torch.int64, count=4)[1:]
    del block
    gc.collect()
    assert mapped(name) == 1 and tensor[0] == 7
    del tensor
    gc.collect()
    assert mapped(name) == 0


def test_what_is_written_stays_private_until_it_is_dropped() -> None:
    file = os.memfd_create("mapped")
    os.ftruncate(file, 2 * PAGE)
    shared, private = map_shared(file, 2 * PAGE), map_private(file, 2 * PAGE)
    os.close(file)
    shared[0], shared[PAGE] = 1, 2
    assert (private[0], private[PAGE]) == (1, 2)
    private[1] = 9
    shared[0], shared[PAGE] = 3, 4
    assert (shared[1], private[0], private[PAGE]) == (0, 1, 4)  # the first page is this mapping's own now
    drop_pages(private)
    assert (private[0], private[1], private[PAGE]) == (3, 0, 4)


@pytest.mark.parametrize("told", [True, False])
def test_only_what_was_written_is_dropped(monkeypatch: pytest.MonkeyPatch, told: bool) -> None:
    """Without /proc/self/pagemap all pages are dropped."""
    file = os.memfd_create("mapped")
    os.ftruncate(file, 4 * PAGE)
    shared, private = map_shared(file, 4 * PAGE), map_private(file, 4 * PAGE)
    os.close(file)
    shared[0] = shared[2 * PAGE] = 1
    map_pages(private)
    dropped: list[int] = []
    monkeypatch.setattr(mapping, "drop_pages", lambda block: (dropped.append(len(block)), drop_pages(block)))
    if not told:
        monkeypatch.setattr(mapping, "_PAGEMAP", "/proc/self/missing")
    drop_changes(private)
    private[2 * PAGE + 5] = 9
    shared[2 * PAGE] = 3
    drop_changes(private)
    assert (private[0], private[2 * PAGE], private[2 * PAGE + 5]) == (1, 3, 0)
    assert dropped == ([PAGE] if told else [4 * PAGE] * 2)


def test_what_cannot_be_mapped() -> None:
    with pytest.raises(OSError, match=f"a shared mapping of {PAGE:,} bytes has failed: Bad file descriptor"):
        map_shared(-1, PAGE, 0)
    with pytest.raises(OSError, match=f"a private mapping of {PAGE:,} bytes has failed: Bad file descriptor"):
        map_private(-1, PAGE)


def test_freed_pages_take_no_memory() -> None:
    file = os.memfd_create("freed")
    os.ftruncate(file, 8 * PAGE)
    block, other = map_shared(file, 8 * PAGE), map_shared(file, 8 * PAGE)
    block[:] = b"x" * len(block)
    free_pages(block[2 * PAGE : 6 * PAGE])
    assert os.fstat(file).st_blocks * 512 == 4 * PAGE
    assert other[PAGE] == ord("x") and other[2 * PAGE] == 0
    os.close(file)
