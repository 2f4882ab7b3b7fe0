"""Ray cluster: an actor on each node runs an agent, and Ray moves the actors of lost nodes to other nodes.

::

    driver       launcher ── paceline run -n 0        runs the coordinator, so any other node may be lost
    each node    actor ── paceline run -n 4 ── workers

There is one actor per node and not per worker, because an agent replaces a lost worker in seconds without Ray, and the
workers of a node share its memory. The minimum number of nodes forms one placement group, so that two runs cannot block
each other. Additional nodes join one by one. The actors end with the launcher, and their processes end with them.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from paceline.environments import env
from paceline.errors import ConfigError, StartError
from paceline.launchers.base import Request
from paceline.launchers.clusters.base import Agent, Options, Place, Placement, coordinated_here
from paceline.launchers.clusters.clients import follow_agent, run_here, say, say_end
from paceline.launchers.local.child import end_with_parent
from paceline.launchers.machine import choose_port, listens

_POLL_SECONDS = 0.05
_SAY_SECONDS = 5.0
_LAST_SECONDS = 10.0


class RayPlace(Place):
    """Ray cluster."""

    reads = frozenset({"address", "gpus", "slot_cpus"})

    def __init__(self) -> None:
        self._address: str | None = None
        self._bundle: dict[str, float] = {}
        self._strategy = "STRICT_SPREAD"

    @classmethod
    def found(cls, environment: Mapping[str, str]) -> str | None:
        """Return the evidence of a Ray job, or of a cluster in the environment, or None."""
        return next((f"{name} is set" for name in ("RAY_ADDRESS", "RAY_JOB_ID") if environment.get(name)), None)

    def decide(self, request: Request, options: Options, environment: Mapping[str, str]) -> Placement:
        """Return the launch plan. Also stores the address and the resources of each node for ``carry_out``."""
        if find_spec("ray") is None:
            raise StartError("--on ray: Ray is not installed. Install it with: pip install 'paceline[ray]'")
        if options.address is not None and "://" in options.address:
            raise ConfigError(f"--address {options.address}: give auto, or the host:port of the head, as in head:6379.")
        if options.gpus is not None and options.gpus < 0:
            raise ConfigError(f"--gpus {options.gpus}: the number of GPUs of each node cannot be negative.")
        self._address = options.address
        cpus = options.slot_cpus or request.workers
        self._bundle = {"CPU": float(cpus), **({"GPU": float(options.gpus)} if options.gpus else {})}
        self._strategy = "PACK" if options.slot_cpus else "STRICT_SPREAD"
        travel = [name for name in sorted(environment) if name == "OMP_NUM_THREADS" or name.startswith("PACELINE_")]
        passed = {name: environment[name] for name in travel}  # all other variables on the nodes are those of Ray
        here, *there = coordinated_here(request, passed)
        nodes = request.nodes or (1, 1)
        text = [
            f"cluster: {options.address or 'the one that is found, or a new one of this machine'}",
            f"placement group: {nodes[0]} x {_resources(self._bundle)}, strategy {self._strategy}",
            *([f"and up to {nodes[1] - nodes[0]} more, each in a group of its own"] if nodes[1] > nodes[0] else []),
            f"here: {shlex.join(here.command)}",
            f"each node: {shlex.join(there[0].command)}",
        ]
        return Placement("ray", (here, *there), "\n".join(text))

    def carry_out(self, placement: Placement, request: Request) -> int:
        """Place the actors and start the agents. This process runs the coordinator's agent and waits for its end."""
        import ray

        fewest = request.nodes[0] if request.nodes else 1
        with _connected(ray, self._address, int(self._bundle["CPU"]), fewest, request.patience_seconds):
            port = choose_port(None)
            where = f"{_own_address(ray)}:{port}"
            here, *there = [one.meeting_at(where) for one in placement.agents]
            nodes = _Nodes(ray, self._bundle, self._strategy)
            try:
                nodes.place(fewest, request.patience_seconds)
                nodes.start(there, fewest, str(request.script.absolute()), port, request.patience_seconds)
                return follow_agent(here, request.grace_seconds)
            finally:
                nodes.close()


def _resources(bundle: Mapping[str, float]) -> str:
    return ", ".join(f"{count:g} {name}" for name, count in bundle.items())


