"""Elastic runs on Ray: a worker wherever the cluster has room for one, over :func:`paceline.launch`.

::

    here         launcher ── coordinator
    each slot    actor ── paceline run -n 1 ── worker        Ray puts the actors of lost nodes where there is room
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial, update_wrapper
from pathlib import Path
from typing import Any

from paceline.environments import env
from paceline.errors import ConfigError
from paceline.horovod.ray import ray_logger
from paceline.horovod.ray.ray_logger import Callback, Folder, follow
from paceline.horovod.ray.workers import connected
from paceline.horovod.runner.calls import call_on_workers
from paceline.horovod.runner.hosts import check_counts

_RUNS = Path("runs")
_Executable = tuple[type, tuple[Any, ...], dict[str, Any]]


class RayHostDiscovery:
    """Finds the nodes of the cluster, and how many workers each has room for if it does nothing else.

    Args:
        use_gpu: whether workers get GPUs.
        cpus_per_slot: CPUs of each worker.
        gpus_per_slot: GPUs of each worker.
    """

    def __init__(self, use_gpu: bool = False, cpus_per_slot: int = 1, gpus_per_slot: int = 1) -> None:
        self._each = {"CPU": cpus_per_slot, **({"GPU": gpus_per_slot} if use_gpu else {})}

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """The number of workers by the address of the node, of nodes with room for one at least."""
        import ray

        found: dict[str, int] = {}
        for node in ray.nodes():
            slots = min(int(node["Resources"].get(name, 0) // count) for name, count in self._each.items())
            if node["alive"] and slots:
                address = node["NodeManagerAddress"]
                found[address] = found.get(address, 0) + slots
        return found


def check_resources(function: str, cpus: int, use_gpu: bool, gpus: int | None) -> int:
    """Check what each worker gets of Ray; gives the number of its GPUs.

    Raises:
        ConfigError: a number is none, or GPUs are asked for without ``use_gpu``.
    """
    check_counts(function, {"CPUs of each worker": cpus, "GPUs of each worker": gpus})
    if gpus and not use_gpu:
        raise ConfigError(f"{function}: {gpus} GPUs of each worker: give use_gpu=True, too.")
    return (gpus or 1) if use_gpu else 0


class Slots:
    """Calls functions on as many workers as there is room for, each call a run of its own.

    Args:
        name: of the executor, for errors.
        least: workers, below which the run waits.
        most: workers; None: as many as there is room for in the whole cluster now.
        cpus: of each worker.
        gpus: of each worker.
        seconds: to wait for workers below the least.
        discovery: what says how much room there is; None: Ray.
        variables: of the environment of the workers.

    Raises:
        ConfigError: this process is not connected to Ray.
    """

    def __init__(  # noqa: PLR0913 - what an executor is told
        self,
        name: str,
        least: int,
        most: int | None,
        cpus: int,
        gpus: int,
        seconds: float,
        discovery: Any,
        variables: Mapping[str, str],
    ) -> None:
        self._ray = connected(f"{name}.start")
        discovery = discovery or RayHostDiscovery(gpus > 0, cpus, gpus)
        most = max(least, sum(discovery.find_available_hosts_and_slots().values())) if most is None else most
        numbers = f"{least}:{most}"
        self._name = name
        self._gpus = gpus
        self._variables = variables
        self._where: dict[str, Any] = {"elastic": numbers, "nodes": numbers, "patience": seconds, "slot_cpus": cpus}
        if gpus:
            self._where["gpus"] = gpus
        self._executable: _Executable | None = None

    def make(self, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Let each worker make an object for the functions that it calls."""
        self._executable = cls, args, kwargs

    def call(self, function: Callable[[Any], Any], callbacks: Sequence[Callback]) -> list[Any]:
        """Call a function with the executable on all workers; gives the results by rank."""
        seen = ""
        if self._gpus:
            # all of a node, as a script takes that of its local rank; CUDA leaves out those that are not there
            count = max(int(node["Resources"].get("GPU", 0)) for node in self._ray.nodes())
            seen = ",".join(map(str, range(count)))
        with contextlib.ExitStack() as stack:
            folder = None
            if callbacks:
                _RUNS.mkdir(parents=True, exist_ok=True)
                path = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=".log-", dir=_RUNS))).absolute()
                folder = Folder(path)
                stack.enter_context(follow(folder, callbacks))
            task = update_wrapper(partial(_call, function, self._executable, folder, seen), function, ("__name__",), ())
            return call_on_workers(self._name, task, (), None, self._variables, on="ray", **self._where)


def _call(function: Callable[[Any], Any], executable: _Executable | None, folder: Folder | None, devices: str) -> Any:
    """In a worker."""
    if devices:
        env.put("CUDA_VISIBLE_DEVICES", devices)
    ray_logger.configure(folder)
    if executable is None:
        return function(None)
    cls, args, kwargs = executable
    return function(cls(*args, **kwargs))
