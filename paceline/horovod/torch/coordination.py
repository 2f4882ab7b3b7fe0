"""``join``, ``barrier``, and process sets of a running Horovod."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.horovod.engine.negotiation import JOIN
from paceline.horovod.engine.operations import Task
from paceline.horovod.engine.requests import GLOBAL, Request
from paceline.horovod.process_sets import ProcessSet, add, global_process_set, remove
from paceline.horovod.runtime import engine
from paceline.horovod.torch.requests import submit


def join(device: int = -1) -> int:
    """Wait until all workers have no more data; until then give zeros to what the others reduce.

    Args:
        device: has no effect here.

    Returns:
        the rank that came last.
    """
    running = engine()
    for plan in running.plans():
        plan.leave()
    handle = running.submit(Request(GLOBAL, JOIN, JOIN), Task([], []))
    handle.wait()
    return int(handle.value)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all members have come here."""
    submit("barrier", [], [], None, process_set).wait()


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Add a process set; all workers call this, with the same ranks.

    Raises:
        ValueError: there is one of these ranks, or there are no such ranks.
    """
    return add(engine(), process_set)


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set; all workers call this. False if it is the global one, or not added."""
    return remove(engine(), process_set)


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Record when operations are asked for and carried out, on rank 0; in the format of Perfetto and Chrome.

    All workers may call this. A file that is being recorded ends; ``HOROVOD_TIMELINE`` names one that begins in
    ``init``.

    Args:
        file_path: of the file, which is replaced.
        mark_cycles: whether turns of the negotiation are recorded, too.

    Raises:
        ConfigError: the file cannot be written.
        NotInitialized: ``init`` was not called.
    """
    engine().waits.record(file_path, mark_cycles)


def stop_timeline() -> None:
    """End the file of :func:`start_timeline`, or of ``HOROVOD_TIMELINE``.

    Raises:
        NotInitialized: ``init`` was not called.
    """
    engine().waits.record("")
