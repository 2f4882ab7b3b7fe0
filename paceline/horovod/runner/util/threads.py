"""Functions on their own threads."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any


def in_thread(
    target: Callable[..., Any],
    args: tuple[Any, ...] = (),
    name: str | None = None,
    daemon: bool = True,
    silent: bool = False,
) -> threading.Thread:
    """Start a function on a new thread and return the thread.

    Args:
        target: function to call.
        args: arguments of the function.
        name: name of the thread. Defaults to Python's own.
        daemon: whether the process may end before the thread. Defaults to True.
        silent: whether exceptions of the function are suppressed. Defaults to False.

    Raises:
        ValueError: ``args`` is not a tuple.
    """
    if not isinstance(args, tuple):
        raise ValueError(f"args must be a tuple, as ({args!r},), not a {type(args).__name__}.")

    def run() -> None:
        with contextlib.suppress(Exception) if silent else contextlib.nullcontext():
            target(*args)

    thread = threading.Thread(target=run, name=name, daemon=daemon)
    thread.start()
    return thread
