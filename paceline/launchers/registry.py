"""Launchers by name."""

from __future__ import annotations

from paceline.errors import ConfigError
from paceline.launchers.base import Launcher
from paceline.launchers.local.launcher import LocalLauncher

LAUNCHERS: dict[str, type[Launcher]] = {"local": LocalLauncher}


def register(name: str, launcher: type[Launcher]) -> None:
    """Register a launcher, and replace any launcher with the same name."""
    LAUNCHERS[name] = launcher


def launcher_named(name: str) -> type[Launcher]:
    """Return the launcher class with this name. Raises ConfigError if no launcher has this name."""
    if name not in LAUNCHERS:
        raise ConfigError(
            f"There is no launcher {name!r}. The launchers are: {', '.join(sorted(LAUNCHERS))}. One of your own must "
            f"be registered in the process of `paceline run`; CONTRIBUTING.md says how."
        )
    return LAUNCHERS[name]