@contextlib.contextmanager
def _connected(ray: Any, address: str | None, cpus: int, fewest: int, seconds: float) -> Iterator[None]:
    """Connect to a cluster. Start one on this machine if none is named and none is found.

    A process that is already connected, as in a notebook, uses its cluster and stays connected.
    """
    before = signal.getsignal(signal.SIGTERM)
    if own := not ray.is_initialized():
        _connect(ray, address, cpus, fewest, seconds)
        signal.signal(signal.SIGTERM, _end)  # replaces Ray's handler, which exits with a different code
    elif address not in (None, "auto", ray.get_runtime_context().gcs_address):
        raise ConfigError(
            f"--address {address}: this process is connected to the Ray cluster at "
            f"{ray.get_runtime_context().gcs_address}. Leave the address out, or call ray.shutdown() first."
        )
    try:
        yield
    finally:
        if own:
            ray.shutdown()
            signal.signal(signal.SIGTERM, before)


def _connect(ray: Any, address: str | None, cpus: int, fewest: int, seconds: float) -> None:
    env.set_default("RAY_USAGE_STATS_ENABLED", "0")
    quiet = {"log_to_driver": False, "logging_level": "CRITICAL", "configure_logging": True}
    limit = threading.Timer(seconds, _give_up, (address, seconds))  # Ray may retry forever
    limit.daemon = True
    limit.start()
    try:
        try:
            ray.init(address=address or "auto", **quiet)
        except ConnectionError as error:
            if address is not None or env.inherited().get("RAY_ADDRESS"):
                raise StartError(_unreachable(address, str(error))) from None
            if fewest > 1:
                raise StartError(
                    f"--on ray: no Ray cluster was found, and a new one has one node, of {fewest} that are asked for. "
                    f"Name the cluster with --address, or leave --nodes out."
                ) from None
            say("no Ray cluster was found: starting one on this machine")
            ray.init(num_cpus=max(cpus, os.cpu_count() or 1), include_dashboard=False, **quiet)
    except (RuntimeError, ValueError) as error:
        raise StartError(_unreachable(address, str(error))) from None
    finally:
        limit.cancel()


def _unreachable(address: str | None, why: str) -> str:
    return (
        f"--on ray: the cluster at {address or 'RAY_ADDRESS'} cannot be reached: {why.strip().splitlines()[0]} "
        f"Is this machine a node of it (ray status), and is --address the host:port of its head?"
    )


def _give_up(address: str | None, seconds: float) -> None:
    say(f"paceline: {_unreachable(address, f'no answer in {seconds:.0f} s.')}")
    os._exit(StartError.exit_code)


def _end(number: int, frame: object) -> None:
    sys.exit(128 + number)


def _own_address(ray: Any) -> str:
    here = ray.get_runtime_context().get_node_id()
    return next(str(node["NodeManagerAddress"]) for node in ray.nodes() if node["NodeID"] == here)


