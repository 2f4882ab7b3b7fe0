"""One copy of the weights for all workers of a machine.

::

    file       [ slices of worker 0 | slices of worker 1 | slices of worker 2 ]
    model      private mapping of the file: every worker computes with the weights in the file
    update     shared mapping: each worker updates its slices in the file

If the script writes to a weight, only its own worker sees the change until the next update (copy on write). The owner
of a slice then copies its own change into the file. All workers must make the same change, as with an all-reduce. The
slices of another machine are written into the file by one worker each, which receives them or makes the same update.
A worker that keeps a copy on the owner's machine updates its own memory, because a lost owner may have written half of
its slice into the file. Tables that the machines divide (``sharded.pulled_rows``) are at the end of the file, with only
the slices that this machine's workers update. The script sees none of them, so they have no private mapping, which
would count towards RLIMIT_DATA.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate

import torch
from torch import nn

from paceline.checkpoint.tensors import hash_of
from paceline.checkpoint.weights.deferred.heap import FreedMemory
from paceline.checkpoint.weights.deferred.model import has_records, materialize, move_into, write_values
from paceline.checkpoint.weights.deferred.tensors import deferred_in
from paceline.checkpoint.weights.sparse_embedding import SparseEmbedding, hold_rows, without_memory
from paceline.comm.collectives.agreement import compare
from paceline.comm.reduction.buckets import view_like
from paceline.comm.shm.arena import SharedMemory, attach_alone
from paceline.comm.shm.mapping import drop_changes, drop_pages, map_pages, map_private, map_shared
from paceline.comm.shm.tensors import aligned
from paceline.errors import InputError, StartError
from paceline.schedule.slices import Slice, split_name, whole
from paceline.step.context import TrainingContext
from paceline.strategies.sharded.pulled_rows import PulledRows, pulled_tables
from paceline.strategies.sharded.shards import part_of
from paceline.system.torch_internals import count_users

_OF_A_PARAMETER = 2
"""Number of references to a storage that only its parameter uses, including the reference of the count itself."""


class SharedWeights:
    """Weights of a model in an in-memory file that this machine's workers share.

    The parameters lie elsewhere until :meth:`fill`, or until the workers have written the file and call :meth:`enter`.

    Args:
        context: training context.
        memory: memory shared by the workers of this machine.
        slices: slices of the trained parameters. Frozen parameters are added whole.
        held: indices of the slices that this worker updates.
        writers: rank that writes each slice into the file. None if the file lacks it.

    Attributes:
        own: the slices that this worker updates, by index. They are in the file if this worker writes them there.
        copied: the slices in ``own`` outside of the file, where a lost owner may have updated half of a slice.
        received: slices in the file that this worker receives from other machines, by index.
        divided: the slices in ``own`` of tables that the machines divide.
    """

    def __init__(
        self,
        context: TrainingContext,
        memory: SharedMemory,
        slices: Sequence[Slice],
        held: Collection[int],
        writers: Sequence[int | None],
    ) -> None:
        trained = list(context.update.parameters.values())
        self._parameters = trained + _frozen(context)
        sizes = [value.numel() for value in self._parameters[len(trained) :]]
        frozen = [one._replace(parameter=len(trained) + one.parameter) for one in whole(sizes, len(memory.ranks))]
        self._memory, self._flag, self._updates = memory, memory.reserve(1), 0
        self._tables, self._slices = pulled_tables(context), slices
        self._every_table = [one for one in context.compute.model.modules() if isinstance(one, SparseEmbedding)]
        present = [at for at, rank in enumerate(writers) if rank is not None and slices[at].parameter in self._tables]
        bytes_of = [0 if at in self._tables else value.nbytes for at, value in enumerate(self._parameters)]
        bytes_of += [_like(trained[slices[at].parameter], slices[at]).nbytes for at in present]
        starts = [*accumulate(map(aligned, bytes_of), initial=0)]
        own, size = max(starts[len(self._parameters)], 1), max(starts[-1], 1)
        file = memory.new_file(size)
        try:
            self._seen = map_private(file, own)
            kept = map_shared(file, size)
        except OSError as error:
            data, space = (_limit(kind) for kind in (resource.RLIMIT_DATA, resource.RLIMIT_AS))
            raise StartError(
                f"The weights cannot be mapped into this worker: {error}. It needs two mappings: a private one of "
                f"{own:,} bytes, which count towards RLIMIT_DATA (ulimit -d, here {data}) although a page takes memory "
                f"only if the script changes it, and a shared one of {size:,} bytes. Both count towards RLIMIT_AS "
                f"(ulimit -v, here {space}). Raise the limit that is too low, or limit the memory of the workers by a "
                f"cgroup, which counts each page once. With shard='gradients' each worker has the weights in ordinary "
                f"memory."
            ) from error
        finally:
            os.close(file)
        self._views, _ = self._in_file(self._seen, starts, ())
        stored, self._rows = self._in_file(kept, starts, present)
        self._stored, self._kept, rank = stored, kept, context.world.rank
        shared = {at: part_of(stored[one.parameter], one) for at, one in enumerate(slices) if at not in self._rows}
        of = shared | self._rows
        self._pulled = PulledRows(context, self._tables, slices, self._rows) if self._tables else None
        mine = {index: one for index, one in enumerate(slices) if writers[index] == rank}
        self.received = {index: of[index] for index in mine if index not in held}
        self.copied = {index: torch.empty_like(of[index]) for index in held if index not in mine}
        self.own = {index: self.copied[index] if index in self.copied else of[index] for index in held}
        self.divided = self.own.keys() & self._rows.keys()
        frozen = [one for one in frozen if one.owner == memory.place]
        taken = [*(slices[index] for index in self.own if index in mine and index not in self._rows), *frozen]
        self._taken = [(part_of(stored[one.parameter], one), one) for one in taken]

    def _in_file(
        self, block: memoryview, starts: Sequence[int], present: Sequence[int]
    ) -> tuple[list[torch.Tensor], dict[int, torch.Tensor]]:
        """Return views of a mapping of the file: parameters, and slices of tables that the machines divide."""
        views = [
            without_memory(value) if at in self._tables else _view(block, starts[at], value)
            for at, value in enumerate(self._parameters)
        ]
        likes = [_like(self._parameters[self._slices[at].parameter], self._slices[at]) for at in present]
        rows = zip(present, starts[len(views) :], likes, strict=False)
        return views, {at: _view(block, start, like) for at, start, like in rows}

    def memory_of(self, parameter: torch.Tensor, part: slice) -> torch.Tensor:
        """Return the memory of a part of a flattened parameter in the file."""
        at = next(place for place, value in enumerate(self._parameters) if value is parameter)
        if at not in self._tables:
            return self._stored[at].view(-1)[part] if part.stop - part.start < parameter.numel() else self._stored[at]
        return next(
            rows.view(-1) if part.stop - part.start < parameter.numel() else rows
            for index, rows in self._rows.items()
            if self._slices[index][:3] == (at, part.start, part.stop)
        )

    def enter(self) -> None:
        """Move the parameters into the file, in which all values have been written."""
        drop_pages(self._kept)
        for parameter, view in zip(self._parameters, self._views, strict=True):
            move_into(parameter, view)
        FreedMemory().trim()  # the workers' own copies
        map_pages(self._seen)
        for table in self._every_table:
            table.source = None
        if self._pulled is not None:
            self._pulled.enter()

    def fill(self) -> None:
        """Write the values of all parameters into the file, each on one worker, and move the parameters there.

        The values are equal on all workers. A written page counts as this worker's memory until it is dropped, or until
        others read it.
        """
        everyone = _divided([value.numel() for value in self._parameters], len(self._memory.ranks))
        freed, flag = FreedMemory(), self._memory.reserve(1)
        for number, index in enumerate(everyone[self._memory.place], 1):
            self._write(index)
            freed.add(self._stored[index].nbytes)
            drop_pages(self._kept)
            self._memory.announce(flag, number)
        most = max(map(len, everyone))
        self._memory.announce(flag, most)
        for number in range(1, most + 1):
            self._memory.wait(flag, number)
        self.enter()

    def _write(self, index: int) -> None:
        """Write the values of a parameter into the file."""
        if index not in self._tables:
            write_values(self._parameters[index], self._stored[index])
        elif present := [at for at in self._rows if self._slices[at].parameter == index]:
            write_values(self._parameters[index], block := torch.empty(self._parameters[index].shape))
            for at in present:
                self._rows[at].copy_(part_of(block, self._slices[at]))

    def load(self, tensors: dict[str, torch.Tensor], names: Mapping[int, str]) -> None:
        """Write whole parameters and slices into the file, and remove them from ``tensors``. All workers call this.

        Args:
            tensors: values by name (``schedule.slices``). Together the workers of a machine have all of them.
            names: name of each parameter by ``id``.
        """
        drop_changes(self._seen)
        of = {names[id(value)]: value for value in self._parameters}
        for full in [name for name in tensors if name.startswith("parameter/")]:
            name, part = split_name(full.removeprefix("parameter/"))
            stored = self.memory_of(of[name], slice(0, of[name].numel()) if part is None else part)
            stored.copy_(tensors.pop(full).view(stored.shape))
        drop_pages(self._kept)
        self.publish()
        torch.autograd.graph.increment_version(self._parameters)

    def look(self) -> None:
        """Take over the script's changes since the last update, before any worker makes the next one."""
        for parameter, view in zip(self._parameters, self._views, strict=True):
            if parameter.data_ptr() != view.data_ptr():  # the script has replaced ``.data``
                if (was := _kind(view)) != (now := _kind(parameter)):
                    raise InputError(
                        f"The script has changed a parameter of shape {list(view.shape)} from {was} to {now}, as "
                        f"model.to(...) does, while strategy 'sharded' trains it. Do so before paceline.start."
                    )
                view.copy_(parameter.detach())
                parameter.data = view
        for index, value in self.copied.items():
            one = self._slices[index]
            value.copy_(part_of(self._views[one.parameter], one))

    def take(self, received: bool = False) -> None:
        """Copy the script's changes to the slices that this worker updates into the file.

        Args:
            received: whether to copy changes to slices that it receives, too.
        """
        others = [(part, self._slices[index]) for index, part in self.received.items()] if received else []
        for part, one in [*self._taken, *others]:
            part.copy_(part_of(self._views[one.parameter], one))
        drop_changes(self._seen)

    def close(self) -> None:
        """Release the rows of tables that the machines divide."""
        if self._pulled is not None:
            self._pulled.close()

    def publish(self) -> None:
        """Wait until this machine's workers have written their slices. Raises WorkerLost if one was lost."""
        self._updates += 1
        if self._pulled is not None:
            self._pulled.advance(self._updates)
        self._memory.announce(self._flag, self._updates)
        self._memory.wait(self._flag, self._updates)


