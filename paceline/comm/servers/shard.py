"""Shard of a parameter server: some of the parameters, buffers and optimizer states, in two copies.

::

    copy 0   parameters, buffers | optimizer states | learning rates and schedule        version 4 ◀ counts
    copy 1   parameters, buffers | optimizer states | learning rates and schedule        version 5   is being written

An update is written to the spare copy. Then the version number in the table of ``comm.assignment.step_claims`` makes
that copy current. A worker that is killed at any instant leaves the other copy intact.

Tables with sparse gradients have one copy, with their optimizer states behind the two copies of the rest. A worker
changes the rows of its update in place (``comm.servers.row_journal`` keeps the rows as they were).

On one machine a shard lies in shared memory. On several machines each holder has the shard in its own memory
(:class:`OwnBlocks`), and copies are sent between machines as raw bytes.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Container, Iterable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from paceline.comm.shm.tensors import aligned, view_of
from paceline.comm.values import decode, encode, sendable
from paceline.errors import InputError
from paceline.schedule.slices import whole
from paceline.system.torch_internals import foreach_copy_

_HEADER = struct.Struct("<qq")
_NOTES_AT = 64
_NOTES_BYTES = 1 << 20
_NOTES_BYTES_EACH = 1 << 10
_STATES = 8  # Space for optimizer states, as a multiple of the parameters' size. Unwritten pages take no memory.


@sendable
class _Entry(NamedTuple):
    """A tensor of an optimizer state: index of its parameter, key, type, shape, and offset in the copy."""

    parameter: int
    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    place: int


class _Metadata(NamedTuple):
    """Layout of the optimizer's state tensors, and all values that are not tensors."""

    entries: list[_Entry]
    numbers: list[tuple[int, str, object]]
    groups: list[dict[str, Any]]
    schedule: dict[str, Any] | None


class Blocks(Protocol):
    """Memory for a shard."""

    def share(self, size: int) -> list[memoryview]:
        """Map a new block of memory. The shard uses the first returned view."""


class OwnBlocks:
    """Private memory of this process."""

    def share(self, size: int) -> list[memoryview]:
        """Map a block. Unwritten pages take no memory."""
        return [memoryview(mmap.mmap(-1, size))]


