"""What backup workers and replicas cannot do is refused at once; what goes wrong on the way ends all workers."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from test_bad_input import HEAD, Bad, Printed, check_refusal, message, refusals

from paceline.testing.ranks import Ended

Run = Callable[..., list[Ended]]
WAYS = pytest.mark.parametrize("one_machine", [True, False], ids=["memory", "network"])
BOTH = pytest.mark.parametrize("strategy", ["backup", "local-sgd"])

REFUSED = {
    "as many backup workers as workers": Bad(
        "go(strategy='backup', backup={'workers': 2})", "ConfigError", ["backup.workers = 2", "2 workers"]
    ),
    "more backup workers than workers": Bad(
        "go(strategy='backup', backup={'workers': 5})", "ConfigError", ["backup.workers = 5", "3 workers"], workers=3
    ),
    "less than no backup workers": Bad(
        "go(strategy='backup', backup={'workers': -1})", "ConfigError", ["backup.workers = -1"]
    ),
    "exact bits with backup workers": Bad(
        "go(strategy='backup', exact=True)",
        "ConfigError",
        ["'backup'", "exact=True", "backup.workers = 0", "'stealing'"],
    ),
    "exact bits without order": Bad("go(strategy='hogwild', exact=True)", "ConfigError", ["'hogwild'", "exact=True"]),
    "exact bits with gradients that come late": Bad(
        "go(strategy='parameter-server', exact=True, server={'mode': 'async'})",
        "ConfigError",
        ["'parameter-server'", "exact=True", "server.mode = 'sync'"],
    ),
    **{
        f"a comparison with one process of {strategy}": Bad(
            f"os.environ.update(PACELINE_TRACE='.', PACELINE_TRACE_STEPS='2')\ngo(strategy={strategy!r}, {more})",
            "ConfigError",
            ["paceline verify is for strategies that compute the same function", repr(strategy), *cures],
        )
        for strategy, more, cures in (
            ("hogwild", "", ["'allreduce'"]),
            ("backup", "", ["backup.workers = 0"]),
            ("parameter-server", "server={'mode': 'bounded'}", ["server.mode = 'sync'"]),
        )
    },
    "outer steps after no step": Bad(
        "go(strategy='local-sgd', local={'every': 0})", "ConfigError", ["local.every = 0", "greater than or equal to 1"]
    ),
    "a negative start of replicas": Bad(
        "go(strategy='local-sgd', local={'after': -3})", "ConfigError", ["local.after = -3"]
    ),
    "replicas that do not divide a batch": Bad(
        "go(strategy='diloco', microbatches=8, local={'replicas': 3})",
        "ConfigError",
        ["local.replicas = 3", "8 microbatches", "1, 2, 4, 8"],
    ),
    "more workers than replicas": Bad(
        "go(strategy='diloco', microbatches=8, local={'replicas': 2})",
        "ConfigError",
        ["3 workers", "local.replicas = 2"],
        workers=3,
    ),
    "exact bits with as many inner steps as a worker can make": Bad(
        "go(strategy='diloco', exact=True, local={'uneven': True})",
        "ConfigError",
        ["'diloco'", "exact=True", "local.uneven = False"],
    ),
    "momentum that does not fade": Bad(
        "go(strategy='diloco', local={'outer_momentum': 1.0})", "ConfigError", ["local.outer_momentum = 1.0"]
    ),
    "checkpoints at any step with replicas": Bad(
        "go(strategy='local-sgd', checkpoint={'directory': 'kept', 'every': 'auto'})",
        "ConfigError",
        ["checkpoint.every = 'auto'", "'local-sgd'", "checkpoint.every = 100"],
    ),
    "an optimizer with closures": Bad(
        "go(strategy='backup', optimizer=torch.optim.LBFGS)", "ConfigError", ["LBFGS", "'backup'", "'allreduce'"]
    ),
    "an optimizer with closures and replicas": Bad(
        "go(strategy='local-sgd', optimizer=torch.optim.LBFGS)", "ConfigError", ["LBFGS", "'local-sgd'", "'allreduce'"]
    ),
}


@pytest.fixture(scope="module")
def refused(printed: Printed, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    return refusals(printed, HEAD, REFUSED, tmp_path_factory.mktemp("refused"))


@pytest.mark.promise("docs/asynchronous.md", "**No exact bits**, except in mode `sync`: `exact=True` is refused.")
@pytest.mark.promise("docs/backup.md", "`exact=True` is refused, except with `backup.workers=0`.")
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_refused_before_training(refused: dict[str, list[Any]], case: str) -> None:
    check_refusal(refused[case], REFUSED[case])


@BOTH
def test_one_worker_alone_needs_no_other_script(ranks: Run, tmp_path: Path, strategy: str) -> None:
    (alone,) = ranks(HEAD + f"go(strategy={strategy!r}, backup={{'workers': 2}})", 1, tmp_path)
    assert (alone.code, alone.out) == (0, "done\n"), alone.err


def check_named(ended: Sequence[Ended], error: str, words: Sequence[str]) -> None:
    """Those that failed by themselves say so; nobody comes to the end."""
    assert all(one.code != 0 for one in ended)
    said = [one.err for one in ended if f"{error}: " in one.err]
    assert said and all(word in text for text in said for word in words), [one.err for one in ended]


@BOTH
def test_a_loss_that_is_not_finite(ranks: Run, tmp_path: Path, strategy: str) -> None:
    """Step 2 is in the first share of the batch of step 2, or comes up in the step before with backup workers."""
    body = f"go(strategy={strategy!r}, microbatches=8, data=spoiled(2, 1, float('nan')), timeout_seconds=30)"
    ended = ranks(HEAD + body, 2, tmp_path, deadline=60)
    check_named(ended, "NonFiniteLoss", ["The loss is nan at step", "microbatch 1", "nonfinite='skip'"])


SKIPPED = """
session = paceline.start(**given | {"strategy": STRATEGY, "microbatches": 8, "nonfinite": "skip",
                                    "data": spoiled(2, 1, float("nan")), "local": {"every": 4}})
