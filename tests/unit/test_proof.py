"""The proof of a schedule finds whatever is wrong with it."""

from collections.abc import Iterator

import pytest
from async_schedules import pipedream, pipedream_2bw
from schedule_proof import Peaks, prove

from paceline.errors import InputError
from paceline.schedule.pipeline.interleaved import interleaved
from paceline.schedule.pipeline.operations import Kind, Operation, Schedule
from paceline.schedule.pipeline.synchronous import gpipe, layerwise, one_forward_one_backward
from paceline.schedule.pipeline.zero_bubble import zero_bubble_h1, zero_bubble_v

RIGHT = [
    layerwise(3, 2),
    gpipe(3, 4),
    gpipe(2, 4, 2),
    one_forward_one_backward(3, 5),
    one_forward_one_backward(2, 6, (2, 1)),
    interleaved(2, 3, 2),
    interleaved(2, 4, 2, replicas=2),
    zero_bubble_h1(3, 4),
    zero_bubble_v(2, 4),
    zero_bubble_v(2, 4, replicas=2),
    pipedream(3, 5),
    pipedream(2, 6, vertical_sync=True),
    pipedream(2, 7, 2, replicas=(2, 1)),
    pipedream_2bw(2, 6, 2),
]
NAMES = [f"{schedule.name}-{len(schedule.workers)}" for schedule in RIGHT]


def changed(schedule: Schedule, worker: int, operations: list[Operation]) -> Schedule:
    workers = [*schedule.workers]
    workers[worker] = tuple(operations)
    return Schedule(schedule.name, schedule.stages, schedule.microbatches, tuple(workers))


def places(schedule: Schedule) -> Iterator[tuple[int, int, Operation, list[Operation]]]:
    for worker, operations in enumerate(schedule.workers):
        for index, operation in enumerate(operations):
            yield worker, index, operation, [*operations]


def found(schedule: Schedule, what: str = "schedule") -> None:
    with pytest.raises(InputError, match=what):
        prove(schedule)


@pytest.mark.parametrize("schedule", RIGHT, ids=NAMES)
def test_a_missing_operation_is_found(schedule: Schedule) -> None:
    for worker, index, _, operations in places(schedule):
        del operations[index]
        found(changed(schedule, worker, operations))


@pytest.mark.parametrize("schedule", RIGHT, ids=NAMES)
def test_an_operation_done_twice_is_found(schedule: Schedule) -> None:
    for worker, index, operation, operations in places(schedule):
        for at in (index, len(operations)):
            found(changed(schedule, worker, [*operations[:at], operation, *operations[at:]]))


def needs(later: Operation, earlier: Operation) -> bool:
    """Whether an operation of a worker cannot come before another one that stands right before it."""
    if Kind.REDUCE in (later.kind, earlier.kind) or Kind.UPDATE in (later.kind, earlier.kind):
        if later.stage != earlier.stage or Kind.SEND in (later.kind, earlier.kind):
            return False
        return later.kind != Kind.RECEIVE and not (later.kind == Kind.FORWARD and later.version < earlier.version)
    if later.microbatch != earlier.microbatch:
        return later.kind == earlier.kind == Kind.SEND and later[1::3] == earlier[1::3]
    if later.stage != earlier.stage:
        return {later.kind, earlier.kind} <= {Kind.FORWARD, Kind.INPUT}
    if earlier.kind == Kind.RECEIVE:
        return (later.kind == Kind.FORWARD) == (earlier.peer < earlier.stage)
    return later.kind != Kind.RECEIVE and (earlier.kind, later.kind) not in [
        (Kind.WEIGHT, Kind.SEND),
        (Kind.SEND, Kind.WEIGHT),
    ]


@pytest.mark.parametrize("schedule", RIGHT[:-1], ids=NAMES[:-1])  # the last one may update one microbatch earlier
def test_neighbours_in_the_wrong_order_are_found(schedule: Schedule) -> None:
    swapped = 0
    for worker, index, operation, operations in places(schedule):
        if index and needs(operation, operations[index - 1]):
            operations[index - 1 : index + 1] = operation, operations[index - 1]
            found(changed(schedule, worker, operations))
            swapped += 1
    assert swapped >= len(schedule.workers) * schedule.microbatches / 2


