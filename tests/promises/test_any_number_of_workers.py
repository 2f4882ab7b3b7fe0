"""What a session computes is the same in one process and on many workers, of one machine and of several.

One script has all cases, and each number of workers runs it once.
"""

from __future__ import annotations

from typing import Any

import pytest

SCRIPT = """
import random
import hashlib
from functools import partial
import torch
from torch import nn
from torch.nn import functional
import paceline
from subjects import CASES, classes, images, mlp, tell, train

CONV = "batch norm, dropout, short batch"
sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
workers = int(os.environ["WORLD_SIZE"])
random_rows = torch.randn(50, 8, generator=torch.Generator().manual_seed(3))
pairs = torch.utils.data.TensorDataset(random_rows, random_rows.sum(1, keepdim=True))

def seeded(make, *given):
    torch.manual_seed(0)
    return make(*given)

def small(**more):
    return paceline.start(**{
        "model": seeded(nn.Linear, 8, 1), "optimizer": sgd, "loss": functional.mse_loss, "data": pairs, "batch": 16,
        "exact": True,
    } | more)

def steps(session, count=5):
    losses = [session.step(batch).loss for batch in session.batches(steps=count)]
    return {"fingerprint": session.fingerprint(), "losses": [loss.hex() for loss in losses]}

def convolutions(**more):
    return train(CASES[CONV]() | {"exact": True} | more, 6)

def hashed(tensors):
    return hashlib.sha256(b"".join(value.numpy().tobytes() for value in tensors)).hexdigest()

def averages():
    session = small(average={"kind": "ema", "decay": 0.9})
    found = steps(session)
    with session.averaged():
        weights = session.model_state()
        found["value"] = session.evaluate(pairs).hex()
    return found | {"averages": hashed(weights.values()), "of training": hashed(session.model_state().values())}

def phases():
    critic, generator = seeded(nn.Linear, 8, 1), nn.Linear(4, 8)
    def critic_loss(model, real):
        return critic(generator(torch.randn(len(real), 4))).mean() - critic(real).mean()
    def generator_loss(model, real):
        return -critic(generator(torch.randn(len(real), 4))).mean()
    session = paceline.start(
        model=nn.ModuleDict({"D": critic, "G": generator}), forward={"D": critic_loss, "G": generator_loss},
        optimizer=lambda model: {name: torch.optim.Adam(model[name].parameters(), lr=0.01) for name in "DG"},
        data=random_rows, batch=16, exact=True,
    )
    for batch in session.batches(steps=4):
        session.step(batch, optimizer="D")
        if batch.step % 2:
            session.step(batch, optimizer="G")
    return {"fingerprint": session.fingerprint()}

def closures():
    return steps(small(optimizer=partial(torch.optim.LBFGS, max_iter=3, line_search_fn="strong_wolfe")), 3)

class Noisy(torch.utils.data.Dataset):
    def __len__(self):
        return 50
    def __getitem__(self, index):
        return random_rows[index] + torch.randn(8) * random.random(), random_rows[index, :1]

class Shards(torch.utils.data.IterableDataset):
    def __iter__(self):
        parts = [range(0, 20), range(20, 35), range(35, 50)]
        random.shuffle(parts)
        for part in parts:
            for index in part:
                yield pairs[index]

def bucketed(seed, epoch):
    return random_rows[:, 0].argsort().reshape(-1, 10)[torch.randperm(5)].flatten()

class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(10, 8), nn.Linear(8, 10)
        self.recurrent = nn.RNN(8, 8, batch_first=True)

def go_on(model, microbatch, state):
    tokens, target = microbatch
    output, state = model.recurrent(model.embedding(tokens), state)
    return functional.cross_entropy(model.head(output).flatten(0, 1), target.flatten()), state

def recurrent():
    text = torch.randint(0, 10, (800,), generator=torch.Generator().manual_seed(1))
    session = small(
        model=seeded(Recurrent), loss=None, forward=go_on, data=paceline.TokenRows(text, rows=16, length=6)
    )
    return steps(session, 6) | {"value": session.evaluate(paceline.TokenRows(text, rows=16, length=6)).hex()}

def hits(output, target):
    right = output.argmax(1) == target
    second = target == 1
    named = {"accuracy": right.float().mean(), "second": (right[second].sum(), second.sum())}
    return functional.cross_entropy(output, target), named

def metrics():
    session = small(model=mlp(), loss=hits, data=classes(100))
    for batch in session.batches(steps=3):
        report = session.step(batch)
    values = {name: value.hex() for name, value in report.metrics.items()}
    return {"metrics": values, "norm": report.gradient_norm.hex()}

class Order:
    def reset(self):
        self.seen = []
    def update(self, output, target):
        self.seen += target.tolist()
    def compute(self):
        return self.seen

def evaluations():
    given = {"loss": functional.cross_entropy, "data": classes(100)}
    undisturbed = steps(small(model=mlp(), **given), 4)["fingerprint"]
    session, test_set = small(model=mlp(), **given), classes(43)
    def first(output, target):
        return output[:, 0].mean()
    def of_ones(output, target):
        return (output.argmax(1)[target == 1] == 1).sum(), (target == 1).sum()
    steps(session, 2)
    values = session.evaluate(test_set, {"loss": None, "first": first, "pair": of_ones})
    order = session.evaluate(test_set, Order())
    rows = session.predict(test_set)
    few = session.evaluate(classes(2))
    for _ in range(2):
        session.evaluate(test_set)
    return {
        "values": {name: value.hex() for name, value in values.items()}, "few": few.hex(),
        "order": order == [int(target) for _, target in test_set], "rows": [list(rows.shape), hashed([rows])],
        "after": steps(session, 2)["fingerprint"], "undisturbed": undisturbed,
    }

def draws():
    session = small(data=Noisy())
    drawn = []
    for batch in session.batches(steps=3):
        drawn.append(torch.rand(()).item().hex())
        session.step(batch)
    return {"drawn": drawn}

def samples():
    data = torch.utils.data.TensorDataset(torch.arange(50), torch.zeros(50, 1))
    session = small(data=data, loss=lambda output, target: output.mean(), model=seeded(nn.Embedding, 50, 1))
    own, sizes = [], []
    for batch in session.batches(epochs=2):
        own.append([int(sample) for group in batch.groups for sample in group.data[0]])
        sizes.append([batch.step, batch.epoch, batch.samples, batch.last])
        report = session.step(batch)
    return {"own": own, "sizes": sizes, "seen": report.samples, "steps": session.steps_per_epoch}

def dropped():
    session = small(drop_last=True)
    return steps(session, 7) | {"steps": session.steps_per_epoch}

def server():
    return convolutions(strategy="parameter-server", server={"count": min(2, workers)}) if workers > 1 else None

cases = {
    "allreduce": convolutions, "server": server, "averages": averages, "phases": phases, "closures": closures,
    "clipping": lambda: train(CASES["transformer, tied weights, clipping, schedule"]() | {"exact": True}, 5),
    "stealing": lambda: convolutions(strategy="stealing"), "auto": lambda: convolutions(strategy="auto"),
    "backup": lambda: convolutions(strategy="backup", backup={"workers": 0}),
    "fixed": lambda: convolutions(exact="fixed-point"),
    "back end": lambda: convolutions(exact="fixed-point", reduction="collective"),
    "noise": lambda: steps(small(data=Noisy())), "stream": lambda: steps(small(data=Shards())),
    "sampler": lambda: steps(small(sampler=bucketed)), "recurrent": recurrent, "metrics": metrics,
    "evaluations": evaluations, "draws": draws, "samples": samples,
    "dropped": dropped,
}
for name, case in cases.items():
    if name in os.environ.get("ONLY", name).split(","):
        tell(**{name: case()})
"""
SCRIPT = "import os\n" + SCRIPT
WAYS = {
    "3 workers": (3, "", {}),
    "2 workers over the network": (2, "allreduce,server,stealing,fixed,stream,evaluations", {"one_machine": False}),
    "4 workers of 2 machines": (4, "allreduce,clipping,fixed,back end,averages,recurrent", {"machines": (3, 1)}),
}
"""For each number of workers: the cases, which are all unless named, and where the workers are."""


