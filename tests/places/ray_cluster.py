"""A Ray cluster on this machine, in network and process namespaces of its own, which end with the test.

python ray_cluster.py   holds the cluster in there: adds and removes nodes, and says what runs, as it is told
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SECONDS = 200.0
"""For a node to come up, and for a run to end, on a busy machine."""
_ALONE = ["unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
_WITH_LOOPBACK = ["sh", "-c", 'ip link set lo up; exec "$@"', "sh"]
_QUICK = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_worker_niceness": "0",  # as other tests run beside it; 15 if not set
}
_STORE_BYTES = 100 << 20
_SLOW = "ray::DashboardAgent", "ray::RuntimeEnvAgent"
"""They notice after a minute that their node has been killed."""


def missing() -> str | None:
    """Why no Ray can be started here."""
    if importlib.util.find_spec("ray") is None:
        return "needs Ray: pip install 'paceline[ray]'"
    if os.geteuid() or subprocess.run([*_ALONE, *_WITH_LOOPBACK, "true"], capture_output=True).returncode:
        return "needs the right to make namespaces, and iproute2"
    return None


class RayCluster:
    """A head with two CPUs, and nodes that come and go; without a head, a machine without a cluster.

    Args:
        folder: where Ray keeps its files: a short path, as those of sockets must be.
        head: whether there is one.
    """

    def __init__(self, folder: Path, head: bool = True) -> None:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "PACELINE_"))}
        self.environment = {**kept, **_QUICK, "RAY_TMPDIR": str(folder)}
        self._holder = subprocess.Popen(
            [*_ALONE, *_WITH_LOOPBACK, sys.executable, __file__],
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.address: str | None = self._ask("head") if head else None

    def add(self, **resources: float) -> int:
        """Add a node with two CPUs, or other resources; gives its number."""
        return int(self._ask("add", **resources))

    def add_without(self, hidden: Path, num_cpus: int) -> None:
        """Add a node that does not see a folder."""
        self._ask("add_without", hidden=str(hidden), num_cpus=num_cpus)

    def remove(self, number: int) -> None:
        """Kill a node, as when its machine is gone."""
        self._ask("remove", number=number)

    def wait_for_ends(self, processes: list[str], count: int) -> None:
        """Wait until so many of some processes have ended; their ids are those in there."""
        self._ask("wait_for_ends", processes=processes, count=count)

    def left(self) -> list[str]:
        """What is left of runs: processes, and resources that are held; waits for them to go."""
        return list(self._ask("left"))

    def _ask(self, verb: str, **values: object) -> Any:
        assert self._holder.stdin is not None and self._holder.stdout is not None
        self._holder.stdin.write(json.dumps([verb, values]) + "\n")
        self._holder.stdin.flush()
        return json.loads(self._holder.stdout.readline())

    def start(self, *command: str | Path, cwd: Path, **environment: str) -> Started:
        """Start a command in there."""
        inside = _child_of(self._holder.pid)
        words = ["nsenter", "--net", "--pid", "--mount", f"--target={inside}", f"--wdns={cwd}", "setsid"]
        process = subprocess.Popen(
            [*words, *map(str, command)],
            env={**self.environment, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return Started(process)

    def train(self, *words: str | Path, cwd: Path, **environment: str) -> Started:
        """Start ``paceline run --on ray`` in there."""
        known = ["--address", self.address] if self.address else []
        return self.start(
            sys.executable, "-m", "paceline", "run", "--on", "ray", *known, *words, cwd=cwd, **environment
        )

    def down(self) -> None:
        """End everything in the namespaces."""
        self._holder.kill()
        self._holder.communicate()


class Started:
    """A command in the namespaces."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def wait(self) -> tuple[int, str]:
        """Wait for its end; gives the exit code, and all that it said."""
        try:
            said, _ = self.process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"still running after {SECONDS} s: {self.process.communicate()[0]}") from None
        return self.process.returncode, said

    def wait_for(self, folder: Path, pattern: str, count: int) -> list[str]:
        """Wait until there are so many files with something in them; gives that."""
        deadline = time.monotonic() + SECONDS
        while len(found := [text for path in folder.glob(pattern) if (text := path.read_text())]) < count:
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise AssertionError(f"{len(found)} of {count} {pattern}: {self.process.communicate()[0]}")
            time.sleep(0.05)
        return found

    def press_ctrl_c(self) -> None:
        """Signal the command and what is in its process group, as a terminal does."""
        os.killpg(_child_of(self.process.pid), signal.SIGINT)

    def kill(self) -> None:
        """Kill the command alone."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(_child_of(self.process.pid), signal.SIGKILL)


def _child_of(pid: int) -> int:
    deadline = time.monotonic() + SECONDS
    while not (children := Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
        assert time.monotonic() < deadline, f"process {pid} has no child"
        time.sleep(0.01)
    return int(children[0])


class _Holder:
    """What the other process does."""

    def __init__(self) -> None:
        self._cluster: Any = None
        self._nodes: list[Any] = []
        self._before = set(_processes())

    def head(self) -> str:
        import ray
        from ray.cluster_utils import Cluster

        arguments = {"num_cpus": 2, "object_store_memory": _STORE_BYTES, "include_dashboard": False}
        self._cluster = Cluster(initialize_head=True, head_node_args=arguments)
        ray.init(self._cluster.address, log_to_driver=False, logging_level="CRITICAL")
        return str(self._cluster.address)

    def add(self, **resources: float) -> int:
        given = {"num_cpus": 2, "object_store_memory": _STORE_BYTES, **resources}
        self._nodes.append(self._cluster.add_node(**given))
        return len(self._nodes) - 1

    def add_without(self, hidden: str, num_cpus: int) -> None:
        import ray

        words = [sys.executable, "-m", "ray.scripts.scripts", "start", "--address", self._cluster.address, "--block"]
        words += ["--num-cpus", str(num_cpus), "--object-store-memory", str(_STORE_BYTES), "--disable-usage-stats"]
        inside = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs tmpfs "$0"; exec "$@"', hidden, *words]
        count = _alive(ray)
        subprocess.Popen(inside, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        _until(lambda: _alive(ray) > count)

    def remove(self, number: int) -> None:
        self._cluster.remove_node(self._nodes[number], allow_graceful=False)

    def wait_for_ends(self, processes: list[str], count: int) -> None:
        _until(lambda: sum(map(_runs, processes)) <= len(processes) - count)

    def left(self) -> list[str]:
        found: list[str] = []

        def none() -> bool:
            found[:] = [line for pid, line in _processes().items() if self._is_left(pid, line)]
            if self._cluster is not None:
                import ray

                free, all_ = ray.available_resources(), ray.cluster_resources()
                found.extend(
                    f"{all_[name] - free.get(name, 0)} {name}" for name in all_ if free.get(name) != all_[name]
                )
            return not found

        _until(none, seconds=60)
        return found

    def _is_left(self, pid: int, line: str) -> bool:
        """Whether it is of a run; Ray keeps its processes for others, but for a cluster that a run has started."""
        kept = line.startswith("ray::") or "/ray/" in line or "ray.scripts" in line
        if self._cluster is None:
            kept = line.startswith(_SLOW)
        return pid not in self._before and not kept


def _alive(ray: Any) -> int:
    return sum(node["Alive"] for node in ray.nodes())


def _runs(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _until(condition: Any, seconds: float = SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.1)


def _processes() -> dict[int, str]:
    """The command lines of the running processes."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if line := (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"):
                found[int(path.name)] = line  # one that has ended has none
    return found


def _hold() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Ray prints
    holder = _Holder()
    for line in sys.stdin:
        verb, values = json.loads(line)
        answers.write(json.dumps(getattr(holder, verb)(**values)) + "\n")
        answers.flush()


if __name__ == "__main__":
    _hold()
