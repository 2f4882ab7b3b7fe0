"""A model that is cut trains like one that is not: the same bits if they are asked for, else up to rounding."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

Printed = Callable[..., list[dict[str, Any]]]


class Way(NamedTuple):
    """How a model is cut: its name in ``pipeline_cases.CUT``, on how many workers, and the settings of the pipeline."""

    case: str
    workers: int
    settings: dict[str, Any]

    def __str__(self) -> str:
        told = ", ".join(f"{name}={value}" for name, value in self.settings.items())
        return f"{self.case} on {self.workers} with {told}"


def way(case: str, workers: int, schedule: str, **settings: Any) -> Way:
    return Way(case, workers, {"schedule": schedule, **settings})


# A transformer is traced, which takes its time, so it goes where tied weights, dropout and clipping meet the cut.
# Every model is among the quick ones; the slow ones combine models, schedules, cuts and numbers of workers.
EXACT = {
    "quick": [
        way("tied weights", 2, "layerwise"),
        way("batch norm", 2, "zb-h1", recompute=True),
        way("skips", 2, "zb-v"),
        way("decoder", 2, "zb-v", cut=["query", "own", "attention"]),
        way("a weight used five times", 2, "1f1b", cut=["5"], recompute=True),
        way("nested values, random numbers", 2, "gpipe", recompute=True),
        way("bfloat16", 2, "1f1b"),
        way("changed input", 2, "1f1b", cut=["2"], recompute=True),
        way("strides", 2, "zb-v", cut=["4", "6", "9"]),
        way("counted tokens", 2, "zb-v"),
        way("batch norm", 2, "interleaved"),
        way("batch norm", 3, "1f1b", stages=2, replicas=[2, 1]),
    ],
    "slow": [
        way("tied weights", 3, "1f1b", replicas=[1, 2]),
        way("two microbatches", 3, "layerwise"),
        way("tied weights", 4, "zb-v", stages=4, cut=["blocks.0", "blocks.1", "norm"]),
        way("nested values, random numbers", 4, "interleaved", stages=4, cut=["1", "2", "5"]),
        way("tied weights", 2, "gpipe", recompute=True),
        way("a weight used five times", 3, "zb-h1", cut=["4", "8"]),
        way("batch norm", 3, "gpipe", replicas=[2, 1]),
        way("nested values, random numbers", 3, "1f1b"),
        way("two microbatches", 3, "zb-v"),
        way("two microbatches", 4, "gpipe", replicas=[1, 3]),
        way("batch norm", 4, "1f1b", replicas=[1, 2, 1]),
        way("batch norm", 4, "zb-h1", stages=2),
        # the two stages with the same weights compute the microbatches in different orders
        way("tied weights", 6, "gpipe", replicas=[2, 3, 1]),
        way("tied weights", 2, "interleaved"),
        way("tied weights", 2, "zb-v", cut=["blocks.0", "blocks.1", "output"]),
        way("batch norm", 2, "1f1b", cut=["8"]),
        way("skips", 2, "1f1b", cut=["head"]),
        way("decoder", 2, "zb-h1", cut=["query"], recompute=True),
        way("a weight used five times", 2, "zb-v", cut=["4", "6", "8"]),
        way("nested values, random numbers", 2, "zb-h1"),
        way("strides", 2, "1f1b", cut=["7"]),
        way("strides", 4, "zb-h1", cut=["3", "6", "10"]),
        way("tied weights", 3, "zb-h1", cut=["blocks.1", "output"]),
        way("a weight used five times", 3, "gpipe", cut=["4", "8"]),
        way("batch norm", 3, "layerwise", cut=["1", "3"]),
        way("skips", 3, "gpipe"),
        way("two microbatches", 3, "1f1b"),
        way("two microbatches", 3, "gpipe", stages=1),
        way("two microbatches", 3, "interleaved"),
        way("tied weights", 4, "1f1b", stages=2),
        way("two microbatches", 4, "zb-h1"),
        way("two microbatches", 4, "zb-v", stages=4),
        way("tied weights", 4, "zb-h1", stages=2),
        way("batch norm", 4, "1f1b", stages=4, cut=["1", "2", "4"]),
        way("batch norm", 4, "gpipe", stages=2, cut=["6"]),
        way("batch norm", 4, "zb-h1"),
        way("batch norm", 4, "zb-v", stages=4),
    ],
}
ROUNDED = {
    "quick": [
        way("counted tokens", 2, "1f1b"),
        way("batch norm", 2, "1f1b"),
        way("skips", 2, "zb-h1"),
    ],
    "slow": [
        way("counted tokens", 3, "zb-h1", cut=["blocks.1", "output"]),
        way("tied weights", 2, "zb-v"),
        way("tied weights", 3, "1f1b", replicas=[2, 1]),
        way("batch norm", 4, "zb-v", stages=4),
        way("tied weights", 4, "1f1b", stages=2),
        way("two microbatches", 4, "1f1b", replicas=[3, 1]),
    ],
}
STEPS = 4
SCRIPT = """
import json, os
from pipeline_cases import CUT, in_double, train
from subjects import tell
for place, (case, settings, exact) in json.loads(os.environ["WAYS"]):
    given = CUT[case]() if exact else in_double(CUT[case]())
    tell(**{place: train(given | {"exact": exact, "strategy": "STRATEGY", "pipeline": settings}, 4)})
