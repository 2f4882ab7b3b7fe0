"""Samples on their way from workers that have their shard to workers that would have too little to compute.

::

    holder     read t+1 ─ send t+1 ─ compute t ──────────── update │ read t+2 ...
    receiver   post the receives of t+1 ─ compute t ─────── update │ take t+1 ─ compute t+1

Which microbatches are sent in a step is a pure function of the shards that the workers have (``placement.moves``). A
holder collates a microbatch as if to compute it. The samples of the next step are sent during a step: in a message of
the size that they should have, followed by the rest if they did not fit. Every worker sends before it waits, so that no
two workers wait for each other.

An exchange belongs to a membership. After a loss the workers have another, and send the samples again that have not
arrived.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from paceline.comm.links.strides import laid_out, one_after_another, strides_of
from paceline.comm.transport.base import Message
from paceline.comm.values import decode, encode
from paceline.comm.waiting import Transfer
from paceline.comm.world import World
from paceline.data.nested import map_tensors, tensors_in
from paceline.errors import InputError
from paceline.schedule.placement import Move
from paceline.system import fault_points

_LENGTH = struct.Struct("=q")
_FORM_BYTES = 512  # room for the encoded structure of a batch
_FIRST_TAG, _REST_TAG = 7 << 25, (7 << 25) + 1


class _Arrival(NamedTuple):
    reader: int
    room: torch.Tensor
    transfers: list[Transfer]


class SampleExchange:
    """Exchange of the samples of microbatches in a membership.

    Args:
        moves: microbatches that are sent in a step.
        bytes_of: expected bytes of a microbatch of a step. The same on all workers.

    Attributes:
        bytes: number of bytes sent in the newest steps.
    """

    def __init__(
        self, world: World, moves: Callable[[int], Sequence[Move]], bytes_of: Callable[[int, int], int]
    ) -> None:
        self.world, self._moves, self._bytes_of = world, moves, bytes_of
        self.bytes: dict[int, int] = {}
        self._sends: dict[int, list[Transfer]] = {}  # by step
        self._rooms: dict[int, dict[int, _Arrival]] = {}  # by step and microbatch
        self._arrived: dict[int, dict[int, Any]] = {}

    def sent(self, step: int) -> list[range]:
        """Return the microbatches that this worker reads for others."""
        return [range(one.microbatch, one.microbatch + 1) for one in self._own(step, "reader")]

    def awaits(self, step: int, group: range) -> bool:
        """Return whether another worker sends a microbatch to this worker."""
        return group.start in [one.microbatch for one in self._own(step, "worker")]

    def _own(self, step: int, role: str) -> list[Move]:
        return [one for one in self._moves(step) if getattr(one, role) == self.world.rank]

    def is_begun(self, step: int) -> bool:
        """Return whether this worker has sent the samples of a step."""
        return step in self._arrived

    def begin(self, step: int, read: Mapping[int, Any]) -> None:
        """Start sending microbatches and receiving those of others.

        Args:
            read: data of the microbatches of :meth:`sent`, by their numbers.

        Raises:
            InputError: the data cannot be sent.
            WorkerLost: another worker was lost.
        """
        for old in [one for one in self._arrived if one < step - 1]:
            self.take(old)  # if the script has left out its batch
            for transfer in self._sends.pop(old, []):
                transfer.wait()
            del self._arrived[old], self.bytes[old]
        self.world.await_process_group()
        rooms, sends = dict[int, _Arrival](), list[Transfer]()
        for one in self._own(step, "worker"):
            room = torch.empty(self._room(step, one.microbatch), dtype=torch.uint8)
            rooms[one.microbatch] = _Arrival(one.reader, room, self._receive(step, one.reader, room, _FIRST_TAG))
        sent = 0
        for one in self._own(step, "reader"):
            first, rest = self._messages(step, one.microbatch, read[one.microbatch])
            messages = [Message(first, one.worker, _FIRST_TAG), Message(rest, one.worker, _REST_TAG)]
            for message in messages if len(rest) else messages[:1]:
                sends += self.world.start_transfers([message], [], f"while it sent samples of step {step}", host=True)
                sent += message.tensor.nbytes
                fault_points.reach("sending samples", step)
        self._rooms[step], self._sends[step], self._arrived[step], self.bytes[step] = rooms, sends, {}, sent

    def take(self, step: int) -> Mapping[int, Any]:
        """Wait for all microbatches that this worker receives in a step, and return their data by their numbers."""
        with self.world.awaiting(f"to send samples of step {step}"):
            for first in sorted(one for one in self._rooms if one <= step):  # the order of the sends
                for microbatch, arrival in self._rooms.pop(first).items():
                    self._arrived[first][microbatch] = self._decoded(first, arrival)
        return self._arrived[step]

    def _decoded(self, step: int, arrival: _Arrival) -> Any:
        reader, room, transfers = arrival
        for transfer in transfers:
            transfer.wait()
        (length,) = _LENGTH.unpack_from(room.numpy().data)
        rest = torch.empty(max(0, _LENGTH.size + length - len(room)), dtype=torch.uint8)
        for following in self._receive(step, reader, rest, _REST_TAG) if len(rest) else []:
            following.wait()
        whole = torch.cat([room[_LENGTH.size : _LENGTH.size + length], rest])
        data, strides = decode(whole.numpy().data)
        each = iter(strides)
        return map_tensors(lambda value: _restrided(value, next(each)), data)

    def _receive(self, step: int, reader: int, room: torch.Tensor, tag: int) -> list[Transfer]:
        message = Message(room, reader, tag)
        return self.world.start_transfers([], [message], f"while it waited for samples of step {step}", host=True)

    def _room(self, step: int, microbatch: int) -> int:
        return _LENGTH.size + _FORM_BYTES + self._bytes_of(step, microbatch)

    def _messages(self, step: int, microbatch: int, data: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the message of a microbatch in its room, and what does not fit."""
        strides = [None if value.is_contiguous() else strides_of(value) for value in tensors_in(data)]
        try:
            encoded = encode((data, strides))
        except TypeError as error:
            raise InputError(
                f"A microbatch of step {step} cannot be sent to another worker, as move='samples' of Located asks: "
                f"{error}. Collate tensors, arrays, numbers and texts in tuples, lists and dictionaries."
            ) from None
        room = self._room(step, microbatch)
        whole = bytearray(_LENGTH.pack(len(encoded)) + encoded)
        whole.extend(bytes(max(0, room - len(whole))))
        message = torch.frombuffer(whole, dtype=torch.uint8)
        return message[:room], message[room:]


def _restrided(value: torch.Tensor, strides: tuple[int, ...] | None) -> torch.Tensor:
    return value if strides is None else laid_out(one_after_another(value, strides), value.shape, strides)
