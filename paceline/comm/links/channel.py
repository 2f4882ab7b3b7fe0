"""Channels for tensors that one worker sends to another in a known order, such as activations between two stages.

Types, shapes and strides are sent once for each number of samples, before the first tensors. Afterwards the receiver
posts its receives in advance. Small tensors between workers of one machine go through shared memory.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Container, Sequence
from typing import NamedTuple, TypeAlias

import torch

from paceline.comm.links.strides import Strides, dense_strides_of, laid_out, one_after_another, strides_of
from paceline.comm.shm.ring import LARGEST_BYTES, Ring
from paceline.comm.transport.base import Communicator, Message
from paceline.comm.values import decode, encode, sendable
from paceline.comm.waiting import Transfer
from paceline.comm.world import World
from paceline.errors import InputError

TAGS = 1 << 8  # number of tags per channel: two for the messages that are sent once, and one for each tensor

_MOST_IN_FLIGHT = 8  # maximum number of lists in flight before the sender waits for the oldest list


@sendable
class Form(NamedTuple):
    """Type, shape and strides of a tensor, whether it needs a gradient, and over which transport it goes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    trained: bool  # whether the tensor needs a gradient
    strides: Strides
    host: bool  # whether the tensor is on the CPU for the host to read, as states of generators are


Forms: TypeAlias = "tuple[Form | None, ...]"


class Sender:
    """Sender of lists of tensors to one worker.

    Args:
        peer: rank of the receiver.
        ring: ring buffer in shared memory for lists that fit. Defaults to none.
        exact: whether the receiver restores the strides of a view into a larger tensor, because bits may depend on
            them. By default the received tensor is dense.
    """

    def __init__(
        self, world: World, peer: int, tag: int, what: str, ring: Ring | None = None, exact: bool = False
    ) -> None:
        self._world, self._peer, self._tag, self._what = world, peer, tag, what
        self._ring = ring
        self._strides_of = strides_of if exact else dense_strides_of
        self._forms: dict[int, Forms] = {}
        self._in_flight: deque[list[Transfer]] = deque()

    def send(self, samples: int, values: Sequence[torch.Tensor | None], host: Container[int] = ()) -> int:
        """Start sending a list of tensors, and return its size in bytes.

        Args:
            values: tensors to send. They must not change until :meth:`finish`.
            host: indices of the tensors that the receiver reads on its host, which must be on the CPU. They go over
                the transport of the host, whose waits block, also where the workers compute on the CPU.
        """
        values = [None if value is None else value.resolve_conj().resolve_neg() for value in values]
        forms = tuple(
            None if value is None else self._form(value, place in host or value.device != self._world.device)
            for place, value in enumerate(values)
        )
        transfers: list[Transfer] = []
        if len(values) > TAGS - 2:
            raise InputError(
                f"{self._what} has {len(values)} tensors; {TAGS - 2} can be sent at most. Put them together."
            )
        if samples not in self._forms:
            self._forms[samples] = forms
            encoded = torch.frombuffer(bytearray(encode(forms)), dtype=torch.uint8)
            length = torch.tensor([len(encoded)])
            transfers += self._post(length, 0, host=True) + self._post(encoded, 1, host=True)
        before, now = _differing(self._forms[samples], forms)
        if before != now:
            raise InputError(
                f"{self._what} changed between microbatches of {samples} samples from {_described(before)} to "
                f"{_described(now)}. "
                f"All microbatches must give the same types and shapes here: pad the samples to one length."
            )
        plain = {
            2 + place: one_after_another(value.detach(), form.strides)
            for place, (value, form) in enumerate(zip(values, self._forms[samples], strict=True))
            if value is not None and form is not None
        }
        size = sum(value.nbytes for value in plain.values())
        with self._world.awaiting(f"to take {self._what}"):
            if self._ring is not None and size <= LARGEST_BYTES:
                self._ring.send([*plain.values()])
            else:
                for place, value in plain.items():
                    form = forms[place - 2]
                    transfers += self._post(value, place, host=form is not None and form.host)
            self._in_flight.append(transfers)
            while len(self._in_flight) > _MOST_IN_FLIGHT:
                _await(self._in_flight.popleft())
        return size

    def finish(self) -> None:
        """Wait until all lists have been sent. Raises WorkerLost if the receiver was lost."""
        with self._world.awaiting(f"to take {self._what}"):
            while self._in_flight:
                _await(self._in_flight.popleft())

    def _form(self, value: torch.Tensor, host: bool) -> Form:
        return Form(value.dtype, tuple(value.shape), value.requires_grad, self._strides_of(value), host)

    def _post(self, tensor: torch.Tensor, place: int, host: bool) -> list[Transfer]:
        message = Message(tensor, self._peer, self._tag + place)
        communicator = communicator_of(self._tag, self._world.rank, self._peer)
        return self._world.start_transfers([message], [], f"while it sent {self._what}", communicator, host)