def _divided(sizes: Sequence[int], workers: int) -> list[list[int]]:
    """Return the indices of the parameters for each worker, largest first, with about the same number of elements."""
    everyone = [list[int]() for _ in range(workers)]
    for one in sorted(whole(sizes, workers), key=lambda one: -sizes[one.parameter]):
        everyone[one.owner].append(one.parameter)
    return everyone


def can_share(context: TrainingContext) -> bool:
    """Return whether the parameters can move into a file: all are on the CPU, and no other tensor is a view of one."""
    return all(
        value.device.type == "cpu" and value.layout == torch.strided and _is_only_user(value)
        for value in [*context.update.parameters.values(), *_frozen(context)]
    )


def _is_only_user(value: nn.Parameter) -> bool:
    found = deferred_in(value)
    return count_users(value.untyped_storage()) <= _OF_A_PARAMETER if found is None else found.is_only(value)


def _frozen(context: TrainingContext) -> list[nn.Parameter]:
    trained = set(map(id, context.update.parameters.values()))
    return [value for value in context.compute.model.parameters() if id(value) not in trained]


def _limit(kind: int) -> str:
    limit = resource.getrlimit(kind)[0]
    return "unlimited" if limit == resource.RLIM_INFINITY else f"{limit:,} bytes"


def _kind(value: torch.Tensor) -> str:
    return f"{value.dtype} with strides {value.stride()}"


