"""torch process group on an MPI communicator, with all collectives, sends and receives.

Each method reads its tensors, submits an operation to the communication thread (``progress``) and returns its work.
"""

# mypy: disable-error-code="override, assignment"
# torch annotates the C++ overloads, but its Python functions call these methods.

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from paceline.comm.mpi.buffers import Move, Operator, Reduction, whole
from paceline.comm.mpi.communicators import at_store, of_ranks
from paceline.comm.mpi.library import initialized, survives
from paceline.comm.mpi.presence import TAGS, Presence
from paceline.comm.mpi.progress import MpiWork, progress
from paceline.system.torch_internals import called_by_torch, set_mpi_backend

REGISTERED = "mpi4py"  # name of the back end for groups that have a store

_groups: weakref.WeakSet[MpiBackend] = weakref.WeakSet()

_Call: TypeAlias = "tuple[Callable[[], Any], Callable[[], None]]"
"""Two functions: the first starts an operation, the second copies its results into the output tensors."""


def register() -> None:
    """Register the back ends with torch: ``mpi4py``, and ``mpi`` unless torch was built with MPI."""
    if REGISTERED not in dist.Backend.backend_list:
        dist.Backend.register_backend(REGISTERED, _with_store, extended_api=True, devices=["cpu"])
    if not dist.is_mpi_available():
        set_mpi_backend(_WithoutStore)


