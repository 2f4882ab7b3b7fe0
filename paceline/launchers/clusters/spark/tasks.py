"""Code for the tasks of a Spark stage, and their connections to the driver."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import secrets
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Client, Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any

from paceline.environments import env
from paceline.errors import StartError
from paceline.launchers.base import Request
from paceline.launchers.clusters.base import Agent
from paceline.launchers.clusters.clients import copy, run_here
from paceline.launchers.local.child import command_of
from paceline.launchers.local.launcher import kill_group
from paceline.launchers.machine import choose_port
from paceline.system import secret

MEETING = "HOST:PORT"  # placeholder in an agent's command for the rendezvous address
_LISTENS = "listens"
_PURPOSE = "spark driver"
_LONGEST_HELLO = 1024
_ANSWER_SECONDS = 5.0
_POLL_SECONDS = 0.1
_LAST_SECONDS = 10.0
_OF_SPARK = {"OMP_NUM_THREADS"}
"""Variables that Spark sets to the CPUs of a task, which an agent divides among its workers instead."""


class Driver:
    """Listener in the driver to which tasks send the output of their agents.

    A task must prove that it knows the key before its data is accepted. The driver keeps its side of the connection
    open until the agents must stop. Therefore they also stop if the driver dies.
    """

    def __init__(self, context: Any, request: Request, environment: Mapping[str, str]) -> None:
        configuration = context.getConf()
        self._host = configuration.get("spark.driver.host")
        self._listener = socket.create_server((configuration.get("spark.driver.bindAddress", self._host), 0))
        self._request, self._environment = request, environment
        file = request.secret_file
        self._key = secret.read_or_make(file).key(_PURPOSE) if file else secrets.token_bytes(32)
        self._sockets: list[socket.socket] = []
        self._readers: list[threading.Thread] = []
        self._stopping = False

    def __enter__(self) -> Driver:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()

    def task(self, command: tuple[str, ...]) -> Task:
        file = self._request.secret_file
        address = self._host, int(self._listener.getsockname()[1])
        return Task(command, Path.cwd(), address, self._environment, file, None if file else self._key)

    def stop(self) -> bool:
        """Ask the tasks to stop their agents. Return whether any task is connected."""
        self._stopping = True
        for one in self._sockets:
            _end_sending(one)
        return bool(self._sockets)

    def drain(self) -> None:
        """Wait until all output of a stage's agents has arrived, with a timeout."""
        deadline = time.monotonic() + _LAST_SECONDS
        while self._readers:
            self._readers.pop().join(max(0.0, deadline - time.monotonic()))

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the listener was closed
            while True:
                accepted, _ = self._listener.accept()
                self._readers.append(threading.Thread(target=self._read, args=(accepted,), daemon=True))
                self._readers[-1].start()

    def _read(self, accepted: socket.socket) -> None:
        with accepted, Connection(accepted.dup().detach()) as connection:
            try:
                _limit(accepted, _ANSWER_SECONDS)
                deliver_challenge(connection, self._key)
                answer_challenge(connection, self._key)
                hello = json.loads(connection.recv_bytes(_LONGEST_HELLO))
                _limit(accepted, 0.0)
            except (OSError, EOFError, ValueError, AssertionError, multiprocessing.AuthenticationError):
                return
            self._sockets.append(accepted)
            if self._stopping:
                _end_sending(accepted)
            to = sys.stderr if hello["stream"] == "stderr" else sys.stdout
            with contextlib.suppress(ConnectionError):  # the task's machine was lost
                copy(accepted.fileno(), to, f"[{hello['machine']}] " if hello["number"] else "")
            self._sockets.remove(accepted)


def _limit(one: socket.socket, seconds: float) -> None:
    """Set the timeout of reads from a socket. 0 means no timeout."""
    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(seconds), 0))


