"""Simulated runs: what must hold in thousands of histories, and the bugs that are found when they are planted."""

from __future__ import annotations

import gc
import inspect
import textwrap
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
from simulator.drawing import History
from simulator.plan import Plan
from simulator.run import Simulation
from simulator.world import Broken

from paceline.coordinator.agent import RemoteAgent
from paceline.coordinator.membership import MembershipProtocol
from paceline.coordinator.server import Coordinator
from paceline.data.growing.order import GrowingOrder
from paceline.training import loop, progress
from paceline.training.loop import TrainingLoop
from paceline.training.progress import Progress
from paceline.training.recovery import lost_shards, recovery, state_shards
from paceline.training.recovery.recovery import Recovery

HISTORIES = 2000
PARTS = 4
"""Tests that share them."""
MENDED = (
    7030483,  # a script is to fail twice
    7008158,  # another worker comes when all but one have finished
    7036949,  # workers go back to a checkpoint, and another one joins before they have repeated the lost steps
    *(14304, 7001347, 7010619, 7039212, 7064547),
    7064320,  # workers that joined in a step are the only ones left when another one joins
    7051857,  # a worker gets a step from another one, which is lost at once, and a third joins before the step returns
    7032320,  # workers go back to a checkpoint after a step that one of them waits for
    20144637,  # the first worker's machine is lost after its script has ended, before its agent reports the exit code
    30000439,  # a script exits with 3, and its launcher sees that before the coordinator has read that it has ended
    30000206,  # the same, seen by the agent of another machine
    # with copies of the state:
    *(50012341, 46077676),  # all who have the state are lost when they have sent a part of it to a new worker
    43040141,  # a worker is lost when lost steps are repeated, and another one is about to join
    46023216,  # a worker is lost while another one, which leaves, hands over its parts
    30005436,  # a worker is lost after an update, and another one is about to join
    *(113, 273, 505, 1461),  # the first ones that show some planted bug
)
"""Seeds of histories that are broken by a bug that was there once or is planted, with what is special in them."""


@pytest.fixture(autouse=True)
def no_garbage_collections() -> Iterator[None]:
    """A tenth of the time of a history; one after each test will do."""
    gc.disable()
    yield
    gc.enable()
    gc.collect()


def simulate(seeds: Iterable[int]) -> str | None:
    """What is broken in the first history in which something is, with its drawing."""
    for seed in seeds:
        simulation = Simulation(Plan.of(seed))
        try:
            simulation.run()
        except Broken as error:
            return f"{error}\n\n{simulation.plan}\n\n{simulation.history.draw()}"
    return None


@pytest.mark.parametrize("part", range(PARTS))
def test_what_must_hold(part: int) -> None:
    count = HISTORIES // PARTS
    broken = simulate(range(part * count, (part + 1) * count))
    assert broken is None, broken


@pytest.mark.parametrize("seed", MENDED)
def test_what_was_broken_once_holds(seed: int) -> None:
    broken = simulate([seed])
    assert broken is None, broken


def test_a_seed_is_always_the_same_history() -> None:
    plan = Plan.of(101)
    drawn = []
    for _ in range(2):
        simulation = Simulation(plan)
        simulation.run()
        drawn.append(simulation.history.draw())
    assert drawn[0] == drawn[1]
    assert "machine 1 is lost" in drawn[0] and "membership generation 1" in drawn[0]


def test_a_drawing() -> None:
    history = History()
    history.add(0.0, "worker 0 starts", {0: "+"})
    history.add(0.5, "worker 12 starts", {12: "+"})
    history.add(2.0, "membership 0", {0: "0", 12: "1"})
    history.add(3.25, "worker 12 is killed", {12: "†"})
    history.add(4.0, "membership 1")
    assert history.draw(40).splitlines() == [
        "     time  0 12",
        "    0.000  +     worker 0 starts",
        "    0.500  + +   worker 12 starts",
        "    2.000  0 1   membership 0",
        "    3.250  0 †   worker 12 is killed",
        "    4.000  0     membership 1",
    ]


BUGS: dict[str, tuple[object, str, str, str]] = {
    "a fence is skipped": (MembershipProtocol, "_publish", '"fenced": self.fenced', '"fenced": False'),
    "a late word revives a worker": (Coordinator, "handle", "if number not in self._ended:", "if True:"),
    "the others are not told of a loss": (
        MembershipProtocol, "lose", "self._announce_change(urgent=True, now=now, why=reason)", "pass"),
    "a membership forms before all are ready": (
        MembershipProtocol, "_form_next", 'any(member.state == "training" for member in members)', "False"),
    "who finished is blamed for a loss": (
        MembershipProtocol, "_form_next", 'len(finished) == sum(member.state == "gone" for member in members)', "True"),
    "a joiner is not sent the state": (progress, "plan_catch_up", "if key == furthest", "if key is not None"),
    "a step that others did is done again": (
        Progress, "has_received",
        "step < self.received - 1 or (step == self.received - 1 and turn < max(self.received_turns, 1))", "False"),
    "lost steps are not repeated": (Progress, "to_repeat", "return self", "return False and self"),
    "the shares of the workers before are computed": (
        TrainingLoop, "_take", "batch.generation != self.context.world.generation", "False"),
    "a notice outlives its workers": (TrainingLoop, "_re_form", "self._notice = 0", "pass"),
    "a notice is overheard": (loop, "decide", "Action.RE_FORM if elastic", "Action.GO_ON if elastic"),
    "a part of the state is thought whole": (
        *(Recovery, "_same_state"),
        *("and assemble(self._context, everyone):", "and True:"),
    ),
    "shares of the state are not hashed": (state_shards, "hash_shares", "divided.hashes is None", "False"),
    "a share is taken for the whole in a save": (
        TrainingLoop, "__init__", "self.strategy.divided if self._strategy_ready else None", "None"),
    "a worker is missed after its script": (Coordinator, "_lasts", "self.membership.workers[number].ending", "False"),
    "a lost worker of another machine is not replaced": (RemoteAgent, "ended", "self._to_start += 1", "pass"),
    "a replay is forgotten": (progress, "gone_back", "max(max(one.repeat_until, one.steps) for one in known)", "steps"),
    "a joiner gets the values of a script that is ahead": (
        progress, "lacks_script", "most.steps < most.repeat_until", "False"),
    "a step before the checkpoint is taken again": (progress, "gone_back", "own.steps >= steps and ", ""),
    "added samples are not sent": (
        lost_shards, "join_data", "share_samples(world, order)", "pass"),
    "an epoch that is running gets samples": (GrowingOrder, "add_result", "epoch + (index > 0)", "epoch"),
}  # fmt: skip


@contextmanager
def planted(place: Any, name: str, old: str, new: str) -> Iterator[None]:
    """A function of a class or module with another text in one place."""
    function: Callable[..., Any] = inspect.unwrap(getattr(place, name))
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(old) == 1, f"{old!r} is {source.count(old)} times in {name}"
    made: dict[str, Any] = {}
    exec(compile(source.replace(old, new), f"<{name}>", "exec"), function.__globals__, made)
    with ExitStack() as stack:
        for user in {place, *(one for one in (loop, recovery, state_shards) if getattr(one, name, None) is function)}:
            stack.enter_context(mock.patch.object(user, name, made[name]))
        yield


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS)
def test_bugs_that_are_planted_are_found(bug: str) -> None:
    with planted(*BUGS[bug]):
        assert simulate([*MENDED, *range(HISTORIES)]) is not None
