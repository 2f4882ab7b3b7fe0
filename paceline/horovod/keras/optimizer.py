"""A Keras optimizer that updates with the mean of the gradients of all workers."""

from __future__ import annotations

from typing import Any

from paceline.horovod import torch as hvd

_MARK = "_paceline_distributed"


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    compression: Any = hvd.Compression.none,
    op: Any = hvd.Average,
    groups: int | None = None,
    process_set: hvd.ProcessSet = hvd.global_process_set,
) -> Any:
    """Return a new Keras optimizer with the configuration of one, which reduces gradients before it applies them.

    Args:
        optimizer: of Keras 3 on the torch back end.
        name: of the new one; that of the optimizer if none.
        compression: such as ``Compression.fp16``.
        op: ``Average``, ``Sum`` or ``Adasum``.
        groups: into how many groups the gradients are put that are reduced at once; one if none.
        process_set: who takes part.

    Raises:
        ValueError: it is distributed already, or there are fewer than one group.
    """
    if getattr(optimizer, _MARK, False):
        raise ValueError(f"DistributedOptimizer: {type(optimizer).__name__} is distributed already.")
    if groups is not None and groups < 1:
        raise ValueError(f"DistributedOptimizer: groups={groups}; there must be at least one.")
    base = type(optimizer)

    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        """Apply the gradients of all workers."""
        return base.apply(self, _reduced(list(grads), compression, op, groups or 1, process_set), trainable_variables)

    members = {"apply": apply, _MARK: True, "__module__": base.__module__}
    kind: Any = type(base.__name__, (base,), members)
    made = kind.from_config(optimizer.get_config())
    if name is not None:
        made.name = name
    return made


def _reduced(gradients: list[Any], compression: Any, op: Any, groups: int, process_set: hvd.ProcessSet) -> list[Any]:
    """The gradients over all workers; what is None stays so."""
    places = [place for place, one in enumerate(gradients) if one is not None]
    size = -(-len(places) // groups)
    for start in range(0, len(places), max(size, 1)):
        here = places[start : start + size]
        smaller, contexts = zip(*(compression.compress(gradients[place]) for place in here), strict=True)
        reduced = hvd.grouped_allreduce(list(smaller), op=op, name=f"keras.{start}", process_set=process_set)
        for place, one, context in zip(here, reduced, contexts, strict=True):
            gradients[place] = compression.decompress(one, context)
    return gradients