@pytest.mark.parametrize("schedule", RIGHT, ids=NAMES)
def test_the_wrong_version_is_found(schedule: Schedule) -> None:
    for worker, index, operation, operations in places(schedule):
        if operation.kind in (Kind.SEND, Kind.RECEIVE, Kind.REDUCE):
            continue
        later = schedule.microbatches + 1 if operation.kind == Kind.FORWARD else operation.version + 1
        for version in (later, operation.version - 1):
            if operation.kind == Kind.FORWARD and version >= 0 and version != later:
                continue  # an older one that exists: then its backward pass names another one, as below
            operations[index] = operation._replace(version=version)
            found(changed(schedule, worker, operations), "version")


@pytest.mark.parametrize("schedule", RIGHT, ids=NAMES)
def test_an_operation_on_another_worker_is_found(schedule: Schedule) -> None:
    last = len(schedule.workers) - 1
    for worker, index, operation, operations in places(schedule):
        other = last - worker if worker != last - worker else 0
        if operation.kind in (Kind.REDUCE, Kind.UPDATE) or other == worker:
            continue
        moved = changed(schedule, worker, operations[:index] + operations[index + 1 :])
        found(changed(moved, other, [*schedule.workers[other], operation]))


def two(first: str, second: str) -> Schedule:
    """Two stages, two microbatches."""
    return written(2, 2, first, second)


def written(stages: int, microbatches: int, *workers: str) -> Schedule:
    """A schedule in the words of a drawing, of workers that hold the stage of their number: ``F0 s0> r0< B0 U:1``."""
    made = []
    for stage, line in enumerate(workers):
        operations = []
        for word in line.split():
            kind = Kind(word[0])
            if kind in (Kind.REDUCE, Kind.UPDATE):
                operations.append(Operation(kind, stage, version=int(word[2:] or 0)))
                continue
            up = word[-1] == ("<" if kind == Kind.RECEIVE else ">")
            peer = (stage + 1 if up else stage - 1) if kind in (Kind.SEND, Kind.RECEIVE) else -1
            operations.append(Operation(kind, stage, int(word[1]), peer=peer))
        made.append(tuple(operations))
    return Schedule("written", stages, microbatches, tuple(made))


FIRST = "F0 s0> F1 s1> r0< B0 r1< B1 U:1"
SECOND = "r0> F0 B0 s0< r1> F1 B1 s1< U:1"


def test_a_schedule_that_a_person_wrote() -> None:
    assert prove(two(FIRST, SECOND)) == Peaks(activations=(2, 1), versions=(1, 1))
    assert prove(two(FIRST, "r0> F0 r1> F1 I0 s0< I1 s1< W1 W0 U:1")) == Peaks(activations=(2, 2), versions=(1, 1))