class Buffered(Protocol):
    """An object with named buffers, such as a model."""

    def named_buffers(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Return the buffers with their names."""


class Shard:
    """A shard of the training state. All workers construct their shards together, in the same order."""

    def __init__(
        self,
        memory: Blocks,  # memory for the shard, shared by the workers or private
        model: Buffered,
        parameters: dict[str, nn.Parameter],
        buffers: Sequence[str],
        optimizer: Optimizer,  # optimizer of all parameters
        schedule: LRScheduler | None,
        tables: Container[str] = (),  # names of the parameters that have one copy
    ) -> None:
        self.parameters = list(parameters.values())
        self._names = list(parameters)
        self._tables = [place for place, name in enumerate(parameters) if name in tables]
        self._model = model
        self._buffers = list(buffers)
        self._optimizer = optimizer
        self._schedule = schedule
        fixed = self._tensors()
        self._notes_room = _NOTES_BYTES + _NOTES_BYTES_EACH * len(parameters)
        sizes = [0 if place in self._tables else aligned(value.nbytes) for place, value in enumerate(fixed)]
        self._states_at = _NOTES_AT + self._notes_room + sum(sizes)
        rooms = [_STATES * size for size in sizes[: len(parameters)]]
        self._ends = self._states_at + sum(rooms) + _STATES * 64 * len(rooms)  # 64: a number each
        of_tables = [(1 + _STATES) * aligned(self.parameters[place].nbytes) for place in self._tables]
        *starts, end = accumulate(of_tables, initial=self._ends)
        self._tables_at = dict(zip(self._tables, starts, strict=True))  # a table, then its states
        self._size = -(-end // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        self._block = memory.share(2 * self._size)[0]
        self._fixed = [self._fixed_views(copy, fixed) for copy in (0, 1)]
        self._read_notes: list[tuple[int, _Metadata, list[torch.Tensor]] | None] = [None, None]
        self._entries: tuple[bytes, list[_Entry]] = encode([]), []  # encoded once, as entries rarely change
        self._taken = -1
        self.check_states()

    @property
    def tables(self) -> list[nn.Parameter]:
        """Parameters that have one copy."""
        return [self.parameters[place] for place in self._tables]

    def views(self, copy: int) -> list[torch.Tensor]:
        return self._fixed[copy][: len(self.parameters)]

    def write(self, copy: int) -> None:
        """Write this worker's parameters, buffers, optimizer states and schedule to a copy."""
        self._copy(self._fixed[copy], self._tensors())
        self.write_states(copy)

    def read(self, copy: int, states: bool = True) -> None:
        """Load a copy. Without ``states``, load only the parameters and buffers, which suffice for a gradient."""
        self._copy(self._tensors(), self._fixed[copy])
        if states:
            self.read_states(copy)

    def share_tables(self) -> None:
        """Move the tables into the memory of the shard. They stay the same objects."""
        for place in self._tables:
            self.parameters[place].data = self._fixed[0][place]

    def take_tables(self) -> None:
        """Move the tables and their optimizer states into this worker's own memory, after :meth:`read`."""
        for place in self._tables:
            parameter = self.parameters[place]
            parameter.data = self._fixed[0][place].clone()
            state = self._optimizer.state.get(parameter, {})
            for key in [key for key, value in state.items() if is_of_table(value, parameter)]:
                state[key] = state[key].clone()

    def write_buffers(self, copy: int) -> None:
        """Write only the buffers to a copy."""
        self._copy(self._fixed[copy][len(self.parameters) :], self._tensors()[len(self.parameters) :])

    def read_buffers(self, copy: int) -> None:
        self._copy(self._tensors()[len(self.parameters) :], self._fixed[copy][len(self.parameters) :])

    def weights(self, copy: int) -> memoryview:
        """Return a writable view of the bytes of a copy's parameters and buffers, without tables."""
        start = copy * self._size + _NOTES_AT + self._notes_room
        return memoryview(self._block)[start : copy * self._size + self._states_at]

    def contents(self, copy: int) -> list[memoryview]:
        """Return views of the used bytes of a copy and of the tables."""
        _, notes, _ = self._noted(copy)
        return [memoryview(self._block)[start:stop] for start, stop in self._used(copy, notes.entries)]

    def fill(self, copy: int, contents: bytes | bytearray) -> None:
        """Overwrite a copy and the tables with the joined :meth:`contents` of another worker's shard."""
        _, length = _HEADER.unpack_from(contents, 0)
        entries, *_ = decode(bytes(contents[_NOTES_AT : _NOTES_AT + length]))
        view, place = memoryview(contents), 0
        for start, stop in self._used(copy, decode(entries)):
            self._block[start:stop] = view[place : place + stop - start]
            place += stop - start
        self._read_notes[copy] = None
        self.forget()

    def _used(self, copy: int, entries: Iterable[_Entry]) -> list[tuple[int, int]]:
        """Return the start and end of the used bytes of a copy, and of each table with its states."""
        end = self._states_at
        ends = {place: start + self.parameters[place].nbytes for place, start in self._tables_at.items()}
        for entry in entries:
            last = entry.place + entry.dtype.itemsize * torch.Size(entry.shape).numel()
            if entry.place < self._ends:
                end = max(end, last)
            else:
                ends[entry.parameter] = max(ends[entry.parameter], last)
        start = copy * self._size
        return [(start, start + end), *((self._tables_at[place], ends[place]) for place in self._tables)]

    def forget(self) -> None:
        """Make the next :meth:`read_states` load everything, because the local state may match no copy."""
        self._taken = -1

    def _copy(self, to: list[torch.Tensor], values: list[torch.Tensor]) -> None:
        if self._tables:  # which may lie in the shard
            pairs = [pair for pair in zip(to, values, strict=True) if pair[0].data_ptr() != pair[1].data_ptr()]
            to, values = [one for one, _ in pairs], [one for _, one in pairs]
        if to:
            with torch.no_grad():
                foreach_copy_(to, values)

    def _tensors(self) -> list[torch.Tensor]:
        held = dict(self._model.named_buffers()) if self._buffers else {}
        return [value.data for value in self.parameters] + [held[name].data for name in self._buffers]

    def _fixed_views(self, copy: int, examples: list[torch.Tensor]) -> list[torch.Tensor]:
        views, place = [], _NOTES_AT + self._notes_room
        for index, example in enumerate(examples):
            start = self._tables_at.get(index, place + copy * self._size)
            views.append(view_of(self._block, start, example.dtype, tuple(example.shape)))
            place += 0 if index in self._tables_at else aligned(example.nbytes)
        return views

    def check_states(self) -> None:
        """Check that the shard can hold the optimizer states.

        Raises:
            InputError: a state or value cannot be shared, or there is no space for it.
        """
        self._packed(self._described()[0])

    # The optimizer's states may grow during training, because a parameter gets a state with its first gradient.

    def write_states(self, copy: int) -> None:
        """Write the optimizer states, the learning rates and the schedule to a copy."""
        notes, values = self._described()
        written = self._packed(notes)
        start = copy * self._size
        number = 1 + max(_HEADER.unpack_from(self._block, each * self._size)[0] for each in (0, 1))
        _HEADER.pack_into(self._block, start, number, len(written))
        self._block[start + _NOTES_AT : start + _NOTES_AT + len(written)] = written
        views = self._state_views(copy, notes.entries)
        self._copy(views, values)
        self._share_states(notes.entries, views)
        self._taken = number

    def _share_states(self, entries: list[_Entry], views: list[torch.Tensor]) -> None:
        """Let the optimizer update the states of tables in the memory of the shard."""
        for entry, view in zip(entries, views, strict=True):
            if entry.place >= self._ends:
                self._optimizer.state[self.parameters[entry.parameter]][entry.key] = view

    def _packed(self, notes: _Metadata) -> bytes:
        try:
            if notes.entries != self._entries[1]:
                self._entries = encode(notes.entries), notes.entries
            written = encode((self._entries[0], *notes[1:]))
        except TypeError as error:
            raise self._unshareable(notes) from error
        if len(written) > self._notes_room:
            raise InputError(
                f"The optimizer and its schedule have {len(written)} bytes besides their tensors, and there is room "
                f"for {self._notes_room}: strategy 'parameter-server' and 'hogwild' cannot hold them."
            )
        return written

    def _unshareable(self, notes: _Metadata) -> InputError:
        """Build the error that names the first value that cannot be sent."""
        held: list[tuple[object, str, object]] = [(self._optimizer, key, value) for _, key, value in notes.numbers]
        held += [(self._optimizer, key, value) for group in notes.groups for key, value in group.items()]
        held += [(self._schedule, key, value) for key, value in (notes.schedule or {}).items()]
        owner, key, value = next(one for one in held if not _can_be_sent(one[1:]))
        cure = (
            "leave it out of its state_dict, as LambdaLR of torch does"
            if owner is self._schedule
            else "keep it beside the groups and the states of its parameters"
        )
        return InputError(
            f"{type(owner).__name__} has {key!r} in its state, a {type(value).__name__} that cannot be handed to other "
            f"workers, as numbers, texts, tensors and containers of them can: {cure}."
        )

    def _described(self) -> tuple[_Metadata, list[torch.Tensor]]:
        entries: list[_Entry] = []
        numbers: list[tuple[int, str, object]] = []
        values: list[torch.Tensor] = []
        place, full = self._states_at, False
        for owner, parameter in enumerate(self.parameters):
            start = self._tables_at.get(owner, 0)
            of_table = start and start + aligned(parameter.nbytes)
            for key, value in self._optimizer.state.get(parameter, {}).items():
                if not isinstance(value, torch.Tensor):
                    numbers.append((owner, key, value))
                    continue
                if value.is_sparse:
                    raise InputError(
                        f"{type(self._optimizer).__name__} keeps a sparse {key!r} for the parameter "
                        f"{self._names[owner]!r}, which workers cannot share: use it without that (SGD without "
                        f"momentum), or Adagrad."
                    )
                values.append(value)
                if of_table and is_of_table(value, parameter):
                    entries.append(_Entry(owner, key, value.dtype, tuple(value.shape), of_table))
                    of_table += aligned(value.nbytes)
                else:
                    entries.append(_Entry(owner, key, value.dtype, tuple(value.shape), place))
                    place += aligned(value.nbytes)
            full |= of_table > start + (1 + _STATES) * aligned(parameter.nbytes)
        if full or place > self._ends:
            raise InputError(
                f"The states of {type(self._optimizer).__name__} are more than {_STATES} times as large as the "
                f"parameters: strategy 'parameter-server' and 'hogwild' have no room for them."
            )
        groups = [
            {key: value for key, value in group.items() if key != "params"} for group in self._optimizer.param_groups
        ]
        schedule = None if self._schedule is None else self._schedule.state_dict()
        return _Metadata(entries, numbers, groups, schedule), values

    def read_states(self, copy: int) -> None:
        """Load the optimizer states, the learning rates and the schedule from a copy."""
        number, notes, views = self._noted(copy)
        state, there, values = self._optimizer.state, [], []
        self._share_states(notes.entries, views)
        for entry, view in zip(notes.entries, views, strict=True):
            own = state[self.parameters[entry.parameter]]
            known = own.get(entry.key)
            if not isinstance(known, torch.Tensor) or (known.dtype, known.shape) != (view.dtype, view.shape):
                known = own[entry.key] = torch.empty_like(view)
            there.append(known)
            values.append(view)
        self._copy(there, values)
        for owner, key, value in notes.numbers:
            state[self.parameters[owner]][key] = value
        if number != self._taken:
            self._drop_others(notes)
            for group, known_values in zip(self._optimizer.param_groups, notes.groups, strict=True):
                group.update(known_values)
            if self._schedule is not None and notes.schedule is not None:
                self._schedule.load_state_dict(notes.schedule)
            self._taken = number

    def _drop_others(self, notes: _Metadata) -> None:
        """Remove optimizer states that the copy does not have."""
        held = {(owner, key) for owner, key, *_ in (*notes.entries, *notes.numbers)}
        for owner, parameter in enumerate(self.parameters):
            own = self._optimizer.state.get(parameter, {})
            for key in [key for key in own if (owner, key) not in held]:
                del own[key]
            if not own:
                self._optimizer.state.pop(parameter, None)

    def _noted(self, copy: int) -> tuple[int, _Metadata, list[torch.Tensor]]:
        start = copy * self._size
        number, length = _HEADER.unpack_from(self._block, start)
        known = self._read_notes[copy]
        if known is None or known[0] != number:
            begin = start + _NOTES_AT
            entries, *rest = decode(bytes(self._block[begin : begin + length]))
            if entries != self._entries[0]:
                self._entries = entries, decode(entries)
            notes = _Metadata(self._entries[1], *rest)
            known = self._read_notes[copy] = number, notes, self._state_views(copy, notes.entries)
        return known

    def _state_views(self, copy: int, entries: list[_Entry]) -> list[torch.Tensor]:
        starts = [entry.place + (0 if entry.place >= self._ends else copy * self._size) for entry in entries]
        return [
            view_of(self._block, start, entry.dtype, entry.shape) for start, entry in zip(starts, entries, strict=True)
        ]


def is_of_table(value: object, table: torch.Tensor) -> bool:
    """Return whether a value of an optimizer's state has a row for each row of a table."""
    if not isinstance(value, torch.Tensor):
        return False
    return value.shape == table.shape or (value.shape[:1] == table.shape[:1] and value.numel() == len(table))


def _can_be_sent(value: object) -> bool:
    try:
        encode(value)
    except TypeError:
        return False
    return True


def cut(parameters: dict[str, nn.Parameter], count: int) -> list[dict[str, nn.Parameter]]:
    """Split parameters into ``count`` shards of whole tensors with about equal numbers of bytes.

    Assigns the largest tensors first, each to the smallest shard. Each shard keeps the order of the model.
    """
    owners = [one.owner for one in whole([value.nbytes for value in parameters.values()], count)]
    home = dict(zip(parameters, owners, strict=True))
    return [{name: value for name, value in parameters.items() if home[name] == shard} for shard in range(count)]
