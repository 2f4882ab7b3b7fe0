"""``ray_logger.log``: values from workers to the callbacks of an executor's call."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from paceline.environments import env

Callback = Callable[[Any], Any]
_POLL_SECONDS = 0.1
_queue: Any = None


def configure(queue: Any) -> None:
    """Set the destination of logged values in this process, an object with ``put``. None drops them."""
    global _queue
    _queue = queue


def log(info_dict: Any, chief_only: bool = True) -> None:
    """Send a value to the callbacks of the current call.

    Args:
        info_dict: any object that can be pickled.
        chief_only: whether only rank 0 sends values. Defaults to True.
    """
    if chief_only and env.text("HOROVOD_RANK") != "0":
        return
    if _queue is None:
        warnings.warn("ray_logger.log: the call has no callbacks, so the value is dropped.", stacklevel=2)
    else:
        _queue.put(info_dict)


class Folder:
    """Queue in a folder that processes share, with a file for each value until it is taken."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def put(self, value: Any) -> None:
        """Write a value atomically."""
        import cloudpickle

        name = f"{time.time_ns():020}-{os.getpid()}"
        (self._path / f".{name}").write_bytes(cloudpickle.dumps(value))
        (self._path / f".{name}").rename(self._path / name)

    def take(self) -> Iterator[Any]:
        """Remove and yield all values in the order in which they were put."""
        import cloudpickle

        for path in sorted(self._path.glob("[0-9]*")):
            value = cloudpickle.loads(path.read_bytes())
            path.unlink()
            yield value


@contextlib.contextmanager
def follow(folder: Folder, callbacks: Sequence[Callback]) -> Iterator[None]:
    """Call the callbacks with new values on a thread until the context ends, then raise a callback's exception."""
    ends, errors = threading.Event(), list[Exception]()

    def look() -> None:
        try:
            while not ends.wait(_POLL_SECONDS):
                call(callbacks, folder.take())
            call(callbacks, folder.take())
        except Exception as error:  # noqa: BLE001 - any exception of a callback
            errors.append(error)

    thread = threading.Thread(target=look, name="paceline-callbacks", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join()
    if errors:
        raise errors[0]


def call(callbacks: Sequence[Callback], values: Iterator[Any]) -> None:
    """Call each callback with each value."""
    for value in values:
        for callback in callbacks:
            callback(value)
