"""Metrics: functions for means, and objects with ``update``, ``compute`` and ``reset`` for everything else.

Every worker updates a metric object with the results of all chunks, in order. So the object needs no way to merge
states, and its value does not depend on the number of workers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from paceline.adapters.keras import loss as keras_loss
from paceline.adapters.keras.kinds import is_keras
from paceline.comm.values import encode
from paceline.data.loading.prefetch import to_device
from paceline.data.nested import CollatedSizes, map_tensors
from paceline.errors import InputError
from paceline.step.context import TrainingContext
from paceline.step.loss import Forward, described, is_counted, pair_of, sum_and_count
from paceline.step.probes.probe import warn

Arguments = Callable[[nn.Module, Any], tuple[Any, ...]]
_AVAILABLE = "distributed_available_fn"
"""Attribute by which a metric of torchmetrics checks whether there are other workers."""
_UNEVEN = "evaluate: the collate function returned"


def is_object(metric: Any) -> bool:
    """Return whether a metric has a state, as metrics of torchmetrics have."""
    return all(callable(getattr(metric, name, None)) for name in ("update", "compute", "reset"))


class Metrics:
    """One or several metrics, computed from the same forward pass.

    Args:
        given: a function, an object, None for the loss, or several of these by name.
        forward: ``forward(model, microbatch)`` returns the arguments of the metrics, as a tuple or a single value. If
            None, metrics get the output and the target with ``by_loss``, otherwise the model and the microbatch.
        by_loss: whether the data set gives pairs (input, target).

    Raises:
        InputError: an argument is not a metric, or nothing defines the arguments of a metric object.
    """

    def __init__(self, context: TrainingContext, given: Any, forward: Forward | None, *, by_loss: bool) -> None:
        self._context = context
        self._sizes = None if context.collate is None else CollatedSizes()
        self._several = isinstance(given, Mapping)
        named = dict(given) if self._several else {"": given}
        self._metrics: dict[str, Any] = {name: keras_loss.adapted(metric) for name, metric in named.items()}
        if not self._metrics:
            raise InputError("evaluate: the dictionary of metrics is empty.")
        if forward is not None and all(metric is None for metric in self._metrics.values()):
            raise InputError(
                "evaluate: forward= defines the arguments of metrics, and there is no metric: the loss is that of the "
                "session. Give a metric as well, or leave out forward=."
            )
        if context.compute.batch_loss is not None and any(metric is None for metric in self._metrics.values()):
            raise InputError(
                "evaluate: the loss of this session is one over a whole batch, not a mean over the samples of a data "
                "set: give a metric(model, microbatch)."
            )
        self._arguments = _arguments(forward, by_loss)
        for name, metric in self._metrics.items():
            if is_keras(metric, "Metric"):
                raise InputError(
                    f"{_named(name)} is a {type(metric).__name__} of Keras, which gets the target first and keeps a "
                    f"running mean: give a function of (output, target), or an object with update, compute and reset."
                )
            if isinstance(metric, type) or not (metric is None or callable(metric) or is_object(metric)):
                raise InputError(
                    f"{_named(name)} must be a function, an object with update, compute and reset, or None for the "
                    f"loss, but it is {described(metric)}."
                )
            if is_object(metric) and forward is None and not by_loss:
                raise InputError(
                    f"{_named(name)} is a {type(metric).__name__}, and in a session with forward= the arguments of its "
                    f"update are unknown: give evaluate(..., forward=...), a function of (model, microbatch) "
                    f"that returns (output, target)."
                )

    def compute(self, model: nn.Module, data: Any, samples: int) -> list[Any]:
        """Return each metric's values for these samples: a sum and a count, or arguments for an object's update."""
        given = None if all(one is None for one in self._metrics.values()) else self._arguments(model, data)
        found: list[Any] = []
        mean = False
        for name, metric in self._metrics.items():
            if metric is None:
                loss = self._context.compute.forward(model, data)
                mean = mean or not is_counted(loss)
                total, count = sum_and_count(loss, samples)
                found.append((float(total), float(count)))
            elif is_object(metric):
                assert given is not None
                found.append(map_tensors(lambda tensor: tensor.detach().to("cpu", copy=True), given))
            else:
                assert given is not None
                value = metric(*given)
                mean = mean or not isinstance(value, tuple)
                found.append(_sum_and_count(name, value, samples))
        if (sizes := self._sizes) is not None:
            sizes.add(samples, data)
            if sizes.uneven and mean:
                self._warn(sizes.uneven)
        return found

    def _warn(self, sizes: str) -> None:
        if not any(text.startswith(_UNEVEN) for text in self._context.probe_results.warnings):  # warned before
            warn(
                self._context,
                f"{_UNEVEN} {sizes}. A metric is a mean over a microbatch, which is weighted by its items, so samples "
                f"do not have equal weight: return the pair (sum, count).",
            )

    def combine(self, contributions: list[Any]) -> Any:
        """Return the value of the metric, or the values by name."""
        values = {
            name: self._value(name, metric, [one[place] for one in contributions])
            for place, (name, metric) in enumerate(self._metrics.items())
        }
        return values if self._several else values[""]

    def _value(self, name: str, metric: Any, found: list[Any]) -> Any:
        if metric is not None and is_object(metric):
            return _computed(name, metric, found, self._context.world.device)
        count = math.fsum(pair[1] for pair in found)
        if count == 0:
            raise InputError(f"{_named(name)} counted nothing in the whole data set: the sum of its counts is 0.")
        return math.fsum(pair[0] for pair in found) / count


def _arguments(forward: Forward | None, by_loss: bool) -> Arguments:
    if forward is not None:
        given = forward

        def arguments(model: nn.Module, data: Any) -> tuple[Any, ...]:
            values = given(model, data)
            return values if isinstance(values, tuple) else (values,)

        return arguments
    if by_loss:

        def output_and_target(model: nn.Module, data: Any) -> tuple[Any, ...]:
            features, target = pair_of(data)
            return model(features), target

        return output_and_target
    return lambda model, data: (model, data)


def _computed(name: str, metric: Any, found: list[Any], device: torch.device) -> Any:
    """Update a metric object with all results and return its value."""
    with _alone(metric):
        metric.reset()
        for given in found:
            metric.update(*to_device(given, device))
        value = _plain(metric.compute())
    try:
        encode(value)
    except TypeError as error:
        raise InputError(
            f"{_named(name)} computes something that cannot be kept in checkpoints: {error}. Let it return numbers, "
            f"tensors, or containers of these."
        ) from None
    return value


@contextmanager
def _alone(metric: Any) -> Iterator[None]:
    """Hide the other workers from metrics of torchmetrics, which would add up states that every worker has in full."""
    parts = metric.modules() if isinstance(metric, nn.Module) else [metric]
    before = [(part, vars(part)[_AVAILABLE]) for part in parts if _AVAILABLE in getattr(part, "__dict__", ())]
    for part, _ in before:
        setattr(part, _AVAILABLE, lambda: False)
    try:
        yield
    finally:
        for part, function in before:
            setattr(part, _AVAILABLE, function)


def _plain(value: Any) -> Any:
    """Convert scalars to numbers, tensors to host tensors, and mappings to dictionaries."""
    if isinstance(value, torch.Tensor):
        return value.item() if value.ndim == 0 else value.detach().cpu()
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        return value.item()
    if type(value).__module__ == "numpy" and hasattr(value, "dtype") and not value.dtype.hasobject:
        return torch.from_numpy(value)
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_plain, value)) if type(value) in (list, tuple) else tuple(map(_plain, value))
    return value


def numbers_in(value: Any, name: str) -> dict[str, float]:
    """Return the numbers in the result of an evaluation, by their names in the records."""
    if isinstance(value, bool | int | float):
        return {name: float(value)}
    found: dict[str, float] = {}
    for key, one in value.items() if isinstance(value, Mapping) else ():
        found |= numbers_in(one, f"{name}.{key}" if name else str(key))
    return found


def _named(name: str) -> str:
    return f"The metric {name!r}" if name else "The metric"


def _sum_and_count(name: str, value: Any, samples: int) -> tuple[float, float]:
    try:
        if isinstance(value, tuple):
            total, count = value
            return float(total), float(count)
        return float(value) * samples, float(samples)
    except (TypeError, ValueError, RuntimeError):
        raise InputError(
            f"{_named(name)} must return a number, the mean over the samples it is given, or a pair (sum, count), "
            f"but it returned {described(value)}."
        ) from None
