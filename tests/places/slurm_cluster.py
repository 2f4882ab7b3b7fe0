"""A Slurm of two nodes on this machine, in a folder of its own: munged, slurmctld and a slurmd for each node."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from paceline.launchers.machine import choose_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol")
NODES = ("n1", "n2")
_SECONDS = 120.0
"""For the cluster to come up, and for its jobs to end, on a busy machine."""
_CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthInfo=socket={folder}/munge.sock,cred_expire=10
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
SlurmdParameters=config_overrides
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=2,bf_interval=2,sched_min_interval=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
KillWait=5
ReturnToService=2
SlurmdTimeout=10
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4 RealMemory=4000 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4 RealMemory=4000 State=UNKNOWN
PartitionName=low Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=10
PartitionName=high Nodes=n1,n2 MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


def missing() -> str | None:
    """Why no Slurm can be started here."""
    if os.getuid() != 0:
        return "needs root to start Slurm"
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    return f"needs {', '.join(absent)}: apt-get install slurmctld slurmd slurm-client munge" if absent else None


class SlurmCluster:
    """Nodes ``n1`` and ``n2`` with 4 CPUs each, in the partitions ``low`` (the default) and ``high`` (preempts).

    Args:
        folder: a private one with a short name: the socket of munged is in it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
        self.environment["SLURM_CONF"] = str(folder / "slurm.conf")
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._clients: list[subprocess.Popen[str]] = []

    def up(self) -> None:
        """Start the daemons, and wait until both nodes are idle."""
        host, ports = socket.gethostname().partition(".")[0], [choose_port(None) for _ in range(3)]
        (self.folder / "slurm.conf").write_text(_CONFIGURATION.format(folder=self.folder, host=host, ports=ports))
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        key = self.folder / "munge.key"
        key.touch(mode=0o400)
        key.write_bytes(os.urandom(128))
        files = {"socket": "sock", "key-file": "key", "log-file": "log", "pid-file": "pid", "seed-file": "seed"}
        options = [f"--{option}={self.folder}/munge.{suffix}" for option, suffix in files.items()]
        self._daemon("munged", "munged", "--foreground", "--force", *options)
        self.wait_for((self.folder / "munge.sock").exists, "munged")
        self._daemon("slurmctld", "slurmctld", "-D", "-i")
        self.wait_for(lambda: "is UP" in self.run("scontrol", "ping", check=False), "slurmctld")
        for node in NODES:
            self.start_node(node)
        self.wait_for(lambda: self.run("sinfo", "-h", "-p", "low", "-o", "%T%D", check=False) == "idle2\n", "Slurm")

    def start_node(self, node: str) -> None:
        """Start the slurmd of a node."""
        self._daemon(node, "slurmd", "-D", "-N", node)

    def lose_node(self, node: str) -> None:
        """Kill the slurmd of a node and all that runs there, at once."""
        slurmd = self._daemons.pop(node)
        slurmd.kill()
        slurmd.wait()
        for pid in _steps():
            if f"SLURMD_NODENAME={node}" in _variables(pid):
                for one in (pid, *_below(pid)):
                    _kill(one)

    def run(self, *command: str, check: bool = True, timeout: float = _SECONDS) -> str:
        """Run a command of Slurm to its end, and return what it printed."""
        return subprocess.run(
            command, env=self.environment, cwd=self.folder, check=check, capture_output=True, text=True, timeout=timeout
        ).stdout

    def start(
        self, *command: str | Path, cwd: Path, environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """Start a command, such as srun; what still runs of it at the end of the test is ended."""
        process = subprocess.Popen(
            list(map(str, command)),
            env={**self.environment, **(environment or {})},
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._clients.append(process)
        return process

    def down(self) -> None:
        """End all jobs, then the daemons."""
        with contextlib.suppress(AssertionError, subprocess.SubprocessError):
            if "slurmctld" in self._daemons:
                self.run("scancel", "--state=PENDING", "-u", "root", check=False)
                self.run("scancel", "--signal=KILL", "--full", "-u", "root", check=False)
                self.run("scancel", "-u", "root", check=False)
                self.wait_for(
                    lambda: self.run("squeue", "-h", "-t", "pending,running", check=False) == "", "the end of all jobs"
                )
        for process in self._clients:
            if process.poll() is None:
                process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
        for name in reversed(self._daemons):
            self._daemons[name].send_signal(signal.SIGTERM)
        for daemon in self._daemons.values():
            try:
                daemon.wait(_SECONDS / 4)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        for pid in _steps():
            for one in (pid, *_below(pid)):
                _kill(one)

    def _daemon(self, name: str, *command: str) -> None:
        with (self.folder / f"{name}.out").open("ab") as said:
            self._daemons[name] = subprocess.Popen(
                command, env=self.environment, stdin=subprocess.DEVNULL, stdout=said, stderr=said
            )

    def wait_for(self, condition: Callable[[], object], what: str) -> None:
        """Wait, with patience for a busy machine."""
        deadline = time.monotonic() + _SECONDS
        while not condition():
            if time.monotonic() > deadline:
                raise AssertionError(f"{what} did not come in {_SECONDS:.0f} s:\n{self.logs()}")
            time.sleep(0.05)

    def logs(self) -> str:
        """What the daemons have written."""
        files = sorted([*self.folder.glob("*.log"), *self.folder.glob("*.out")])
        return "\n".join(f"-- {file.name}\n{file.read_text(errors='replace')[-2000:]}" for file in files)


def _steps() -> list[int]:
    """The processes of slurmstepd that come from this one; each leaves its slurmd, and is adopted."""
    return [pid for pid in _below(os.getpid()) if _read(pid, "comm").strip() == "slurmstepd"]


def _below(top: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(path.read_text().rpartition(") ")[2].split()[1])
            children.setdefault(parent, []).append(int(path.parent.name))
    found: list[int] = []
    waiting = list(children.get(top, ()))
    while waiting:
        found.append(waiting.pop())
        waiting += children.get(found[-1], ())
    return found


def _variables(step: int) -> set[str]:
    return {name for pid in _below(step) for name in _read(pid, "environ").split("\0")}


def _read(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes().decode(errors="replace")
    except OSError:  # it has ended
        return ""


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
