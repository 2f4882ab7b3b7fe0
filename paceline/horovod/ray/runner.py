"""``RayExecutor``: workers that stay from call to call, or an elastic run for each call."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from paceline.errors import ConfigError
from paceline.horovod.ray.ray_logger import Callback
from paceline.horovod.ray.slots import Slots, check_resources
from paceline.horovod.ray.workers import Wanted, Workers
from paceline.horovod.runner.hosts import check_counts, of_interfaces, warn_of

_T = TypeVar("_T")


@dataclass
class MiniSettings:
    """What :meth:`RayExecutor.create_settings` gives.

    Attributes:
        timeout_s: seconds that ``hvd.init`` waits for the other workers.
        placement_group_timeout_s: seconds that ``start`` waits for room.
        nics: network interfaces for gloo and NCCL.
        discovery: says which hosts there are, with ``override_discovery=False``.
    """

    timeout_s: int = 30
    placement_group_timeout_s: int = 100
    nics: Collection[str] | None = None
    discovery: Any = None

    def variables(self) -> dict[str, str]:
        """Those of the workers."""
        nics = of_interfaces(",".join(sorted(self.nics))) if self.nics else {}
        return {"HOROVOD_GLOO_TIMEOUT_SECONDS": str(self.timeout_s), **nics}


class RayExecutor:
    """Calls functions on workers on the nodes of a Ray cluster.

    With ``num_workers`` or ``num_hosts`` each worker is an actor, from :meth:`start` to :meth:`shutdown`: what one call
    leaves behind, as ``hvd.init`` does, is there in the next. With ``min_workers`` each call is an elastic run of its
    own, over :func:`paceline.launch`.

    Args:
        settings: of :meth:`create_settings`; None: the usual ones.
        num_workers: of all nodes together, on as few nodes as possible.
        num_hosts: of nodes, instead.
        num_workers_per_host: of each of them.
        cpus_per_worker: CPUs of Ray for each worker.
        use_gpu: whether workers get GPUs.
        gpus_per_worker: how many each; 1 by default.
        use_current_placement_group: whether the workers go into the placement group of this process, if it is in one.
        min_workers: of an elastic run, which waits for others below.
        max_workers: of an elastic run; as many as the cluster has room for when it starts, by default.
        reset_limit: without effect: a run ends after ten losses without a commit in between.
        cooldown_range: without effect: lost workers are replaced on the same node.
        elastic_timeout: seconds that an elastic run waits for workers below ``min_workers``.
        override_discovery: False: ``settings.discovery`` says how much room there is when an elastic run starts.

    Raises:
        ConfigError: an argument cannot be used.
    """

    @classmethod
    def create_settings(
        cls,
        timeout_s: int = 30,
        ssh_identity_file: str | None = None,
        ssh_str: str | None = None,
        placement_group_timeout_s: int = 100,
        nics: Collection[str] | None = None,
    ) -> MiniSettings:
        """Settings for an executor.

        Args:
            timeout_s: seconds that ``hvd.init`` waits for the other workers.
            ssh_identity_file: without effect: nothing is started by ssh.
            ssh_str: without effect; it is not written anywhere.
            placement_group_timeout_s: seconds that ``start`` waits for room.
            nics: network interfaces for gloo and NCCL.
        """
        warn_of("create_settings", {"ssh_identity_file": ssh_identity_file, "ssh_str": ssh_str})
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
        reset_limit: int | None = None,
        cooldown_range: Sequence[int] | None = None,
        elastic_timeout: int = 600,
        override_discovery: bool = True,
    ) -> None:
        counts = {"num_workers": num_workers, "num_hosts": num_hosts, "num_workers_per_host": num_workers_per_host}
        elastic = {"min_workers": min_workers, "max_workers": max_workers}
        check_counts("RayExecutor", counts | elastic)
        if sum(one is not None for one in (num_workers, num_hosts, min_workers)) != 1:
            raise ConfigError(
                f"RayExecutor: num_workers={num_workers}, num_hosts={num_hosts}, min_workers={min_workers}: give one "
                f"of the three; min_workers is for an elastic run."
            )
        if max_workers is not None and max_workers < (min_workers or max_workers + 1):
            raise ConfigError(f"RayExecutor: max_workers={max_workers}: give min_workers, too, and not more than that.")
        gpus = check_resources("RayExecutor", cpus_per_worker, use_gpu, gpus_per_worker)
        warn_of("RayExecutor", {"reset_limit": reset_limit, "cooldown_range": cooldown_range})
        self._settings = settings or MiniSettings()
        self._started: Workers | Slots | None = None
        if min_workers is not None:
            discovery = None if override_discovery else self._settings.discovery
            found = (min_workers, max_workers, cpus_per_worker, gpus, elastic_timeout, discovery)
            self._begin: Callable[..., Workers | Slots] = lambda *given: Slots("RayExecutor", *found, *given)
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
        """Start the workers; those of an elastic run start with each call.

        Args:
            executable_cls: each worker makes an object of it, which :meth:`execute` gives to functions.
            executable_args: of that class.
            executable_kwargs: of that class.
            extra_env_vars: variables of the environment of the workers.

        Raises:
            ConfigError: this process is not connected to Ray.
            StartError: there is no room in time, or a worker has not come up.
        """
        self.shutdown()
        self._started = self._begin({**self._settings.variables(), **(extra_env_vars or {})})
        if executable_cls is not None:
            self._started.make(executable_cls, tuple(executable_args or ()), dict(executable_kwargs or {}))

    def execute(self, fn: Callable[[Any], _T], callbacks: Sequence[Callback] | None = None) -> list[_T]:
        """Call a function with the executable on all workers, None without one; gives the results by rank.

        Args:
            fn: what each worker calls; it is sent by cloudpickle.
            callbacks: called here with each value that rank 0 gives to ``ray_logger.log`` meanwhile.

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
        """Call a function with these arguments on all workers; as :meth:`execute`."""
        return self.execute(without_executable(fn, args, kwargs), callbacks)

    def run_remote(
        self, fn: Callable[..., Any], args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """Call a function with these arguments on all workers, and do not wait: gives what ``ray.get`` takes, by rank.

        Raises:
            ConfigError: :meth:`start` was not called, or the run is elastic.
        """
        return self._staying("run_remote").submit("execute", without_executable(fn, args, kwargs))

    def execute_single(self, fn: Callable[[Any], _T]) -> _T:
        """Call a function with the executable of rank 0 alone; as :meth:`execute`."""
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
    """The call of a function as one of the executable, which it does not get."""
    given, named = tuple(args or ()), dict(kwargs or {})

    def called(executable: Any) -> _T:
        return fn(*given, **named)

    called.__name__ = getattr(fn, "__name__", called.__name__)
    return called
