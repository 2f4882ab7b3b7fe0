"""Probe whether an optimizer updates each parameter independently, so that workers can update different parameters.

A copy of the optimizer takes some steps on small parameters with random gradients, large and small: once with all
gradients, then with some of them only. The later runs must move these parameters alike and leave the same numbers in
the groups, such as a norm or an adapted learning rate. Step hooks may refer to the model, so they are tried on the
model itself, whose weights are then restored and gradients dropped. The first update shows random draws too.
"""

from __future__ import annotations

import copy
import inspect
import io
import logging
import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.data.keys import generator_states, preserve_generators, same_states, seed_torch
from paceline.data.objects.attributes import Attributes, same
from paceline.errors import InputError
from paceline.step.context import TrainingContext
from paceline.step.optimizers.several import parts_of
from paceline.system.torch_internals import HOOKS_PREFIX, STEP_HOOKS

_log = logging.getLogger("paceline")
PROBE_SCALES = 1e-3, 1.0, 1e3, 1e-3, 1.0, 1e3
"""Scale of the gradients in each step: an optimizer may treat large gradients, or later steps, differently. Small ones
come first, because means of squares hide an epsilon after large ones."""
_CURE = "Use strategy 'allreduce', or another optimizer; clip_norm clips by the norm of all."
_LARGEST = 2
"""Largest size of each dimension of the small parameters."""


def probe_optimizer(context: TrainingContext) -> None:
    """Raise if an optimizer cannot update a subset of the parameters. Only warn if it cannot be probed.

    Raises:
        InputError: the update of a parameter depends on others, or on random numbers although the bits must be those
            of one process.
    """
    for optimizer in parts_of(context.update.optimizer):
        _probe(context, optimizer)
        _probe_hooks(context, optimizer)


def _probe(context: TrainingContext, optimizer: Optimizer) -> None:
    kind = type(optimizer).__name__
    split = _split(context)
    every = [value for group in optimizer.param_groups for value in group["params"]]
    count, names = len(every), {id(value): name for name, value in context.update.parameters.items()}
    sparse = {place for place, value in enumerate(every) if names.get(id(value)) in context.sparse}
    with preserve_generators():
        try:
            together = _probe_steps(optimizer, range(count), sparse)
        except Exception as error:  # noqa: BLE001 - an optimizer may reject small parameters in any way
            _log.warning(
                "The optimizer %s cannot be tried on small parameters (%s: %s), so it is not known whether it updates "
                "each one by itself. %s.",
                *(kind, type(error).__name__, error, split),
            )
            return
        if together.drew:
            if context.settings.exact:
                raise _draws(context, f"The optimizer {kind}")
            return
        for places in _some(optimizer):
            try:
                alone = _probe_steps(optimizer, places, sparse)
            except Exception as error:
                raise InputError(
                    f"The optimizer {kind} fails when some parameters have no gradients "
                    f"({type(error).__name__}: {error}). {split}. Let it leave out a parameter whose grad is None, "
                    f"or use strategy 'allreduce'."
                ) from error
            cure = f"{split}. {_CURE}"
            if not all(_same(alone.parameters[place], together.parameters[place]) for place in places):
                raise InputError(
                    f"The optimizer {kind} updates a parameter differently when the others have no gradients: it "
                    f"looks at several at once, such as at the norm of all. {cure}"
                )
            shared = [key for key, value in together.shared.items() if not _alike(alone.shared.get(key), value)]
            if shared:
                raise InputError(
                    f"The optimizer {kind} has {shared[0]!r} for all parameters, which changes when some have no "
                    f"gradients: it depends on several at once, such as on the norm of all. {cure}"
                )


def _some(optimizer: Optimizer) -> list[list[int]]:
    """Return the indices of every second parameter, and of each type, on which Adafactor's epsilon depends."""
    types = [value.dtype for group in optimizer.param_groups for value in group["params"]]
    places = range(len(types))
    of_types = [[place for place in places if types[place] == one] for one in dict.fromkeys(types)]
    return [[*places[::2]], [*places[1::2]], *(of_types if len(of_types) > 1 else [])]


