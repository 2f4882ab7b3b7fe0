"""Forward pass of one microbatch, with random numbers and buffers that do not depend on earlier microbatches."""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, NoReturn, Protocol, cast

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from paceline.data.feed import MicrobatchGroup
from paceline.data.keys import (
    STEP,
    generator_states,
    replay_context,
    same_states,
    seed_all,
    seed_of,
    seed_untouched,
    was_drawn,
)
from paceline.data.nested import map_tensors
from paceline.data.objects.values import versions_of
from paceline.data.recurrent.carried import CarriedState
from paceline.errors import InputError, name_microbatches
from paceline.step.buffers import Buffers
from paceline.step.loss import Forward, StandIn, check_names, is_counted, is_of_loss, loss_of_result
from paceline.step.optimizers.loss_scale import LossScale
from paceline.system.torch_internals import own_buffers
from paceline.system.user_code import in_user_call

NO_GRADIENT = (
    "The loss does not depend on any parameter that requires a gradient. Look for .detach(), .item() or "
    "torch.no_grad() on the way from the model's output to the loss, for a loss that ignores the output, and for "
    "parameters that are all frozen."
)

_SMALL = "more than 1 value per channel"  # part of torch's error message for a batch norm that gets a single sample


class ForwardResult(NamedTuple):
    """Result of the forward pass of a microbatch group, ready for the backward pass.

    ``total``: sum of the losses times the loss scale, to be differentiated. ``pair``: sum and divisor of the loss, then
    of each metric, as a float64 tensor of shape [2 + 2 * metrics]. ``buffers``: the buffers after the pass, times the
    number of samples. ``drew``: whether the pass drew random numbers, if that was watched.
    """

    total: torch.Tensor
    pair: torch.Tensor
    buffers: list[torch.Tensor]
    drew: bool = False


class _ModelCall(BaseException):
    """Interruption of a forward pass at the call of the model. ``forward`` does not catch it as an error."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


def _stop(value: Any) -> NoReturn:
    raise _ModelCall(value)


class Recorder(Protocol):
    """Recorder of one microbatch; see ``step.probes.audit``."""

    def begin(self, group: MicrobatchGroup, step: int) -> bool:
        """Begin a forward pass. Returns whether it is the pass to record."""

    def add(self, result: ForwardResult) -> None:
        """Record the result of the forward pass, and the gradients once they are computed."""

    def close(self) -> None:
        """Stop recording."""


class WholeBatch(Protocol):
    """Loss over the whole batch; see ``step.gradients.batch_loss``."""

    def encode(self, model: nn.Module, data: Any) -> Any:
        """Run the forward pass of a microbatch."""

    def take(self, value: Any, group: MicrobatchGroup) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``total`` and ``pair`` of a microbatch, given the result of its forward pass."""


