"""Spark cluster: a barrier stage with one task per machine, each of which runs an agent.

::

    driver   paceline run --on spark ── submits ──> barrier stage
       │                                              task 0 ─ agent: coordinator and workers
       └── output, and the signal to stop ──────────> task 1 ─ agent: workers
                                                      ...   tasks agree on the first agent's address by allGather

The output of an agent goes to the driver over connections that the task opens. The task stops its agent if the driver
closes its side or ends. Spark cancels a barrier stage that loses a task, and does not repeat it. This module submits
the stage again and the run resumes. Elastic runs use no barrier: see ``jobs``.
"""

from __future__ import annotations

import math
import shlex
import shutil
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.environments import env
from paceline.errors import ConfigError, StartError, WorkerLost
from paceline.launchers import runs
from paceline.launchers.base import Request
from paceline.launchers.clusters.base import Agent, Options, Place, Placement, agent_command, secret_environment
from paceline.launchers.clusters.clients import Client, follow, say
from paceline.launchers.clusters.spark.jobs import Slots, Stage, explained
from paceline.launchers.clusters.spark.tasks import MEETING, Driver
from paceline.launchers.machine import choose_port
from paceline.launchers.workers import stop_signals

_ATTEMPTS = 4  # same as the default of spark.stage.maxConsecutiveAttempts
_ANSWER_SECONDS = 5.0
_POLL_SECONDS = 0.1
_LAST_SECONDS = 10.0
_QUIET = {"spark.ui.showConsoleProgress": "false", "spark.log.level": "OFF"}
"""Settings that silence Spark in the driver, which reports errors itself. Executors still write their logs."""


class Spark(Place):
    """Spark cluster to which this process, the driver, connects, or is already connected by a session."""

    reads = frozenset({"master", "session"})
    _session: Any = None

    def decide(self, request: Request, options: Options, environment: Mapping[str, str]) -> Placement:
        """Return a launch plan with one agent per task. The rendezvous address is filled in at run time."""
        self._session, master = options.session, options.master
        if self._session is not None:
            master = _master_of(self._session)
        elif master is None:
            raise ConfigError(
                "--on spark: name the cluster with --master, such as spark://host:7077, yarn or local[2]."
            )
        fewest, tasks = request.nodes or (1, 1)
        if request.least is not None:
            return _elastic(master, _named(request), fewest, tasks)
        if fewest != tasks:
            raise ConfigError(
                f"--nodes {fewest}:{tasks}: a barrier stage has a fixed number of tasks; give one number, as in "
                f"--nodes {tasks}, or --elastic, too."
            )
        total = tasks * request.workers
        command = tuple(
            agent_command(_named(request), request.workers, total, (tasks, tasks), MEETING, python="python")
        )
        known = secret_environment(request)
        text = f"on {master}, a barrier stage of {tasks} tasks with {request.workers} CPUs each, and in each:\n"
        agents = tuple(Agent(f"task {number}", command, known) for number in range(tasks))
        return Placement(master, agents, text + "  " + shlex.join(command))

    def carry_out(self, placement: Placement, request: Request) -> int:
        """Submit the stage. If Spark loses a task, submit it again to resume from the newest checkpoint."""
        if request.least is not None:
            return self._carry_out_elastic(placement, request)
        agent, tasks = placement.agents[0], len(placement.agents)
        context = self._session.sparkContext if self._session is not None else _connect(placement.place, request)
        try:
            _check_allocation(context)
            with stop_signals() as received, Driver(context, request, agent.environment) as driver:
                for attempt in range(1, _ATTEMPTS + 1):
                    command = agent.command if attempt == 1 or request.examination else _resumed(agent.command, request)
                    stage = Stage(context, driver.task(command), tasks, request)
                    if (code := _follow(stage, driver, received, request.grace_seconds)) is not None:
                        return code
                    say(f"Spark has lost a task of attempt {attempt} of {_ATTEMPTS}: {stage.lost}")
        finally:
            if self._session is None:
                context.stop()
        lost = f"Spark has lost tasks in {_ATTEMPTS} attempts; the logs of its executors say why."
        if request.examination is not None:
            raise StartError(lost)
        raise WorkerLost(
            f"{lost} To go on from the newest checkpoint, give --resume auto --name {_name(agent.command)}."
        )

    def _carry_out_elastic(self, placement: Placement, request: Request) -> int:
        """Submit a job for each agent. The driver holds the coordinator, so that any agent may be lost."""
        context = self._session.sparkContext if self._session is not None else _connect(placement.place, request)
        try:
            port = choose_port(None)
            where = f"{context.getConf().get('spark.driver.host')}:{port}"
            here, *there = [one.meeting_at(where) for one in placement.agents]
            with Slots(context, there, request) as slots:
                slots.start(port)
                coordinator = Client(here.machine, here.command, here.environment)
                return follow([coordinator], env.inherited(), request.grace_seconds, lambda client, code: False)
        finally:
            if self._session is None:
                context.stop()


def _elastic(master: str, request: Request, fewest: int, tasks: int) -> Placement:
    here = agent_command(replace(request, standby=0), 0, 0, (fewest, tasks), MEETING)
    there = agent_command(request, request.workers, 0, (fewest, tasks), MEETING, python="python")
    known = secret_environment(request)
    agents = [Agent(f"task {number}", tuple(there), known) for number in range(tasks)]
    text = (
        f"on {master}, {tasks} jobs of a task with {request.workers} CPUs each, and in each:\n  {shlex.join(there)}\n"
        f"here:\n  {shlex.join(here)}"
    )
    return Placement(master, (Agent("here", tuple(here), known), *agents), text)


def _follow(stage: Stage, driver: Driver, received: list[int], grace_seconds: float) -> int | None:
    """Run the stage. Return the exit code of the run, or None if Spark has lost a task."""
    deadline = math.inf
    stage.start()
    while stage.is_alive() and len(received) < 2 and time.monotonic() < deadline:
        if received and deadline == math.inf:
            deadline = time.monotonic() + (grace_seconds + _LAST_SECONDS if driver.stop() else 0.0)
        stage.join(_POLL_SECONDS)
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
    """Return an agent command that resumes from the run's newest checkpoint, or else starts as the first attempt."""
    run = request.runs.absolute() / _name(command)
    if request.resume is not None and runs.newest_checkpoint(run) is None:
        return command
    words, end = list(command), command.index("run") + 1
    if request.resume is not None:
        place = words.index("--resume")
        del words[place : place + 2]
    return (*words[:end], "--resume", "auto", *words[end:])


def _name(command: tuple[str, ...]) -> str:
    return command[command.index("--name") + 1]


def _named(request: Request) -> Request:
    """Return the request with absolute paths for all machines, and with a fixed name for all attempts."""
    return replace(request.absolute(), name=request.name or runs.choose(request).name)


def _connect(master: str, request: Request) -> Any:
    """Start the driver's JVM and connect to the cluster. Return the SparkContext."""
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
    with explained(f"Spark at {master} could not be used"):
        context = SparkContext(conf=configuration)
    if "PYSPARK_PYTHON" not in variables:
        context.pythonExec = sys.executable
    return context


def _master_of(session: Any) -> str:
    if (context := getattr(session, "sparkContext", None)) is None:
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
    """Raise StartError if no standalone master answers. Spark itself would retry for a minute."""
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
