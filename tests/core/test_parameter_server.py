"""Parameter servers: what each mode promises, proved from the records of runs with uneven workers."""

import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from sample_counts import RATE, STEPS, expected, updates_in
from test_bad_input import Bad, check_refusal, refusals

Printed = Callable[..., list[dict[str, Any]]]
Run = Callable[..., Any]
EPOCHS = 4

# Nobody computes a second step of those before, or after, the evaluations before all that compute have begun one. Who
# waits holds that step, so there are more than two for each of the others. With LATE the first that computes has the
# weights of its first step after them, and waits for two updates of others.
ALL_COMPUTE = """
import json, os, peers
from pathlib import Path
from paceline.strategies.parameter_server.async_steps import AsyncSteps

compute, begun = AsyncSteps._compute, set()
servers = int(json.loads(os.environ.get("SERVER", "{}")).get("dedicated", False))

def compute_with_all(strategy, step):
    part = Path(os.environ["PACELINE_RUN"]) / f"part-{step > 8}"
    part.mkdir(exist_ok=True)
    if part in begun:
        peers.await_all(part, int(os.environ["WORLD_SIZE"]) - servers)
    elif step > 8 and "LATE" in os.environ and int(os.environ["RANK"]) == servers:
        strategy._server.pull = pull_and_wait
    begun.add(part)
    peers.note(part, int(os.environ["RANK"]) - servers)
    return compute(strategy, step)

def pull_and_wait(step):
    strategy = session._loop.strategy
    del strategy._server.pull
    strategy._server.pull(step)
    pulled = strategy._server._pulled
    peers.until(lambda: strategy._claims.read().version >= pulled + 2)

AsyncSteps._compute = compute_with_all
"""
COUNTED = """
import sample_counts, json, os
from subjects import tell
given = json.loads(os.environ.get("GIVEN", "{}"))
session = sample_counts.start(strategy="parameter-server", server=json.loads(os.environ["SERVER"]), **given)
values = []
for batch in session.batches(epochs=4):
    session.step(batch)
    if session.position in (8, 9):
        values.append(session.evaluate(sample_counts.TensorDataset(sample_counts.inputs())))
tell(fingerprint=session.fingerprint(), values=values, weights=sample_counts.weights(session))
"""
UNEVEN = "0.008,0,0.001"


