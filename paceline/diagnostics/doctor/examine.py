"""Questions of the doctor to a machine, and the machine's answers."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from paceline.diagnostics.doctor import folders, identity, limits, network
from paceline.diagnostics.doctor.checks import gpu
from paceline.diagnostics.doctor.checks.limits import check_limits
from paceline.diagnostics.doctor.finding import Finding, to_json
from paceline.diagnostics.doctor.links import Listener, measure
from paceline.environments import env
from paceline.launchers.base import Examination
from paceline.system.installed import file_hash
from paceline.system.secret import Secret

Answer = dict[str, Any]


@dataclass(frozen=True)
class Wanted:
    """Resources that the run will use on this machine."""

    workers: int  # number of workers that start on this machine
    machines: int  # number of machines of the run
    host: str  # name of this machine
    runs: Path  # folder of the runs
    given: Examination = field(default_factory=Examination)  # what to examine besides the machine
    rendezvous: str | None = None  # name of the first machine


class Examiner:
    """Answers the doctor's questions about this machine.

    Args:
        address: address by which the other machines know this machine. None if there are no others.
    """

    def __init__(self, wanted: Wanted, address: str | None = None, secret: Secret | None = None) -> None:
        self._wanted, self._secret = wanted, secret
        self._others = wanted.machines - 1 if address is None or not env.is_loopback(address) else 0
        self._interface = network.interface_at(address) if address else None
        self._listener = Listener(address, secret) if address and secret else None
        self._mark: tuple[Path, str, int] | None = None

    def close(self) -> None:
        """Close the listener and remove this machine's mark from the shared folder."""
        if self._listener is not None:
            self._listener.close()
        if self._mark is not None:
            folders.remove_mark(*self._mark)

    def answer(self, question: str, given: Answer) -> Answer:
        """Answer a question.

        Raises:
            KeyError: the question is unknown, because the asking machine has a different version of Paceline.
        """
        known: dict[str, Callable[..., Answer]] = {
            "clock": lambda: {"time": time.time()},
            "echo": lambda text: {"text": text},
            "facts": self._facts,
            "look": self._look,
            "measure": self._measure,
        }
        return known[question](**given)

    def _facts(self, token: str, number: int) -> Answer:
        """Return facts about this machine, with the findings of its own checks."""
        wanted, limit = self._wanted, limits.measure()
        loaded = identity.torch_facts()
        gpus, processes, error = gpu.query()
        findings = [
            *check_limits(limit, wanted.workers),
            *self._check_folders(token, number),
            *self._check_network(),
            *gpu.check_gpus(gpus, processes, error),
        ]
        if gpus:
            variable = env.inherited().get("CUDA_VISIBLE_DEVICES")
            seen = len(loaded.get("gpus", ()))
            findings.append(gpu.visible(len(gpus), seen, variable, loaded.get("CUDA"), wanted.workers))
        return {
            "versions": identity.versions(),
            "torch": loaded,
            "processor": identity.processor(),
            "driver": gpus[0]["driver_version"] if gpus else None,
            "script": _described(wanted.given.script, lambda path: {"hash": file_hash(path)}),
            "data": _described(wanted.given.data, identity.data_facts),
            "interface": asdict(self._interface) if self._interface else None,
            "memory": min(limit.memory, limit.memory_limit or limit.memory),
            "rendezvous": network.resolve(wanted.rendezvous) if wanted.rendezvous else None,
            "port": self._listener.port if self._listener else 0,
            "findings": to_json(findings),
        }

    def _check_folders(self, token: str, number: int) -> list[Finding]:
        found = [folders.room("run directory", self._wanted.runs), folders.room("temporary files", folders.temporary())]
        if self._wanted.given.checkpoints is not None:
            self._mark = self._wanted.given.checkpoints, token, number
            found.append(folders.leave_mark(*self._mark))
            if found[-1].status != "failure":
                found.append(folders.room("room for checkpoints", self._wanted.given.checkpoints))
        return found

    def _check_network(self) -> list[Finding]:
        if self._wanted.machines < 2:
            return []
        host, interfaces = self._wanted.host, [name for _, name in socket.if_nameindex()]
        return [
            network.own_name(host, network.resolve(host), self._others + 1),
            network.interface_variables(env.inherited(), self._interface, interfaces),
        ]

    def _look(self, names: list[str], token: str) -> Answer:
        """Return what this machine sees of the others: their addresses and their marks in the shared folder."""
        folder = self._wanted.given.checkpoints
        return {
            "names": {name: network.resolve(name) for name in names},
            "marks": folders.marks_seen(folder, token, len(names)) if folder is not None else [],
        }

    def _measure(self, address: str, port: int) -> Answer:
        assert self._secret is not None
        return asdict(measure(address, port, self._secret))


def _described(path: Path | None, describe: Callable[[Path], Answer]) -> Answer | None:
    return None if path is None else {"path": str(path), **describe(path)}
