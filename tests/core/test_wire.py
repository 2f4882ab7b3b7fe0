"""Formats on the wire with ``exact``: the same bits for any number of workers, wherever they run."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from subjects import CASES
from torch import nn

from paceline.errors import ConfigError
from paceline.settings import Settings
from paceline.strategies import registry, requirements
from paceline.strategies.base import WHOLE_WIRES, WIRES

Printed = Callable[..., list[dict[str, Any]]]

SCRIPT = """
import os
from subjects import CASES, tell, train
given = eval(os.environ["GIVEN"])
for name in given.pop("cases", CASES):
    tell(**{name: train(CASES[name]() | {"exact": True} | given)})
"""
COLLECTIVE: dict[str, Any] = {"reduction": "collective", "bucket_megabytes": 0.002}
STEALING: dict[str, Any] = {"strategy": "stealing"}
WAYS: list[tuple[tuple[int, ...], dict[str, Any]]] = [
    *(((workers,), {}) for workers in (1, 2, 3, 5, 8)),
    *((machines, {}) for machines in ((1, 1, 1), (1, 2, 2), (2, 2))),
    ((1, 2), STEALING),
    ((4,), STEALING),
]
INTEGERS = [((2, 2), COLLECTIVE), ((3,), COLLECTIVE), ((2, 1), COLLECTIVE | {"exact": "fixed-point"})]
BITS = ("fingerprint", "losses", "steps")


def _named(way: tuple[tuple[int, ...], dict[str, Any]]) -> str:
    machines, given = way
    return " ".join(["+".join(map(str, machines)), *(str(value) for value in given.values() if isinstance(value, str))])


@pytest.fixture(scope="module")
def alone(printed: Printed, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """What one process found for all cases; each format is run once."""
    known: dict[str, dict[str, Any]] = {}

    def of(wire: str) -> dict[str, Any]:
        if wire not in known:
            given = {"GIVEN": repr({"wire": wire, "strategy": "single"})}
            (known[wire],) = printed(SCRIPT, 1, tmp_path_factory.mktemp("alone"), environment=given, deadline=200)
        return known[wire]

    return of


@pytest.mark.slow(turns=18)
@pytest.mark.parametrize(
    ("wire", "way"),
    [
        *((wire, way) for wire in WHOLE_WIRES[1:] for way in [*WAYS, *(INTEGERS if wire.startswith("int") else ())]),
        *(("topk", way) for way in (WAYS[2], WAYS[4], WAYS[7])),
    ],
    ids=lambda value: value if isinstance(value, str) else _named(value),
)
def test_the_bits_do_not_depend_on_the_workers(
    printed: Printed, tmp_path: Path, alone: Any, wire: str, way: tuple[tuple[int, ...], dict[str, Any]]
) -> None:
    machines, given = way
    environment = {"GIVEN": repr({"wire": wire} | given)}
    for one in printed(SCRIPT, sum(machines), tmp_path, machines=machines, environment=environment, deadline=200):
        for name in CASES:
            assert [one[name][key] for key in BITS] == [alone(wire)[name][key] for key in BITS], name


def check(wire: str, **given: Any) -> None:
    """Check as before the start."""
    settings = Settings.model_validate({"batch": 8, "wire": wire} | given)
    requirements.check(settings, registry.capabilities(settings, 2), None, nn.Linear(2, 2))


@pytest.mark.parametrize("strategy", ["backup", "hogwild", "parameter-server", "pipeline"])
def test_other_strategies_refuse_a_format(strategy: str) -> None:
    check("float32", strategy=strategy)
    for wire in WIRES[1:]:
        with pytest.raises(ConfigError, match=f"strategy '{strategy}' cannot send gradients as {wire}"):
            check(wire, strategy=strategy)


def test_what_a_format_refuses() -> None:
    for wire in ("bfloat16", "float16", "fp8-e4m3"):
        with pytest.raises(ConfigError, match="exact='fixed-point' adds up as whole numbers"):
            check(wire, exact="fixed-point")
        with pytest.raises(ConfigError, match='leave out exact=True, set reduction="tree", or use'):
            check(wire, exact=True, reduction="collective")
    for exact in (False, True, "fixed-point"):
        check("int8", exact=exact, reduction="collective")
    with pytest.raises(ConfigError, match="needs sums along the tree"):
        check("fp8-e4m3", reduction="collective")
    with pytest.raises(ValueError, match="there is no format 'int3'; the formats are float32, bfloat16, float16, fp8"):
        check("int3")


RESUMED = """
import os
from subjects import CASES, tell
import paceline
given = CASES["transformer, tied weights, clipping, schedule"]() | {"exact": True}
given |= {"resume": "auto", "checkpoint": {"directory": os.environ["SAVED"], "every": 4}, "wire": os.environ["WIRE"]}
session = paceline.start(**given)
for batch in session.batches(steps=int(os.environ["STEPS"])):
    session.step(batch)