def _probe_hooks(context: TrainingContext, optimizer: Optimizer) -> None:
    """Raise if step hooks treat a parameter differently when others have no gradients."""
    if not (hooks := step_hooks(optimizer)):
        return
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    what = f"A step hook of the optimizer {type(optimizer).__name__}"
    with preserve_generators(), _left_as_it_is(optimizer, hooks), redirect_stdout(io.StringIO()):
        for scale in sorted(set(PROBE_SCALES)):
            try:
                together, drew = _after_hooks(optimizer, hooks, range(count), scale)
            except Exception as error:  # noqa: BLE001 - a hook may reject random gradients in any way
                _log.warning(
                    "%s cannot be tried on random gradients (%s: %s), so it is not known whether it looks at several "
                    "parameters at once. %s.",
                    *(what, type(error).__name__, error, _split(context)),
                )
                return
            if drew and context.settings.exact:
                raise _draws(context, what)
            for first in (0, 1):
                places = range(first, count, 2)
                try:
                    alone, _ = _after_hooks(optimizer, hooks, places, scale)
                except Exception as error:
                    raise InputError(
                        f"{what} fails when some parameters have no gradients ({type(error).__name__}: {error}). "
                        f"{_split(context)}. Let it leave out a parameter whose grad is None, or use strategy "
                        f"'allreduce'."
                    ) from error
                if not same([alone[place] for place in places], [together[place] for place in places]):
                    raise InputError(
                        f"{what} treats a parameter differently when the others have no gradients: it looks at "
                        f"several at once, such as at the norm of all. {_split(context)}. {_CURE}"
                    )


def step_hooks(optimizer: Optimizer) -> list[Callable[..., Any]]:
    """Return the step hooks of the script."""
    every = [hook for kind in STEP_HOOKS for hook in getattr(optimizer, kind, {}).values()]
    return [hook for hook in every if not getattr(hook, "__module__", "").startswith("paceline.")]


@contextmanager
def _left_as_it_is(optimizer: Optimizer, hooks: list[Callable[..., Any]]) -> Iterator[None]:
    parameters = [value for group in optimizer.param_groups for value in group["params"]]
    weights = [value.detach().clone() for value in parameters]
    groups = [dict(group) for group in optimizer.param_groups]
    held = Attributes({"hook": hooks}, set(map(id, parameters)))
    try:
        yield
    finally:
        held.put_back()
        for group, before in zip(optimizer.param_groups, groups, strict=True):
            group.update(before)
        for value, weight in zip(parameters, weights, strict=True):
            value.data.copy_(weight)
            value.grad = None


def _after_hooks(
    optimizer: Optimizer, hooks: list[Callable[..., Any]], places: Sequence[int], scale: float
) -> tuple[list[list[torch.Tensor]], bool]:
    """Return weights and gradients of all parameters after the hooks, and whether the hooks drew random numbers."""
    parameters = [value for group in optimizer.param_groups for value in group["params"]]
    for place, value in enumerate(parameters):
        seed_torch(place)
        value.data.copy_(torch.randn_like(value))
        gradient = scale * torch.randn_like(value)
        value.grad = gradient if place in places and value.requires_grad else None
    before = generator_states()
    for hook in hooks:
        hook(optimizer, (), {})
    drew = not same_states(before, generator_states())
    return [[one.detach().clone() for one in (value, value.grad) if one is not None] for value in parameters], drew


def check_draws(context: TrainingContext) -> None:
    """Raise if the optimizer drew random numbers in the first update. All workers call this together after it.

    Raises:
        InputError: some worker drew random numbers, workers update different parameters, and the bits must be those
            of one process.
    """
    if context.divides_update and context.settings.exact and any(context.world.gather(context.update.drew, "step")):
        raise _draws(context, f"The optimizer {context.update.kind}")


def _draws(context: TrainingContext, what: str) -> InputError:
    return InputError(
        f"{what} draws random numbers. {_split(context)}, so they are not "
        f"those of one process: leave out exact=True, or use strategy 'allreduce'."
    )


def _split(context: TrainingContext) -> str:
    return f"With strategy {context.settings.strategy!r} different workers update different parameters"


class _ProbeSteps(NamedTuple):
    """Small parameters after some steps, values that all of them share, and whether a step drew random numbers.

    ``shared``: the entries of the groups, and the optimizer's own attributes.
    """

    parameters: list[torch.Tensor]
    shared: dict[str, Any]
    drew: bool


