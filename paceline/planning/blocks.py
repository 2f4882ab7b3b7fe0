"""Measurement of the activations that each block of a model saves for the backward pass."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import zip_longest
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from paceline.data.feed import MicrobatchGroup
from paceline.partition.profile import seconds_now
from paceline.planning.memory import Segment
from paceline.step.context import TrainingContext
from paceline.step.forward import ForwardRunner
from paceline.step.probes.probe import without_trace
from paceline.system.torch_internals import tree_leaves

_PASSES = 3
_CONTAINERS = nn.ModuleList, nn.ModuleDict, nn.Sequential
_Reference: TypeAlias = StorageWeakRef
"""Identity of a storage, without keeping its memory. An address alone may be reused by a later storage."""


def blocks_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the blocks of a model by name: layers of a class that repeats, or otherwise the model's children.

    A block has layers of its own, and a sibling of the same class. No block is inside another block.
    """
    return _repeated(model, "") or _children(model, "")


def _repeated(module: nn.Module, prefix: str) -> dict[str, nn.Module]:
    kinds = Counter(type(child) for child in module.children() if any(True for _ in child.children()))
    found: dict[str, nn.Module] = {}
    for name, child in module.named_children():
        inner = _repeated(child, f"{prefix}{name}.") if kinds[type(child)] < 2 or _is_container(child) else {}
        if kinds[type(child)] > 1 and not inner and not isinstance(child, nn.ModuleList | nn.ModuleDict):
            inner = {f"{prefix}{name}": child}
        found |= inner
    return found


def _is_container(module: nn.Module) -> bool:
    return type(module) in _CONTAINERS


def _children(module: nn.Module, prefix: str) -> dict[str, nn.Module]:
    found: dict[str, nn.Module] = {}
    children = list(module.named_children())
    for name, child in children:
        if len(children) == 1 or isinstance(child, nn.ModuleList | nn.ModuleDict):
            found |= _children(child, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = child
    return found


class _Unpacked(Exception):
    """The forward pass computes gradients itself, so it needs the tensors that it saves."""


@dataclass
class _Visit:
    """Section of a measured pass: a call of a block, or the code before it (without a name)."""

    name: str
    saved: dict[_Reference, int] = field(default_factory=dict)  # bytes of each storage
    inputs: dict[_Reference, int] = field(default_factory=dict)
    seconds: float = 0.0


class _Recorder:
    """Recorder of the storages that a forward pass saves, by the block that saves them.

    Args:
        model: model whose parameters and buffers are not counted.
        holds: whether to keep saved tensors, for a forward pass that computes gradients itself. Otherwise a pass needs
            no more memory than an evaluation.
    """

    def __init__(self, model: nn.Module, holds: bool) -> None:
        self.visits = [_Visit("")]
        self._of_model = {StorageWeakRef(one.untyped_storage()) for one in [*model.parameters(), *model.buffers()]}
        self._holds = holds
        self._inside = False

    def saving(self) -> saved_tensors_hooks:
        """Return the context in which saved tensors are recorded."""
        return saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | None:
        self._note(self.visits[-1].saved, tensor)
        return tensor.detach() if self._holds else None  # the tensor itself would be kept alive by its own graph

    def _unpack(self, held: torch.Tensor | None) -> torch.Tensor:
        if held is None:
            raise _Unpacked
        return held

    def _note(self, into: dict[_Reference, int], tensor: torch.Tensor) -> None:
        if tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        reference = StorageWeakRef(storage)
        if reference not in self._of_model:
            into[reference] = storage.nbytes()

    def call(self, name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a block, and record the storages that it saves and its duration."""
        if self._inside:
            return forward(*args, **kwargs)
        visit = _Visit(name)
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor):
                self._note(visit.inputs, leaf)
        self.visits.append(visit)
        self._inside, begin = True, seconds_now()
        try:
            return forward(*args, **kwargs)
        finally:
            visit.seconds = seconds_now() - begin
            self._inside = False
            self.visits.append(_Visit(""))

    def segments(self) -> list[Segment]:
        """Return the sections of the pass. Recomputing a block frees no storage that several sections save or read."""
        savers = Counter(reference for visit in self.visits for reference in visit.saved)
        takers = Counter(reference for visit in self.visits for reference in visit.inputs)
        counted: set[_Reference] = set()
        found: list[Segment] = []
        for visit in self.visits:
            kept = {key: size for key, size in visit.saved.items() if savers[key] > 1 or key in takers}
            kept |= {key: size for key, size in visit.inputs.items() if key not in savers and takers[key] > 1}
            kept = {key: size for key, size in kept.items() if key not in counted}
            counted |= kept.keys()
            own = sum(size for key, size in visit.saved.items() if savers[key] == 1 and key not in takers)
            passed = sum(size for key, size in visit.inputs.items() if key not in savers and takers[key] == 1)
            if kept:
                found.append(Segment("", sum(kept.values())))
            if own or visit.name:
                found.append(Segment(visit.name, own, passed if visit.name else 0, visit.seconds))
        return found


def measure_blocks(
    context: TrainingContext, blocks: Mapping[str, nn.Module], group: MicrobatchGroup, step: int
) -> tuple[Segment, ...]:
    """Return the sections of the forward pass of a microbatch, with the shortest duration of three passes.

    If a batch has several phases, these are the sections of the phase that saves the most.
    """
    runners = [context.compute.of(forward) for forward in context.phases.values()] or [context.compute]
    passes = [_measure(context, runner, blocks, group, step) for runner in runners]
    return tuple(max(passes, key=lambda segments: sum(one.saved_bytes for one in segments)))


def _measure(
    context: TrainingContext,
    compute: ForwardRunner,
    blocks: Mapping[str, nn.Module],
    group: MicrobatchGroup,
    step: int,
) -> list[Segment]:
    found: list[list[Segment]] = []
    for holds in (False, True):
        try:
            found = [_pass(context, compute, blocks, group, step, holds) for _ in range(_PASSES)]
            break
        except _Unpacked:
            continue
    return [
        replace(one, seconds=min(other.seconds for other in (one, *others) if other is not None))
        for one, *others in zip_longest(found[-1], *(segments[: len(found[-1])] for segments in found[:-1]))
    ]


def _pass(
    context: TrainingContext,
    compute: ForwardRunner,
    blocks: Mapping[str, nn.Module],
    group: MicrobatchGroup,
    step: int,
    holds: bool,
) -> list[Segment]:
    recorder, known = _Recorder(compute.model, holds), (compute.metrics, compute.counts)
    own = replace(group, data=copy.deepcopy(group.data))  # a copy, because the forward pass may change the data
    with without_trace(context), _watched(blocks, recorder), torch.enable_grad(), recorder.saving():
        result = compute.forward_pass(own, step)
        del result
    compute.metrics, compute.counts = known
    return recorder.segments()


@contextmanager
def _watched(blocks: Mapping[str, nn.Module], recorder: _Recorder) -> Iterator[None]:
    """Let the recorder see the calls of these blocks."""
    before = {name: vars(module)["forward"] for name, module in blocks.items() if "forward" in vars(module)}
    for name, module in blocks.items():
        module.forward = partial(recorder.call, name, module.forward)
    try:
        yield
    finally:
        for name, module in blocks.items():
            del module.forward
            if name in before:
                module.forward = before[name]