@pytest.fixture
def counted(printed: Printed, tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """Run the task that counts; the updates that were made, after what must always be so."""

    def run(
        server: dict[str, Any], workers: int = 3, slow: str = UNEVEN, one_machine: bool = True, late: bool = False
    ) -> list[dict[str, Any]]:
        environment = {"SERVER": json.dumps(server), "SLOW": slow, "PACELINE_RUN": str(tmp_path)}
        environment |= {"LATE": "1"} if late else {}
        everyone = printed(ALL_COMPUTE + COUNTED, workers, tmp_path, environment=environment, one_machine=one_machine)
        assert len({json.dumps(one["weights"] + [one["fingerprint"], *one["values"]]) for one in everyone}) == 1
        updates = sorted(updates_in(tmp_path), key=lambda one: one["version"])
        assert sorted(one["step"] for one in updates) == list(range(EPOCHS * STEPS))
        assert [one["version"] for one in updates] == list(range(1, EPOCHS * STEPS + 1))
        assert all(one["delay"] == one["version"] - one["pulled"] - 1 for one in updates)
        if not server.get("scale_lr"):
            assert everyone[0]["weights"] == expected(EPOCHS)
        return updates

    return run


SERVERS = [
    {"mode": "async"},
    {"mode": "async", "dedicated": True},
    {"mode": "bounded"},
    {"mode": "bounded", "staleness": 0, "dedicated": True},
]


@pytest.mark.slow
@pytest.mark.parametrize("server", SERVERS, ids=str)
def test_each_step_is_applied_once(counted: Any, server: dict[str, Any]) -> None:
    updates = counted(server)
    computing = {one["rank"] for one in updates}
    assert computing == ({1, 2} if server.get("dedicated") else {0, 1, 2})


def staleness(updates: Sequence[dict[str, Any]], computing: int) -> list[int]:
    """For each update: how many earlier rounds were missing in the weights, told by the order of updates alone."""
    found = []
    for one in updates:
        there = {other["step"] for other in updates if other["version"] <= one["pulled"]}
        missing = [step for step in range(one["step"] // computing * computing) if step not in there]
        found.append(one["step"] // computing - missing[0] // computing if missing else 0)
    return found


@pytest.mark.sampled(1)
@pytest.mark.crossed
@pytest.mark.parametrize("dedicated", [False, True])
@pytest.mark.parametrize("bound", [0, 1, 3])
def test_staleness_is_never_above_the_bound(counted: Any, bound: int, dedicated: bool) -> None:
    server = {"mode": "bounded", "staleness": bound, "dedicated": dedicated}
    updates = counted(server, 4 if dedicated else 3, "0,0.02,0,0.001" if dedicated else "0.02,0,0.001")
    found = staleness(updates, 3)
    assert max(found) <= bound
    assert found == [one["staleness"] for one in updates]


@pytest.mark.slow
def test_without_a_bound_staleness_is_above_it(counted: Any) -> None:
    """So the test before would see it if nobody waited."""
    assert max(staleness(counted({"mode": "async"}, slow="0.06,0,0.001"), 3)) > 1


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dedicated", [False, True])
def test_a_dropped_gradient_is_never_applied(counted: Any, tmp_path: Path, dedicated: bool) -> None:
    """The weights are the sum of what was applied: a gradient that was dropped and yet applied would be there twice."""
    workers, slow = (4, "0,0.004,0,0.001") if dedicated else (3, "0.004,0,0.001")
    updates = counted({"mode": "async", "drop_after": 1, "dedicated": dedicated}, workers, slow, late=True)
    assert max(one["delay"] for one in updates) <= 1
    dropped = updates_in(tmp_path, "dropped")
    assert dropped and min(one["delay"] for one in dropped) > 1
    applied = {(one["step"], one["rank"], one["pulled"]) for one in updates}
    assert not applied & {(one["step"], one["rank"], one["pulled"]) for one in dropped}


@pytest.mark.slow
@pytest.mark.parametrize("dedicated", [False, True])
def test_a_late_gradient_has_a_smaller_rate(counted: Any, dedicated: bool) -> None:
    updates = counted({"mode": "async", "scale_lr": True, "dedicated": dedicated}, 4, late=True)
    assert {one["learning_rate"] for one in updates} == {RATE / (1 + one["delay"]) for one in updates}
    assert all(one["learning_rate"] == RATE / (1 + one["delay"]) for one in updates)
    assert max(one["delay"] for one in updates) > 0


ONE_COMPUTES = """
import json, os
import torch
from subjects import CASES, images, tell
import paceline
given = CASES[os.environ["CASE"]]()
session = paceline.start(
    **given, strategy="parameter-server", timeout_seconds=30, threads=1,
    server={"mode": os.environ["MODE"], "dedicated": True},
)
losses, values = [], []
for batch in session.batches(steps=11):
    losses.append(session.step(batch).loss)
    if batch.step == 4:
        values.append(session.evaluate(given["data"]))
tell(fingerprint=session.fingerprint(), values=values, learning_rate=session._context.update.learning_rate)
"""


@pytest.mark.sampled(1)
@pytest.mark.crossed
@pytest.mark.parametrize("mode", ["async", "bounded"])
@pytest.mark.parametrize(
    "case",
    ["batch norm, dropout, short batch", "transformer, tied weights, clipping, schedule", "layer used sometimes"],
)
def test_one_worker_that_computes_is_the_single_process(printed: Printed, tmp_path: Path, case: str, mode: str) -> None:
    environment = {"CASE": case, "MODE": mode}
    (alone,) = printed(ONE_COMPUTES, 1, tmp_path / "alone", environment=environment)
    for one in printed(ONE_COMPUTES, 2, tmp_path / "two", environment=environment):
        assert one == alone


@pytest.mark.slow
def test_two_servers_are_like_one(printed: Printed, tmp_path: Path) -> None:
    script = ONE_COMPUTES.replace('"dedicated": True', '"dedicated": True, "count": int(os.environ["COUNT"])')
    environment = {"CASE": "transformer, tied weights, clipping, schedule", "MODE": "async"}
    (alone,) = printed(script, 1, tmp_path / "alone", environment=environment | {"COUNT": "1"})
    for one in printed(script, 3, tmp_path / "three", environment=environment | {"COUNT": "2"}):
        assert one == alone


RESUMED = """
import sample_counts, json, os
from subjects import tell
session = sample_counts.start(
    strategy="parameter-server", server=json.loads(os.environ["SERVER"]),
    checkpoint={"directory": os.environ["SAVED"], "every": 3}, resume="auto",
)
start = session.position
for batch in session.batches(steps=int(os.environ["STOP"])):
    session.step(batch)
tell(start=start, weights=sample_counts.weights(session))
"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dedicated", [False, True])
def test_it_goes_on_from_a_checkpoint(printed: Printed, tmp_path: Path, dedicated: bool) -> None:
    server = json.dumps({"mode": "async", "dedicated": dedicated})
    environment = {"SAVED": str(tmp_path / "saved"), "SERVER": server, "SLOW": "0.004,0"}
    printed(RESUMED, 3, tmp_path / "first", environment=environment | {"STOP": "8"})
    again = printed(RESUMED, 2, tmp_path / "second", environment=environment | {"STOP": "16"})
    assert again == [{"start": 6, "weights": expected(2)}] * 2
    (alone,) = printed(RESUMED, 1, tmp_path / "third", environment=environment | {"STOP": "16"})
    assert alone == {"start": 15, "weights": expected(2)}


REPORTED = """
import sample_counts, json, os
from paceline.strategies.parameter_server.async_steps import AsyncSteps
from subjects import tell
known = []
start_steps = AsyncSteps._start
def watched(strategy, step):
    notice = start_steps(strategy, step)
    known.append(strategy._claims.read().newest >= 0)
    return notice
AsyncSteps._start = watched
session = sample_counts.start(
    **json.loads(os.environ["GIVEN"]), checkpoint={"directory": os.environ["SAVED"], "every": 6}, resume="auto"
)
outcomes = []
for batch in session.batches(steps=int(os.environ["STOP"])):
    report = session.step(batch)
    outcomes += [report.loss, report.gradient_norm]
    if batch.step == 3:
        session.evaluate(sample_counts.TensorDataset(sample_counts.inputs()))
tell(known=known, outcomes=outcomes, fingerprint=session.fingerprint())
"""
ASYNCHRONOUS = [{"strategy": "hogwild"}, *({"strategy": "parameter-server", "server": server} for server in SERVERS)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("given", ASYNCHRONOUS, ids=str)
def test_each_report_has_an_outcome(printed: Printed, tmp_path: Path, given: dict[str, Any]) -> None:
    """Also of a worker that has computed nothing yet, of a server, after synchronizing and from a checkpoint."""
    environment = {"GIVEN": json.dumps(given), "SAVED": str(tmp_path / "saved"), "SLOW": "0.002,0.02,0.004"}
    first = printed(REPORTED, 3, tmp_path / "first", environment=environment | {"STOP": "8"})
    again = printed(REPORTED, 3, tmp_path / "again", environment=environment | {"STOP": "12"})
    assert all(math.isfinite(value) for one in (*first, *again) for value in one["outcomes"])
    assert [one["known"][1:] for one in first] == [[True, True]] * 3  # after the evaluation, and the checkpoint
    assert [one["known"] for one in again] == [[True]] * 3


SKIPPED = """
import sample_counts, json, os
from subjects import tell
from sample_counts import TensorDataset
values = sample_counts.inputs()
values[17] = float("nan")
session = sample_counts.start(
    strategy="parameter-server", data=TensorDataset(values), nonfinite=os.environ["THEN"],
    server=json.loads(os.environ["SERVER"]),
)
for batch in session.batches(epochs=int(os.environ["EPOCHS"])):
    session.step(batch)
tell(finite=all(weight == weight for weight in sample_counts.weights(session)), position=session.position)
"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("server", SERVERS, ids=str)
def test_a_step_that_is_not_finite_is_left_out(printed: Printed, tmp_path: Path, server: dict[str, Any]) -> None:
    environment = {"PACELINE_RUN": str(tmp_path), "SERVER": json.dumps(server), "THEN": "skip", "EPOCHS": "2"}
    everyone = printed(SKIPPED, 3, tmp_path, environment=environment)
    assert everyone == [{"finite": True, "position": 2 * STEPS}] * 3
    assert len(updates_in(tmp_path)) == 2 * STEPS - 2
    assert len(updates_in(tmp_path, "skipped")) == 2


@pytest.mark.sampled(1)
@pytest.mark.parametrize("server", SERVERS, ids=str)
def test_a_loss_that_is_not_finite_ends_the_run(ranks: Run, tmp_path: Path, server: dict[str, Any]) -> None:
    environment = {"SERVER": json.dumps(server), "THEN": "stop", "EPOCHS": "1"}
    everyone = ranks(SKIPPED, 3, tmp_path, environment=environment)
    assert sorted(one.code for one in everyone) == [1, 5, 5]
    assert sum("NonFiniteLoss: The loss is nan at step" in one.err for one in everyone) == 1


EVALUATED_ALONE = """
import sample_counts, json, os
session = sample_counts.start(**json.loads(os.environ["GIVEN"]))
for batch in session.batches(epochs=3):
    session.step(batch)
    if session.position == 6 and session.rank == 0:
        session.evaluate(sample_counts.TensorDataset(sample_counts.inputs()))
"""


@pytest.mark.parametrize(
    "given",
    [{"strategy": "hogwild"}, {"strategy": "parameter-server", "server": {"mode": "bounded", "dedicated": True}}],
    ids=["whoever computes", "a server"],
)
def test_an_evaluation_of_one_rank_is_found_when_another_goes_on(
    ranks: Run, tmp_path: Path, given: dict[str, Any]
) -> None:
    everyone = ranks(EVALUATED_ALONE, 3, tmp_path, environment={"GIVEN": json.dumps(given)})
    assert [one.code for one in everyone] == [3, 5, 5], [one.err for one in everyone]
    assert "different places: rank 0 synchronizing after step 5, " in everyone[0].err
    assert re.search(r", (rank [12]|another one) at step \d", everyone[0].err)


def test_statistics_and_bits_are_spoken_of(printed: Printed, tmp_path: Path) -> None:
    script = """
import paceline
from subjects import CASES, tell
session = paceline.start(**CASES["batch norm, dropout, short batch"](), strategy="parameter-server",
                         server={"mode": "async"}, timeout_seconds=30)
for batch in session.batches(epochs=2):
    session.step(batch)
tell(remarks=session._context.warnings, fingerprint=session.fingerprint())
"""
    everyone = printed(script, 2, tmp_path)
    assert everyone[0] == everyone[1]
    text = " ".join(everyone[0]["remarks"])
    assert "does not promise exact bits" in text and "batch norm" in text and "8 updates so far" in text


UNSHARED = """
import sample_counts, json, os
import torch

class Own(torch.optim.lr_scheduler.LRScheduler):
    def __init__(self, optimizer):
        self.factor = lambda step: 0.9**step
        super().__init__(optimizer)

    def get_lr(self):
        return [base * self.factor(self.last_epoch) for base in self.base_lrs]

class Leaving(Own):
    def state_dict(self):
        return {key: value for key, value in super().state_dict().items() if key != "factor"}

def watched(parameters):
    return torch.optim.SGD([{"params": parameters, "watch": lambda: 0}], lr=0.1)

class Closed:
    __repr__ = lambda self: "Closed()"  # without its place in memory, which differs from worker to worker

def closed(parameters):
    return torch.optim.SGD([{"params": parameters, "closed": [Closed()]}], lr=0.1)

given = {"schedule": {"schedule": Own}, "left out": {"schedule": Leaving}, "optimizer": {"optimizer": watched}}
given |= {"closed": {"optimizer": closed}}
session = sample_counts.start(**json.loads(os.environ["GIVEN"]), **given[os.environ["CASE"]])
print("started")
for batch in session.batches(epochs=1):
    session.step(batch)
print(session.fingerprint())
"""
AT_START = UNSHARED.partition("print(")[0]
MANY = "model=CASES['mlp, momentum']()['model'], "
REFUSED = {
    **{
        f"{name}, {number}": Bad(
            f"import os\nos.environ |= {{'GIVEN': {json.dumps(given)!r}, 'CASE': {name!r}}}\n{AT_START}",
            *("InputError", words, 3),
        )
        for number, given in enumerate([*ASYNCHRONOUS, {"strategy": "parameter-server"}])
        for name, words in (
            ("schedule", ["Own has 'factor'", "a function", "state_dict"]),
            ("optimizer", ["SGD has 'watch'", "a function"]),
            ("closed", ["SGD has 'closed'", "a list", "beside the groups"]),
        )
    },
    **{
        f"{server}": Bad(
            f"import sample_counts\nfrom subjects import CASES\n"
            f"sample_counts.start({more}strategy='parameter-server', server={server})",
            *("ConfigError", words),
        )
        for more, server, words in [
            ("", {"count": 2}, ["server.count = 2 servers cannot share 1 parameter:"]),
            ("", {"count": 1, "dedicated": True, "staleness": -1}, ["server.staleness = -1"]),
            ("", {"drop_after": -1}, ["server.drop_after = -1"]),
            ("", {"count": 0}, ["server.count = 0"]),
            ("", {"mode": "sync", "scale_lr": True}, ["server.scale_lr is for late gradients"]),
            ("", {"mode": "sync", "drop_after": 3}, ["server.drop_after is for late gradients"]),
            (MANY, {"count": 2, "dedicated": True, "mode": "async"}, ["server.count = 2", "more than 2 workers"]),
            (MANY, {"count": 3, "dedicated": False, "mode": "async"}, ["server.count = 3", "more than 2 workers"]),
        ]
    },
}


@pytest.fixture(scope="module")
def refused(printed: Printed, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    return refusals(printed, "", REFUSED, tmp_path_factory.mktemp("refused"))


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_used_or_shared_is_refused_at_the_start(refused: dict[str, list[Any]], case: str) -> None:
    check_refusal(refused[case], REFUSED[case])


def test_what_a_schedule_leaves_out_is_not_shared(ranks: Run, tmp_path: Path) -> None:
    environment = {"GIVEN": json.dumps({"strategy": "parameter-server"}), "CASE": "left out"}
    everyone = ranks(UNSHARED, 3, tmp_path / "several", environment=environment)
    everyone += ranks(UNSHARED, 1, tmp_path / "alone", environment=environment)
    assert {one.code for one in everyone} == {0} and len({one.out for one in everyone}) == 1


SYNC = """
import json, os
import paceline
from subjects import CASES, tell
found = {}
for case in json.loads(os.environ["CASES"]):
    given = CASES[case]()
    session = paceline.start(
        **given, exact=True, strategy=os.environ["STRATEGY"], server=json.loads(os.environ["SERVER"]),
        timeout_seconds=30,
    )
    reports, values = [], []
    for batch in session.batches(steps=11):
        report = session.step(batch)
        reports.append([report.loss, report.gradient_norm, report.learning_rate])
        if batch.step == 4:
            values.append([session.evaluate(given["data"]), session.fingerprint()])
    found[case] = {"fingerprint": session.fingerprint(), "reports": reports, "values": values}
tell(found=found)
"""
SYNC_CASES = [
    "batch norm, dropout, short batch",
    "transformer, tied weights, clipping, schedule",
    "not divisible",
    "layer used sometimes",
]


@pytest.fixture(scope="module")
def averaged(printed: Printed, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What comes out of all-reduce on two workers."""
    environment = {"STRATEGY": "allreduce", "SERVER": "{}", "CASES": json.dumps(SYNC_CASES)}
    one, _ = printed(SYNC, 2, tmp_path_factory.mktemp("averaged"), environment=environment, deadline=100)
    return one


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "server"),
    [(2, {}), (3, {"count": 2}), (4, {"count": 4}), (2, {"dedicated": True}), (4, {"count": 2, "dedicated": True})],
    ids=str,
)
def test_in_mode_sync_the_bits_are_those_of_all_reduce(
    printed: Printed, tmp_path: Path, averaged: dict[str, Any], workers: int, server: dict[str, Any]
) -> None:
    environment = {"STRATEGY": "parameter-server", "SERVER": json.dumps(server), "CASES": json.dumps(SYNC_CASES)}
    for one in printed(SYNC, workers, tmp_path, environment=environment, deadline=100):
        assert one == averaged


def test_in_mode_sync_each_shard_is_updated_at_its_server_alone(printed: Printed, tmp_path: Path) -> None:
    script = """
import paceline
from subjects import CASES, tell
session = paceline.start(
    **CASES["mlp, momentum"](), strategy="parameter-server", timeout_seconds=30, server={"count": 2}
)
(batch, *_) = session.batches(steps=1)
session.step(batch)
before = len(session._context.update.optimizer.state)
session.evaluate(CASES["mlp, momentum"]()["data"])
tell(before=before, after=len(session._context.update.optimizer.state), fingerprint=session.fingerprint())
"""
    everyone = printed(script, 3, tmp_path)
    assert [one["before"] for one in everyone] == [1, 3, 0] or [one["before"] for one in everyone] == [2, 2, 0]
    assert {one["after"] for one in everyone} == {4}
    assert len({one["fingerprint"] for one in everyone}) == 1


COUPLED = """
import os
from functools import partial
import paceline
import torch
from subjects import CASES, tell

class Normed(torch.optim.SGD):
    # looks at all gradients at once
    def step(self, closure=None):
        gradients = [value.grad for value in self.param_groups[0]["params"]]
        norm = torch.linalg.vector_norm(torch.stack([gradient.norm() for gradient in gradients]))
        for gradient in gradients:
            gradient.div_(norm)
        self.param_groups[0]["made"] += 1
        return super().step()

def normed(parameters):
    return Normed([{"params": parameters, "made": 0}], lr=0.05, momentum=0.9)

given = CASES["mlp, momentum"]() | {
    "optimizer": normed,
    "schedule": partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.5),
    "server": {"count": 1, "dedicated": os.environ["DEDICATED"] == "1"},
}
session = paceline.start(**given, exact=True, strategy="parameter-server", timeout_seconds=30)
reports = []
for batch in session.batches(steps=5):
    report = session.step(batch)
    reports.append([report.loss, report.gradient_norm, report.learning_rate])
(group,) = session._context.update.optimizer.param_groups
made = group["made"], group["lr"], session._context.update.schedule.last_epoch
tell(fingerprint=session.fingerprint(), reports=reports, made=made)
"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("workers", "dedicated"), [(2, "0"), (3, "0"), (3, "1")])
def test_in_mode_sync_only_servers_call_the_optimizer(
    printed: Printed, tmp_path: Path, workers: int, dedicated: str
) -> None:
    """With one server an optimizer that looks at all gradients at once gives the bits of one process."""
    environment = {"DEDICATED": dedicated}
    (alone,) = printed(COUPLED, 1, tmp_path / "alone", environment=environment)
    assert alone["made"] == [5, 0.05 / 4, 5]
    for one in printed(COUPLED, workers, tmp_path / "several", environment=environment):
        assert one == alone


@pytest.mark.slow
def test_in_mode_sync_a_step_that_is_not_finite_is_left_out(printed: Printed, tmp_path: Path) -> None:
    environment = {"PACELINE_RUN": str(tmp_path), "SERVER": '{"mode": "sync"}', "THEN": "skip", "EPOCHS": "2"}
    everyone = printed(SKIPPED, 3, tmp_path, environment=environment)
    assert everyone == [{"finite": True, "position": 2 * STEPS}] * 3
