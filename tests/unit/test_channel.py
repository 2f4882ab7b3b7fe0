"""What goes through a channel arrives as it was, and what does not fit is refused before it is sent."""

from __future__ import annotations

from collections import defaultdict, deque
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import pytest
import torch

from paceline.comm.links.channel import TAGS, Receiver, Sender
from paceline.comm.links.variable_length import VariableLengthReceiver, VariableLengthSender
from paceline.comm.transport.base import Communicator, Message
from paceline.comm.world import World
from paceline.errors import InputError

CPU = torch.device("cpu")


class Arrival:
    """A transfer that is done when it is waited for; what is sent must be there by then."""

    def __init__(self, wire: Wire, message: Message, sends: bool) -> None:
        self.wire, self.message, self.sends, self.done = wire, message, sends, False
        if sends:
            wire.mail[message.tag].append(message.tensor.clone())

    def wait(self) -> None:
        if not self.sends and not self.done:
            sent = self.wire.mail[self.message.tag].popleft()
            assert (sent.shape, sent.dtype) == (self.message.tensor.shape, self.message.tensor.dtype)
            self.message.tensor.data.copy_(sent)
        self.done = True


class Wire:
    """Both workers of a channel, in one process: what is sent under a tag is received under it, in order."""

    device, rank = CPU, 0

    def __init__(self) -> None:
        self.mail: dict[int, deque[torch.Tensor]] = defaultdict(deque)
        self.posted: list[Arrival] = []
        self.by_host: dict[int, bool] = {}
        """For each tag, over which transport the last message went."""

    def awaiting(self, purpose: str) -> AbstractContextManager[None]:
        assert purpose in ("to send the output of stage 0", "to take the output of stage 0")
        return nullcontext()

    def start_transfers(
        self, sends: list[Message], receives: list[Message], where: str, communicator: Communicator, host: bool
    ) -> list[Arrival]:
        assert where.startswith("while it sent ")
        assert {one.tensor.device for one in sends + receives} == {CPU if host else self.device}
        for one in sends:
            self.by_host[one.tag] = host
        for one in receives:
            assert self.by_host[one.tag] == host
        new = [Arrival(self, one, True) for one in sends] + [Arrival(self, one, False) for one in receives]
        self.posted += new
        return new


@pytest.fixture
def wire() -> Wire:
    return Wire()


@pytest.fixture
def outlet(wire: Wire) -> Sender:
    return Sender(cast(World, wire), 1, 3 * TAGS, "the output of stage 0")


@pytest.fixture
def inlet(wire: Wire) -> Receiver:
    return Receiver(cast(World, wire), 0, 3 * TAGS, "the output of stage 0")


@pytest.mark.parametrize("on_host", [(), (0,), (0, 1), (1, 2)])
def test_each_tensor_goes_from_where_it_is(wire: Wire, outlet: Sender, inlet: Receiver, on_host: tuple[int]) -> None:
    """Activations lie on the devices of the workers, and states of generators on the CPU."""
    wire.device = torch.device("meta")
    values = [torch.ones(2, 3, device=CPU if place in on_host else wire.device) for place in range(3)]
    for _ in range(2):
        inlet.expect(2)
        outlet.send(2, values)
        taken = inlet.take()
        assert [one.device for one in taken if one is not None] == [one.device for one in values]


def test_what_the_host_reads_goes_over_its_transport_on_a_cpu_too(wire: Wire, outlet: Sender, inlet: Receiver) -> None:
    """Waits of the workers' transport may not block: states of generators are not there when the host reads them."""
    for _ in range(2):
        outlet.send(2, [torch.ones(2) for _ in range(3)], host=range(1, 2))
        inlet.expect(2)
        inlet.take()
        assert [wire.by_host[3 * TAGS + 2 + place] for place in range(3)] == [False, True, False]


def test_lengths_go_over_the_transport_of_the_host(wire: Wire) -> None:
    outlet = VariableLengthSender(cast(World, wire), 1, 3 * TAGS, "the output of stage 0")
    outlet.send([torch.ones(2), torch.ones(2)])
    assert wire.by_host[3 * TAGS + 2] and not wire.by_host[4 * TAGS + 2]


def letters(samples: int) -> list[torch.Tensor | None]:
    return [torch.randn(samples, 3, requires_grad=True), None, torch.arange(samples), torch.zeros(()).bool()]


