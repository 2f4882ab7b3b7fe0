"""Checks of a model that is cut: its loss and gradients are those of the whole model, and need nothing but its output.

With a cut at every boundary, each layer gets the output of the previous layer, and returns the gradient of it. If this
gives the gradients of the whole model, so does any cut. In another pass, the parameters and buffers of all other layers
have changed values while a layer runs. This detects a layer that reads them, which would find nothing or old values.

The loss may depend on the model's output only, because no worker of a pipeline has the whole model.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from paceline.data.feed import MicrobatchGroup
from paceline.data.keys import (
    STEP,
    generator_states,
    preserve_generators,
    restore_generators,
    same_states,
    seed_all,
    seed_of,
)
from paceline.data.nested import map_tensors
from paceline.data.objects.attributes import Attributes
from paceline.errors import InputError, PacelineError
from paceline.partition.backward import backward
from paceline.partition.base import Layers
from paceline.partition.preserve import kept_gradients, preserved
from paceline.settings import Exact
from paceline.step.forward import ForwardRunner
from paceline.step.probes.repeatability import differing_text, moved
from paceline.system.torch_internals import gradient_hooks, tree_leaves, tree_map_only

_log = logging.getLogger("paceline")
Gradients = dict[str, torch.Tensor | None]
_TOLERANCE, _TIED_TOLERANCE = 1e-4, 1e-2
"""Tolerances relative to a gradient's norm, without ``exact``. Those of tied weights are added in another order."""


def check_gradients(compute: ForwardRunner, layers: Layers, group: MicrobatchGroup, exact: Exact, seed: int) -> None:
    """Raise if the gradients computed layer by layer differ from those of the whole model.

    Args:
        exact: whether the bits must be equal. Tied weights are checked where they are added up.
    """
    model = compute.model
    uses = [name for place in range(len(layers.names)) for name in layers.stage(place, place + 1).parameters]

    def gradients(pass_of: Any, **more: Any) -> tuple[torch.Tensor, Gradients]:
        with preserved(model), kept_gradients(model), preserve_generators(), torch.enable_grad():
            seed_all(seed_of(STEP, seed, 0, 0))
            loss = pass_of(compute, layers, replace(group, data=_copy(group.data)), **more)
            return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}

    loss, whole = gradients(_whole)
    try:
        cut_loss, cut = gradients(_in_layers)
    except PacelineError:
        raise
    except Exception as error:
        raise InputError(
            f"{type(model).__name__} trains in one piece, but not layer by layer: {type(error).__name__}: {error}. A "
            f"layer may use a value or weight of another layer, which is not among its inputs. Pass it "
            f"along with the output of the layer before, or use strategy 'allreduce'."
        ) from error
    repeated: tuple[torch.Tensor, Gradients] | None = None
    parameters = dict(model.named_parameters())
    for name, gradient in [("", loss), *whole.items()]:
        other = cut[name] if name else cut_loss
        is_tied = uses.count(name) > 1
        if _equal(gradient, other) or (is_tied and (exact or gradient_hooks(parameters[name]))):
            continue
        if not exact and _close(gradient, other, _TIED_TOLERANCE if is_tied else _TOLERANCE):
            continue
        repeated = repeated or gradients(_whole)
        again = repeated[1][name] if name else repeated[0]
        if name and not _equal(gradient, again) and _close(gradient, other, _TOLERANCE):
            continue  # the model is not deterministic, for example because of atomic operations on a GPU
        if not _equal(gradient, again):
            changed = _changed_by(compute, lambda: gradients(_whole))
            raise InputError(differing_text(f"the gradient of {name!r}" if name else "the loss", changed))
        what = f"the gradient of the parameter {name!r} is {_norm(other)}" if name else f"the loss is {cut_loss.item()}"
        raise InputError(
            f"{type(model).__name__} trains otherwise when it is cut: for the first microbatch {what} by layers, but "
            f"{_norm(gradient) if name else loss.item()} in one piece. Something acts on it that no layer contains, "
            f"such as a hook on the model itself. Move it into a layer, or use another strategy."
        )
    _check_reads(layers, model, lambda others: gradients(_in_layers, others=others), (cut_loss, cut))


def _changed_by(compute: ForwardRunner, run: Callable[[], Any]) -> list[str]:
    """Return the names of values besides the weights that each of two passes changes."""
    known = {id(value) for value in (*compute.model.parameters(), *compute.model.buffers())}
    roots = {"model": compute.model, "forward": compute.forward}
    states = [Attributes(roots, known)]
    for _ in range(2):
        run()
        states.append(Attributes(roots, known))
    states[0].put_back()
    return moved(*states)


def _check_reads(
    layers: Layers, model: nn.Module, gradients: Callable[[_Others], tuple[torch.Tensor, Gradients]], known: Any
) -> None:
    def reads(names: Collection[str]) -> bool:
        before, cut = known
        try:
            loss, found = gradients(_Others(layers, model, names))
        except Exception as error:  # noqa: BLE001 - a pass that fails now reads a changed tensor
            _log.debug("a pass failed with other values of other layers: %s", error)
            return True
        return not (_same(before, loss) and all(_same(cut[name], value) for name, value in found.items()))

    names = [name for name, _ in [*model.named_parameters(), *model.named_buffers()]]
    if reads(names):
        name = next((name for name in names if reads([name])), "")
        kind = "parameter" if name in dict(model.named_parameters()) else "buffer"
        what = f"the {kind} {name!r}" if name else "what"
        raise InputError(
            f"{type(model).__name__} trains otherwise when it is cut: a layer, or a hook, reads {what} of another "
            f"layer, which another stage may have. Pass its value along with the output of the layer that has it, or "
            f"use strategy 'allreduce'."
        )


