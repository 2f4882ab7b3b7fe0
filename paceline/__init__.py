"""Paceline trains a PyTorch model on many workers: one script, any number of workers, the same result."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.checkpoint.weights.deferred.model import deferred
    from paceline.checkpoint.weights.sparse_embedding import SparseEmbedding
    from paceline.cli.launch import launch
    from paceline.cli.planning.plan import plan
    from paceline.data.recurrent.token_rows import TokenRows
    from paceline.data.tables.parquet import ParquetDataset
    from paceline.errors import (
        CheckpointError,
        ConfigError,
        DisagreementError,
        InputError,
        NonFiniteLoss,
        PacelineError,
        RunFailed,
        StartError,
        WorkerLost,
        WorkerSilent,
    )
    from paceline.schedule.microbatch_orders import by_class, by_length, by_tokens, in_turn
    from paceline.session import Batch, Report, Session, start
    from paceline.settings import CheckpointSettings, Settings
    from paceline.step.gradients.outputs import Sum

__version__ = "0.2.0"

_HOMES = {
    "Batch": "session",
    "CheckpointError": "errors",
    "CheckpointSettings": "settings",
    "ConfigError": "errors",
    "DisagreementError": "errors",
    "InputError": "errors",
    "NonFiniteLoss": "errors",
    "PacelineError": "errors",
    "ParquetDataset": "data.tables.parquet",
    "Report": "session",
    "RunFailed": "errors",
    "Session": "session",
    "Settings": "settings",
    "SparseEmbedding": "checkpoint.weights.sparse_embedding",
    "StartError": "errors",
    "Sum": "step.gradients.outputs",
    "TokenRows": "data.recurrent.token_rows",
    "WorkerLost": "errors",
    "WorkerSilent": "errors",
    "by_class": "schedule.microbatch_orders",
    "by_length": "schedule.microbatch_orders",
    "by_tokens": "schedule.microbatch_orders",
    "deferred": "checkpoint.weights.deferred.model",
    "in_turn": "schedule.microbatch_orders",
    "launch": "cli.launch",
    "plan": "cli.planning.plan",
    "start": "session",
}

__all__ = [
    "Batch",
    "CheckpointError",
    "CheckpointSettings",
    "ConfigError",
    "DisagreementError",
    "InputError",
    "NonFiniteLoss",
    "PacelineError",
    "ParquetDataset",
    "Report",
    "RunFailed",
    "Session",
    "Settings",
    "SparseEmbedding",
    "StartError",
    "Sum",
    "TokenRows",
    "WorkerLost",
    "WorkerSilent",
    "by_class",
    "by_length",
    "by_tokens",
    "deferred",
    "in_turn",
    "launch",
    "plan",
    "start",
]


_CALLED = {"ParquetDataset", "TokenRows", "deferred", "launch", "plan", "start"}
"""Entry points of a script. Accessing one installs the exception hook that prints uncaught Paceline errors."""


def __getattr__(name: str) -> Any:
    if name == "data":
        return import_module("paceline.data")
    if name in _HOMES:
        if name in _CALLED:
            import_module("paceline.system.excepthook").install_early()
        return getattr(import_module(f"paceline.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'paceline' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
