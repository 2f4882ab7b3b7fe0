"""Horovod on Ray: a function on the nodes of the cluster that this process is connected to."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from paceline.errors import ConfigError
from paceline.horovod.runner.calls import call_on_workers
from paceline.horovod.runner.hosts import check_counts, of_interfaces, warn_of

__all__ = ["MiniSettings", "RayExecutor"]

_T = TypeVar("_T")


@dataclass
class MiniSettings:
    """What :meth:`RayExecutor.create_settings` gives.

    Attributes:
        timeout_s: seconds that ``hvd.init`` waits for the other workers.
        nics: network interfaces for gloo and NCCL.
    """

    timeout_s: int = 30
    nics: Collection[str] | None = None


class RayExecutor:
    """Calls functions on workers on the nodes of a Ray cluster, over :func:`paceline.launch`.

    The workers start with each call, and end with it: what one call leaves behind is not there in the next.

    Args:
        settings: of :meth:`create_settings`; None: the usual ones.
        num_workers: of all nodes together, on the fewest nodes with room for the same number each.
        num_hosts: of nodes, instead.
        num_workers_per_host: of each of them.
        cpus_per_worker: without effect: one for each.
        use_gpu: whether workers get GPUs.
        gpus_per_worker: how many each; 1 by default.
        use_current_placement_group: without effect: each call has a placement group of its own.
        min_workers: refused: for an elastic run use ``paceline run --horovod --on ray --elastic``.
        max_workers: refused, as well.
        reset_limit: without effect; so are the others of elastic runs.
        cooldown_range: without effect.
        elastic_timeout: without effect.
        override_discovery: without effect.

    Raises:
        ConfigError: an argument cannot be used.
    """

    @classmethod
    def create_settings(
        cls,
        timeout_s: int = 30,
        ssh_identity_file: str | None = None,
        ssh_str: str | None = None,
        placement_group_timeout_s: int | None = None,
        nics: Collection[str] | None = None,
    ) -> MiniSettings:
        """Settings for an executor.

        Args:
            timeout_s: seconds that ``hvd.init`` waits for the other workers.
            ssh_identity_file: without effect: nothing is started by ssh.
            ssh_str: without effect; it is not written anywhere.
            placement_group_timeout_s: without effect: a call waits ten minutes for room.
            nics: network interfaces for gloo and NCCL.
        """
        without = {"ssh_identity_file": ssh_identity_file, "ssh_str": ssh_str}
        warn_of("create_settings", {**without, "placement_group_timeout_s": placement_group_timeout_s})
        return MiniSettings(timeout_s, nics)

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
        if min_workers or max_workers:
            raise ConfigError(
                f"RayExecutor: min_workers={min_workers}, max_workers={max_workers}: for an elastic run use "
                f"`paceline run --horovod --on ray --elastic MIN:MAX`."
            )
        counts = {"num_workers": num_workers, "num_hosts": num_hosts, "num_workers_per_host": num_workers_per_host}
        check_counts("RayExecutor", counts)
        if (num_workers is None) == (num_hosts is None):
            raise ConfigError(
                f"RayExecutor: num_workers={num_workers}, num_hosts={num_hosts}: give one of the two, not both."
            )
        if gpus_per_worker and not use_gpu:
            raise ConfigError(f"RayExecutor: gpus_per_worker={gpus_per_worker}: give use_gpu=True, too.")
        without = {"cpus_per_worker": cpus_per_worker if cpus_per_worker != 1 else None, "reset_limit": reset_limit}
        warn_of("RayExecutor", {**without, "cooldown_range": cooldown_range})
        self._settings = settings or MiniSettings()
        self._workers = num_workers
        self._hosts = num_hosts, num_workers_per_host
        self._gpus = (gpus_per_worker or 1) if use_gpu else 0
        self._variables: dict[str, str] = {}
        self._place: tuple[int, int] | None = None

    def start(
        self,
        executable_cls: type | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
        extra_env_vars: Mapping[str, str] | None = None,
    ) -> None:
        """Decide how many workers run on how many nodes.

        Args:
            executable_cls: refused, as no object lives from one call to the next; make it in the function.
            executable_args: of that class.
            executable_kwargs: of that class.
            extra_env_vars: variables of the environment of the workers.

        Raises:
            ConfigError: this process is not connected to Ray, or its nodes have too few CPUs.
        """
        if executable_cls is not None:
            raise ConfigError(
                f"RayExecutor.start: executable_cls={executable_cls.__name__}: workers end with each call, and the "
                f"object would, too. Make it in the function that you give to run."
            )
        self._variables = dict(extra_env_vars or {})
        hosts, each = self._hosts
        self._place = (hosts, each) if hosts else _divided(self._workers or 1)

    def run(
        self,
        fn: Callable[..., _T],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        callbacks: Sequence[Callable[..., Any]] | None = None,
    ) -> list[_T]:
        """Call a function on all workers; gives the results by rank.

        Args:
            fn: what each worker calls; it is sent by cloudpickle.
            args: its arguments.
            kwargs: its named arguments.
            callbacks: refused.

        Raises:
            ConfigError: an argument cannot be used, or :meth:`start` was not called.
            StartError: there is no room on the nodes in time.
            RunFailed: a worker was lost. An exception of the function is raised itself, with rank and traceback added.
        """
        if callbacks:
            raise ConfigError("RayExecutor: callbacks have no counterpart here: leave them out.")
        return self._call("RayExecutor.run", fn, args, kwargs, *self._started())

    def execute(self, fn: Callable[[None], _T], callbacks: Sequence[Callable[..., Any]] | None = None) -> list[_T]:
        """Call a function of one argument, which is None, on all workers; as :meth:`run`."""
        return self.run(fn, [None], callbacks=callbacks)

    def execute_single(self, fn: Callable[[None], _T]) -> _T:
        """Call a function of one argument, which is None, on one worker, which is rank 0 of 1; as :meth:`run`."""
        self._started()
        results: list[_T] = self._call("RayExecutor.execute_single", fn, [None], None, 1, 1)
        return results[0]

    def shutdown(self) -> None:
        """Call nothing more until :meth:`start`."""
        self._place = None

    def _started(self) -> tuple[int, int]:
        if self._place is None:
            raise ConfigError("RayExecutor: call start() before.")
        return self._place

    def _call(self, name: str, fn: Callable[..., Any], args: Any, kwargs: Any, nodes: int, each: int) -> list[Any]:
        variables = {**self._variables, "HOROVOD_GLOO_TIMEOUT_SECONDS": str(self._settings.timeout_s)}
        if self._settings.nics:
            variables |= of_interfaces(",".join(sorted(self._settings.nics)))
        where = {"gpus": self._gpus * each} if self._gpus else {}
        return call_on_workers(name, fn, args, kwargs, variables, on="ray", nodes=nodes, workers=each, **where)


def _divided(workers: int) -> tuple[int, int]:
    """The fewest nodes that have CPUs for the same number of workers each, and that number.

    Raises:
        ConfigError: this process is not connected to Ray, or there are no such nodes.
    """
    try:
        import ray
    except ImportError:
        raise ConfigError("RayExecutor needs Ray: pip install 'paceline[ray]'.") from None
    if not ray.is_initialized():
        raise ConfigError("RayExecutor.start: this process is not connected to a cluster: call ray.init() before.")
    cpus = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
    for nodes in range(1, len(cpus) + 1):
        each, rest = divmod(workers, nodes)
        if not rest and sum(count >= each for count in cpus) >= nodes:
            return nodes, each
    raise ConfigError(
        f"RayExecutor: num_workers={workers}: the nodes have {', '.join(map(str, cpus))} CPUs, and no number of them "
        f"has one for each of the same number of workers."
    )
