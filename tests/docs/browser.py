"""Chromium without a window, driven over its DevTools protocol by pipes."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"


class Browser:
    """One tab. It keeps the requests and the complaints of the pages that it shows."""

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        (reads, self._to), (self._from, writes) = os.pipe(), os.pipe()
        command = [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", "--remote-debugging-pipe", "about:blank"]
        pipes = ["bash", "-c", f'exec "$@" 3<&{reads} 4>&{writes}', "bash", *command]
        self._process = subprocess.Popen(
            pipes, pass_fds=(reads, writes), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(reads)
        os.close(writes)
        self._buffer, self._number, self._session = b"", 0, ""
        self.events: list[str] = []
        self.requests: list[str] = []
        self.complaints: list[str] = []
        tabs = self.call("Target.getTargets")["targetInfos"]
        target = next(one["targetId"] for one in tabs if one["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setFocusEmulationEnabled", enabled=True)

    def call(self, method: str, **parameters: Any) -> Any:
        """Return the result of a method of the protocol."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while (answer := self._next(method)).get("id") != self._number:
            self._note(answer)
        assert "error" not in answer, (method, answer)
        return answer["result"]

    def open(self, url: str, width: int = 1300) -> None:
        """Show a page in a window of this width, and wait until it is loaded."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        self.events.clear()
        self.call("Page.navigate", url=url)
        while "Page.loadEventFired" not in self.events:
            self._note(self._next(f"the page {url}"))

    def run(self, script: str) -> Any:
        """Return the value of an expression, or of its promise, on the page."""
        found = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._to)
        os.close(self._from)

    def _note(self, message: dict[str, Any]) -> None:
        method, parameters = message.get("method", ""), message.get("params", {})
        self.events.append(method)
        if method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        if method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(parameters["exceptionDetails"]))
        if method == "Log.entryAdded" and parameters["entry"]["level"] in ("warning", "error"):
            self.complaints.append(json.dumps(parameters["entry"]))
        if method == "Runtime.consoleAPICalled" and parameters["type"] in ("warning", "error"):
            self.complaints.append(json.dumps(parameters["args"]))

    def _next(self, what: str, seconds: float = 120) -> dict[str, Any]:
        deadline = time.monotonic() + seconds
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._from], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"chromium did not answer within {seconds} s: {what}"
            received = os.read(self._from, 1 << 20)
            assert received, f"chromium has ended: {what}"
            self._buffer += received
        message, _, self._buffer = self._buffer.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found