class _Nodes:
    """Actors of a run and their reserved resources."""

    def __init__(self, ray: Any, bundle: dict[str, float], strategy: str) -> None:
        self._ray, self._bundle, self._strategy = ray, bundle, strategy
        self._groups: list[Any] = []
        self._actors: list[Any] = []
        self._running: dict[Any, str] = {}
        self._closed = threading.Event()
        self._watcher: threading.Thread | None = None

    def place(self, fewest: int, seconds: float) -> None:
        """Reserve resources for the minimum number of nodes, and wait until the cluster grants them."""
        group = self._reserve(fewest)
        begin, said = time.monotonic(), False
        while not group.wait(_POLL_SECONDS):
            waited = time.monotonic() - begin
            if waited > seconds:
                raise StartError(f"--on ray: {self._shortage(fewest)}; none came within {seconds:.0f} s (--patience).")
            if waited > _SAY_SECONDS and not said:
                said = True
                say(f"waiting for the cluster: {self._shortage(fewest)}")

    def start(self, agents: list[Agent], fewest: int, script: str, port: int, seconds: float) -> None:
        """Start an actor for each agent. Actors beyond the minimum start when resources become available.

        The agents start once the coordinator listens. Otherwise an agent on the same node would become coordinator.
        """
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        ray = self._ray
        kind: Any = ray.remote(max_restarts=-1, max_task_retries=-1)(NodeAgent)
        for number, agent in enumerate(agents):
            group, index = (self._groups[0], number) if number < fewest else (self._reserve(1), 0)
            strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
            actor = kind.options(
                num_cpus=self._bundle["CPU"], num_gpus=self._bundle.get("GPU", 0), scheduling_strategy=strategy
            ).remote(agent.command, dict(agent.environment), os.getcwd(), script)
            self._actors.append(actor)
        try:
            answers = ray.get([actor.missing.remote() for actor in self._actors[:fewest]], timeout=seconds)
        except ray.exceptions.GetTimeoutError:
            raise StartError(
                f"--on ray: not all of the {fewest} actors have started within {seconds:.0f} s (--patience). "
                f"`ray status` shows the pending requests of the cluster."
            ) from None
        if wrong := [text for text in answers if text]:
            raise StartError(f"--on ray: {wrong[0]}")
        self._watcher = threading.Thread(target=self._watch, args=(port,), name="paceline-ray", daemon=True)
        self._watcher.start()

    def _reserve(self, count: int) -> Any:
        from ray.util import placement_group

        self._groups.append(placement_group([self._bundle] * count, strategy=self._strategy))
        return self._groups[-1]

    def _shortage(self, count: int) -> str:
        """Return a description of the requested and the available resources."""

        def counted(there: Mapping[str, float]) -> str:
            return _resources({name: there.get(name, 0) for name in self._bundle})

        alive = [node for node in self._ray.nodes() if node["Alive"]]
        nodes = [f"{node['NodeManagerAddress']} with {counted(node['Resources'])}" for node in alive]
        kind = "node" if self._strategy == "STRICT_SPREAD" else "slot"
        wanted = f"{count} {kind}{'s' * (count > 1)} with {_resources(self._bundle)}{' each' * (count > 1)}"
        return f"{wanted} asked for; there: {'; '.join(nodes)}; free: {counted(self._ray.available_resources())}"

    def _watch(self, port: int) -> None:
        """Start the agents. Report failed agents, and lost nodes that are not replaced yet."""
        while not listens(port):
            if self._closed.wait(_POLL_SECONDS):
                return
        self._running = {actor.run.remote(): f"node {number}" for number, actor in enumerate(self._actors)}
        said = False
        while not self._closed.wait(_POLL_SECONDS):
            done, _ = self._ray.wait(list(self._running), timeout=0) if self._running else ([], [])
            for one in done:
                self._say_end(self._running.pop(one), one)
            missing = self._ray.util.placement_group_table(self._groups[0])["state"] != "CREATED"
            if missing and not said:
                say("a node is gone; Ray looks for another node with " + _resources(self._bundle))
            said = missing

    def _say_end(self, name: str, run: Any) -> None:
        try:
            address, code, text = self._ray.get(run)
        except self._ray.exceptions.RayError as error:
            address, code, text = name, 1, f"its actor has failed: {error}"
        say_end(address, code, text, self._closed)

    def close(self) -> None:
        """Wait for the agents to end, with a timeout. Then end the actors and release their resources."""
        from ray.util import remove_placement_group

        self._closed.set()
        if self._watcher is not None:
            self._watcher.join(_LAST_SECONDS)
        if running := list(self._running):
            self._ray.wait(running, num_returns=len(running), timeout=_LAST_SECONDS)
        for actor in self._actors:
            self._ray.kill(actor)
        for group in self._groups:
            remove_placement_group(group)


@dataclass
class NodeAgent:
    """Actor of a node. If Ray restarts it on another node, ``run`` starts over on that node."""

    command: tuple[str, ...]
    environment: dict[str, str]
    folder: str
    script: str

    def missing(self) -> str:
        """Return an error message about a folder or script that is missing on this node. Empty if none is missing."""
        if not (lacking := [path for path in (self.folder, self.script) if not os.path.exists(path)]):
            return ""
        return (
            f"node {_address_here()} has no {lacking[0]}. Put the script where all nodes see it: a shared folder, "
            f"the image of the nodes, or ray job submit --working-dir."
        )

    def run(self) -> tuple[str, int, str]:
        """Run the agent. Return the node's address, the exit code, and the last output lines."""
        if lacking := self.missing():
            return _address_here(), StartError.exit_code, lacking
        end_with_parent()  # Ray itself takes a minute to end the actor if the whole cluster is gone
        return _address_here(), *run_here(self.command, self.environment, self.folder)


def _address_here() -> str:
    import ray

    return str(ray.util.get_node_ip_address())
