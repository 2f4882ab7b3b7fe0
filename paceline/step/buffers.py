"""Model buffers that the forward pass changes, such as running statistics."""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass

import torch
from torch import nn

from paceline.errors import InputError
from paceline.system.torch_internals import AnyNorm, own_buffers, version_of


@dataclass
class _Buffer:
    """Buffer of a module, with its tensor, and that tensor's value and version at the start of the step."""

    module: nn.Module
    key: str
    tensor: torch.Tensor
    start: torch.Tensor
    version: int

    def now(self) -> torch.Tensor:
        current = own_buffers(self.module)[self.key]
        return self.tensor if current is None else current

    def touched(self) -> bool:
        return self.now() is not self.tensor or version_of(self.tensor) != self.version

    def take(self) -> None:
        """Save the current buffer as its value at the start of the step."""
        self.tensor = self.now()
        if self.start.shape == self.tensor.shape:
            self.start.copy_(self.tensor)
        else:
            self.start = self.tensor.detach().clone()
        self.version = version_of(self.tensor)

    def put_back(self) -> None:
        if self.tensor.shape == self.start.shape:
            self.tensor.data.copy_(self.start)
        else:  # a quantization observer sets the size on first use
            self.tensor.data = self.start.clone()
        own_buffers(self.module)[self.key] = self.tensor
        self.version = version_of(self.tensor)


