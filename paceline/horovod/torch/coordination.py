"""``join``, ``barrier``, process sets and timelines of an initialized Horovod."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.horovod.engine.negotiation import JOIN
from paceline.horovod.engine.operations import Task
from paceline.horovod.engine.requests import GLOBAL, Request
from paceline.horovod.process_sets import ProcessSet, add, global_process_set, remove
from paceline.horovod.runtime import engine
from paceline.horovod.torch.requests import submit


def join(device: int = -1) -> int:
    """Wait until all workers have joined. Until then contribute zeros to the reductions of the other workers.

    Args:
        device: has no effect.

    Returns:
        the rank that joined last.
    """
    running = engine()
    for plan in running.plans():
        plan.leave()
    handle = running.submit(Request(GLOBAL, JOIN, JOIN), Task([], []))
    handle.wait()
    return int(handle.value)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all members of the process set have called this."""
    submit("barrier", [], [], None, process_set).wait()


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Add a process set and return it. All workers must call this with the same ranks.

    Raises:
        ValueError: a process set of these ranks exists, or the ranks are empty, repeated or out of range.
    """
    return add(engine(), process_set)


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set. Return False if it is global or not added. All workers must call this."""
    return remove(engine(), process_set)


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Record requests and executions of operations on rank 0, in the format of Perfetto and Chrome.

    All workers may call this. A timeline that is being recorded is closed first. ``HOROVOD_TIMELINE`` names a file that
    is recorded from ``init`` on.

    Args:
        file_path: path of the file, which is overwritten.
        mark_cycles: whether negotiation cycles are recorded, too. Defaults to False.

    Raises:
        ConfigError: the file cannot be written.
        NotInitialized: ``init`` was not called.
    """
    engine().waits.record(file_path, mark_cycles)


def stop_timeline() -> None:
    """Close the file of :func:`start_timeline` or ``HOROVOD_TIMELINE``.

    Raises:
        NotInitialized: ``init`` was not called.
    """
    engine().waits.record("")
