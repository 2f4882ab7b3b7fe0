"""Pods of a manifest, without a cluster: a network namespace for each, and what a kubelet and the Job controller do.

A pod has its own address, host name, processes, /dev/shm, and the names of all pods in /etc/hosts, as the cluster's
name service would have them. One that replaces another has the same index and name, and a new address.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SECONDS = 120.0
_TERMINATED = 128 + signal.SIGKILL
_POD = """
hostname "$1"; mount --bind "$2" /etc/hosts; mount -t tmpfs shm /dev/shm; ip link set lo up
shift 2; exec "$@"
"""


def missing() -> str | None:
    """Why pods cannot be emulated here."""
    absent = [name for name in ("ip", "unshare", "mount") if shutil.which(name) is None]
    if os.getuid() != 0 or absent:
        return f"needs root{' and ' if absent else ''}{', '.join(absent)}, to make network namespaces"
    return None


def until(condition: Callable[[], object], what: str) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come in {SECONDS:.0f} s"
        time.sleep(0.05)


class Pod:
    """A pod of one index: its namespace and its processes."""

    def __init__(self, namespace: str, address: str, process: subprocess.Popen[bytes]) -> None:
        self.namespace = namespace
        self.address = address
        self.process = process

    def first_process(self) -> int | None:
        """The pod's process 1, as this machine counts."""
        with contextlib.suppress(OSError):
            children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
            return int(children[0]) if children else None
        return None


class Cluster:
    """The pods of one Indexed Job.

    Args:
        job: the manifest of the Job.
        secret: the value of every variable that comes from a Secret.
        image: the folder where the containers start.
    """

    def __init__(self, job: dict[str, Any], secret: str, image: Path) -> None:
        self._spec = job["spec"]
        self._pod_spec = job["spec"]["template"]["spec"]
        self._container = self._pod_spec["containers"][0]
        self._name = job["metadata"]["name"]
        self._secret = secret
        self._image = image
        self._mark = f"pk{os.getpid() % 10000}"
        self._net = f"10.{os.getpid() % 200 + 20}.78"
        self._hosts = image / "hosts"
        self._made = 0
        self._namespaces: list[str] = []
        self.pods: dict[int, Pod] = {}
        self.codes: dict[int, list[int]] = {index: [] for index in range(self._spec["completions"])}
        self.failed = False

    def up(self) -> None:
        """Start a pod for each index."""
        self._hosts.write_text("")
        _ip(f"link add {self._mark}b type bridge")
        _ip(f"link set {self._mark}b up")
        for index in range(self._spec["parallelism"]):
            self.start(index)

    def start(self, index: int) -> None:
        """Start a pod, the first one of its index or one that replaces another."""
        self._made += 1
        namespace, address = f"{self._mark}x{self._made}", f"{self._net}.{self._made}"
        self._namespaces.append(namespace)
        _ip(f"netns add {namespace}")
        _ip(f"link add {namespace}c type veth peer name eth0 netns {namespace}")
        _ip(f"link set {namespace}c master {self._mark}b up")
        _ip(f"-n {namespace} addr add {address}/24 dev eth0")
        _ip(f"-n {namespace} link set eth0 up")
        hosts = self._image / f"hosts-{self._made}"
        host = f"{self._name}-{index}"
        hosts.write_text("")
        words = ["ip", "netns", "exec", namespace, "unshare", "--uts", "--pid", "--mount", "--fork", "--kill-child"]
        words += ["--mount-proc", "sh", "-ec", _POD, "sh", host, str(hosts), *self._container["command"]]
        self.pods[index] = Pod(namespace, address, None)  # type: ignore[arg-type]  # it has an address, and no process
        self._publish()
        with (self._image / f"said-{index}").open("ab") as said:
            process = subprocess.Popen(
                words, cwd=self._image, env=self._variables(index), stdin=subprocess.DEVNULL, stdout=said, stderr=said
            )
        self.pods[index] = Pod(namespace, address, process)

    def _variables(self, index: int) -> dict[str, str]:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        known = {"PATH": path, "HOME": str(self._image), "JOB_COMPLETION_INDEX": str(index)}
        given = {one["name"]: one.get("value", self._secret) for one in self._container.get("env", ())}
        return known | given

    def _publish(self) -> None:
        """Write the names of all pods where each of them looks."""
        domain = self._pod_spec["subdomain"]
        lines = ["127.0.0.1 localhost"]
        for index, pod in self.pods.items():
            host = f"{self._name}-{index}"
            lines.append(f"{pod.address} {host}.{domain}.default.svc.cluster.local {host}.{domain}")
        for number in range(1, self._made + 1):
            own = [
                f"{pod.address} {self._name}-{i}" for i, pod in self.pods.items() if pod.address.endswith(f".{number}")
            ]
            (self._image / f"hosts-{number}").write_text("\n".join([*lines, *own]) + "\n")

    def kill(self, index: int) -> None:
        """Kill all processes of a pod at once; another pod takes its place."""
        pod = self.pods[index]
        pod.process.kill()
        pod.process.wait()
        self.start(index)

    def evict(self, index: int) -> None:
        """Tell a pod to end, as a kubelet does; :meth:`control` replaces it."""
        first = self.pods[index].first_process()
        assert first is not None
        os.kill(first, signal.SIGTERM)

    def control(self) -> bool:
        """Do what the Job controller does with pods that have ended; whether the Job goes on."""
        rules = [one for one in self._spec["podFailurePolicy"]["rules"] if "onExitCodes" in one]
        for index, pod in list(self.pods.items()):
            code = pod.process.poll()
            if code is None or (self.codes[index] and self.codes[index][-1] == 0):
                continue
            self.codes[index].append(code)
            action = next((one["action"] for one in rules if code in one["onExitCodes"]["values"]), "Count")
            if code != 0 and action == "FailJob":
                self.failed = True
                return False
            if code != 0:
                self.start(index)
        return 0 not in self.codes[0]

    def said(self, index: int) -> str:
        """What the pods of an index have printed."""
        return (self._image / f"said-{index}").read_text()

    def down(self) -> None:
        """End what is left."""
        for pod in self.pods.values():
            if pod.process.poll() is None:
                pod.process.kill()
            pod.process.wait()
        for namespace in self._namespaces:
            subprocess.run(["ip", "netns", "del", namespace], check=False, capture_output=True)
            subprocess.run(["ip", "link", "del", f"{namespace}c"], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", f"{self._mark}b"], check=False, capture_output=True)


def _ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True, capture_output=True)
