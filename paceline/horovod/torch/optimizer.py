"""``DistributedOptimizer``: an optimizer that updates with gradients reduced over all workers."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch.optim import Optimizer

from paceline.horovod.engine.requests import GLOBAL
from paceline.horovod.process_sets import ProcessSet, global_process_set
from paceline.horovod.runtime import generations, size
from paceline.horovod.torch.allreduce import allreduce_async
from paceline.horovod.torch.compression import Compression, Compressor
from paceline.horovod.torch.gradients import Gradients, Reduces
from paceline.horovod.torch.requests import Adasum, Average, reduction_of

Groups = int | Sequence[Sequence[torch.Tensor]] | None


class _Reducing(Optimizer):
    """Methods added to the class of the optimizer."""

    _base: type[Optimizer]
    _parameter_names: dict[torch.Tensor, str]
    _gradients: Gradients | None
    _synchronized: bool
    _should_synchronize: bool

    def synchronize(self) -> None:
        """Wait until the gradients are reduced, for code that changes them before ``step``, such as clipping.

        Raises:
            HorovodInternalError: a reduction failed.
        """
        if self._gradients is not None:
            self._gradients.finish()
        self._synchronized = True

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Skip the synchronization in ``step`` within this block, because ``synchronize`` was called before."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Synchronize the gradients and update. With a closure, synchronize after each of its calls."""
        if closure is not None:
            return self._base.step(self, lambda: self._synchronized_after(closure))
        if self._should_synchronize:
            if self._synchronized:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() context after "
                    "optimizer.synchronize(): the gradients are reduced twice. Use `with "
                    "optimizer.skip_synchronize(): optimizer.step()`.",
                    stacklevel=2,
                )
            self.synchronize()
        self._synchronized = False
        return self._base.step(self)

    def _synchronized_after(self, closure: Callable[[], Any]) -> Any:
        loss = closure()
        if self._should_synchronize:
            self.synchronize()
        self._synchronized = False
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients.

        Raises:
            AssertionError: gradients are being reduced.
        """
        if self._gradients is not None and self._gradients.in_flight:
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward(), but before optimizer.step() or "
                "optimizer.synchronize(): the gradients are under way."
            )
        self._base.zero_grad(self, set_to_none)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set the number of backward passes before each ``step``."""
        if self._gradients is not None:
            self._gradients.reset(passes)


