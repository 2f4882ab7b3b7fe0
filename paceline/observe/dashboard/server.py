"""Server of the dashboard: one page, the data of its views, and metrics for Prometheus. It only reads.

::

    http://127.0.0.1:PORT/TOKEN/                   the page and its files
    http://127.0.0.1:PORT/TOKEN/runs               names of the runs
    http://127.0.0.1:PORT/TOKEN/runs/0/heat?what=  data of a view of the first run
    http://127.0.0.1:PORT/TOKEN/metrics            state of all runs

Only a client that knows the token can read the runs: a page on another site cannot know the address. A request that
names another host is refused, because it may come from a page that has changed its address (DNS rebinding).
"""

from __future__ import annotations

import hmac
import json
import sqlite3
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.parse import parse_qs, urlsplit

from paceline.errors import ConfigError, InputError
from paceline.observe.dashboard import views
from paceline.observe.index import RecordIndex, Search, finite
from paceline.observe.why.at_end import find_at_end

_FILES = {
    "": ("page.html", "text/html"),
    "dashboard.js": ("dashboard.js", "text/javascript"),
    "dashboard.css": ("dashboard.css", "text/css"),
    "uPlot.js": ("uPlot.js", "text/javascript"),
    "uPlot.css": ("uPlot.css", "text/css"),
    "grafana.json": ("grafana.json", "application/json"),
}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
_LOCAL = ("127.0.0.1", "localhost")
_FRESH_SECONDS = 1.0
_QUIET_SECONDS = 30.0  # time after which a connection without a request is closed


class Run:
    """Run on the dashboard. Its index of records is opened when the run is first shown."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock, self._at = Lock(), -_FRESH_SECONDS

    @cached_property
    def _index(self) -> RecordIndex:
        return RecordIndex(self.folder)

    def view(self, name: str, options: dict[str, str]) -> Any:
        """Return the data of a view.

        Raises:
            InputError: the run has no records.
        """
        with self._used() as index:
            if name == "summary":
                return views.summary(index, find_at_end(self.folder))
            if name == "heat":
                return views.heat(index, options.get("what", "own"))
            if name == "logs":
                return views.logs(index, _search(options))
            if name in views.VIEWS:
                return views.VIEWS[name](index)
        raise ConfigError(f"There is no view {name!r}.")

    def state(self) -> dict[str, float]:
        """Return the values for Prometheus. Empty if the run has no records."""
        with suppress(InputError), self._used() as index:
            return views.state(index)
        return {}

    @contextmanager
    def _used(self) -> Iterator[RecordIndex]:
        """Return a context in which only this thread uses the index.

        The index may lack the records of the last second, because the page asks for many views together.
        """
        with self._lock:
            if time.monotonic() - self._at >= _FRESH_SECONDS:
                self._index.update()
                self._at = time.monotonic()
            try:
                yield self._index
            except sqlite3.Error as error:
                raise InputError(f"The index of {self.folder} cannot be read: {error}.") from None


class Dashboard(ThreadingHTTPServer):
    """HTTP server of the dashboard.

    Args:
        runs: directories of the runs, in the order in which the page lists them.
        address: host and port to listen on. Port 0 picks a free port.
        token: first part of each address. A request without it is refused.

    Raises:
        OSError: the address is in use.
    """

    daemon_threads = True

    def __init__(self, runs: Sequence[Path], address: tuple[str, int], token: str) -> None:
        self.runs = [Run(folder) for folder in runs]
        self.token = token
        super().__init__(address, _Handler)
        self._host = address[0]

    def knows(self, host: str) -> bool:
        """Return whether a request is for this server. True for any name if the server listens to other machines.

        The port is not compared, because a tunnel may use a different one.
        """
        return self._host not in _LOCAL or host.rpartition(":")[0] in _LOCAL or host in _LOCAL

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report an error in a request, unless the browser has closed the connection."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    @property
    def url(self) -> str:
        """Address of the page."""
        return f"http://{self._host}:{self.server_port}/{self.token}/"


class _Handler(BaseHTTPRequestHandler):
    server: Dashboard
    timeout = _QUIET_SECONDS

    def do_GET(self) -> None:
        if not self.server.knows(self.headers.get("Host", "")):
            self._send(HTTPStatus.FORBIDDEN, b"This server answers at its own address only.\n")
            return
        path, query = urlsplit(self.path).path, urlsplit(self.path).query
        token, *rest = path.lstrip("/").split("/")
        if not hmac.compare_digest(token.encode(), self.server.token.encode()) or not rest:
            self._send(HTTPStatus.FORBIDDEN, b"The address lacks the token that paceline dashboard has printed.\n")
            return
        try:
            self._answer(rest, {name: values[-1] for name, values in parse_qs(query).items()})
        except (ConfigError, InputError) as error:  # before anything was sent
            self._send(HTTPStatus.BAD_REQUEST, json.dumps({"error": str(error)}).encode(), "application/json")

    def _answer(self, parts: list[str], options: dict[str, str]) -> None:
        runs = self.server.runs
        if len(parts) == 1 and parts[0] in _FILES:
            name, kind = _FILES[parts[0]]
            self._send(HTTPStatus.OK, files("paceline.observe.dashboard").joinpath("page", name).read_bytes(), kind)
        elif parts == ["runs"]:
            self._send_json([{"name": run.folder.name, "folder": str(run.folder)} for run in runs])
        elif parts == ["metrics"]:
            known = {run.folder.name if _is_alone(run, runs) else str(run.folder): run.state() for run in runs}
            self._send(HTTPStatus.OK, views.metrics(known).encode(), "text/plain; version=0.0.4")
        elif len(parts) == 3 and parts[0] == "runs" and parts[1].isdecimal() and int(parts[1]) < len(runs):
            self._send_json(runs[int(parts[1])].view(parts[2], options))
        else:
            self._send(HTTPStatus.NOT_FOUND, b"There is nothing at this address.\n")

    def _send_json(self, value: Any) -> None:
        self._send(HTTPStatus.OK, json.dumps(finite(value), allow_nan=False).encode(), "application/json")

    def _send(self, status: HTTPStatus, content: bytes, kind: str = "text/plain") -> None:
        self.send_response(status)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Print nothing, because the addresses contain the token."""


def _is_alone(run: Run, runs: Sequence[Run]) -> bool:
    return sum(one.folder.name == run.folder.name for one in runs) == 1


def _search(options: dict[str, str]) -> Search:
    """Parse the options of a request into a search. Raises ConfigError if a number cannot be read.

    >>> _search({"rank": "1", "steps": "3:5", "slower": "0.5"})
    Search(ranks=('1',), events=(), steps=range(3, 5), slower_than=0.5, text='')
    """
    first, _, stop = options.get("steps", "").partition(":")
    try:
        steps = None
        if first or stop:
            start = int(first or 0)
            steps = range(start, int(stop) if stop else start + 1)
        slower = float(options["slower"]) if options.get("slower") else None
        if steps is not None and steps.stop > 1 << 62:
            raise ValueError
    except ValueError:
        raise ConfigError("steps are a number or a range such as 800:820, and slower is a number of seconds.") from None
    text = options.get("text", "").replace("\0", "")
    ranks, events = ((options[name],) if options.get(name) else () for name in ("rank", "event"))
    return Search(ranks=ranks, events=events, steps=steps, slower_than=slower, text=text)
