"""Keras optimizer that updates with gradients reduced over all workers."""

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
    """Return a new Keras optimizer with the same configuration, which reduces gradients before it applies them.

    Args:
        optimizer: optimizer of Keras 3 on the torch back end.
        name: name of the new optimizer. Defaults to that of ``optimizer``.
        compression: compression of transferred gradients, such as ``Compression.fp16``. Defaults to none.
        op: ``Average``, ``Sum`` or ``Adasum``. Defaults to ``Average``.
        groups: number of groups into which the gradients are divided for their reduction. Defaults to 1.
        process_set: workers that take part. Defaults to all.

    Raises:
        ValueError: ``optimizer`` is already distributed, or ``groups`` is less than 1.
    """
    if getattr(optimizer, _MARK, False):
        raise ValueError(f"DistributedOptimizer: {type(optimizer).__name__} is already distributed.")
    if groups is not None and groups < 1:
        raise ValueError(f"DistributedOptimizer: groups={groups}; there must be at least one.")
    base = type(optimizer)

    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        """Reduce the gradients over all workers and apply them."""
        return base.apply(self, _reduced(list(grads), compression, op, groups or 1, process_set), trainable_variables)

    members = {"apply": apply, _MARK: True, "__module__": base.__module__}
    kind: Any = type(base.__name__, (base,), members)
    made = kind.from_config(optimizer.get_config())
    if name is not None:
        made.name = name
    return made


def _reduced(gradients: list[Any], compression: Any, op: Any, groups: int, process_set: hvd.ProcessSet) -> list[Any]:
    """Replace gradients with gradients reduced over all workers, and return them. None stays None."""
    places = [place for place, one in enumerate(gradients) if one is not None]
    size = -(-len(places) // groups)
    for start in range(0, len(places), max(size, 1)):
        here = places[start : start + size]
        smaller, contexts = zip(*(compression.compress(gradients[place]) for place in here), strict=True)
        reduced = hvd.grouped_allreduce(list(smaller), op=op, name=f"keras.{start}", process_set=process_set)
        for place, one, context in zip(here, reduced, contexts, strict=True):
            gradients[place] = compression.decompress(one, context)
    return gradients
