"""Check before a run that each host meets the requirements and reaches the first host.

::

    launcher ─┬─ ssh ─ h1   requirements, and a free port
              ├─ ssh ─ h2   requirements;  at which address does h1 answer?
              └─ ssh ─ h3   requirements;  at which address does h1 answer?

All hosts are checked at the same time, and nothing remains on them.
"""

from __future__ import annotations

import contextlib
import json
import random
import secrets
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from paceline.errors import StartError
from paceline.launchers.clusters.ssh import remote as ssh_remote
from paceline.system.installed import version

CONNECTION_FAILED = 255  # Exit code of ssh itself. Any other exit code is that of the remote command.
_ANSWER_SECONDS = 60.0
_PORTS = range(10_000, 32_768)  # ports below Linux's ephemeral range
_OF_SSH = (
    ("could not resolve", "there is no host of this name; check the spelling, and ~/.ssh/config"),
    (
        "identification has changed",
        "its host key is not the one known here: another machine may answer in its place. Ask its administrator; "
        "if the machine is a new one, `ssh-keygen -R {name}` removes the old key",
    ),
    (
        "host key",
        "its host key is not known here. Run `ssh {host}` once, compare the fingerprint with that of the machine, and "
        "accept it",
    ),
    (
        "permission denied",
        "it does not let you in without a password. `ssh-copy-id {host}` puts your key there; if your key has a "
        "passphrase, `ssh-add` unlocks it",
    ),
    ("connection refused", "it runs no SSH server on that port; check the port in ~/.ssh/config"),
    ("timed out", "it does not answer: it is down, or a firewall is in between"),
    ("no route to host", "it does not answer: it is down, or a firewall is in between"),
)
"""Texts in ssh's messages, in lower case, with explanation and advice."""

Facts = dict[str, Any]


@dataclass(frozen=True)
class Needs:
    """Requirements for a host."""

    python: str  # path of the interpreter
    directory: str  # working directory of the agents
    files: tuple[str, ...]  # required files, absolute or relative to `directory`
    environment: Mapping[str, str]  # variables of the agents


def first_input(order: Mapping[str, object]) -> bytes:
    """Return the standard input for a host: the program that runs there, and its order."""
    program = Path(ssh_remote.__file__).read_text()
    return b"".join(json.dumps(one).encode() + b"\n" for one in (program, order))


def check_hosts(
    hosts: Mapping[str, Sequence[str]], needs: Needs, must_meet: bool = True, more_come: bool = False
) -> tuple[str, int]:
    """Check all hosts. Return an address and a port of the first host at which all others reach it.

    Args:
        hosts: names of the hosts, with the command that runs Python on each.
        must_meet: whether to fail if a host does not reach the first host. Otherwise the likeliest address is returned.
        more_come: whether hosts may join later, so that even a single host needs an address that others can reach.
    """
    token = secrets.token_hex(8)
    with contextlib.ExitStack() as opened, ThreadPoolExecutor(len(hosts)) as pool:
        talks = [opened.enter_context(_Conversation(name, command)) for name, command in hosts.items()]
        first, others = talks[0], talks[1:]

        def begin(talk: _Conversation) -> Facts:
            ports = random.SystemRandom().sample(_PORTS, 50) if talk is first else []
            try:
                return talk.ask(first_input({**vars(needs), "ports": ports, "token": token}))
            except StartError as error:  # reported together with the failures of other hosts
                return {"failed": str(error)}

        facts = list(pool.map(begin, talks))
        wrong = [text for talk, one in zip(talks, facts, strict=True) if (text := _lacks(talk.host, one, needs))]
        if wrong:
            raise StartError("\n".join(wrong))
        port = int(facts[0]["port"])

        if not others:
            known = [address for group in _candidates(facts) for address in group] if more_come else []
            return (known or ["127.0.0.1"])[0], port
        return _meeting(first.host, others, _candidates(facts), port, must_meet), port


def _meeting(
    first: str, others: Sequence[_Conversation], candidates: Sequence[Sequence[str]], port: int, must_meet: bool
) -> str:
    """Return an address of the first host that all other hosts reach."""

    def go_on(talk: _Conversation, addresses: Sequence[str]) -> Facts:
        return talk.ask(json.dumps({"addresses": addresses, "port": port}).encode() + b"\n")

    tried: dict[str, dict[str, str]] = {talk.host: {} for talk in others}
    with ThreadPoolExecutor(len(others)) as pool:
        for addresses in candidates:
            found = list(pool.map(partial(go_on, addresses=addresses), others))
            for talk, answers in zip(others, found, strict=True):
                tried[talk.host] |= answers
            for address in addresses:
                if all(answers[address] == "reached" for answers in found):
                    return address
    if not must_meet and candidates and not any("here" in answers.values() for answers in tried.values()):
        return candidates[0][0]
    raise StartError(_not_reached(first, tried, port))