def _like(value: torch.Tensor, one: Slice) -> torch.Tensor:
    """Return a tensor without memory in the shape of a slice of a table."""
    rows = (one.stop - one.start) * len(value) // value.numel()
    return torch.empty(rows, *value.shape[1:], dtype=value.dtype, device="meta")


def _view(block: memoryview, start: int, like: torch.Tensor) -> torch.Tensor:
    if not like.numel():
        return torch.empty_like(like)
    flat = torch.frombuffer(block, dtype=like.dtype, count=like.numel(), offset=start)
    return view_like(flat, 0, like)


def share_weights(
    context: TrainingContext,
    every: Sequence[Slice],
    held: Collection[int],
    writers: Sequence[int | None],
    filled: bool = True,
) -> SharedWeights | None:
    """Return the weights in memory that the workers of a machine share. None if each worker keeps its own.

    Args:
        writers: see :class:`SharedWeights`.
        filled: whether all workers have the values of the parameters, and move them into the shared memory.
    """
    memory, world = context.world.host_memory, context.world
    if max(map(len, world.hosts)) == 1 and pulled_tables(context):
        memory = attach_alone(world)
    if context.settings.shard != "parameters":
        return None
    with torch.enable_grad():
        torch.zeros((), requires_grad=True).backward()  # torch keeps a graph interrupted by a loss until the next one
    if not all(world.gather(memory is not None and can_share(context), "start")):
        materialize(context.compute.model)
        hold_rows(context.compute.model)
        return None
    assert memory is not None
    if not filled:
        return SharedWeights(context, memory, every, held, writers)
    computed = len(world.hosts) > 1 and any(world.gather(has_records(context.compute.model), "start"))
    weights = SharedWeights(context, memory, every, held, writers)
    with world.awaiting("to give the shared weights their values"):
        weights.fill()
    if computed:  # from equal records, but on machines that may round differently
        _compare_machines(context)
    return weights


def _compare_machines(context: TrainingContext) -> None:
    """Check that the computed weights are the same on all machines. Each worker hashes every n-th parameter."""
    world = context.world
    ranks = next(ranks for ranks in world.hosts if world.rank in ranks)
    named = [*context.compute.model.named_parameters()]
    share = named[ranks.index(world.rank) :: len(ranks)]
    everyone = world.gather({f"initial value of {name}": hash_of(value).hex()[:16] for name, value in share}, "start")
    compare([{key: text for rank in ranks for key, text in everyone[rank].items()} for ranks in world.hosts])
