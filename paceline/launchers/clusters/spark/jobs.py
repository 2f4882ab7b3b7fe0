"""Spark jobs that run agents: a barrier stage for all agents, or separate jobs that survive each other's loss."""

from __future__ import annotations

import contextlib
import re
import secrets
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from paceline.errors import StartError
from paceline.launchers.base import Request
from paceline.launchers.clusters.base import Agent
from paceline.launchers.clusters.clients import say, say_end
from paceline.launchers.clusters.spark.tasks import Task, missing_files, run_agent, run_slot
from paceline.launchers.machine import listens

_ATTEMPTS = 4
"""Maximum number of attempts for an agent of an elastic run. Spark itself also retries lost tasks a few times."""
_SLOT_SECONDS = 120.0  # timeout for executors to register
_POLL_SECONDS = 0.1
_LAST_SECONDS = 5.0
_LONGEST_REASON = 300


class Stage(threading.Thread):
    """Thread for one submission of the barrier stage."""

    def __init__(self, context: Any, task: Task, tasks: int, request: Request) -> None:
        super().__init__(daemon=True)
        # exit codes of the agents in the order of the machines. None if the stage failed.
        self.codes: list[int] | None = None
        self.lost: str | None = None  # Spark's reason for canceling the stage after it lost a task, or None
        self.error = ""  # reason for any other failure of the stage
        self._context, self._task, self._tasks = context, task, tasks
        self._cpus = request.workers
        self._patience = request.patience_seconds
        self._group = f"paceline-{secrets.token_hex(4)}"
        self._cancelled = threading.Event()

    def run(self) -> None:
        try:
            rows = self._context.parallelize(range(self._tasks), self._tasks)
            rows = _with_cpus(rows, self._cpus)
            self._await_slots(rows)
            self._context.setJobGroup(self._group, self._context.appName, interruptOnCancel=True)
            self.codes = [
                code for _, code in sorted(rows.barrier().mapPartitions(partial(run_agent, self._task)).collect())
            ]
        except StartError as error:
            self.error = str(error)
        except Exception as error:  # noqa: BLE001 - from py4j, from pyspark, or from a driver that has stopped
            self._explain(str(error))

    def cancel(self) -> None:
        """Have Spark kill the tasks. Their agents end with them."""
        self._cancelled.set()
        with contextlib.suppress(Exception):  # the cluster may be gone
            self._context.cancelJobGroup(self._group)

    def _await_slots(self, rows: Any) -> None:
        """Wait for the executors, including a returning one. Spark itself would wait for 10 minutes."""
        inside = self._context._jsc.sc()
        profile = rows._jrdd.rdd().getResourceProfile() or inside.resourceProfileManager().defaultResourceProfile()
        seconds = min(_SLOT_SECONDS, self._patience)
        deadline = time.monotonic() + seconds
        while (slots := inside.maxNumConcurrentTasks(profile)) < self._tasks:
            if time.monotonic() > deadline:
                raise StartError(
                    f"--nodes {self._tasks}: a barrier stage needs {self._tasks} slots of {self._cpus} CPUs (-n) at "
                    f"once; after {seconds:.0f} s Spark has {slots}. Ask for less, or give the cluster more "
                    f"executors."
                )
            self._cancelled.wait(_POLL_SECONDS)
            if self._cancelled.is_set():
                raise StartError("The run was stopped while it waited for executors.")

    def _explain(self, text: str) -> None:
        self.error = _of_python(text)
        if not self.error:
            self.lost = reason_of(text)


