"""Records of a session for its trackers: settings and environment once, logged values, and evaluations."""

from __future__ import annotations

import logging
import platform
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.adapters.trackers import media, registry
from paceline.adapters.trackers.base import TrackedRun
from paceline.adapters.trackers.feed import Feed
from paceline.config import flat
from paceline.environments import env
from paceline.events import EventLog
from paceline.settings import Settings
from paceline.system.masking import mask

_log = logging.getLogger("paceline")


class Tracking:
    """Interface between a session and its trackers. Raises ConfigError if a tracker's package is not installed."""

    def __init__(
        self, settings: Settings, sources: Mapping[str, str], events: EventLog, run: Path | None, number: int
    ) -> None:
        names = () if env.is_rehearsal() else settings.trackers
        registry.check(names)
        self._settings, self._sources, self._events = settings, sources, events
        self._suffix = f"-{number}" if number > 1 else ""
        self._name = (settings.tracking.name or (run.name if run else script().stem)) + self._suffix
        self._directory = settings.tracking.directory or (run / "trackers" if run else Path("trackers"))
        self._media = run / f"media{self._suffix}" if run else None
        self._warned = False
        self._feed: Feed | None = None
        if names:
            self._feed = Feed(names, run / "events" if run else None)
            events.attach(self._feed)

    def begin(self, run_id: str, position: int, environment: Mapping[str, object]) -> None:
        """Start the trackers after the rendezvous.

        Args:
            run_id: ID that all continuations of a run share. Empty if the run cannot be continued.
        """
        if self._feed is None:
            return
        run_id = run_id or secrets.token_hex(8)
        folder = (self._directory / f"{self._name}-{run_id[:8]}").absolute()
        self._media = self._media or folder / "media"
        settings = {name: masked(value) for name, value in flat(self._settings).items()}
        about = {"script": str(script()), "host": platform.node(), **environment}
        tracked = TrackedRun(
            *(run_id, self._settings.tracking.project, self._name, self._directory.absolute(), folder, position),
            *(settings, self._sources, about),
        )
        self._feed.begin(tracked, self._events.rank == 0)

    def log(self, values: Mapping[str, Any], step: int) -> None:
        """Record values of the script. Ranks above 0 record only numbers, in case rank 0 is lost before it sends them.

        Raises:
            InputError: a name or a value cannot be recorded.
        """
        logged = media.sort_out(values)
        if self._events.rank != 0:
            if logged.scalars:
                self._events.mark("metrics", step=step, metrics=logged.scalars)
            return
        paths: dict[str, dict[str, str]] = {}
        if self._media is None:
            self._warn("nothing records the values of session.log: set trackers, or start with paceline run")
        elif logged.texts or logged.images:
            try:
                paths = logged.write(self._media, step)
            except OSError as error:
                self._warn(f"session.log could not write to {self._media}: {error}")
        self._events.mark("metrics", step=step, metrics=logged.scalars, **paths)
        if paths:
            self._events.flush()  # other workers record numbers in case rank 0 is killed, but no files

    def evaluated(self, metric: object, value: float | Mapping[str, float], step: int) -> None:
        """Record the result of an evaluation under the name of its metric. None stands for the loss."""
        name = getattr(metric, "__name__", None) or ("loss" if metric is None else type(metric).__name__)
        values = value if isinstance(value, Mapping) else {str(name): value}
        self._events.mark("evaluation", step=step, metrics={f"evaluation.{name}": one for name, one in values.items()})

    def _warn(self, text: str) -> None:
        if not self._warned:
            self._warned = True
            _log.warning(text)


def script() -> Path:
    return Path(getattr(sys.modules.get("__main__"), "__file__", None) or "session")


def masked(value: object) -> object:
    """Return a value with its secrets masked, such as the login of a URL."""
    return mask([value])[0] if isinstance(value, str) else value
