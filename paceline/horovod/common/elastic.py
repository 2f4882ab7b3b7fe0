"""State that outlives the loss and the arrival of workers: committed, restored, and given to those that join.

::

    run:  sync ─ func ┬ returns                                                 done
          ▲           ├ HorovodInternalError   a worker was lost  ─ restore ─┐
          │           └ HostsUpdatedInterrupt  workers come                  ├ reset: the workers that there are now
          └────────────────────────────────────────────────────── on_reset ◄─┘

A script of which one operation fails again and again without a commit in between ends with its error.
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

_MOST_RESETS = 10
"""Without a commit in between."""
ADDED, REMOVED = 2, 1


class State:
    """What ``run`` restores and synchronizes; scripts override ``save``, ``restore``, ``sync`` and ``reset``.

    Args:
        bcast_object: gives the object of rank 0 on all workers.
        get_rank: gives the rank of this worker.
    """

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int]) -> None:
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._host_messages: queue.Queue[tuple[int, int]] = queue.Queue()
        self._last_updated_timestamp = 0
        self._reset_callbacks: list[Callable[[], None]] = []

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], None]]) -> None:
        """Have functions called after each change of the workers, before the state is synchronized."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """The workers have changed: forget what was announced, and call what was registered."""
        self._host_messages = queue.Queue()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: int, update_res: int) -> None:
        """Take note that workers come (``update_res`` 2) or go (1); any thread may call it.

        Args:
            timestamp: higher than that of all notices before.
            update_res: what happens.
        """
        self._host_messages.put((timestamp, update_res))

    def commit(self) -> None:
        """Save the state, then :meth:`check_host_updates`; all workers call it at the same places.

        Raises:
            HostsUpdatedInterrupt: workers come or go; nothing is lost.
        """
        self.save()
        if (found := generations()) is not None and found.commits is not None:
            found.commits += 1
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Let all workers interrupt ``func`` if rank 0 has heard that workers come or go; all call it together.

        Raises:
            HostsUpdatedInterrupt: it has.
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
        """Keep a copy of the state on this worker."""
        raise NotImplementedError

    def restore(self) -> None:
        """Go back to the copy."""
        raise NotImplementedError

    def sync(self) -> None:
        """Take the state of rank 0."""
        raise NotImplementedError

    def reset(self) -> None:
        """Do what is due when the workers have changed."""


class ObjectState(State):
    """State of plain objects, each an attribute of this one; they are pickled on their way.

    Args:
        bcast_object: gives the object of rank 0 on all workers.
        get_rank: gives the rank of this worker.
        kwargs: the attributes, with their first values.
    """

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int], **kwargs: Any) -> None:
        super().__init__(bcast_object, get_rank)
        self._saved_state = kwargs
        self._set_attrs()

    def save(self) -> None:
        """Keep copies of the attributes."""
        self._saved_state = {name: copy.deepcopy(getattr(self, name)) for name in self._saved_state}

    def restore(self) -> None:
        """Give the attributes their saved values."""
        self._set_attrs()

    def sync(self) -> None:
        """Take the attributes of rank 0, as they are now, and save them."""
        if self._saved_state:
            now = {name: getattr(self, name) for name in self._saved_state}
            self._saved_state = copy.deepcopy(self._bcast_object(now))
            self._set_attrs()

    def _set_attrs(self) -> None:
        for name, value in self._saved_state.items():
            setattr(self, name, copy.deepcopy(value))


def run_fn(func: Callable[..., Any], reset: Callable[[bool], None]) -> Callable[..., Any]:
    """Wrap a function of a state, so that it goes on when workers are lost or come.

    Args:
        func: called with the state, again and again until it returns.
        reset: comes together with the workers that there are now; gets whether all workers were interrupted at once.
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
    found = generations()
    if found is None:
        yield
        return
    found.on_change = lambda generation: state.on_hosts_updated(generation, ADDED)
    _announce_again(state)
    try:
        yield
    finally:
        found.on_change = lambda generation: None


def _announce_again(state: State) -> None:
    """What was announced before the state listened, or while it forgot what it had heard."""
    found = generations()
    if found is not None and found.pending > found.number:
        state.on_hosts_updated(found.pending, ADDED)


def _note_synced() -> None:
    if (found := generations()) is not None:
        found.commits = found.furthest