tell(fingerprint=session.fingerprint(), position=session.position)
"""


@pytest.mark.slow
@pytest.mark.parametrize("own", ["int4", "topk"])
def test_a_checkpoint_has_scales_and_errors(printed: Printed, ranks: Any, tmp_path: Path, own: str) -> None:
    """A run that goes on with other workers ends with the same bits; in another format it is refused."""

    def environment(steps: int, wire: str = own, place: str = "here") -> dict[str, str]:
        return {"WIRE": wire, "STEPS": str(steps), "SAVED": str(tmp_path / place)}

    (whole,) = printed(RESUMED, 1, tmp_path, environment=environment(16, place="elsewhere"))
    printed(RESUMED, 3, tmp_path, environment=environment(8))
    for wire in ("float32", "int8"):
        for one in ranks(RESUMED, 2, tmp_path, environment=environment(16, wire)):
            assert one.code != 0
            assert "cannot be resumed with the same bits: wire" in one.err
    assert printed(RESUMED, 1, tmp_path, environment=environment(12))[0]["position"] == 12
    for one in printed(RESUMED, 5, tmp_path, environment=environment(16)):
        assert one == whole


ADAPTED = """
import os
from functools import partial
import torch
from torch import nn
from torch.utils.data import TensorDataset
import paceline
from subjects import tell

chance = torch.Generator().manual_seed(0)
inputs = torch.randn(512, 32, generator=chance)
targets = inputs @ torch.randn(32, 64, generator=chance)
targets[:, 0] = 30 * torch.randn(512, generator=chance)  # large gradients that teach nothing
session = paceline.start(
    model=nn.Linear(32, 64), optimizer=partial(torch.optim.SGD, lr=4.0), loss=nn.functional.mse_loss, batch=64,
    data=TensorDataset(inputs, targets), exact=True, seed=1, resume="auto", **eval(os.environ["GIVEN"]),
)
for batch in session.batches(steps=int(os.environ["STEPS"])):
    session.step(batch)
model, state = session._context.compute.model, session._context.strategy_state
with torch.no_grad():
    tell(
        fingerprint=session.fingerprint(),
        bits=state.get("bits"),
        loss=float((model(inputs) - targets)[:, 1:].square().mean()),
    )
"""


def adapted(printed: Printed, path: Path, machines: tuple[int, ...], steps: int, **given: Any) -> dict[str, Any]:
    """Train on some machines, and go on from the last checkpoint there."""
    given |= {"checkpoint": {"directory": str(path), "every": 20}}
    environment = {"GIVEN": repr(given), "STEPS": str(steps)}
    first, *others = printed(ADAPTED, sum(machines), path, machines=machines, environment=environment)
    assert all(one == first for one in others)
    return first


@pytest.mark.slow(turns=6)
@pytest.mark.parametrize("machines", [(2,), (1, 1), (2, 1)], ids=str)
@pytest.mark.parametrize("strategy", ["allreduce", "sharded"])
def test_noisy_parameters_get_more_bits(
    printed: Printed, tmp_path: Path, strategy: str, machines: tuple[int, ...]
) -> None:
    """After the same steps on any number of workers, and in a run that goes on with another number."""
    alone = adapted(printed, tmp_path / "alone", (1,), 40, wire="int-auto")
    assert alone["bits"] == {"weight": "int8"}
    assert adapted(printed, tmp_path / "both", machines, 20, wire="int-auto", strategy=strategy)["bits"]
    assert adapted(printed, tmp_path / "both", (1,), 40, wire="int-auto") == alone


@pytest.mark.slow
def test_more_bits_train_what_four_bits_do_not(printed: Printed, tmp_path: Path) -> None:
    loss = {wire: adapted(printed, tmp_path / wire, (1,), 100, wire=wire)["loss"] for wire in ("int4", "int-auto")}
    assert loss["int-auto"] < 0.2 * loss["int4"]
