"""Actors of an executor: one for each worker, from ``start`` to ``shutdown``.

::

    driver       start ── execute ───────────── execute ── shutdown
    rank 0       actor ── hvd.init, function ── function ── ✗        holds the store of the rendezvous
    rank 1       actor ── hvd.init, function ── function ── ✗
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from queue import Empty
from typing import Any

from paceline.environments.start import Identity
from paceline.errors import ConfigError, RunFailed, StartError, name_ranks
from paceline.horovod.errors import HorovodInternalError
from paceline.horovod.ray.ray_logger import Callback, call
from paceline.horovod.ray.worker import BaseHorovodWorker

_START_SECONDS = 600.0  # timeout for the start of an actor, whose environment may have to be installed
_CAUSE_SECONDS = 5.0
"""Time for the other actors to end after a failure: one may know the cause, and the rest would keep waiting."""
_POLL_SECONDS = 0.1
_COLOR = re.compile(r"\x1b\[\d+m")


@dataclass(frozen=True)
class Wanted:
    """Resources that an executor requests from Ray."""

    workers: int  # total number of workers
    # number of nodes, each with the same number of workers. None packs workers on any nodes if possible.
    hosts: int | None
    cpus: int  # number of CPUs per worker
    gpus: int  # number of GPUs per worker
    inherit: bool  # whether to use the placement group of this process, if any
    seconds: float  # timeout for the resources


class NoRoom(StartError, TimeoutError):
    """Timeout because the cluster has no room for the workers. A TimeoutError, too, as in Horovod."""


def connected(function: str) -> Any:
    """Return the module ``ray`` after checking that this process is connected to a cluster."""
    try:
        import ray
    except ImportError:
        raise ConfigError(f"{function} needs Ray: pip install 'paceline[ray]'.") from None
    if not ray.is_initialized():
        raise ConfigError(f"{function}: this process is not connected to a cluster: call ray.init() before.")
    return ray


class Workers:
    """Actors that run functions, started on creation."""

    def __init__(self, wanted: Wanted, variables: Mapping[str, str]) -> None:
        self._ray = connected("RayExecutor.start")
        self._wanted = wanted
        self._group: Any = None
        self._addresses: list[str] = []
        self.actors: list[Any] = []  # actors by rank. Empty after :meth:`close`.
        try:
            self._place()
            self._identify(variables)
        except BaseException:
            self.close()
            raise

    def _place(self) -> None:
        from ray.util import get_current_placement_group, placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        wanted = self._wanted
        own = get_current_placement_group() if wanted.inherit else None
        each = wanted.workers // (wanted.hosts or wanted.workers)
        if (group := own) is None:
            bundles = [_resources(wanted, each)] * (wanted.workers // each)
            self._group = group = placement_group(bundles, strategy="STRICT_SPREAD" if wanted.hosts else "PACK")
            if not group.wait(wanted.seconds):
                raise NoRoom(self._shortage(bundles))
        kind: Any = self._ray.remote(BaseHorovodWorker)
        for rank in range(wanted.workers):
            strategy = PlacementGroupSchedulingStrategy(group, rank // each if own is None else -1)
            options = {"num_cpus": wanted.cpus, "num_gpus": wanted.gpus, "scheduling_strategy": strategy}
            self.actors.append(kind.options(**options).remote(rank, wanted.workers))

    def _shortage(self, bundles: list[dict[str, float]]) -> str:
        """Return a message about the requested and the available resources."""
        nodes = [node for node in self._ray.nodes() if node["Alive"]]
        there = "; ".join(f"{node['NodeManagerAddress']} with {_words(node['Resources'])}" for node in nodes)
        where = "each on a node of its own" if self._wanted.hosts else "together"
        return (
            f"RayExecutor: {len(bundles)} x {_words(bundles[0])} asked for, {where}; there: {there}; free: "
            f"{_words(self._ray.available_resources())}; no room came within {self._wanted.seconds:g} s "
            f"(placement_group_timeout_s)."
        )

    def _identify(self, variables: Mapping[str, str]) -> None:
        """Send each worker its identity, its environment variables and the address of the store."""
        places = self._ask("come up", [(rank, actor.node.remote()) for rank, actor in enumerate(self.actors)])
        self._addresses = [address for _, address in places]
        nodes: dict[str, list[int]] = {}
        for rank, (node, _) in enumerate(places):
            nodes.setdefault(node, []).append(rank)
        host = self._addresses[0]
        (port,) = self._ask("open its store", [(0, self.actors[0].open_store.remote(host))])
        told = [(rank, actor.update_env_vars.remote(variables)) for rank, actor in enumerate(self.actors)]
        for ranks in nodes.values():
            for place, rank in enumerate(ranks):
                who = Identity(rank, len(self.actors), place, len(ranks))
                told.append((rank, self.actors[rank].identify.remote(who, host, port)))
        if self._wanted.gpus:
            asked = [(rank, actor.get_gpu_ids.remote()) for rank, actor in enumerate(self.actors)]
            given = self._ask("name its GPUs", asked)
            # each worker sees the GPUs of all workers on its node, in the order of local ranks
            for ranks in nodes.values():
                seen = {"CUDA_VISIBLE_DEVICES": ",".join(one for rank in ranks for one in given[rank])}
                told += [(rank, self.actors[rank].update_env_vars.remote(seen)) for rank in ranks]
        self._ask("take its variables", told)

    def _ask(self, doing: str, asked: list[tuple[int, Any]]) -> list[Any]:
        """Return the answers of actors, given with their ranks, to calls at the start."""
        answers = [answer for _, answer in asked]
        _, missing = self._ray.wait(answers, num_returns=len(answers), timeout=_START_SECONDS)
        if missing:
            late = {rank for rank, answer in asked if answer in missing}
            raise StartError(
                f"RayExecutor: {name_ranks(late)} of {len(self.actors)} did not {doing} within {_START_SECONDS:.0f} s. "
                f"`ray status` shows the pending requests of the cluster."
            )
        found = []
        for rank, answer in asked:
            try:
                found.append(self._ray.get(answer))
            except self._ray.exceptions.RayError as error:
                text = _COLOR.sub("", str(error))
                raise StartError(f"RayExecutor: rank {rank} of {len(self.actors)} did not {doing}: {text}") from None
        return found

    def submit(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method on all actors, and return the references to its results."""
        sent = [self._ray.put(one) for one in arguments]  # once, not for each actor
        return [getattr(actor, method).remote(*sent) for actor in self.actors]

    def make(self, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Create the object that functions get in each actor. Errors are raised as in :meth:`call`."""
        self._results(self.submit("start_executable", cls, args, kwargs))

    def call(self, function: Callable[[Any], Any], callbacks: Sequence[Callback]) -> list[Any]:
        """Call a function on all actors, and return its results by rank.

        After a failure on one actor, the others have 5 seconds to end, too. All actors are ended if one of them does
        not, if one was lost, or if the wait is interrupted.

        Args:
            function: function that gets the object that the actor has created, or None.
            callbacks: called in this process with values that workers log during the call.

        Raises:
            RunFailed: a worker was lost. An exception is raised itself, with the rank and its traceback added.
        """
        from ray.util.queue import Queue

        queue = Queue(actor_options={"num_cpus": 0}) if callbacks else None
        try:
            self.submit("set_queue", queue)
            return self._results(self.submit("execute", function), callbacks, queue)
        finally:
            if queue is not None:
                queue.shutdown(force=True)

    def call_first(self, function: Callable[[Any], Any]) -> Any:
        """Call a function with the executable on rank 0 alone, and return its result."""
        return self._results([self.actors[0].execute.remote(function)])[0]

    def _results(self, answers: list[Any], callbacks: Sequence[Callback] = (), queue: Any = None) -> list[Any]:
        """Return the results of actors. Until then, call the callbacks with the values in the queue."""
        left, failures = list(answers), dict[int, Exception]()
        try:
            while left and not failures:
                done, left = self._ray.wait(left, timeout=None if queue is None else _POLL_SECONDS)
                failures = self._failures(answers, done)
                call(callbacks, _taken(queue))
            if left:
                done, left = self._ray.wait(left, num_returns=len(left), timeout=_CAUSE_SECONDS)
                failures |= self._failures(answers, done)
            if failures:
                raise self._cause(failures, [rank for rank, one in enumerate(answers) if one in left])
        finally:
            if left or not all(map(self._is_raised, failures.values())):
                self.close()
        call(callbacks, _taken(queue))
        return list(self._ray.get(answers))

    def _is_raised(self, error: Exception) -> bool:
        """Return whether a function has raised the error. Otherwise an actor was lost."""
        return isinstance(error, self._ray.exceptions.RayTaskError)

    def _failures(self, answers: list[Any], done: list[Any]) -> dict[int, Exception]:
        """Return the errors of the calls that have ended, by rank."""
        found = {}
        for one in done:
            try:
                self._ray.get(one)
            except self._ray.exceptions.RayError as error:
                found[answers.index(one)] = error
        return found

    def _cause(self, failures: dict[int, Exception], left: list[int]) -> Exception:
        """Return the exception that best explains why a call has failed."""

        def weight(rank: int) -> int:
            error: Any = failures[rank]
            if not self._is_raised(error):
                return 0
            return 2 if isinstance(error.cause, HorovodInternalError) else 1

        rank = min(failures, key=weight)
        error: Any = failures[rank]
        who = f"Rank {rank} of {len(self.actors)} on {self._addresses[rank]}"
        ended = f" {name_ranks(left)} did not end: all workers are ended, call start() again." if left else ""
        if not self._is_raised(error):
            return RunFailed(f"{who} was lost: {error}\nAll workers are ended: call start() again.")
        text = f"{who}:{ended}\n{_COLOR.sub('', str(error))}"
        if isinstance(error.cause, self._ray.exceptions.RayError):  # the original cannot be pickled
            return RunFailed(text)
        cause: Exception = error.cause
        cause.add_note(text)
        return cause

    def close(self) -> None:
        """End the actors and release their placement group."""
        from ray.util import remove_placement_group

        for actor in self.actors:
            self._ray.kill(actor)
        self.actors = []
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None


def _taken(queue: Any) -> Iterator[Any]:
    with contextlib.suppress(Empty):
        while queue is not None:
            yield queue.get_nowait()


def _resources(wanted: Wanted, workers: int) -> dict[str, float]:
    gpus = {"GPU": float(wanted.gpus * workers)} if wanted.gpus else {}
    return {"CPU": float(wanted.cpus * workers), **gpus}


def _words(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{resources[name]:g} {name}" for name in ("CPU", "GPU") if name in resources) or "none"
