"""A Spark of two executors on this machine, in network and process namespaces of its own, which end with the test."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

_SECONDS = 500.0
"""For the cluster to come up, and for a run to end, on a busy machine."""
_PACKAGE = "org.apache.spark.deploy"
_LIGHT = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"
_DEFAULTS = f"""
spark.driver.host 127.0.0.1
spark.driver.bindAddress 127.0.0.1
spark.executor.cores 2
spark.executor.memory 512m
spark.executor.extraJavaOptions {_LIGHT}
spark.ui.enabled false
"""


def missing() -> str | None:
    """Why no Spark can be started here."""
    if importlib.util.find_spec("pyspark") is None:
        return "needs pyspark: pip install 'paceline[spark]'"
    if shutil.which("java") is None:
        return "needs Java: apt-get install default-jre-headless"
    if subprocess.run(
        ["unshare", "--net", "--pid", "--fork", "--mount-proc", "ip", "link"], capture_output=True
    ).returncode:
        return "needs the right to make namespaces, and iproute2"
    return None


class SparkCluster:
    """A standalone master and two workers with one executor of two cores each, and a disk of its own each.

    Args:
        folder: for logs and what Spark writes.

    Attributes:
        disk: a folder, another one for each executor and for the driver.
    """

    master = "spark://127.0.0.1:7077"

    def __init__(self, folder: Path) -> None:
        import pyspark

        home = Path(pyspark.__file__).parent
        self._folder, self.disk = folder, folder / "disk"
        self.disk.mkdir()
        self._class = str(home / "bin" / "spark-class")
        self.environment = {
            **{
                name: value
                for name, value in os.environ.items()
                if not name.startswith(("SPARK_", "PYSPARK_", "PACELINE_"))
            },
            "SPARK_HOME": str(home),
            "SPARK_CONF_DIR": str(folder),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_LOCAL_DIRS": str(folder / "local"),
            "SPARK_WORKER_DIR": str(folder / "work"),
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_DAEMON_JAVA_OPTS": _LIGHT,
            "SPARK_SUBMIT_OPTS": _LIGHT,
        }

    def up(self) -> None:
        """Start the daemons, and wait until the master knows both workers."""
        (self._folder / "spark-defaults.conf").write_text(_DEFAULTS)
        log, daemon = self._folder / "master.log", f"{self._class} {_PACKAGE}"
        lines = [f"{daemon}.master.Master --host 127.0.0.1 --port 7077 --webui-port 0 > {log} 2>&1 &"]
        for number in (1, 2):
            worker = f"{daemon}.worker.Worker --host 127.0.0.1 --cores 2 --memory 1g --webui-port 0 {self.master}"
            alone = f"unshare --mount sh -c 'mount -t tmpfs tmpfs {self.disk}; exec {worker}'"
            lines.append(f"{alone} > {self._folder}/worker-{number}.log 2>&1 &")
        script = "\n".join(["ip link set lo up", *lines, "echo $$; exec sleep infinity"])
        namespaces = ["unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
        self._first = subprocess.Popen(
            [*namespaces, "sh", "-c", script], env=self.environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
        )
        deadline = time.monotonic() + _SECONDS
        while len(set(line.split("worker ")[-1] for line in self._registered(log))) < 2:
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)

    @property
    def first(self) -> int:
        """The process that holds the namespaces."""
        return self._first.pid

    def run(self, *words: str | Path, cwd: Path, command: str = "run") -> tuple[int, str]:
        """Run ``paceline run --on spark``, or another command, there; gives its exit code and all that it said."""
        return self.finish(self.start(*words, cwd=cwd, command=command))

    def start(self, *words: str | Path, cwd: Path, command: str = "run") -> subprocess.Popen[str]:
        """Start it in the namespaces."""
        return self.python("-m", "paceline", command, "--on", "spark", "--master", self.master, *words, cwd=cwd)

    def python(self, *words: str | Path, cwd: Path) -> subprocess.Popen[str]:
        """Start Python in the namespaces; its process id there is in the file ``driver`` of that folder."""
        return subprocess.Popen(
            [
                *self._inside(),
                "sh",
                "-c",
                'cd "$0"; echo $$ > driver; exec "$@"',
                cwd,
                sys.executable,
                *map(str, words),
            ],
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def finish(self, started: subprocess.Popen[str]) -> tuple[int, str]:
        """Wait for its end; gives its exit code and all that it said."""
        try:
            said, _ = started.communicate(timeout=_SECONDS)
        except subprocess.TimeoutExpired:
            self.down()  # what holds the pipe ends, too
            pytest.fail(f"still running after {_SECONDS} s: {started.communicate()[0]}")
        return started.returncode, said

    def signal(self, number: int, cwd: Path) -> None:
        """Send a signal to what was started in this folder."""
        subprocess.run([*self._inside(), "kill", f"-{number}", (cwd / "driver").read_text().strip()], check=True)

    def running(self, script: Path) -> list[str]:
        """The command lines of the processes that run a script."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                if str(script) in (words := path.read_text(errors="replace").split("\0")):
                    found.append(" ".join(words))
        return found

    def _inside(self) -> list[str]:
        children = Path(f"/proc/{self.first}/task/{self.first}/children").read_text().split()
        return ["nsenter", "--net", "--pid", "--mount", f"--target={children[0]}", "--"]

    def down(self) -> None:
        """End everything in the namespaces."""
        self._first.kill()
        self._first.communicate()

    @staticmethod
    def _registered(log: Path) -> list[str]:
        text = log.read_text() if log.exists() else ""
        return [line for line in text.splitlines() if "Registering worker" in line]