class Receiver:
    """Receiver of the lists of a :class:`Sender`, in the same order."""

    def __init__(self, world: World, peer: int, tag: int, what: str, ring: Ring | None = None) -> None:
        self._world, self._peer, self._tag, self._what = world, peer, tag, what
        self._ring = ring
        self._forms: dict[int, Forms] = {}
        self._expected: deque[_Arrival] = deque()

    def expect(self, samples: int) -> None:
        """Prepare to receive the next list of tensors, which belongs to this number of samples."""
        self._expected.append(_Arrival(samples))
        self._make_ready()

    def take(self) -> list[torch.Tensor | None]:
        """Return the oldest expected list after it arrives. Tensors that need a gradient have ``requires_grad`` set."""
        first, values = self._expected[0], list[torch.Tensor | None]()
        with self._world.awaiting(f"to send {self._what}"):
            if not first.ready:
                self._forms[first.samples] = self._ask()
                self._make_ready()
            self._expected.popleft()
            _await(first.transfers)
            if self._ring is not None and first.through_ring:
                self._ring.take([numbers for numbers in first.numbers if numbers is not None])
        for numbers, form in zip(first.numbers, self._forms[first.samples], strict=True):
            if numbers is None or form is None:
                values.append(None)
            else:
                values.append(laid_out(numbers, form.shape, form.strides).requires_grad_(form.trained))
        return values

    def _make_ready(self) -> None:
        """Post receives in the order of the sends, up to the first list whose forms are unknown."""
        for arrival in self._expected:
            if arrival.ready:
                continue
            if (forms := self._forms.get(arrival.samples)) is None:
                return
            arrival.ready = True
            arrival.numbers = [form and self._room_for(form) for form in forms]
            size = sum(numbers.nbytes for numbers in arrival.numbers if numbers is not None)
            arrival.through_ring = self._ring is not None and size <= LARGEST_BYTES
            for place, (numbers, form) in enumerate(zip(arrival.numbers, forms, strict=True)):
                if numbers is not None and form is not None and not arrival.through_ring:
                    arrival.transfers += self._post(numbers, 2 + place, form.host)

    def _room_for(self, form: Form) -> torch.Tensor:
        return torch.empty(math.prod(form.shape), dtype=form.dtype, device="cpu" if form.host else self._world.device)

    def _ask(self) -> Forms:
        length = torch.zeros(1, dtype=torch.int64)
        _await(self._post(length, 0, host=True))
        encoded = torch.empty(int(length.item()), dtype=torch.uint8)
        _await(self._post(encoded, 1, host=True))
        forms: Forms = decode(encoded.numpy().tobytes())
        return forms

    def _post(self, tensor: torch.Tensor, place: int, host: bool) -> list[Transfer]:
        message = Message(tensor, self._peer, self._tag + place)
        communicator = communicator_of(self._tag, self._peer, self._world.rank)
        return self._world.start_transfers([], [message], f"while it sent {self._what}", communicator, host)


def communicator_of(tag: int, sender: int, receiver: int) -> Communicator:
    """Return the communicator of a channel, given its first tag. It must be open if the transport is ordered."""
    return Communicator(tag, sender, receiver)


class _Arrival:
    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.ready = False
        self.through_ring = False
        self.numbers: list[torch.Tensor | None] = []
        self.transfers: list[Transfer] = []


def _await(transfers: list[Transfer]) -> None:
    for transfer in transfers:
        transfer.wait()


def _differing(left: Forms, right: Forms) -> tuple[Forms, Forms]:
    """Return both without strides, which may differ, and without the indices at which neither has a tensor."""
    empty = {place for place, pair in enumerate(zip(left, right, strict=False)) if pair == (None, None)}
    before, now = (
        tuple(form and form._replace(strides=()) for place, form in enumerate(forms) if place not in empty)
        for forms in (left, right)
    )
    return before, now


def _described(forms: Forms) -> str:
    return ", ".join("nothing" if form is None else f"{form.dtype} {list(form.shape)}" for form in forms)
