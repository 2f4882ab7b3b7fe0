"""How workers come to one state after a change: from the furthest ones, from their shards, or from a checkpoint."""

from __future__ import annotations

import copy
import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo  # an optimizer imports it, and it sets a variable of the environment
from thread_world import run

from paceline.comm.collectives import exchange as exchanges
from paceline.comm.collectives.exchange import even_shares, exchange, fill_from
from paceline.coordinator.types import Departure, Generation, Member, Membership
from paceline.data.growing.agreement import encoded
from paceline.data.growing.order import Additions, GrowingOrder
from paceline.data.growing.samples import Growing
from paceline.errors import PREEMPTED, CheckpointError, InputError, WorkerLost
from paceline.schedule.audits import AuditSchedule
from paceline.settings import Settings
from paceline.step.context import HeldShare, StepResult
from paceline.step.divided.consolidate import consolidate_state_dict
from paceline.training.progress import Progress
from paceline.training.recovery import recovery, state_shards
from paceline.training.recovery.recovery import Recovery
from paceline.training.recovery.state_shards import missing
from paceline.training.recovery.state_transfer import StateBytes, share_samples, transfer

HOSTS: list[list[tuple[int, ...]] | None] = [None, [(0, 1, 2, 3)]]


def state_at(steps: int) -> dict[str, torch.Tensor]:
    chance = torch.Generator().manual_seed(steps)
    return {
        "parameter/a": torch.randn(70, 3, generator=chance),
        "parameter/b": torch.randn(5, generator=chance, dtype=torch.float64),
        "buffer/count": torch.tensor(steps),
    }


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("hosts", HOSTS, ids=["network", "memory"])
def test_every_sender_gives_its_share(hosts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchanges, "_CHUNK_BYTES", 128)
    monkeypatch.setattr(exchanges, "_WINDOW_BYTES", 4096)
    whole = {"a": torch.randn(3001), "b": torch.arange(7), "c": torch.randn(2, 2).t()}
    total = sum(map(len, even_shares(-(-3001 * 4 // 64) * 64 + 128, [0], 1)))

    def act(world: Any, senders: list[int], receivers: list[int]) -> tuple[list[int] | None, int]:
        asked = []
        inner = fill_from(whole.values())

        def fill(chunk: torch.Tensor, start: int) -> None:
            asked.append(len(chunk))
            inner(chunk, start)

        flags = [world.shared_memory.reserve(1)] if world.shared_memory else []
        flat = exchange(world, even_shares(total, senders, 4), receivers, fill)
        assert all(world.host)
        assert not flags or world.shared_memory.reserve(1) == flags[0] + 3, "it has two flags of its own"
        return (None if flat is None else flat.tolist()), sum(asked)

    expected = torch.zeros(total, dtype=torch.uint8)
    fill_from(whole.values())(expected, 0)
    for senders, receivers in (([0, 2], [1, 3]), ([1], [0]), ([0, 1, 2, 3], [0, 1, 2, 3])):
        found = run(4, partial(act, senders=senders, receivers=receivers), hosts=hosts)
        for rank, (flat, filled) in enumerate(found):
            if rank in receivers:
                assert flat is not None
                assert flat[:12004] == expected[:12004].tolist()
                assert flat[12032:12088] == expected[12032:12088].tolist()
                assert flat[12096:12112] == expected[12096:12112].tolist()
            else:
                assert flat is None
            assert filled == len(even_shares(total, senders, 4)[rank])


def test_senders_whose_tensors_are_others_than_the_first_ones_send_nothing() -> None:
    tensors = state_at(3)

    def act(world: Any) -> tuple[StateBytes | None, int]:
        own = {0: None, 1: tensors, 2: tensors | {"more": torch.ones(2)}, 3: tensors}[world.rank]
        found = transfer(world, [1, 2, 3], None if own is None else StateBytes(own, f"of {world.rank}"))
        return found, world.bytes_sent

    found = run(4, act)
    received = found[0][0]
    assert received is not None and received.rest == "of 1" and same(dict(received.tensors), tensors)
    assert [one for one, _ in found[1:]] == [None] * 3
    assert [sent > 0 for _, sent in found] == [False, True, False, True]


def test_samples_that_some_workers_lack_are_sent() -> None:
    """Each has the beginning of the longest log; only what the shortest lacks is sent."""

    def act(world: Any, entries: list[int]) -> tuple[list[int], list[list[list[int]]], int]:
        order = GrowingOrder(Growing(range(4)), 4, 2, seed=0, drop_last=False)
        for number in range(entries[world.rank]):
            additions = Additions(encoded([10 * number, 10 * number + 1]), steps=number, begun=number)
            order.add_result("extend", (number, -1, 0), additions)
        share_samples(world, order)
        return [*order.data], [order.microbatches_of(step) for step in range(9)], world.bytes_sent

    for entries in ([3, 1, 3, 0], [0, 0, 0, 2], [2, 2, 2, 2]):
        found = run(4, partial(act, entries=entries))
        samples = [*range(4), *(10 * number + place for number in range(max(entries)) for place in range(2))]
        assert all(one[0] == samples and one[1] == found[0][1] for one in found)
        assert [sent > 0 for *_, sent in found] == [one == max(entries) > min(entries) for one in entries]


def model_of(rank: int) -> torch.nn.Module:
    """A model of other values on each rank; threads draw from one global generator, so it has its own."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    chance = torch.Generator().manual_seed(rank)
    for value in model.state_dict().values():
        value.copy_(torch.randn(value.shape, generator=chance) * 100)
    return model


class State:
    """Stands for ``TrainingState``: after so many steps each worker has these tensors."""

    keeps_script = False
    shares: Any = None

    def __init__(self) -> None:
        self.loaded_script: dict[str, Any] = {"results": [], "evaluations": {}, "once": {}, "maps": {}}
        self.loaded: list[tuple[dict[str, torch.Tensor], Any]] = []
        self.script_loaded = False
        self.divided = lambda: None

    def snapshot(self, steps: int, without: tuple[str, ...]) -> Any:
        return SimpleNamespace(tensors=state_at(steps), state={"at": steps})

    def load(self, tensors: dict[str, torch.Tensor], state: Any) -> None:
        self.loaded.append((tensors, state))

    def load_script(self) -> None:
        self.script_loaded = True


class Saver:
    """Stands for ``Checkpointer``."""

    launch: int | None = None
    made = -1

    def __init__(self, newest: int = 0, enabled: bool = True) -> None:
        self.newest, self.enabled = newest, enabled
        self.saved: list[int] = []
        self.finished = 0

    def resume(self, _: object, which: str) -> int:
        assert which == "auto"
        return self.newest

    def save(self, _: object, steps: int) -> None:
        self.saved.append(steps)

    def finish(self) -> None:
        self.finished += 1


class Buffers:
    """Stands for the buffers of a model."""

    def __init__(self, fixed: bool = False, agreed: Iterable[str] = ()) -> None:
        self.fixed, self.agreed = fixed, set(agreed)
        self.added: set[str] = set()
        self.named: list[str] | None = None

    def fix(self, names: Iterable[str]) -> None:
        self.named = sorted(names)


class Scene:
    """One worker of a world, and all that its recovery needs."""

    def __init__(
        self, world: Any, newest: int = 0, answers: Iterable[Any] = (), enabled: bool = True, formation: Any = None
    ) -> None:
        self.formation = formation
        self.model = model_of(world.rank)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.buffers = Buffers()
        self.probe_results = SimpleNamespace(fusible=None, repeatable=False)
        self.context: Any = SimpleNamespace(
            world=world,
            compute=SimpleNamespace(model=self.model, buffers=self.buffers),
            update=SimpleNamespace(
                optimizer=self.optimizer, parameters=dict(self.model.named_parameters()), row_states={}
            ),
            probe_results=self.probe_results,
            loop=SimpleNamespace(needed=[], now=False),
            order=SimpleNamespace(grows=False, meet=lambda world, doing: None),
            settings=Settings(),
            replicas={},
            prepared=[],
            sparse=(),
            held=HeldShare(),
            audits=AuditSchedule(),
            events=SimpleNamespace(
                mark=lambda event, **fields: self.events.append((event, fields)), move=lambda *at: self.moved.append(at)
            ),
        )
        self.moved: list[tuple[int, ...]] = []
        self.state, self.saver = State(), Saver(newest, enabled)
        self.asked: list[tuple[Any, ...]] = []
        left = iter(answers)

        def await_membership(*given: Any) -> Any:
            self.asked.append(given)
            return next(left)

        coordinator: Any = SimpleNamespace(await_membership=await_membership, clock=None)
        self.begun = 0
        facts = {"batch": 8, "initial weights": "a"}
        about = {
            "context": self.context,
            "formation": formation,
            "run_spec": facts,
            "state": self.state,
            "checkpointer": self.saver,
        }
        self.kept = 0  # calls to keep the script's values
        self.decided: list[Any] = []  # norms of interrupted steps
        self.decided_owned: frozenset[str] = frozenset()

        def keep() -> None:
            self.kept += 1

        self.of = Recovery(coordinator, SimpleNamespace(**about, begin=self.begin), keep, self.decide)  # type: ignore[arg-type]

    def decide(self, norm: Any) -> frozenset[str]:
        self.decided.append(norm)
        return self.decided_owned

    def begin(self) -> Progress:
        self.begun += 1
        return Progress(40)


def same_state(given: Sequence[Progress | None], **how: Any) -> list[tuple[Progress, Scene]]:
    """Bring workers with this progress to one state; gives the progress and the scene of each."""

    def act(world: Any) -> tuple[Progress, Scene]:
        scene = Scene(world, **how)
        return scene.of._same_state(given[world.rank]), scene

    return run(len(given), act)


@pytest.fixture(autouse=True)
def capable(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What the strategy promises."""
    able = SimpleNamespace(exact=True, replicas=0)
    monkeypatch.setattr(state_shards.registry, "capabilities_here", lambda *_: able)
    return able


def test_workers_behind_get_the_state_of_the_furthest() -> None:
    made = {(3, -1, 0): [0.5]}
    given = [Progress(7, turns=2, compared=3, entered=7), Progress(6, compared=5, entered=6), None]
    given += [Progress(7, {"evaluate": made}, turns=2, entered=7)]
    given += [Progress(7, {"evaluate": made}, turns=2, compared=1, entered=6)]
    for rank, (progress, scene) in enumerate(same_state(given)):
        assert scene.kept == (rank == 1), "only its script waits for the step that the others have completed"
        assert (progress.steps, progress.compared, progress.results_of) == (7, 5, {"evaluate": made}), rank
        assert scene.state.keeps_script == (rank != 2)
        if rank in (3, 4):
            assert scene.state.loaded == [] and (progress.received, progress.received_turns) == (0, 0)
        else:
            ((tensors, rest),) = scene.state.loaded
            assert same(tensors, state_at(7)) and rest == {"at": 7}
            assert (progress.received, progress.received_turns) == (7, 2)


def test_nothing_is_sent_where_all_are_alike() -> None:
    for progress, scene in same_state([Progress(7)] * 3):
        assert progress == Progress(7)
        assert (scene.state.loaded, scene.context.world.bytes_sent) == ([], 0)


def names_of(*parts: str) -> frozenset[str]:
    model = model_of(0)
    names = [name for name, _ in [*model.named_parameters(), *model.named_buffers()]]
    return frozenset(name for name in names if name.startswith(parts))


def test_shards_of_several_workers_make_the_whole_state() -> None:
    owned = [names_of("0.w", "1.w"), names_of("0.", "1.running"), names_of("1.bias", "1.num")]

    def act(world: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any], Progress]:
        scene = Scene(world)
        if world.rank < 3:
            for name, value in scene.model.named_parameters():
                if name in owned[world.rank]:
                    scene.optimizer.state[value] = {
                        "step": torch.tensor(5.0),
                        "exp_avg": torch.full_like(value, world.rank),
                    }
        progress = Progress(7, owned=owned[world.rank]) if world.rank < 3 else None
        progress = scene.of._same_state(progress)
        averages = {
            name: scene.optimizer.state[value]["exp_avg"].flatten()[0].item()
            for name, value in scene.model.named_parameters()
        }
        return {name: value.clone() for name, value in scene.model.state_dict().items()}, averages, progress

    found = run(4, act, blocking_wait=False)
    firsts = {"0.weight": 0, "1.weight": 0, "0.bias": 1, "1.running_mean": 1, "1.running_var": 1, "1.bias": 2}
    for values, averages, progress in found:
        assert progress.owned is None and progress.steps == 7
        for name, rank in firsts.items():
            assert torch.equal(values[name], model_of(rank).state_dict()[name]), name
        assert averages == {"0.weight": 0.0, "1.weight": 0.0, "0.bias": 1.0, "1.bias": 2.0}


@pytest.mark.parametrize(
    ("others", "ahead"),
    [
        ([(7, True), (7, True)], None),  # nobody has done the step: all take it again
        ([(8, False), (7, True)], 0.5),  # one has: the others make its update
        ([(8, False), (8, False)], 0.5),
    ],
)
def test_an_interrupted_step_is_made_by_all_or_nobody(others: list[tuple[int, bool]], ahead: float | None) -> None:
    """Rank 0 does not know whether the others have done step 7, for which it has all it needs."""
    owned = [names_of("0.w", "1.w"), names_of("0.", "1.running"), names_of("1.bias", "1.num")]

    def act(world: Any) -> tuple[Progress, list[Any], int]:
        scene, gather = Scene(world), world.gather
        world.gather = lambda value, what: gather(copy.copy(value), what)  # as if sent
        scene.decided_owned = owned[world.rank]
        steps, undecided = [(7, True), *others][world.rank]
        result = StepResult(1.0, 0.5, 0.1) if steps == 8 else None
        own = Progress(steps, owned=owned[world.rank], undecided=undecided, result=result, entered=7)
        progress = scene.of._same_state(own)
        return progress, scene.decided, len(scene.state.loaded)

    found = run(3, act)
    for (progress, decided, loaded), (_, undecided) in zip(found, [(7, True), *others], strict=True):
        assert (progress.steps, progress.owned) == (8 if ahead else 7, None)
        assert not progress.undecided and not progress.ahead
        assert decided == ([ahead] if undecided else [])
        assert loaded == bool(ahead and undecided), "all else of the step comes from a worker that has done it"


def test_a_step_that_only_a_lost_worker_has_done_to_its_end_is_undone() -> None:
    """Its update is complete, but the script's values after it are not known."""
    given = [Progress(7, owned=names_of("0.", "1."), ahead=True, entered=7) for _ in range(2)]
    assert [progress.steps for progress, _ in same_state(given, newest=6)] == [6, 6]


def test_a_worker_with_everything_gives_what_the_others_lack() -> None:
    def act(world: Any) -> dict[str, torch.Tensor]:
        scene = Scene(world)
        consolidate_state_dict(scene.context, [None, frozenset()])
        return scene.model.state_dict()

    first, second = run(2, act)
    assert same(first, second)


def test_what_nobody_holds_is_missing() -> None:
    context: Any = SimpleNamespace(compute=SimpleNamespace(model=torch.nn.Linear(2, 2)))
    parts = [frozenset({"weight"}), frozenset({"bias"}), None]
    held = [Progress(3, owned=part) for part in parts]
    assert missing(context, held[:1]) == ["bias"]
    assert missing(context, [None, held[1]]) == ["weight"]
    assert missing(context, held[:2]) == [] == missing(context, [held[0], held[2]])
    assert missing(context, [Progress(3, owned=frozenset())]) == ["bias", "weight"]


def test_a_worker_claims_no_state_while_it_loads_its_share_of_a_checkpoint() -> None:
    """A loss may end the exchange when some workers have loaded their shares, and others have not."""
    progress = Progress(6, owned=frozenset({"0.weight"}))

    def go_back(_: Any) -> Progress:
        raise WorkerLost("rank 1 was lost")

    def act(world: Any) -> None:
        scene = Scene(world)
        scene.context.settings = Settings(strategy="sharded")
        scene.of._go_back = go_back  # type: ignore[method-assign]
        with pytest.raises(WorkerLost):
            scene.of._same_state(progress if world.rank == 0 else None)

    run(2, act)
    assert progress.owned == frozenset()


RESULT = StepResult(0.5, 1.0, 0.1)


@pytest.mark.parametrize("lost", ["a shard", "the same step"])
def test_a_lost_state_is_taken_from_the_newest_checkpoint(lost: str) -> None:
    whole = names_of("")
    given: list[Progress | None] = [Progress(6, owned=names_of("0."), received=2, repeat_until=3, entered=6), None]
    held = names_of("0.w") if lost == "a shard" else whole
    given += [Progress(8, owned=held, received=4, result=RESULT, entered=8)]
    for rank, (progress, scene) in enumerate(same_state(given, newest=5)):
        assert (progress.steps, progress.repeat_until, progress.owned) == (5, 8, None)
        assert scene.events == [("went back", {"step": 5, "steps": 3})]
        assert progress.received == (2, 5, 4)[rank]
        assert progress.result == (RESULT, None, RESULT)[rank]
        assert not scene.state.script_loaded


def test_rollouts_come_with_the_state_and_not_with_the_progress() -> None:
    """Only the worker that is behind takes them from the state of the others."""
    call, here, sent = (6, 1, 0), [[torch.tensor(1.0)]], {"maps": {(6, 1, 0): [[torch.tensor(2.0)]]}}
    given = [Progress(7, {"map": {call: here}}, entered=7), Progress(6, {"map": {call: here}}, entered=6)]

    def act(world: Any) -> tuple[Progress, list[Any]]:
        scene, gather, messages = Scene(world), world.gather, list[Any]()

        def listen(value: Any, what: str) -> Any:
            messages.append(value)
            return gather(value, what)

        world.gather, scene.state.loaded_script = listen, sent
        return scene.of._same_state(given[world.rank]), messages

    (first, messages), (second, _) = run(2, act)
    assert first.results("map", call) == here and second.results("map", call) == sent["maps"][call]
    assert messages[0].results_of == {"map": {call: [None]}}
    (rest,) = [one[1][1][1] for one in messages if isinstance(one, tuple) and len(one) == 2 and one[1]]
    assert rest.results_of == {"map": {call: [None]}}


def test_steps_are_not_repeated_if_rollouts_came_between_them() -> None:
    """The steps train on what the script has made of them."""
    made = {"map": {(6, 1, 0): [[1.0]]}}

    def act(world: Any) -> Scene:
        scene = Scene(world, newest=6)
        with pytest.raises(InputError, match=r"state after 6 steps, and repeat 2 .* has called session\.map"):
            scene.of._same_state(Progress(8, made if world.rank else {}, owned=names_of("0."), entered=8))
        return scene

    assert [scene.events for scene in run(2, act)] == [[], []]


def test_a_script_that_was_behind_the_checkpoint_gets_the_values_of_that() -> None:
    """It joined, got a state, and has yet to begin its loop; its progress is that of the state that it got."""
    given = [Progress(6, owned=names_of("0."), entered=6), Progress(6, owned=names_of("0.w"), entered=-1, received=6)]
    found = same_state(given, newest=5)
    assert [(one.received, one.entered, scene.state.script_loaded) for one, scene in found] == [
        (0, 6, False),
        (5, -1, True),
    ]


def test_who_joins_while_lost_steps_are_repeated_gets_the_values_of_a_checkpoint() -> None:
    found = same_state([Progress(6, repeat_until=8, entered=7), None], newest=5)
    assert [(one.steps, one.repeat_until, one.received, scene.state.keeps_script) for one, scene in found] == [
        (5, 8, 0, True),
        (5, 8, 5, False),
    ]


def test_a_strategy_without_the_bits_takes_shards_of_several_steps(capable: SimpleNamespace) -> None:
    capable.exact = False
    given = [Progress(6, owned=names_of("0.")), Progress(8, owned=names_of("1."))]
    for progress, scene in same_state(given):
        assert progress.steps == 8 and scene.events == []


def test_without_a_checkpoint_the_run_cannot_go_back() -> None:
    def act(world: Any, enabled: bool, owned: frozenset[str]) -> str:
        scene = Scene(world, newest=5 if not enabled else 0, enabled=enabled)
        with pytest.raises(CheckpointError) as failed:
            scene.of._same_state(Progress(6 + world.rank, owned=owned))
        return str(failed.value)

    for enabled in (True, False):
        shard = run(2, partial(act, enabled=enabled, owned=names_of("0.")))
        assert "the state of '1.bias' and 4 more was held by lost workers only" in shard[0]
        assert shard[1].startswith("Rank 1: the state of")
        assert shard[1].endswith("Save regularly (checkpoint.every).")
    assert "the state of a step was held by" in run(2, partial(act, enabled=True, owned=names_of("")))[0]


def test_what_the_first_step_found_out_is_shared() -> None:
    def act(world: Any) -> Scene:
        scene = Scene(world)
        scene.probe_results.fusible = [None, False, True][world.rank]
        scene.probe_results.repeatable = world.rank == 1
        scene.saver.launch = [None, 3, 5][world.rank]
        scene.buffers.added = {"a"} if world.rank == 2 else set()
        scene.buffers.fixed, scene.buffers.agreed = world.rank > 0, {"a"} if world.rank == 1 else {"b"}
        scene.of._share_findings()
        return scene

    for scene in run(3, act):
        assert (scene.probe_results.fusible, scene.probe_results.repeatable, scene.saver.launch) == (False, True, 5)
        assert (scene.buffers.named, scene.buffers.added) == (["a", "b"], {"a"})

    def nothing(world: Any) -> Scene:
        scene = Scene(world)
        scene.of._share_findings()
        return scene

    for scene in run(2, nothing):
        assert (scene.probe_results.fusible, scene.probe_results.repeatable, scene.saver.launch) == (None, False, None)
        assert scene.buffers.named is None


def membership(number: int, *workers: int, **fields: Any) -> Generation:
    return Generation(number, tuple(Member(one, "a", one, "") for one in workers), **fields)


class Changing:
    """Forms memberships of one worker. The first attempts to join may fail, and the last one may bring a device."""

    def __init__(self, world: Any, fails: list[WorkerLost | None], device: str) -> None:
        self.world, self.fails, self.device = world, fails, device
        self.joined, self.left = list[int](), 0
        world.enter(Membership(workers=(10, 11, 12)), world.transport)

    def join(self, generation: Generation) -> None:
        self.joined.append(generation.number)
        error = self.fails.pop(0)
        if error is not None:
            raise error
        transport = self.world.transport
        transport.capabilities = transport.capabilities._replace(device=torch.device(self.device))

    def leave(self) -> None:
        self.left += 1

    def arena_handle(self) -> None:
        return None


def changing(fails: list[WorkerLost | None], *answers: Any, device: str = "cpu", **how: Any) -> Scene:
    return run(1, lambda world: Scene(world, answers=answers, formation=Changing(world, fails, device), **how))[0]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What the launcher said, and what the script is told."""
    info = SimpleNamespace(elastic=False, ulfm=False)
    monkeypatch.setattr(recovery.env, "launch_info", lambda: info)
    monkeypatch.setattr(recovery.env, "set_identity", lambda *at: info.__dict__.update(identity=at))
    return info


@pytest.mark.parametrize("spare", [True, False])
def test_a_worker_registers_with_what_all_must_agree_on(
    launched: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, spare: bool
) -> None:
    launched.spare, launched.largest = spare, 8
    warmed: list[Any] = []
    monkeypatch.setattr(recovery, "warm_up", lambda context, state: (warmed.append((context, state)), lambda: None)[1])
    monkeypatch.setattr(recovery, "worker_counts", lambda settings, microbatches, largest: (microbatches, largest))
    scene = changing([])
    scene.context.settings, scene.context.order = SimpleNamespace(hang_seconds=9.0), SimpleNamespace(microbatches=4)
    given: list[Any] = []
    scene.of._coordinator = SimpleNamespace(  # type: ignore[assignment]
        address="10.0.0.1", report=given.append, register=lambda *facts: given.append(facts)
    )
    scene.of.register(dict)
    about = {"host": platform.node(), "pid": os.getpid(), "address": "10.0.0.1"}
    assert given == [dict, (about, {"batch": 8}, 9.0, (4, 8))]
    assert warmed == ([(scene.context, scene.state)] if spare else [])


def test_what_a_worker_has_of_a_checkpoint_is_known_after_a_loss_before_it_trains(launched: SimpleNamespace) -> None:
    """Its tensors are a share. Who believed to have all of them would train on with new states for the rest."""
    seen: list[frozenset[str] | None] = []
    for before, loaded, owned in (
        (None, frozenset({"a"}), frozenset({"a"})),
        (None, None, None),
        (frozenset[str](), frozenset({"a"}), frozenset[str]()),  # lost in the exchange: some have loaded, others not
    ):
        scene = changing([None], membership(1, 4, 5))
        scene.context.prepared.append(SimpleNamespace(release=lambda loaded=loaded: loaded))

        def same_state(progress: Progress) -> Progress:
            seen.append(progress.owned)
            return progress

        scene.of._same_state = same_state  # type: ignore[method-assign, assignment]
        scene.of.re_form(Progress(3, owned=before))
        assert seen.pop() == owned and not scene.context.prepared


def test_a_membership_that_cannot_be_joined_is_followed_by_another(launched: SimpleNamespace) -> None:
    answers = [membership(1, 4, 5, 6, lost=(7,)), membership(2, 4, 5, lost=(6,), joined=(5,))]
    scene = changing([WorkerLost("", ranks=(2,)), None], *answers)
    progress = scene.of.re_form(Progress(7), planned=True, ended=[3])
    assert progress == Progress(7)
    key = Progress(7).key
    assert scene.asked == [(key, None, False, True, [3]), (key, None, False, False, [12])]
    assert scene.formation.joined == [1, 2] and scene.formation.left == 2
    assert launched.identity == (0, 1, 0, 1) and scene.moved == [(0, 2)]
    ((event, fields),) = scene.events
    assert event == "recovered" and fields["step"] == 7 and fields["workers"] == [4, 5]
    assert fields["lost"] == [7, 6] and fields["joined"] == [5]
    parts = [fields[name] for name in ("agreeing", "connecting", "catching_up")]
    assert all(part >= 0 for part in parts) and fields["seconds"] == pytest.approx(sum(parts))
    assert scene.begun == 0


def test_workers_without_a_state_begin(launched: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = changing([None], membership(0, 4, fresh=True), device="meta")
    undone, moved = [], []
    scene.of._undo_warm_up = lambda: undone.append(1)
    monkeypatch.setattr(recovery, "move_to_device", moved.append)
    assert scene.of.re_form(None) == Progress(40)
    assert scene.asked == [(None, None, False, False, ())] and scene.begun == 1
    assert scene.events[0][0] == "gathered" and scene.events[0][1]["step"] == 40
    assert len(undone) == 2 and moved == [scene.context]
    scene = changing([None], membership(0, 4, fresh=True))
    moved.clear()
    scene.of.re_form(None)
    assert moved == [], "it is on its device"


@pytest.mark.parametrize("ulfm", [True, False])
def test_without_a_launcher_rank_0_says_that_workers_were_lost(
    launched: SimpleNamespace, ulfm: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched.ulfm = ulfm
    changing([None], membership(1, 4, 5, lost=(7, 8))).of.re_form(Progress(7))
    lines = [record.getMessage() for record in caplog.records]
    assert lines == (["lost 2 of 4 workers; 2 continue from step 7"] if ulfm else [])
    caplog.clear()
    changing([None], membership(1, 4, 5)).of.re_form(Progress(7))
    assert not caplog.records
    monkeypatch.setattr(recovery.env, "launch_info", lambda: None)
    changing([None], membership(1, 4, 5, lost=(7, 8))).of.re_form(Progress(7))
    assert not caplog.records


@pytest.mark.parametrize(
    ("save", "progress", "saved"),
    [
        (True, Progress(7), [7]),
        (False, Progress(7), []),
        (True, Progress(0), []),
        (True, None, []),
        (True, Progress(7, owned=frozenset({"a"})), []),
    ],
)
@pytest.mark.parametrize("code", [0, PREEMPTED, 5])
def test_a_departure_saves_for_all_if_it_can(
    launched: SimpleNamespace, code: int, save: bool, progress: Progress | None, saved: list[int]
) -> None:
    scene = changing([], Departure(code, "rank 2 was killed", save))
    with pytest.raises(WorkerLost if code == 5 else SystemExit) as ended:
        scene.of.re_form(progress)
    if code == 5:
        assert str(ended.value) == "Rank 2 was killed."
    else:
        assert ended.value.code == code  # type: ignore[attr-defined]
    assert scene.context.world.membership == Membership() and scene.saver.saved == saved
    assert scene.events[0] == ("departure", {"code": code, "reason": "rank 2 was killed"})
    part = save and progress is not None and progress.owned is not None
    assert scene.events[1:] == ([("not saved", {"step": 7})] if part else [])
    scene = changing([], Departure(code, "", save), enabled=False)
    with pytest.raises((WorkerLost, SystemExit)):
        scene.of.re_form(progress)
    assert scene.saver.saved == []


def test_before_a_planned_change_workers_wait_for_each_other() -> None:
    def prepare(leaving: bool, alarmed: bool, hosts: Any, size: int = 2) -> list[tuple[list[str], int]]:
        def act(world: Any) -> tuple[list[str], int]:
            scene = Scene(world)
            world.gathered.clear()
            world.leaving = leaving
            world.coordinator = SimpleNamespace(alarm=int(alarmed), generation=0)
            scene.of.prepare_to_leave(7)
            return world.gathered, scene.saver.finished

        return run(size, act, hosts=hosts)

    assert prepare(False, False, None) == [(["leaving"], 0)] * 2
    assert prepare(True, False, None) == [(["leaving"], 1)] * 2
    assert prepare(True, True, None) == [([], 1)] * 2
    assert prepare(False, False, [(0, 1)]) == [([], 0)] * 2
    assert prepare(False, False, None, size=1) == [([], 0)]


class Shares:
    """Stands for the new division of a state: what this worker moves from, and what it loads."""

    def __init__(self) -> None:
        self.owned: list[frozenset[str] | None] = []
        self.loaded: list[list[str]] = []

    def move(self, owned: frozenset[str] | None, _: str) -> None:
        self.owned.append(owned)

    def load(self, tensors: dict[str, torch.Tensor]) -> None:
        self.loaded.append(sorted(tensors))


def prepared(context: Any, moves: bool) -> Shares:
    assert moves
    context.prepared.append(made := Shares())
    return made


SHARDED = names_of("0."), names_of("1.")


@pytest.mark.parametrize("interrupted", [True, False])
def test_a_divided_state_moves_before_old_shares_are_dropped(
    interrupted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 is not told that all have their new shares, and keeps its old one. Rank 2 has joined, rank 3 is ahead."""
    monkeypatch.setattr(state_shards.registry, "prepare", prepared)
    done = StepResult(1.0, 0.5, 0.1)
    ahead = Progress(6, owned=SHARDED[1], ahead=True, entered=6)
    given = [Progress(7, owned=one, result=done, entered=7) for one in SHARDED] + [None, ahead]

    def act(world: Any) -> tuple[Progress, Scene]:
        scene, gather = Scene(world), world.gather
        scene.context.settings = Settings(strategy="sharded")
        scene.context.held.add({"old"}, {"optimizer/old": torch.ones(1)})

        def gathered(value: Any, what: str) -> list[Any]:
            found = gather(value, what)
            if world.rank == 1 and interrupted and scene.context.prepared and what == "re-forming":
                raise WorkerLost("rank 4 was lost")
            return list(found)

        world.gather = gathered
        scene.state.load = lambda tensors, state: scene.state.shares.load(tensors)  # type: ignore[method-assign]
        return scene.of._same_state(given[world.rank]), scene

    for rank, (progress, scene) in enumerate(run(4, act)):
        (shares,) = scene.context.prepared
        assert (progress.steps, progress.owned, progress.ahead) == (7, None, False)
        assert shares.owned == [[*SHARDED, frozenset(), SHARDED[1]][rank]]
        assert shares.loaded == [["buffer/count"] if rank in (2, 3) else []], "the rest comes whole"
        keeps = rank == 1 and interrupted
        assert scene.context.held.names == ({"old"} if keeps else set())
        assert bool(scene.context.held.tensors) == keeps == (scene.of._interrupted is not None)
        assert scene.state.shares is None


def test_a_worker_that_keeps_its_old_share_joins_another_membership(launched: SimpleNamespace) -> None:
    scene = changing([None, None], membership(1, 4), membership(2, 4))
    released: list[int] = []

    def release() -> frozenset[str]:
        released.append(1)
        return frozenset({"a"})

    def same_state(progress: Progress) -> Progress:
        scene.of._interrupted = None if released else WorkerLost("", ranks=(2,))
        scene.context.prepared.append(SimpleNamespace(release=release))
        return replace(progress, owned=None)

    scene.of._same_state = same_state  # type: ignore[method-assign, assignment]
    scene.of.re_form(Progress(3, owned=frozenset({"b"})))
    assert scene.formation.joined == [1, 2] and released == [1]
    assert [asked[-1] for asked in scene.asked] == [(), [12]]


@pytest.mark.parametrize("handed_on", [True, False])
@pytest.mark.parametrize("owned", [frozenset({"a"}), None])
def test_a_worker_leaves_when_others_have_what_it_holds(owned: frozenset[str] | None, handed_on: bool) -> None:
    """If its notice comes after the others have asked who leaves, it stays for another step."""

    def act(world: Any) -> bool:
        scene = Scene(world)
        scene.context.settings, scene.context.held.is_handed_on = Settings(strategy="sharded"), handed_on
        return scene.of._may_leave(Progress(3, owned=owned))

    assert run(2, act) == [handed_on or owned is None] * 2


@pytest.mark.parametrize("lost", [[], [1]])
def test_a_standby_that_steps_in_is_audited_in_its_second_step(
    lost: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    this: Any = object.__new__(Recovery)
    this._context = SimpleNamespace(audits=AuditSchedule())
    this._settle = this._share_findings = lambda: None
    monkeypatch.setattr(recovery, "meet", lambda *_: None)
    members = [SimpleNamespace(worker=worker) for worker in (0, 2)]
    this._share_knowledge(SimpleNamespace(members=members, joined={2}, lost=lost), SimpleNamespace(steps=9))
    audited = {step: rank for step in (9, 10) if (rank := this._context.audits.joined(step)) is not None}
    assert audited == ({10: 1} if lost else {9: 1})
