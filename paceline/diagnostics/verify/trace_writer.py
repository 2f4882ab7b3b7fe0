"""Writer of the state after each step, as a hash and two numbers per tensor, for ``paceline verify``."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import lru_cache

import torch

from paceline.checkpoint.tensors import hash_of
from paceline.environments import env
from paceline.step.context import TrainingContext


class TraceWriter:
    """Writer of ``trace.jsonl``: the state before the first step and after each step."""

    def __init__(
        self, wanted: env.Trace, context: TrainingContext, state: Callable[[], Mapping[str, torch.Tensor]]
    ) -> None:
        self.steps = wanted.steps
        self._state = state
        self._parameters = context.update.parameters
        self._has_gradients = context.replicated or context.world.size == 1
        self._file = (wanted.directory / "trace.jsonl").open("w") if context.world.rank == 0 else None
        epsilon = max(
            (torch.finfo(value.dtype).eps for value in self._parameters.values() if value.is_floating_point()),
            default=0.0,
        )
        self._write(
            {
                "step": -1,
                "loss": None,
                "samples": None,
                "learning_rate": None,
                "gradient": {},
                "epsilon": torch.finfo(getattr(torch, context.settings.autocast)).eps
                if context.settings.autocast
                else epsilon,
                "exact": context.settings.exact,
                "threads": torch.get_num_threads(),
                "batch": context.order.batch,
            }
        )

    def step(self, step: int, loss: float, samples: int, learning_rate: float) -> None:
        """Record the state after a step, and the gradient unless each worker has only a part of it."""
        gradients = {name: value.grad for name, value in self._parameters.items() if value.grad is not None}
        sketches = {name: sketch(value) for name, value in gradients.items()} if self._file else {}
        self._write(
            {
                "step": step,
                "loss": loss,
                "samples": samples,
                "learning_rate": learning_rate,
                "gradient": sketches if self._has_gradients else None,
            }
        )

    def _write(self, line: dict[str, object]) -> None:
        if self._file is not None:
            line["state"] = {name: sketch(value) for name, value in self._state().items()}
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()


def sketch(tensor: torch.Tensor) -> tuple[str, float, float]:
    """Return a short hash, the 2-norm, and the dot product with a fixed vector of random signs."""
    flat = tensor.detach().reshape(-1).double().cpu()
    return hash_of(tensor).hex()[:16], flat.norm().item(), flat.dot(_signs(flat.numel())).item()


@lru_cache(maxsize=32)
def _signs(length: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(length)
    return torch.randint(0, 2, (length,), generator=random, dtype=torch.float64) * 2 - 1
