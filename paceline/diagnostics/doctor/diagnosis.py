"""Complete examination: of this machine alone, or together with others, as the first machine or a later one."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.coordinator.machines import Rendezvous, is_here, parse_rendezvous, shared_secret
from paceline.coordinator.wire.messages import listen
from paceline.diagnostics.doctor import network
from paceline.diagnostics.doctor.checks import comparison
from paceline.diagnostics.doctor.checks.links import better, check_links, large_packets, suspicious
from paceline.diagnostics.doctor.examine import Answer, Examiner, Wanted
from paceline.diagnostics.doctor.finding import Finding, from_json, ok
from paceline.diagnostics.doctor.folders import check_shared
from paceline.diagnostics.doctor.links import Link, rounds
from paceline.diagnostics.doctor.machines import Asked, Gathering, GoneError, Joined, join, name_all, serve
from paceline.errors import StartError, counted
from paceline.system.secret import Shared

_CLOCK_LOOKS = 5
_SECOND_LOOKS = 16
_LARGE, _LARGE_SECONDS = 20_000, 15.0
"""Number of characters that fill several packets, and seconds that they may take on a slow line and a busy machine."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Diagnosis:
    """Result of an examination."""

    findings: tuple[Finding, ...] = ()
    machines: tuple[str, ...] = ()  # names of the machines that took part
    elsewhere: str | None = None  # name of the first machine if it has the findings and this machine does not
    elsewhere_code: int = 0  # exit code on the first machine
    first: bool = True  # whether this is the first machine, which asks the others, or the only machine

    @property
    def code(self) -> int:
        """Exit code: 1 if any check failed, or the exit code of the first machine if that is not 0."""
        return self.elsewhere_code or int(any(one.status == "failure" for one in self.findings))


def examine(
    wanted: Wanted, rendezvous: str | None, secret_file: Path | None, patience: float, say: Say = lambda _: None
) -> Diagnosis:
    """Examine this machine and, if a rendezvous is given, all machines that join it.

    Raises:
        ConfigError: the rendezvous or the secret cannot be used.
    """
    if rendezvous is None:
        return alone(wanted)
    try:
        where = parse_rendezvous(rendezvous)
    except StartError as error:
        return alone(wanted, _no_address(rendezvous, str(error)))
    wanted = replace(wanted, rendezvous=where.name)
    named = network.rendezvous_name(rendezvous, where.name, where.address, wanted.machines)
    if named.status == "failure":
        return alone(wanted, named)
    shared = shared_secret(where, secret_file)
    if is_here(where.address):
        try:
            listener = listen((where.address, where.port))
        except StartError as error:
            return _behind(where, wanted, shared, network.port_in_use(where.port, str(error)))
        with listener:
            return First(where, wanted, shared, say).examine(listener, patience)
    say(f"waiting for {where}")
    joined = join(where, wanted.host, shared, patience)
    if joined.problem is not None:  # a cluster ends this process soon after the first machine's process
        say(f"{joined.problem.values}; examining {wanted.host} alone")
    return _guest(where, wanted, joined, shared)


def not_started(error: str) -> Diagnosis:
    """Return a diagnosis of why a cluster could not start the doctor, with a finding for each line of the error."""
    why = "No worker could start there."
    cure = "mend it, and start the doctor again: it then looks at the rest"
    return Diagnosis(tuple(Finding("start", "failure", line.rstrip("."), why, cure) for line in error.splitlines()))


def alone(wanted: Wanted, problem: Finding | None = None) -> Diagnosis:
    """Examine this machine alone. ``problem`` is the finding that explains why."""
    examiner = Examiner(wanted)
    try:
        facts = examiner.answer("facts", {"token": secrets.token_hex(8), "number": 0})
    finally:
        examiner.close()
    findings = [*([problem] if problem else []), *_of_machine(facts, wanted.host)]
    return Diagnosis((*findings, *comparison.compare({wanted.host: facts})), (wanted.host,))


