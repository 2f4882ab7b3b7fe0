"""Sample order and loading. :class:`Growing` is for scripts."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.data.growing.samples import Growing

__all__ = ["Growing"]


def __getattr__(name: str) -> Any:
    if name != "Growing":
        raise AttributeError(f"module 'paceline.data' has no attribute {name!r}")
    import_module("paceline.system.excepthook").install_early()
    return import_module("paceline.data.growing.samples").Growing
