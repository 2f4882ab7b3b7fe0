"""Spark: a barrier stage with one task for each machine; each task runs an agent.

::

    driver   paceline run --on spark ── submits ──> barrier stage
       │                                              task 0 ─ agent: coordinator and workers
       └── output, and the signal to stop ──────────> task 1 ─ agent: workers
                                                      ...   they agree on the first one's address by allGather

What an agent prints goes to the driver over connections that the task opens; when the driver closes its side, or is
gone, the task stops its agent. Spark cancels a barrier stage when it loses one of its tasks, and does not repeat it:
it is submitted again here, and the run resumes.
"""

from __future__ import annotations

import contextlib
import math
import re
import secrets
import shlex
import shutil
import socket
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from paceline import env
from paceline.errors import ConfigError, StartError, WorkerLost
from paceline.launchers import runs
from paceline.launchers.base import Request
from paceline.launchers.places.base import Agent, Options, Place, Placement, agent_command, secret_environment
from paceline.launchers.places.clients import stop_signals
from paceline.launchers.places.spark_tasks import MEETING, Driver, Task, run_agent

_ATTEMPTS = 4
"""As Spark's spark.stage.maxConsecutiveAttempts."""
_SLOT_SECONDS = 120
"""For executors to come."""
_ANSWER_SECONDS = 5.0
_LOOK_SECONDS = 0.1
_LAST_SECONDS = 10.0
_LONGEST_REASON = 300
_QUIET = {"spark.ui.showConsoleProgress": "false", "spark.log.level": "OFF"}
"""What Spark has to say is said here, in words; on an executor its logs have it."""


class Spark(Place):
    """A Spark cluster that the driver, this process, connects to, or is connected to by a session."""

    reads = frozenset({"master", "session"})
    _session: Any = None

    def decide(self, request: Request, options: Options, environment: Mapping[str, str]) -> Placement:
        """One agent for each task; where they meet is known when they run."""
        self._session, master = options.session, options.master
        if self._session is not None:
            master = _master_of(self._session)
        elif master is None:
            raise ConfigError(
                "--on spark: name the cluster with --master, such as spark://host:7077, yarn or local[2]."
            )
        fewest, tasks = request.nodes or (1, 1)
        if fewest != tasks:
            raise ConfigError(
                f"--nodes {fewest}:{tasks}: a barrier stage has a fixed number of tasks; give one number, as in "
                f"--nodes {tasks}."
            )
        total = tasks * request.workers
        command = tuple(
            agent_command(_absolute(request), request.workers, total, (tasks, tasks), MEETING, python="python")
        )
        known = secret_environment(request)
        text = f"on {master}, a barrier stage of {tasks} tasks with {request.workers} CPUs each, and in each:\n"
        agents = tuple(Agent(f"task {number}", command, known) for number in range(tasks))
        return Placement(master, agents, text + "  " + shlex.join(command))

    def carry_out(self, placement: Placement, request: Request) -> int:
        """Submit the stage; again, to resume from the newest checkpoint, when Spark has lost one of its tasks."""
        agent, tasks = placement.agents[0], len(placement.agents)
        context = self._session.sparkContext if self._session is not None else _connect(placement.place, request)
        try:
            _check_allocation(context)
            with stop_signals() as received, Driver(context, request, agent.environment) as driver:
                for attempt in range(1, _ATTEMPTS + 1):
                    command = agent.command if attempt == 1 or request.examination else _resumed(agent.command, request)
                    stage = _Stage(context, driver.task(command), tasks, request.workers)
                    code = _follow(stage, driver, received, request.grace_seconds)
                    if code is not None:
                        return code
                    _say(f"Spark has lost a task of attempt {attempt} of {_ATTEMPTS}: {stage.lost}")
        finally:
            if self._session is None:
                context.stop()
        lost = f"Spark has lost tasks in {_ATTEMPTS} attempts; the logs of its executors say why."
        if request.examination is not None:
            raise StartError(lost)
        raise WorkerLost(
            f"{lost} To go on from the newest checkpoint, give --resume auto --name {_name(agent.command)}."
        )


