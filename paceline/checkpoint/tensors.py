"""Training state as named tensors: parameters, buffers, optimizer state. Some may come from other workers in a save."""

from __future__ import annotations

import ctypes
import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.errors import CheckpointError, InputError
from paceline.system.torch_internals import tree_map_only

Receive = Callable[[Sequence[str]], Iterator[tuple[str, torch.Tensor]]]
"""Function that yields tensors of other workers in the given order. Each is valid until the next one."""
REPLICA = "replica/"  # prefix of the tensors of a replica of local training, before its number
_NUMBER = "()"  # suffix of the key of a number in the optimizer's state. A tensor would give a later step other bits.
_SAVABLE = torch.Tensor, int, float, bool, type(None)


def optimizer_state(model: nn.Module, optimizer: Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of the optimizer state as ``optimizer/<parameter>/<key>``, see :func:`entries_of`."""
    for name, parameter in model.named_parameters():
        for key, value in entries_of(optimizer.state.get(parameter, {})):
            yield f"optimizer/{name}/{key}", value


def entries_of(state: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of the state of a parameter, and its numbers as tensors under marked keys."""
    for key, value in sorted(state.items()):
        if isinstance(value, torch.Tensor):
            if value.is_sparse:
                raise InputError(
                    f"The optimizer keeps a sparse {key!r}, which cannot be saved, compared or sent: use SGD without "
                    f"momentum, Adagrad or SparseAdam for parameters with sparse gradients."
                )
            yield key, value
        elif isinstance(value, int | float):
            yield f"{key}{_NUMBER}", torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)


def put_entry(state: dict[str, Any], key: str, value: torch.Tensor) -> None:
    """Put a tensor or a number of :func:`entries_of` into the state of a parameter."""
    state[key.removesuffix(_NUMBER)] = value.item() if key.endswith(_NUMBER) else value


def optimizer_lists(model: nn.Module, optimizer: Optimizer) -> dict[str, dict[str, Any]]:
    """Return the non-tensor state of parameters whose state holds lists (as in LBFGS), by parameter and key."""
    found = {}
    for name, parameter in model.named_parameters():
        entries = optimizer.state.get(parameter, {}).items()
        plain = {key: value for key, value in entries if not isinstance(value, torch.Tensor)}
        if any(isinstance(value, list) for value in plain.values()):
            found[name] = plain
    return found


def load_optimizer_lists(model: nn.Module, optimizer: Optimizer, lists: Mapping[str, Mapping[str, Any]]) -> None:
    """Load the result of :func:`optimizer_lists` into the optimizer. Call this after loading its tensors."""
    parameters = dict(model.named_parameters())
    for name, values in lists.items():
        device = parameters[name].device
        for key, value in values.items():
            optimizer.state[parameters[name]][key] = tree_map_only(torch.Tensor, partial(_copy_to, device), value)


def _copy_to(device: torch.device, value: torch.Tensor) -> torch.Tensor:
    return value.to(device, copy=True)


def check_savable(optimizer: Optimizer, *, lists: bool = False) -> None:
    """Raise CheckpointError if the optimizer state holds more than tensors and numbers per parameter.

    Args:
        lists: whether to accept lists of tensors and numbers, too, as in :func:`optimizer_lists`.
    """
    for owner, values in optimizer.state.items():
        entries = values.items() if isinstance(values, dict) else [("state", values)]
        for key, value in entries:
            held = value if lists and isinstance(value, list) else [value]
            if isinstance(owner, nn.Parameter) and all(isinstance(one, _SAVABLE) for one in held):
                continue
            raise CheckpointError(
                f"The state of {type(optimizer).__name__} cannot be saved or sent to another worker: {key!r} is a "
                f"{type(value).__name__}, neither a tensor nor a number of a parameter{', nor a list of such' * lists}."
            )


def named_tensors(model: nn.Module, optimizer: Optimizer) -> dict[str, torch.Tensor]:
    """Return all tensors of the state by name, in the same order on all workers."""
    state = {f"parameter/{name}": value.detach() for name, value in model.named_parameters()}
    state.update({f"buffer/{name}": value.detach() for name, value in model.named_buffers()})
    state.update(optimizer_state(model, optimizer))
    return state


def load_named_tensors(model: nn.Module, optimizer: Optimizer, tensors: MutableMapping[str, torch.Tensor]) -> None:
    """Move tensors of :func:`named_tensors` into the model and the optimizer, so that no two exist twice."""
    with torch.no_grad():
        for name, value in named_tensors(model, optimizer).items():
            if not name.startswith("optimizer/"):
                value.copy_(tensors.pop(name))
    names = [name for name in tensors if name.startswith("optimizer/")]
    load_optimizer_state(model, optimizer, ((name, tensors.pop(name)) for name in names))


