"""What a script keeps and decides itself is the same on survivors, on joiners and in a resumed run."""

import json
from pathlib import Path
from typing import Any

from launching import Ran, Run
from test_recovery import OVER_THE_NETWORK

from paceline.testing import faults

# early stopping in the third epoch; what is registered changes behind steps and evaluations
SCRIPT = """
import os, signal
from pathlib import Path

import scripted
from subjects import images

done = Path(os.environ["PACELINE_RUN"]) / "done"


def work():
    epoch = kept.history[-1][0]
    if os.environ["PACELINE_WORKER"] == "0" and epoch == 1 and "ALONE" not in os.environ:
        os.kill(os.getpid(), signal.SIGKILL)
    with done.open("a") as file:
        file.write(f"{epoch}\\n")
    return {"epoch": epoch, "steps": session.position}


session = scripted.begin(**GIVEN)
name = session.once(lambda: "made at the start")
kept = session.register(best=float("-inf"), history=[], seen=0)
for epoch in session.epochs(9):
    for batch in session.batches():
        if batch.step == WAIT:
            scripted.await_joiner(session)
        report = session.step(batch)
        scripted.say(session, report)
        kept.seen += batch.samples
        if batch.step % 3 == 2:
            kept.history.append(session.evaluate(images(70)).hex())
    value = session.evaluate(images(30))
    kept.history.append((epoch, value.hex()))
    kept.history.append(session.once(work))
    session.print("epoch", epoch, value.hex())
    kept.best = max(kept.best, value)
    if epoch == 2 and kept.best > value - 1:
        break
scripted.end(session, history=repr(kept.history), best=kept.best, seen=kept.seen, loss=report.loss, name=name)
"""


def script(wait: int = -1, **given: object) -> str:
    return SCRIPT.replace("WAIT", str(wait)).replace("GIVEN", repr({"microbatches": 8, **given}))


def check(ran: Ran, wanted: dict[str, Any], finishers: int) -> None:
    assert ran.code == 0, ran.report()
    ran.check_steps(12)
    assert len(ran.printed()) >= finishers, ran.report()
    for told in ran.printed():
        assert told == wanted, ran.report()


def epochs(ran: Ran) -> list[str]:
    lines = [line for text in ran.logs.values() for line in text.splitlines() if line.startswith("epoch ")]
    return [line.split()[1] for line in lines]


def test_rank_0_is_lost_in_its_own_work_and_another_worker_joins(run: Run, undisturbed: Any) -> None:
    """The next rank 0 does it; who joins does not."""
    text = script(wait=9)
    (ran, wanted) = run(text, "-n", 3, "--elastic", "2:3"), undisturbed(script())
    check(ran, wanted, 2)
    assert (ran.run / "done").read_text().split() == ["0", "1", "2"]
    assert sorted(epochs(ran)) == ["0", "1", "2"], ran.report()


def test_who_is_lost_in_an_evaluation_is_replaced(run: Run, undisturbed: Any) -> None:
    text = OVER_THE_NETWORK + script()
    plan = faults.kill(rank=1, step=8, point="in evaluate")
    ran = run(text.replace('== "0"', '== "none"'), "-n", 2, "--elastic", "2:2", "--standby", 1, faults=plan)
    check(ran, undisturbed(script()), 2)


def test_after_going_back_to_a_checkpoint(run: Run, undisturbed: Any) -> None:
    """The scripts that are beyond it keep what they have; one that joins then comes to the same."""
    text = script(strategy="pipeline", checkpoint={"every": 3, "background": False})
    plan = faults.kill(rank=2, step=5)
    ran = run(text.replace('== "0"', '== "none"'), "-n", 3, "--elastic", "3:3", faults=plan)
    check(ran, undisturbed(script()), 3)
    assert {one["step"] for one in ran.events() if one["event"] == "went back"} == {3}, ran.report()


def test_resumed_on_other_workers(run: Run, undisturbed: Any, tmp_path: Path) -> None:
    """An exception ends the run in the evaluation at the end of the second epoch, where a checkpoint was saved."""
    text = script(checkpoint={"every": 4, "background": False}).replace('== "0"', '== "none"')
    plan = faults.error(rank=1, step=8, point="in evaluate")
    ended = run(text, "-n", 2, faults=plan)
    assert ended.code != 0 and ended.saved()[-1] == 8, ended.report()
    again = run(text, "-n", 3, "--resume", "auto")
    assert again.code == 0, again.report()
    told = [json.loads(line) for line in again.logs["rank-0"].splitlines() if line.startswith("{")]
    assert told == [undisturbed(script())]
    assert (again.run / "done").read_text().split() == ["0", "1", "2"]
    assert epochs(again) == ["0", "1", "2"], again.report()
