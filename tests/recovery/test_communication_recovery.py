"""Formats that change during a run: the bits are those of the recorded formats, whoever is lost, joins or resumes."""

import json
from pathlib import Path
from typing import Any

import pytest
from launching import Ran, Run
from test_join_and_leave import DOWN_TO_ONE
from test_recovery import ELASTIC, OVER_THE_NETWORK, PLAIN, STEPS

from paceline.system.wires import formats_in, spelled
from paceline.testing import faults
from paceline.testing.faults import Point

# each way is tried for one step, and the workers look again whenever they may
HASTY = """
from paceline.schedule.communication import Way
from paceline.strategies.data_parallel import communication
communication.WARM, communication.TRIAL, communication.WATCH, communication._DRIFT = 0, 1, 1, -1.0
communication.trials = lambda prices, current: [Way("int8"), Way("bfloat16"), Way("int-auto")]
communication.best = lambda seconds, wires: Way("bfloat16")
"""


def telling(script: str) -> str:
    formats = "wires.spelled(session._context.strategy_state['communication']['formats'])"
    return "from paceline.system import wires\n" + script.replace("end(session)", f"end(session, formats={formats})")


def check(ran: Ran, undisturbed: Any) -> str:
    """The workers have ended alike, as one process does with the formats that they tell; returns these."""
    assert ran.code == 0, ran.report()
    first, *others = ran.printed()
    assert all(one == first for one in others), ran.report()
    given = {"GIVEN": json.dumps({"communication": first["formats"]})}
    alone = undisturbed(telling(PLAIN), **given)
    assert [alone[key] for key in ("fingerprint", "position", "formats")] == [
        first[key] for key in ("fingerprint", "position", "formats")
    ]
    return str(first["formats"])


CHOSEN, SHARDED = (
    {"GIVEN": json.dumps({"communication": "auto", "tolerance": "convergent", "strategy": one})}
    for one in ("allreduce", "sharded")
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("point", "victim", "chosen"),
    [("inside the collective", 0, SHARDED), ("between reduction and update", 1, CHOSEN)],
    ids=["sharded", "allreduce"],
)
def test_a_kill_while_ways_are_tried(
    run: Run, undisturbed: Any, point: Point, victim: int, chosen: dict[str, str]
) -> None:
    plan = faults.kill(rank=victim, step=3, point=point)
    formats = check(run(OVER_THE_NETWORK + HASTY + telling(PLAIN), *ELASTIC, faults=plan, **chosen), undisturbed)
    assert {"float32", "int8", "bfloat16", "int-auto"} <= {one.split("=")[1] for one in formats.split(",")}


@pytest.mark.slow
def test_down_to_one_and_up_again(run: Run, undisturbed: Any) -> None:
    """A worker that joins takes over the formats, of which one worker alone has kept the last one."""
    ran = run(OVER_THE_NETWORK + HASTY + telling(DOWN_TO_ONE), *ELASTIC, arguments=(4,), **CHOSEN)
    check(ran, undisturbed)
    assert [0] in ran.memberships()
    assert len(ran.memberships()[-1]) >= 2, ran.report()


SAVING = telling(PLAIN.replace("begin()", 'begin(checkpoint={"every": 4, "directory": "saved"}, resume="auto")'))


@pytest.mark.slow
def test_a_run_resumes_with_its_formats(run: Run, undisturbed: Any) -> None:
    first = run(OVER_THE_NETWORK + HASTY + SAVING.replace(f"steps={STEPS}", "steps=6"), "-n", 3, **SHARDED)
    assert first.code == 0, first.report()
    formats = formats_in(check(run(OVER_THE_NETWORK + HASTY + SAVING, "-n", 2, name="two", **CHOSEN), undisturbed))
    known = formats_in(first.printed()[0]["formats"])
    assert len(known) > 3 and all(formats[step] == wire for step, wire in known.items() if step < 4)
    other = {"GIVEN": json.dumps({"communication": "fixed"})}
    refused = run(SAVING, "-n", 2, name="three", **other)
    assert refused.code and "cannot be resumed with the same bits: wire" in refused.report()


TRAINED = """
import os
from subjects import CASES, tell
import paceline

session = paceline.start(**CASES["mlp, momentum"]() | {"exact": True} | eval(os.environ["GIVEN"]))
memory, marks = session._context.world.host_memory, set()
for batch in session.batches(steps=24):
    session.step(batch)
    marks.add(memory and memory.mark())
formats = session._context.strategy_state.get("communication", {}).get("formats")
tell(fingerprint=session.fingerprint(), formats=formats, marks=len(marks))
"""


@pytest.mark.parametrize(
    ("strategy", "machines"),
    [("sharded", (1, 1)), *(pytest.param(one, (2, 1), marks=pytest.mark.slow) for one in ("allreduce", "sharded"))],
)
def test_the_bits_are_those_of_the_formats(
    printed: Any, tmp_path: Path, strategy: str, machines: tuple[int, ...]
) -> None:
    """On one machine, too. The memory that the workers of a machine share does not grow from choice to choice."""
    given = {"strategy": strategy, "communication": "auto", "tolerance": "convergent"}
    environment = {"GIVEN": repr(given)}
    ran = printed(HASTY + TRAINED, sum(machines), tmp_path / "several", machines=machines, environment=environment)
    formats = {int(step): wire for step, wire in ran[0]["formats"].items()}
    environment = {"GIVEN": repr({"strategy": strategy, "communication": spelled(formats)})}
    again = printed(TRAINED, machines[0], tmp_path / "again", environment=environment)
    assert len({one["fingerprint"] for one in (*ran, *again)}) == 1
    assert {"float32", "int8", "bfloat16", "int-auto"} == {*formats.values()}
    assert max(one["marks"] for one in (*ran, *again)) <= len({*formats.values()}) < len(formats)


BUCKETS = """
from paceline.strategies.data_parallel import communication
from subjects import tell
communication.WARM, communication.TRIAL, communication.WATCH, communication._DRIFT = 0, 1, 1, -1.0
communication._SIZES = None, 0.0001
communication.trials = lambda prices, current: [way for way in prices if way != current]
record, sizes = communication.ChosenCommunication._record, []
def recorded(self, step, decision):
    sizes.append(self._way.megabytes)
    tell(sizes=sizes)
    record(self, step, decision)
communication.ChosenCommunication._record = recorded
"""


@pytest.mark.slow
@pytest.mark.parametrize("exact", [True, False])
def test_buckets_change_no_bit(printed: Any, tmp_path: Path, exact: bool) -> None:
    """Also without exact, where the bits depend on the number of workers."""
    given = {"GIVEN": repr({"communication": "auto", "exact": exact})}
    ran = printed(BUCKETS + TRAINED, 3, tmp_path / "auto", machines=(1, 1, 1), environment=given)
    given = {"GIVEN": repr({"exact": exact})}
    fixed = printed(TRAINED, 3, tmp_path / "fixed", machines=(1, 1, 1), environment=given)
    assert {one["fingerprint"] for one in ran} == {one["fingerprint"] for one in fixed}
    assert {*ran[0]["sizes"]} == {None, 0.0001}
    assert {*ran[0]["formats"].values()} == {"float32"}