def DistributedOptimizer(  # noqa: PLR0913 - the name and the arguments are Horovod's
    optimizer: Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: Any = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Groups = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return an optimizer that reduces gradients over all workers during the backward pass, before it updates.

    The result is an instance of a subclass of the optimizer's class, and shares its state and parameter groups.

    Args:
        optimizer: optimizer to distribute.
        named_parameters: ``model.named_parameters()``. Defaults to names from the positions in the parameter groups.
        compression: compression of transferred gradients. Defaults to none.
        backward_passes_per_step: number of backward passes whose gradients are added up before they are reduced.
        op: ``Average``, ``Sum``, or ``Adasum``, which combines the updates of all workers instead of gradients.
        gradient_predivide_factor: divisor of the gradients before the sum of a mean, and size / factor after the sum.
        num_groups: deprecated name of ``groups``.
        groups: number of groups, or lists of parameters. Gradients of a group are reduced in one operation.
        sparse_as_dense: whether sparse gradients are reduced as dense gradients.
        process_set: workers that take part. Defaults to all.

    Raises:
        ValueError: names are repeated or missing, or arguments cannot be combined.

    Example:
        >>> import torch
        >>> import paceline.horovod.torch as hvd
        >>> hvd.init()
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        >>> hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> optimizer.step()
        >>> hvd.shutdown()
    """
    op = reduction_of(op, None)
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError(f"gradient_predivide_factor={gradient_predivide_factor} is for op=Average, not for {op}.")
    if backward_passes_per_step <= 0:
        raise ValueError(f"backward_passes_per_step={backward_passes_per_step}: it must be at least 1.")
    if num_groups:
        warnings.warn("num_groups is deprecated: give groups.", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    names = _names(optimizer, named_parameters)
    if op == Adasum and (size() > 1 or generations() is not None):
        if process_set.process_set_id != GLOBAL:
            raise NotImplementedError("Adasum is for all workers, not for a process set.")
        return _on_top(optimizer, dict(vars(AdasumReducing)), _parameter_names=names, _compression=compression)
    chosen = _groups(groups, [one for one in names if one.requires_grad])
    gradients = None
    if (size() > 1 or generations() is not None) and process_set.included():
        how = Reduces(op, compression, gradient_predivide_factor, sparse_as_dense, process_set)
        trained = {one: name for one, name in names.items() if one.requires_grad}
        gradients = Gradients(trained, how, chosen, backward_passes_per_step)
        for one in trained:
            one.register_post_accumulate_grad_hook(gradients.take)
    values = {"_parameter_names": names, "_gradients": gradients, "_synchronized": False, "_should_synchronize": True}
    return _on_top(optimizer, dict(vars(_Reducing)), **values)


def _on_top(optimizer: Optimizer, methods: dict[str, Any], **values: Any) -> Any:
    """Return an instance of a subclass of the optimizer's class with more methods, which shares its state."""
    kept = {name: value for name, value in methods.items() if name not in ("__dict__", "__weakref__", "__doc__")}
    found = type(type(optimizer).__name__, (type(optimizer),), {**kept, "_base": type(optimizer)})
    made: Any = object.__new__(found)
    vars(made).update({name: value for name, value in vars(optimizer).items() if name != "step"}, **values)
    return made


def _names(
    optimizer: Optimizer, named_parameters: Iterable[tuple[str, torch.Tensor]] | None
) -> dict[torch.Tensor, str]:
    groups = [group["params"] for group in optimizer.param_groups]
    if named_parameters is None:
        return {
            one: f"allreduce.noname.{place}.{number}"
            for place, group in enumerate(groups)
            for number, one in enumerate(group)
        }
    pairs = list(named_parameters)
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise ValueError("named_parameters must be pairs (name, parameter), such as model.named_parameters().")
    names = [name for name, _ in pairs]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"named_parameters has names twice: {', '.join(twice)}. Each must be unique.")
    named = {one: name for name, one in pairs}
    unnamed = [f"{place}.{number}" for place, group in enumerate(groups) for number, one in enumerate(group)
               if one not in named]  # fmt: skip
    if unnamed:
        raise ValueError(
            f"named_parameters does not name all parameters of the optimizer: those at group.place "
            f"{', '.join(unnamed[:5])} are missing."
        )
    mine = {one for group in groups for one in group}
    return {one: name for one, name in named.items() if one in mine}


def _groups(groups: Groups, parameters: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    if groups is None:
        return []
    if isinstance(groups, int):
        if groups <= 0:
            raise ValueError(f"groups={groups}: give a number from 1 on, or lists of parameters.")
        each, more = divmod(len(parameters), groups)
        starts = [place * each + min(place, more) for place in range(groups + 1)]
        return [parameters[first:last] for first, last in itertools.pairwise(starts) if first < last]
    found = [list(group) for group in groups]
    given = [one for group in found for one in group]
    if not all(isinstance(one, torch.Tensor) for one in given):
        raise ValueError("groups must be lists of parameters.")
    if len(set(given)) < len(given):
        raise ValueError("groups: a parameter can be in one group only.")
    return [kept for group in found if (kept := [one for one in group if one in set(parameters)])]


class AdasumReducing(Optimizer):
    """Methods added to the class of the optimizer."""

    _base: type[Optimizer]
    _parameter_names: dict[torch.Tensor, str]
    _compression: type[Compressor]

    def synchronize(self) -> None:
        """Do nothing, because gradients stay local to this worker."""

    def skip_synchronize(self) -> NoReturn:
        """Raise AssertionError, because there is no synchronization to skip."""
        raise AssertionError("skip_synchronize is not for op=hvd.Adasum: it combines the updates in step().")

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update with the gradients of this worker, then combine the parameter changes of all workers."""
        before = {one: one.detach().clone() for one in self._parameter_names if one.requires_grad}
        loss = self._base.step(self, closure)
        handles = []
        with torch.no_grad():
            for one, old in before.items():
                small, context = self._compression.compress(one.detach() - old)
                handles.append((allreduce_async(small, name=self._parameter_names[one], op=Adasum), context))
            for (one, old), (handle, context) in zip(before.items(), handles, strict=True):
                one.copy_(old + self._compression.decompress(handle.results(), context))
        return loss

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Do nothing, because gradients add up until ``step``."""
