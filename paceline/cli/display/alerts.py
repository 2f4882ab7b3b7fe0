"""Alerts of ``paceline run``: a thread of the launcher reads the records and reports causes to a command or a URL."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from paceline.cli.display.conditions import ENDED, TICK, Conditions, parse
from paceline.cli.display.progress import EventTail
from paceline.config import SavedPlan, quoted
from paceline.environments import env
from paceline.errors import ConfigError
from paceline.events import EventLog
from paceline.observe.why.at_end import last_line

_POLL_SECONDS = 0.5
_SECONDS = 10.0
"""Deadline for alerts that are found together. Neither training nor the end of the run waits longer."""
_URL = ("http://", "https://")


class Watch:
    """Thread that evaluates conditions beside a run. Without conditions, nothing happens.

    Args:
        alerts: conditions as the user wrote them.
        notify: command or URL that receives the alerts. Defaults to the terminal alone.
        log: log of the launcher, whose records are read, and which records the alerts.
        tell: function that prints a line.
    """

    def __init__(
        self, run: Path, alerts: Sequence[str], notify: str | None, log: EventLog, tell: Callable[[str], None]
    ) -> None:
        self._run, self._notify, self._log, self._tell = run, notify, log, tell
        self._tails = [EventTail(run / "events" / f"{name}.jsonl") for name in ("rank-0", "launcher")]
        self._conditions = Conditions(map(parse, alerts), time.time())
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="paceline-alerts", daemon=True) if alerts else None

    def __enter__(self) -> Watch:
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def end(self, code: int) -> None:
        """Issue the alerts of the last records, and those about the end of the run."""
        self.__exit__()
        if self._thread is not None:
            self._log.flush()
            self._poll({"event": ENDED, "code": code})

    def _watch(self) -> None:
        while not self._closed.wait(_POLL_SECONDS):
            self._poll({"event": TICK})

    def _poll(self, last: Mapping[str, Any]) -> None:
        records = [record for tail in self._tails for record in tail.read()]
        now = time.time()
        alerts = [alert for record in (*records, last) for alert in self._conditions.take(record, now)]
        deadline = time.monotonic() + _SECONDS
        for found in alerts:
            why = last_line(self._run) if found.condition.startswith("step") else ""
            alert = replace(found, text=f"{found.text}; {why}") if why else found
            self._log.mark("alert", step=alert.step, condition=alert.condition, text=alert.text)
            self._tell(f"alert: {alert.condition}: {alert.text}")
            if self._notify is None:
                continue
            fields = {name: value for name, value in asdict(alert).items() if value is not None}
            problem = deliver(self._notify, {"run": self._run.name, **fields}, deadline - time.monotonic())
            if problem:
                self._tell(f"warning: the alert was not delivered to {shown(self._notify)}: {problem}")


def check(alerts: Sequence[str], notify: str | None) -> None:
    """Raise ConfigError if a condition or the form of the notifier cannot be used."""
    for one in alerts:
        parse(one)
    if notify is None:
        return
    if not alerts:
        raise ConfigError(
            f"--notify {quoted(shown(notify))} has no effect without a condition: add --alert, as in "
            f"--alert 'worker lost'."
        )
    try:
        wrong = not urlsplit(notify).hostname if notify.startswith(_URL) else not shlex.split(notify)
    except ValueError:  # a quotation that is not closed, or a port that is not a number
        wrong = True
    if wrong:
        raise ConfigError(
            f"--notify {quoted(shown(notify))}: give a command, as in --notify './tell.sh --all', or a URL, as in "
            f"--notify https://host/path."
        )


def predicted(plan: SavedPlan | None, workers: int) -> list[str]:
    """Return the condition that the steps take longer than a plan has predicted for as many workers."""
    if plan is None or plan.workers != workers or plan.high is None:
        return []
    return [f"steps > {1000 * plan.high:.3f}ms"]


def check_command(notify: str | None) -> None:
    """Raise ConfigError if this machine, which has the coordinator, has no such command."""
    if notify is not None and not notify.startswith(_URL) and shutil.which(command := shlex.split(notify)[0]) is None:
        raise ConfigError(f"--notify {quoted(notify)}: there is no executable {quoted(command)} here.")


def shown(notify: str) -> str:
    """Return a command as it is, and a URL without its path and login, which may hold a secret.

    >>> shown("https://me:f00@host:8080/services/f00"), shown("./tell.sh --all")
    ('https://host:8080/***', './tell.sh --all')
    """
    if not notify.startswith(_URL):
        return notify
    scheme, _, rest = notify.partition("://")
    return f"{scheme}://{rest.partition('/')[0].rpartition('@')[2]}/***"


def deliver(notify: str, alert: Mapping[str, Any], seconds: float) -> str:
    """Give an alert to a command or a URL. Return what went wrong, empty if nothing did."""
    if seconds <= 0:
        return f"the alerts before it took {_SECONDS:g} s"
    if notify.startswith(_URL):
        return _post(notify, json.dumps(alert).encode(), seconds)
    variables = {f"PACELINE_ALERT_{name.upper()}": str(value) for name, value in alert.items()}
    return _run(shlex.split(notify), json.dumps(alert).encode(), {**env.inherited(), **variables}, seconds)


def _run(command: Sequence[str], data: bytes, environment: Mapping[str, str], seconds: float) -> str:
    """Run a command in its own process group, so that neither Ctrl-C nor a process that it leaves behind matters."""
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as printed:
        given.write(data)
        given.seek(0)
        try:
            process = subprocess.Popen(
                command, stdin=given, stdout=printed, stderr=printed, env=environment, start_new_session=True
            )
        except (OSError, ValueError) as error:
            return str(error)
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            return f"it had not ended after {seconds:.0f} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        printed.seek(0)
        lines = printed.read().decode(errors="replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "")
        return f"it ended with exit code {code}" + (f" and printed {quoted(last)}" if last else "") if code else ""


def _post(url: str, data: bytes, seconds: float) -> str:
    """Send a POST. A thread does so, because a server that answers slowly has no deadline otherwise."""
    result = [f"it had not answered after {seconds:.0f} s"]

    def send() -> None:
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=seconds):
                result[0] = ""
        except (OSError, HTTPException, ValueError) as error:
            result[0] = str(error)

    sender = threading.Thread(target=send, name="paceline-notify", daemon=True)
    sender.start()
    sender.join(seconds)
    return result[0]
