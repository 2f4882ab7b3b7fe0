"""``RayExecutor``: calls on workers that stay between calls, or an elastic run for each call."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from paceline.errors import ConfigError
from paceline.horovod.ray.ray_logger import Callback
from paceline.horovod.ray.slots import Slots
from paceline.horovod.ray.workers import Wanted, Workers
from paceline.horovod.runner.hosts import check_counts, check_others, worker_variables

_T = TypeVar("_T")


@dataclass
class MiniSettings:
    """Settings returned by :meth:`RayExecutor.create_settings`.

    Attributes:
        timeout_s: timeout in seconds for the other workers in ``hvd.init``. Defaults to 30.
        placement_group_timeout_s: timeout in seconds for Ray's resources in ``start``. Defaults to 100.
        nics: network interfaces for gloo and NCCL.
        discovery: object that finds hosts, used with ``override_discovery=False``.
    """

    timeout_s: int = 30
    placement_group_timeout_s: int = 100
    nics: Collection[str] | None = None
    discovery: Any = None

    def variables(self) -> dict[str, str]:
        """Return the environment variables of the workers."""
        return worker_variables(self.timeout_s, self.nics)


class RayExecutor:
    """Executor of functions on workers of a Ray cluster.

    With ``num_workers`` or ``num_hosts`` each worker is an actor that lives from :meth:`start` to :meth:`shutdown` and
    keeps its state between calls, such as the effect of ``hvd.init``. With ``min_workers`` each call is a separate
    elastic run by :func:`paceline.launch`.

    Args:
        settings: settings from :meth:`create_settings`. Defaults to its defaults.
        num_workers: total number of workers, on as few nodes as possible.
        num_hosts: number of nodes, instead of ``num_workers``.
        num_workers_per_host: number of workers per node with ``num_hosts``. Defaults to 1.
        cpus_per_worker: number of Ray CPUs per worker. Defaults to 1.
        use_gpu: whether workers get GPUs. Defaults to False.
        gpus_per_worker: number of GPUs per worker. Defaults to 1 with ``use_gpu``.
        use_current_placement_group: whether to use the placement group of this process, if any. Defaults to True.
        min_workers: minimum number of workers of an elastic run, below which it waits.
        max_workers: maximum number of workers of an elastic run. Defaults to the cluster's capacity at :meth:`start`.
        elastic_timeout: timeout in seconds for reaching ``min_workers`` in an elastic run. Defaults to 600.
        override_discovery: whether to ignore ``settings.discovery`` when an elastic run needs the number of slots.
        others: ``reset_limit`` and ``cooldown_range``, which have no effect. A run ends after ten losses without a
            commit in between, and lost workers are replaced on the same node.

    Raises:
        ConfigError: an argument cannot be used.
    """

    @classmethod
    def create_settings(
        cls,
        timeout_s: int = 30,
        *,
        placement_group_timeout_s: int = 100,
        nics: Collection[str] | None = None,
        **others: Any,
    ) -> MiniSettings:
        """Return :class:`MiniSettings`. Other arguments, for ssh, have no effect and are not written to any file."""
        check_others("create_settings", others, without={"ssh_identity_file"})
        return MiniSettings(timeout_s, placement_group_timeout_s, nics)

    def __init__(  # noqa: PLR0913 - the arguments are Horovod's
        self,
        settings: MiniSettings | None = None,
        num_workers: int | None = None,
        num_hosts: int | None = None,
        num_workers_per_host: int = 1,
        cpus_per_worker: int = 1,
        use_gpu: bool = False,
        gpus_per_worker: int | None = None,
        use_current_placement_group: bool = True,
        min_workers: int | None = None,
        max_workers: int | None = None,
        *,
        elastic_timeout: int = 600,
        override_discovery: bool = True,
        **others: Any,
    ) -> None:
        counts = {"num_workers": num_workers, "num_hosts": num_hosts, "num_workers_per_host": num_workers_per_host}
        counts |= {"min_workers": min_workers, "max_workers": max_workers}
        check_counts("RayExecutor", counts | {"cpus_per_worker": cpus_per_worker, "gpus_per_worker": gpus_per_worker})
        if sum(one is not None for one in (num_workers, num_hosts, min_workers)) != 1:
            raise ConfigError(
                f"RayExecutor: num_workers={num_workers}, num_hosts={num_hosts}, min_workers={min_workers}: give one "
                f"of the three; min_workers is for an elastic run."
            )
        if max_workers is not None and max_workers < (min_workers or max_workers + 1):
            raise ConfigError(f"RayExecutor: max_workers={max_workers}: give min_workers, too, and not more than that.")
        if gpus_per_worker and not use_gpu:
            raise ConfigError(f"RayExecutor: gpus_per_worker={gpus_per_worker}: give use_gpu=True, too.")
        gpus = (gpus_per_worker or 1) if use_gpu else 0
        check_others("RayExecutor", others)
        self._settings = settings or MiniSettings()
        self._started: Workers | Slots | None = None
        if min_workers is not None:
            discovery = None if override_discovery else self._settings.discovery
            found = (min_workers, max_workers, cpus_per_worker, gpus, elastic_timeout, discovery)
            self._begin: Callable[..., Workers | Slots] = lambda *given: Slots(*found, *given)
        else:
            workers = num_workers or (num_hosts or 1) * num_workers_per_host
            seconds = self._settings.placement_group_timeout_s
            wanted = Wanted(workers, num_hosts, cpus_per_worker, gpus, use_current_placement_group, seconds)
            self._begin = lambda *given: Workers(wanted, *given)

    def start(
        self,
        executable_cls: type | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
        extra_env_vars: Mapping[str, str] | None = None,
    ) -> None:
        """Start the workers. Workers of an elastic run start with each call instead.

        Args:
            executable_cls: class of an object that each worker creates and :meth:`execute` passes to functions.
            executable_args: positional arguments of the class.
            executable_kwargs: keyword arguments of the class.
            extra_env_vars: environment variables of the workers.

        Raises:
            ConfigError: this process is not connected to Ray.
            StartError: the cluster has no room before the timeout, or a worker did not start.
        """
        self.shutdown()
        self._started = self._begin({**self._settings.variables(), **(extra_env_vars or {})})
        if executable_cls is not None:
            self._started.make(executable_cls, tuple(executable_args or ()), dict(executable_kwargs or {}))

    def execute(self, fn: Callable[[Any], _T], callbacks: Sequence[Callback] | None = None) -> list[_T]:
        """Call a function with the executable, or None, on all workers, and return the results by rank.

        Args:
            fn: function that each worker calls, sent by cloudpickle.
            callbacks: called in this process with each value that rank 0 logs by ``ray_logger.log``.

        Raises:
            ConfigError: :meth:`start` was not called.
            RunFailed: a worker was lost. An exception of the function is raised itself, with rank and traceback added.
        """
        return self._running().call(fn, tuple(callbacks or ()))

    def run(
        self,
        fn: Callable[..., _T],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        callbacks: Sequence[Callback] | None = None,
    ) -> list[_T]:
        """Call a function with these arguments on all workers as :meth:`execute` does, and return the results."""
        return self.execute(without_executable(fn, args, kwargs), callbacks)

    def run_remote(
        self, fn: Callable[..., Any], args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """Start calls of a function with these arguments on all workers. Return references for ``ray.get``, by rank.

        Raises:
            ConfigError: :meth:`start` was not called, or the run is elastic.
        """
        return self._staying("run_remote").submit("execute", without_executable(fn, args, kwargs))

    def execute_single(self, fn: Callable[[Any], _T]) -> _T:
        """Call a function with the executable on rank 0 alone, and return its result."""
        found: _T = self._staying("execute_single").call_first(fn)
        return found

    def shutdown(self) -> None:
        """End the workers."""
        if isinstance(self._started, Workers):
            self._started.close()
        self._started = None

    def _running(self) -> Workers | Slots:
        if self._started is None or (isinstance(self._started, Workers) and not self._started.actors):
            raise ConfigError("RayExecutor: there are no workers: call start() before.")
        return self._started

    def _staying(self, method: str) -> Workers:
        started = self._running()
        if isinstance(started, Slots):
            raise ConfigError(
                f"RayExecutor.{method}: workers of an elastic run end with each call: use run or execute."
            )
        return started


def without_executable(
    fn: Callable[..., _T], args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None
) -> Callable[[Any], _T]:
    """Return a function that ignores its argument, the executable, and calls ``fn`` with these arguments."""
    given, named = tuple(args or ()), dict(kwargs or {})

    def called(executable: Any) -> _T:
        return fn(*given, **named)

    called.__name__ = getattr(fn, "__name__", called.__name__)
    return called
