"""Division of a training state before it is loaded, so that a worker needs memory for its share only."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial

import torch

from paceline.checkpoint.tensors import optimizer_state
from paceline.checkpoint.weights.deferred.heap import FreedMemory
from paceline.checkpoint.weights.deferred.model import materialize
from paceline.schedule.slices import Slice, of_size, split_name
from paceline.step.context import TrainingContext
from paceline.step.divided.consolidate import parameter_of, shape_of
from paceline.step.divided.moves import full_name, move_shares
from paceline.strategies.sharded.holders import Owners, copies_of, heirs_of, seats_of, writer_of
from paceline.strategies.sharded.pulled_rows import pulled_tables
from paceline.strategies.sharded.shards import OptimizerShard, part_of, slices_of
from paceline.strategies.sharded.shared_weights import share_weights


class PreparedShards:
    """Slices, shared weights and optimizer shard of a membership.

    See ``checkpoint.load.Shares``, and ``step.divided.moves.NewShares`` after a change of the membership.

    Args:
        moves: whether the workers hold the state in other shares and move it. By default all have the weights.
        owners: which workers own slices. Defaults to all.

    Attributes:
        slices: slices of all workers.
        weights: weights in shared memory. None if each worker keeps its own.
        shard: this worker's shard of the optimizer.
        of_parameter: slices of each parameter by name.
        is_loaded: whether the shard has the state of a checkpoint, so that no worker has the whole state.
        number: number of this worker's share, and number of shares.
        owners: ranks of the owners of slices.
    """

    def __init__(self, context: TrainingContext, moves: bool = False, owners: Owners | None = None) -> None:
        self.generation, self._held = context.world.generation, context.held
        self.shape_of, self._row_states = partial(shape_of, context), context.update.row_states
        self._world, self._optimizer = context.world, context.update.optimizer
        self._moved: dict[str, torch.Tensor] | None = {} if moves else None
        self._model, self._hosts = context.compute.model, context.world.hosts
        rank, size, self._kept = context.world.rank, context.world.size, dict[str, torch.Tensor]()
        seats = seats_of(context.world.gather(self._held.number, "start") if moves else [None] * size)
        self.number = seats.index(rank), size
        owners = owners or Owners.of(context.settings, size)
        self.owners = seats[: owners.number]
        self.slices = [one._replace(owner=seats[one.owner]) for one in slices_of(context, owners.number)]
        numbers = [sorted(map(seats.index, ranks)) for ranks in self._hosts]
        copies = copies_of(owners, numbers)
        self.copies = {seats[one]: sorted(seats[copy] for copy in every) for one, every in copies.items()}
        held = [index for index, one in enumerate(self.slices) if rank in self.holders(one)]
        self._tables = pulled_tables(context)
        here = next(ranks for ranks in self._hosts if rank in ranks)
        self.weights = share_weights(
            context, self.slices, held, [self._writer(one, here) for one in self.slices], not moves
        )
        self.shard = OptimizerShard(context, self.slices, held, self.weights.own if self.weights else None)
        self.is_loaded = False
        self.hashes: Mapping[str, str] | None = None
        self._parameters = dict(self._model.named_parameters())
        self._sizes = {name: value.numel() for name, value in self._parameters.items()}
        names = list(context.update.parameters)
        self.of_parameter: dict[str, list[Slice]] = {name: [] for name in names}
        for one in self.slices:
            self.of_parameter[names[one.parameter]].append(one)
        self._frozen = {
            name: number for number, name in enumerate(name for name in self._sizes if name not in self.of_parameter)
        }

    def parts_of(self, name: str, shape: torch.Size, rank: int) -> list[slice]:
        """See ``Shares``."""
        kind, everything = name.partition("/")[0], [slice(0, shape.numel())]
        parameter = parameter_of(name)
        if kind == "optimizer":
            return self.parts(
                name, shape, [one for one in self.of_parameter.get(parameter, ()) if rank in self.holders(one)]
            )
        if kind != "parameter" or self.weights is None:
            return everything
        ranks = next(ranks for ranks in self._hosts if rank in ranks)
        if parameter in self._frozen:
            return everything if ranks[self._frozen[parameter] % len(ranks)] == rank else []
        return [slice(one.start, one.stop) for one in self.of_parameter[parameter] if self._writer(one, ranks) == rank]

    def _writer(self, one: Slice, ranks: Sequence[int]) -> int | None:
        """Return which of a machine's ranks writes a slice into the weights of the machine. None if none holds it."""
        if one.parameter in self._tables:
            return next((rank for rank in self.holders(one) if rank in ranks), None)
        return writer_of(one.owner, ranks)

    def parts(self, name: str, shape: torch.Size, slices: Sequence[Slice]) -> list[slice]:
        """Return the parts of a tensor of the optimizer's state that belong to slices of its parameter."""
        size = self._sizes.get(parameter_of(name))
        if size is not None and (shape.numel() == size or self._row_states.get(name) == shape):
            return [of_size(slice(one.start, one.stop), shape.numel(), size) for one in slices]
        return [slice(0, shape.numel())] if slices else []

    def target(self, name: str, part: slice, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
        """See ``NewShares``."""
        parameter = self._parameters[parameter_of(name)]
        if name.startswith("optimizer/"):
            if (kept := self._kept.get(full_name(name, part, shape))) is not None:
                return kept
            wanted = shape if part.stop - part.start == shape.numel() else (part.stop - part.start,)
            near = shape in (parameter.shape, self._row_states.get(name))
            return torch.empty(wanted, dtype=dtype, device=parameter.device if near else "cpu")
        if self.weights is not None:
            return self.weights.memory_of(parameter, part)
        value = parameter.detach()
        return value if part.stop - part.start == shape.numel() else value.view(-1)[part]

    def move(self, owned: frozenset[str] | None, what: str) -> None:
        """See ``checkpoint.load.Shares``."""
        whole, state = owned is None, self._held.tensors if owned else {}
        if owned is None:
            materialize(self._model)
            owned, state = frozenset(self._parameters), dict(optimizer_state(self._model, self._optimizer))
        known = self._sizes if owned and self._held.has_weights else owned
        self._kept = state
        values = {f"parameter/{name}": self._value_of(name) for name in known if split_name(name)[0] in self._sizes}
        self._moved, self._kept = move_shares(self._world, state | values, self, what), {}
        if whole:
            self._held.add(owned, state)  # until all workers have their new shares
        elif not owned:  # a worker that joins, or is behind
            self._optimizer.state.clear()
            self._held.clear()

    def _value_of(self, name: str) -> torch.Tensor:
        """Return the values of a parameter, or of a slice, in the memory of this worker."""
        full, part = split_name(name)
        if (kept := self._held.tensors.get(f"parameter/{name}")) is not None:
            return kept
        value = self._parameters[full].detach()
        return value if part is None else value.view(-1)[part]

    def holders(self, one: Slice) -> tuple[int, ...]:
        """Return the ranks that update a slice."""
        return one.owner, *self.copies[one.owner]

    @torch.no_grad()
    def load(self, tensors: dict[str, torch.Tensor]) -> None:
        """See ``Shares``. After :meth:`move`, ``tensors`` has only buffers, and no worker waits for another."""
        for name, value in self._model.named_buffers():
            value.copy_(tensors.pop(f"buffer/{name}", value))
        if self._moved is not None:
            self._enter()
            tensors = self._moved
        elif self.weights is not None:
            self.weights.load(tensors, {id(value): name for name, value in self._parameters.items()})
        else:
            for name, value in self._parameters.items():
                value.copy_(tensors.pop(f"parameter/{name}"))
        self.shard.load(tensors)
        self._moved, self.is_loaded = None, True
        FreedMemory().trim()

    def _enter(self) -> None:
        """Move the parameters into the shared weights, with the values that this worker still holds."""
        kept = {name: self._value_of(name).clone() for name in self._held.names}
        if self.weights is not None:
            self.weights.enter()
        divided = self.divided_names
        for name, value in kept.items():
            if f"parameter/{split_name(name)[0]}" in divided:  # other machines have some of its rows
                self._held.tensors[f"parameter/{name}"] = value
            else:
                self._value_of(name).copy_(value)
        torch.autograd.graph.increment_version([*self._parameters.values()])

    def hand_on(self, leaving: Collection[int], what: str) -> None:
        """Give the optimizer state that only leaving workers hold to others. All workers call this together.

        Weights that all workers see after a step need no transfer.
        """
        sizes = [one.stop - one.start for one in self.slices]
        found = heirs_of([*map(self.holders, self.slices)], sizes, leaving, self._world.size)
        if found:
            heirs = {self.slices[index]: rank for index, rank in found.items()}
            moved = move_shares(self._world, self.divided_rows() | self.shard.tensors(), _Inherited(self, heirs), what)
            mine = [one for one, rank in heirs.items() if rank == self._world.rank]
            self._held.add(map(self.shard.name_of, mine), moved)

    def take_rows(self, values: dict[str, torch.Tensor]) -> None:
        """Copy this worker's rows of tables that the machines divide out of ``values``, and remove the tables there."""
        names = list(self.of_parameter)
        if self.weights is not None:
            for index in self.weights.divided:
                if (value := values.get(names[self.slices[index].parameter])) is not None:
                    self.weights.own[index].copy_(part_of(value, self.slices[index]))
            for place in self._tables:
                values.pop(names[place], None)

    def settle(self) -> None:
        """Publish the weights that each worker has written into its parameters. All workers call this."""
        if self.weights is not None:
            self.weights.take(received=True)
            self.weights.publish()
            FreedMemory().trim()

    def release(self) -> frozenset[str] | None:
        """Release all views of the weights.

        Returns:
            names of the parameters, slices and buffers whose loaded values this worker has. None if none were loaded.
        """
        owned: frozenset[str] | None = None
        if self.is_loaded:
            buffers = (name for name, _ in self._model.named_buffers())
            self._held.add(self.shard.names, self.divided_rows() | self.shard.release())
            self._held.has_weights, self._held.number = self.weights is None, self.number
            owned = frozenset(self._held.names).union(buffers, self._frozen)
        self.drop_weights()
        self.shard.drop()
        return owned

    def drop_weights(self) -> None:
        """Release the shared weights."""
        if self.weights is not None:
            self.weights.close()
        self.weights = None

    @property
    def divided_names(self) -> tuple[str, ...]:
        """Prefixes of the names of the tensors that no worker has whole."""
        names = list(self.of_parameter)
        tables = () if self.weights is None else self._tables
        return "optimizer/", *(f"parameter/{names[place]}" for place in tables)

    def divided_rows(self) -> dict[str, torch.Tensor]:
        """Return the held rows of tables that the machines divide, by name (``schedule.slices``)."""
        own = {} if self.weights is None else {index: self.weights.own[index] for index in self.weights.divided}
        named = {self.shard.name_of(self.slices[index]): value for index, value in own.items()}
        return {
            f"parameter/{name}": value if name in self.of_parameter else value.view(-1) for name, value in named.items()
        }


class _Inherited:
    """Slices that workers inherit from those that leave. See ``step.divided.moves.NewShares``."""

    def __init__(self, shares: PreparedShards, heirs: Mapping[Slice, int]) -> None:
        self._heirs, self._of_parameter, self._parts = heirs, shares.of_parameter, shares.parts
        self.shape_of, self._target = shares.shape_of, shares.target

    def parts_of(self, name: str, shape: torch.Size, rank: int) -> list[slice]:
        """See ``NewShares``."""
        mine = [one for one in self._of_parameter.get(parameter_of(name), ()) if self._heirs.get(one) == rank]
        return self._parts(name, shape, mine)

    def target(self, name: str, part: slice, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
        """See ``NewShares``."""
        if name.startswith("parameter/"):  # rows that this worker's weights do not have
            return torch.empty(part.stop - part.start, dtype=dtype)
        return self._target(name, part, dtype, shape)


def prepare(context: TrainingContext, moves: bool = False, owners: Owners | None = None) -> PreparedShards:
    """Divide the state among the workers of this membership, before it is loaded. All workers call this together.

    Args:
        moves, owners: see :class:`PreparedShards`.
    """
    context.prepared.append(made := PreparedShards(context, moves, owners))
    return made


def prepared(context: TrainingContext, owners: Owners | None = None) -> PreparedShards:
    """Return the result of :func:`prepare` for this membership, or divide the state now."""
    if context.prepared and context.prepared[0].generation == context.world.generation:
        made: PreparedShards = context.prepared.pop()
        return made
    forget(context)
    return PreparedShards(context, owners=owners)


def forget(context: TrainingContext) -> frozenset[str] | None:
    """Release the prepared shards of memberships without a strategy.

    Returns:
        the same as :meth:`PreparedShards.release`.
    """
    owned: frozenset[str] | None = None
    while context.prepared:
        owned = context.prepared.pop().release()
    return owned
