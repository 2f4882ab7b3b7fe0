"""What cannot be right is refused on all workers, with what is wrong; two workers make all these mistakes in turn."""

from __future__ import annotations

from typing import Any

import pytest

SCRIPT = """
import math, os
from functools import partial
import torch
from torch import nn
from torch.nn import functional
import paceline
from subjects import gated, classes, mlp, tell

RANK = int(os.environ["RANK"])
SGD = partial(torch.optim.SGD, lr=0.1)
rows = torch.randn(64, 4, generator=torch.Generator().manual_seed(2))
pairs = torch.utils.data.TensorDataset(rows, rows.sum(1, keepdim=True))

def linear(seed=0):
    torch.manual_seed(seed)
    return nn.Linear(4, 1)

def start(**more):
    usual = {"model": linear(), "optimizer": SGD, "loss": functional.mse_loss, "data": pairs, "batch": 16}
    return paceline.start(**{**usual, "timeout_seconds": 120, **more})

def train(between=lambda session, batch: None, steps=3, **more):
    session = start(**more)
    for batch in session.batches(steps=steps):
        between(session, batch)
        report = session.step(batch)
    return session, report

attempts = {}

def attempt(act):
    attempts[act.__name__] = act
    return act

@attempt
def other_weights():
    start(model=linear(RANK))

@attempt
def other_data():
    start(data=torch.utils.data.TensorDataset(rows[: 64 - RANK], rows[: 64 - RANK, :1]))

@attempt
def shuffled_data():
    start(data=torch.utils.data.TensorDataset(rows.flip(0) if RANK else rows, rows.sum(1, keepdim=True)))

@attempt
def other_settings():
    start(seed=RANK)

@attempt
def other_optimizer():
    start(optimizer=partial(torch.optim.SGD, lr=0.1 + RANK))

@attempt
def no_such_setting():
    start(batchsize=8)

@attempt
def wrong_value():
    start(batch="abc")

@attempt
def a_loader():
    start(data=torch.utils.data.DataLoader(pairs, batch_size=16))

@attempt
def no_data():
    start(data=torch.utils.data.TensorDataset(rows[:0], rows[:0, :1]))

@attempt
def a_generator():
    start(data=(pair for pair in pairs))

@attempt
def shares():
    start(sampler=torch.utils.data.DistributedSampler(pairs, num_replicas=2, rank=RANK))

@attempt
def too_few_microbatches():
    start(microbatches=1)

@attempt
def scaled_rate():
    start(scale_lr="linear")

@attempt
def plateau():
    start(schedule=torch.optim.lr_scheduler.ReduceLROnPlateau)

@attempt
def an_optimizer():
    start(optimizer=torch.optim.SGD(linear().parameters(), lr=0.1))

@attempt
def a_loss_of_each_sample():
    train(loss=partial(functional.mse_loss, reduction="none"))

@attempt
def a_sum():
    train(loss=partial(functional.mse_loss, reduction="sum"))

@attempt
def sparse():
    torch.manual_seed(0)
    picked = lambda model, microbatch: model(microbatch[0]).mean()
    data = torch.utils.data.TensorDataset(torch.arange(64))
    train(model=nn.Embedding(64, 2, sparse=True), loss=None, forward=picked, data=data, strategy="stealing")

@attempt
def max_norm():
    torch.manual_seed(0)
    picked = lambda model, microbatch: model(microbatch[0]).mean()
    data = torch.utils.data.TensorDataset(torch.arange(64))
    train(model=nn.Embedding(64, 2, max_norm=0.5), loss=None, forward=picked, data=data)

class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.noise = linear(), torch.Generator()
    def forward(self, values):
        return self.layer(values + torch.rand(4, generator=self.noise))

@attempt
def a_generator_in_the_model():
    train(model=Own(), exact=True)

@attempt
def a_generator_without_exact():
    return train(model=Own())[1].notes

for name, more in {
    "hogwild": {"strategy": "hogwild"}, "backup": {"strategy": "backup"},
    "server": {"strategy": "parameter-server", "server": {"mode": "async"}},
}.items():
    attempts["exact " + name] = partial(start, exact=True, **more)

def not_finite(output, target):
    return functional.mse_loss(output, target) * (math.nan if at[0] == 2 else 1.0)
at = [0]

def follow(session, batch):
    at[0] = batch.step

@attempt
def a_loss_that_is_nan():
    train(follow, loss=not_finite)

@attempt
def a_step_that_is_skipped():
    session = start(loss=not_finite, nonfinite="skip")
    applied, prints = [], []
    for batch in session.batches(steps=4):
        follow(session, batch)
        applied.append(session.step(batch).applied)
        prints.append(session.fingerprint())
    return [applied, prints[1] == prints[2], len(set(prints))]

@attempt
def a_parameter_that_is_used_sometimes():
    train(model=gated(), data=classes(64), loss=functional.cross_entropy)

@attempt
def a_parameter_that_may_be_used_sometimes():
    return train(model=gated(), data=classes(64), loss=functional.cross_entropy, missing_gradient="zero")[1].applied

def other_rate(session, batch):
    if batch.step == 1 and RANK == 1:
        session.optimizer.param_groups[0]["lr"] = 0.5

@attempt
def a_rate_of_one_worker():
    train(other_rate)

def other_mode(session, batch):
    if batch.step == 1 and RANK == 1:
        session._context.compute.model.eval()

@attempt
def a_mode_of_one_worker():
    train(other_mode)

def other_value(session, batch):
    if batch.step == 1 and RANK == 1:
        with torch.no_grad():
            session._context.compute.model.bias += 1

@attempt
def weights_that_differ():
    session, _ = train(other_value, exact=True, model=linear())
    session.evaluate(pairs)

@attempt
def a_step_of_ones_own():
    def step(session, batch):
        if batch.step == 1:
            session.optimizer.step()
    train(step)

@attempt
def a_layer_that_is_replaced():
    model = mlp(4, 1)
    def replace(session, batch):
        if batch.step == 1:
            model[2] = nn.Linear(16, 1)
    train(replace, model=model)

@attempt
def once():
    session, calls = start(), []
    def prepare(value):
        calls.append(value)
        return {"classes": value}
    return [session.once(prepare, 3), len(calls), session.rank]

@attempt
def once_fails():
    def fail():
        raise LookupError("no such file")
    start().once(fail)

@attempt
def a_metric_fails():
    def metric(output, target):
        if RANK == 1:
            raise LookupError("no such class")
        return output.mean()
    start().evaluate(pairs, metric)

@attempt
def rates():
    session = start(batch_per_worker=8, batch=None, scale_lr="linear", warmup_steps=2)
    reports = [session.step(batch) for batch in session.batches(steps=4)]
    return [[report.learning_rate for report in reports], reports[0].notes]

for name, act in attempts.items():
    try:
        tell(**{name: ["done", act()]})
    except (paceline.PacelineError, LookupError) as error:
        tell(**{name: [type(error).__name__, str(error)]})
"""