def _candidates(facts: Sequence[Facts]) -> list[list[str]]:
    """Return groups of addresses of the first host: the addresses that ssh uses, then all others."""
    own, *others = [one["connection"] for one in facts]
    seen = [own[2]] if own else [connection[0] for connection in others if connection]
    known = facts[0]["addresses"]
    best = [address for address in dict.fromkeys(seen) if address in known]
    return [group for group in (best, [one for one in known if one not in best]) if group]


def _lacks(host: str, facts: Facts, needs: Needs) -> str | None:
    """Return an error message about a requirement that a host fails, or None."""
    if "failed" in facts:
        return str(facts["failed"])
    if "directory" in facts:
        return (
            f"{host}: the directory {needs.directory} cannot be entered there ({facts['directory']}). A run needs the "
            f"same directory on all hosts: share it, or copy it there."
        )
    if facts["missing"]:
        where = f" in {needs.directory}" if any(not name.startswith("/") for name in facts["missing"]) else ""
        return f"{host}: there is no {', '.join(facts['missing'])}{where}. Copy it there, or share the directory."
    own = version("paceline")
    if facts["paceline"] is None:
        return (
            f"{host}: {needs.python} cannot import paceline ({facts['why']}). Install paceline {own} "
            f"for this Python there."
        )
    if facts["paceline"] != own:
        return (
            f"{host} has paceline {facts['paceline']}, and this machine has {own}. Install the same "
            f"version on all hosts."
        )
    return None


def _not_reached(first: str, tried: Mapping[str, Mapping[str, str]], port: int) -> str:
    """Return an error message about hosts that cannot reach the first host."""
    for host, answers in tried.items():
        if "here" in answers.values():
            return f"{first} and {host} are the same machine: name it once, with the sum of its workers."
    lines = []
    for host, answers in tried.items():
        if "reached" not in answers.values():
            said = ", ".join(f"{address}: {why}" for address, why in answers.items()) or "it has none but loopback"
            lines.append(f"{host} cannot reach {first} on port {port} of any of its addresses ({said}).")
    lines = lines or [f"There is no address of {first} that all other hosts reach ({tried})."]
    return "\n".join([*lines, "Let the hosts of a run connect to each other: a firewall may be in between."])


class _Conversation:
    """Conversation with a process on a host."""

    def __init__(self, host: str, command: Sequence[str]) -> None:
        self.host, self._command = host, command

    def __enter__(self) -> _Conversation:
        try:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0
            )
        except FileNotFoundError:
            raise StartError(
                f"{self._command[0]} is not installed here: apt-get install openssh-client, or what your system calls "
                f"it."
            ) from None
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def ask(self, question: bytes) -> Facts:
        """Send a question and return the answer. Raises StartError if the host did not answer."""
        to, answers, errors = self._process.stdin, self._process.stdout, self._process.stderr
        assert to is not None and answers is not None and errors is not None
        late = threading.Timer(_ANSWER_SECONDS, self._process.kill)
        late.start()
        try:
            with contextlib.suppress(BrokenPipeError):  # the exit code gives the reason
                to.write(question)
            for line in answers:
                if line.startswith(ssh_remote.MARK.encode()):
                    answer: Facts = json.loads(line[len(ssh_remote.MARK) :])
                    return answer
            said = errors.read().decode(errors="replace").strip()
            code = self._process.wait()
        finally:
            late.cancel()
        raise StartError(explain(self.host, code, said))


def explain(host: str, code: int, said: str) -> str:
    """Return an error message for a host on which the check could not run.

    Args:
        said: standard error output of the attempt.
    """
    if code < 0:
        return f"{host} did not answer in {_ANSWER_SECONDS:.0f} s. Does `ssh {host} true` end at once?"
    quote = (said.splitlines() or ["no message"])[-1]
    if code == CONNECTION_FAILED:
        for sign, cure in _OF_SSH:
            if sign in said.lower():
                return f"{host}: {cure.format(host=host, name=host.rpartition('@')[2])}. (ssh: {quote})"
        return f"{host} cannot be reached by ssh: {quote}"
    if code in (126, 127):
        return (
            f"{host}: there is no Python to run at {sys.executable} ({quote}). A run needs the same interpreter at the "
            f"same path on all hosts: make the virtual environment there, or share it."
        )
    return f"{host}: the check of this host failed with exit code {code}: {quote}"
