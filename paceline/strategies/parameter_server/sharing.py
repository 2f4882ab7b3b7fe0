"""Objects that the workers of an asynchronous strategy share, in the memory of one machine or over the network."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.comm.assignment.step_claims import Claims, StepClaims
from paceline.comm.servers.network_claims import NetworkClaims
from paceline.comm.servers.rpc import RpcPeers
from paceline.comm.shm.arena import SharedMemory
from paceline.comm.shm.histogram import Histogram
from paceline.errors import ConfigError
from paceline.step.context import TrainingContext
from paceline.strategies.full_batch import FullBatch
from paceline.strategies.parameter_server.final_drain import STATE
from paceline.strategies.parameter_server.staleness import Staleness

_STATES = 8
"""Maximum size of the optimizer states, as a multiple of the size of the parameters (``comm.servers.shard``)."""
_OTHER_BYTES = 1 << 24


@dataclass(frozen=True)
class Shared:
    """Objects that both the training loop and its server use."""

    context: TrainingContext
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


def on_one_machine(context: TrainingContext, audited: bool = True) -> OnOneMachine:
    """Create the shared objects of workers on one machine; ``audited``: see :class:`FullBatch`.

    Raises:
        ConfigError: the workers are on several machines, or on GPUs.
    """
    memory, rank = shared_memory_of(context), context.world.rank
    claims = StepClaims(context.world, memory)
    staleness = Staleness(Histogram(memory, rank), Histogram(memory, rank), context.strategy_state.get(STATE, {}))
    return OnOneMachine(context, claims, staleness, FullBatch(context, audited), memory)


def over_network(context: TrainingContext) -> OverNetwork:
    """Create the shared objects of workers on several machines. Raises ConfigError if the workers are on GPUs."""
    peers = connect_servers(context)
    claims = NetworkClaims(peers, copies_of(context))
    staleness = Staleness(claims.delays, claims.rounds, context.strategy_state.get(STATE, {}))
    return OverNetwork(context, claims, staleness, FullBatch(context, audited=not context.sparse), peers)


def connect_servers(context: TrainingContext) -> RpcPeers:
    """Connect the workers over the network, as servers and clients of each other."""
    if not context.world.transport.capabilities.on_host:
        raise ConfigError(
            f"strategy {context.settings.strategy!r} needs workers on CPUs, and this one is on {context.world.device}: "
            f"use 'allreduce' or 'local-sgd', or set CUDA_VISIBLE_DEVICES= (empty) to train on the CPU."
        )
    context.world.await_process_group()  # it may form in the background, and its store carries the addresses
    held = [*context.update.parameters.values(), *context.compute.model.buffers()]
    return RpcPeers(context.world, (_STATES + 2) * sum(value.nbytes for value in held) + _OTHER_BYTES)


def copies_of(context: TrainingContext) -> int:
    """Return the number of workers that hold each shard. It is 1 if the run cannot continue after a loss."""
    return context.settings.server.copies if context.world.coordinator is not None else 1


def shared_memory_of(context: TrainingContext) -> SharedMemory:
    """Return the shared memory of workers on one machine."""
    if context.world.shared_memory is None:
        raise ConfigError(
            f"strategy {context.settings.strategy!r} is for one machine, a Linux on x86-64 whose workers share memory "
            f"on the CPU. These {context.world.size} are not on one, or not on its CPU: use 'parameter-server' with "
            f"server.mode = 'async', 'allreduce' or 'local-sgd'."
        )
    return context.world.shared_memory