def _follow(stage: _Stage, driver: Driver, received: list[int], grace_seconds: float) -> int | None:
    """Wait for the exit code of the run; none if Spark has lost a task.

    Raises:
        StartError: the stage could not run.
    """
    deadline = math.inf
    stage.start()
    while stage.is_alive() and len(received) < 2 and time.monotonic() < deadline:
        if received and deadline == math.inf:
            deadline = time.monotonic() + (grace_seconds + _LAST_SECONDS if driver.stop() else 0.0)
        stage.join(_LOOK_SECONDS)
    if stage.is_alive():
        stage.cancel()
        return 128 + received[0]
    driver.drain()
    if stage.codes is None and stage.lost is None:
        raise StartError(stage.error)
    if stage.codes is None:
        return 128 + received[0] if received else None
    return stage.codes[0]


def _resumed(command: tuple[str, ...], request: Request) -> tuple[str, ...]:
    """The command of an agent that goes on from the run's newest checkpoint; without one from where it began."""
    run = request.runs.absolute() / _name(command)
    if request.resume is not None and runs.newest_checkpoint(run) is None:
        return command
    end = command.index("run") + 1
    return (*command[:end], "--resume", "auto", *command[end:])


def _name(command: tuple[str, ...]) -> str:
    return command[command.index("--name") + 1]


def _absolute(request: Request) -> Request:
    """Name files as all machines see them, and the run as each attempt does."""
    return replace(
        request,
        script=request.script.absolute(),
        runs=request.runs.absolute(),
        plan=request.plan and request.plan.absolute(),
        secret_file=request.secret_file and request.secret_file.absolute(),
        name=request.name or runs.choose(request).name,
    )


def _connect(master: str, request: Request) -> Any:
    """Start the driver's JVM and connect to the cluster; gives the SparkContext.

    Raises:
        StartError: pyspark, Java or the master is not there.
    """
    try:
        from pyspark import SparkConf, SparkContext
    except ImportError:
        raise StartError(
            "--on spark needs pyspark: pip install 'paceline[spark]', here and on the executors."
        ) from None
    variables = env.inherited()
    if shutil.which("java") is None and not (Path(variables.get("JAVA_HOME", "/none")) / "bin" / "java").exists():
        raise StartError(
            "--on spark needs Java 17 or newer, and there is no java in PATH nor in JAVA_HOME. Install one, such as "
            "default-jre-headless on Debian."
        )
    _check_master(master)
    SparkContext._ensure_initialized()
    configuration = SparkConf().setMaster(master).setAppName(f"paceline {request.script.name}")
    for key, value in _QUIET.items():
        configuration.set(key, value)
    configuration.setIfMissing("spark.task.cpus", str(request.workers))
    try:
        context = SparkContext(conf=configuration)
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in ("py4j", "pyspark"):
            raise
        raise StartError(f"Spark at {master} could not be used: {_first_line(error)}") from None
    if "PYSPARK_PYTHON" not in variables:
        context.pythonExec = sys.executable
    return context


def _master_of(session: Any) -> str:
    """The master of a SparkSession.

    Raises:
        ConfigError: it is none, or one of Spark Connect.
    """
    context = getattr(session, "sparkContext", None)
    if context is None:
        connect = ".connect." in type(session).__module__
        raise ConfigError(
            "on = a session of Spark Connect: it runs no barrier stages. Use on='spark' with master=..., or a "
            "SparkSession that is made with .master(...)."
            if connect
            else f"on = a {type(session).__name__}: give the name of a place, or a SparkSession."
        )
    return str(context.master)


def _check_allocation(context: Any) -> None:
    if context.getConf().get("spark.dynamicAllocation.enabled", "false").lower() == "true":
        raise StartError(
            "Spark runs no barrier stage with dynamic allocation: set spark.dynamicAllocation.enabled to false."
        )


def _check_master(master: str) -> None:
    """Look whether a standalone master answers, as Spark itself tries for a minute."""
    if not master.startswith("spark://"):
        return
    reasons = []
    for one in master.removeprefix("spark://").split(","):
        host, _, port = one.rpartition(":")
        try:
            socket.create_connection((host, int(port)), _ANSWER_SECONDS).close()
            return
        except (OSError, ValueError) as error:
            reasons.append(f"{one}: {getattr(error, 'strerror', None) or error}")
    raise StartError(
        f"No Spark master answers at {master} ({'; '.join(reasons)}). Is it started, and is the port right?"
    )


