"""A microbatch that is computed or loaded twice must be the same, and nobody sees that it was."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

import paceline
from paceline.comm.world import World
from paceline.data.feed import MicrobatchGroup, split_group
from paceline.errors import InputError, WorkerLost
from paceline.schedule.audits import AuditSchedule
from paceline.step.context import ProbeResults
from paceline.step.forward import ForwardRunner
from paceline.step.probes.audit import Audit
from paceline.testing.ranks import Ended

Printed = Callable[..., list[dict[str, Any]]]
Run = Callable[..., list[Ended]]


def start(model: nn.Module, **more: Any) -> paceline.Session:
    torch.manual_seed(0)
    values = torch.randn(48, 4)
    given: dict[str, Any] = {
        "model": model,
        "optimizer": partial(torch.optim.SGD, lr=0.1),
        "loss": functional.cross_entropy,
        "data": TensorDataset(values, (values.sum(1) > 0).long()),
        "batch": 16,
        "exact": True,
    }
    return paceline.start(**given | more)


_drawn = itertools.count()


def hidden() -> float:
    """Numbers between 0 and 1 of which any two of ten in a row differ by at least 0.03, so not only in rounding."""
    return next(_drawn) * 0.6180339887 % 1


class Late(nn.Module):
    """Draws from a generator that nobody knows, once it is switched on."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.scale = scale
        self.on = False

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        factor = 1 + self.scale * hidden() if self.on else 1.0
        return self.layer(values) * factor


def train(session: paceline.Session, model: nn.Module, steps: int, on: int) -> list[str]:
    notes: list[str] = []
    for batch in session.batches(steps=steps):
        if batch.step == on:
            model.on = True
        notes = list(session.step(batch).notes)
    return notes


def test_the_error_names_the_step_and_what_differs() -> None:
    model = Late(0.5)
    with pytest.raises(InputError, match=r"Audit of step 3: microbatch 5, computed twice, .* the loss differs"):
        train(start(model), model, 12, 3)


def test_a_warning_is_given_once() -> None:
    model = Late(0.5)
    notes = train(start(model, audit_action="warn"), model, 12, 3)
    assert sum("Audit of step 3" in note for note in notes) == 1


def test_rounding_matters_with_exact_only() -> None:
    model = Late(1e-5)
    assert not any("Audit" in note for note in train(start(model, exact=False), model, 6, 1))
    model = Late(1e-5)
    with pytest.raises(InputError, match="Audit of step 1"):
        train(start(model), model, 6, 1)


def test_workers_that_have_joined_are_audited_one_after_the_other() -> None:
    schedule = AuditSchedule()
    for later in (False, True):
        schedule.look_at(9, [2, 3], later)
        assert [step - later for step in range(9, 13) if schedule.is_due(step)] == [9, 10]
        assert [schedule.joined(step + later) for step in (9, 10, 11)] == [2, 3, None]
    off = AuditSchedule(off=True)
    off.look_at(9, [2])
    assert not off.is_due(9)


@pytest.mark.parametrize(("owner", "computes"), [(1, 2), (2, 1)])
def test_one_that_has_joined_takes_part_in_the_audit(
    monkeypatch: pytest.MonkeyPatch, owner: int, computes: int
) -> None:
    """Rank 2 has joined: it computes the microbatch of another one, or another one computes its microbatch."""
    computed: list[int] = []
    for rank in range(3):
        schedule = AuditSchedule()
        schedule.look_at(9, [2])
        context: Any = SimpleNamespace(
            audits=schedule,
            world=SimpleNamespace(rank=rank, size=3),
            compute=SimpleNamespace(recorder=None),
            order=SimpleNamespace(parts_of=lambda _: range(6), able=lambda _step, _place, workers: range(workers)),
            settings=SimpleNamespace(exact=True),
            probe_results=ProbeResults(),
        )
        monkeypatch.setattr(Audit, "_compute", lambda audit, halves: computed.append(audit._context.world.rank))
        layout = [[], [], []]
        layout[owner] = [range(schedule.microbatch(9, 6), schedule.microbatch(9, 6) + 1)]
        assert Audit(context).begin(9, layout)
    assert computed == [computes]


