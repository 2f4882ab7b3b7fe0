"""Division of a training state before it is loaded, so that a worker needs memory for its share only."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from paceline.checkpoint.weights.deferred.heap import FreedMemory
from paceline.schedule.slices import Slice
from paceline.step.context import TrainingContext
from paceline.step.divided.consolidate import parameter_of
from paceline.strategies.sharded.holders import copies_of, writer_of
from paceline.strategies.sharded.shards import OptimizerShard, slices_of
from paceline.strategies.sharded.shared_weights import share_weights


class PreparedShards:
    """Slices, shared weights and optimizer shard of a membership. See ``checkpoint.load.Shares``.

    Attributes:
        slices: slices of all workers.
        weights: weights in shared memory. None if each worker keeps its own.
        shard: this worker's shard of the optimizer.
        is_loaded: whether the shard has the state of a checkpoint, so that no worker has the whole state.
    """

    def __init__(self, context: TrainingContext) -> None:
        self.generation = context.world.generation
        self._model, self._hosts = context.compute.model, context.world.hosts
        self.slices = slices_of(context, context.world.size)
        rank, self.copies = context.world.rank, copies_of(context.settings, context.world.hosts)
        held = [index for index, one in enumerate(self.slices) if rank in self._holders(one)]
        self.weights = share_weights(context, self.slices, held)
        self.shard = OptimizerShard(context, self.slices, held, self.weights.own if self.weights else None)
        self.is_loaded = False
        self.hashes: Mapping[str, str] | None = None
        self._sizes = {name: value.numel() for name, value in self._model.named_parameters()}
        names = list(context.update.parameters)
        self._of: dict[str, list[Slice]] = {name: [] for name in names}
        for one in self.slices:
            self._of[names[one.parameter]].append(one)
        self._frozen = {
            name: number for number, name in enumerate(name for name in self._sizes if name not in self._of)
        }

    def parts_of(self, name: str, shape: torch.Size, rank: int) -> list[slice]:
        """See ``Shares``."""
        kind, everything = name.partition("/")[0], [slice(0, shape.numel())]
        parameter = parameter_of(name)
        if kind == "optimizer":
            owned = [one for one in self._of.get(parameter, ()) if rank in self._holders(one)]
            if shape.numel() == self._sizes.get(parameter):
                return [slice(one.start, one.stop) for one in owned]
            return everything if owned else []
        if kind != "parameter" or self.weights is None:
            return everything
        ranks = next(ranks for ranks in self._hosts if rank in ranks)
        if parameter in self._frozen:
            return everything if ranks[self._frozen[parameter] % len(ranks)] == rank else []
        return [slice(one.start, one.stop) for one in self._of[parameter] if writer_of(one.owner, ranks) == rank]

    def _holders(self, one: Slice) -> tuple[int, ...]:
        return one.owner, *self.copies[one.owner]

    @torch.no_grad()
    def load(self, tensors: dict[str, torch.Tensor]) -> None:
        """See ``Shares``."""
        for name, value in self._model.named_buffers():
            value.copy_(tensors.pop(f"buffer/{name}"))
        if self.weights is not None:
            self.weights.load(tensors, {id(value): name for name, value in self._model.named_parameters()})
        else:
            for name, value in self._model.named_parameters():
                value.copy_(tensors.pop(f"parameter/{name}"))
        self.shard.load(tensors)
        self.is_loaded = True
        FreedMemory().trim()

    def settle(self) -> None:
        """Give all workers the weights that each of them has written into its parameters. All workers call this."""
        if self.weights is not None:
            self.weights.take()
            self.weights.publish()
            FreedMemory().trim()

    def release(self) -> frozenset[str] | None:
        """Release all views of the weights.

        Returns:
            names of the parameters, slices and buffers whose loaded values this worker has. None if none were loaded.
        """
        buffers = (name for name, _ in self._model.named_buffers())
        owned = self.shard.names.union(buffers, self._frozen) if self.is_loaded else None
        self.shard.unite()
        self.weights = None
        self.shard.own.clear()
        return owned


def prepare(context: TrainingContext) -> PreparedShards:
    """Divide the state among the workers of this membership, before it is loaded. All workers call this together."""
    context.prepared.append(made := PreparedShards(context))
    return made


def prepared(context: TrainingContext) -> PreparedShards:
    """Return what :func:`prepare` has made for this membership, or divide the state now."""
    if context.prepared and context.prepared[0].generation == context.world.generation:
        made: PreparedShards = context.prepared.pop()
        return made
    forget(context)
    return PreparedShards(context)


def forget(context: TrainingContext) -> frozenset[str] | None:
    """Release what was prepared for a membership that no strategy was built for.

    Returns:
        as :meth:`PreparedShards.release`.
    """
    owned: frozenset[str] | None = None
    while context.prepared:
        owned = context.prepared.pop().release()
    return owned
