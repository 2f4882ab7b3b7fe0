"""Losses over the whole batch: a first pass over all microbatches before the step of another strategy.

::

    worker 0   F0 F1 ┐                               F0 B0 F1 B1 ┐
    worker 1   F2 F3 ┼ outputs ─ loss, gradient ─    F2 B2 F3 B3 ┼ reduce ─ update
    worker 2   F4    ┘ (the same on every worker)    F4 B4       ┘

Each worker needs the memory of one microbatch, and that of all outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from paceline.comm.collectives.step_header import check_steps
from paceline.data.feed import MicrobatchGroup
from paceline.partition.model_checks import only_uses
from paceline.schedule.tree import Node, first_of, total
from paceline.step.buffers import summable
from paceline.step.context import Batch, StepResult, TrainingContext
from paceline.step.gradients.accumulate import Accumulator, Values, add
from paceline.step.gradients.batch_loss import BatchLoss, Plan
from paceline.step.gradients.outputs import OutputForm, Outputs, check_forms
from paceline.step.probes.first_step import try_forward_pass
from paceline.strategies.base import Delegating, LossPlace, Strategy

_WHAT = "loss over the whole batch"


class BatchLosses(Delegating):
    """Strategy that computes the loss over the whole batch and lets another strategy compute its gradients."""

    def __init__(self, context: TrainingContext, build: Callable[[TrainingContext], Strategy]) -> None:
        loss = context.compute.batch_loss
        assert isinstance(loss, BatchLoss)
        self._context, self._loss = context, loss
        self._inner = build(context)

    def step(self, step: int, groups: list[MicrobatchGroup]) -> StepResult:
        groups = self._loaded(step, groups)
        if (plan := self._plan(step, groups)) is not None:
            self._loss.begin(plan)
        try:
            if self._inner.loss_place is None:
                self._probe(step, groups)
            result = self._inner.step(step, groups)
            if self._inner.loss_place is not None:  # the cut has been checked, unless the step was interrupted
                self._context.probe_results.repeatable = True
            return result
        finally:
            self._loss.end()

    def _loaded(self, step: int, groups: list[MicrobatchGroup]) -> list[MicrobatchGroup]:
        """Return the microbatches of this worker in the first pass, loaded."""
        known = {group.microbatches: group for group in groups}
        own = self._inner.encodes(step)
        missing = [one for one in own if one not in known]
        known.update((group.microbatches, group) for group in self._context.feed.load(step, missing) if missing)
        return [known[one] for one in own]

    def _probe(self, step: int, groups: list[MicrobatchGroup]) -> None:
        """Probe the forward pass before the first step, now that microbatches have losses."""
        self._loss.compares = False  # the probe itself names what differs
        try:
            try_forward_pass(self._context, groups, step)
        finally:
            self._loss.compares = True

    def _plan(self, step: int, groups: list[MicrobatchGroup]) -> Plan | None:
        """Run the first pass. Returns None if other workers compute the loss."""
        context, buffers = self._context, self._context.compute.buffers
        order, own = context.order, _Own(context, self._loss)
        buffers.begin()
        try:
            with self._loss.first_pass(own.add):
                self._inner.encode(context, step, groups)
            place = self._inner.loss_place
            everyone = self._exchange(own.message(step), place)
            if place is not None and context.world.rank not in place.workers:
                return None
            outputs, marks = self._united(everyone)
            buffers.put_back()
            batch = Batch(
                *(step, order.epoch_of(step), order.samples_of(step), order.is_last(step)),
                *([], 0.0, context.world.generation),
            )
            twice = not context.probe_results.repeatable
            allowed = place.tensors if place is not None and twice else None
            with nullcontext() if allowed is None else only_uses(context.compute.model, allowed, _WHAT):
                plan = self._loss.plan(context.compute, outputs, batch, twice=twice)
        finally:
            buffers.put_back()
        return plan._replace(rows=order.parts_of(step), marks=marks)

    def _exchange(self, own: dict[str, Any], place: LossPlace | None) -> list[dict[str, Any]]:
        """Return the messages of all workers, or the own message if no other worker computes outputs."""
        if place is not None and len(place.workers) == 1:  # the others have begun the second pass
            return [own]
        everyone = self._context.world.gather(own, "step")
        check_steps([one["step"] for one in everyone], {own["step"]})
        return everyone

    def _united(self, everyone: list[dict[str, Any]]) -> tuple[Outputs, dict[int, dict[str, list[int | float]]]]:
        """Return the outputs of all microbatches and the digests of their sums, the same on every worker."""
        holders = [(rank, one) for rank, one in enumerate(everyone) if one["rows"]]
        _, first = holders[0]
        for rank, one in holders[1:]:
            check_forms(first["forms"], one["forms"], _place(*holders[0]), _place(rank, one))
        forms: dict[str, OutputForm] = first["forms"]
        rows: dict[int, dict[str, torch.Tensor]] = {}
        marks: dict[int, dict[str, list[int | float]]] = {}
        nodes: list[tuple[Node, Values]] = []
        for _, one in holders:
            rows.update(one["rows"])
            marks.update(one["marks"])
            nodes += [(Node(level, place), values) for level, place, values in one["nodes"]]
        device, needing = self._context.world.device, {name for _, one in holders for name in one["needing"]}
        sums: Values = total(sorted(nodes, key=lambda one: first_of(one[0])), add)
        added = iter(sums)
        tensors = dict[str, torch.Tensor]()
        for name, form in forms.items():
            if form.added:
                value = next(added)
                assert value is not None
            else:
                value = torch.cat([rows[microbatch][name].to(device) for microbatch in sorted(rows)])
            tensors[name] = value.to(device).requires_grad_(name in needing)
        return Outputs(tensors, forms), marks


class _Own:
    """Outputs of this worker's microbatches in the first pass: rows of each, and sums along the canonical tree."""

    def __init__(self, context: TrainingContext, loss: BatchLoss) -> None:
        self._loss = loss
        self.rows: dict[int, dict[str, torch.Tensor]] = {}
        self.marks: dict[int, dict[str, list[int | float]]] = {}
        self.forms: dict[str, OutputForm] = {}
        self.needing: set[str] = set()
        self._sums = Accumulator(context.settings.exact)

    def add(self, microbatch: int, outputs: Outputs) -> None:
        if self.rows:
            known, found = (f"microbatch {one}" for one in (next(iter(self.rows)), microbatch))
            check_forms(self.forms, outputs.forms, known, found)
        self.forms = outputs.forms
        self.needing.update(name for name, value in outputs.tensors.items() if value.requires_grad)
        self.marks[microbatch] = self._loss.marks_of(outputs)
        self.rows[microbatch] = {name: value.detach().clone() for name, value in outputs.select(added=False).items()}
        sums = outputs.select(added=True).values()
        self._sums.push(microbatch, [summable(value.detach()).clone() for value in sums])

    def message(self, step: int) -> dict[str, Any]:
        """Return the message to all workers. Without ``exact``, the sum of a worker is a node of its own."""
        nodes = [(*node, values) for node, values in self._sums.nodes()]
        return {
            "step": step,
            "forms": self.forms,
            "needing": sorted(self.needing),
            "rows": self.rows,
            "marks": self.marks,
            "nodes": nodes,
        }


def _place(rank: int, message: dict[str, Any]) -> str:
    return f"microbatch {next(iter(message['rows']))} on rank {rank}"
