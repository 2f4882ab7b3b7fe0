"""Monitor of a run's pods: forward the first pod's output, report waiting pods and the end of the run."""

from __future__ import annotations

import contextlib
import math
import signal
import subprocess
import time

from paceline.errors import PREEMPTED, StartError
from paceline.launchers.clusters.clients import say
from paceline.launchers.clusters.kubernetes import state
from paceline.launchers.clusters.kubernetes.kubectl import Kubectl
from paceline.launchers.clusters.kubernetes.manifests import Kind, Pods, termination_seconds
from paceline.launchers.clusters.kubernetes.state import Pod
from paceline.launchers.local.launcher import kill_group
from paceline.launchers.workers import stop_signals

POLL_SECONDS = 2.0
_SIGNAL_SECONDS = 0.1
_LAST_SECONDS = 30.0
_SHOWN_LINES = 20


class Following:
    """Monitor of a submitted run.

    Args:
        patience_seconds: timeout for a node for the first pod, and for an answer of the cluster.
    """

    def __init__(self, kubectl: Kubectl, kind: Kind, pods: Pods, patience_seconds: float) -> None:
        self._kubectl, self._kind, self._pods = kubectl, kind, pods
        self._patience_seconds = patience_seconds
        self._logs: subprocess.Popen[bytes] | None = None
        self._shown: dict[str, str] = {}  # by pod: time until which its log was shown
        self._said: set[str] = set()
        self._begun = False
        self._answered = time.monotonic()
        self._since = time.monotonic()

    def wait(self) -> int:
        """Wait until the run ends and remove its objects. Return the exit code.

        Raises:
            StartError: a pod cannot start, or the cluster does not answer.
        """
        with stop_signals() as signals:
            try:
                while not signals:
                    if (code := self._poll()) is not None:
                        return code
                    _pause(signals, 0)
                return self._stop(signals)
            finally:
                self._end_logs()
                self.remove()

    def remove(self) -> None:
        with contextlib.suppress(StartError):
            objects = self._kind.objects(self._pods.name)
            self._kubectl.run("delete", *objects, "--ignore-not-found", "--wait=false")

    def _poll(self) -> int | None:
        """Poll the state of job and pods. Return the exit code if the run has ended, else None."""
        try:
            job = self._kubectl.get(self._kind.resource, self._pods.name)
            pods = self._list()
        except StartError as error:
            if time.monotonic() - self._answered > self._patience_seconds:
                raise
            self._say_once(f"{error} Trying again.")
            return None
        self._answered = time.monotonic()
        if not job:
            say(f"the {self._kind.resource} {self._pods.name} is gone: it was removed")
            return state.exit_code(state.failed_pod(pods))
        self._show(pods)
        if (ended := state.end_of(job)) is None:
            self._complain(pods)
            return None
        self._last_lines()
        return 0 if ended[0] else self._failed(pods, ended[1])

    def _list(self) -> list[Pod]:
        return state.pods_of(self._kubectl.get("pods", "-l", f"{self._kind.label}={self._pods.name}"))

    def _show(self, pods: list[Pod]) -> None:
        """Forward the log of the newest pod with index 0, continuing where the previous log process ended."""
        if self._logs is not None and self._logs.poll() is None:
            return
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        if self._logs is not None:
            self._logs, ended = None, next(reversed(self._shown))
            self._shown[ended] = now
        firsts = [pod for pod in pods if pod.index == 0 and pod.started]
        if not firsts or (firsts[-1].uid in self._shown and firsts[-1].phase != "Running"):
            return
        pod = firsts[-1]
        since = [f"--since-time={self._shown.pop(pod.uid)}"] if pod.uid in self._shown else []
        self._shown[pod.uid] = now
        self._begun = True
        self._logs = self._kubectl.follow("logs", "-f", *since, pod.name)

    def _complain(self, pods: list[Pod]) -> None:
        """Print why pods do not start."""
        for pod in pods:
            if pod.hopeless is not None and pod.phase == "Pending":
                raise StartError(f"Pod {pod.name} cannot start: image {self._pods.image}: {pod.hopeless}.")
            if pod.unschedulable is not None and pod.phase == "Pending":
                self._say_once(f"pod {pod.name} waits for a node: {pod.unschedulable}")
                if not self._begun and time.monotonic() - self._since > self._patience_seconds:
                    raise StartError(
                        f"No node had room for pod {pod.name} in {self._patience_seconds:.0f} s: {pod.unschedulable} "
                        f"Wait longer with --patience, ask for less with -n, --nodes or --gpus, or add nodes."
                    )

    def _failed(self, pods: list[Pod], why: str) -> int:
        """Print why the run failed, and the last lines of a failed pod other than the first. Return the exit code."""
        failed = state.failed_pod(pods)
        if failed is not None and failed.index != 0:
            with contextlib.suppress(StartError):
                for line in self._kubectl.run("logs", f"--tail={_SHOWN_LINES}", failed.name).splitlines():
                    say(f"[{failed.name}] {line}")
        say(f"{self._kind.resource} {self._pods.name} failed: {why}")
        return state.exit_code(failed)

    def _stop(self, signals: list[int]) -> int:
        """Remove the job, so that its pods save a checkpoint and end. A second signal ends the pods at once."""
        say("stopping: the pods save a checkpoint. A second signal ends them at once")
        deadline = time.monotonic() + termination_seconds(self._pods.grace_seconds) + _LAST_SECONDS
        job = f"{self._kind.resource}/{self._pods.name}"
        self._kubectl.run("delete", job, "--cascade=foreground", "--wait=false", "--ignore-not-found")
        while len(signals) < 2 and time.monotonic() < deadline:
            with contextlib.suppress(StartError):
                if not (pods := self._list()):
                    break
                self._show(pods)
            _pause(signals, 1)
        else:
            say("ending the pods at once")
            chosen = f"{self._kind.label}={self._pods.name}"
            self._kubectl.run("delete", "pods", "-l", chosen, "--grace-period=0", "--force", "--wait=false")
        self._last_lines()
        return 128 + signals[0] if signals[0] in (signal.SIGINT, signal.SIGHUP) else PREEMPTED

    def _last_lines(self) -> None:
        """Wait until the log of the first pod is complete, with a timeout."""
        if self._logs is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._logs.wait(_LAST_SECONDS)

    def _end_logs(self) -> None:
        if self._logs is not None:
            kill_group(self._logs.pid)
            self._logs.wait()

    def _say_once(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            say(line)


def _pause(signals: list[int], known: int) -> None:
    """Wait for the polling interval, or until there are more than `known` signals."""
    for _ in range(math.ceil(POLL_SECONDS / _SIGNAL_SECONDS)):
        if len(signals) > known:
            return
        time.sleep(_SIGNAL_SECONDS)
