"""Parameters outside of the model that the loss reads, and that an optimizer of the script itself trains.

::

    session.step   backward passes of this worker's microbatches add to temp.grad; nothing sums it over the workers
    the loop       own.step(): the check of an optimizer step finds the gradient as the step has left it
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from paceline.data.objects.attributes import Attributes
from paceline.system.torch_internals import version_of

_OWN_GRADIENT = (
    "{name} is a parameter that the loss reads and the model does not have, and the loop trains it. After session.step "
    "its gradient is the sum over the microbatches that this worker has computed, so each worker trains it "
    "differently. Register it in the model, as self.{key} = torch.nn.Parameter(...), and read it there: then the "
    "optimizer of the session trains it."
)


class OutsideParameters:
    """Detector of optimizer steps with a gradient that ``session.step`` has left outside of the model.

    A loop that computes the gradients itself, or sums them over the workers, trains all workers alike and is correct. A
    loop that changes the gradient in place, as ``clip_grad_norm_`` does, passes for such a loop.

    Args:
        held: values that the model, the loss and the data hold.
        known: ids of the parameters of the model.

    Attributes:
        parameters: the parameters by name.
        tell: callback for the message.
    """

    def __init__(self, held: Attributes | None = None, known: frozenset[int] = frozenset()) -> None:
        found = {} if held is None else dict(_parameters(held))
        self.parameters = {name: one for name, one in found.items() if id(one) not in known}
        self.tell: Callable[[str], None] = lambda text: None
        self._before: dict[str, tuple[int, int]] = {}
        self._told = False
        self._left: dict[str, tuple[ref[torch.Tensor], int]] = {}  # gradients that the last step has left
        self._hook = register_optimizer_step_pre_hook(self._check) if self.parameters else None

    def begin_step(self) -> None:
        """Remember the gradients before a step."""
        self._left = {}
        self._before = {name: _state(one.grad) for name, one in self.parameters.items()}

    def end_step(self) -> None:
        """Remember the gradients that a step has changed."""
        for name, one in self.parameters.items() if not self._told else ():
            if one.grad is not None and _state(one.grad) != self._before.get(name):
                self._left[name] = ref(one.grad), version_of(one.grad)

    def _check(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: dict[str, Any]) -> None:
        """Send the message if an optimizer without a closure is about to use a gradient that a step has left."""
        if not self._left or len(args) > 1 or kwargs.get("closure") is not None:
            return
        trained = {id(one) for group in optimizer.param_groups for one in group["params"]}
        for name, (left, version) in self._left.items():
            one = self.parameters[name]
            if id(one) in trained and one.grad is not None and one.grad is left() and version_of(one.grad) == version:
                self._left, self._told = {}, True  # torch iterates over its hooks now, so this one stays
                self.tell(self.text(name))
                return

    def text(self, name: str) -> str:
        """Return the message about a parameter that the loop trains."""
        short = re.sub(r"\.(\d+)$", r"[\1]", name.removeprefix("__main__."))  # an entry of a list
        key = short.partition("[")[0].rpartition(".")[2]
        return _OWN_GRADIENT.format(name=short, key=key if key.isidentifier() else "value")

    def end(self) -> None:
        """Stop checking optimizer steps."""
        self._left = {}
        if self._hook is not None:
            self._hook.remove()
            self._hook = None


def _parameters(held: Attributes) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that optimizers can train, by name."""
    for owner, entries in held.owners.items():
        for key, value in [*entries.items()]:
            if isinstance(value, torch.Tensor) and value.is_leaf and value.requires_grad:
                yield f"{owner}.{key}", value
    for name, one in held.objects.items():
        if isinstance(one, nn.Module):
            yield from ((f"{name}.{key}", value) for key, value in one.named_parameters() if value.requires_grad)


def _state(gradient: torch.Tensor | None) -> tuple[int, int]:
    return (0, 0) if gradient is None else (id(gradient), version_of(gradient))
