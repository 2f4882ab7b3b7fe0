"""What a parameter server holds: some parameters, buffers and optimizer states, in two copies.

::

    copy 0   parameters, buffers | optimizer states | learning rates and schedule        version 4 ◀ counts
    copy 1   parameters, buffers | optimizer states | learning rates and schedule        version 5   is being written

An update is written into the spare copy; then a number elsewhere (``comm.assignment.step_claims``) says that it counts.
A worker that is killed at any instant leaves the other copy whole.

On one machine it lies in memory that all workers see. On several, each has it in its own memory (:class:`OwnBlocks`),
and a copy goes from one to another as the bytes that it is.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from paceline.comm.shm.tensors import aligned, view_of
from paceline.comm.values import decode, encode, sendable
from paceline.errors import InputError

_HEADER = struct.Struct("<qq")
_NOTES_AT = 64
_NOTES_BYTES = 1 << 20
_NOTES_BYTES_EACH = 1 << 10
_STATES = 8
"""Room for optimizer states, in the size of the parameters; memory that is not written takes none."""


@sendable
class _Entry(NamedTuple):
    """One tensor of an optimizer state: of which parameter, under which key, and where it lies."""

    parameter: int
    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    place: int


class _Metadata(NamedTuple):
    """What is no tensor, and where the optimizer states are."""

    entries: list[_Entry]
    numbers: list[tuple[int, str, object]]
    groups: list[dict[str, Any]]
    schedule: dict[str, Any] | None


class Blocks(Protocol):
    """Where a shard lies."""

    def share(self, size: int) -> list[memoryview]:
        """Map a new block; the shard lies in the first one."""
        ...


class OwnBlocks:
    """Memory of this process alone."""

    def share(self, size: int) -> list[memoryview]:
        """Map a block; what is not written takes no memory."""
        return [memoryview(mmap.mmap(-1, size))]


class Buffered(Protocol):
    """What has buffers, as a model does."""

    def named_buffers(self) -> Iterable[tuple[str, torch.Tensor]]:
        """The buffers by name."""
        ...


class Shard:
    """A part of the state; all workers make it together, in the same order.

    Args:
        memory: of the workers, or of this one alone.
        model: whose buffers it holds.
        parameters: that it holds, by name.
        buffers: the names of the buffers that it holds.
        optimizer: of all parameters.
        schedule: of the learning rate, or none.
    """

    def __init__(
        self,
        memory: Blocks,
        model: Buffered,
        parameters: dict[str, nn.Parameter],
        buffers: Sequence[str],
        optimizer: Optimizer,
        schedule: LRScheduler | None,
    ) -> None:
        self.parameters = list(parameters.values())
        self._names = list(parameters)
        self._model = model
        self._buffers = list(buffers)
        self._optimizer = optimizer
        self._schedule = schedule
        fixed = self._tensors()
        self._notes_room = _NOTES_BYTES + _NOTES_BYTES_EACH * len(parameters)
        self._states_at = _NOTES_AT + self._notes_room + sum(aligned(value.nbytes) for value in fixed)
        states = sum(_STATES * (aligned(value.nbytes) + 64) for value in self.parameters)
        self._size = -(-(self._states_at + states) // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        self._block = memory.share(2 * self._size)[0]
        self._fixed = [self._fixed_views(copy, fixed) for copy in (0, 1)]
        self._read_notes: list[tuple[int, _Metadata, list[torch.Tensor]] | None] = [None, None]
        self._entries: tuple[bytes, list[_Entry]] = encode([]), []  # as bytes too: they hardly ever change
        self._taken = -1
        self.check_states()

    def views(self, copy: int) -> list[torch.Tensor]:
        """The parameters of a copy as they lie in memory."""
        return self._fixed[copy][: len(self.parameters)]

    def write(self, copy: int) -> None:
        """Put what this worker has into a copy."""
        with torch.no_grad():
            torch._foreach_copy_(self._fixed[copy], self._tensors())
        self.write_states(copy)

    def read(self, copy: int, states: bool = True) -> None:
        """Take over a copy; without the optimizer states, only what a gradient is computed from."""
        with torch.no_grad():
            torch._foreach_copy_(self._tensors(), self._fixed[copy])
        if states:
            self.read_states(copy)

    def write_buffers(self, copy: int) -> None:
        """Put the buffers alone into a copy."""
        self._copy_buffers(self._fixed[copy][len(self.parameters) :], self._tensors()[len(self.parameters) :])

    def read_buffers(self, copy: int) -> None:
        """Take over the buffers alone."""
        self._copy_buffers(self._tensors()[len(self.parameters) :], self._fixed[copy][len(self.parameters) :])

    def weights(self, copy: int) -> memoryview:
        """The bytes of the parameters and buffers of a copy, to be read or written."""
        start = copy * self._size + _NOTES_AT + self._notes_room
        return memoryview(self._block)[start : copy * self._size + self._states_at]

    def contents(self, copy: int) -> memoryview:
        """The bytes of a whole copy, as far as it is used."""
        _, notes, _ = self._noted(copy)
        ends = [entry.place + entry.dtype.itemsize * torch.Size(entry.shape).numel() for entry in notes.entries]
        return memoryview(self._block)[copy * self._size : copy * self._size + max([self._states_at, *ends])]

    def fill(self, copy: int, contents: bytes | bytearray | memoryview) -> None:
        """Put the :meth:`contents` of a shard of another worker into a copy."""
        start = copy * self._size
        self._block[start : start + len(contents)] = bytes(contents)
        self._read_notes[copy] = None
        self.forget()

    def forget(self) -> None:
        """What this worker has may be of no copy any more: the next one is taken over as a whole."""
        self._taken = -1

    def _copy_buffers(self, to: list[torch.Tensor], values: list[torch.Tensor]) -> None:
        if to:
            with torch.no_grad():
                torch._foreach_copy_(to, values)

    def _tensors(self) -> list[torch.Tensor]:
        held = dict(self._model.named_buffers()) if self._buffers else {}
        return [value.data for value in self.parameters] + [held[name].data for name in self._buffers]

    def _fixed_views(self, copy: int, examples: list[torch.Tensor]) -> list[torch.Tensor]:
        views, place = [], copy * self._size + _NOTES_AT + self._notes_room
        for example in examples:
            views.append(view_of(self._block, place, example.dtype, tuple(example.shape)))
            place += aligned(example.nbytes)
        return views

    def check_states(self) -> None:
        """Refuse optimizer states that cannot be held.

        Raises:
            InputError: says which.
        """
        self._packed(self._described()[0])

    # The optimizer's states may grow during training: a parameter gets one with its first gradient.

    def write_states(self, copy: int) -> None:
        """Put the optimizer states, the learning rates and the schedule into a copy."""
        notes, values = self._described()
        written = self._packed(notes)
        start = copy * self._size
        number = 1 + max(_HEADER.unpack_from(self._block, each * self._size)[0] for each in (0, 1))
        _HEADER.pack_into(self._block, start, number, len(written))
        self._block[start + _NOTES_AT : start + _NOTES_AT + len(written)] = written
        if values:
            with torch.no_grad():
                torch._foreach_copy_(self._state_views(copy, notes.entries), values)
        self._taken = number

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
        """Names the first value that cannot be sent."""
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
        place = self._states_at
        for owner, parameter in enumerate(self.parameters):
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
                entries.append(_Entry(owner, key, value.dtype, tuple(value.shape), place))
                values.append(value)
                place += aligned(value.nbytes)
        if place > self._size:
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
        """Take over the optimizer states, the learning rates and the schedule."""
        number, notes, views = self._noted(copy)
        state, there, values = self._optimizer.state, [], []
        for entry, view in zip(notes.entries, views, strict=True):
            own = state[self.parameters[entry.parameter]]
            known = own.get(entry.key)
            if not isinstance(known, torch.Tensor) or (known.dtype, known.shape) != (view.dtype, view.shape):
                known = own[entry.key] = torch.empty_like(view)
            there.append(known)
            values.append(view)
        if there:
            with torch.no_grad():
                torch._foreach_copy_(there, values)
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
        """Remove states that the copy does not have."""
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
        start = copy * self._size
        return [view_of(self._block, start + entry.place, entry.dtype, entry.shape) for entry in entries]


def _can_be_sent(value: object) -> bool:
    try:
        encode(value)
    except TypeError:
        return False
    return True


def cut(parameters: dict[str, nn.Parameter], count: int) -> list[dict[str, nn.Parameter]]:
    """Cut parameters into so many shards of whole tensors, of about as many bytes: the largest first, to the emptiest.

    Each shard keeps the order of the model.
    """
    loads = [0] * count
    home: dict[str, int] = {}
    for name, value in sorted(parameters.items(), key=lambda one: -one[1].nbytes):
        shard = min(range(count), key=lambda one: (loads[one], one))
        loads[shard] += max(value.nbytes, 1)
        home[name] = shard
    return [{name: value for name, value in parameters.items() if home[name] == shard} for shard in range(count)]
