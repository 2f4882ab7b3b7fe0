"""Spark cluster: each agent is the only task of its own job, and Spark runs lost tasks again where there is room.

::

    driver     launcher ── paceline run -n 0        runs the coordinator, so any task may be lost
    each job   task ── paceline run -n 4 ── workers

Separate jobs survive each other's loss. A barrier stage would end all agents with one. The agents end with the Python
processes of their tasks, which end with the driver.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import shlex
import shutil
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from paceline.environments import env
from paceline.errors import ConfigError, StartError
from paceline.launchers import runs
from paceline.launchers.base import Request
from paceline.launchers.clusters.base import Agent, Options, Place, Placement, coordinated_here
from paceline.launchers.clusters.clients import follow_agent, run_here, say, say_end
from paceline.launchers.machine import choose_port, listens

_ATTEMPTS = 4
"""Maximum number of attempts for an agent. Spark itself also retries lost tasks a few times."""
_SLOT_SECONDS = 120.0  # timeout for the executors that a run with a fixed number of workers needs
_ANSWER_SECONDS = 5.0
_POLL_SECONDS = 0.1
_LAST_SECONDS = 5.0
_LONGEST_REASON = 300
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
        named = replace(request, name=request.name or runs.choose(request).name)  # the same for all attempts
        here, *there = coordinated_here(named, {}, python="python")
        text = (
            f"on {master}, {len(there)} jobs of a task with {request.workers} CPUs each, and in each:\n"
            f"  {shlex.join(there[0].command)}\nhere:\n  {shlex.join(here.command)}"
        )
        return Placement(master, (here, *there), text)

    def carry_out(self, placement: Placement, request: Request) -> int:
        """Submit a job for each agent. This process runs the coordinator's agent and waits for its end."""
        context = self._session.sparkContext if self._session is not None else _connect(placement.place, request)
        try:
            port = choose_port(None)
            where = f"{context.getConf().get('spark.driver.host')}:{port}"
            here, *there = [one.meeting_at(where) for one in placement.agents]
            with _Jobs(context, there, request) as jobs:
                jobs.start(port)
                return follow_agent(here, request.grace_seconds)
        finally:
            if self._session is None:
                context.stop()


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
            "--on spark needs Java 17 or newer, and neither PATH nor JAVA_HOME has a java. Install one, such as "
            "default-jre-headless on Debian."
        )
    _check_master(master)
    SparkContext._ensure_initialized()
    configuration = SparkConf().setMaster(master).setAppName(f"paceline {request.script.name}")
    for key, value in _QUIET.items():
        configuration.set(key, value)
    configuration.setIfMissing("spark.task.cpus", str(request.workers))
    with _explained(f"Spark at {master} could not be used"):
        context = SparkContext(conf=configuration)
    if "PYSPARK_PYTHON" not in variables:
        context.pythonExec = sys.executable
    return context


def _master_of(session: Any) -> str:
    if (context := getattr(session, "sparkContext", None)) is None:
        connect = ".connect." in type(session).__module__
        raise ConfigError(
            "on = a session of Spark Connect: it runs no jobs of Python functions. Use on='spark' with master=..., or "
            "a SparkSession made with .master(...)."
            if connect
            else f"on = a {type(session).__name__}: give the name of a place, or a SparkSession."
        )
    return str(context.master)


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


