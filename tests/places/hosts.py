"""Hosts on one network, on this machine: network namespaces with an address, a name and an SSH server each."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

PROGRAMS = ("ip", "unshare", "nsenter", "ssh", "ssh-keygen")
SSHD = "/usr/sbin/sshd"
_SECONDS = 120.0
_SERVER = """
ListenAddress {address}
HostKey {folder}/host
AuthorizedKeysFile {folder}/user.pub
PidFile none
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
StrictModes no
PrintMotd no
MaxStartups 100
"""
_CLIENT = """
IdentityFile {folder}/user
IdentitiesOnly yes
UserKnownHostsFile {folder}/known
GlobalKnownHostsFile none
"""


def missing() -> str | None:
    """Why no such hosts can be made here."""
    if os.getuid() != 0:
        return "needs root to make network namespaces"
    absent = [name for name in (*PROGRAMS, SSHD) if shutil.which(name) is None]
    if absent:
        return f"needs {', '.join(absent)}: apt-get install iproute2 openssh-server"
    made = subprocess.run(["unshare", "--net", "true"], check=False, capture_output=True)
    return "needs the right to make network namespaces" if made.returncode else None


class Hosts:
    """Hosts ``h1``, ``h2``, ... at 10.77.0.1, 10.77.0.2, ..., and ``sw``, the switch between them, at 10.77.0.254.

    They have the files and the processes of this machine. ``ssh`` in the folder ``bin`` knows them.

    Args:
        folder: a private one.
        count: of hosts.
    """

    def __init__(self, folder: Path, count: int) -> None:
        self.folder = folder
        self.names = [f"h{number}" for number in range(1, count + 1)]
        self._mark = f"pl{os.getpid()}"
        self._servers: dict[str, subprocess.Popen[bytes]] = {}
        self._commands: list[subprocess.Popen[str]] = []

    def namespace(self, host: str) -> str:
        return f"{self._mark}-{host}"

    def address(self, host: str) -> str:
        return "10.77.0.254" if host == "sw" else f"10.77.0.{host[1:]}"

    def up(self) -> None:
        """Make the hosts and the network, and start the SSH servers."""
        known = [f"{self.address(name)} {name}" for name in (*self.names, "sw")]
        switch = self.namespace("sw")
        self._name(switch, known)
        _ip(f"netns add {switch}")
        _ip(f"-n {switch} link set lo up")
        _ip(f"-n {switch} link add br0 type bridge")
        _ip(f"-n {switch} addr add {self.address('sw')}/24 dev br0")
        _ip(f"-n {switch} link set br0 up")
        for name in self.names:
            own = self.namespace(name)
            self._name(own, known)
            _ip(f"netns add {own}")
            _ip(f"-n {switch} link add {name} type veth peer name eth0 netns {own}")
            _ip(f"-n {switch} link set {name} master br0 up")
            _ip(f"-n {own} addr add {self.address(name)}/24 dev eth0")
            _ip(f"-n {own} link set lo up")
            self.plug(name)
        self._make_keys()
        for name in self.names:
            self.power_on(name)

    def _name(self, namespace: str, known: list[str]) -> None:
        folder = Path("/etc/netns", namespace)  # mounted over /etc
        folder.mkdir(parents=True)
        (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *known, ""]))
        (folder / "resolv.conf").touch()  # no name server: what is not in hosts is unknown at once

    def _make_keys(self) -> None:
        for name in ("host", "user"):
            _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / name))
        key = " ".join((self.folder / "host.pub").read_text().split()[:2])
        (self.folder / "known").write_text("".join(f"{name},{self.address(name)} {key}\n" for name in self.names))
        (self.folder / "config").write_text(_CLIENT.format(folder=self.folder))
        program = self.folder / "bin" / "ssh"
        program.parent.mkdir()
        program.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {self.folder}/config "$@"\n')
        program.chmod(0o755)

    def power_on(self, host: str) -> None:
        """Start the SSH server of a host, and wait until it answers."""
        Path("/run/sshd").mkdir(exist_ok=True)
        configuration = self.folder / f"sshd-{host}"
        configuration.write_text(_SERVER.format(folder=self.folder, address=self.address(host)))
        with (self.folder / f"sshd-{host}.log").open("ab") as said:
            self._servers[host] = subprocess.Popen(
                [*self._on(host), SSHD, "-D", "-e", "-f", str(configuration)],
                stdin=subprocess.DEVNULL, stdout=said, stderr=said,
            )  # fmt: skip
        self.plug(host)
        until(lambda: _run("ip", "netns", "exec", self.namespace(host), "ss", "-Hltn", "sport = :22"))

    def power_off(self, host: str) -> None:
        """Unplug a host, and kill all that runs there, at once."""
        self.unplug(host)
        for pid in self._pids(host):
            _kill(pid)
        self._servers.pop(host).wait()

    def unplug(self, host: str) -> None:
        """Pull the cable of a host."""
        _ip(f"-n {self.namespace(host)} link set eth0 down")

    def plug(self, host: str) -> None:
        """Put the cable of a host in."""
        _ip(f"-n {self.namespace(host)} link set eth0 up")
        _ip(f"-n {self.namespace(host)} route replace default via {self.address('sw')}")

    def mount(self, host: str, folder: Path, *options: str) -> None:
        """Put an empty folder over one, as this host alone sees it."""
        inside = ["nsenter", "-t", str(self._servers[host].pid), "-m"]
        _run(*inside, "mount", "-t", "tmpfs", *options, "tmpfs", str(folder))

    def unmount(self, host: str, folder: Path) -> None:
        """Take it away."""
        _run("nsenter", "-t", str(self._servers[host].pid), "-m", "umount", "--lazy", str(folder))

    def running(self, host: str) -> list[str]:
        """The command lines of what runs on a host, but for its SSH server."""
        found = []
        for pid in self._pids(host):
            with contextlib.suppress(OSError):  # it has ended
                line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                if line and "sshd" not in line.split(" -")[0]:
                    found.append(line)
        return found

    def await_end(self) -> None:
        """Wait until nothing is left of what ran on the hosts; what has lost its parent may need a moment to end."""
        until(lambda: not any(map(self.running, self.names)))

    def start(
        self, host: str, *command: str | Path, cwd: Path, environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """Start a command on a host; what still runs of it at the end of the test is ended."""
        process = subprocess.Popen(
            [*self._on(host), *map(str, command)],
            env={**os.environ, "PATH": f"{self.folder}/bin:{os.environ['PATH']}", **(environment or {})},
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._commands.append(process)
        return process

    def down(self) -> None:
        """End all that runs on the hosts, and take them down."""
        for process in self._commands:
            if process.poll() is None:
                process.kill()
        for host in (*self.names, "sw"):
            for pid in self._pids(host):
                _kill(pid)
        for process in self._commands:
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
        for server in self._servers.values():
            server.wait()
        for host in (*self.names, "sw"):
            subprocess.run(["ip", "netns", "del", self.namespace(host)], check=False, capture_output=True)
            shutil.rmtree(Path("/etc/netns", self.namespace(host)), ignore_errors=True)

    def _on(self, host: str) -> list[str]:
        enter = ["ip", "netns", "exec", self.namespace(host), "unshare", "--uts"]
        return [*enter, "sh", "-c", 'hostname "$0"; exec "$@"', host]

    def _pids(self, host: str) -> list[int]:
        found = subprocess.run(
            ["ip", "netns", "pids", self.namespace(host)], check=False, capture_output=True, text=True
        )
        return [int(pid) for pid in found.stdout.split()]


def until(condition: Callable[[], object], seconds: float = _SECONDS) -> None:
    """Wait for something that is about to happen."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"it did not happen in {seconds:.0f} s"
        time.sleep(0.05)


def _ip(words: str) -> None:
    _run("ip", *words.split())


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
