"""Loss and metrics that a forward pass returns, as sums and their divisors.

::

    loss                                     a scalar, the mean over the samples; or an object with .loss
    total, count                             a mean over something other than samples
    loss, {"accuracy": value}                either of these with metrics, each a scalar mean or a pair of its own
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn

from paceline.adapters.keras import loss as keras_loss
from paceline.errors import InputError
from paceline.system.usage import does_not_take

Forward = Callable[[nn.Module, Any], Any]
_OF_LOSS = "_paceline_of_loss"
_ONE_CALL = (
    "forward(model, microbatch) {does}. A model that is cut into stages is called once for each microbatch, with one "
    "value, because no worker has all of it: concatenate several views of the samples, put several inputs into a tuple "
    "or dictionary, and use parts of the model in its own forward only; or use strategy 'allreduce' or 'sharded'."
)


class Loss(NamedTuple):
    """Loss and metrics of a forward pass.

    ``total``: sum of the losses, to be differentiated. ``counted``: divisor of ``total``. ``metrics``: a sum and a
    divisor for each name, in alphabetical order.
    """

    total: torch.Tensor
    counted: torch.Tensor | float
    metrics: dict[str, tuple[Any, Any]]

    def pair(self) -> torch.Tensor:
        """Return sum and count of the loss, then of each metric, as a float64 tensor on the device of the loss."""
        numbers = [self.total, self.counted, *(number for metric in self.metrics.values() for number in metric)]
        total = self.total
        if total.device.type == "cpu":
            return torch.tensor([_on_host(number) for number in numbers], dtype=torch.float64)
        return torch.stack([_on_device(number, total.device) for number in numbers])


def _on_host(number: Any) -> float:
    return float(number.item() if isinstance(number, torch.Tensor) else number)


def _on_device(number: Any, device: torch.device) -> torch.Tensor:
    if isinstance(number, torch.Tensor):
        return number.detach().to(device, torch.float64, non_blocking=True)
    return torch.full((), float(number), dtype=torch.float64, device=device)


def loss_of_result(value: Any, samples: int) -> Loss:
    """Convert the result of a forward pass over ``samples`` samples to a :class:`Loss`.

    Raises:
        InputError: the loss is neither a scalar tensor nor a pair of a scalar and a count, or a metric is not a number.
    """
    metrics: Mapping[Any, Any] = {}
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping):
        value, metrics = value
    total, count = sum_and_count(value, samples)
    return Loss(total, count, {name: _metric(name, metrics[name], samples) for name in _sorted(metrics)})


def sum_and_count(value: Any, samples: int) -> tuple[torch.Tensor, torch.Tensor | float]:
    """Convert a loss to a sum and its divisor."""
    value = without_metrics(value)
    is_pair = _is_pair(value)
    total, count = value if is_pair else (_loss_in(value), samples)
    if not isinstance(total, torch.Tensor) or not _is_number(total) or not _is_number(count):
        cure = "Reduce it, for example with .mean()"
        if total is None:
            cure = "The function returns nothing: end it with `return loss`"
        elif isinstance(total, int | float):
            cure = "Return the tensor itself, without .item() or float()"
        elif isinstance(total, torch.Tensor) and total.is_complex():
            cure = "Return a real number, for example by .abs()"
        elif not isinstance(total, torch.Tensor) or total.ndim:
            cure += ". Outputs for a loss over the whole batch need batch_loss= in paceline.start"
        raise InputError(
            f"The loss must be a scalar tensor (the mean over the samples it is given), a pair (sum, count), or an "
            f"object with such a .loss, alone or with metrics as in (loss, {{'accuracy': value}}); but it is "
            f"{described(value)}. {cure}."
        )
    if not is_pair:
        total = (total if total.dtype in (torch.float32, torch.float64) else total.float()) * samples
    return total, count


def without_metrics(value: Any) -> Any:
    """Return the loss in the result of a forward pass, in any of its forms."""
    return value[0] if _is_pair(value) and isinstance(value[1], Mapping) else value


def is_counted(value: Any) -> bool:
    """Return whether the loss in the result of a forward pass is a pair (sum, count)."""
    return _is_pair(without_metrics(value))


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2


def _loss_in(value: Any) -> Any:
    """Return the loss held by a model's output, as in Hugging Face models. Other values are returned unchanged."""
    if value is None or isinstance(value, torch.Tensor):
        return value
    found = value.get("loss", value) if isinstance(value, Mapping) else getattr(value, "loss", value)
    if found is None:
        raise InputError(
            f"The {type(value).__name__} that the forward pass returns has no loss (it is None): give the model the "
            f"labels too, as in model(**microbatch) with a key 'labels'."
        )
    return found


def _sorted(metrics: Mapping[Any, Any]) -> list[str]:
    for name in metrics:
        if not isinstance(name, str):
            raise InputError(f"The name of a metric must be a text, but it is {name!r}, a {type(name).__name__}.")
    return sorted(metrics)