def test_nothing_is_computed_twice_without_audits() -> None:
    model = Late(0.5)
    assert train(start(model, audit="off"), model, 12, 3) is not None


def test_what_is_audited(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A microbatch for each audit, no more: before saves, of the last step, and of each step asked for."""
    computed = []
    plain = Audit._compute

    def compute(audit: Audit, halves: bool) -> None:
        computed.append((audit._step, audit._microbatch))
        plain(audit, halves)

    monkeypatch.setattr(Audit, "_compute", compute)
    session = start(nn.Linear(4, 2), checkpoint={"directory": tmp_path, "every": 7}, audit=5)
    for batch in session.batches(steps=13):
        session.step(batch)
    assert [step for step, _ in computed] == [0, 1, 2, 4, 5, 6, 8, 10, 12]
    assert len({microbatch for _, microbatch in computed[:5]}) == 5


def test_audits_leave_no_trace() -> None:
    prints = set()
    for audit in (1, "off"):
        torch.manual_seed(1)
        model = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.2), nn.Linear(4, 2))
        session = start(model, audit=audit, optimizer=partial(torch.optim.AdamW, lr=0.01))
        for batch in session.batches(epochs=3):
            session.step(batch)
            torch.rand(1)
        prints.add(session.fingerprint())
    assert len(prints) == 1


def test_an_audit_is_given_up_at_the_next_gradient_after_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    session, checked = start(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), audit=1), list[int]()
    plain = Audit._compute

    def check(world: World) -> None:
        checked.append(1)
        if len(checked) == 2:
            raise WorkerLost

    def compute(audit: Audit, halves: bool) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(World, "check", check)
            plain(audit, halves)

    monkeypatch.setattr(Audit, "_compute", compute)
    with pytest.raises(WorkerLost):
        session.step(next(session.batches()))
    assert len(checked) == 2, "of four gradients"


def test_the_audited_microbatch_is_computed_by_itself() -> None:
    """Whatever the sizes of the microbatches, and on whichever side of it the group has others."""
    parts = [range(0, 3), range(3, 6), range(6, 8), range(8, 10), range(10, 12)]
    group = MicrobatchGroup(range(1, 5), 9, torch.arange(3, 12))
    for microbatch, expected in (
        (0, [(range(1, 5), [*range(3, 12)])]),
        (1, [(range(1, 2), [3, 4, 5]), (range(2, 5), [*range(6, 12)])]),
        (2, [(range(1, 2), [3, 4, 5]), (range(2, 3), [6, 7]), (range(3, 5), [*range(8, 12)])]),
        (4, [(range(1, 4), [*range(3, 10)]), (range(4, 5), [10, 11])]),
    ):
        found = split_group(group, parts, microbatch)
        assert [(one.microbatches, one.data.tolist()) for one in found] == expected
        assert [one.samples for one in found] == [len(one.data) for one in found]


def test_a_microbatch_in_a_group_of_its_own_is_not_cut() -> None:
    """Its data need not have samples as rows: the edges of several graphs have two rows."""
    group = MicrobatchGroup(range(1, 2), 3, torch.zeros(2, 7))
    assert split_group(group, [range(0, 3), range(3, 6)], 1) == [group]


def test_a_fused_step_is_audited(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last step, which is not known when the groups of a step are loaded, like the others.

    What differs from its halves is computed as a whole again: here the cause is not that it was divided.
    """
    computed = []
    plain = Audit._compute

    def compute(audit: Audit, halves: bool = False) -> None:
        computed.append((audit._step, halves))
        plain(audit, halves)

    monkeypatch.setattr(Audit, "_compute", compute)
    model = Late(50.0)
    notes = train(start(model, exact=False), model, 12, 11)
    fused = [(step, True) for step in (1, 2, 4, 8, 11)]
    assert computed == [(0, False), *fused, (11, False)]
    assert any("Audit of step 11: microbatch" in note for note in notes)
    assert not any("several samples" in note for note in notes)


@pytest.mark.parametrize("audit", [1, "auto", "off"])
def test_an_audit_computes_one_microbatch_more(monkeypatch: pytest.MonkeyPatch, audit: Any) -> None:
    """Also where a worker computes its microbatches in one pass, and the audit divides one."""
    samples = [0] * 7
    plain = ForwardRunner.take

    def take(compute: ForwardRunner, value: Any, count: int) -> Any:
        samples[now] += count
        return plain(compute, value, count)

    monkeypatch.setattr(ForwardRunner, "take", take)
    for batch in (session := start(nn.Linear(4, 2), exact=False, audit=audit)).batches(steps=7):
        now = batch.step
        session.step(batch)
    audited = {1: {1, 2, 3, 4, 5, 6}, "auto": {1, 2, 4, 6}, "off": set[int]()}[audit]
    assert [count - 16 for count in samples[1:]] == [2 * (step in audited) for step in range(1, 7)]


class Keeps(Dataset[tuple[torch.Tensor, int]]):
    """Draws for a sample when it is read first."""

    def __init__(self) -> None:
        self.values = torch.randn(48, 4)
        self.drawn: dict[int, torch.Tensor] = {}

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, place: int) -> tuple[torch.Tensor, int]:
        if place not in self.drawn:
            self.drawn[place] = self.values[place] + 0.1 * torch.randn(4)
        return self.drawn[place], place % 2


