"""Context for probes, which leave no trace: no gradient, buffer, weight, random number or attribute."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch

from paceline.data.keys import preserve_generators
from paceline.data.objects.attributes import Attributes, same
from paceline.step.context import TrainingContext
from paceline.system.torch_internals import gradient_hooks

_log = logging.getLogger("paceline")


def warn(context: TrainingContext, text: str) -> None:
    """Warn the user about the finding of a probe."""
    _log.warning(text)
    context.events.mark("note", text=text, warning=True)
    context.probe_results.warnings.append(text)


class Probe(NamedTuple):
    """Handle of a probe: ``attributes`` returns current attributes, ``restore_weights`` undoes changes of weights."""

    before: Attributes
    attributes: Callable[[], Attributes]
    restore_weights: Callable[[], None]


@contextmanager
def without_trace(context: TrainingContext) -> Iterator[Probe]:
    """Probe the forward pass in this context, with the buffers at the start of the step, then restore everything."""
    compute, model = context.compute, context.compute.model
    parameters = list(model.parameters())
    gradients = [value.grad for value in parameters]
    weights = [value.detach().clone() for value in parameters] if compute.may_change_weights else []
    known = {id(value) for value in [*parameters, *model.buffers()]}
    roots = {"model": model, "forward": compute.forward}

    def restore_weights() -> None:
        for value, kept in zip(parameters, weights, strict=False):
            if not same(value, kept):
                value.data.copy_(kept)

    compute.buffers.begin()
    following = None if compute.carried is None else compute.carried.following()
    before = Attributes(roots, known)
    hooks = [hook for value in parameters for hook in gradient_hooks(value)]  # may keep values such as running norms
    of_hooks = Attributes({"hooks": hooks}, known)
    try:
        with preserve_generators():
            yield Probe(before, lambda: Attributes(roots, known), restore_weights)
    finally:
        before.put_back()
        of_hooks.put_back()
        restore_weights()
        compute.buffers.put_back()
        if compute.carried is not None and following is not None:
            compute.carried.set_following(following)
        for value, gradient in zip(parameters, gradients, strict=True):
            value.grad = gradient


@contextmanager
def taking_gradients(
    parameters: Mapping[str, torch.nn.Parameter], take: Callable[[str, torch.Tensor], None]
) -> Iterator[None]:
    """Pass each gradient of a backward pass to ``take``, and free it, so that all gradients never exist together."""

    def arrive(name: str, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:  # else a hook of the script has taken it
            take(name, parameter.grad)
            parameter.grad = None

    trained = [(name, value) for name, value in parameters.items() if value.requires_grad]
    hooks = [value.register_post_accumulate_grad_hook(partial(arrive, name)) for name, value in trained]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