@pytest.fixture(scope="module")
def found(reported: Any) -> list[dict[str, Any]]:
    """What each of two workers was told of each attempt."""
    return reported(SCRIPT, 2)


def check(found: list[dict[str, Any]], attempt: str, kind: str, *words: str) -> None:
    for one in found:
        assert one[attempt][0] == kind, one[attempt]
        assert all(word in one[attempt][1] for word in words), one[attempt]


@pytest.mark.promise(
    "docs/launch.md",
    "`start` compares once, before the first step",
    "The workers do not agree on initial value of 0.weight: rank 0: ",
)
def test_other_weights_on_a_worker(found: Any) -> None:
    check(found, "other_weights", "DisagreementError", "initial value of weight: rank 0: ", "rank 1: ", "manual_seed")


@pytest.mark.promise("docs/errors.md", "`The workers do not agree on data length: rank 0: 1000, rank 1: 900.")
def test_data_of_another_length_on_a_worker(found: Any) -> None:
    check(found, "other_data", "DisagreementError", "do not agree on data length: rank 0: 64, rank 1: 63")


@pytest.mark.promise(
    "docs/launch.md", "So data that a script has divided by rank, or shuffled without a seed, are noticed."
)
def test_data_in_another_order_on_a_worker(found: Any) -> None:
    check(found, "shuffled_data", "DisagreementError", "rank 0: ", "rank 1: ")


@pytest.mark.promise(
    "docs/train.md", "compares their code, versions, settings and weights. If something differs, it stops"
)
def test_other_settings_on_a_worker(found: Any) -> None:
    check(found, "other_settings", "DisagreementError", "setting seed: rank 0: 0, rank 1: 1")


@pytest.mark.promise(
    "docs/launch.md", "the optimizer and its values, and the initial value of each parameter and buffer."
)
def test_another_optimizer_on_a_worker(found: Any) -> None:
    check(found, "other_optimizer", "DisagreementError", "rank 0: ", "rank 1: ", "1.1")


