"""Work that one worker does for all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paceline.checkpoint import encoding
from paceline.comm import values
from paceline.comm.world import World
from paceline.errors import InputError


def run(world: World, act: Callable[[], Any]) -> tuple[Any, int]:
    """Return what ``act`` gives on rank 0 on all workers, and the notice of the workers (``comm.world``).

    If it raises, rank 0 raises its error, and the others one that quotes it: nobody waits for what does not come.

    Raises:
        InputError: it raised on rank 0, or what it gives cannot be sent or saved.
        WorkerLost: another worker went away or stayed silent.
    """
    value, failed, error = None, "", None
    if world.rank == 0:
        try:
            value = act()
            failed = _unsendable(value)
        except Exception as raised:  # noqa: BLE001 - raised again as soon as the others know
            value, error, failed = None, raised, f"{type(raised).__name__}: {raised}"
    everyone = world.gather((None if failed else value, failed, world.notice()), "once")
    value, failed, _ = everyone[0]
    if error is not None:
        raise error
    if failed:
        raise InputError(f"session.once failed on rank 0: {failed}")
    return value, max(notice for *_, notice in everyone)


def _unsendable(value: Any) -> str:
    """Why a value cannot go to the others and into a checkpoint; empty if it can."""
    try:
        encoding.encode(value, {}, "what it returned")
        values.encode(value)
    except (encoding.EncodingError, TypeError) as error:
        return f"{error}; it may return numbers, text, tensors, and containers of these, or nothing."
    return ""
