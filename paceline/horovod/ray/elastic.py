"""``ElasticRayExecutor``: elastic runs with as many workers as the cluster has room for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from paceline.horovod.ray.ray_logger import Callback
from paceline.horovod.ray.runner import MiniSettings, RayExecutor
from paceline.horovod.ray.slots import RayHostDiscovery
from paceline.horovod.runner.hosts import check_counts, check_others, renamed

__all__ = ["ElasticRayExecutor", "ElasticSettings", "RayHostDiscovery"]

_T = TypeVar("_T")


@dataclass
class ElasticSettings(MiniSettings):
    """Settings returned by :meth:`ElasticRayExecutor.create_settings`, whose arguments are its attributes."""

    min_num_proc: int = 1
    max_num_proc: int | None = None
    elastic_timeout: int = 600


class ElasticRayExecutor:
    """Executor of functions on a Ray cluster whose workers may be lost and join. Each call is a separate run.

    Args:
        settings: settings from :meth:`create_settings`.
        use_gpu: whether workers get GPUs. Defaults to False.
        cpus_per_slot: number of Ray CPUs per worker. Defaults to 1.
        gpus_per_slot: number of GPUs per worker. Defaults to 1 with ``use_gpu``.
        env_vars: environment variables of the workers.
        override_discovery: whether to ignore ``settings.discovery`` when the number of slots is found at the start.

    Raises:
        ConfigError: an argument cannot be used.
    """

    @staticmethod
    def create_settings(
        min_num_proc: int | None = None,
        max_num_proc: int | None = None,
        *,
        elastic_timeout: int = 600,
        timeout_s: int = 30,
        nics: Collection[str] | None = None,
        **others: Any,
    ) -> ElasticSettings:
        """Return settings for an executor.

        Args:
            min_num_proc: minimum number of workers, below which a run waits. Defaults to 1.
            max_num_proc: maximum number of workers. Defaults to the capacity of the cluster at :meth:`start`.
            elastic_timeout: timeout in seconds for reaching ``min_num_proc`` workers. Defaults to 600.
            timeout_s: timeout in seconds for the other workers in ``hvd.init``. Defaults to 30.
            nics: network interfaces for gloo and NCCL.
            others: the deprecated ``min_np`` and ``max_np``. Others have no effect. A run ends after ten losses without
                a commit in between, and nothing is started by ssh.

        Raises:
            ConfigError: a number of workers is not a positive integer.
        """
        least = renamed(others, "min_np", "min_num_proc", min_num_proc)
        most = renamed(others, "max_np", "max_num_proc", max_num_proc)
        check_counts("create_settings", {"min_num_proc": least, "max_num_proc": most})
        others.pop("verbose", None)  # progress is always shown
        check_others("create_settings", others, without=others)
        return ElasticSettings(
            timeout_s=timeout_s,
            nics=nics,
            min_num_proc=1 if least is None else least,
            max_num_proc=most,
            elastic_timeout=elastic_timeout,
        )

    def __init__(
        self,
        settings: ElasticSettings,
        use_gpu: bool = False,
        cpus_per_slot: int = 1,
        gpus_per_slot: int | None = None,
        env_vars: Mapping[str, str] | None = None,
        override_discovery: bool = True,
    ) -> None:
        self._executor = RayExecutor(
            settings,
            min_workers=settings.min_num_proc,
            max_workers=settings.max_num_proc,
            cpus_per_worker=cpus_per_slot,
            use_gpu=use_gpu,
            gpus_per_worker=gpus_per_slot,
            elastic_timeout=settings.elastic_timeout,
            override_discovery=override_discovery,
        )
        self._variables = env_vars
        self._started = False

    def start(self) -> None:
        """Determine the maximum number of workers from the cluster, unless the settings give it.

        Raises:
            ConfigError: this process is not connected to Ray.
        """
        self._executor.start(extra_env_vars=self._variables)
        self._started = True

    def run(self, worker_fn: Callable[[], _T], callbacks: Sequence[Callback] | None = None) -> list[_T]:
        """Call a function on all workers, and return the results of those that finished, by rank.

        Args:
            worker_fn: function that calls another function under ``hvd.elastic.run``, sent by cloudpickle.
            callbacks: called in this process with each value that rank 0 logs by ``ray_logger.log``.

        Raises:
            StartError: there is no room for the minimum number of workers before the timeout.
            RunFailed: too many workers were lost. An exception of the function that ends the run is raised itself, with
                rank and traceback added.
        """
        if not self._started:
            self.start()
        return self._executor.run(worker_fn, callbacks=callbacks)
