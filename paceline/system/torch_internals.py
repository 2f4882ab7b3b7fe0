"""Private names of torch. No other file uses any; ``tests/test_architecture.py`` also checks that each still exists.

Checked with torch 2.13.0 on the CPU, and with 2.11 for CUDA by its sources in Python (not the symbols of gloo). None
has a public name that does the same. Frequent calls, for each tensor or operation, are torch's own functions without a
Python function around them. ``patches`` lists what the package replaces in torch and in other libraries.

Processes that must not import torch (the coordinator, launchers, the command line) must not import this file.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import nn, overrides
from torch.autograd import grad_mode
from torch.distributed import distributed_c10d as c10d
from torch.nn.modules import batchnorm
from torch.utils import _python_dispatch, _pytree
from torch.utils.data import dataloader
from torch.utils.data._utils import collate as _collate
from torch.utils.hooks import RemovableHandle

_Class = TypeVar("_Class", bound=type)

# Nested containers, with the classes that users register with torch
TreeSpec = _pytree.TreeSpec
tree_flatten, tree_unflatten = _pytree.tree_flatten, _pytree.tree_unflatten
tree_leaves, tree_map, tree_map_only = _pytree.tree_leaves, _pytree.tree_map, _pytree.tree_map_only

# Data
collate, default_collate_fn_map = _collate.collate, _collate.default_collate_fn_map  # default_collate takes no map
StreamSampler = dataloader._InfiniteConstantSampler  # of a DataLoader over a stream

# One call for many tensors, as in torch's optimizers
foreach_add_, foreach_mul_, foreach_div_ = torch._foreach_add_, torch._foreach_mul_, torch._foreach_div_
foreach_copy_, foreach_lerp_, foreach_round_ = torch._foreach_copy_, torch._foreach_lerp_, torch._foreach_round_
foreach_norm = torch._foreach_norm

# Tensors
version_of: Callable[[torch.Tensor], int] = attrgetter("_version")  # the number of changes in place
preserve_versions = grad_mode._unsafe_preserve_version_counter  # for weights whose older values are kept elsewhere
wrapper_tensor = torch.Tensor._make_wrapper_subclass  # a tensor with a shape and without memory
no_torch_function = torch._C._disabled_torch_function_impl  # for a subclass that has only __torch_dispatch__
without_subclasses = torch._C.DisableTorchFunctionSubclass  # else a subclass takes 50 times as long to read
without_functions = torch._C.DisableTorchFunction  # the same for subclasses and modes


def storage_id(tensor: torch.Tensor) -> int:
    """Return a key that tensors in the same storage share. All storages without elements have ``data_ptr`` 0."""
    return int(tensor.untyped_storage()._cdata)


def count_users(storage: torch.UntypedStorage) -> int:
    """Return the number of references to a storage, including ``storage`` itself."""
    return int(torch._C._storage_Use_Count(storage._cdata))


def gradient_hooks(tensor: torch.Tensor) -> list[Any]:
    both = tensor._backward_hooks, tensor._post_accumulate_grad_hooks
    return [hook for hooks in both for hook in (hooks or {}).values()]


def run_last(hook: RemovableHandle) -> None:
    """Put a hook of a tensor behind all others of its kind."""
    hooks = hook.hooks_dict_ref()
    if hooks is not None and hook.id in hooks:  # else the script has removed it
        hooks[hook.id] = hooks.pop(hook.id)


# Modes
TorchDispatchMode = _python_dispatch.TorchDispatchMode
current_function_mode: Callable[[], overrides.TorchFunctionMode | None] = overrides._get_current_function_mode
without_innermost_mode: Callable[[], AbstractContextManager[None]] = overrides._pop_mode_temporarily
without_dispatch_modes: Callable[[], AbstractContextManager[Any]] = _python_dispatch._disable_current_modes


class UncompiledMode(TorchDispatchMode):
    """Dispatch mode that does not import torch's compiler, which takes seconds."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def mutated_arguments(function: Any) -> list[int]:
    """Return the positions of the arguments that an operator changes, given the operator of a dispatch mode."""
    aliases = [argument.alias_info for argument in function._schema.arguments]
    return [place for place, alias in enumerate(aliases) if alias is not None and alias.is_write]


Operator = torch._ops.OpOverload  # argument of a dispatch mode, other than operators of higher order