def _metric(name: str, value: Any, samples: int) -> tuple[Any, Any]:
    """Convert a metric to a sum and a count."""
    is_pair = _is_pair(value)
    total, count = value if is_pair else (value, samples)
    if not _is_number(total) or not _is_number(count):
        raise InputError(
            f"The metric {name!r} that the forward pass returns must be a number or a scalar tensor, the mean over the "
            f"samples it is given, or a pair (sum, count) of such, but it is {described(value)}."
        )
    if is_pair:
        return total, count
    return (total.detach().double() if isinstance(total, torch.Tensor) else total) * samples, samples


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.ndim == 0 and not value.is_complex()
    return isinstance(value, int | float) or (hasattr(value, "__float__") and getattr(value, "ndim", 0) == 0)


def described(value: Any) -> str:
    """Describe a value for an error message."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)}" if value.ndim else f"a tensor of type {value.dtype}"
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} with the keys {', '.join(repr(key) for key in value)}"
    if isinstance(value, tuple) and 0 < len(value) <= 4:
        return f"a tuple of {', '.join(map(described, value))}"
    name = type(value).__name__
    return f"an {name}" if name[0] in "aeiouAEIOU" else f"a {name}"


def check_function(argument: str, value: Any, example: str, *takes: str) -> None:
    """Raise if an argument of ``start`` is not a function, or does not take the arguments ``takes``."""
    if value is not None and not callable(value):
        raise InputError(f"{argument} must be a function, but it is {described(value)}. Write, for example, {example}.")
    if value is not None and not isinstance(value, type) and (why := does_not_take(value, *takes)):
        raise InputError(
            f"{argument} must be a function of ({', '.join(takes)}), but this call would fail: {why}. Write, for "
            f"example, {example}."
        )


class StandIn:
    """Stand-in for a model that is cut. ``forward`` may call it once, with one value, and use nothing else of it.

    Args:
        call: function that is called instead of the model.
    """

    def __init__(self, call: Callable[[Any], Any]) -> None:
        self._call: Callable[[Any], Any] | None = call

    def __call__(self, *values: Any, **named: Any) -> Any:
        """Call the function, unless ``forward`` calls the model again or with another number of values."""
        call, self._call = self._call, None
        if call is None or len(values) != 1 or named:
            given = ", ".join([f"{len(values)} value{'s' * (len(values) != 1)}", *map(repr, named)])
            raise InputError(_ONE_CALL.format(does=f"calls the model {'twice' if call is None else f'with {given}'}"))
        return call(values[0])

    def __getattr__(self, name: str) -> NoReturn:
        """Refuse to use a part of the model."""
        raise InputError(_ONE_CALL.format(does=f"uses {name!r} of the model"))

    def __getitem__(self, _: object) -> NoReturn:
        """Refuse to use a layer of the model, as ``__getattr__`` does."""
        self.__getattr__("__getitem__")

    def check_called(self) -> None:
        """Raise InputError if ``forward`` has not called the model."""
        if self._call is not None:
            raise InputError(_ONE_CALL.format(does="does not call the model that it gets"))


def check_names(known: tuple[str, ...], names: tuple[str, ...]) -> None:
    """Raise InputError if the names of metrics have changed."""
    if names == known:
        return
    missing = [repr(name) for name in known if name not in names]
    more = [repr(name) for name in names if name not in known]
    differs = " and ".join(f"{what} {', '.join(some)}" for what, some in (("without", missing), ("with", more)) if some)
    raise InputError(
        f"The forward pass returned metrics {differs}, unlike for the microbatches before. Return the same names for "
        f"every microbatch; a metric that has nothing to count is the pair (0, 0)."
    )


def loss_of(loss: Callable[[Any, Any], Any]) -> Forward:
    """Return the forward pass for ``loss(model(input), target)``. ``loss`` may also be a metric."""
    if isinstance(loss, type):
        raise InputError(f"{loss.__name__} is a class: give an object of it, {loss.__name__}().")
    loss = keras_loss.adapted(loss)

    def forward(model: nn.Module, data: Any) -> Any:
        features, target = pair_of(data)
        return loss(model(features), target)

    setattr(forward, _OF_LOSS, loss)
    return forward


def is_of_loss(forward: Forward) -> bool:
    """Return whether a forward pass was made by :func:`loss_of`."""
    return loss_given(forward) is not None


def loss_given(forward: Forward) -> Callable[[Any, Any], Any] | None:
    """Return the loss of which :func:`loss_of` has made a forward pass, or None."""
    return getattr(forward, _OF_LOSS, None)


def pair_of(data: Any) -> tuple[Any, Any]:
    """Return the model's input and the target in a batch of data. Raises InputError if the batch is not a pair."""
    if isinstance(data, Mapping):
        raise InputError(
            f"With a loss or metric of (output, target) the data set must give pairs (input, target), but it gives "
            f"dictionaries with the keys {', '.join(map(repr, data))}, and it is unknown which is the target. Use "
            f"forward=, for example: def forward(model, batch): return model(**batch).loss."
        )
    try:
        if isinstance(data, torch.Tensor):
            raise TypeError
        features, target = data
    except (TypeError, ValueError):
        raise InputError(
            f"With a loss or metric of (output, target) the data set must give pairs (input, target); a batch of "
            f"it is {described(data)}. Use forward(model, microbatch) for anything else."
        ) from None
    return features, target