class _Others:
    """Context that changes the parameters and buffers of all other layers while a layer runs."""

    def __init__(self, layers: Layers, model: nn.Module, names: Collection[str]) -> None:
        stages = [layers.stage(place, place + 1) for place in range(len(layers.names))]
        self._own = [{*stage.parameters, *stage.buffers} for stage in stages]
        used: set[str] = set().union(*self._own)
        every = dict([*model.named_parameters(), *model.named_buffers()])
        self._tensors = {name: every[name] for name in names if name in used}
        self._other = {name: _other_than(value.detach()) for name, value in self._tensors.items()}

    @contextmanager
    def during(self, place: int) -> Iterator[None]:
        """Change the tensors while the layer at this index runs."""
        changed = {name: value for name, value in self._tensors.items() if name not in self._own[place]}
        before = {name: value.data for name, value in changed.items()}
        for name, value in changed.items():
            value.data = self._other[name]
        try:
            yield
        finally:
            for name, value in changed.items():
                value.data = before[name]


def _other_than(value: torch.Tensor) -> torch.Tensor:
    """Return a value that differs from the tensor by more than a few passes would change it."""
    return ~value if value.dtype == torch.bool else value + 101 if not value.is_floating_point() else value + 1.618


def _same(left: torch.Tensor | None, right: torch.Tensor | None) -> bool:
    return _equal(left, right) or _close(left, right, _TOLERANCE)


def _whole(compute: ForwardRunner, layers: Layers, group: MicrobatchGroup) -> torch.Tensor:
    loss, _ = compute.loss_of(group)
    before = generator_states()
    loss.backward()
    if not same_states(before, generator_states()):
        raise InputError(
            f"The backward pass of {type(compute.model).__name__} draws random numbers, as in a hook. In a pipeline "
            f"these are not the ones of one process, where they follow those of the forward pass. Draw them in the "
            f"forward pass, or use strategy 'allreduce'."
        )
    return loss


def _in_layers(
    compute: ForwardRunner, layers: Layers, group: MicrobatchGroup, others: _Others | None = None
) -> torch.Tensor:
    seeded = generator_states()
    values: Any = compute.input_of(group)
    last = len(layers.names) - 1
    passes: list[tuple[list[torch.Tensor], tuple[torch.Tensor, ...]]] = []

    def during(place: int) -> AbstractContextManager[None]:
        return nullcontext() if others is None else others.during(place)

    for place in range(last):
        inputs = [*values] if place else []
        with during(place), compute.precision():
            outputs = layers.stage(place, place + 1)(values)
        passes.append((inputs, outputs))
        values = tuple(value.detach().clone().requires_grad_(value.requires_grad) for value in outputs)
    stage, states = layers.stage(last, last + 1), generator_states()

    def model(given: Any) -> Any:
        restore_generators(states)
        return stage(values if last else given)

    with during(last):
        restore_generators(seeded)
        loss, _ = compute.loss_of(group, model=model)
        entered = [*values] if last else []
        backward([loss], None, entered)
    for place, (inputs, outputs) in reversed([*enumerate(passes)]):
        with during(place):
            backward(outputs, [value.grad for value in entered], inputs)
        entered = inputs
    return loss


def _copy(data: Any) -> Any:
    return map_tensors(torch.clone, data)


def _equal(left: torch.Tensor | None, right: torch.Tensor | None) -> bool:
    if left is None or right is None:
        return left is right
    if left.is_sparse or right.is_sparse:
        left, right = left.to_dense(), right.to_dense()
    return torch.equal(left.nan_to_num(), right.nan_to_num())


def _close(left: torch.Tensor | None, right: torch.Tensor | None, tolerance: float) -> bool:
    if left is None or right is None:
        return False
    difference, size = (left.float() - right.float()).norm(), left.float().norm()
    return bool(difference <= tolerance * size)


def _norm(gradient: torch.Tensor | None) -> str:
    return "none" if gradient is None else f"a tensor of norm {gradient.float().norm().item():.6g}"


def check_loss(compute: ForwardRunner, group: MicrobatchGroup) -> None:
    """Raise InputError if the loss uses the model's parameters directly, for example in a weight penalty."""
    with preserved(compute.model):
        with torch.no_grad(), compute.precision():
            output = compute.model(compute.input_of(group))
        output = tree_map_only(torch.Tensor, _detached, output)
        with only_uses(compute.model, dict(compute.model.named_buffers()), "loss"):
            compute.loss_of(group, model=lambda _: output)


@contextmanager
def only_uses(model: nn.Module, allowed: Collection[str], what: str) -> Iterator[None]:
    """Raise InputError at the end of the context if a function in it has used other parameters or buffers.

    Args:
        what: name of the function, for the message.
    """
    uses = _Uses(model)
    with uses:
        yield
    if refused := [name for name in uses.names if name not in allowed]:
        kind = "parameter" if refused[0] in dict(model.named_parameters()) else "buffer"
        raise InputError(
            f"The {what} uses the {kind} {refused[0]!r} of the model, not only its output. The loss of a model that is "
            f"cut is computed with the last stage, without the layers of the others: use the optimizer's weight_decay "
            f"for a weight penalty, or another strategy."
        )


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_(tensor.is_floating_point())


class _Uses(TorchFunctionMode):
    """Recorder of the ``names`` of parameters and buffers from which tensors are computed."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._tensors = {id(tensor): name for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
        self.names: list[str] = []

    def __torch_function__(
        self, function: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        is_use = any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(result))  # reading a shape is allowed
        if is_use and function is not torch.autograd.grad:
            given = tree_leaves((args, kwargs))
            self.names += [self._tensors[id(leaf)] for leaf in given if id(leaf) in self._tensors]
        return result
