"""Objects that the workers of an asynchronous strategy share, in the memory of one machine or over the network."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.comm.assignment.step_claims import Claims, StepClaims
from paceline.comm.servers.network_claims import NetworkClaims
from paceline.comm.servers.rpc import RpcPeers
from paceline.comm.shm.arena import SharedMemory
from paceline.comm.shm.histogram import Histogram
from paceline.errors import ConfigError
from paceline.step.job import Job
from paceline.strategies.full_batch import FullBatch
from paceline.strategies.parameter_server.last_worker import STATE
from paceline.strategies.parameter_server.staleness import Staleness

_STATES = 8
"""Maximum size of the optimizer states, as a multiple of the size of the parameters (``comm.servers.shard``)."""
_OTHER_BYTES = 1 << 24


@dataclass(frozen=True)
class Shared:
    """Objects that the loop and its server both use."""

    job: Job
    claims: Claims
    staleness: Staleness
    batch: FullBatch


@dataclass(frozen=True)
class OnOneMachine(Shared):
    """Shared objects of workers on one machine."""

    claims: StepClaims
    memory: SharedMemory


@dataclass(frozen=True)
class OverNetwork(Shared):
    """Shared objects of workers on several machines."""

    claims: NetworkClaims
    peers: RpcPeers


def on_one_machine(job: Job, audited: bool = True) -> OnOneMachine:
    """Create the shared objects of workers on one machine; ``audited``: see :class:`FullBatch`.

    Raises:
        ConfigError: the workers are on several machines, or on GPUs.
    """
    memory, rank = shared_memory_of(job), job.world.rank
    claims = StepClaims(job.world, memory)
    staleness = Staleness(Histogram(memory, rank), Histogram(memory, rank), job.strategy_state.get(STATE, {}))
    return OnOneMachine(job, claims, staleness, FullBatch(job, audited), memory)


def over_network(job: Job) -> OverNetwork:
    """Create the shared objects of workers on several machines.

    Raises:
        ConfigError: the workers are on GPUs.
    """
    peers = connect_servers(job)
    claims = NetworkClaims(peers, copies_of(job))
    staleness = Staleness(claims.delays, claims.rounds, job.strategy_state.get(STATE, {}))
    return OverNetwork(job, claims, staleness, FullBatch(job), peers)


def connect_servers(job: Job) -> RpcPeers:
    """Connect the workers over the network, as servers and clients of each other.

    Raises:
        ConfigError: the workers are on GPUs.
    """
    if not job.world.transport.capabilities.on_host:
        raise ConfigError(
            f"strategy {job.settings.strategy!r} needs workers on CPUs, and this one is on {job.world.device}: use "
            f"'allreduce' or 'local-sgd', or set CUDA_VISIBLE_DEVICES= (empty) to train on the CPU."
        )
    held = [*job.update.parameters.values(), *job.compute.model.buffers()]
    return RpcPeers(job.world, (_STATES + 2) * sum(value.nbytes for value in held) + _OTHER_BYTES)


def copies_of(job: Job) -> int:
    """Return the number of workers that hold each shard. It is 1 if the run cannot continue after a loss."""
    return job.settings.server.copies if job.world.coordinator is not None else 1


def shared_memory_of(job: Job) -> SharedMemory:
    """Return the shared memory of workers on one machine.

    Raises:
        ConfigError: the workers are on several machines, or on GPUs.
    """
    if job.world.shared_memory is None:
        raise ConfigError(
            f"strategy {job.settings.strategy!r} is for one machine, a Linux on x86-64 whose workers share memory on "
            f"the CPU. These {job.world.size} are not on one, or not on its CPU: use 'parameter-server' with "
            f"server.mode = 'async', 'allreduce' or 'local-sgd'."
        )
    return job.world.shared_memory
