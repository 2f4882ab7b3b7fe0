"""Replica check: digests of the training state, compared among all workers in each step.

::

    step 1    everything              The header of each worker holds a digest of some tensors, the same tensors on
    step 2    tensors 0 to 3          all workers: as many as fit into a small fraction of a step, in rotation.
    step 3    tensors 4 to 6          If a digest differs, all tensors are compared and the first difference is named.

The whole state is compared where workers synchronize: at the end of ``batches``, in ``evaluate`` and in ``save``.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import sha256
from typing import Any

import numpy
import torch
from torch.optim import Optimizer

from paceline.comm.collectives.step_header import StateDigest
from paceline.comm.shm.tensors import bytes_of
from paceline.comm.transport.host_copy import HostCopy
from paceline.data.objects.attributes import Attributes
from paceline.errors import DisagreementError
from paceline.step.context import TrainingContext
from paceline.step.numerics import numerics
from paceline.system.torch_internals import COMPILED

_log = logging.getLogger("paceline")
_SHARE = 0.003  # fraction of the step time that may be spent on digests
_SECONDS, _SECONDS_PER_BYTE = 7e-6, 0.15e-9
"""Estimated cost of a tensor's digest, which runs at 20 GB/s if the tensor is in the cache."""
_WORD = 1 << 64

_CAUSES = {
    "parameter": (
        "Look for code that changes weights on some ranks only, or in the forward pass (through .data), where each "
        "worker has different samples; or an optimizer that does not do the same everywhere."
    ),
    "buffer": (
        "Either the script calls the model on some ranks only, in training mode, for example to draw samples on rank "
        "0: call it in model.eval(), or on all ranks. Or the forward pass changes it behind torch's back, through "
        ".data or as fused quantization observers do: change it by a plain operation, from the first step on."
    ),
    "freezing": "Call requires_grad_() alike on all workers.",
    "mode": "Call model.train() and model.eval() alike on all workers.",
    "data": (
        "Every worker must read the whole stream in the same order; Paceline hands out the shares. Look for a split by "
        "the rank, such as by torch.distributed.get_rank() or split_dataset_by_node, or a generator or time of its own."
    ),
    "optimizer": (
        "The optimizer does not do the same on all workers: look for a rank, a time, or a generator of its own in it."
    ),
}

Fetch = Callable[[], "torch.Tensor | None"]


def digest_of(value: torch.Tensor) -> int:
    """Return the sum of a tensor's 64-bit words modulo 2^64, for any strides. The last word is filled with zeros."""
    return int(_sum_of_words(value)) % _WORD


def digest_at(value: torch.Tensor) -> int | torch.Tensor:
    """Return the digest of a tensor. On an accelerator it stays a tensor on the device, so the host does not wait."""
    return digest_of(value) if value.device.type == "cpu" else _sum_of_words(value)


def digests_of(values: Sequence[torch.Tensor]) -> list[int]:
    """Return the digests of several tensors. Digests of tensors on an accelerator are read in one transfer."""
    on_device = {place: _sum_of_words(value) for place, value in enumerate(values) if value.device.type != "cpu"}
    read = iter(HostCopy(torch.stack([*on_device.values()])).wait().tolist() if on_device else ())
    return [next(read) % _WORD if place in on_device else digest_of(value) for place, value in enumerate(values)]


def _sum_of_words(value: torch.Tensor) -> torch.Tensor:
    """Return the sum as an int64, which wraps around. A sum of bytes would first copy each byte into a word."""
    value = value.detach()
    if value.is_sparse:
        value = value.to_dense()
    flat = bytes_of(value.resolve_conj().resolve_neg())
    if flat.storage_offset() % 8:
        flat = flat.clone()
    if rest := len(flat) & 7:
        flat = torch.cat([flat, flat.new_zeros(8 - rest)])
    return flat.view(torch.int64).sum()


