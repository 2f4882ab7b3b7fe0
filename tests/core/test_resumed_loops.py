"""A script that is interrupted anywhere and resumed comes to what it comes to undisturbed: its own values, too."""

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from subjects import classes, mlp
from torch.utils.data import WeightedRandomSampler

import paceline
from paceline.training.script_state import ScriptState

LENGTH, BATCH, EPOCHS = 60, 16, 4  # an epoch has 4 steps


class Interrupted(Exception):
    pass


class Counter:
    """As users write it: a state in, a state out."""

    def __init__(self) -> None:
        self.sum = torch.zeros(2)

    def state_dict(self) -> dict[str, Any]:
        return {"sum": self.sum}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sum.copy_(state["sum"])


def accuracy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output.argmax(1) == target).float().mean()


def start(folder: Path, every: int, resume: bool) -> paceline.Session:
    return paceline.start(
        model=mlp(),
        optimizer=partial(torch.optim.SGD, lr=0.5),
        loss=torch.nn.functional.cross_entropy,
        data=classes(LENGTH),
        batch=BATCH,
        exact=True,
        checkpoint={"directory": str(folder), "every": every, "background": False},
        resume="auto" if resume else None,
    )


class Script:
    """The scripts of these tests; ``end`` is the step after which one is interrupted, before what follows the step."""

    def __init__(self, folder: Path, every: int) -> None:
        self.folder, self.every = folder, every
        self.lines: list[str] = []
        self.evaluated = 0

    def run(self, form: str, end: int | None, resume: bool) -> dict[str, Any]:
        session = start(self.folder, self.every, resume)
        self.session, self.end = session, end
        return {**getattr(self, form)(), "fingerprint": session.fingerprint(), "position": session.position}

    def step(self, batch: paceline.Batch) -> paceline.Report:
        report = self.session.step(batch)
        if batch.step == self.end:
            raise Interrupted
        return report

    def measure(self, metric: Callable[..., Any] | None = None) -> float:
        def counted(output: torch.Tensor, target: torch.Tensor) -> Any:
            self.evaluated += len(target)
            return accuracy(output, target) if metric is None else metric(output, target)

        return self.session.evaluate(classes(40), counted)

    def over_epochs(self) -> dict[str, Any]:
        """Early stopping with registered values; a measurement among the batches as well."""
        session = self.session
        kept = session.register(best=float("inf"), bad=0, history=[], seen=torch.zeros(()), counter=Counter())
        first = session.evaluate(classes(20))
        for epoch in session.epochs(EPOCHS):
            losses = []
            for batch in session.batches():
                report = self.step(batch)
                kept.seen = kept.seen + batch.samples
                kept.counter.sum[0] += report.loss
                losses.append(report.loss)
                if session.position % 3 == 0:
                    kept.history.append(("among", session.position, self.measure()))
            value = session.evaluate(classes(40))
            kept.history.append((epoch, value, report.loss, self.measure()))
            session.print(f"epoch {epoch}: {value:.4f}")
            if value < kept.best:
                kept.best, kept.bad = value, 0
            else:
                kept.bad += 1
            if kept.bad == 2:
                break
        told = {"first": first, "report": report.loss, "step": report.step, "sum": kept.counter.sum.tolist()}
        return {**told, "history": kept.history, "best": kept.best, "bad": kept.bad, "seen": kept.seen.item()}

    def over_range(self) -> dict[str, Any]:
        """What people write: nothing is registered, and the loop goes through all epochs."""
        session, values, best = self.session, [], 0.0
        for epoch in range(EPOCHS):
            for batch in session.batches(epochs=1):
                report = self.step(batch)
                if session.position % 4 == 0:
                    session.evaluate(classes(20))
            value = self.measure()
            best = max(best, value)
            values.append((epoch, value, session.evaluate(classes(40))))
        return {"values": values, "best": best, "report": report.loss}

    def in_two_phases(self) -> dict[str, Any]:
        session = self.session
        kept = session.register(done=[])
        for epoch in session.epochs(1):
            for batch in session.batches():
                self.step(batch)
            kept.done.append(("first", epoch, self.measure()))
        for epoch in session.epochs(3):
            before = self.measure()  # these lines run again when a run is resumed in this epoch
            for batch in session.batches(steps=3):  # of 4
                report = self.step(batch)
            kept.done.append(("second", epoch, before, self.measure(), session.once(lambda: session.position)))
        return {"done": kept.done, "report": dataclasses.replace(report, seconds=1, samples_per_second=1)}

    def with_rollouts(self) -> dict[str, Any]:
        """Before, among and after the batches of an epoch, and a checkpoint that has more results than the one before.

        A resumed script gets those of its epoch; a list that is not registered has no others.
        """
        session = self.session
        kept = session.register(among=[])
        for _ in session.epochs(EPOCHS):
            before = self.play(3)
            for batch in session.batches():
                self.step(batch)
                session._context.compute.model.place = torch.full((2,), session.position)  # a tensor behind the results
                if session.position % 3 == 0:
                    kept.among.append(self.play(2))
            after = self.play(2), self.play(1)
            session.save()
        return {"before": before, "among": kept.among, "after": after}

    def play(self, items: int) -> list[list[float]]:
        def counted(item: int) -> torch.Tensor:
            self.evaluated += 1
            return torch.rand(item + 1)

        return [one.tolist() for one in self.session.map(counted, range(items))]


