"""Scheduler with virtual time for processes that run in turns. The seed alone determines the order of events.

A process is a greenlet, so code that waits in the middle of a call, as a worker's does, runs unchanged. A process runs
until it waits. Then the clock advances to the next scheduled action.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable

from greenlet import GreenletExit, greenlet

Act = Callable[[], None]


class Process:
    """Simulated process. ``main``: main function of the process. Its exception is stored in :attr:`error`."""

    def __init__(self, hub: Hub, name: str, main: Act) -> None:
        self.name = name
        self.ended = False  # whether the process has ended or was killed
        self.error: BaseException | None = None  # exception that ended the process, or None
        self.stopped = 0.0  # virtual time until which the process is stopped, as by SIGSTOP
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
        """Schedule the process to run now, so that it checks the condition that it waits for."""
        self._hub.at(0.0, self.resume)

    def resume(self) -> None:
        """Run the process until it waits again. If it is stopped, reschedule this call for the end of the stop."""
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
        """Yield to other processes. Only the process itself may call this method.

        Raises:
            GreenletExit: the process was killed.
        """
        if self.ended:
            raise GreenletExit
        self._waits = True
        self._hub.greenlet.switch()

    def kill(self) -> None:
        """End the process immediately. Nothing that it does during cleanup reaches other processes."""
        self.ended = True
        if self._hub.running is self:
            raise GreenletExit
        if self._hub.running is None:
            self._greenlet.throw(GreenletExit)
        else:
            self._hub.at(0.0, lambda: self._greenlet.throw(GreenletExit))


class Hub:
    """Virtual clock and schedule of actions."""

    def __init__(self) -> None:
        self.now = 0.0  # current virtual time in seconds
        self.running: Process | None = None  # process that is running, or None
        self.greenlet = greenlet.getcurrent()
        self._due: list[tuple[float, int, Act]] = []
        self._number = itertools.count()

    def clock(self) -> float:
        return self.now

    def at(self, delay: float, act: Act) -> None:
        """Schedule an action after a delay in virtual seconds."""
        self.at_time(self.now + delay, act)

    def at_time(self, time: float, act: Act) -> None:
        """Schedule an action at a virtual time. Actions for the same time run in the order of the calls."""
        heapq.heappush(self._due, (time, next(self._number), act))

    def process(self, name: str, main: Act) -> Process:
        """Start a process. Its first turn comes after all actions that are already due now."""
        started = Process(self, name, main)
        started.wake()
        return started

    def block(self, until: float = math.inf) -> None:
        """Suspend the running process until it is woken, or until a time. It may also wake for no reason."""
        assert self.running is not None
        if until < math.inf:
            self.at(max(0.0, until - self.now), self.running.resume)
        self.running.wait()

    def pause(self, seconds: float) -> None:
        """Suspend the running process for ``seconds``."""
        until = self.now + seconds
        while self.now < until:
            self.block(until)

    def run(self, over: Callable[[], bool]) -> None:
        """Run scheduled actions in order until ``over`` returns True or no action is left."""
        while self._due and not over():
            self.now, _, act = heapq.heappop(self._due)
            act()