@functools.lru_cache
def drawn(place: int) -> torch.Tensor:
    return torch.randn(4, generator=torch.Generator().manual_seed(place)) + 0.1 * torch.randn(4)


class Cached(Keeps):
    def __getitem__(self, place: int) -> tuple[torch.Tensor, int]:
        return drawn(place), place % 2


@pytest.mark.parametrize(("data", "where"), [(Keeps, "data.drawn"), (Cached, "drawn")])
def test_a_data_set_that_keeps_what_it_drew(data: type[Keeps], where: str) -> None:
    drawn.cache_clear()
    with pytest.raises(InputError, match=f"keeps what it drew for a sample, in {where}: "):
        train(start(nn.Linear(4, 2), data=data()), nn.Identity(), 2, 9)


SCRIPT = """
from functools import partial
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset
import paceline

kind, strategy = KIND, STRATEGY
session = None
PAST = []

class Data(Dataset):
    strength = 0.0
    def __init__(self):
        self.values = torch.randn(48, 4, generator=torch.Generator().manual_seed(0))
        self.known = set()
    def __len__(self):
        return 48
    def __getitem__(self, place):
        value = self.values[place] * (1 + self.strength)
        if kind == "kept" and place in self.known:  # another value from the second time on
            value = value + 1
        if session and session.position > 1:
            self.known.add(place)
        return value, place % 2

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)
    def forward(self, values):
        if kind == "hidden" and session and session.position > 0:
            before = eval("PAST[-1] if PAST else 0.0")
            PAST[:] = [values[0, 0].item()]
            values = values + before
        return self.layer(values)

torch.manual_seed(0)
data = Data()
session = paceline.start(
    model=nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=None), Model()),
    optimizer=partial(torch.optim.SGD, lr=0.1), loss=functional.cross_entropy, data=data, batch=16,
    exact=EXACT, strategy=strategy, timeout_seconds=30, pipeline=PIPELINE
)
for batch in session.batches(epochs=3):
    if kind == "strength":
        data.strength = batch.step / 10
    session.step(batch)
print('{"fingerprint": "%s"}' % session.fingerprint())
"""


def script(kind: str, strategy: str, schedule: str = "") -> str:
    given = {
        "KIND": kind,
        "STRATEGY": strategy,
        "EXACT": schedule != "pipedream",
        "PIPELINE": {"schedule": schedule} if schedule else {},
    }
    text = SCRIPT
    for name, value in given.items():
        text = text.replace(name, repr(value))
    return text