class ForwardRunner:
    """Forward runner: computes the loss of a microbatch group as a sum, with the count that divides it.

    Args:
        forward: ``forward(model, data)`` returns a scalar, the mean over the samples, or a sum and a count.
        largest: largest number of workers that the run may have. If above 1, forward passes must not change weights.
        samples_of: returns the number of samples in the batch of a step.
    """

    def __init__(
        self,
        model: nn.Module,
        forward: Forward,
        seed: int,
        autocast: str | None,
        largest: int,
        samples_of: Callable[[int], int],
    ) -> None:
        self.model, self.forward = model, forward
        self.buffers = Buffers(model)
        self._seed, self._autocast, self._largest = seed, autocast, largest
        self._samples_of = samples_of
        self.turn = 0  # number of phases that the batch has had before this one, if a batch has several
        self._weights = dict(model.named_parameters())
        # names of the metrics that each forward pass returns, in alphabetical order. None before the first pass.
        self.metrics: tuple[str, ...] | None = None
        # whether the forward pass returns the divisor of the loss. None before the first pass.
        self.counts: bool | None = None
        # states that microbatches carry to the next batch, if the forward pass takes a state
        self.carried: CarriedState | None = None
        # loss over the whole batch, if the forward pass returns outputs for it
        self.batch_loss: WholeBatch | None = None
        # loss scale that keeps gradients in the range of float16, if the forward pass runs in float16
        self.loss_scale: LossScale | None = None
        self.recorder: Recorder | None = None  # takes digests of a microbatch in an audited step

    def of(self, forward: Forward) -> ForwardRunner:
        """Return a shallow copy that runs another forward pass of the same model."""
        made = copy.copy(self)
        made.forward = forward
        return made

    def seed(self, use: int, step: int, *place: int) -> int:
        """Return the seed of the random numbers for a use in this phase of a step; see ``data.keys``."""
        return seed_of(use, self._seed, step, *place, *((self.turn,) if self.turn else ()))

    def forward_pass(self, group: MicrobatchGroup, step: int, watch_draws: bool = False) -> ForwardResult:
        """Run the forward pass of a microbatch group, with the random numbers and buffers that belong to it.

        Args:
            watch_draws: whether to detect if the forward pass draws random numbers. Then a group of several
                microbatches gets no keyed numbers, which belong to a microbatch.
        """
        fused = watch_draws and len(group.microbatches) > 1
        recorder = self.recorder if self.recorder is not None and self.recorder.begin(group, step) else None
        self.buffers.reset()
        if fused:
            seed_untouched()
        else:
            seed_all(self.seed(STEP, step, group.microbatches.start))
        before = generator_states() if watch_draws and not fused else None
        total, pair = self._loss(group, step)
        drew = was_drawn() if fused else before is not None and not same_states(before, generator_states())
        buffers = self.buffers.collect(group.samples, self._samples_of(step))
        if not total.requires_grad:
            raise InputError(NO_GRADIENT)
        result = ForwardResult(total if self.scale == 1.0 else total.float() * self.scale, pair, buffers, drew)
        if recorder is not None:
            recorder.add(result)
        return result

    @property
    def scale(self) -> float:
        """Factor by which the gradients of a forward pass exceed those of its loss."""
        return 1.0 if self.loss_scale is None else self.loss_scale.value

    def loss_only(self, group: MicrobatchGroup) -> torch.Tensor:
        """Return ``pair`` of a forward pass without keyed random numbers."""
        return self.loss_of(group)[1]

    def loss_of(
        self, group: MicrobatchGroup, step: int = 0, model: Callable[[Any], Any] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``total``, without the loss scale, and ``pair`` of a forward pass without keyed random numbers.

        Gradients stay enabled, because a forward pass may compute gradients itself, for example for a gradient penalty.

        Args:
            model: function to call instead of a model that is cut.
        """
        if model is None:
            return self._loss(group, step)
        stand_in = StandIn(model)
        if not is_of_loss(self.forward):  # forward may change the data, and runs for the first and the last stage
            group = replace(group, data=map_tensors(torch.clone, group.data))
        result = self._loss(group, step, cast(nn.Module, stand_in))
        stand_in.check_called()
        return result

    def input_of(self, group: MicrobatchGroup, step: int = 0) -> Any:
        """Return the value with which the forward pass calls the model. Runs the forward pass up to that call.

        Raises:
            InputError: the forward pass does not call the model with one value.
        """
        try:
            self.loss_of(group, step, _stop)
        except _ModelCall as call:
            return call.value
        raise AssertionError("loss_of checks that the model is called")

    def _loss(
        self, group: MicrobatchGroup, step: int = 0, model: nn.Module | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        model = self.model if model is None else model
        with self.precision(), self.keeping_weights():
            try:
                if self.batch_loss is not None:
                    value = self.batch_loss.encode(model, group.data)
                elif self.carried is None:
                    value = self.forward(model, group.data)
                else:
                    (microbatch,) = group.microbatches
                    value = self.carried.forward(self.model, group.data, step, microbatch)
            except Exception as error:
                name_call(error, group.microbatches, group.samples, step, group.shard)
                raise
        return self.take(value, group.samples) if self.batch_loss is None else self.batch_loss.take(value, group)

    def take(self, value: Any, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Convert the result of a forward pass over ``samples`` samples to ``total`` and ``pair`` of its result.

        Raises:
            InputError: the result is not a loss, or the names of its metrics have changed.
        """
        loss = loss_of_result(value, samples)
        names = tuple(loss.metrics)
        if self.metrics is None:
            self.metrics, self.counts = names, is_counted(value)
        check_names(self.metrics, names)
        return loss.total, loss.pair()

    @contextmanager
    def keeping_weights(self) -> Iterator[None]:
        """Raise InputError if a forward pass in this context changes weights, which each worker would do otherwise."""
        if self._largest == 1:
            yield
            return
        before = versions_of(self._weights.values())
        yield
        for name, now, version in zip(self._weights, versions_of(self._weights.values()), before, strict=True):
            if now != version:
                raise InputError(
                    f"The forward pass changes the parameter {name!r} in place, as an embedding with max_norm does. "
                    f"This run may have {self._largest} workers: each would change it for its own samples, while the "
                    f"others compute with it or with copies of their own. Change weights in the loop after "
                    f"session.step, in the same way on all workers."
                )

    @property
    def may_change_weights(self) -> bool:
        """Whether a forward pass may change weights, because the run never has more than one worker."""
        return self._largest == 1

    def precision(self) -> AbstractContextManager[object]:
        """Return the autocast context of the forward pass."""
        if self._autocast is None:
            return nullcontext()
        device = next(self.model.parameters()).device.type
        return torch.autocast(device, getattr(torch, self._autocast))


def name_call(error: Exception, microbatches: range, samples: int, step: int, shard: str = "") -> None:
    """Add to an error of the forward pass the microbatches for which the forward pass was called."""
    try:
        small = _SMALL in str(error)
    except Exception:  # noqa: BLE001 - the error may be of a user's class
        small = False
    more = " For larger microbatches set a larger batch, or fewer microbatches." if small else _not_in_table(error)
    cut = f"{samples} sample{'s' * (samples > 1)}{f' of shard {shard!r}' if shard else ''}"
    in_user_call(error, f"This was the forward pass of {name_microbatches(microbatches)} ({cut}) of step {step}.{more}")


def _not_in_table(error: Exception) -> str:
    """Return a sentence about the index that an embedding of torch did not find, if it raised the error."""
    for frame, _ in traceback.walk_tb(error.__traceback__ if isinstance(error, IndexError | RuntimeError) else None):
        table, indices = frame.f_locals.get("self"), frame.f_locals.get("input")
        if isinstance(table, nn.Embedding | nn.EmbeddingBag) and isinstance(indices, torch.Tensor):
            rows = table.num_embeddings
            wrong = indices[(indices < 0) | (indices >= rows)].flatten()[:1].tolist()
            return (
                f" The index {wrong[0]} is not in an embedding of {rows:,} rows (0 to {rows - 1:,})." if wrong else ""
            )
    return ""


Context = AbstractContextManager[object]


def computed_again(buffers: Buffers, part: Container[str]) -> tuple[Context, Context]:
    """Return the ``context_fn`` of a checkpoint: recomputation draws the same numbers and sees the same buffers."""
    first, again = replay_context()
    return first, _Again(again, buffers.copies(part))


def on_copy(call: Callable[[Any], Any], values: Any) -> Any:
    """Call with a copy of the model's input: recomputation needs the input unchanged, even if the model modifies it.

    Values from another stage need no copy, because the stage itself copies what it changes.
    """
    return call(map_tensors(torch.clone, values))


class _Again:
    """Context for recomputing a part of a model. It restores the buffers afterwards and can be entered repeatedly."""

    def __init__(self, drawing: Context, buffers: list[tuple[nn.Module, str, torch.Tensor]]) -> None:
        self._drawing, self._buffers = drawing, buffers

    def __enter__(self) -> None:
        self._drawing.__enter__()
        self._now = [own_buffers(module)[key] for module, key, _ in self._buffers]
        for module, key, before in self._buffers:
            own_buffers(module)[key] = before.clone()

    def __exit__(self, *error: Any) -> None:
        for (module, key, _), now in zip(self._buffers, self._now, strict=True):
            own_buffers(module)[key] = now
        self._drawing.__exit__(*error)


def recompute(model: nn.Module, classes: tuple[str, ...], buffers: Buffers) -> None:
    """Make modules of these classes recompute their activations in the backward pass (Chen et al. 2016)."""
    found = [module for module in model.modules() if type(module).__name__ in classes]
    recompute_modules(found, buffers)
    if missing := [name for name in classes if name not in {type(module).__name__ for module in found}]:
        present = sorted({type(module).__name__ for module in model.modules()})
        raise InputError(
            f"recompute: the model has no module of class {missing[0]!r}; it has {', '.join(present)}. "
            f"recompute='auto' chooses by memory_gigabytes."
        )


def recompute_modules(modules: Iterable[nn.Module], buffers: Buffers) -> None:
    """Make these modules recompute their activations in the backward pass."""
    for module in modules:
        contexts = partial(computed_again, buffers, buffers.of(module))
        module.forward = partial(checkpoint, module.forward, use_reentrant=False, context_fn=contexts)


def compute_once(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Undo :func:`recompute_modules`, and return the modules for which it was in effect."""
    changed = []
    for module in modules:
        call = vars(module).get("forward")
        if isinstance(call, partial) and call.func is checkpoint:
            changed.append(module)
            del module.forward
            if module.forward != call.args[0]:  # the script itself had replaced the method
                module.forward = call.args[0]
    return changed
