"""Sample order and loading. :class:`Growing` and :class:`Located` are for scripts."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.data.growing.samples import Growing
    from paceline.data.located.shards import Located

__all__ = ["Growing", "Located"]

_HOMES = {"Growing": "growing.samples", "Located": "located.shards"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'paceline.data' has no attribute {name!r}")
    import_module("paceline.system.excepthook").install_early()
    return getattr(import_module(f"paceline.data.{_HOMES[name]}"), name)
