"""Losses over the whole batch: those of plain torch, with the bits of one process on any number of workers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from batch_losses import BATCH, LOSSES, Net, loss_of, start, train, two_views
from subjects import classes
from torch import nn
from torch.nn import functional

import paceline

Printed = Callable[..., list[dict[str, Any]]]

TRAIN = """
import os
from batch_losses import LOSSES, train
from subjects import tell

names = os.environ.get("LOSSES", ",".join(LOSSES)).split(",")
for asked in os.environ["STRATEGIES"].split():
    strategy, _, way = asked.partition("/")
    settings = {"shard": way} if strategy == "sharded" and way else {}
    if strategy == "pipeline":
        schedule, *stages = way.split("/")
        settings = {"pipeline": {"schedule": schedule, "stages": int(stages[0]) if stages else None}}
    more = dict(exact=True, strategy=strategy, **settings)
    tell(**{f"{asked} {name}": train(name, **more) for name in names})
"""


def outputs_of(name: str, model: nn.Module, data: Any) -> Any:
    """What the forward pass returns for the whole batch at once, without ``Sum``."""
    found: Any = LOSSES[name][0](model, data)
    if isinstance(found, paceline.Sum):
        return found.tensor
    return {key: value.tensor if isinstance(value, paceline.Sum) else value for key, value in found.items()}


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "noisy"])
def test_loss_and_gradients_are_those_of_plain_torch(name: str) -> None:
    torch.manual_seed(0)
    model = Net(plain=True)
    twin = copy.deepcopy(model)
    data = classes(BATCH)
    optimizer = partial(torch.optim.SGD, lr=1.0)
    session = start(name, model, data=data, optimizer=optimizer, exact=True, sampler=lambda seed, epoch: range(BATCH))
    (batch,) = session.batches(steps=1)
    report = session.step(batch)
    loss = loss_of(name, twin)(outputs_of(name, twin, data.tensors), batch)
    loss = loss[0] if isinstance(loss, tuple) else loss
    loss.backward()
    assert report.loss == pytest.approx(loss.item(), rel=1e-5)
    assert not report.notes[1:]  # nothing complains about a loss over several samples
    for (key, now), before in zip(model.named_parameters(), twin.parameters(), strict=True):
        gradient = torch.zeros_like(before) if before.grad is None else before.grad
        torch.testing.assert_close(before.detach() - now.detach(), gradient, rtol=1e-4, atol=1e-6, msg=key)


@pytest.fixture(scope="module")
def alone(printed: Printed, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one process finds for each loss."""
    (found,) = printed(TRAIN, 1, tmp_path_factory.mktemp("alone"), environment={"STRATEGIES": "allreduce"})
    assert len(found) == len(LOSSES) == len({str(one) for one in found.values()})
    return {key.partition(" ")[2]: trained for key, trained in found.items()}


@pytest.mark.slow(turns=7)
@pytest.mark.parametrize("workers", range(2, 9))
def test_the_bits_are_those_of_one_process(
    printed: Printed, tmp_path: Path, alone: dict[str, Any], workers: int
) -> None:
    more = {2: " sharded/parameters auto", 3: " stealing sharded pipeline/gpipe", 8: " stealing"}.get(workers, "")
    more += {2: " pipeline/zb-v", 4: " pipeline/1f1b/3 pipeline/interleaved/4", 8: " pipeline/1f1b/2"}.get(workers, "")
    for one in printed(TRAIN, workers, tmp_path, environment={"STRATEGIES": "allreduce" + more}):
        assert {key.partition(" ")[2] for key in one} == alone.keys()
        for key, trained in one.items():
            assert trained == alone[key.partition(" ")[2]], key


def test_two_workers_and_one_give_the_same(printed: Printed, tmp_path: Path) -> None:
    environment = {"STRATEGIES": "allreduce stealing pipeline/1f1b", "LOSSES": "noisy,clip"}
    everyone = printed(TRAIN, 2, tmp_path, environment=environment)
    for one in everyone:
        for name in ("noisy", "clip"):
            assert one[f"allreduce {name}"] == one[f"stealing {name}"] == one[f"pipeline/1f1b {name}"]
    assert everyone[0]["allreduce noisy"] == train("noisy", exact=True)


