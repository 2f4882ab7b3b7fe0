"""Virtual time, and processes that run in turns: what happens next depends on the seed alone.

A process is a greenlet, so that code which waits in the middle of a call, as a worker's does, runs here unchanged. It
runs until it waits; then the clock goes on to whatever is due next.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable

from greenlet import GreenletExit, greenlet

Act = Callable[[], None]


class Process:
    """One simulated process.

    Args:
        hub: runs it.
        name: of it, for histories.
        main: what it does; what it raises is kept in :attr:`error`.

    Attributes:
        ended: whether it has come to its end, or was killed.
        error: what it ended with, if that is an exception.
        stopped: the time until which it is stopped, as by SIGSTOP.
    """

    def __init__(self, hub: Hub, name: str, main: Act) -> None:
        self.name = name
        self.ended = False
        self.error: BaseException | None = None
        self.stopped = 0.0
        self._hub, self._main = hub, main
        self._waits = True
        self._greenlet = greenlet(self._run, hub.greenlet)

    def _run(self) -> None:
        try:
            self._main()
        except GreenletExit:
            return
        except BaseException as error:  # noqa: BLE001 - any end of a process is an outcome
            self.error = error
        self.ended = True

    def wake(self) -> None:
        """Let it look again whether what it waits for has come."""
        self._hub.at(0.0, self.resume)

    def resume(self) -> None:
        """Run it until it waits again, unless it is stopped."""
        if self.ended or not self._waits:
            return
        if self._hub.now < self.stopped:
            self._hub.at(self.stopped - self._hub.now, self.resume)
            return
        self._waits = False
        before, self._hub.running = self._hub.running, self
        self._greenlet.switch()
        self._hub.running = before

    def wait(self) -> None:
        """Give way to others; called by the process itself.

        Raises:
            GreenletExit: it was killed.
        """
        if self.ended:
            raise GreenletExit
        self._waits = True
        self._hub.greenlet.switch()

    def kill(self) -> None:
        """End it at once; nothing that it does on its way out reaches anybody."""
        self.ended = True
        if self._hub.running is self:
            raise GreenletExit
        if self._hub.running is None:
            self._greenlet.throw(GreenletExit)
        else:
            self._hub.at(0.0, lambda: self._greenlet.throw(GreenletExit))


class Hub:
    """The clock, and what is due when.

    Attributes:
        now: virtual seconds.
        running: the process that runs.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.running: Process | None = None
        self.greenlet = greenlet.getcurrent()
        self._due: list[tuple[float, int, Act]] = []
        self._number = itertools.count()

    def clock(self) -> float:
        """Return :attr:`now`."""
        return self.now

    def at(self, delay: float, act: Act) -> None:
        """Do something later."""
        self.at_time(self.now + delay, act)

    def at_time(self, time: float, act: Act) -> None:
        """Do something at a time; what is due at the same time happens in the order of the calls."""
        heapq.heappush(self._due, (time, next(self._number), act))

    def process(self, name: str, main: Act) -> Process:
        """Start a process; it runs first when all else that is due now has happened."""
        started = Process(self, name, main)
        started.wake()
        return started

    def block(self, until: float = math.inf) -> None:
        """Wait until the running process is woken, or until a time; it may wake for nothing."""
        assert self.running is not None
        if until < math.inf:
            self.at(max(0.0, until - self.now), self.running.resume)
        self.running.wait()

    def pause(self, seconds: float) -> None:
        """Let time pass for the running process."""
        until = self.now + seconds
        while self.now < until:
            self.block(until)

    def run(self, over: Callable[[], bool]) -> None:
        """Let happen what is due, in order, until it is over."""
        while self._due and not over():
            self.now, _, act = heapq.heappop(self._due)
            act()