reports = [session.step(batch) for batch in session.batches(steps=4)]
assert all(value.isfinite().all() for value in session._context.compute.model.parameters())
tell(fingerprint=session.fingerprint(), skipped=sum(not report.applied for report in reports))
"""


@pytest.mark.slow
@BOTH
def test_a_step_that_is_skipped_leaves_nothing(
    printed: Callable[..., list[dict[str, object]]], tmp_path: Path, strategy: str
) -> None:
    """With replicas only the worker leaves it out that has the sample."""
    everyone = printed(HEAD + SKIPPED.replace("STRATEGY", repr(strategy)), 2, tmp_path)
    assert everyone[0]["fingerprint"] == everyone[1]["fingerprint"]
    assert sorted(int(str(one["skipped"])) for one in everyone) == ([1, 1] if strategy == "backup" else [0, 1])


@pytest.mark.slow
@BOTH
def test_a_parameter_that_is_used_sometimes(ranks: Run, tmp_path: Path, strategy: str) -> None:
    body = f"go(strategy={strategy!r}, model=gated(), microbatches=16, timeout_seconds=30)"
    ended = ranks(HEAD + body, 2, tmp_path, deadline=60)
    check_named(ended, "InputError", ["'second.weight'", "no gradient from microbatch", "missing_gradient='zero'"])


@pytest.mark.sampled(1)
@WAYS
def test_a_worker_that_leaves_out_a_batch_others_take(ranks: Run, tmp_path: Path, one_machine: bool) -> None:
    body = """
session = paceline.start(**given | {"strategy": "backup", "timeout_seconds": 30})
for batch in session.batches(epochs=3):
    if batch.step != 2 or RANK != 1:
        session.step(batch)
print("done")
"""
    ended = ranks(HEAD + body, 4, tmp_path, deadline=60, one_machine=one_machine)
    assert {one.code for one in ended} <= {3, 5} and 3 in {one.code for one in ended}
    for one in ended:
        said = message(one, "DisagreementError" if one.code == 3 else "WorkerLost")
        if one.code == 3:
            assert re.search("rank 0 at step [12], rank 1 at step [123]", said), said


@pytest.mark.sampled(1)
@WAYS
def test_a_worker_that_misses_an_outer_step(ranks: Run, tmp_path: Path, one_machine: bool) -> None:
    body = """
session = paceline.start(**given | {"strategy": "local-sgd", "local": {"every": 2}, "timeout_seconds": 30})
for batch in session.batches(steps=8):
    if batch.step != 3 or RANK != 1:
        session.step(batch)
print("done")
"""
    ended = ranks(HEAD + body, 3, tmp_path, deadline=60, one_machine=one_machine)
    assert {one.code for one in ended} <= {3, 5} and 3 in {one.code for one in ended}
    for one in ended:
        said = message(one, "DisagreementError" if one.code == 3 else "WorkerLost")
        if one.code == 3:
            assert "outer step after step 3" in said and "outer step after step 4" in said


def test_workers_that_leave_out_different_batches(ranks: Run, tmp_path: Path) -> None:
    body = """
session = paceline.start(**given | {"strategy": "local-sgd", "local": {"every": 5}, "timeout_seconds": 30})
for batch in session.batches(steps=6):
    if batch.step != 1 + RANK:
        session.step(batch)
print("done")
"""
    for one in ranks(HEAD + body, 2, tmp_path, deadline=60):
        assert one.code == 3
        assert "Rank 0 has skipped the batch of step 1" in message(one, "DisagreementError")


@pytest.mark.sampled(1)
@pytest.mark.crossed
@BOTH
@WAYS
def test_a_worker_is_killed(ranks: Run, tmp_path: Path, strategy: str, one_machine: bool) -> None:
    """Without ``--elastic`` the others end soon, and say who it was.

    They wait for its end in that step: with backup workers they need no gradient of a worker that is late.
    """
    body = f"""
import pathlib, signal, time
dying = pathlib.Path({str(tmp_path / "dying")!r})
def accident():
    if RANK == 1:
        dying.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    while not dying.exists():
        time.sleep(0.01)
session = paceline.start(**given | dict(
    strategy={strategy!r}, microbatches=8, timeout_seconds=20, loss=only(lambda: session.position == 2)))
for batch in session.batches(steps=9):
    session.step(batch)
print("done")
"""
    ended = ranks(HEAD + body, 3, tmp_path, deadline=60, one_machine=one_machine)
    assert ended[1].signal == "SIGKILL"
    for one in (ended[0], ended[2]):
        assert one.code == 5, one.err
        assert "rank" in message(one, "WorkerLost")