@called_by_torch
class MpiBackend(dist.ProcessGroup):
    """Process group of the workers of a communicator.

    Args:
        ranks: ranks of the members in torch's default group. Empty for the default group itself.
    """

    def __init__(self, comm: Any, timeout: timedelta, ranks: Sequence[int] = ()) -> None:
        super().__init__(comm.Get_rank(), comm.Get_size())  # type: ignore[call-arg]
        self._mpi = initialized()
        self._comm = comm
        self._comm.Set_errhandler(self._mpi.ERRORS_RETURN)
        self._seconds = timeout.total_seconds()
        self._largest_tag = comm.Get_attr(self._mpi.TAG_UB) - TAGS
        self.presence = Presence(comm, [*ranks] or range(comm.Get_size()))
        _groups.add(self)
        if survives():
            atexit.register(self.presence.leave)
        self._name = self._description = ""

    def getBackendName(self) -> str:
        return REGISTERED

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        return self._name

    def getGroupDesc(self) -> str:
        return self._description

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    @property
    def group_desc(self) -> str:
        return self._description

    def _give(
        self,
        what: str,
        start: Callable[[], Sequence[Any]],
        finish: Callable[[], None] = lambda: None,
        outputs: Sequence[torch.Tensor] = (),
        timeout: timedelta | None = None,
        collective: bool = True,
    ) -> MpiWork:
        number = self.presence.enter() if collective else None
        seconds = timeout.total_seconds() if timeout is not None and timeout > timedelta() else self._seconds
        return progress().give(MpiWork(f"{what} over MPI", start, finish, [*outputs], seconds, self.presence, number))

    def _give_all(self, what: str, calls: Sequence[_Call], outputs: Sequence[torch.Tensor], opts: Any) -> MpiWork:
        """Submit several operations as a single work."""

        def finish() -> None:
            for _, finish_one in calls:
                finish_one()

        return self._give(what, lambda: [start() for start, _ in calls], finish, outputs, opts and opts.timeout)

    # sends and receives

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int = 0) -> MpiWork:
        sent, tag = Move(tensors), self._checked(tag)
        return self._give(f"a send to rank {dst}", lambda: [self._comm.Isend(sent.block(), dst, tag)], collective=False)

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int = 0) -> MpiWork:
        return self._receive(tensors, src, tag, f"a receive from rank {src}")

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int = 0) -> MpiWork:
        return self._receive(tensors, self._mpi.ANY_SOURCE, tag, "a receive from any rank")

    def _receive(self, tensors: list[torch.Tensor], source: int, tag: int, what: str) -> MpiWork:
        room, tag = Move(tensors, written=True), self._checked(tag)
        return self._give(
            what, lambda: [self._comm.Irecv(room.block(), source, tag)], room.deliver, tensors, collective=False
        )

    def _checked(self, tag: int) -> int:
        if tag > self._largest_tag:
            raise ValueError(f"tag {tag} is larger than {self._largest_tag}, the largest of this MPI on this network")
        return tag

    # reductions

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> MpiWork:
        opts = opts or dist.AllreduceOptions()
        own = Reduction(tensors, opts.reduceOp)
        return self._give(
            "an all-reduce",
            lambda: [self._comm.Iallreduce(self._mpi.IN_PLACE, own.block(), own.op())],
            lambda: own.deliver(own.flat, tensors, self.size()),
            tensors,
            opts.timeout,
        )

    allreduce_coalesced = allreduce

    def reduce(self, tensors: list[torch.Tensor], opts: Any) -> MpiWork:
        own, root = Reduction(tensors, opts.reduceOp), opts.rootRank
        here = self.rank() == root
        total = own.room(own.flat.numel()) if here else None

        def finish() -> None:
            if total is not None:
                own.deliver(total, tensors, self.size())

        return self._give(
            f"a reduce to rank {root}",
            lambda: [self._comm.Ireduce(own.block(), None if total is None else whole(total), own.op(), root)],
            finish,
            tensors,
            opts.timeout,
        )

    def reduce_scatter(
        self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any = None
    ) -> MpiWork:
        """Reduce an input for each rank, whose sizes may differ, into one output."""
        opts = opts or dist.ReduceScatterOptions()
        call = self._reduce_scatter_call(outputs, inputs[0], [one.numel() for one in inputs[0]], opts.reduceOp)
        return self._give_all("a reduce-scatter", [call], outputs, opts)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> MpiWork:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> MpiWork:
        opts = opts or dist.ReduceScatterOptions()
        calls = [
            self._reduce_scatter_call([output], [input], self.size() * [output.numel()], opts.reduceOp)
            for output, input in zip(outputs, inputs, strict=True)
        ]
        return self._give_all("a reduce-scatter", calls, outputs, opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _reduce_scatter_call(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], counts: list[int], operation: Operator
    ) -> _Call:
        own = Reduction(inputs, operation)
        total = own.room(counts[self.rank()])
        if (given := own.flat.numel()) != sum(counts):
            raise ValueError(f"a reduce-scatter of {given} elements into parts of {counts}")
        return (
            lambda: self._comm.Ireduce_scatter(own.block(), whole(total), counts, own.op()),
            lambda: own.deliver(total, outputs, self.size()),
        )

    # moves

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> MpiWork:
        root = opts.rootRank
        moved = Move(tensors, written=self.rank() != root)
        return self._give(
            f"a broadcast from rank {root}",
            lambda: [self._comm.Ibcast(moved.block(), root)],
            moved.deliver,
            tensors,
            opts.timeout,
        )

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> MpiWork:
        """Gather one input from each rank into an output for each rank, whose sizes may differ."""
        return self._give_all("an all-gather", [self._all_gather_call(outputs[0], inputs)], outputs[0], opts)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> MpiWork:
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> MpiWork:
        for output, input in zip(outputs, inputs, strict=True):
            if output.numel() != input.numel() * self.size():
                raise ValueError(f"an all-gather of {self.size()} times {input.numel()} elements into {output.numel()}")
        calls = [self._all_gather_call([output], [input]) for output, input in zip(outputs, inputs, strict=True)]
        return self._give_all("an all-gather", calls, outputs, opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather_coalesced(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> MpiWork:
        calls = [
            self._all_gather_call([of_rank[place] for of_rank in outputs], [one]) for place, one in enumerate(inputs)
        ]
        return self._give_all("an all-gather", calls, [one for of_rank in outputs for one in of_rank], opts)

    def _all_gather_call(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> _Call:
        room = Move(outputs, written=True)
        shared = {one.untyped_storage().data_ptr() for one in outputs}
        sent = Move([one.clone() if one.untyped_storage().data_ptr() in shared else one for one in inputs])
        if len(outputs) == 1:
            return lambda: self._comm.Iallgather(sent.block(), room.block()), room.deliver
        return lambda: self._comm.Iallgatherv(sent.block(), room.parts()), room.deliver

    def gather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any) -> MpiWork:
        sent, root = Move(inputs), opts.rootRank
        room = Move(outputs[0], written=True) if self.rank() == root else None
        return self._give(
            f"a gather to rank {root}",
            lambda: [self._comm.Igatherv(sent.block(), None if room is None else room.parts(), root)],
            _nothing if room is None else room.deliver,
            [] if room is None else outputs[0],
            opts.timeout,
        )

    def scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any) -> MpiWork:
        room, root = Move(outputs, written=True), opts.rootRank
        sent = Move(inputs[0]) if self.rank() == root else None
        return self._give(
            f"a scatter from rank {root}",
            lambda: [self._comm.Iscatterv(None if sent is None else sent.parts(), room.block(), root)],
            room.deliver,
            outputs,
            opts.timeout,
        )

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: list[int] | None = None,
        input_splits: list[int] | None = None,
        opts: Any = None,
    ) -> MpiWork:
        """Exchange rows between all ranks. The splits are the rows for each rank, and default to equal parts."""
        if not output.is_contiguous():
            raise ValueError("an all-to-all writes into a tensor whose rows are one after the other in memory")
        return self.alltoall(_rows(output, output_splits, self.size()), _rows(input, input_splits, self.size()), opts)

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None) -> MpiWork:
        sent, room = Move(inputs), Move(outputs, written=True)
        return self._give(
            "an all-to-all",
            lambda: [self._comm.Ialltoallv(sent.parts(), room.parts())],
            room.deliver,
            outputs,
            opts and opts.timeout,
        )

    def barrier(self, opts: Any = None) -> MpiWork:
        return self._give("a barrier", lambda: [self._comm.Ibarrier()], timeout=opts and opts.timeout)


def abort() -> None:
    """Make all current and later operations of this process's groups fail, on all ranks."""
    for group in [*_groups]:
        progress().abort(group.presence)


class _WithoutStore:
    """Replacement for the class that only a torch build with MPI has."""

    @staticmethod
    def create(ranks: Sequence[int]) -> MpiBackend:
        """Create the group of these MPI ranks, or of all ranks if none are given."""
        return MpiBackend(of_ranks(ranks), dist.distributed_c10d.default_pg_timeout, ranks)


def _with_store(options: Any, _: object) -> MpiBackend:
    comm = at_store(options.store, options.group_rank, options.group_size, options.timeout.total_seconds())
    return MpiBackend(comm, options.timeout, options.global_ranks_in_group)


def _rows(tensor: torch.Tensor, splits: list[int] | None, parts: int) -> list[torch.Tensor]:
    if not splits and tensor.size(0) % parts:
        raise ValueError(f"{tensor.size(0)} rows cannot be divided evenly among {parts} ranks; say how they are split")
    return [*tensor.split(splits or parts * [tensor.size(0) // parts])]


def _nothing() -> None:
    pass
