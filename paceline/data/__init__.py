"""Sample order and loading. :class:`Growing`, :class:`Located` and :func:`write_shards` are for scripts."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.data.growing.samples import Growing
    from paceline.data.located.shards import Located
    from paceline.data.tables.shards import write_shards

__all__ = ["Growing", "Located", "write_shards"]

_HOMES = {"Growing": "growing.samples", "Located": "located.shards", "write_shards": "tables.shards"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'paceline.data' has no attribute {name!r}")
    import_module("paceline.system.excepthook").install_early()
    return getattr(import_module(f"paceline.data.{_HOMES[name]}"), name)