@pytest.fixture(scope="module")
def alone(reported: Any) -> dict[str, Any]:
    """What one process finds in each case."""
    (found,) = reported(SCRIPT, 1, environment={"WORLD_SIZE": "1"})
    return found


@pytest.fixture(scope="module")
def everyone(reported: Any) -> dict[str, list[dict[str, Any]]]:
    """What each worker finds in each case, for each number of workers."""
    return {
        way: reported(SCRIPT, workers, environment={"ONLY": only} if only else {}, **options)
        for way, (workers, only, options) in WAYS.items()
    }


def found_in(everyone: dict[str, list[dict[str, Any]]], case: str) -> list[list[dict[str, Any]]]:
    """Return what each worker found in a case, for each number of workers with this case."""
    found = [[one[case] for one in way] for way in everyone.values() if case in way[0]]
    assert found
    return found


def check(everyone: dict[str, list[dict[str, Any]]], alone: dict[str, Any], case: str, like: str = "") -> None:
    wanted = {name: value for name, value in alone[like or case].items() if name != "shared"}
    for way in found_in(everyone, case):
        for one in way:
            assert {name: value for name, value in one.items() if name != "shared"} == wanted


@pytest.mark.promise(
    "README.md",
    "parameters, buffers and optimizer state have the same bits on 1, 2, 3, ... workers.",
    "The script is the same for one worker and for many, and so is the result.",
)
def test_the_bits_of_training(everyone: Any, alone: Any) -> None:
    check(everyone, alone, "allreduce")
    assert alone["allreduce"]["steps"] == 6