def _end_sending(one: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the task has ended
        one.shutdown(socket.SHUT_WR)


@dataclass(frozen=True)
class Task:
    """Specification of a task, which Spark sends to the executors."""

    command: tuple[str, ...]  # command of the agent, with ``MEETING`` as its rendezvous
    directory: Path  # working directory of the agent
    driver: tuple[str, int]  # address and port of the driver for the agent's output
    # additional variables of the agent, with the secret of the run unless `secret_file` has it
    environment: Mapping[str, str] = field(repr=False)
    secret_file: Path | None  # file with the secret of the run, or None
    key: bytes | None = field(repr=False)  # key for the connections to the driver. None if `secret_file` is set.


def run_agent(task: Task, rows: Iterator[int]) -> Iterator[tuple[int, int]]:
    """Run the agent in a task until it ends. Yield its index in the order of the machines, and its exit code."""
    from pyspark import BarrierTaskContext

    context = BarrierTaskContext.get()
    own = context.partitionId()
    host = context.getTaskInfos()[own].address.rpartition(":")[0]
    port = choose_port(None)
    order = sorted(tuple(json.loads(one)) for one in context.allGather(json.dumps([host, own, port])))
    first, leader, port = order[0]
    number = [one for _, one, _ in order].index(own)
    inherited = {name: value for name, value in env.inherited().items() if name not in _OF_SPARK}
    variables = {**inherited, **_gpus_of(context), **task.environment}
    command = [sys.executable, *(word.replace(MEETING, f"{first}:{port}") for word in task.command[1:])]
    if number and context.allGather("")[leader] != _LISTENS:
        return
    with _to_driver(task, number, host, "stdout") as output, _to_driver(task, number, host, "stderr") as errors:
        agent = subprocess.Popen(
            command_of(frozenset(), tuple(command)),
            env=variables,
            cwd=task.directory,
            stdin=subprocess.DEVNULL,
            stdout=output.fileno(),
            stderr=errors.fileno(),
            start_new_session=True,
        )
        try:
            if not number:
                context.allGather(_LISTENS if _comes_up(agent, (first, port)) else "")
            code = _wait(agent, output)
        finally:
            if agent.poll() is None:
                kill_group(agent.pid)
                agent.wait()
    yield number, code if code >= 0 else 128 - code


def missing_files(paths: Sequence[str], rows: Iterator[int]) -> Iterator[str]:
    """Check paths in a task. Yield an error message if one does not exist on this machine."""
    if lacking := [path for path in paths if not Path(path).exists()]:
        yield (
            f"--on spark: {socket.gethostname()} has no {lacking[0]}. Start the command in a folder that all machines "
            f"share."
        )


def run_slot(agent: Agent, folder: str, rows: Iterator[int]) -> Iterator[tuple[str, int, str]]:
    """Run the agent in a task of an elastic run. Yield the machine, the exit code, and the last output lines."""
    from pyspark import TaskContext

    if lacking := [*missing_files([folder], rows)]:
        yield socket.gethostname(), StartError.exit_code, lacking[0]
        return
    variables = {**_gpus_of(TaskContext.get()), **agent.environment}
    yield socket.gethostname(), *run_here(agent.command, variables, folder)


def _gpus_of(context: Any) -> dict[str, str]:
    """Return the variable that restricts an agent to the GPUs of its task. Empty if the task has none."""
    gpus = context.resources().get("gpu")
    return {} if gpus is None else {"CUDA_VISIBLE_DEVICES": ",".join(gpus.addresses)}


def _to_driver(task: Task, number: int, machine: str, stream: str) -> Connection[Any, Any]:
    """Open a connection to the driver for the output of an agent."""
    connection = Client(task.driver, authkey=task.key or _key_in(task.secret_file, machine))
    connection.send_bytes(json.dumps({"number": number, "machine": machine, "stream": stream}).encode())
    return connection


def _key_in(file: Path | None, machine: str) -> bytes:
    found = secret.read(file) if file else None
    if found is None:
        raise StartError(f"{machine} has no secret file {file}; copy it there from the machine of the driver.")
    return found.key(_PURPOSE)


def _comes_up(agent: subprocess.Popen[bytes], address: tuple[str, int]) -> bool:
    """Wait until the first agent listens, so that it becomes the coordinator. Return False if it ends first."""
    while agent.poll() is None:
        try:
            socket.create_connection(address, _ANSWER_SECONDS).close()
            return True
        except OSError:
            time.sleep(_POLL_SECONDS)
    return False


def _wait(agent: subprocess.Popen[bytes], output: Connection[Any, Any]) -> int:
    """Wait for an agent to end. Ask it to end if the driver closes its side of the connection."""
    while (code := agent.poll()) is None and not output.poll(_POLL_SECONDS):
        pass
    if code is None:
        agent.terminate()
        code = agent.wait()
    return code