class Slots:
    """Jobs of an elastic run, one for each agent. Spark runs as many as it has resources for."""

    def __init__(self, context: Any, agents: list[Agent], request: Request) -> None:
        self._context, self._agents, self._request = context, agents, request
        self._group = f"paceline-{secrets.token_hex(4)}"
        self._closed = threading.Event()
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Slots:
        """Wait for a first executor, and check that it can run an agent."""
        seconds = self._request.patience_seconds
        found: list[str] = []
        paths = [str(path) for path in (Path.cwd(), *self._request.files)]

        def look() -> None:
            try:
                found.extend(self._run(0, partial(missing_files, paths)))
            except Exception as error:  # noqa: BLE001 - from py4j or from pyspark
                found.append(_of_python(str(error)) or reason_of(error))

        thread = threading.Thread(target=look, daemon=True)
        thread.start()
        thread.join(seconds)
        if thread.is_alive():
            self._cancel()
            raise StartError(f"--on spark: Spark has run no task within {seconds:.0f} s (--patience).")
        if found:
            raise StartError(found[0])
        return self

    def start(self, port: int) -> None:
        """Submit the jobs once the coordinator listens. Otherwise an agent on its machine would become coordinator."""
        for number, agent in enumerate(self._agents):
            thread = threading.Thread(target=self._keep, args=(number, agent, port), daemon=True)
            thread.start()
            self._threads.append(thread)

    def _keep(self, number: int, agent: Agent, port: int) -> None:
        """Run an agent. If Spark loses its task or the agent is killed, run the agent again on any free executor."""
        slot = partial(run_slot, agent, str(Path.cwd()))
        while not listens(port):
            if self._closed.wait(_POLL_SECONDS):
                return
        for _ in range(_ATTEMPTS):
            if self._closed.is_set():
                return
            try:
                ((machine, code, last),) = self._run(number, slot)
            except Exception as error:  # noqa: BLE001 - from py4j, from pyspark, or from a driver that has stopped
                if self._closed.wait(_POLL_SECONDS):
                    return
                say(f"Spark has lost task {number}: {_of_python(str(error)) or reason_of(error)}")
                continue
            if code < 0:
                say(f"the agent of task {number} on {machine} was killed by signal {-code}")
                continue
            say_end(machine, code, last, self._closed)
            return

    def _run(self, number: int, function: Any) -> list[Any]:
        rows = _with_cpus(self._context.parallelize([number], 1), self._request.workers)
        self._context.setJobGroup(self._group, self._context.appName, interruptOnCancel=True)
        return list(rows.mapPartitions(function).collect())

    def __exit__(self, *exception: object) -> None:
        """Wait for the agents to end, with a timeout. Then have Spark kill the remaining tasks."""
        self._closed.set()
        deadline = time.monotonic() + _LAST_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._cancel()

    def _cancel(self) -> None:
        with contextlib.suppress(Exception):  # the cluster may be gone
            self._context.cancelJobGroup(self._group)


def _of_python(text: str) -> str:
    """Return an error message for an exception of Python in a task. Empty if Spark has lost the task."""
    if (module := re.search(r"No module named '(paceline|pyspark)[.']", text)) is not None:
        return f"The executors' Python has no {module[1]}: install it there, or name another Python by PYSPARK_PYTHON."
    if "PythonException" not in text:
        return ""
    raised = [line for line in text.splitlines() if re.match(r"[\w.]+(Error|Exception|Lost): ", line)]
    return f"A task failed: {raised[-1] if raised else reason_of(text)}"


def _with_cpus(rows: Any, cpus: int) -> Any:
    """Return the rows with `cpus` CPUs per task, whatever the session's setting is."""
    if int(rows.context.getConf().get("spark.task.cpus", "1")) == cpus:
        return rows
    if rows.context.master.startswith("local") and not rows.context.master.startswith("local-cluster"):
        return rows  # local tasks are threads of one process, whose CPUs Spark does not partition
    from pyspark.resource import ResourceProfileBuilder, TaskResourceRequests

    with explained(f"-n {cpus}: Spark gives a task no {cpus} CPUs"):
        return rows.withResources(ResourceProfileBuilder().require(TaskResourceRequests().cpus(cpus)).build)


@contextlib.contextmanager
def explained(what: str) -> Iterator[None]:
    """Convert errors of Spark in the ``with`` block to a StartError that begins with ``what``."""
    try:
        yield
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in ("py4j", "pyspark"):
            raise
        raise StartError(f"{what}: {reason_of(error)}") from None


def reason_of(error: object) -> str:
    """Return the first line of Spark's error message, without stack traces."""
    lines = [
        line.strip() for line in str(error).splitlines() if line.strip() and not line.strip().startswith(("at ", ":"))
    ]
    told = [line for line in lines if not line.startswith(("An error occurred", "Caused by"))]
    return (told or lines or [type(error).__name__])[0][:_LONGEST_REASON]
