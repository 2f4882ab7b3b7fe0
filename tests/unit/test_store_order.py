"""What the code relies on when processes share memory without a lock (see ``paceline.comm.shm.arena``)."""

import mmap
import os
import signal
import struct
from collections.abc import Callable

from paceline.comm.shm.futex import fence

ROUNDS = 20_000
_OWN, _OTHER = 0, 8
"""Numbers of two cache lines."""


def together(first: Callable[[memoryview], None], second: Callable[[memoryview], None]) -> memoryview:
    """Do both at the same time, each in a process of its own, on the same memory; gives the memory."""
    shared = memoryview(mmap.mmap(-1, 1 << 20)).cast("q")
    child = os.fork()
    if child == 0:
        code = 1
        try:
            second(shared)
            code = 0
        finally:
            os._exit(code)
    try:
        first(shared)
    except BaseException:
        os.kill(child, signal.SIGKILL)
        raise
    finally:
        _, status = os.waitpid(child, 0)
    assert status == 0
    return shared


def spin_until(shared: memoryview, place: int, number: int) -> None:
    """Wait until a number is at least this one; at first without leaving the core, to see it at once."""
    polls = 0
    while shared[place] < number:
        polls += 1
        if polls > 10_000:
            os.sched_yield()


def test_a_number_is_never_seen_in_part() -> None:
    def write(shared: memoryview) -> None:
        while not shared[_OTHER]:
            for number in range(ROUNDS):
                shared[_OWN] = -(number % 2)  # no bit is set, or all are

    def read(shared: memoryview) -> None:
        for _ in range(10 * ROUNDS):
            assert shared[_OWN] in (0, -1)
        shared[_OTHER] = 1

    together(read, write)


def test_who_sees_a_flag_sees_what_was_written_before_it() -> None:
    size = 4096

    def write(shared: memoryview) -> None:
        data = shared[512 : 512 + size].cast("B")
        for number in range(1, ROUNDS // 10):
            spin_until(shared, _OTHER, number - 1)
            data[:] = struct.pack("<q", number) * size
            shared[_OWN] = number

    def read(shared: memoryview) -> None:
        data = shared[512 : 512 + size]
        for number in range(1, ROUNDS // 10):
            spin_until(shared, _OWN, number)
            assert (data[0], data[size // 2], data[size - 1]) == (number, number, number)
            shared[_OTHER] = number

    together(read, write)


def test_of_two_that_store_and_look_one_sees_the_other() -> None:
    """Each writes down what it has seen of the other in each round. Without a fence it fails in most runs."""

    def store_and_look(own: int, other: int, seen: int) -> Callable[[memoryview], None]:
        def act(shared: memoryview) -> None:
            for number in range(1, ROUNDS + 1):
                spin_until(shared, other + 16, number - 1)  # both come to the round at about the same time
                shared[own] = number
                fence()
                shared[seen + number] = shared[other]
                shared[own + 16] = number

        return act

    shared = together(store_and_look(0, 8, 1 << 15), store_and_look(8, 0, 1 << 16))
    for number in range(1, ROUNDS + 1):
        assert number <= max(shared[(1 << 15) + number], shared[(1 << 16) + number])
