"""Calls of ``kubectl`` in the user's context, with readable error messages."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import Any

from paceline.errors import StartError
from paceline.launchers.local.child import command_of

_SECONDS = 60.0
_HELP = {
    "connection to the server localhost:8080 was refused": "kubectl knows no cluster: choose one with "
    "`kubectl config use-context NAME`; `kubectl config get-contexts` lists them, and KUBECONFIG names their file.",
    "does not exist": "`kubectl config get-contexts` lists the contexts.",
    "no context exists": "`kubectl config get-contexts` lists the contexts.",
    "orbidden": "Ask for the right to create jobs, services and secrets and to read pods and their logs, or choose "
    "another --namespace; `kubectl auth can-i create jobs` shows whether you have it.",
    "namespaces": "Choose another --namespace, or make it: `kubectl create namespace NAME`.",
    "no matches for kind": "The cluster does not know this kind; its operator is not installed. --kind job needs none.",
    "doesn't have a resource type": "The cluster does not know this kind; its operator is not installed. --kind job "
    "needs none.",
    "Unable to connect": "Is the cluster of the current context up? `kubectl cluster-info` shows it.",
}


class Kubectl:
    """Calls of ``kubectl`` in one namespace.

    Args:
        namespace: namespace of the calls. None selects the namespace of the context.
    """

    def __init__(self, namespace: str | None) -> None:
        if (program := shutil.which("kubectl")) is None:
            raise StartError(
                "--on kubernetes submits with kubectl, which is not installed here. Install it, or apply what "
                "--dry-run prints where it is."
            )
        self._command = [program, *(["--namespace", namespace] if namespace else [])]

    def run(self, *words: str, given: str | None = None) -> str:
        """Run ``kubectl`` and return its output. ``given``: standard input. Defaults to empty."""
        try:
            ended = subprocess.run(
                [*self._command, *words],
                input=given,
                stdin=subprocess.DEVNULL if given is None else None,
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                timeout=_SECONDS,
                start_new_session=True,  # Ctrl-C must not interrupt kubectl
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise StartError(f"kubectl {words[0]} gave no answer in {_SECONDS:.0f} s. Is the cluster up?") from None
        if ended.returncode != 0:
            said = ended.stderr.strip() or f"exit code {ended.returncode}"
            help_ = next((text for part, text in _HELP.items() if part in said), "")
            raise StartError(f"kubectl {words[0]}: {said.removeprefix('error: ')}{f' - {help_}' if help_ else ''}")
        return ended.stdout

    def get(self, *words: str) -> dict[str, Any]:
        """Return an object or a list of objects. Empty if it does not exist."""
        found: dict[str, Any] = json.loads(self.run("get", *words, "--ignore-not-found", "-o", "json").strip() or "{}")
        return found

    def follow(self, *words: str) -> subprocess.Popen[bytes]:
        """Start ``kubectl`` with the output of this process. It ends with this process."""
        return subprocess.Popen(
            command_of(frozenset(), (*self._command, *words)), stdin=subprocess.DEVNULL, start_new_session=True
        )