@pytest.mark.promise("docs/errors.md", "there is no setting 'batchsize'. Did you mean 'batch'? ...")
def test_a_setting_that_is_misspelt(found: Any) -> None:
    check(found, "no_such_setting", "ConfigError", "there is no setting 'batchsize'. Did you mean 'batch'?")


@pytest.mark.promise("docs/errors.md", "Each message says what is wrong, with which values, and what to do.")
def test_a_value_that_cannot_be_used(found: Any) -> None:
    check(found, "wrong_value", "ConfigError", "batch = 'abc'", "It is: samples per step over all workers.")


@pytest.mark.promise(
    "docs/data.md", "A `DataLoader` is refused, with what to give instead: its data set, batch and `collate`."
)
def test_a_loader_as_data(found: Any) -> None:
    check(found, "a_loader", "InputError", "data=loader.dataset", "batch=16")


@pytest.mark.promise("docs/errors.md", "paceline: rank 1: InputError: The data set is empty.")
def test_data_without_samples(found: Any) -> None:
    check(found, "no_data", "InputError", "The data set is empty.")


@pytest.mark.promise("docs/streams.md", "A generator object is refused, as it gives its samples only once.")
def test_a_generator_as_data(found: Any) -> None:
    check(found, "a_generator", "InputError", "generator")


@pytest.mark.promise("docs/data.md", "`DistributedSampler` is refused, as Paceline hands out the shares")
def test_a_sampler_of_shares(found: Any) -> None:
    check(found, "shares", "InputError", "DistributedSampler")


@pytest.mark.promise("docs/batch-size.md", "**More workers than microbatches** is refused.")
def test_more_workers_than_microbatches(found: Any) -> None:
    check(found, "too_few_microbatches", "ConfigError", "microbatches")


@pytest.mark.promise(
    "docs/batch-size.md",
    "`scale_lr` without `batch_per_worker` is refused: a batch that stays the same needs no other rate.",
)
def test_a_scaled_rate_of_a_batch_that_stays(found: Any) -> None:
    check(found, "scaled_rate", "ConfigError", "scale_lr", "batch_per_worker")


@pytest.mark.promise("docs/train.md", "one whose `step` needs a metric, such as `ReduceLROnPlateau`, is refused")
def test_a_schedule_that_needs_a_metric(found: Any) -> None:
    check(found, "plateau", "InputError", "ReduceLROnPlateau")


@pytest.mark.promise("docs/optimizers.md", "`optimizer` is a factory: Paceline calls it.")
def test_an_optimizer_that_is_no_factory(found: Any) -> None:
    check(found, "an_optimizer", "InputError", "optimizer must be a factory")


@pytest.mark.promise("docs/errors.md", "`The loss must be a scalar tensor (the mean over the samples it is given)")
def test_a_loss_of_each_sample(found: Any) -> None:
    check(found, "a_loss_of_each_sample", "InputError", "The loss must be a scalar tensor", "for example with .mean()")


@pytest.mark.promise("docs/losses.md", 'It refuses a scalar that grows with the samples (`reduction="sum"`)')
def test_a_loss_that_is_a_sum(found: Any) -> None:
    check(found, "a_sum", "InputError", "mean")


@pytest.mark.promise(
    "docs/train.md", "The other strategies refuse them where there are several workers, or more may come"
)
def test_sparse_gradients(found: Any) -> None:
    check(found, "sparse", "InputError", "sparse")


@pytest.mark.promise(
    "docs/exact.md",
    "A forward pass that changes weights, as an embedding with `max_norm` does, is refused where there are several "
    "workers",
)
def test_a_forward_pass_that_changes_weights(found: Any) -> None:
    check(found, "max_norm", "InputError", "weight")


@pytest.mark.promise(
    "docs/audits.md", "With `exact` such a model or data set is refused, and the message names the attribute."
)
def test_a_generator_of_the_model(found: Any) -> None:
    check(found, "a_generator_in_the_model", "InputError", "noise")


@pytest.mark.promise("docs/audits.md", "Without, there is one warning, in `report.notes` too")
def test_a_generator_of_the_model_without_exact(found: Any) -> None:
    check(found, "a_generator_without_exact", "done")
    assert all(any("noise" in note for note in one["a_generator_without_exact"][1]) for one in found)


