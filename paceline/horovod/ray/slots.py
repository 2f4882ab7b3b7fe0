"""Elastic runs on Ray by :func:`paceline.launch`, with a worker wherever the cluster has room.

::

    driver       launcher ── coordinator
    each slot    actor ── paceline run -n 1 ── worker        Ray restarts the actors of lost nodes where it has room
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial, update_wrapper
from pathlib import Path
from typing import Any

from paceline.environments import env
from paceline.horovod.ray import ray_logger
from paceline.horovod.ray.ray_logger import Callback, Folder, follow
from paceline.horovod.ray.workers import connected
from paceline.horovod.runner.calls import call_on_workers

_RUNS = Path("runs")
_Executable = tuple[type, tuple[Any, ...], dict[str, Any]]


class RayHostDiscovery:
    """Discovery of the cluster's nodes and the number of workers that each holds when it is otherwise idle.

    Args:
        use_gpu: whether workers get GPUs. Defaults to False.
        cpus_per_slot: number of CPUs per worker. Defaults to 1.
        gpus_per_slot: number of GPUs per worker. Defaults to 1.
    """

    def __init__(self, use_gpu: bool = False, cpus_per_slot: int = 1, gpus_per_slot: int = 1) -> None:
        self._each = {"CPU": cpus_per_slot, **({"GPU": gpus_per_slot} if use_gpu else {})}

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Return the number of workers by node address, for nodes that have room for a worker."""
        import ray

        found: dict[str, int] = {}
        for node in ray.nodes():
            slots = min(int(node["Resources"].get(name, 0) // count) for name, count in self._each.items())
            if node["alive"] and slots:
                address = node["NodeManagerAddress"]
                found[address] = found.get(address, 0) + slots
        return found


class Slots:
    """Calls of functions on as many workers as the cluster has room for. Each call is a separate run.

    Args:
        least: minimum number of workers, below which the run waits.
        most: maximum number of workers. None means the capacity of the whole cluster at this time.
        seconds: timeout for reaching ``least`` workers.
        discovery: object that finds hosts and their slots. Defaults to :class:`RayHostDiscovery`.
    """

    def __init__(
        self,
        least: int,
        most: int | None,
        cpus: int,
        gpus: int,
        seconds: float,
        discovery: Any,
        variables: Mapping[str, str],
    ) -> None:
        self._ray = connected("RayExecutor.start")
        discovery = discovery or RayHostDiscovery(gpus > 0, cpus, gpus)
        most = max(least, sum(discovery.find_available_hosts_and_slots().values())) if most is None else most
        numbers = f"{least}:{most}"
        self._gpus, self._variables = gpus, variables
        self._where: dict[str, Any] = {"elastic": numbers, "nodes": numbers, "patience": seconds, "slot_cpus": cpus}
        if gpus:
            self._where["gpus"] = gpus
        self._executable: _Executable | None = None

    def make(self, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Store the class of the object that each worker creates for the functions it calls."""
        self._executable = cls, args, kwargs

    def call(self, function: Callable[[Any], Any], callbacks: Sequence[Callback]) -> list[Any]:
        """Call a function with the executable on all workers, and return the results by rank."""
        seen = ""
        if self._gpus:
            # all GPUs of a node, because a script selects by local rank; CUDA stops at an index that does not exist
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
            return call_on_workers("RayExecutor", task, (), None, self._variables, on="ray", **self._where)


def _call(function: Callable[[Any], Any], executable: _Executable | None, folder: Folder | None, devices: str) -> Any:
    """Configure a worker and call the function in it."""
    if devices:
        env.put("CUDA_VISIBLE_DEVICES", devices)
    ray_logger.configure(folder)
    if executable is None:
        return function(None)
    cls, args, kwargs = executable
    return function(cls(*args, **kwargs))