@pytest.mark.parametrize(
    "settings",
    [{"exact": False}, {"exact": "fixed-point"}, {"microbatches": 1}, {"autocast": "bfloat16"}, {"strategy": "single"}],
    ids=str,
)
def test_other_settings_train_the_same(settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Net(plain=True)
    known, *_ = train("simclr", epochs=1, model=copy.deepcopy(model), exact=True)
    losses, *_ = train("simclr", epochs=1, model=model, **{"exact": True} | settings)
    assert losses == pytest.approx(known, rel=0.02 if "autocast" in settings else 1e-4)


def test_float16_scales_the_gradients_of_the_outputs() -> None:
    """A gradient of 1e-9 for an output in float16 would be zero without the scale."""
    model = nn.Linear(12, 4, bias=False)
    kept = model.weight.detach().clone()
    session = paceline.start(
        model=model,
        optimizer=partial(torch.optim.SGD, lr=1e6),
        forward=lambda model, microbatch: model(microbatch[0]),
        batch_loss=lambda outputs, batch: (outputs.float() * 1e-9).sum(),
        data=classes(32),
        batch=32,
        autocast="float16",
    )
    assert [session.step(batch).applied for batch in session.batches(steps=1)] == [True]
    torch.testing.assert_close(
        kept - model.weight.detach(), 1e-3 * classes(32).tensors[0].sum(0).expand(4, -1), rtol=1e-2, atol=1e-5
    )


def test_buffers_change_once_and_counters_count() -> None:
    class Counts(Net):
        seen: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros((), dtype=torch.long))

        def forward(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            self.seen += len(values)
            return super().forward(values)

    model = Counts()
    session = start("simclr", model, exact=True)
    for batch in session.batches(epochs=1):
        session.step(batch)
    assert int(model.seen) == 2 * 96  # two views of each sample
    tracked: Any = model.body[1].num_batches_tracked
    assert int(tracked) == 3  # steps


def test_skipped_steps_and_evaluations() -> None:
    session = start("simclr", batch_loss=lambda outputs, batch: outputs["first"].sum() * float("nan"), nonfinite="skip")
    assert [session.step(batch).applied for batch in session.batches(steps=2)] == [False, False]
    with pytest.raises(paceline.InputError, match="one over a whole batch, not a mean"):
        session.evaluate(classes(8))
    assert session.evaluate(classes(8), lambda model, microbatch: model.other(microbatch[0]).square().mean()) > 0
    session = start("simclr", batch_loss=lambda outputs, batch: outputs["first"].sum() * float("nan"))
    with pytest.raises(paceline.NonFiniteLoss, match="The loss over the whole batch is nan at step 0"):
        session.step(next(iter(session.batches(steps=1))))


def _steps(name: str = "simclr", steps: int = 2, **more: Any) -> None:
    session = start(name, **more)
    for batch in session.batches(steps=steps):
        session.step(batch)


def _vectors(outputs: Any, batch: Any) -> torch.Tensor:
    return functional.relu(outputs).mean()


OUTPUTS = {
    "no samples": (lambda model, data: model.other(data[0]).mean(0), r"the shape \[6\] for the 4 samples of microb"),
    "a number": (lambda model, data: model.other(data[0]).mean(), "has no dimension for the 4 samples of microbatch 0"),
    "a tuple": (lambda model, data: (model.other(data[0]), 1), r"is a tuple of a tensor .* Name its tensors in a"),
    "nothing": (lambda model, data: {}, "but it returned an empty dictionary"),
    "sparse rows": (lambda model, data: model.other(data[0]).to_sparse(), r"layout is torch.sparse_coo: use .to_dense"),
    "rows without values": (lambda model, data: model.other(data[0]).to("meta"), "is on the device 'meta', so it has"),
    "a list": (lambda model, data: {"a": [1]}, "but the output 'a' is a list"),
    "other sizes": (
        lambda model, data: model.other(data[0])[:, : 5 + int(data[0][0, 0] > 0)],
        "pad rows to one size",
    ),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs_that_are_no_rows_are_refused(name: str) -> None:
    forward, text = OUTPUTS[name]
    with pytest.raises(paceline.InputError, match=text):
        _steps(forward=forward, batch_loss=_vectors)


def test_a_forward_pass_that_does_not_repeat_is_refused() -> None:
    generator, calls = torch.Generator().manual_seed(1), [0]

    def drawn(model: Any, data: Any) -> torch.Tensor:
        value: torch.Tensor = model.other(data[0] + torch.randn(data[0].shape, generator=generator))
        return value

    def summed(rows: torch.Tensor) -> paceline.Sum:
        return paceline.Sum(rows.sum(0))

    def counted(change: Callable[[torch.Tensor], Any], usual: Callable[[torch.Tensor], Any] = summed) -> Any:
        calls[0] = 0

        def forward(model: Any, data: Any) -> Any:
            calls[0] += 1
            return (change if calls[0] == 38 else usual)(model.other(data[0]))

        return forward

    with pytest.raises(paceline.InputError, match="The same microbatch computed twice gives different results"):
        _steps(forward=drawn, batch_loss=_vectors, exact=True)
    with pytest.raises(paceline.InputError, match=r"forward does not repeat: .* in step 0 has different values"):
        _steps(forward=drawn, batch_loss=_vectors, exact=True, audit_action="warn")
    for exact in (False, True):
        with pytest.raises(paceline.InputError, match=r"forward does not repeat: .* is a different sum"):
            doubled = counted(lambda rows: paceline.Sum(2 * rows.sum(0)))
            _steps(forward=doubled, batch_loss=_vectors, exact=exact, steps=4)
        for moved in (lambda rows: rows.flip(0), lambda rows: rows.roll(2, 1)):
            with pytest.raises(paceline.InputError, match=r"forward does not repeat: .* has different values"):
                _steps(forward=counted(moved, lambda rows: rows), batch_loss=_vectors, exact=exact, steps=4)
    with pytest.raises(paceline.InputError, match=r"Sum of shape \[6\] .* in the first pass, but rows of shape \[6\]"):
        _steps(forward=counted(lambda rows: rows), batch_loss=_vectors, exact=True, steps=4)


def test_losses_that_cannot_be_used_are_refused() -> None:
    model = Net()
    model.norm = nn.BatchNorm1d(6)
    outside = nn.Parameter(torch.ones(3))
    kept: list[torch.Tensor] = []

    def queue(outputs: Any, batch: Any) -> torch.Tensor:
        kept.append(outputs["first"].detach())
        loss: torch.Tensor = (outputs["first"] @ torch.cat(kept).t()).mean()
        return loss

    for loss, text in (
        (lambda outputs, batch: outputs["first"].detach().mean(), "a loss that needs no gradient"),
        (lambda outputs, batch: model.norm(outputs["first"]).mean(), "changes the buffer 'norm.running_mean'"),
        (queue, "called twice with the same outputs gives different results: it changes .*kept"),
        (
            lambda outputs, batch: outputs["first"].mean() * outside.sum(),
            r"a parameter of shape \[3\] that the",
        ),
        (lambda outputs, batch: outputs["first"].mean(0), "The loss must be a scalar tensor"),
        (lambda outputs, batch: outputs["first"].mean() + 0j, "a tensor of type torch.complex64. Return a real number"),
        (lambda outputs, batch: outputs["first"].mean() + batch[0], "has no values to read"),
    ):
        with pytest.raises(paceline.InputError, match=text):
            _steps(model=model, batch_loss=loss, exact=True)


def test_arguments_that_do_not_go_together_are_refused() -> None:
    loss, whole = functional.cross_entropy, (lambda outputs, batch: outputs.mean())
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"loss": loss, "forward": None}, "Give either loss= or batch_loss=; both are given"),
        ({"loss": loss}, "Give either loss= or batch_loss=; both are given"),
        ({"forward": None}, r"batch_loss\(outputs, batch\) needs forward\(model, microbatch\).* Give forward=, too"),
        ({"forward": {"first": two_views}}, "cannot be combined with a forward for each optimizer"),
        ({"forward": lambda model, data, state: (1, state)}, "cannot be combined with a state from batch to batch"),
        ({"optimizer": torch.optim.LBFGS}, "LBFGS computes the loss several times"),
    ]
    for strategy in ("local-sgd", "parameter-server", "pipeline", "hogwild", "backup"):
        more = {"pipeline": {"schedule": "2bw"}} if strategy == "pipeline" else {}
        wrong.append(({"strategy": strategy, **more}, f"strategy '{strategy}' cannot train with batch_loss="))
    for given, text in wrong:
        with pytest.raises(paceline.ConfigError, match=text):
            start("simclr", **{"batch_loss": whole} | given)
    with pytest.raises(paceline.InputError, match=r"Outputs for a loss over the whole batch need batch_loss= in"):
        _steps(batch_loss=None)
    with pytest.raises(paceline.InputError, match=r"batch_loss must be a function of \(outputs, batch\)"):
        start("simclr", batch_loss=lambda outputs: outputs)
    with pytest.raises(paceline.InputError, match=r"paceline.Sum takes a dense tensor, but it got a list"):
        paceline.Sum([1])  # type: ignore[arg-type]


