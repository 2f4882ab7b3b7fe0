"""A script may freeze parameters in the middle of training, and thaw them again, as in one process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

Printed = Callable[..., list[dict[str, Any]]]

SCRIPT = """
import json, os
from pipeline_cases import CUT, in_double
from subjects import tell
import paceline

def train(case, part, given):
    arguments = CUT[case]() if given.get("exact") else in_double(CUT[case]())
    given = arguments | {"strategy": "pipeline", "timeout_seconds": 30} | given
    frozen = [value for name, value in given["model"].named_parameters() if name.startswith(tuple(part))]
    assert frozen
    session, losses, sums = paceline.start(**given), [], []
    for batch in session.batches(steps=8):
        if batch.step in (0, 1, 4, 5):
            session.evaluate(given["data"])  # brings the weights together
            sums.append(sum(value.double().sum().item() for value in frozen))
        if batch.step in (0, 2, 3, 6):
            for parameter in frozen:
                parameter.requires_grad_(batch.step in (2, 6))
        losses.append(session.step(batch).loss)
    return {"losses": losses, "sums": sums, "fingerprint": session.fingerprint()}

for place, (case, part, given) in enumerate(json.loads(os.environ["WAYS"])):
    tell(**{str(place): train(case, part, given)})
"""


class Case(NamedTuple):
    """The name of a model in ``pipeline_cases.CUT``, what is frozen, and where to cut for 2 stages, and for 4."""

    model: str
    frozen: list[str]
    two: list[str]
    four: list[str]


CASES = [
    Case("skips", ["first", "second.bias"], ["second"], ["second", "third", "head"]),
    Case("skips", ["third"], ["third"], ["second", "third", "head"]),
    Case("skips", ["head"], ["head"], ["second", "third", "head"]),
    Case("a weight used five times", ["1.weight"], ["5"], ["3", "5", "7"]),
    Case("a weight used five times", ["0", "1"], ["3"], ["3", "5", "7"]),
    Case("a weight used five times", ["3.bias", "4", "5", "6", "7", "8", "9", "10"], ["4"], ["3", "7", "9"]),
]
FIRST, TIED = CASES[0], CASES[3]


def run(
    printed: Printed, folder: Path, workers: int, case: Case, given: list[dict[str, Any]]
) -> list[list[dict[str, Any]]]:
    """What each worker found in each way."""
    ways = json.dumps([(case.model, case.frozen, one) for one in given])
    found = printed(SCRIPT, workers, folder / str(workers), environment={"WAYS": ways}, deadline=200)
    return [[*one.values()] for one in found]


def way(case: Case, schedule: str, **more: Any) -> dict[str, Any]:
    cut = case.four if schedule in ("zb-v", "interleaved") else case.two
    return {"pipeline": {"schedule": schedule, "cut": cut, **more}}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_bits_are_those_of_one_process(printed: Printed, tmp_path: Path, case: Case) -> None:
    ways = [way(case, schedule) | {"exact": True} for schedule in ("1f1b", "gpipe", "zb-h1", "zb-v", "interleaved")]
    ((alone,),) = run(printed, tmp_path, 1, case, ways[:1])
    assert run(printed, tmp_path, 2, case, ways) == [[alone] * len(ways)] * 2


@pytest.mark.slow
@pytest.mark.parametrize("case", [FIRST, TIED], ids=str)
def test_several_workers_hold_a_stage(printed: Printed, tmp_path: Path, case: Case) -> None:
    ways = [way(case, "1f1b", stages=2) | {"exact": True}]
    ((alone,),) = run(printed, tmp_path, 1, case, ways)
    assert run(printed, tmp_path, 3, case, ways) == [[alone]] * 3


@pytest.mark.slow
@pytest.mark.parametrize("case", [FIRST, TIED], ids=str)
def test_else_the_result_differs_by_rounding_only(printed: Printed, tmp_path: Path, case: Case) -> None:
    ways = [way(case, "1f1b"), way(case, "zb-v")]
    ((alone,),) = run(printed, tmp_path, 1, case, ways[:1])
    for found in run(printed, tmp_path, 2, case, ways):
        for one in found:
            assert one["losses"] == pytest.approx(alone["losses"], rel=1e-9)
            assert one["sums"] == pytest.approx(alone["sums"], rel=1e-9)


@pytest.mark.slow
@pytest.mark.crossed
@pytest.mark.parametrize(("case", "workers", "more"), [(FIRST, 3, {"replicas": [2, 1]}), (TIED, 2, {})], ids=str)
@pytest.mark.parametrize("recompute", [False, True])
def test_pipedream_leaves_alone_what_is_frozen(
    printed: Printed, tmp_path: Path, case: Case, workers: int, more: dict[str, Any], recompute: bool
) -> None:
    everyone = run(printed, tmp_path, workers, case, [way(case, "pipedream", recompute=recompute, **more)])
    for (one,) in everyone:
        start, still, trained, again_still = one["sums"]
        assert start == still != trained == again_still
        assert one["fingerprint"] == everyone[0][0]["fingerprint"]