@pytest.mark.sampled(1)
@pytest.mark.parametrize("strategy", ["allreduce", "stealing", "parameter-server"])
def test_two_workers_find_what_is_hidden_from_one(ranks: Run, tmp_path: Path, strategy: str) -> None:
    everyone = ranks(script("hidden", strategy), 2, tmp_path, deadline=60)
    assert [one.code for one in everyone] == [2, 2]
    for one in everyone:
        assert "Audit of step 1: microbatch 6, computed " in one.err  # twice by one that has stolen it
        assert "the loss differs" in one.err


@pytest.mark.sampled(1)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "pipedream"])
def test_a_stage_finds_what_it_hides(ranks: Run, tmp_path: Path, schedule: str) -> None:
    everyone = ranks(script("hidden", "pipeline", schedule), 2, tmp_path, deadline=60)
    text = "\n".join(one.err for one in everyone)
    assert (
        "Audit of step 1: microbatch 6, computed twice by rank 1, does not give the same result: the loss differs"
        in text
    )


@pytest.mark.sampled(1)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "pipedream"])
def test_a_stage_that_hides_nothing_passes(printed: Printed, tmp_path: Path, schedule: str) -> None:
    (one, _) = printed(script("", "pipeline", schedule), 2, tmp_path, deadline=60)
    assert one["fingerprint"]


def test_two_workers_find_data_that_depend_on_what_was_read(ranks: Run, tmp_path: Path) -> None:
    everyone = ranks(script("kept", "allreduce"), 2, tmp_path, deadline=60)
    assert [one.code for one in everyone] == [2, 2]
    assert all("does not have the same data" in one.err for one in everyone)


def test_a_data_set_changed_in_the_loop_is_the_same_to_all(printed: Printed, tmp_path: Path) -> None:
    """The batch of a step was read before the loop changed it; what is loaded later in the step is read as then."""
    found = [
        one["fingerprint"]
        for workers, strategy in ((1, "single"), (2, "allreduce"), (2, "stealing"), (2, "auto"))
        for one in printed(script("strength", strategy), workers, tmp_path / f"{strategy}", deadline=60)
    ]
    assert len(set(found)) == 1


SET_APART = """
from functools import partial
import torch
from torch import nn
from torch.utils.data import TensorDataset
import paceline

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.2), nn.Linear(4, 2))
        self.read, self.unread = False, 0
    def forward(self, values):
        return self.layers(values) * (2.0 if self.read else 1.0)

torch.manual_seed(0)
model = Model()
session = paceline.start(
    model=model, optimizer=partial(torch.optim.AdamW, lr=0.01), loss=nn.functional.cross_entropy, batch=24,
    data=TensorDataset(torch.randn(48, 4), torch.arange(48) % 2), exact=True, timeout_seconds=30, strategy=STRATEGY
)
for batch in session.batches(steps=7):
    if session.rank == session.workers - 1:
        READ
        model.unread = batch.step
    session.step(batch)
print('{"fingerprint": "%s"}' % session.fingerprint())
"""


@pytest.mark.parametrize("strategy", ["allreduce", "stealing"])
def test_what_one_rank_sets_between_two_audits_is_found(ranks: Run, tmp_path: Path, strategy: str) -> None:
    """Steps 2 and 4 are audited. Step 3 is audited because the loops have set different values before it."""
    text = SET_APART.replace("STRATEGY", repr(strategy)).replace("model.unread = batch.step", "pass")
    everyone = ranks(text.replace("READ", "model.read = batch.step == 3"), 3, tmp_path, deadline=60)
    assert [one.code for one in everyone] == [2] * 3
    for one in everyone:
        assert "The loop has set model.read to True on rank 2, and not on rank 0, so the workers compute" in one.err


def test_what_one_rank_sets_and_no_forward_pass_reads_changes_nothing(printed: Printed, tmp_path: Path) -> None:
    found = [
        one["fingerprint"]
        for workers, strategy in ((1, "single"), (3, "allreduce"), (2, "stealing"))
        for one in printed(
            SET_APART.replace("STRATEGY", repr(strategy)).replace("READ", "pass"),
            workers,
            tmp_path / strategy,
            deadline=60,
        )
    ]
    assert len(found) == 6 and len(set(found)) == 1
