"""Elastic training state: committed, restored after the loss of a worker, and sent to workers that join.

::

    run:  sync ─ func ┬ returns                                                 done
          ▲           ├ HorovodInternalError   a worker was lost  ─ restore ─┐
          │           └ HostsUpdatedInterrupt  workers join                  ├ reset: re-form with the current workers
          └────────────────────────────────────────────────────── on_reset ◄─┘

A script ends with the error of an operation that fails repeatedly without a commit in between.
"""

from __future__ import annotations

import copy
import functools
import queue
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from paceline.horovod.errors import HorovodInternalError, HostsUpdatedInterrupt
from paceline.horovod.runtime import generations

_MOST_RESETS = 10  # maximum number of resets after failures without a commit in between
ADDED, REMOVED = 2, 1


class State:
    """State that ``run`` restores and synchronizes. Scripts override ``save``, ``restore``, ``sync`` and ``reset``.

    Args:
        bcast_object: function that returns the object of rank 0 on all workers.
        get_rank: function that returns the rank of this worker.
    """

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int]) -> None:
        self._bcast_object, self._rank = bcast_object, get_rank
        self._host_messages: queue.Queue[tuple[int, int]] = queue.Queue()
        self._last_updated_timestamp = 0
        self._reset_callbacks: list[Callable[[], None]] = []

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], None]]) -> None:
        """Register functions to call after each change of the workers, before the state is synchronized."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Discard announcements, then call ``reset`` and the registered functions, after the workers changed."""
        self._host_messages = queue.Queue()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: int, update_res: int) -> None:
        """Record the announcement that workers join (``update_res`` 2) or leave (1). Any thread may call this.

        Args:
            timestamp: number that is higher than those of all earlier announcements.
            update_res: kind of the change.
        """
        self._host_messages.put((timestamp, update_res))

    def commit(self) -> None:
        """Save the state, then call :meth:`check_host_updates`. All workers must commit at the same points.

        Raises:
            HostsUpdatedInterrupt: workers join or leave. No progress is lost.
        """
        self.save()
        if (found := generations()) is not None and found.commits is not None:
            found.commits += 1
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Interrupt ``func`` on all workers if rank 0 has an announcement. All workers call this together.

        Raises:
            HostsUpdatedInterrupt: rank 0 has the announcement that workers join or leave.
        """
        before = last = self._last_updated_timestamp
        what = 0
        while not self._host_messages.empty():
            timestamp, update = self._host_messages.get()
            if timestamp > last:
                last, what = timestamp, what | update
        before, self._last_updated_timestamp, what = self._bcast_object((before, last, what))
        if self._last_updated_timestamp > before:
            raise HostsUpdatedInterrupt(what == REMOVED)

    def save(self) -> None:
        """Save a copy of the state on this worker."""
        raise NotImplementedError

    def restore(self) -> None:
        """Restore the saved copy."""
        raise NotImplementedError

    def sync(self) -> None:
        """Replace the state by that of rank 0."""
        raise NotImplementedError

    def reset(self) -> None:
        """Adapt the state after the workers have changed. Does nothing unless overridden."""


class ObjectState(State):
    """State of plain objects, which are its attributes and are pickled to be sent.

    Args:
        bcast_object: function that returns the object of rank 0 on all workers.
        get_rank: function that returns the rank of this worker.
        kwargs: attributes with their initial values.
    """

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int], **kwargs: Any) -> None:
        super().__init__(bcast_object, get_rank)
        self._saved_state = kwargs
        self._set_attrs()

    def save(self) -> None:
        """Save copies of the attributes."""
        self._saved_state = {name: copy.deepcopy(getattr(self, name)) for name in self._saved_state}

    def restore(self) -> None:
        """Restore the saved values of the attributes."""
        self._set_attrs()

    def sync(self) -> None:
        """Replace the attributes by the current values of rank 0, and save them."""
        if self._saved_state:
            now = {name: getattr(self, name) for name in self._saved_state}
            self._saved_state = copy.deepcopy(self._bcast_object(now))
            self._set_attrs()

    def _set_attrs(self) -> None:
        for name, value in self._saved_state.items():
            setattr(self, name, copy.deepcopy(value))


def run_fn(func: Callable[..., Any], reset: Callable[[bool], None]) -> Callable[..., Any]:
    """Wrap a function of a state so that it continues when workers are lost or join.

    Args:
        func: called with the state until it returns.
        reset: re-forms the current workers. Its argument is whether all workers were interrupted together.
    """

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Any:
        skip_sync, resets, commits = False, 0, -1
        with _listening(state):
            while True:
                try:
                    if not skip_sync:
                        state.sync()
                        _note_synced()
                    return func(state, *args, **kwargs)
                except HorovodInternalError:
                    found = generations()
                    now = found.commits or 0 if found is not None else 0
                    resets, commits = (resets + 1 if now == commits else 1), now
                    if found is None or resets > _MOST_RESETS:
                        raise
                    state.restore()
                    planned = skip_sync = False
                except HostsUpdatedInterrupt as interrupt:
                    planned, skip_sync = True, interrupt.skip_sync
                reset(planned)
                state.on_reset()
                _announce_again(state)

    return wrapper


@contextmanager
def _listening(state: State) -> Iterator[None]:
    if (found := generations()) is None:
        yield
        return
    found.on_change = lambda generation: state.on_hosts_updated(generation, ADDED)
    _announce_again(state)
    try:
        yield
    finally:
        found.on_change = lambda generation: None


def _announce_again(state: State) -> None:
    """Repeat an announcement that was made before the state listened, or that ``on_reset`` discarded."""
    found = generations()
    if found is not None and found.pending > found.number:
        state.on_hosts_updated(found.pending, ADDED)


def _note_synced() -> None:
    if (found := generations()) is not None:
        found.commits = found.furthest