class Replicas:
    """Comparison of this worker's state with that of the other workers."""

    def __init__(self, context: TrainingContext) -> None:
        self._context = context
        self._modules = list(context.compute.model.modules())
        self._parameters = list(context.compute.model.parameters())
        self._watches = context.replicated and context.world.size > 1
        self._credit = 0.0
        self._fetches: list[tuple[int, Fetch]] = []
        self._next = 0
        self._steps = 0
        self._samples: dict[str, int] = {}

    def digest(self, step: int) -> StateDigest:
        """Return the digest of the next tensors at the beginning of the step, of all modes, and of the step's samples.

        Args:
            step: step number. For a stream, the digest includes the first sample of the step's batch.
        """
        if not self._watches:
            return StateDigest()
        self._steps += 1
        found = StateDigest()
        if self._steps == 2:  # the optimizer makes its state in the first step
            self._fetches = [(place + 1, fetch) for place, fetch in enumerate(_tensors(self._context).values())]
        if self._steps > 1:
            found = self._sum_of(everything=self._steps == 2)
        flags = [one.training for one in self._modules] + [one.requires_grad for one in self._parameters]
        modes = hash(tuple(flags))  # of booleans: the same in all processes
        self._samples = {f"data {step}": self._context.order.digest_at(step)}
        return StateDigest((found.host + modes + sum(self._samples.values())) % _WORD, found.device)

    def _sum_of(self, everything: bool) -> StateDigest:
        """Sum the next tensors: all of them, or as many as the time budget allows, but always a small tensor."""
        total, on_device = 0, None
        for summed in range(len(self._fetches)):
            place, fetch = self._fetches[self._next]
            value = fetch()
            if value is not None and not everything:
                cost = _SECONDS + _SECONDS_PER_BYTE * value.numel() * value.element_size()
                if cost > self._credit and (summed or cost > 2 * _SECONDS):
                    break
                self._credit = max(0.0, self._credit - cost)
            if value is not None and value.device.type == "cpu":
                total += (2 * place + 1) * digest_of(value)
            elif value is not None:
                own = (2 * place + 1) * _sum_of_words(value)
                on_device = own if on_device is None else on_device + own
            self._next = (self._next + 1) % len(self._fetches)
        return StateDigest(total % _WORD, on_device)

    def check(self, sums: Sequence[int], seconds: Sequence[float]) -> None:
        """Compare the digests of all workers. All workers call this at the same point of a step.

        Args:
            seconds: seconds that each rank computed in this step.

        Raises:
            DisagreementError: a tensor differs.
        """
        self._credit += _SHARE * max(seconds)
        if self._watches and len(set(sums)) > 1 and not compare(self._context, "step", self._samples):
            self._watches = False


def compare(context: TrainingContext, what: str, samples: dict[str, int] | None = None) -> bool:
    """Compare all tensors of all workers, and digests of samples. Returns whether they are equal."""
    if context.world.size == 1:
        return True
    everyone = context.world.gather(
        ((samples or {}) | digests(context), numerics(exact=False), options_of(context.update.optimizer)), what
    )
    if not (text := difference([found for found, _, _ in everyone])):
        return True
    text = _option_that_differs([options for _, _, options in everyone]) or text
    text += _joined_text(*context.audits.newcomers) + _held_text(context.world.gather(_held(context), what))
    if context.settings.exact or all(one == everyone[0][1] for _, one, _ in everyone):
        raise DisagreementError(text)
    text += " (The workers have different processors, numbers of threads or precisions, so this may be mere rounding.)"
    _log.warning(text)
    context.events.mark("note", text=text, warning=True)
    return False


def options_of(optimizer: Optimizer) -> dict[str, str]:
    """Return the hyper-parameters of an optimizer by name and group, as texts that are equal on equal workers."""
    return {
        f"{key} of group {place}": _option_text(value)
        for place, group in enumerate(optimizer.param_groups)
        for key, value in group.items()
        if key != "params"
    }


def _option_text(value: object) -> str:
    """Return the value, but only the class of an object, whose repr may contain an address."""
    if isinstance(value, torch.Tensor):
        value = value.tolist()  # all digits, and no device, which differs among the workers of a machine
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_option_text, value))})"
    plain = int, float, str, bool, type(None)
    return str(value) if isinstance(value, plain) else type(value).__name__


def _option_that_differs(everyone: Sequence[dict[str, str]]) -> str:
    """Describe the first hyper-parameter that differs among ranks. Empty if none differs."""
    for name, value in everyone[0].items():
        for rank, found in enumerate(everyone):
            if found.get(name) != value:
                return (
                    f"The optimizer's {name} is {value} on rank 0 and {found.get(name)} on rank {rank}, so the weights "
                    f"differ. Change hyper-parameters alike on all workers."
                )
    return ""