@pytest.mark.promise(
    "docs/exact.md", "This prints the same 64 digits with `python train.py` and with `paceline run -n N train.py`"
)
def test_a_fingerprint_has_64_digits(everyone: Any, alone: Any) -> None:
    found = {one["fingerprint"] for way in found_in(everyone, "clipping") for one in way}
    assert found == {alone["clipping"]["fingerprint"]}
    assert len(bytes.fromhex(found.pop())) == 32


@pytest.mark.promise("docs/exact.md", "one binary tree over the microbatches, whichever workers computed them")
def test_the_machines_share_memory_where_they_can(everyone: Any) -> None:
    """Gradients cross shared memory, the network, or both; the bits are those of the test before."""
    assert {way: one[0]["allreduce"]["shared"] for way, one in everyone.items()} == {
        "3 workers": True,
        "2 workers over the network": False,
        "4 workers of 2 machines": False,
    }


@pytest.mark.promise("docs/train.md", "`report.loss` is the mean over the whole batch, the same on every worker.")
def test_losses(everyone: Any, alone: Any) -> None:
    check(everyone, alone, "clipping")


@pytest.mark.promise(
    "docs/exact.md", "any all-reduce gives the same bits: shared memory, the network, machines with several workers"
)
def test_the_bits_of_fixed_point(everyone: Any, alone: Any) -> None:
    check(everyone, alone, "fixed")
    check(everyone, alone, "back end", like="fixed")


@pytest.mark.promise("docs/exact.md", "Fixed point gives different bits from the tree of `exact=True`.")
def test_fixed_point_has_other_bits(alone: Any) -> None:
    assert alone["fixed"]["fingerprint"] != alone["allreduce"]["fingerprint"]


@pytest.mark.promise("docs/slow-workers.md", "It loses no sample, uses no old weights, gives the [same bits](exact.md)")
def test_the_bits_of_stealing(everyone: Any, alone: Any) -> None:
    check(everyone, alone, "stealing", like="allreduce")
    check(everyone, alone, "auto", like="allreduce")


@pytest.mark.promise("docs/backup.md", "0 is `allreduce`, bit for bit with `exact`")
def test_the_bits_without_backup_workers(everyone: Any, alone: Any) -> None:
    check(everyone, alone, "backup", like="allreduce")


@pytest.mark.promise(
    "docs/asynchronous.md",
    "Mode `sync` with `exact=True` gives the bits of all-reduce and of one process, with any number of servers",
)
def test_the_bits_of_two_servers(everyone: Any, alone: Any) -> None:
    check(everyone, alone, "server", like="allreduce")


@pytest.mark.promise("docs/averages.md", "With `exact` the averages have the same bits on any number of workers")
def test_the_bits_of_averages(everyone: Any, alone: Any) -> None:
    check(everyone, alone, "averages")
    assert alone["averages"]["averages"] != alone["averages"]["of training"]


@pytest.mark.promise("docs/several-losses.md", "A GAN has a loss for each optimizer, and updates one after the other")
def test_the_bits_of_losses_that_take_turns(everyone: Any, alone: Any) -> None:
    check(everyone, alone, "phases")


@pytest.mark.promise(
    "docs/several-losses.md",
    "In each pass every worker has the microbatches that it had, with the same random numbers",
)
def test_the_bits_of_several_passes(everyone: Any, alone: Any) -> None:
    check(everyone, alone, "closures")


@pytest.mark.promise(
    "docs/augmentation.md",
    "So a sample gets the same noise on any worker, in any loader process, and after a resume; and other noise in the "
    "next epoch.",
)
def test_augmentation(everyone: Any, alone: Any) -> None:
    check(everyone, alone, "noise")


