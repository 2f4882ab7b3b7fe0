"""Which buckets and formats are chosen, with steps that only pretend to compute and links of any speed."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from paceline.errors import ConfigError
from paceline.schedule.communication import Coding, Computing, Link, price
from paceline.schedule.link_shares import full
from paceline.settings import Settings
from paceline.strategies import registry, requirements
from paceline.strategies.data_parallel import communication
from paceline.strategies.data_parallel.communication import TRIAL, WARM, WATCH, ChosenCommunication
from paceline.system.wires import checked

COMPUTE, LAST, UPDATE = 0.2, 0.1, 0.03
"""Seconds before the last backward pass, in it, and after the exchange."""
CODING = {
    "float32": 0.0,
    "bfloat16": 0.1e-9,
    "fp8-e4m3": 0.8e-9,
    "int8": 1.2e-9,
    "fp8-e5m2": 0.8e-9,
    "int-auto": 1.2e-9,
}
"""Seconds to encode a byte of float32."""
BYTES = {"float32": 1.0, "bfloat16": 0.5, "fp8-e4m3": 0.25, "int8": 0.4, "fp8-e5m2": 0.25, "int-auto": 0.25}
LAYERS, LAYER_BYTES = 16, 2**20
LATENCY = 1e-3


@dataclass
class Network:
    """Links, and the time that has passed on them."""

    rate: float
    clock: float = 0.0
    made: list[tuple[str, float | None]] = field(default_factory=list)
    records: list[dict[str, Any]] = field(default_factory=list)

    def buckets(self, wire: str, megabytes: float | None) -> list[float]:
        """Seconds of each bucket on its way."""
        size = full(2) if megabytes is None else megabytes * 1e6
        count = max(1, int(LAYERS * LAYER_BYTES * BYTES[wire] // size))
        return [LATENCY + LAYERS * LAYER_BYTES * BYTES[wire] / count / self.rate] * count

    def step(self, wire: str, megabytes: float | None) -> float:
        """Seconds of a step that encodes two microbatches and sends buckets during its last backward pass."""
        buckets = self.buckets(wire, megabytes)
        end, encode = 0.0, CODING[wire] * LAYERS * LAYER_BYTES
        for index, seconds in enumerate(buckets):
            end = max(end, COMPUTE + encode + (LAST + encode) * (index + 1) / len(buckets)) + seconds
        return end + UPDATE


def strategy(
    monkeypatch: pytest.MonkeyPatch, network: Network, state: dict[str, Any] | None = None, **given: Any
) -> ChosenCommunication:
    class Pretended:
        """Takes the time of a step on this network."""

        seconds = (COMPUTE, COMPUTE)

        def __init__(self, context: Any) -> None:
            self._way = context.settings.wire, context.settings.bucket_megabytes
            network.made.append(self._way)
            about = {"bucket_bytes": full(2)}
            self.reduction = SimpleNamespace(kind="tree", describe=lambda: about)

        def groups(self, step: int) -> list[range]:
            return [range(0, 1), range(1, 2)]

        def shares(self, count: int) -> list[range]:
            return [range(0, 2), range(2, 4)]

        def step(self, step: int, groups: list[Any]) -> str:
            network.clock += network.step(*self._way)
            return "outcome"

        def exchange_alone(self, step: int) -> float:
            return sum(network.buckets(*self._way))

        def renew(self, context: Any) -> Pretended:
            return Pretended(context)

        def close(self) -> None:
            """Nothing to release."""

    @dataclass
    class Context:
        settings: Settings
        world: Any
        order: Any
        update: Any
        compute: Any
        events: Any
        strategy_state: dict[str, Any]
        warnings: list[str]

    def gather(value: Any, what: str) -> list[Any]:
        network.clock += LATENCY
        return [value, value]

    monkeypatch.setattr(communication, "AllReduce", Pretended)
    monkeypatch.setattr(communication, "perf_counter", lambda: network.clock)
    monkeypatch.setattr(communication, "coding_seconds", lambda context: (CODING[context.settings.wire], 0.0, 0.0))
    parameters = {str(number): nn.Parameter(torch.empty(512, 512)) for number in range(LAYERS)}
    settings = Settings.model_validate({"batch": 4, "exact": True, "communication": "auto"} | given)
    context: Any = Context(
        settings,
        SimpleNamespace(
            size=2,
            rank=0,
            gather=gather,
            shared_memory=None,
            host_memory=None,
            device=torch.device("cpu"),
            link_shares=None,
        ),
        SimpleNamespace(microbatches=4),
        SimpleNamespace(parameters=parameters),
        SimpleNamespace(model=nn.Module(), scale=1.0),
        SimpleNamespace(mark=lambda event, **record: network.records.append(record)),
        {} if state is None else {"communication": state},
        [],
    )
    return ChosenCommunication(context, Pretended, registry.capabilities)  # type: ignore[arg-type]


def train(chosen: ChosenCommunication, steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        assert chosen.step(step, []) == "outcome"  # type: ignore[comparison-overlap]


def fastest(network: Network, *wires: str) -> float:
    return min(network.step(wire, size) for wire in wires for size in (None, 1.0, 5.0, 25.0))


SETTLED = 5 * (WARM + TRIAL) + 1
WIRES = {"bits": ["float32"], "rounding": ["float32", "bfloat16", "fp8-e4m3", "int8"], "convergent": [*BYTES]}


@pytest.mark.parametrize("tolerance", WIRES)
@pytest.mark.parametrize("megabits", [50, 100, 333, 1000, 25_000])
def test_the_fastest_is_chosen(monkeypatch: pytest.MonkeyPatch, tolerance: str, megabits: int) -> None:
    network = Network(megabits * 1e6 / 8)
    chosen = strategy(monkeypatch, network, tolerance=tolerance)
    train(chosen, SETTLED)
    last, seconds = network.records[-1], network.step(*network.made[-1])
    assert seconds <= 1.03 * fastest(network, *WIRES[tolerance])
    assert seconds <= network.step("float32", None)
    assert last["seconds"] == pytest.approx(seconds)
    assert last["predicted"] == pytest.approx(seconds, rel=0.1)
    assert {wire for wire, _ in network.made} <= {*WIRES[tolerance]}
    tried = [record for record in network.records if record["predicted"]]
    took = [network.step(record["wire"], record["bucket_megabytes"]) for record in tried]
    assert [record["predicted"] for record in tried] == pytest.approx(took, rel=0.04)
    count = len(network.made)
    train(chosen, 10 * (WARM + WATCH), SETTLED)
    assert len(network.made) == count, "nothing has changed, so nothing is to be tried"


@pytest.mark.parametrize(("before", "after"), [(100, 25_000), (25_000, 100)])
def test_other_links_lead_to_another_choice(monkeypatch: pytest.MonkeyPatch, before: int, after: int) -> None:
    network = Network(before * 1e6 / 8)
    chosen = strategy(monkeypatch, network, tolerance="rounding")
    train(chosen, SETTLED)
    first = network.made[-1]
    network.rate = after * 1e6 / 8
    train(chosen, 3 * (WARM + WATCH) + SETTLED, SETTLED)
    assert network.made[-1] != first
    assert network.step(*network.made[-1]) <= 1.03 * fastest(network, *WIRES["rounding"])


def test_the_formats_of_a_run_can_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    network = Network(100e6 / 8)
    chosen = strategy(monkeypatch, network, tolerance="rounding")
    train(chosen, SETTLED)
    formats = network.records[-1]["formats"]
    again = Network(100e6)
    train(strategy(monkeypatch, again, communication=formats), SETTLED)
    runs = [[wire for wire, _ in one.made] for one in (network, again)]
    wires = [[wire for place, wire in enumerate(one) if [wire] != one[max(0, place - 1) : place]] for one in runs]
    assert wires[0] == wires[1]
    assert len(wires[0]) > 1


def test_a_run_resumes_with_its_choice_and_looks_again_with_other_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    network = Network(100e6 / 8)
    chosen = strategy(monkeypatch, network, tolerance="rounding")
    train(chosen, SETTLED)
    for workers, looks in (2, False), (3, True):
        again = Network(100e6 / 8)
        state = chosen._state | {"workers": workers}
        train(strategy(monkeypatch, again, state, tolerance="rounding"), SETTLED, SETTLED)
        assert again.made[0] == network.made[-1]
        assert (len(again.made) > 1) is looks


def test_local_training_is_mentioned_if_it_is_tolerated(monkeypatch: pytest.MonkeyPatch) -> None:
    for tolerance, said in ("rounding", False), ("convergent", True):
        network = Network(20e6 / 8)
        train(strategy(monkeypatch, network, tolerance=tolerance), SETTLED)
        assert bool(re.search(r"'diloco' with local.every = \d+", network.records[-1]["text"])) is said


def test_a_price_is_that_of_an_exchange_bucket_by_bucket() -> None:
    link, work = Link(latency=0.5, rate=10.0), Computing(before=4.0, last=2.0)
    assert price([10, 10], work, link, Coding(), 1) == 4.0 + 1.0 + 2 * (0.5 + 1.0)  # the link is the limit
    assert price([10, 10], work, Link(0.0, 1e9), Coding(), 1) == pytest.approx(6.0)  # computation is the limit
    assert price([20], work, link, Coding(encode=1.0, decode=0.25), 3) == 4.0 + 2.0 + 2.0 + 1.0 + 0.5 + 2.0 + 0.25


@pytest.mark.parametrize(
    ("given", "message"),
    [
        *(({"strategy": one}, f"strategy '{one}' cannot: use strategy 'allreduce'") for one in ("backup", "hogwild")),
        ({"strategy": "parameter-server"}, "use strategy 'allreduce'"),
        ({"bucket_megabytes": 2}, "chooses the size of buckets, but bucket_megabytes = 2: leave out one"),
        ({"wire": "topk"}, "cannot be combined with wire = 'topk': leave out one."),
        ({"wire": "int8", "tolerance": "rounding"}, "wire = 'int8': leave out one, or set tolerance = 'bits'"),
        ({"wire": "int8", "communication": "0=int8"}, "cannot be combined with wire = 'int8': leave out one."),
        ({"communication": "fixed", "tolerance": "rounding"}, "set communication = 'auto', or leave out tolerance"),
        ({"exact": "fixed-point", "communication": "0=int8,9=bfloat16"}, "rounds the sums that exact='fixed-point'"),
        ({"exact": False, "reduction": "collective", "communication": "0=float32,9=fp8-e4m3"}, "needs sums along the"),
        ({"exact": False, "reduction": "collective"}, "they determine the order of additions: leave out reduction"),
    ],
    ids=str,
)
def test_what_cannot_be_combined(given: dict[str, Any], message: str) -> None:
    settings = Settings.model_validate({"batch": 8, "exact": True, "communication": "auto"} | given)
    able = replace(registry.capabilities(settings, 2), exact=True)
    with pytest.raises(ConfigError, match=message):
        requirements.check(settings, able, None, nn.Linear(2, 2))


def test_what_can_be_combined() -> None:
    for given in (
        {"wire": "int8"},
        {"exact": "fixed-point", "tolerance": "rounding", "strategy": "sharded"},
        {"wire": "int-auto", "communication": "fixed", "exact": "fixed-point", "strategy": "sharded"},
        {"communication": "0=int8"},
    ):
        settings = Settings.model_validate({"batch": 8, "communication": "auto"} | given)
        requirements.check(settings, registry.capabilities(settings, 2), None, nn.Linear(2, 2))
    able = registry.capabilities(settings, 2)
    with pytest.raises(ConfigError, match="which a forward for each optimizer cannot"):
        requirements.check(settings, able, {"one": len}, nn.Linear(2, 2))


@pytest.mark.parametrize("text", ["on", "", "0=float32,0=int8", "3=float32", "0=topk", "0=int3", "0=float32,-1=int8"])
def test_formats_that_no_run_has_chosen(text: str) -> None:
    with pytest.raises(ValueError, match="write fixed, auto, or the formats that a run has chosen"):
        checked(text)