def _joined_text(step: int, ranks: list[int]) -> str:
    """Explain that workers which have joined have not run the loop body of earlier steps. Empty if none has joined."""
    if not ranks:
        return ""
    return (
        f" Rank {' and '.join(map(str, ranks))} joined at step {step}, without running the loop body of earlier "
        f"steps: if the loop keeps values in variables of its own, put them into the model, or into session.register."
    )


def _held(context: TrainingContext) -> dict[str, str]:
    """Return a digest of each value that the model and the loss hold beside the compared tensors, by name."""
    model = context.compute.model
    known = {id(value) for value in (*model.parameters(), *model.buffers())}
    roots = {"model": model, "forward": context.compute.forward}
    return {name: _text_of(value) for name, value in Attributes(roots, known).values.items()}


def _text_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return str(digest_of(value))
    return sha256(value.tobytes() if isinstance(value, numpy.ndarray) else repr(value).encode()).hexdigest()


def _held_text(everyone: Sequence[dict[str, str]]) -> str:
    """Name the held values that differ among ranks, because the loop may have used them. Empty if none differs."""
    names = sorted({name for found in everyone for name in found if COMPILED not in name})
    differing = [name for name in names if len({found.get(name) for found in everyone}) > 1]
    if not (shown := [*dict.fromkeys(re.sub(r"\[\d+\]$", "", name) for name in differing)][:2]):
        return ""
    return (
        f" On each worker {' and '.join(shown)} {'has' if len(shown) == 1 else 'have'} another value, as after "
        f"the forward pass of its own microbatches: if the loop reads it, return it as a metric, as (loss, "
        f"{{'name': value}}), and read report.metrics."
    )


def digests(context: TrainingContext) -> dict[str, int]:
    """Return the digest of each tensor of the state, modes of modules and frozen parameters, by kind and name."""
    values = {name: fetch() for name, fetch in _tensors(context).items()}
    modes = {f"mode {name}": int(one.training) for name, one in context.compute.model.named_modules()}
    return frozen(context) | modes | {name: digest_of(value) for name, value in values.items() if value is not None}


def frozen(context: TrainingContext) -> dict[str, int]:
    """Return which parameters are currently frozen."""
    return {f"freezing {name}": 1 for name, one in context.compute.model.named_parameters() if not one.requires_grad}


def difference(everyone: Sequence[dict[str, int]]) -> str:
    """Describe the first difference, its ranks and its likely cause. Empty if nothing differs."""
    for full in dict.fromkeys(name for found in everyone for name in found):
        others = [rank for rank, found in enumerate(everyone) if found.get(full) != everyone[0].get(full)]
        if others:
            kind, _, name = full.partition(" ")
            ranks = f"rank {others[0]}" if len(others) == 1 else f"ranks {', '.join(map(str, others))}"
            if kind == "freezing":
                state = "trained" if everyone[0].get(full) else "frozen"
                return f"The parameter {name!r} is {state} on {ranks}, and not on rank 0. {_CAUSES[kind]}"
            if kind == "mode":
                module = f"The module {name!r}" if name else "The model"
                mode = "evaluation" if everyone[0].get(full) else "training"
                return f"{module} is in {mode} mode on {ranks}, and not on rank 0. {_CAUSES[kind]}"
            if kind == "data":
                return f"The stream gives different samples on {ranks} than on rank 0 in step {name}. {_CAUSES[kind]}"
            spelled = "state of the optimizer" if kind == "optimizer" else kind
            return f"The {spelled} {name!r} on {ranks} differs from rank 0's. {_CAUSES[kind]}"
    return ""


def _tensors(context: TrainingContext) -> dict[str, Fetch]:
    """Return a getter for each tensor of the state, as it was at the beginning of the step."""
    found: dict[str, Fetch] = {}
    for name, value in context.compute.model.named_parameters():
        found[f"parameter {name}"] = value.detach
    for name in context.compute.buffers.every:
        found[f"buffer {name}"] = partial(context.compute.buffers.at_start, name)
    if context.divides_update or context.divides_state:
        return found
    states = context.update.optimizer.state
    for name, value in context.compute.model.named_parameters():
        for key, entry in sorted(states.get(value, {}).items()):
            if isinstance(entry, torch.Tensor | int | float | bool):
                found[f"optimizer {name}/{key}"] = partial(_entry, states, value, key)
    return found


def _entry(states: Any, parameter: torch.Tensor, key: str) -> torch.Tensor | None:
    value = states.get(parameter, {}).get(key)
    return None if value is None else torch.as_tensor(value)
