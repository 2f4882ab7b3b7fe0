"""Parameter servers (Li et al. 2014, OSDI 11): workers pull weights, compute, push gradients; servers make the updates.

::

    sync       worker 0  ▓▓▓▓ push ┐        ┌ pull ▓▓▓▓         one update from all shares of a batch
               worker 1  ▓▓▓▓▓▓ push ┴ update ┴ pull ▓▓▓▓

    async      worker 0  pull ▓▓▓ push┬update pull ▓▓▓ push┬update       each batch is one worker's, and one update
               worker 1  pull ▓▓▓▓▓▓▓▓▓▓▓ push┬update pull ▓▓▓▓▓▓        at once (Dean et al. 2012)

    bounded    as async, but who starts round r waits until all steps of the rounds up to r - s - 1 are applied
               (stale synchronous parallel: Ho et al. 2013, NIPS 26); a round is a step of each worker

The parameters are cut into ``server.count`` shards of whole tensors. With ``server.dedicated`` the first workers are
the servers and compute nothing; else whoever brings a gradient does the work of the servers itself. The modes are files
of their own: ``strategies.parameter_server.async_server`` (async and bounded),
``strategies.parameter_server.sync_server`` (sync).
"""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from paceline.data.feed import Piece
from paceline.errors import ConfigError
from paceline.settings import Settings
from paceline.step.job import Job, StepResult
from paceline.strategies.base import Strategy
from paceline.strategies.data_parallel.backup_workers import BackupWorkers
from paceline.strategies.parameter_server.async_server import DedicatedShards, SharedShards
from paceline.strategies.parameter_server.async_steps import SingleAsync, servers_among
from paceline.strategies.parameter_server.sync_server import SyncServer, SyncServerWithBackup


class ParameterServer(Strategy):
    """The strategy of the mode that is set."""

    bitwise: ClassVar[bool] = False
    replicated: ClassVar[bool] = False
    made_exact: ClassVar[str] = "server.mode = 'sync' without backup workers"
    reads: ClassVar[tuple[str, ...]] = ("server", "backup")

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._mode = _of(job.settings, job.world.size)(job)
        self.warnings = self._mode.warnings

    @classmethod
    def splits(cls, settings: Settings, workers: int) -> bool:
        return servers_among(settings, workers) > 1

    @classmethod
    def exact_with(cls, settings: Settings) -> bool:
        return settings.server.mode == "sync" and not settings.backup.workers

    @classmethod
    def check(cls, settings: Settings, model: nn.Module, workers: int) -> None:
        server = settings.server
        if settings.backup.workers:
            BackupWorkers.check(settings, model, workers)
            if server.mode != "sync" or server.dedicated:
                raise ConfigError(
                    f"backup.workers = {settings.backup.workers} is for steps that wait for workers, at servers inside "
                    f"them: use server.mode = 'sync' and server.dedicated = false, or leave it out."
                )
        trained = sum(parameter.requires_grad for parameter in model.parameters())
        if server.count > trained:
            raise ConfigError(
                f"server.count = {server.count} servers cannot share {trained} parameter"
                f"{'' if trained == 1 else 's'}: each holds whole ones. Use at most {trained}."
            )
        if workers > 1 and server.count >= workers + (not server.dedicated):
            kind, most = ("dedicated servers", workers - 1) if server.dedicated else ("servers", workers)
            raise ConfigError(
                f"server.count = {server.count} {kind} need more than {workers} workers"
                f"{', of whom some compute' if server.dedicated else ''}: use at most {most}, or more workers."
            )
        if server.mode == "sync" and (server.scale_lr or server.drop_after is not None):
            name = "scale_lr" if server.scale_lr else "drop_after"
            raise ConfigError(
                f"server.{name} is for gradients that come late, and with server.mode = 'sync' none does: leave it "
                f"out, or use mode 'async' or 'bounded'."
            )

    @classmethod
    def ignores(cls, settings: Settings) -> tuple[str, ...]:
        late = () if settings.backup.workers else ("backup.late",)
        return late if settings.server.mode == "bounded" else (*late, "server.staleness")

    @property
    def decided(self) -> bool:
        return self._mode.decided

    def pieces(self, step: int) -> list[range]:
        return self._mode.pieces(step)

    def step(self, step: int, pieces: list[Piece]) -> StepResult:
        return self._mode.step(step, pieces)

    def settle(self, steps: int) -> None:
        self._mode.settle(steps)

    def close(self) -> None:
        self._mode.close()


ParameterServer.alone = ParameterServer  # a single worker that is left does what others have left undone


def _of(settings: Settings, workers: int) -> type[Strategy]:
    backup = bool(settings.backup.workers)
    if workers == 1:
        return BackupWorkers if backup else SingleAsync
    if settings.server.mode == "sync":
        return SyncServerWithBackup if backup else SyncServer
    return DedicatedShards if settings.server.dedicated else SharedShards
