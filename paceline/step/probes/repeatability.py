"""Probe for repeatability: the first microbatch is computed twice before the first step.

If the results differ, the forward pass depends on earlier computations, for example through its own generator, so the
result depends on which worker computes which microbatch. Changed attributes of the model show it too, and are restored.
"""

from __future__ import annotations

import copy
import logging
from dataclasses import replace
from typing import Any

from paceline.data.feed import MicrobatchGroup
from paceline.data.objects.attributes import Attributes, same
from paceline.errors import InputError
from paceline.step.context import TrainingContext
from paceline.step.probes.digests import Digests, Found, difference
from paceline.step.probes.probe import Probe, taking_gradients, warn, without_trace
from paceline.system.torch_internals import version_of

_log = logging.getLogger("paceline")
CURE = (
    "Each worker computes other microbatches, so the result depends on the number of workers. Draw random numbers from "
    "the global generators of torch, random or numpy, which are keyed, and do not keep them; keep what the forward "
    "pass changes in buffers of the model (register_buffer); count steps in the loop, and read neither the rank nor "
    "the clock."
)
_GROWS = (
    "The forward pass puts more into {name} each time. Each worker computes other microbatches: if the loss or the "
    "loop depends on its content, the result depends on the number of workers."
)
_CHANGED = (
    "The backward pass changes the parameter {name!r}, as a hook that makes updates does "
    "(register_post_accumulate_grad_hook). A step has {microbatches} backward passes, on several workers, and one "
    "update: leave the update to the optimizer that paceline.start gets, and remove the hook."
)


_OWN_BACKWARD = (
    "The loss, or forward, calls backward() itself: the parameter {name!r} has a gradient after the forward pass, and "
    "session.step would add the same gradient again. Leave backward() out, and return the loss."
)
_KEPT_GRAPH = (
    "The loss depends on a tensor that an earlier forward pass has kept with its graph, such as a hidden state. Each "
    "worker computes other microbatches, so the result would depend on the number of workers. Carry it as the state of "
    "forward(model, microbatch, state), or compute it again in each forward pass."
)


class _Refused(Exception):
    """A microbatch computes what no step may: the text says what, and the cure."""


def check_repeatable(context: TrainingContext, group: MicrobatchGroup, step: int) -> bool:
    """Compute a microbatch twice and leave no trace. Returns whether the microbatch can be computed.

    Raises:
        InputError: the results differ, and the run is to stop; otherwise the probe warns. Or the backward pass changes
            weights, or is called by the forward pass, or needs the graph of an earlier one.
    """
    try:
        text, grows = _probe(context, group, step)
    except _Refused as error:
        raise InputError(str(error)) from None
    except Exception as error:  # noqa: BLE001 - the step itself will raise it
        _log.debug("a microbatch could not be computed twice: %s", error)
        return False
    if text:
        text = f"{text}. {CURE}"
        if context.settings.stops_at_difference:
            raise InputError(f"{text} With audit_action='warn' training continues.")
        warn(context, text)
        context.probe_results.told.add(False)
    elif grows:
        warn(context, _GROWS.format(name=grows))
    return True


def _probe(context: TrainingContext, group: MicrobatchGroup, step: int) -> tuple[str, str]:
    """Return a message about the problem, and the name of a growing container. Both are empty if all is well."""
    with without_trace(context) as probe:
        first, between, second, after = _twice(context, group, step, probe)
        once = [name for name in first | second if name not in first or name not in second]
        different = next(iter(once), "") or difference([(0, first), (1, second)])[0]
        changed = moved(probe.before, between, after)
        grows = _growing(probe.before, between, after)
    if different:
        return _differing(different, changed), ""
    named = ", ".join(changed[:3])
    text = f"The forward pass changes {named} each time, which is not a buffer of the model" if changed else ""
    return text, next(iter(grows), "")


def differing_text(what: str, changed: list[str]) -> str:
    """Return the message that a microbatch computed twice differs, with the cure.

    Args:
        what: name of the first result that differs.
        changed: names of values that each pass changes.
    """
    return f"{_differing(what, changed)}. {CURE}"


def _differing(what: str, changed: list[str]) -> str:
    named = ", ".join(changed[:3])
    because = (
        f": it changes {named}" if changed else ", because it keeps something from pass to pass, or reads the clock"
    )
    return f"The same microbatch computed twice gives different results: {what} differs{because}"


def _twice(
    context: TrainingContext, group: MicrobatchGroup, step: int, probe: Probe
) -> tuple[Found, Attributes, Found, Attributes]:
    """Return digests of a microbatch's results and the attributes after it, then both again for a second pass."""
    with context.loop.noting_forward():
        first = _computed(context, group, step)
    between = probe.attributes()
    probe.restore_weights()
    return first, between, _computed(context, group, step), probe.attributes()


def what_changes(context: TrainingContext, group: MicrobatchGroup, step: int) -> list[str]:
    """Return the names of values that the forward pass of a microbatch changes. Leaves no trace."""
    try:
        with without_trace(context) as probe:
            _, between, _, after = _twice(context, group, step, probe)
            return moved(probe.before, between, after) or _growing(probe.before, between, after)
    except Exception as error:  # noqa: BLE001 - the cause is optional
        _log.debug("a microbatch could not be computed twice: %s", error)
        return []


def _computed(context: TrainingContext, group: MicrobatchGroup, step: int) -> Found:
    """Return digests of the loss of a microbatch, of the buffers after it, and of its gradients."""
    for one in context.compute.model.parameters():
        one.grad = None
    result = context.compute.forward_pass(replace(group, data=copy.deepcopy(group.data)), step)  # it may change data
    digests = Digests(bool(context.settings.exact))
    digests.add("the loss", result.pair)
    for name, value in zip(context.compute.buffers.names, result.buffers, strict=True):
        digests.add(f"the buffer {name!r}", value)
    parameters = context.update.parameters
    versions = {name: version_of(parameter) for name, parameter in parameters.items()}
    for name, parameter in parameters.items():
        if parameter.grad is not None:
            raise _Refused(_OWN_BACKWARD.format(name=name))
    try:
        with taking_gradients(parameters, lambda name, value: digests.add(f"the gradient of {name!r}", value)):
            result.total.backward()
    except RuntimeError as error:
        if "backward through the graph a second time" in str(error):
            raise _Refused(_KEPT_GRAPH) from None
        raise
    for name, parameter in parameters.items():
        if version_of(parameter) != versions[name]:
            raise _Refused(_CHANGED.format(name=name, microbatches=context.order.microbatches))
    return digests.found()


def moved(before: Attributes, between: Attributes, after: Attributes) -> list[str]:
    """Return the names of values that both passes changed: generators and tensors first, then numbers."""
    names = [name for name, value in after.values.items() if _goes_on(name, value, before, between)]
    return sorted(names, key=lambda name: isinstance(after.values[name], bool | int | float))


def _growing(before: Attributes, between: Attributes, after: Attributes) -> list[str]:
    """Return the names of containers to which both passes have added entries."""
    sizes = between.sizes
    return [name for name, size in after.sizes.items() if before.sizes.get(name, 0) < sizes.get(name, 0) < size]


def _goes_on(name: str, value: Any, before: Attributes, between: Attributes) -> bool:
    """Return whether both passes changed a value. A value that each pass sets to the same does not count."""
    if name not in between.values or same(value, between.values[name]):
        return False
    return name not in before.values or not same(before.values[name], between.values[name])