GROUPED = """
import os
import paceline
import torch
from batch_losses import train
from subjects import classes, tell

values, labels = classes(96).tensors

def grouped(seed, epoch):
    \"\"\"Batches of 4 samples of each of 3 classes, and one of the 40 samples that are left.\"\"\"
    of = [(labels == kind).nonzero().flatten() for kind in range(4)]
    of = [one[torch.randperm(len(one))] for one in of]
    return [torch.cat([of[kind][start : start + 4] for kind in range(4) if kind != start // 4]) for start in (0, 4, 8)]

more = dict(exact=True, sampler=grouped, batch=12, microbatches=4, strategy=os.environ["STRATEGY"])
tell(slices=train("triplets", **more), turn=train("triplets", microbatch_order=paceline.in_turn, **more))
tell(classes=train("triplets", microbatch_order=paceline.by_class(labels), **more))
lengths = (100 * values[:, 0].abs()).long()
more["sampler"] = lambda seed, epoch: lengths.argsort().view(-1, 12)[torch.randperm(8)]
tell(length=train("barlow twins", microbatch_order=paceline.by_length(lengths), **more))
tell(tokens=train("barlow twins", microbatch_order=paceline.by_tokens(lambda sample: lengths[sample]), **more))
"""


@pytest.mark.slow(turns=6)
def test_batches_of_a_batch_sampler_are_the_same_on_any_number(printed: Printed, tmp_path: Path) -> None:
    found = []
    for workers, strategy in ((1, "allreduce"), (2, "stealing"), (3, "allreduce"), (4, "sharded")):
        found += printed(GROUPED, workers, tmp_path / str(workers), environment={"STRATEGY": strategy})
    assert len({str(one) for one in found}) == 1
    assert len({str(trained) for trained in found[0].values()}) == 5
