"""Global norm of gradients that are spread over the workers."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from functools import reduce

import torch
from torch import nn

from paceline.comm.collectives.all_gather import AllGather
from paceline.comm.collectives.step_header import NORMS_TAG
from paceline.comm.world import World
from paceline.system.torch_internals import foreach_norm

_NOT_HERE = -1.0  # placeholder for the norm of a gradient that this worker does not have


class GlobalNorm:
    """Global norm of tensors of which each worker has some, the same on all workers. All workers call it together."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._gather: AllGather | None = None

    def of_gradients(self, parameters: Mapping[str, nn.Parameter], own: Container[str]) -> torch.Tensor:
        """Return the global norm of the gradients of all parameters.

        Args:
            own: names of the parameters whose ``.grad`` this worker contributes. No two workers share a name.
        """
        named = enumerate(parameters.items())
        given = {place: one.grad for place, (name, one) in named if name in own and one.grad is not None}
        norms = dict(zip(given, foreach_norm([*given.values()]), strict=True)) if given else {}
        return self.of(norms, [value.dtype for value in parameters.values()])

    def of(self, own: Mapping[int, torch.Tensor], dtypes: Sequence[torch.dtype]) -> torch.Tensor:
        """Return the global norm from the norm of each tensor.

        Args:
            own: norms that this worker contributes, by index. No two workers contribute the same index.
            dtypes: type of the tensor at each index.
        """
        world = self._world
        if self._gather is None:
            self._gather = AllGather(world, NORMS_TAG, 8 * len(dtypes))
        here = torch.full((len(dtypes),), _NOT_HERE, dtype=torch.float64)
        if own:
            here[[*own]] = torch.stack([*own.values()]).double().cpu()
        everyone = self._gather.start(here.to(world.device)).wait().cpu().amax(0)
        known = everyone != _NOT_HERE
        if not known.any():
            return torch.zeros(())
        types = dict.fromkeys(dtype.to_real() for dtype, one in zip(dtypes, known.tolist(), strict=True) if one)
        norms_of_all = everyone[known].to(reduce(torch.promote_types, types))
        # on the device, where an update of all parameters computes it: the host would round it differently
        result: torch.Tensor = torch.linalg.vector_norm(norms_of_all.to(world.device))
        return result