@pytest.mark.promise("docs/asynchronous.md", "**No exact bits**, but in mode `sync`: `exact=True` is refused.")
@pytest.mark.promise("docs/backup.md", "`exact=True` is refused, but for `backup.workers=0`.")
def test_bits_that_cannot_be_promised(found: Any) -> None:
    for name in ("hogwild", "server", "backup"):
        check(found, f"exact {name}", "ConfigError", "exact")


@pytest.mark.promise(
    "docs/losses.md", "`step` raises `NonFiniteLoss` before the update, with the step, the microbatch and the rank."
)
def test_a_loss_that_is_nan(found: Any) -> None:
    check(found, "a_loss_that_is_nan", "NonFiniteLoss", "The loss is nan at step 2, microbatch", "rank", "No update")


@pytest.mark.promise(
    "docs/losses.md",
    'With `nonfinite="skip"` the step makes no update, `report.applied` is false, and training goes on.',
)
def test_a_step_that_is_skipped(found: Any) -> None:
    assert [one["a_step_that_is_skipped"] for one in found] == [["done", [[True, True, False, True], True, 3]]] * 2


@pytest.mark.promise("docs/losses.md", "`step` raises `InputError` and names the parameter and the microbatches.")
def test_a_parameter_that_some_microbatches_use(found: Any) -> None:
    check(found, "a_parameter_that_is_used_sometimes", "InputError", "second.", "microbatch")


@pytest.mark.promise("docs/losses.md", '`missing_gradient="zero"`: such microbatches count as zero.')
def test_a_parameter_that_some_microbatches_may_use(found: Any) -> None:
    assert [one["a_parameter_that_may_be_used_sometimes"] for one in found] == [["done", True]] * 2


@pytest.mark.promise(
    "docs/optimizers.md", "they are compared in each step, and an error names the group and the value on each rank."
)
def test_a_rate_that_one_worker_changed(found: Any) -> None:
    check(found, "a_rate_of_one_worker", "DisagreementError", "lr", "0.1", "0.5")


@pytest.mark.promise("docs/train.md", "A worker in another mode is named.")
def test_a_mode_that_one_worker_changed(found: Any) -> None:
    check(found, "a_mode_of_one_worker", "DisagreementError", "in evaluation mode on rank 1, and not on rank 0")


@pytest.mark.promise(
    "docs/audits.md", "If a tensor differs, all workers stop, and name it, the ranks, and what may have changed it."
)
def test_weights_that_one_worker_changed(found: Any) -> None:
    check(found, "weights_that_differ", "DisagreementError", "bias", "rank")


@pytest.mark.promise(
    "docs/train.md", "a script's own `optimizer.step()`, left over from its loop for one process, is an error."
)
def test_a_step_of_the_script(found: Any) -> None:
    check(found, "a_step_of_ones_own", "InputError", "step")


@pytest.mark.promise("docs/train.md", "a parameter that is added or replaced later", "is an error at the next step")
def test_a_layer_that_is_replaced(found: Any) -> None:
    check(found, "a_layer_that_is_replaced", "InputError", "2.")


@pytest.mark.promise("docs/train.md", "What must be done once is done by rank 0", "The result goes to all")
def test_once(found: Any) -> None:
    assert [one["once"] for one in found] == [["done", [{"classes": 3}, 1, 0]], ["done", [{"classes": 3}, 0, 1]]]


@pytest.mark.promise("paceline/session.py", "the function raised (rank 0 raises the error itself)")
def test_once_that_fails(found: Any) -> None:
    assert found[0]["once_fails"][0] == "LookupError"
    assert found[1]["once_fails"][0] == "InputError" and "no such file" in found[1]["once_fails"][1]


@pytest.mark.promise(
    "docs/evaluate.md", "If a metric raises on some ranks only, the others raise an `InputError` that quotes it."
)
def test_a_metric_that_fails(found: Any) -> None:
    assert found[1]["a_metric_fails"] == ["LookupError", "no such class"]
    assert found[0]["a_metric_fails"][0] == "InputError" and "no such class" in found[0]["a_metric_fails"][1]


@pytest.mark.promise(
    "docs/batch-size.md", "With `warmup_steps=w` the rate goes up in a straight line from the script's"
)
def test_a_rate_that_follows_the_workers(found: Any) -> None:
    for one in found:
        rates, notes = one["rates"][1]
        assert rates == pytest.approx([0.15, 0.2, 0.2, 0.2])
        assert any("learning rate x 2 (linear): the batch is 2 workers x 8 = 16 samples" in note for note in notes)