def aliases_of(function: Any) -> tuple[list[tuple[str, bool | None]], list[bool | None]]:
    """Return the arguments (name, alias) and results (alias) of an operator, given the operator of a dispatch mode.

    An alias is None if the tensor shares no memory with an argument, else whether the operator writes to it.
    """

    def alias(one: Any) -> bool | None:
        return None if one.alias_info is None else bool(one.alias_info.is_write)

    schema = function._schema
    return [(one.name, alias(one)) for one in schema.arguments], [alias(one) for one in schema.returns]


# Modules. named_parameters and similar methods leave out None and repeated entries, and nothing can be set by them.
PARAMETERS, BUFFERS, MODULES = "_parameters", "_buffers", "_modules"
own_parameters: Callable[[nn.Module], dict[str, nn.Parameter | None]] = attrgetter(PARAMETERS)
own_buffers: Callable[[nn.Module], dict[str, torch.Tensor | None]] = attrgetter(BUFFERS)
own_modules: Callable[[nn.Module], dict[str, nn.Module | None]] = attrgetter(MODULES)
HOOKS = "_forward_hooks", "_forward_pre_hooks"
BACKWARD_FLAG = "_is_full_backward_hook"  # set when a hook is registered, so it is not a value of the user's
COMPILED_CALL = "_compiled_call_impl"  # if set, a module calls this in place of itself and its hooks
CALLS = "_call_impl", "_wrapped_call_impl"  # functions on the stack of a call of a module
call_of: Callable[[nn.Module], Callable[..., Any]] = attrgetter(CALLS[0])
CONVERSION_CHECK = "_has_compatible_shallow_copy_type"  # of Module.to, of a tensor before and after its conversion
COMPILED = "._torch"  # in the names of attributes that torch.compile sets
apply_to_tensors = nn.Module._apply  # how Module.to moves and converts
AnyBatchNorm = batchnorm._BatchNorm  # the base of users' batch norms, too
AnyNorm = batchnorm._NormBase  # the base of these and of instance norms


def has_backward_hooks(module: nn.Module) -> bool:
    return bool(module._backward_hooks or module._backward_pre_hooks)


# Optimizers
STEP_HOOKS = "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"  # missing if Optimizer's constructor did not run
HOOKS_PREFIX = "_optimizer_"  # of these and of the hooks of state_dict and load_state_dict
SET_LATER = "_opt_called", "_need_device_dtype_check_for_fused"  # by a schedule, and by the first step


def mark_scheduled(optimizer: Any, step: Any) -> None:
    """Mark ``step`` of an optimizer as called and as counted by a schedule, which warns otherwise."""
    step._wrapped_by_lr_sched = optimizer._opt_called = True


# torch.distributed
default_store, abort_default_group = c10d._get_default_store, c10d._abort_process_group
GLOO_TABLE = "_ZTVN4c10d16ProcessGroupGloo8{}E"  # symbol in libtorch_cpu: the virtual functions of a kind of work
GLOO_ABORT = "_ZN4c10d16ProcessGroupGloo8{}5abortEv"  # its method abort, which Python does not have


def restart_group_count() -> None:
    """Count process groups from 0. torch's keys contain the count, and a failed join does not reset it."""
    c10d._world.group_count = 0


def set_mpi_backend(group: Callable[..., Any]) -> None:
    """Make torch's back end ``mpi`` available, with this process group."""
    c10d.ProcessGroupMPI = group  # type: ignore[misc, assignment]
    c10d._MPI_AVAILABLE = True


_CALLED_BY_TORCH = {
    "setGroupName": "_set_group_name",  # process groups
    "setGroupDesc": "_set_group_desc",
    "all_gather_single": "_allgather_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "source_rank": "_source_rank",  # works
    "apply_to_tensors": "_apply",  # modules
    "check_input_dim": "_check_input_dim",  # batch norms
}


def called_by_torch(kind: _Class) -> _Class:
    """Add the private names under which torch calls methods of the decorated class."""
    for name in _CALLED_BY_TORCH.keys() & vars(kind).keys():
        setattr(kind, _CALLED_BY_TORCH[name], vars(kind)[name])
    return kind


# Imported when needed, because the modules take long to import
def storage_info(*given: Any) -> Any:
    """Return the place of a tensor for the index of ``torch.distributed.checkpoint``: file, offset and length."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(*given)


def import_compiler() -> None:
    """Import the modules that torch imports when an optimizer is created."""