def state_dict_names(model: nn.Module) -> dict[str, str]:
    """Map the names in the model's ``state_dict`` to names in :func:`named_tensors`.

    A tied weight has several ``state_dict`` names. A non-persistent buffer has none.
    """
    first = {id(value): f"parameter/{name}" for name, value in model.named_parameters()}
    first.update({id(value): f"buffer/{name}" for name, value in model.named_buffers()})
    state = model.state_dict(keep_vars=True)
    return {name: first[id(value)] for name, value in state.items() if id(value) in first}


def hash_of(tensor: torch.Tensor) -> bytes:
    """Return the SHA-256 of dtype, shape, and elements in row-major order."""
    digest = begin_hash(str(tensor.dtype), tensor.shape)
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    digest.update(raw_bytes(flat))
    return digest.digest()


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """Return a view of the bytes of a contiguous CPU tensor, which must outlive the view.

    The view does not use NumPy: torch cannot resize a tensor that NumPy shares, and quantization observers resize.
    """
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr() if tensor.nbytes else 0)).cast(
        "B"
    )


def begin_hash(dtype: str, shape: Sequence[int]) -> hashlib._Hash:
    """Start the hash of a tensor with its dtype and shape. The caller adds the elements."""
    return hashlib.sha256(f"{dtype} {tuple(shape)} ".encode())


def fingerprint(state: Mapping[str, torch.Tensor]) -> str:
    """Return the SHA-256 of the names and hashes of all tensors, as 64 hex digits."""
    return fingerprint_of({name: hash_of(value).hex() for name, value in state.items()})


def fingerprint_of(hashes: Mapping[str, str]) -> str:
    """Return the same fingerprint from the hash of each tensor in hex digits."""
    digest = hashlib.sha256()
    for name in sorted(hashes):
        digest.update(name.encode() + b"\0" + bytes.fromhex(hashes[name]))
    return digest.hexdigest()


def load_optimizer_state(model: nn.Module, optimizer: Optimizer, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Load tensors of :func:`optimizer_state` one after the other, so that they need not exist at the same time.

    The optimizer loses its other state.
    """
    parameters = dict(model.named_parameters())
    group_of = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
    loaded: dict[torch.Tensor, Any] = defaultdict(dict)
    for full, value in tensors:
        name, _, key = full.removeprefix("optimizer/").rpartition("/")
        if name not in parameters:
            raise CheckpointError(f"The checkpoint has optimizer state for {name!r}, which the model does not have.")
        group = group_of[parameters[name]]
        on_host = key == "step" and value.ndim == 0 and not (group.get("fused") or group.get("capturable"))
        device = value.device if on_host else parameters[name].device
        existing = optimizer.state.get(parameters[name], {}).get(key)
        own = existing.copy_(value) if _fits(existing, value, device) else value.to(device, copy=True)
        put_entry(loaded[parameters[name]], key, laid_out(own, parameters[name]))
    optimizer.state.clear()
    optimizer.state.update(loaded)


def _fits(existing: Any, value: torch.Tensor, device: torch.device) -> bool:
    """Return whether a value can be copied into an existing tensor, which is faster than allocating a new tensor."""
    same = isinstance(existing, torch.Tensor) and existing.dtype == value.dtype and existing.shape == value.shape
    return same and existing.device == device and existing.is_contiguous()


def laid_out(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the optimizer's state with the strides of its parameter, which fused updates rely on."""
    if value.shape != parameter.shape or value.stride() == parameter.stride():
        return value
    return torch.empty_like(parameter, dtype=value.dtype, device=value.device, requires_grad=False).copy_(value)


class StreamedTensors(Mapping[str, torch.Tensor]):
    """Tensors by name, of which some come from other workers while :func:`each` reads them.

    Args:
        local: this worker's tensors.
        kinds: types and shapes of the others. The mapping holds tensors of these without elements, on the meta device.
    """

    def __init__(
        self, local: Mapping[str, torch.Tensor], kinds: Mapping[str, tuple[torch.dtype, torch.Size]], receive: Receive
    ) -> None:
        self._local, self._receive = local, receive
        others = {name: torch.empty(shape, dtype=dtype, device="meta") for name, (dtype, shape) in kinds.items()}
        self._tensors = {**others, **local}

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def in_order(self, names: Sequence[str]) -> StreamedTensors:
        """Return some of the tensors, which :func:`each` reads in this order."""
        made = StreamedTensors({}, {}, self._receive)
        made._local, made._tensors = self._local, {name: self._tensors[name] for name in names}
        return made

    def read(self) -> Iterator[tuple[str, torch.Tensor]]:
        coming = self._receive([name for name in self._tensors if name not in self._local])
        for name in self._tensors:
            yield (name, self._local[name]) if name in self._local else next(coming)


def each(tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors by name. Those of other workers are valid until the next one."""
    return tensors.read() if isinstance(tensors, StreamedTensors) else iter(tensors.items())


def in_order(tensors: Mapping[str, torch.Tensor], names: Sequence[str]) -> Mapping[str, torch.Tensor]:
    """Return some of the tensors, in this order."""
    return tensors.in_order(names) if isinstance(tensors, StreamedTensors) else {name: tensors[name] for name in names}
