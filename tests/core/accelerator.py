"""A stand-in for an accelerator, on a machine that has none: its tensors lie in host memory, but as if they did not.

torch takes them for tensors of another device: it is left by a copy only, and operations with both kinds fail. What
would make the host wait for a real device is counted while a :class:`Counting` is entered.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import backend_registration
from torch.utils._pytree import tree_leaves, tree_map

from paceline.comm.rendezvous import devices
from paceline.comm.transport import choice
from paceline.comm.transport.base import Communicator
from paceline.comm.transport.nccl import Nccl
from paceline.training.recovery import standby

NAME = "standin"
DEVICE = f"{NAME}:0"

_aten = torch.ops.aten
_COPIES = (_aten._to_copy.default, _aten.copy_.default)
_READS = (
    _aten._local_scalar_dense.default,
    _aten.allclose.default,
    _aten.equal.default,
    _aten.is_nonzero.default,
    _aten.nonzero.default,
    _aten.masked_select.default,
    _aten._unique2.default,
    _aten.repeat_interleave.Tensor,
)
"""Their results, or the shapes of these, are known to the device alone."""


_DIVISIONS = (_aten.div.Tensor, _aten.div_.Tensor, _aten.div.out, _aten._foreach_div_.Tensor)


class Counting:
    """Counts what makes the host wait for the device: ``reads`` from it, and ``uploads`` that are waited for.

    Each is kept as the line of code that did it.
    """

    now: Counting | None = None

    def __init__(self) -> None:
        self.reads: list[str] = []
        self.uploads: list[str] = []

    def __enter__(self) -> Counting:
        Counting.now = self
        return self

    def __exit__(self, *_: object) -> None:
        Counting.now = None


class OnDevice(torch.Tensor):
    """A tensor on the stand-in; ``raw`` holds its elements."""

    raw: torch.Tensor

    @staticmethod
    def __new__(cls, raw: torch.Tensor) -> OnDevice:
        made: OnDevice = torch.Tensor._make_wrapper_subclass(
            cls, raw.shape, strides=raw.stride(), storage_offset=raw.storage_offset(), dtype=raw.dtype, device=DEVICE
        )
        made.raw = raw
        return made

    def __repr__(self) -> str:
        return f"OnDevice({self.raw!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        _count(func, args, kwargs)
        if func not in _COPIES:
            _refuse_both(func, args, kwargs)
        if func in _DIVISIONS:
            args = (args[0], _converted(args[0], args[1]), *args[2:])
        result = func(*tree_map(_raw, args), **tree_map(_raw, kwargs))
        if result is None:
            return None
        if "out" in kwargs or func._schema.name.endswith("_"):  # in place
            return kwargs.get("out", args[0])
        if func is _aten._to_copy.default and not _goes_to_device(args, kwargs):
            return result
        return tree_map(lambda one: OnDevice(one) if isinstance(one, torch.Tensor) else one, result)


def _raw(value: Any) -> Any:
    if isinstance(value, OnDevice):
        return value.raw
    return torch.device("cpu") if isinstance(value, torch.device) else value


def _converted(value: Any, divisor: Any) -> Any:
    """A divisor on the device, in the type of the result; of a number on the host the device gets all digits."""
    if isinstance(divisor, OnDevice) and divisor.ndim == 0:
        first = value[0] if isinstance(value, list) else value
        return OnDevice(divisor.raw.to(torch.result_type(first.raw, divisor.raw)))
    return divisor


def _goes_to_device(args: Any, kwargs: Any) -> bool:
    device = kwargs.get("device")
    return isinstance(args[0], OnDevice) if device is None else torch.device(device).type == NAME


def _count(func: Any, args: Any, kwargs: Any) -> None:
    counting = Counting.now
    if counting is None:
        return
    if func in _READS or (func is _aten.index.Tensor and any(_is_mask(one) for one in args[1])):
        counting.reads.append(_line(func))
    if func is _aten.copy_.default:
        source, target = isinstance(args[1], OnDevice), isinstance(args[0], OnDevice)
        waits = not (kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
    elif func is _aten._to_copy.default:
        source, target = isinstance(args[0], OnDevice), _goes_to_device(args, kwargs)
        waits = not kwargs.get("non_blocking")
    else:
        return
    if source and not target:
        counting.reads.append(_line(func))
    if target and not source and waits:
        counting.uploads.append(_line(func))


def _is_mask(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)


def _line(func: Any) -> str:
    """The last line of Paceline that led to an operation."""
    frames = [one for one in traceback.extract_stack() if "/paceline/" in one.filename]
    where = f"{frames[-1].filename.rpartition('/paceline/')[2]}:{frames[-1].lineno}" if frames else "elsewhere"
    return f"{func} in {where}"


def _refuse_both(func: Any, args: Any, kwargs: Any) -> None:
    leaves = tree_leaves((args, kwargs))
    hosts = [one for one in leaves if isinstance(one, torch.Tensor) and not isinstance(one, OnDevice) and one.ndim]
    if hosts and any(isinstance(one, OnDevice) for one in leaves):
        raise RuntimeError(f"{func}: expected all tensors to be on the same device, but found {DEVICE} and cpu")


def _empty(size: Any, **given: Any) -> torch.Tensor:
    return OnDevice(torch.empty(size, dtype=given.get("dtype")))


def _empty_strided(size: Any, stride: Any, **given: Any) -> torch.Tensor:
    return OnDevice(torch.empty_strided(size, stride, dtype=given.get("dtype")))


def _copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """A copy that torch makes inside of another operation, such as ``torch.tensor(..., device=...)``."""
    _count(_aten.copy_.default, (target, source, non_blocking), {})
    _raw(target).copy_(_raw(source))
    return target


def _exchange(operations: list[dist.P2POp]) -> list[Any]:
    return [one.op(_raw(one.tensor), one.peer, tag=one.tag) for one in operations]


class _OverGloo(Nccl):
    """What a GPU has, with gloo in its place: a wait has done it all, and tags tell tensors apart."""

    backend = "gloo"

    def open_communicators(self, communicators: Iterable[Communicator]) -> None:
        self._groups = dict.fromkeys(communicators)

    def synchronize(self, look: Callable[[float], None]) -> None:
        pass

    def abort(self) -> None:
        pass


def _put(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """As ``tensor.data = value``, which tensors of a subclass refuse."""
    if isinstance(tensor, torch.nn.Parameter):
        value = torch.nn.Parameter(value, tensor.requires_grad)
    torch.utils.swap_tensors(tensor, value)


_raised: list[BaseException] = []
"""What hooks have raised in the backward pass."""


def _held(hook: Callable[[torch.Tensor], None]) -> Callable[[torch.Tensor], None]:
    """Return a hook whose exception waits for the end of the backward pass.

    A hook runs between two calls of torch's device guard, which must not raise. An exception passes the guard of CUDA,
    which is C++. The guard of a backend in Python calls Python, where a pending exception ends the process or is lost.
    """

    def run(tensor: torch.Tensor) -> None:
        if _raised:  # a pass of CUDA has ended
            return
        try:
            hook(tensor)
        except BaseException as error:  # noqa: BLE001 - raised again after the backward pass
            _raised.append(error)

    return run


def _backward(*given: Any, **named: Any) -> None:
    try:
        _autograd_backward(*given, **named)
    finally:
        raised = _raised[:1]
        _raised.clear()
        if raised:
            raise raised[0]


_autograd_backward = torch.autograd.backward
_register_hook = torch.Tensor.register_post_accumulate_grad_hook


def install(*gpus: str) -> None:
    """Let the workers of this process take the stand-in for their device; before the session begins.

    Args:
        gpus: the names of the devices that this worker sees; none: one that no other worker has.
    """
    module = SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: True,
        device_count=lambda: max(1, len(gpus)),
        current_device=lambda: 0,
        _is_in_bad_fork=lambda: False,
        manual_seed_all=lambda seed: None,
    )
    backend_registration._setup_privateuseone_for_python_backend(NAME, module)  # type: ignore[attr-defined]
    library = torch.library.Library("aten", "IMPL")
    library.impl("empty.memory_format", _empty, "PrivateUse1")
    library.impl("empty_strided", _empty_strided, "PrivateUse1")
    library.impl("_copy_from", _copy_from, "PrivateUse1")
    sys.modules[__name__]._library = library  # type: ignore[attr-defined]  # it ends with this object
    torch.autograd.backward = _backward
    torch.Tensor.register_post_accumulate_grad_hook = lambda tensor, hook: _register_hook(tensor, _held(hook))
    started = dist.all_reduce
    dist.batch_isend_irecv = _exchange
    dist.all_reduce = lambda tensor, **given: started(_raw(tensor), **given)
    devices.visible_gpus = lambda: [*gpus] or [f"standin-{os.getpid()}"]
    devices.use_gpu = lambda number: torch.device(NAME, number)
    standby.put = _put
    choice.use(_OverGloo)