"""


@pytest.fixture(scope="module")
def results(
    chosen: Callable[[str], set[str]], printed: Printed, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., list[dict[str, Any]]]:
    """What all workers found in some way; all chosen ways of its kind with as many workers are tried at once."""
    known: dict[tuple[str, int, bool], list[dict[str, Any]]] = {}
    failed: set[tuple[str, int, bool]] = set()

    def of(one: Way, exact: bool, workers: int, one_machine: bool = True) -> list[dict[str, Any]]:
        kind = "quick" if one in (EXACT if exact else ROUNDED)["quick"] else "slow"
        run = kind, workers, one_machine
        every = [(one, True) for one in EXACT[kind]] + [(one, False) for one in ROUNDED[kind]]
        wanted = {
            _key(one, exact, workers): (one.case, one.settings if workers > 1 else {}, exact)
            for one, exact in every
            if workers in (1, one.workers) and str(one) in chosen("one")
        }
        assert run not in failed, f"see the first test with {workers} workers"
        if run not in known:
            failed.add(run)
            known[run] = printed(
                SCRIPT.replace("STRATEGY", "pipeline" if workers > 1 else "single"),
                workers,
                tmp_path_factory.mktemp("pipeline"),
                environment={"WAYS": json.dumps([*wanted.items()])},
                deadline=200,
                one_machine=one_machine,
            )
            failed.remove(run)
        return [found[_key(one, exact, workers)] for found in known[run]]

    return of


def _key(one: Way, exact: bool, workers: int) -> str:
    return f"{one.case if workers == 1 else one}, {exact}"


def marked(ways: dict[str, list[Way]], workers: int | None = None) -> list[Any]:
    """Those on some workers, as parameters of a test."""
    marks = {"quick": (), "slow": (pytest.mark.slow,)}
    chosen = [(kind, one) for kind, every in ways.items() for one in every if workers in (None, one.workers)]
    return [pytest.param(one, marks=marks[kind]) for kind, one in chosen]


@pytest.mark.promise(
    "docs/pipeline.md",
    "With `exact=True` the first six give the bits of one process, whatever the cut, the schedule, and the "
    "number of workers for each stage",
)
@pytest.mark.promise(
    "docs/cutting.md", "Their gradients are added from the last stage to the first: the same sum as in one process."
)
@pytest.mark.promise(
    "docs/pipeline.md",
    "With more workers than stages several hold the same stage, each computes a share of the microbatches, and "
    "they average their gradients",
)
@pytest.mark.parametrize("one", marked(EXACT), ids=str)
def test_the_bits_are_those_of_one_process(results: Any, one: Way) -> None:
    (alone,) = results(one, True, 1)
    assert len(set(alone["losses"])) == STEPS
    everyone = results(one, True, one.workers)
    assert len(everyone) == one.workers
    for found in everyone:
        for what in ("losses", "norms", "fingerprint", "evaluation"):
            assert found[what] == alone[what], what


@pytest.mark.slow
@pytest.mark.parametrize("one", marked(EXACT, 3), ids=str)
def test_the_bits_are_the_same_over_the_network(results: Any, one: Way) -> None:
    (alone,) = results(one, True, 1)
    for found in results(one, True, 3, one_machine=False):
        assert found["fingerprint"] == alone["fingerprint"]


@pytest.mark.parametrize("one", marked(ROUNDED), ids=str)
def test_else_the_result_differs_by_rounding_only(results: Any, one: Way) -> None:
    (alone,) = results(one, False, 1)
    everyone = results(one, False, one.workers)
    check_close(everyone, alone)
    assert len({found["fingerprint"] for found in everyone}) == 1, "all workers have the same state at the end"


@pytest.mark.slow
@pytest.mark.parametrize("one", marked(ROUNDED, 3), ids=str)
def test_so_it_does_over_the_network(results: Any, one: Way) -> None:
    (alone,) = results(one, False, 1)
    check_close(results(one, False, 3, one_machine=False), alone)


def check_close(everyone: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    for found in everyone:
        for what in ("losses", "norms"):
            values, expected = ([float.fromhex(value) for value in many[what]] for many in (found, alone))
            assert values == pytest.approx(expected, rel=1e-9, abs=0)
        assert float.fromhex(found["evaluation"]) == pytest.approx(float.fromhex(alone["evaluation"]), rel=1e-9)
        assert found["state"] == pytest.approx(alone["state"], rel=1e-9, abs=1e-12)


COMPLEX = """
from functools import partial
import torch
from torch import nn
from torch.utils.data import TensorDataset
from subjects import tell
import paceline