def _no_address(rendezvous: str, error: str) -> Finding:
    return Finding(
        "rendezvous name",
        "failure",
        f"wrong name resolution: {error.partition('. ')[0]}",
        "Every machine of a run connects to the first one by this name.",
        f"check the spelling of {rendezvous}, add the name to /etc/hosts or DNS, or give the address itself",
    ).at(socket.gethostname())


def _behind(where: Rendezvous, wanted: Wanted, shared: Shared, problem: Finding) -> Diagnosis:
    """Join the doctor that uses the port, if another machine shares this address. Otherwise report the used port."""
    joined = join(where, wanted.host, shared, 0.0)
    return _guest(where, wanted, joined if joined.connection else Joined(problem=problem), shared)


def _guest(where: Rendezvous, wanted: Wanted, joined: Joined, shared: Shared) -> Diagnosis:
    if joined.connection is None or joined.secret is None:
        assert joined.problem is not None
        return replace(alone(wanted, joined.problem.at(wanted.host)), first=False)
    if (code := serve(joined.connection, wanted, joined.secret)) is not None:
        return Diagnosis(elsewhere=where.name, elsewhere_code=code, first=False)
    return replace(alone(wanted, _lost(where).at(wanted.host)), first=False)


def _lost(where: Rendezvous) -> Finding:
    return Finding(
        "machines",
        "failure",
        f"the connection to {where} ended before the report",
        "The first machine asks all others, and has ended or can no longer be reached.",
        f"look at what the doctor says on {where.name}; paceline run, which may listen there, is not a doctor",
    )


def _of_machine(facts: Answer, name: str) -> list[Finding]:
    return [one.at(name) for one in from_json(facts["findings"])]


