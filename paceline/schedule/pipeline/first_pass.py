"""First pass of a loss over the whole batch: the forward passes of a schedule, before its step begins.

::

    1F1B, 3 stages, 4 microbatches; a backward pass is drawn twice as long as a forward pass

    stage 0    F0 F1 F2 F3 F0 F1 F2             B0--- F3 B1---    B2---    B3---
    stage 1       F0 F1 F2 F3 F0 F1       B0--- F2 B1--- F3 B2---    B3---
    stage 2          F0 F1 F2 F3 F0 B0--- F1 B1--- F2 B2--- F3 B3---

The last stage computes the loss after its first F3. Meanwhile, earlier stages begin the step, so the pipeline fills
only once. A forward pass of the first pass keeps nothing for a backward pass, so any order of them needs the same
memory.
"""

from __future__ import annotations

from dataclasses import replace

from paceline.schedule.pipeline.operations import Kind, Operation, Schedule


def first_pass(schedule: Schedule) -> Schedule:
    """Return the forward passes of a schedule, on the same workers, with their transfers.

    >>> from paceline.schedule.pipeline.drawing import listing
    >>> from paceline.schedule.pipeline.synchronous import one_forward_one_backward
    >>> print(listing(first_pass(one_forward_one_backward(2, 2))))
    0  F0 s0> F1 s1>
    1  r0> F0 r1> F1
    """
    workers = tuple(tuple(filter(_is_forward, operations)) for operations in schedule.workers)
    return replace(schedule, name=f"first pass of {schedule.name}", workers=workers)


def _is_forward(operation: Operation) -> bool:
    kind, stage, _, _, peer = operation
    return kind is Kind.FORWARD or (kind is Kind.SEND and peer > stage) or (kind is Kind.RECEIVE and peer < stage)