class _Jobs:
    """Jobs of a run, one for each agent. Spark runs as many as it has resources for."""

    def __init__(self, context: Any, agents: list[Agent], request: Request) -> None:
        self._context, self._agents, self._request = context, agents, request
        self._group = f"paceline-{secrets.token_hex(4)}"
        self._closed = threading.Event()
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> _Jobs:
        """Wait for slots for all agents, and check that an executor can run one."""
        try:
            with _explained("--on spark: Spark does not report its number of slots"):
                self._await_slots()
            self._check_executor()
        except BaseException:  # such as Ctrl-C
            self._cancel()
            raise
        return self

    def _check_executor(self) -> None:
        """Raise StartError if no task runs in time, or the task does not find the run's files."""
        seconds = self._request.patience_seconds
        found: list[str] = []
        paths = [str(path) for path in (Path.cwd(), *self._request.files)]

        def look() -> None:
            try:
                found.extend(self._run(0, partial(_missing_files, paths)))
            except Exception as error:  # noqa: BLE001 - from py4j or from pyspark
                found.append(_explanation(error))

        thread = threading.Thread(target=look, daemon=True)
        thread.start()
        thread.join(seconds)
        if thread.is_alive():
            raise StartError(f"--on spark: Spark has run no task within {seconds:.0f} s (--patience).")
        if found:
            raise StartError(found[0])

    def _await_slots(self) -> None:
        """Wait until there are slots for all agents, unless fewer may begin, or Spark starts executors for the jobs."""
        tasks, cpus = len(self._agents), self._request.workers
        allocates = self._context.getConf().get("spark.dynamicAllocation.enabled", "false").lower() == "true"
        if self._request.smallest < self._request.largest or allocates:
            return
        inside = self._context._jsc.sc()
        rows = _with_cpus(self._context.parallelize([0], 1), cpus)
        profile = rows._jrdd.rdd().getResourceProfile() or inside.resourceProfileManager().defaultResourceProfile()
        seconds = min(_SLOT_SECONDS, self._request.patience_seconds)
        deadline = time.monotonic() + seconds
        while (slots := inside.maxNumConcurrentTasks(profile)) < tasks:
            if time.monotonic() > deadline:
                raise StartError(
                    f"--nodes {tasks}: the run needs {tasks} slots of {cpus} CPUs (-n) at once; after {seconds:.0f} s "
                    f"Spark has {slots}. Ask for less, or give the cluster more executors."
                )
            time.sleep(_POLL_SECONDS)

    def start(self, port: int) -> None:
        """Submit the jobs once the coordinator listens. Otherwise an agent on its machine would become coordinator."""
        for number, agent in enumerate(self._agents):
            thread = threading.Thread(target=self._keep, args=(number, agent, port), daemon=True)
            thread.start()
            self._threads.append(thread)

    def _keep(self, number: int, agent: Agent, port: int) -> None:
        """Run an agent. If Spark loses its task or the agent is killed, run the agent again on any free executor."""
        task = partial(_run_agent, agent, str(Path.cwd()))
        while not listens(port):
            if self._closed.wait(_POLL_SECONDS):
                return
        for _ in range(_ATTEMPTS):
            if self._closed.is_set():
                return
            try:
                ((machine, code, last),) = self._run(number, task)
            except Exception as error:  # noqa: BLE001 - from py4j, from pyspark, or from a driver that has stopped
                if self._closed.wait(_POLL_SECONDS):
                    return
                say(f"Spark has lost task {number}: {_explanation(error)}")
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


def _with_cpus(rows: Any, cpus: int) -> Any:
    """Return the rows with `cpus` CPUs per task, whatever the session's setting is."""
    if int(rows.context.getConf().get("spark.task.cpus", "1")) == cpus:
        return rows
    if rows.context.master.startswith("local") and not rows.context.master.startswith("local-cluster"):
        return rows  # local tasks are threads of one process, whose CPUs Spark does not partition
    from pyspark.resource import ResourceProfileBuilder, TaskResourceRequests

    with _explained(f"-n {cpus}: Spark does not give a task {cpus} CPUs"):
        return rows.withResources(ResourceProfileBuilder().require(TaskResourceRequests().cpus(cpus)).build)


@contextlib.contextmanager
def _explained(what: str) -> Iterator[None]:
    """Convert errors of Spark in the ``with`` block to a StartError that begins with ``what``."""
    try:
        yield
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in ("py4j", "pyspark"):
            raise
        raise StartError(f"{what}: {_reason_of(error)}") from None


def _explanation(error: Exception) -> str:
    """Return why a task has failed: an exception of Python in it, or Spark's reason for its loss."""
    text = str(error)
    if (module := re.search(r"No module named '(paceline|pyspark)[.']", text)) is not None:
        return f"The executors' Python has no {module[1]}: install it there, or name another Python in PYSPARK_PYTHON."
    if "PythonException" not in text:
        return _reason_of(error)
    raised = [line for line in text.splitlines() if re.match(r"[\w.]+(Error|Exception|Lost): ", line)]
    return f"A task failed: {raised[-1] if raised else _reason_of(error)}"


def _reason_of(error: Exception) -> str:
    """Return the first line of Spark's error message, without stack traces."""
    stripped = [line.strip().removeprefix(": ") for line in str(error).splitlines()]
    lines = [line for line in stripped if line and not line.startswith("at ")]
    told = [line for line in lines if not line.startswith(("An error occurred", "Caused by"))]
    return (told or lines or [type(error).__name__])[0][:_LONGEST_REASON]


# functions that Spark calls in a task


def _missing_files(paths: Sequence[str], rows: Iterator[int]) -> Iterator[str]:
    """Check paths in a task. Yield an error message if one does not exist on this machine."""
    if lacking := [path for path in paths if not Path(path).exists()]:
        yield (
            f"--on spark: {socket.gethostname()} has no {lacking[0]}. Start the command in a folder that all machines "
            f"share."
        )


def _run_agent(agent: Agent, folder: str, rows: Iterator[int]) -> Iterator[tuple[str, int, str]]:
    """Run the agent in a task. Yield the machine, the exit code, and the last output lines."""
    from pyspark import TaskContext

    if lacking := [*_missing_files([folder], rows)]:
        yield socket.gethostname(), StartError.exit_code, lacking[0]
        return
    variables = {**_gpus_of(TaskContext.get()), **agent.environment}
    yield socket.gethostname(), *run_here(agent.command, variables, folder)


def _gpus_of(context: Any) -> dict[str, str]:
    """Return the variable that restricts an agent to the GPUs of its task. Empty if the task has none."""
    gpus = context.resources().get("gpu")
    return {} if gpus is None else {"CUDA_VISIBLE_DEVICES": ",".join(gpus.addresses)}