class _Stage(threading.Thread):
    """One submission of the barrier stage.

    Attributes:
        codes: of the agents, that of the first one first; none if the stage failed.
        lost: why Spark has cancelled it, if that was for a task that it lost.
        error: why it could not run, otherwise.
    """

    def __init__(self, context: Any, task: Task, tasks: int, cpus: int) -> None:
        super().__init__(daemon=True)
        self.codes: list[int] | None = None
        self.lost: str | None = None
        self.error = ""
        self._context = context
        self._task = task
        self._tasks = tasks
        self._cpus = cpus
        self._group = f"paceline-{secrets.token_hex(4)}"
        self._cancelled = threading.Event()

    def run(self) -> None:
        try:
            rows = self._context.parallelize(range(self._tasks), self._tasks)
            if int(self._context.getConf().get("spark.task.cpus", "1")) != self._cpus:
                rows = _with_cpus(rows, self._cpus)
            self._await_slots(rows)
            self._context.setJobGroup(self._group, self._context.appName, interruptOnCancel=True)
            self.codes = [
                code for _, code in sorted(rows.barrier().mapPartitions(partial(run_agent, self._task)).collect())
            ]
        except StartError as error:
            self.error = str(error)
        except Exception as error:  # noqa: BLE001 - of py4j, of pyspark, or of a driver that has stopped
            self._explain(str(error))

    def cancel(self) -> None:
        """Let Spark kill the tasks; their agents end with them."""
        self._cancelled.set()
        with contextlib.suppress(Exception):  # the cluster may be gone
            self._context.cancelJobGroup(self._group)

    def _await_slots(self, rows: Any) -> None:
        """Wait for the executors, also for one that comes again; Spark itself would wait for 10 minutes.

        Raises:
            StartError: they do not come, or the run has been stopped.
        """
        inside = self._context._jsc.sc()
        profile = rows._jrdd.rdd().getResourceProfile() or inside.resourceProfileManager().defaultResourceProfile()
        deadline = time.monotonic() + _SLOT_SECONDS
        while (slots := inside.maxNumConcurrentTasks(profile)) < self._tasks:
            if time.monotonic() > deadline:
                raise StartError(
                    f"--nodes {self._tasks}: a barrier stage needs {self._tasks} slots of {self._cpus} CPUs (-n) at "
                    f"once; after {_SLOT_SECONDS} s Spark has {slots}. Ask for less, or give the cluster more "
                    f"executors."
                )
            self._cancelled.wait(_LOOK_SECONDS)
            if self._cancelled.is_set():
                raise StartError("The run was stopped while it waited for executors.")

    def _explain(self, text: str) -> None:
        if (module := re.search(r"No module named '(paceline|pyspark)[.']", text)) is not None:
            self.error = (
                f"The executors' Python has no {module[1]}: install it there, or name another Python by PYSPARK_PYTHON."
            )
        elif "PythonException" in text:
            raised = [line for line in text.splitlines() if re.match(r"[\w.]+(Error|Exception|Lost): ", line)]
            self.error = f"A task failed: {raised[-1] if raised else _first_line(text)}"
        else:
            self.lost = _first_line(text)


def _with_cpus(rows: Any, cpus: int) -> Any:
    """The same rows with another number of CPUs for each task than the session says.

    Raises:
        StartError: its executors are too small.
    """
    if rows.context.master.startswith("local") and not rows.context.master.startswith("local-cluster"):
        return rows  # its tasks are threads of one process, which Spark does not divide
    from pyspark.resource import ResourceProfileBuilder, TaskResourceRequests

    try:
        return rows.withResources(ResourceProfileBuilder().require(TaskResourceRequests().cpus(cpus)).build)
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in ("py4j", "pyspark"):
            raise
        raise StartError(f"-n {cpus}: Spark gives a task no {cpus} CPUs: {_first_line(error)}") from None


def _first_line(error: object) -> str:
    """What Spark says, without the stacks of its threads."""
    lines = [
        line.strip() for line in str(error).splitlines() if line.strip() and not line.strip().startswith(("at ", ":"))
    ]
    told = [line for line in lines if not line.startswith(("An error occurred", "Caused by"))]
    return (told or lines or [type(error).__name__])[0][:_LONGEST_REASON]


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