# checkpoint.every, and the step in which the script is interrupted: in an epoch, at its end, long after a checkpoint
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("form", "ends"),
    [
        ("over_epochs", [(1, 3), (1, 6), (4, 8), (5, 10)]),
        ("over_range", [(1, 6), (4, 8)]),
        ("in_two_phases", [(1, 4), (3, 6)]),
        ("with_rollouts", [(1, 3), (1, 6), (4, 9)]),
    ],
)
def test_interrupted_anywhere(form: str, ends: list[tuple[int, int]], tmp_path: Path) -> None:
    whole = Script(tmp_path / "whole", 100)
    wanted = whole.run(form, None, resume=False)
    for every, end in ends:
        script = Script(tmp_path / f"{every}-{end}", every)
        with pytest.raises(Interrupted):
            script.run(form, end, resume=False)
        assert script.run(form, None, resume=True) == wanted, (every, end)
        if every == 1:
            assert script.evaluated == whole.evaluated, "each evaluation is made once"
    assert script.run(form, None, resume=True) == wanted, "of a run that had come to its end"


def test_containers_that_the_script_holds_get_their_old_content() -> None:
    before, after = ScriptState(), ScriptState()
    before.register({"list": [1, [2]], "dict": {"a": 3}, "set": {4}})
    held: dict[str, Any] = {"list": [], "dict": {"b": 0}, "set": set()}
    after.load(before.saved())
    after.register(held)
    assert all(after.values[name] is value for name, value in held.items())
    assert held == before.values
    after.values["list"].append(5)
    assert before.values["list"] == [1, [2]]


def test_a_step_that_others_completed_is_kept_with_the_values_of_now() -> None:
    script = ScriptState()
    script.register({"done": (done := [0])})
    done.append(1)
    script.keep_step()
    assert script.saved()["registered"] == {"done": [0]}, "no step waits"
    script.begin_step()
    with script.of_now():
        assert script.saved()["registered"] == {"done": [0, 1]}
    assert script.saved()["registered"] == {"done": [0]}
    script.keep_step()
    done.append(2)
    script.keep_step()
    assert script.saved()["registered"] == {"done": [0, 1]}, "the step is over"


def test_a_result_that_no_checkpoint_has_is_of_a_later_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def train(resume: bool, asks: bool) -> list[float]:
        session = start(tmp_path / "saved", 100, resume)
        values = []
        for _ in range(2):
            for batch in session.batches(epochs=1):
                session.step(batch)
            if asks:
                values += [session.evaluate(classes(40))]
        session.save()
        return values

    train(resume=False, asks=False)
    first, last = train(resume=True, asks=True)
    assert first == last
    (said,) = [one.message for one in caplog.records if "evaluate:" in one.message]
    assert "no result of this call after step 3" in said and "the model of step 7" in said


def test_epochs_are_numbered_as_by_range(tmp_path: Path) -> None:
    session = start(tmp_path, 100, resume=False)
    numbers = []
    for end in (3, 5):
        for epoch in session.epochs(1, end):
            assert all(session.step(batch).applied for batch in session.batches())
            numbers.append((epoch, session.position))
    assert numbers == [(1, 4), (2, 8), (3, 12), (4, 16)]
    assert list(session.epochs(3, 1)) == []
    for wrong in (2.5, -1, True):
        with pytest.raises(paceline.ConfigError, match=r"epochs\(.*give a whole number"):
            session.epochs(1, wrong)  # type: ignore[arg-type]


def weighted(folder: Path, steps: int, length: int, resume: str | None = None) -> str:
    weights = torch.ones(length, dtype=torch.double)
    sampler = WeightedRandomSampler(weights.tolist(), 64)
    session = paceline.start(
        model=mlp(), optimizer=partial(torch.optim.SGD, lr=0.5), loss=torch.nn.functional.cross_entropy,
        data=classes(length), batch=16, exact=True, sampler=sampler, resume=resume,
        checkpoint={"directory": folder, "every": 3, "background": False},
    )  # fmt: skip
    for batch in session.batches(steps=steps):
        session.step(batch)
        if batch.step in (1, 4):  # in the middle of an epoch, which goes on as it was drawn
            sampler.weights[: length * (batch.step + 1) // 8] = 0
    return session.fingerprint()


@pytest.mark.crossed
@pytest.mark.parametrize("length", [80, 800])  # also weights of which each change is not copied
@pytest.mark.parametrize("steps", [4, 7])
def test_weights_of_a_sampler_that_the_loop_changes(tmp_path: Path, length: int, steps: int) -> None:
    whole = weighted(tmp_path / "whole", 11, length)
    weighted(tmp_path / "parts", steps, length)
    assert weighted(tmp_path / "parts", 11, length, resume="auto") == whole