def same(found: list[Any], sent: list[Any]) -> bool:
    return all(
        (one is None and other is None)
        or (one.dtype == other.dtype and torch.equal(one, other) and one.requires_grad == other.requires_grad)
        for one, other in zip(found, sent, strict=True)
    )


def test_tensors_of_all_kinds_arrive(outlet: Sender, inlet: Receiver) -> None:
    for _ in range(3):
        sent = letters(4)
        size = outlet.send(4, sent)
        assert size == 4 * 3 * 4 + 4 * 8 + 1
        inlet.expect(4)
        assert same(inlet.take(), sent)


def test_what_is_expected_early_arrives_in_order(outlet: Sender, inlet: Receiver) -> None:
    """Also where the first of another number of samples comes in between."""
    for samples in (4, 4, 2, 4, 2):
        inlet.expect(samples)
    everything = [letters(samples) for samples in (4, 4, 2, 4, 2)]
    for sent in everything:
        outlet.send(cast(torch.Tensor, sent[2]).numel(), sent)
    for sent in everything:
        assert same(inlet.take(), sent)


def test_the_shapes_are_told_once_for_each_number_of_samples(wire: Wire, outlet: Sender) -> None:
    counts = []
    for samples in (4, 4, 4, 2, 2):
        before = len(wire.posted)
        outlet.send(samples, letters(samples))
        counts.append(len(wire.posted) - before)
    assert counts == [5, 3, 3, 5, 3]


def test_the_receiver_is_ready_before_what_it_knows_comes(wire: Wire, outlet: Sender, inlet: Receiver) -> None:
    outlet.send(4, letters(4))
    inlet.expect(4)
    inlet.take()
    before = len(wire.posted)
    inlet.expect(4)
    assert len(wire.posted) == before + 3


def test_lists_of_any_length(wire: Wire) -> None:
    """None, one, some; and more than a channel has places for."""
    outlet = VariableLengthSender(cast(World, wire), 1, 3 * TAGS, "the output of stage 0")
    inlet = VariableLengthReceiver(cast(World, wire), 0, 3 * TAGS, "the output of stage 0")
    for length in (1, 0, 3, 300, 3, 0, 1):
        sent = [torch.randn(4, 3).t() for _ in range(length)]
        outlet.send(sent)
        assert same(inlet.take(), sent)
    outlet.finish()
    assert all(one.done for one in wire.posted)


@pytest.mark.parametrize("exact", [False, True])
def test_a_part_of_a_larger_tensor_takes_the_room_of_a_part(wire: Wire, inlet: Receiver, exact: bool) -> None:
    """But if the bits are to be the same, which may depend on where the numbers lie."""
    outlet = Sender(cast(World, wire), 1, 3 * TAGS, "the output of stage 0", exact=exact)
    whole = torch.randn(8, 512, 64)
    outlet.send(8, [whole[:, 0], whole.transpose(0, 2)])
    inlet.expect(8)
    part, turned = inlet.take()
    assert part is not None and turned is not None
    assert torch.equal(part, whole[:, 0]) and torch.equal(turned, whole.transpose(0, 2))
    assert part.stride() == (whole[:, 0].stride() if exact else (64, 1))
    assert part.untyped_storage().nbytes() == 4 * ((7 * 512 + 1) * 64 if exact else 8 * 64)
    assert turned.stride() == whole.transpose(0, 2).stride()


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ([torch.zeros(4, 5)], ["float32 [4, 3]", "float32 [4, 5]"]),
        ([torch.zeros(4, 3).double()], ["float32 [4, 3]", "float64 [4, 3]"]),
        ([torch.zeros(4, 3), None], ["to torch.float32 [4, 3], nothing."]),
    ],
)
def test_another_shape_for_as_many_samples_is_refused(outlet: Sender, wire: Wire, changed: Any, words: Any) -> None:
    outlet.send(4, [torch.zeros(4, 3)])
    before = len(wire.posted)
    with pytest.raises(InputError, match="output of stage 0 changed") as error:
        outlet.send(4, changed)
    for word in ("4 samples", "pad", *words):
        assert word in str(error.value)
    assert len(wire.posted) == before


def test_the_oldest_are_waited_for_when_many_are_under_way(wire: Wire, outlet: Sender) -> None:
    for number in range(12):
        outlet.send(4, [torch.full((4,), float(number))])
    waited = [one.done for one in wire.posted if one.sends]
    assert waited == [True] * (len(waited) - 8) + [False] * 8
    outlet.finish()
    assert all(one.done for one in wire.posted)
