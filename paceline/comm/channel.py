"""Tensors that go from one worker to another in a known order, such as what crosses the border between two stages.

Their types and shapes are told once for each number of samples, ahead of the first tensors; from then on the receiver
is ready before they come.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import torch

from paceline.comm.world import Message, Transfer, World
from paceline.errors import InputError

TAGS = 1 << 8
"""Of each channel: two for what is told once, one for each tensor."""

_UNDER_WAY = 8
"""So many messages may be on their way before the sender waits for the oldest."""


class Form(NamedTuple):
    """What a tensor is like."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    trained: bool
    """Whether a gradient for it is wanted."""


Forms: TypeAlias = "tuple[Form | None, ...]"


class Outlet:
    """Sends lists of tensors to one worker.

    Args:
        world: the workers.
        peer: the rank that receives.
        tag: the first tag to use.
        what: is sent, for an error.
    """

    def __init__(self, world: World, peer: int, tag: int, what: str) -> None:
        self._world = world
        self._peer = peer
        self._tag = tag
        self._what = what
        self._forms: dict[int, Forms] = {}
        self._leaving: deque[list[Transfer]] = deque()

    def send(self, samples: int, values: Sequence[torch.Tensor | None]) -> int:
        """Start to send; returns the bytes.

        Args:
            samples: how many samples the values are about.
            values: the tensors; they must not change until :meth:`finish`.

        Raises:
            InputError: the tensors have other shapes than before for as many samples.
            WorkerLost: the receiver is gone.
        """
        forms = tuple(None if value is None else _form(value) for value in values)
        transfers: list[Transfer] = []
        if len(values) > TAGS - 2:
            raise InputError(
                f"{self._what} has {len(values)} tensors; {TAGS - 2} can be sent at most. Put them together."
            )
        if samples not in self._forms:
            self._forms[samples] = forms
            letter = torch.frombuffer(bytearray(pickle.dumps(forms)), dtype=torch.uint8)
            length = torch.tensor([len(letter)])
            transfers += self._post(length.to(self._world.device), 0) + self._post(letter.to(self._world.device), 1)
        if self._forms[samples] != forms:
            raise InputError(
                f"{self._what} changed between microbatches of {samples} samples from {_told(self._forms[samples])} "
                f"to {_told(forms)}. All microbatches must give the same shapes here: pad the samples to one length."
            )
        size = 0
        for place, value in enumerate(values):
            if value is not None:
                transfers += self._post(value.detach().contiguous(), 2 + place)
                size += value.numel() * value.element_size()
        self._leaving.append(transfers)
        while len(self._leaving) > _UNDER_WAY:
            _await(self._leaving.popleft())
        return size

    def finish(self) -> None:
        """Wait until all has been sent.

        Raises:
            WorkerLost: the receiver is gone.
        """
        while self._leaving:
            _await(self._leaving.popleft())

    def _post(self, tensor: torch.Tensor, place: int) -> list[Transfer]:
        return self._world.post([Message(tensor, self._peer, self._tag + place)], [], f"while it sent {self._what}")


class Inlet:
    """Receives what an :class:`Outlet` sends, in the same order.

    Args:
        world: the workers.
        peer: the rank that sends.
        tag: the first tag of the outlet.
        what: is received, for an error.
    """

    def __init__(self, world: World, peer: int, tag: int, what: str) -> None:
        self._world = world
        self._peer = peer
        self._tag = tag
        self._what = what
        self._forms: dict[int, Forms] = {}
        self._expected: deque[_Arrival] = deque()

    def expect(self, samples: int) -> None:
        """Make room for the next list of tensors, about so many samples."""
        self._expected.append(_Arrival(samples))
        self._make_ready()

    def take(self) -> list[torch.Tensor | None]:
        """Wait for the first list that is expected and not taken yet; those for which a gradient is wanted say so.

        Raises:
            WorkerLost: the sender is gone, or silent for the timeout.
        """
        first = self._expected[0]
        if not first.ready:
            self._forms[first.samples] = self._ask()
            self._make_ready()
        self._expected.popleft()
        _await(first.transfers)
        return first.values

    def _make_ready(self) -> None:
        """Receive in the order in which it is sent: nothing before what is not known yet."""
        for arrival in self._expected:
            if arrival.ready:
                continue
            forms = self._forms.get(arrival.samples)
            if forms is None:
                return
            arrival.ready = True
            for place, form in enumerate(forms):
                value = None
                if form is not None:
                    value = torch.empty(form.shape, dtype=form.dtype, device=self._world.device)
                    arrival.transfers += self._post(value, 2 + place)
                    value.requires_grad_(form.trained)
                arrival.values.append(value)

    def _ask(self) -> Forms:
        length = torch.zeros(1, dtype=torch.int64, device=self._world.device)
        _await(self._post(length, 0))
        letter = torch.empty(int(length.item()), dtype=torch.uint8, device=self._world.device)
        _await(self._post(letter, 1))
        forms: Forms = pickle.loads(letter.cpu().numpy().tobytes())
        return forms

    def _post(self, tensor: torch.Tensor, place: int) -> list[Transfer]:
        return self._world.post([], [Message(tensor, self._peer, self._tag + place)], f"while it sent {self._what}")


class _Arrival:
    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.ready = False
        self.values: list[torch.Tensor | None] = []
        self.transfers: list[Transfer] = []


def _await(transfers: list[Transfer]) -> None:
    for transfer in transfers:
        transfer.wait()


def _form(value: torch.Tensor) -> Form:
    return Form(value.dtype, tuple(value.shape), value.requires_grad)


def _told(forms: Forms) -> str:
    return ", ".join("nothing" if form is None else f"{form.dtype} {list(form.shape)}" for form in forms)