@pytest.mark.promise("docs/streams.md", "So the n-th sample of an epoch is the same on any number of workers")
def test_streams(everyone: Any, alone: Any) -> None:
    check(everyone, alone, "stream")


@pytest.mark.promise("docs/data.md", "what it draws from them is the same on all.", "`sampler=` is a function")
def test_an_order_of_ones_own(everyone: Any, alone: Any) -> None:
    check(everyone, alone, "sampler")


@pytest.mark.promise(
    "docs/streams.md",
    "The state belongs to a microbatch, so to the same rows in each step.",
    "with the state carried on as well",
)
def test_a_state_from_batch_to_batch(everyone: Any, alone: Any) -> None:
    check(everyone, alone, "recurrent")


@pytest.mark.promise(
    "docs/losses.md",
    "the means over the whole batch, the same on every worker, and with `exact` the same bits on any number of "
    "workers.",
)
def test_metrics_beside_the_loss(everyone: Any, alone: Any) -> None:
    check(everyone, alone, "metrics")
    assert list(alone["metrics"]["metrics"]) == ["accuracy", "second"]


@pytest.mark.promise(
    "docs/evaluate.md", "So the same model has the same value, to the last bit, on any number of workers"
)
def test_evaluations(everyone: Any, alone: Any) -> None:
    """Also where there are fewer samples than workers."""
    check(everyone, alone, "evaluations")


@pytest.mark.promise(
    "docs/evaluate.md",
    "Every worker updates its object with the values of all chunks, in their order, so all workers compute the same",
)
def test_metrics_that_are_no_means(everyone: Any) -> None:
    assert all(one["order"] for way in found_in(everyone, "evaluations") for one in way)


@pytest.mark.promise(
    "docs/evaluate.md", "`predict` gathers the outputs for all samples, in their order, in host memory"
)
def test_predictions(everyone: Any, alone: Any) -> None:
    assert alone["evaluations"]["rows"][0] == [43, 4]
    rows = [one["rows"] for way in found_in(everyone, "evaluations") for one in way]
    assert all(one == alone["evaluations"]["rows"] for one in rows)


@pytest.mark.promise(
    "docs/evaluate.md",
    "Training is not disturbed: the loop and the next step draw the same random numbers as without the evaluation.",
)
def test_an_evaluation_does_not_disturb_training(everyone: Any) -> None:
    for way in found_in(everyone, "evaluations"):
        assert all(one["after"] == one["undisturbed"] for one in way)


@pytest.mark.promise("docs/exact.md", "random numbers drawn in your loop", "keyed by (seed, step)")
def test_random_numbers_in_the_loop(everyone: Any, alone: Any) -> None:
    check(everyone, alone, "draws")
    assert len(set(alone["draws"]["drawn"])) == 3


@pytest.mark.promise("docs/data.md", "An epoch visits each sample once.")
def test_each_sample_once(everyone: Any, alone: Any) -> None:
    for way in [*found_in(everyone, "samples"), [alone["samples"]]]:
        for epoch in (0, 1):
            steps = range(4 * epoch, 4 * epoch + 4)
            assert sorted(sample for one in way for step in steps for sample in one["own"][step]) == list(range(50))


@pytest.mark.promise("docs/data.md", "The number of workers plays no part.")
def test_the_samples_of_each_step(everyone: Any, alone: Any) -> None:
    wanted = [sorted(step) for step in alone["samples"]["own"]]
    for way in found_in(everyone, "samples"):
        assert [sorted(sample for one in way for sample in one["own"][step]) for step in range(8)] == wanted
    assert wanted[:4] != wanted[4:]


@pytest.mark.promise("docs/data.md", "If the length is not a multiple of the batch, the last batch is short.")
def test_the_last_batch_is_short(everyone: Any, alone: Any) -> None:
    sizes = [[step, step // 4, 2 if step % 4 == 3 else 16, step % 4 == 3] for step in range(8)]
    for one in [alone["samples"], *(one for way in found_in(everyone, "samples") for one in way)]:
        assert one["sizes"] == sizes
        assert (one["seen"], one["steps"]) == (100, 4)


@pytest.mark.promise("docs/data.md", "`drop_last=True` leaves it out.")
def test_the_last_batch_is_left_out(everyone: Any, alone: Any) -> None:
    check(everyone, alone, "dropped")
    assert alone["dropped"]["steps"] == 3