def _alike(left: object, right: object) -> bool:
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return left.shape == right.shape and _same(left, right)
    if isinstance(left, float) and isinstance(right, float):
        return left == right or (math.isnan(left) and math.isnan(right))
    plain = int | float | None
    return left == right if isinstance(left, plain) and isinstance(right, plain) else True


def _same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.allclose(left, right, rtol=0.0, atol=0.0, equal_nan=True)


def _probe_steps(optimizer: Optimizer, places: Sequence[int], sparse: Container[int] = ()) -> _ProbeSteps:
    """Return the result of probe steps in which only the small parameters at ``places`` have gradients.

    Args:
        sparse: places of the parameters whose gradients are sparse.
    """
    small, parameters = copy_small(optimizer, corner_of)
    drew = False
    for step, scale in enumerate(PROBE_SCALES):
        for place, parameter in enumerate(parameters):
            seed_torch(step * len(parameters) + place)
            gradient = scale * torch.randn_like(parameter)
            gradient = gradient.to_sparse(1) if place in sparse else gradient
            parameter.grad = gradient if place in places and parameter.requires_grad else None
        before = generator_states()
        step_of(small)(small)
        drew = drew or not same_states(before, generator_states())
    shared = dict(vars(small)) | {
        f"{key} of group {number}": value
        for number, group in enumerate(small.param_groups)
        for key, value in group.items()
    }
    return _ProbeSteps([parameter.detach() for parameter in parameters], shared, drew)


def step_of(small: Optimizer) -> Callable[[Optimizer], Any]:
    """Return ``step`` of the optimizer's class, without the hooks for all optimizers that torch calls around it."""
    step: Callable[[Optimizer], Any] = inspect.unwrap(
        type(small).step, stop=lambda one: not getattr(one, "hooked", False)
    )
    return step


def copy_small(
    optimizer: Optimizer, shrink: Callable[[torch.Tensor], torch.Tensor], state: bool = True
) -> tuple[Optimizer, list[nn.Parameter]]:
    """Copy an optimizer for small parameters, without its hooks, which are for training steps.

    Its ``step`` is not copied: a schedule may have replaced it, and would step the original optimizer.

    Args:
        optimizer: the optimizer.
        shrink: returns a tensor of the small size for a parameter or a state of its shape.
        state: whether the small parameters get the state of the parameters.
    """
    memo: dict[int, Any] = {}
    parameters: list[nn.Parameter] = []
    for group in optimizer.param_groups:
        for value in group["params"]:
            seed_torch(len(parameters))
            shape = value.new_empty(()).expand(value.shape)  # the values of the parameter may not be computed yet
            small = nn.Parameter(torch.randn_like(shrink(shape)), requires_grad=value.requires_grad)
            memo[id(value)] = small
            parameters.append(small)
    kept = {key: value for key, value in vars(optimizer).items() if key not in ("step", "state")}
    hooks = [key for key in kept if key.startswith(HOOKS_PREFIX) and key.endswith("_hooks")]
    kept.update((key, OrderedDict()) for key in hooks)
    made: Optimizer = object.__new__(type(optimizer))
    vars(made).update(copy.deepcopy(kept, memo))
    made.state = defaultdict(dict)
    for value, states in optimizer.state.items() if state else ():
        for key, entry in states.items() if id(value) in memo else ():  # optimizers may share their state
            alike = isinstance(entry, torch.Tensor) and entry.shape == value.shape
            made.state[memo[id(value)]][key] = shrink(entry).clone() if alike else copy.deepcopy(entry, memo)
    for group in made.param_groups:
        group["lr"] = group.get("lr") or 0.01  # a warm-up may begin with 0
    return made, parameters


def set_initial_state(small: Optimizer, optimizer: Optimizer) -> None:
    """Give a copy's parameters the state that the optimizer's constructor makes, as Adagrad's did until PyTorch 2.12.

    An optimizer that cannot be constructed from groups and defaults gets none.
    """
    groups = [{**group, "params": [*group["params"]]} for group in small.param_groups]
    with suppress(Exception):
        small.state = type(optimizer)(groups, **optimizer.defaults).state if optimizer.state else small.state


def corner_of(value: torch.Tensor) -> torch.Tensor:
    """Return the first elements of a tensor, at most two in each dimension."""
    for axis, size in enumerate(value.shape):
        value = value.detach().narrow(axis, 0, min(size, _LARGEST))
    return value.detach()