@pytest.mark.parametrize(
    "first, second, said",
    [
        (FIRST, "F0 r0> B0 s0< r1> F1 B1 s1< U:1", r"worker 1, operation 0 \(forward of stage 1 for microbatch 0\)"),
        (FIRST, "F0 r0> B0 s0< r1> F1 B1 s1< U:1", "from stage 0 is missing: it must be received from worker 0"),
        (FIRST, "r1> F1 B1 s1< r0> F0 B0 s0< U:1", "worker 0 sends microbatch 0 of stage 0 for stage 1 first"),
        ("F0 s0> r0< B0 F1 s1> r1< B1 U:1", "r0> F0 r1> F1 B0 s0< B1 s1< U:1", "a deadlock.*worker 0.*worker 1"),
        ("F0 s0> F1 s1> B0 r0< r1< B1 U:1", SECOND, r"operation 4 \(backward of stage 0 for microbatch 0\)"),
        ("B0 F0 s0> F1 s1> r0< r1< B1 U:1", SECOND, "its forward pass on this worker must come before"),
        (FIRST, "r0> F0 W0 I0 s0< r1> F1 B1 s1< U:1", "its input pass on this worker must come before"),
        ("s0> F0 F1 s1> r0< B0 r1< B1 U:1", SECOND, "there is nothing to send"),
        ("F0 s0> s0> F1 s1> r0< B0 r1< B1 U:1", SECOND, "there is nothing to send"),
        ("F0 s0> F1 s1> r0< B0 r1< B1", SECOND, "worker 0 never updates stage 0 with its last 2 gradients"),
        ("F0 s0> F1 s1> r0< B0 r1< U:1", SECOND, "never finishes the backward pass of stage 0 for microbatch 1"),
        ("F0 s0> F1 s1> r0< B0 r1< B1 U:2", SECOND, "it must make version 1"),
        ("F0 s0> F1 s1> r0< B0 r1< B1 U:1 U:2", SECOND, "there is no gradient since the last one"),
        ("F0 s0> F1 s1> r0< B0 r1< B1 +: U:1", SECOND, "no other worker holds this stage"),
        ("F0 s0> F1 s1> r0< B0 r1< B1 r2< U:1", SECOND, "no such stage or microbatch 2"),
        ("F0 F0 s0> F1 s1> r0< B0 r1< B1 U:1", SECOND, "this worker has done it already"),
        ("F0 s0> r0< B0 U:1", SECOND, "no worker performs the forward pass of stage 0 for microbatch 1"),
        ("r0> F0 s0> F1 s1> r0< B0 r1< B1 U:1", SECOND, "nothing is sent to this stage"),
    ],
)
def test_what_is_wrong_is_said(first: str, second: str, said: str) -> None:
    found(two(first, second), said)


def alike(*workers: str) -> Schedule:
    """One stage, four microbatches, workers that share them."""
    lists = [written(1, 4, line).workers[0] for line in workers]
    return Schedule("alike", 1, 4, tuple(lists))


def test_replicas_make_the_same_updates() -> None:
    prove(alike("F0 B0 F1 B1 + U:1", "F2 B2 F3 B3 + U:1"))
    found(alike("F0 B0 + U:1 F1 I1", "F2 B2 + U:1 F3 B3 + U:2"), "deadlock.*worker 1, operation 6")
    one, other = alike("F0 B0 + U:1 F1 I1 W1 + U:2", "F2 B2 + F3 B3 + U:1").workers
    operations = [each._replace(version=1) if each.microbatch == 1 else each for each in one]
    found(Schedule("alike", 1, 4, (tuple(operations), other)), "have not made the same updates")


def test_replicas_reduce_what_is_new() -> None:
    found(alike("F0 B0 F1 B1 + + U:1", "F2 B2 F3 B3 + + U:1"), "there is no gradient since the last one")
    found(alike("F0 B0 + F1 B1 U:1", "F2 B2 + F3 B3 U:1"), "a reduce must come first")


def test_replicas_reduce_in_the_same_order_and_before_they_update() -> None:
    right = interleaved(2, 4, 2, replicas=2)
    first = [*right.workers[0]]
    reduces = [index for index, one in enumerate(first) if one.kind == Kind.REDUCE]
    swapped = [*first]
    swapped[reduces[0]], swapped[reduces[1]] = first[reduces[1]], first[reduces[0]]
    found(changed(right, 0, swapped), "deadlock.*reduce of stage 2.*reduce of stage 0")

    without = right
    for worker, operations in enumerate(right.workers):
        without = changed(without, worker, [one for one in operations if one.kind != Kind.REDUCE])
    found(without, "other workers hold this stage: a reduce must come first")


def test_the_older_version_of_a_forward_pass_must_be_that_of_its_backward_pass() -> None:
    right = pipedream(2, 4)
    operations = [*right.workers[1]]
    index = next(at for at, one in enumerate(operations) if one.kind == Kind.FORWARD and one.version == 2)
    operations[index] = operations[index]._replace(version=1)
    found(changed(right, 1, operations), "it names version 2, but its forward pass used 1")