class First:
    """First machine, which queries all machines, compares the answers and lets the machines measure their links."""

    def __init__(self, where: Rendezvous, wanted: Wanted, shared: Shared, say: Say) -> None:
        self._where, self._wanted, self._say = where, wanted, say
        self._secret = shared.read_or_make()
        self._findings: list[Finding] = []
        self._machines: list[Asked] = []

    def examine(self, listener: socket.socket, patience: float) -> Diagnosis:
        """Examine all machines that join within ``patience`` seconds."""
        gathering = Gathering()
        gathering.open(listener, self._secret)
        examiner = Examiner(self._wanted, self._where.address, self._secret)
        try:
            if others := self._wanted.machines - 1:
                self._say(f"waiting for {counted(others, 'more machine')} at {self._where}")
            came = gathering.wait(others, patience)
            self._machines = [
                Asked(self._wanted.host, self._where.address, examiner),
                *sorted(came, key=lambda one: (one.host, one.address)),
            ]
            name_all(self._machines)
            self._count(patience)
            self._ask_all()
            found = Diagnosis(tuple(self._findings), tuple(one.name for one in self._machines))
            for one in self._machines:
                one.end(found.code)
            return found
        finally:
            gathering.close()
            examiner.close()

    def _count(self, patience: float) -> None:
        names = ", ".join(one.name for one in self._machines)
        if len(self._machines) == self._wanted.machines:
            self._findings.append(ok("machines", names))
            return
        self._findings.append(
            Finding(
                "machines",
                "failure",
                f"{len(self._machines)} of {self._wanted.machines} machines came within {patience:.0f} s: {names}",
                "The run waits for all machines before it starts.",
                f"start the same command on each machine; the other machine reports its own problems. If it cannot "
                f"connect: the port {self._where.port} must be open here, and {self._where.name} resolve to "
                f"{self._where.address} there",
            )
        )

    def _ask_all(self) -> None:
        mark = secrets.token_hex(8)  # name of this examination in the files of the shared folder
        self._say("examining " + ", ".join(one.name for one in self._machines))
        offsets = self._clocks()
        self._try_large_messages()
        facts = self._ask("facts", lambda number: {"token": mark, "number": number})
        for one in list(self._machines):
            self._findings += _of_machine(facts[one.name], one.name)
        self._findings += comparison.compare(facts)
        self._findings.append(comparison.clock(offsets))
        where = {name: found["rendezvous"] for name, found in facts.items()}
        self._findings.append(network.same_address(self._where.name, where))
        self._see(mark)
        if len(self._machines) > 1:
            self._say("measuring links")
            self._findings += check_links(self._measure({name: found["port"] for name, found in facts.items()}))

    def _ask(self, question: str, given: Callable[[int], dict[str, Any]]) -> dict[str, Answer]:
        """Ask all machines at the same time and return their answers. Drop machines that do not answer."""
        for number, one in enumerate(self._machines):
            one.start(question, **given(number))
        answers = {}
        for one in list(self._machines):
            try:
                answers[one.name] = one.finish(question)
            except GoneError as error:
                self._gone(one, error)
        return answers

    def _gone(self, machine: Asked, error: GoneError) -> None:
        if machine in self._machines:
            self._machines.remove(machine)
        cure = f"see what the doctor printed on {machine.name}, and whether that machine still runs"
        why = "A machine that does not answer here would not answer a worker either."
        self._findings.append(Finding("machines", "failure", str(error), why, cure, machine.name))

    def _clocks(self) -> dict[str, float]:
        """Return the seconds by which each clock is ahead of this machine's, as measured by the fastest answer."""
        offsets = {}
        for one in list(self._machines):
            found = []
            try:
                for _ in range(_CLOCK_LOOKS):
                    before = time.time()
                    one.start("clock")
                    theirs = float(one.finish("clock")["time"])
                    after = time.time()
                    found.append((after - before, theirs - (before + after) / 2))
            except GoneError as error:
                self._gone(one, error)
            else:
                offsets[one.name] = min(found)[1]
        return offsets

    def _try_large_messages(self) -> None:
        """Drop machines that only small messages reach, because they would not receive the other questions."""
        for one in list(self._machines):
            one.start("echo", text="x" * _LARGE)
            try:
                one.finish("echo", _LARGE_SECONDS)
            except GoneError:
                self._machines.remove(one)
                interface = network.interface_at(self._where.address)
                ends = f"{self._machines[0].name} - {one.name}"
                self._findings.append(large_packets(False, interface.mtu if interface else 0, ends))

    def _see(self, mark: str) -> None:
        """Ask which files and names of the others each machine sees, and check the answers."""
        names = [one.name for one in self._machines]
        hosts = [one.host for one in self._machines]
        seen = self._ask("look", lambda _: {"names": hosts, "token": mark})
        folder = self._wanted.given.checkpoints
        marks = {number: seen[name]["marks"] for number, name in enumerate(names) if name in seen}
        self._findings.append(check_shared(str(folder) if folder else None, marks, names))
        if len(set(hosts)) == len(hosts):
            addresses = {one.host: one.address for one in self._machines}
            for one in self._machines:
                resolved = seen[one.name]["names"]
                self._findings.append(network.check_names(one.host, resolved, addresses).at(one.name))

    def _measure(self, ports: dict[str, int]) -> dict[tuple[str, str], Link]:
        """Measure all links, each machine in at most one measurement at a time, and repeat suspicious measurements."""
        links: dict[tuple[str, str], Link] = {}
        for pairs in rounds(len(self._machines)):
            named = [(self._machines[first], self._machines[second]) for first, second in pairs]
            links |= self._pairs(named, ports)
            links |= self._pairs([(second, first) for first, second in named], ports)
        machines = {one.name: one for one in self._machines}
        for here, other in suspicious(links)[:_SECOND_LOOKS]:
            again = self._pairs([(machines[here], machines[other])], ports)
            links |= {ends: better(links[ends], link) for ends, link in again.items()}
        return links

    def _pairs(self, pairs: Sequence[tuple[Asked, Asked]], ports: dict[str, int]) -> dict[tuple[str, str], Link]:
        for here, other in pairs:
            here.start("measure", address=other.address, port=ports[other.name])
        links = {}
        for here, other in pairs:
            try:
                links[here.name, other.name] = Link(**here.finish("measure"))
            except GoneError as error:
                links[here.name, other.name] = Link(problem=str(error))
        return links
