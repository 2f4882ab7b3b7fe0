"""The end of a step: skipped, refused or updated, and which microbatch is to blame."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from paceline.data.feed import MicrobatchGroup
from paceline.errors import InputError, NonFiniteLoss
from paceline.step.checks import MicrobatchResult
from paceline.step.commit import commit, skip, with_norm


class Scene:
    """A job of two parameters and batches of four microbatches."""

    def __init__(self, **settings: Any) -> None:
        self.model = nn.Linear(2, 1)
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.reset = 0
        self.events: list[dict[str, Any]] = []
        self.applied: list[int] = []
        self.confirmed: list[int] = []
        self.losses = [1.0, 1.0, math.inf, 1.0]
        buffers = SimpleNamespace(reset=self._reset, accept=lambda *_: None)
        compute = SimpleNamespace(
            buffers=buffers,
            metrics=["right"],
            carried=None,
            batch_loss=None,
            seed=lambda *at: 1,
            loss_only=self._loss_only,
        )
        update = SimpleNamespace(
            parameters=dict(self.model.named_parameters()), learning_rate=0.3, loss_scale=None, take=None,
            apply=self._apply, closure_users=[],
        )  # fmt: skip
        self.context: Any = SimpleNamespace(
            compute=compute, update=update,
            settings=SimpleNamespace(**({"nonfinite": "stop", "missing_gradient": "stop", "exact": True} | settings)),
            events=SimpleNamespace(mark=lambda _, **fields: self.events.append(fields)),
            order=SimpleNamespace(parts_of=lambda step: tuple(range(4 * at, 4 * at + 4) for at in range(4))),
            world=SimpleNamespace(rank=1, gather=lambda value, _: [range(9), value], confirm=self.confirmed.append),
        )  # fmt: skip

    def _reset(self) -> None:
        self.reset += 1

    def _apply(self, step: int, norm: Any = None) -> tuple[torch.Tensor, float]:
        self.applied.append(step)
        return torch.tensor(2.0), 0.1

    def _loss_only(self, group: MicrobatchGroup) -> torch.Tensor:
        return torch.tensor([self.losses[group.microbatches.start], 1.0, math.nan])


def part(microbatches: range, loss: float, rank: int = 1, missing: frozenset[int] = frozenset()) -> MicrobatchResult:
    return MicrobatchResult(microbatches, rank, loss, 2.0, missing, metrics=(1.0, 2.0))


GOOD = [part(range(2), 1.0), part(range(2, 4), 3.0)]
BAD = [part(range(2), 1.0), part(range(1, 4), math.inf)]
PIECES = [MicrobatchGroup(range(2), 8, torch.zeros(8, 2)), MicrobatchGroup(range(1, 4), 12, torch.zeros(12, 2))]


def test_a_sound_step_updates() -> None:
    scene = Scene()
    result = commit(scene.context, 5, PIECES, GOOD, [], notice=2)
    assert (result.loss, float(result.norm), result.learning_rate) == (1.0, 2.0, 0.1)
    assert result.applied and result.notice == 2 and result.metrics == {"right": 0.5}
    assert scene.applied == [5] == scene.confirmed and scene.reset == 0
    other = commit(scene.context, 6, PIECES, GOOD, [], apply=lambda step: (7.0, 0.7))
    assert (other.norm, other.learning_rate, scene.applied) == (7.0, 0.7, [5])
    assert with_norm(scene.context, torch.tensor(3.0), 3.0)(8) == (3.0, 0.1) and scene.applied == [5, 8]


def test_a_loss_that_is_not_finite_stops_the_run_and_names_its_microbatch() -> None:
    scene = Scene()
    with pytest.raises(NonFiniteLoss, match="inf at step 5, microbatch 2, computed by rank 1"):
        commit(scene.context, 5, PIECES, BAD, [])
    assert scene.reset == 1 and scene.applied == []
    with pytest.raises(NonFiniteLoss, match="microbatch 2, computed by rank 1"):  # an audit has cut the group
        commit(scene.context, 5, PIECES, [part(range(2, 4), math.inf)], [])
    scene.losses[2] = 1.0
    with pytest.raises(NonFiniteLoss, match="microbatches 1 to 3"):
        commit(scene.context, 5, PIECES, BAD, [])
    with pytest.raises(NonFiniteLoss, match="microbatches 0 to 8, computed by rank 0"):
        commit(scene.context, 5, PIECES, [part(range(1, 4), math.nan, rank=0)], [])
    with pytest.raises(NonFiniteLoss, match="microbatch 3, computed by rank 0"):
        commit(scene.context, 5, [], [part(range(3, 4), math.nan, rank=0)], [])


@pytest.mark.promise(
    "docs/losses.md",
    'With `nonfinite="skip"` the step makes no update, `report.applied` is false, and training continues.',
)
def test_such_a_step_may_be_left_out() -> None:
    scene = Scene(nonfinite="skip")
    result = commit(scene.context, 5, PIECES, BAD, [], notice=1)
    assert not result.applied and result.notice == 1 and result.learning_rate == 0.3
    assert math.isinf(result.loss) and math.isnan(float(result.norm)) and result.metrics == {"right": 0.5}
    assert scene.applied == [] == scene.confirmed and scene.reset == 1
    assert scene.events[0]["step"] == 5 and "microbatch 2" in scene.events[0]["reason"]


@pytest.mark.promise("docs/losses.md", '`missing_gradient="zero"`: such microbatches count as zero.')
def test_gradients_that_are_missing_in_part_stop_the_run_or_are_zero() -> None:
    some = [part(range(2), 1.0, missing=frozenset({1})), part(range(2, 4), 1.0)]
    scene = Scene()
    with pytest.raises(InputError, match=r"'bias' got no gradient from microbatches 0 to 1 on rank 1"):
        skip(scene.context, 5, some, lambda bad: range(0))
    assert scene.reset == 1
    for missing in ("stop", "zero"):
        scene = Scene(missing_gradient=missing)
        everywhere = [one._replace(missing=frozenset({1})) for one in some]
        assert skip(scene.context, 5, everywhere, lambda bad: range(0)) is None
        assert scene.model.bias.grad is None and scene.model.weight.grad is not None
    scene = Scene(missing_gradient="zero")
    assert skip(scene.context, 5, some, lambda bad: range(0)) is None
    assert scene.model.bias.grad is not None and scene.reset == 0


def test_an_update_too_large_for_float16_was_not_made() -> None:
    scene = Scene()
    scene.context.update.loss_scale = SimpleNamespace(overflowed=True, value=8.0)
    assert not commit(scene.context, 5, PIECES, GOOD, []).applied
    assert scene.events == [{"step": 5, "reason": "a gradient is too large for float16: the loss scale is 8 now"}]
    scene.context.update.loss_scale.overflowed = False
    assert commit(scene.context, 5, PIECES, GOOD, []).applied