class Buffers:
    """Buffers that the forward pass changes, with a value for each microbatch.

    ``live`` are the buffers that change on this worker, ``agreed`` the buffers that change on any worker. ``fixed``:
    whether both are known. ``added`` are the names of buffers that grow with the number of samples.

    Each microbatch starts from the buffers at the start of the step. After the step, a buffer is the mean over samples
    of the values that the microbatches left in it (rounded if it is an integer). A buffer that grows with the number of
    samples grows by the sum of all increments. So the result does not depend on which worker computed which microbatch.
    Statistics of batch-norm layers are known to change. Other buffers are watched during the first step.
    """

    def __init__(self, model: nn.Module) -> None:
        self._all = _found(model)
        self.live = _statistics(model)
        self.agreed = self._statistics = self.live
        self.added: set[str] = set()
        self.fixed = False
        self._dirty = False

    def fix(self, live: Iterable[str]) -> list[int]:
        """Fix which buffers change. All workers call this together after the first step.

        Until then :meth:`collect` returns all buffers. Returns the indices of the changing buffers among them.
        """
        known = set(live)
        self.live = self.agreed = [name for name in self._all if name in known]
        self.fixed = True
        return [place for place, name in enumerate(self._all) if name in known]

    def restrict(self, part: Container[str]) -> None:
        """Restrict the changing buffers to those in the part of the model that this worker computes."""
        self.live = [name for name in self.agreed if name in part]

    def fix_part(self, part: Container[str]) -> None:
        """Fix, on this worker alone, the buffers seen to change in the first step, and restrict them to ``part``."""
        known = {*self.agreed, *self.live}
        self.fix(known)
        self.restrict(part)

    def examples(self) -> list[torch.Tensor]:
        """Return a tensor with the shape and dtype of each sum of :meth:`collect`, for the changing buffers."""
        return [self._summable(name, self._all[name].now().detach()) for name in self.live]

    def move_to(self, device: torch.device) -> None:
        """Move the saved values to the device of the model."""
        for buffer in self._all.values():
            buffer.start = buffer.start.to(device)

    def begin(self) -> None:
        """Save the current buffers as the values at the start of the step."""
        for name, buffer in self._all.items():
            if name in self.live or buffer.touched():
                buffer.take()
        self._dirty = False

    def reset(self) -> None:
        """Restore the changing buffers to their values at the start of the step."""
        if self._dirty:
            for name in self.live:
                self._all[name].put_back()
        self._dirty = False

    def put_back(self) -> None:
        """Restore every buffer to its value at the start of the step, even if the forward pass raised."""
        for name, buffer in self._all.items():
            if name in self.live or self._changed(buffer):
                buffer.put_back()
        self._dirty = False

    def of(self, module: nn.Module) -> frozenset[str]:
        """Return the names of the buffers of a module and its submodules."""
        inside = set(module.modules())
        return frozenset(name for name, buffer in self._all.items() if buffer.module in inside)

    def copies(self, part: Container[str]) -> list[tuple[nn.Module, str, torch.Tensor]]:
        """Copy the changing buffers in a part of the model. Returns each copy with its module and key."""
        buffers = [self._all[name] for name in self.names_in(part)]
        return [(buffer.module, buffer.key, buffer.now().detach().clone()) for buffer in buffers]

    def collect(self, samples: int, whole: int, part: Container[str] | None = None) -> list[torch.Tensor]:
        """Return the buffers after a microbatch's forward pass, weighted by its number of samples.

        Call this right after the forward pass of the microbatch.

        Args:
            whole: number of samples in the batch, by which the sum over all microbatches is divided.
            part: names of the buffers in a part of the model. Defaults to the whole model.
        """
        if not self._all:
            return []
        for name, buffer in self._all.items():
            if name not in self.live and self._changed(buffer):
                self._discover(name)
        self._dirty = bool(self.live)
        names = self.names if part is None else self.names_in(part)
        return [self._share(name, samples, whole) for name in names]

    def _share(self, name: str, samples: int, whole: int) -> torch.Tensor:
        now = self._summable(name, self._all[name].now().detach())
        if name not in self.added:
            return now * samples
        start = self._summable(name, self._all[name].start)
        return start * samples + (now - start) * whole

    def _summable(self, name: str, value: torch.Tensor) -> torch.Tensor:
        return value.double() if name in self.added and not value.is_complex() else summable(value)

    @property
    def may_count(self) -> bool:
        """Whether the model has buffers other than batch-norm statistics."""
        return len(self._all) > len(self._statistics)

    def state(self, step: int) -> list[str]:
        """Return the names of buffers that grow with the number of samples, for a checkpoint or another worker."""
        return sorted(self.added)

    def load(self, state: list[str]) -> None:
        """Restore what :meth:`state` returned."""
        self.added.update(name for name in state if name in self._all)

    def grown(self) -> dict[str, torch.Tensor]:
        """Return the change of each buffer since the start of the step, except for batch-norm statistics."""
        return {
            name: summable(buffer.now().detach()).double() - summable(buffer.start).double()
            for name, buffer in self._all.items()
            if name not in self._statistics
            and not buffer.start.is_complex()
            and buffer.start.shape == buffer.now().shape  # a quantization observer changes the shape
        }

    @property
    def names(self) -> list[str]:
        """Names of the buffers that :meth:`collect` returns."""
        return self.live if self.fixed else list(self._all)

    def names_in(self, part: Container[str]) -> list[str]:
        """Return the names among :attr:`names` that belong to a part of the model."""
        return [name for name in self.names if name in part]

    def changed_name(self) -> str | None:
        """Return the name of a buffer that differs from its value at the start of the step, or None.

        After the first step, changes of batch-norm statistics are not seen.
        """
        return next((name for name, buffer in self._all.items() if self._changed(buffer)), None)

    def _changed(self, buffer: _Buffer) -> bool:
        return buffer.touched() or (not self.fixed and not torch.equal(buffer.now(), buffer.start))

    def _discover(self, name: str) -> None:
        if self.fixed:
            raise InputError(
                f"The forward pass changed the buffer {name!r}, which it did not change in the first step. "
                f"Let it change from the first step on, or keep such values outside the model's buffers."
            )
        self.live = [known for known in self._all if known in self.live or known == name]

    def accept(self, means: list[torch.Tensor]) -> None:
        """Set the changing buffers to their means, from which the next step starts."""
        for name, mean in zip(self.live, means, strict=True):
            buffer = self._all[name]
            rounds = not (buffer.start.is_floating_point() or buffer.start.is_complex())
            buffer.start = (mean.round() if rounds else mean).to(buffer.start.dtype, copy=True)
            buffer.put_back()
        self._dirty = False

    @property
    def every(self) -> list[str]:
        return list(self._all)

    def at_start(self, name: str) -> torch.Tensor:
        """Return a buffer at the start of the step, or its current value if it is not known to change."""
        buffer = self._all[name]
        return buffer.start if self._dirty and name in self.live else buffer.now()

    def put_all_back(self) -> None:
        """Restore all buffers to the values that :meth:`take_all` saved."""
        for buffer in self._all.values():
            if buffer.touched():
                buffer.put_back()

    def take_all(self) -> None:
        """Save the current values of all buffers, for an evaluation."""
        for buffer in self._all.values():
            buffer.take()


def _found(model: nn.Module) -> dict[str, _Buffer]:
    found = {}
    for name, tensor in model.named_buffers():
        path, _, key = name.rpartition(".")
        found[name] = _Buffer(model.get_submodule(path), key, tensor, tensor.detach().clone(), version_of(tensor))
    return found


def summable(buffer: torch.Tensor) -> torch.Tensor:
    """Convert to a dtype whose sums are precise enough: float32 or wider, and float64 for integers."""
    if buffer.dtype in (torch.float16, torch.bfloat16):
        return buffer.float()
    return buffer if buffer.is_floating_point() or buffer.is_complex() else buffer.double()


def _statistics(model: nn.Module) -> list[str]:
    """Return the names of the running statistics of batch-norm layers. torch does not count changes to them."""
    return [
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        if isinstance(module, AnyNorm) and module.track_running_stats
        for name, _ in module.named_buffers(recurse=False)
    ]