class Filter(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(9, dtype=torch.cfloat))

    def forward(self, values):
        return torch.fft.irfft(torch.fft.rfft(values) * self.weight, n=16)

torch.manual_seed(0)
session = paceline.start(
    model=nn.Sequential(nn.Linear(8, 16), Filter(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)),
    optimizer=partial(torch.optim.SGD, lr=0.05), loss=nn.functional.mse_loss,
    data=TensorDataset(torch.randn(64, 8), torch.randn(64, 4)), batch=16, clip_norm=0.2, exact=True,
    strategy="pipeline", pipeline={"cut": ["2"]}, timeout_seconds=20,
)
norms = [session.step(batch).gradient_norm.hex() for batch in session.batches(steps=8)]
tell(norms=norms, fingerprint=session.fingerprint())
"""


def test_the_norm_of_complex_and_real_gradients(printed: Printed, tmp_path: Path) -> None:
    (alone,) = printed(COMPLEX, 1, tmp_path / "one")
    assert printed(COMPLEX, 2, tmp_path / "two") == [alone, alone]


BAD_GRADIENT = """
import torch
from functools import partial
from torch import nn
from torch.utils.data import TensorDataset
from subjects import tell
import paceline

class Root(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))

    def forward(self, values):
        return values + (values * self.weight).abs().sqrt()  # at 0 the gradient is no number

torch.manual_seed(0)
session = paceline.start(
    model=nn.Sequential(Root(), nn.Linear(4, 1), nn.Linear(1, 1)), optimizer=partial(torch.optim.SGD, lr=0.1),
    loss=nn.functional.mse_loss, data=TensorDataset(torch.ones(8, 4), torch.ones(8, 1)), batch=8, clip_norm=1.0,
    strategy="pipeline", pipeline={"cut": ["1"]}, timeout_seconds=20,
)
norms = [session.step(batch).gradient_norm for batch in session.batches(steps=1)]
tell(norm=str(norms[0]), weights=[str(value) for value in session._context.compute.model[2].weight.flatten().tolist()])
"""


def test_a_gradient_that_is_no_number_is_not_hidden(printed: Printed, tmp_path: Path) -> None:
    """With clipping it makes all gradients so, as in one process."""
    (alone,) = printed(BAD_GRADIENT, 1, tmp_path / "one")
    assert alone == {"norm": "nan", "weights": ["nan"]}
    assert printed(BAD_GRADIENT, 2, tmp_path / "two") == [alone, alone]
