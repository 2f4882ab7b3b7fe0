"""``ElasticRayExecutor``: functions under ``hvd.elastic.run`` on as many workers as the cluster has room for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from paceline.horovod.ray.ray_logger import Callback
from paceline.horovod.ray.runner import MiniSettings, without_executable
from paceline.horovod.ray.slots import RayHostDiscovery, Slots, check_resources
from paceline.horovod.runner.hosts import check_counts, renamed, warn_of

__all__ = ["ElasticRayExecutor", "ElasticSettings", "RayHostDiscovery"]

_T = TypeVar("_T")


@dataclass
class ElasticSettings(MiniSettings):
    """What :meth:`ElasticRayExecutor.create_settings` gives.

    Attributes:
        min_num_proc: workers, below which a run waits for others.
        max_num_proc: workers; None: as many as the cluster has room for.
        elastic_timeout: seconds to wait for workers below the fewest.
    """

    min_num_proc: int = 1
    max_num_proc: int | None = None
    elastic_timeout: int = 600


class ElasticRayExecutor:
    """Calls functions on workers of a Ray cluster, which may be lost, and come later; each call is a run of its own.

    Args:
        settings: of :meth:`create_settings`.
        use_gpu: whether workers get GPUs.
        cpus_per_slot: CPUs of Ray for each worker.
        gpus_per_slot: GPUs for each worker; 1 by default.
        env_vars: variables of the environment of the workers.
        override_discovery: False: ``settings.discovery`` says how much room there is at the start.

    Raises:
        ConfigError: an argument cannot be used.
    """

    @staticmethod
    def create_settings(  # noqa: PLR0913 - the arguments are Horovod's
        min_num_proc: int = 1,
        max_num_proc: int | None = None,
        reset_limit: int | None = None,
        elastic_timeout: int = 600,
        timeout_s: int = 30,
        ssh_identity_file: str | None = None,
        nics: Collection[str] | None = None,
        min_np: int | None = None,
        max_np: int | None = None,
        **others: Any,
    ) -> ElasticSettings:
        """Settings for an executor.

        Args:
            min_num_proc: workers, below which a run waits for others.
            max_num_proc: workers at most; None: as many as the cluster has room for when a run starts.
            reset_limit: without effect: a run ends after ten losses without a commit in between.
            elastic_timeout: seconds to wait for workers below the fewest.
            timeout_s: seconds that ``hvd.init`` waits for the other workers.
            ssh_identity_file: without effect: nothing is started by ssh.
            nics: network interfaces for gloo and NCCL.
            min_np: the old name of ``min_num_proc``.
            max_np: the old name of ``max_num_proc``.
            others: without effect.

        Raises:
            ConfigError: a number of workers is none.
        """
        least = renamed("min_np", min_np, "min_num_proc", min_num_proc if min_num_proc != 1 else None)
        most = renamed("max_np", max_np, "max_num_proc", max_num_proc)
        check_counts("create_settings", {"min_num_proc": least, "max_num_proc": most})
        others.pop("verbose", None)  # the progress is always shown
        warn_of("create_settings", {"reset_limit": reset_limit, "ssh_identity_file": ssh_identity_file, **others})
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
        gpus = check_resources("ElasticRayExecutor", cpus_per_slot, use_gpu, gpus_per_slot)
        self._settings = settings
        self._resources = cpus_per_slot, gpus
        self._variables = {**settings.variables(), **(env_vars or {})}
        self._discovery = None if override_discovery else settings.discovery
        self._slots: Slots | None = None

    def start(self) -> None:
        """Find out how many workers there may be.

        Raises:
            ConfigError: this process is not connected to Ray.
        """
        known = self._settings
        limits = known.min_num_proc, known.max_num_proc
        seconds = known.elastic_timeout
        name = "ElasticRayExecutor"
        self._slots = Slots(name, *limits, *self._resources, seconds, self._discovery, self._variables)

    def run(self, worker_fn: Callable[[], _T], callbacks: Sequence[Callback] | None = None) -> list[_T]:
        """Call a function on all workers; gives the results of those that came to the end, by rank.

        Args:
            worker_fn: what each worker calls, with a function under ``hvd.elastic.run``; it is sent by cloudpickle.
            callbacks: called here with each value that rank 0 gives to ``ray_logger.log`` meanwhile.

        Raises:
            StartError: there is no room for the fewest workers in time.
            RunFailed: too many workers were lost. An exception of the function that ends the run is raised itself, with
                rank and traceback added.
        """
        if self._slots is None:
            self.start()
        assert self._slots is not None
        return self._slots.call(without_executable(worker_fn), tuple(callbacks or ()))
