"""Reduction of a synchronous step: mean gradients and mean buffers.

::

    backward of the last microbatch    layer 3   layer 2   layer 1   layer 0
    bucket of layers 3 and 2                        └ reduce ──────┐
    bucket of layers 1 and 0                                       │   └ reduce ─┐
    finish                                                         └─────────────┴─ .grad = mean
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain

import torch
from torch import nn

from paceline.comm.collectives.step_header import StepHeader
from paceline.comm.collectives.subgroup import Subgroup
from paceline.comm.reduction.choice import Wanted, reduction_for
from paceline.comm.reduction.direct import DirectExchange
from paceline.comm.reduction.division import Divisor
from paceline.comm.reduction.executor import Reduction
from paceline.comm.reduction.narrow import FLOAT8
from paceline.comm.world import World
from paceline.data.feed import MicrobatchGroup
from paceline.errors import InputError
from paceline.schedule.slices import Slice
from paceline.schedule.tree import Node
from paceline.step.checks import check_dense
from paceline.step.context import TrainingContext
from paceline.step.gradients.accumulate import Accumulator, Values, add, align_value, divided
from paceline.step.gradients.formats import codec_for
from paceline.strategies.data_parallel.gradient_groups import GradientGroup, Piece, Slices, filled, groups_of, put
from paceline.system.torch_internals import run_last

_GRADIENT_TAGS, _STATISTICS_TAGS = 1 << 12, 1 << 27  # below 1 << 28, the upper limit of MPICH


class Reducer:
    """Reducer of the gradients of a step, and of the buffers that its forward passes change, to means over workers.

    To overlap with the last backward pass, call ``begin``, then ``push`` after the backward pass of each microbatch but
    the last, ``last`` before the last one, and ``written`` after it. A worker without a microbatch calls ``nothing``.
    Call ``send`` for sums that are already complete. In both cases ``finish`` then puts the means into ``.grad``.

    Args:
        context: training context.
        parameters: parameters whose gradients are reduced. Defaults to all trained parameters.
        workers: workers that contribute to each sum. Defaults to all workers.
        reduction: reduction of the gradients, last parameter first. Defaults to a reduction that fits the workers.
        any_order: whether each worker has at most one sum, and the sums may be added in any order.
        slices: slices of the parameters that ``reduction`` reduces. :meth:`finish` then leaves each mean in the
            reduction, on its owner. Defaults to whole parameters.

    With ``exact="fixed-point"`` or a format of the setting ``wire`` the sums are encoded (``step.gradients.codec``).
    """

    def __init__(
        self,
        context: TrainingContext,
        parameters: Mapping[str, nn.Parameter] | None = None,
        workers: World | Subgroup | None = None,
        reduction: Reduction | None = None,
        overlap: bool = True,
        any_order: bool = False,
        slices: Slices | None = None,
    ) -> None:
        named = context.update.parameters if parameters is None else parameters
        self._context = context
        self._workers = workers or context.world
        self._any_order = any_order
        self._names, self._parameters = list(named), list(named.values())
        self._codec = codec_for(context, named) if slices is None else slices.codec
        self.memory = self._codec.memory if self._codec else None
        self.expect = self._codec.expect if self._codec and self._codec.bounded else None
        examples = self._codec.examples() if self._codec else [value.detach() for value in self._parameters]
        self.reduction = reduction or self._reduction_of(examples[::-1], "gradients", _GRADIENT_TAGS, any_order)
        self._statistics: Reduction | None = None
        self._means: Values = []
        self._armed = self._computing = False
        self._sliced = slices is not None
        backwards = [Slice(place, 0, one.numel(), 0) for place, one in enumerate(self._parameters)][::-1]
        buckets = self.reduction.bucket_members if self.reduction else []
        self._groups = groups_of(slices.encoded if slices else backwards, buckets)
        self._hooks = [
            self._parameters[place].register_post_accumulate_grad_hook(partial(self._arrive, group, place))
            for group in (self._groups if overlap else ())
            for place in group.places
        ]

    def _reduction_of(self, examples: list[torch.Tensor], name: str, tags: int, any_order: bool) -> Reduction | None:
        if isinstance(self._workers, World):
            settings = self._context.settings
            widen = self._codec is not None and not settings.along_tree
            along_tree = not any_order or any(one.dtype in FLOAT8 for one in examples)
            wanted = Wanted("tree" if along_tree else settings.reduction, settings.bucket_megabytes, widen)
            chosen = reduction_for(self._workers, examples, self._context.events, name, tags, wanted)
            self._context.events.mark("reduction", what=name, **chosen.describe())
            return chosen
        if self._workers.size == 1:
            return None
        return Reduction(self._workers, DirectExchange(self._workers, tags), examples, self._context.events, name)

    def close(self) -> None:
        """Stop sending gradients, and release them."""
        self._armed = self._computing = False
        for hook in self._hooks:
            hook.remove()
        self.clear()

    def clear(self) -> None:
        """Release the gradients."""
        for parameter in self._parameters:
            parameter.grad = None

    # Overlapped with the backward pass.

    def begin(self, nodes: list[list[Node]], exact: bool, step: int) -> None:
        """Start a step; ``nodes`` are the tree nodes that each rank will send."""
        self._armed, self._computing, self._step = False, True, step
        self._nodes = nodes
        self._sums = Accumulator(exact)
        self._missing: list[list[int]] = []
        self._kept: list[Values] = []
        self._nearest: list[Values] = []
        self.clear()

    def push(self, microbatch: int) -> None:
        """Take the gradients of a microbatch that is not the last one."""
        values = self.take(self._step, microbatch)
        self._missing.append([place for place, value in enumerate(values) if value is None])
        self._sums.push(microbatch, values)

    def take(self, step: int = 0, microbatch: int = 0) -> Values:
        """Return the gradients as they are summed, and clear ``.grad``. The arguments key the random rounding."""
        values: Values = [parameter.grad for parameter in self._parameters]
        self.clear()
        check_dense(self._names, values)
        return self._codec.encode(values, step, microbatch) if self._codec else values

    def last(self, microbatch: int, header: StepHeader) -> None:
        """Start the reduction: the next backward pass sends gradients as it computes them."""
        assert self.reduction is not None
        self._last, (self._kept, self._nearest) = microbatch, self._sums.before_last(microbatch)
        self._begin(self._nodes, header.count)
        self._held: list[Piece] = []
        for group in self._groups:
            group.arrived.clear()
        for hook in self._hooks:
            run_last(hook)  # the script's own hooks, which may be newer, change the gradients before they are sent
        self._armed = True

    def nothing(self, header: StepHeader) -> None:
        """Reduce this worker's chunk of the others' gradients in a step for which it has no microbatch."""
        assert self.reduction is not None
        self._begin(self._nodes, header.count)
        for members in self.reduction.bucket_members:
            self._room_for(members)
            self._written(members)

    def _begin(self, nodes: list[list[Node]], count: Callable[[], Divisor], held: bool = False) -> None:
        assert self.reduction is not None
        self._count = count
        self.reduction.begin(nodes, held=held)

    def _divisor(self, decodes: bool = False) -> Divisor:
        """Return the divisor of this step's sums, which also removes the loss scale. Decoding divides encoded sums."""
        count, scale = self._count(), self._context.compute.scale
        if self._codec is not None and not decodes:
            return 1.0
        return count if scale == 1.0 else count * scale

    def _written(self, members: list[int]) -> None:
        assert self.reduction is not None
        self.reduction.written(*members)
        if self.reduction.needs_divisor:
            self.reduction.divide_by(self._divisor())

    def written(self) -> list[list[int]]:
        """Send the sums of the parameters to which the last backward pass, now complete, gave no gradient.

        Returns:
            For each microbatch, the indices of the parameters to which it gave no gradient.
        """
        self._computing = False
        if self._armed:
            self._armed = False
            left = [group for group in self._groups if len(group.arrived) < len(group.places)]
            self._missing.append(sorted(place for group in left for place in {*group.places}.difference(group.arrived)))
            for group in left:
                self._write(group)
            assert not self._held, "sums without room"
        if self._codec is not None:
            self._codec.send()
        return self._missing

    def _arrive(self, group: GradientGroup, place: int, _: torch.Tensor) -> None:
        if self._computing:  # else the script's own backward pass
            self._context.world.check()  # all wait for the last worker that gives up a step
        group.arrived.append(place)
        if len(group.arrived) < len(group.places):
            return
        if self._armed:
            self._write(group)
        else:
            group.arrived.clear()  # a backward pass of an earlier microbatch, or of the script

    def _write(self, group: GradientGroup) -> None:
        """Add the gradients of the last microbatch to the earlier sums, and pass all sums to the reduction."""
        gradients = self._last_gradients(group)
        earlier: list[Values] = [[values[place] for place in group.places] for values in self._nearest]
        *merged, nearest = earlier or [[None] * len(group.places)]
        for before in merged:
            gradients = add(before, gradients)
        sums = [(group.cut([values[place] for place in group.places]), None) for values in self._kept]
        self._held += group.pieces([*sums, (group.cut(nearest), group.cut(gradients))])
        self._write_held()

    def _write_held(self) -> None:
        """Write the sums that have room: a bucket may have to wait until an earlier one has been added up."""
        assert self.reduction is not None
        waiting = -1
        while waiting != len(self._held):
            held, waiting, self._held = self._held, len(self._held), []
            for members, sums in held:
                if self.reduction.has_room(members[0]):
                    for own, pair in zip(self._room_for(members), sums, strict=True):
                        put(own, *pair)
                    self._written(members)
                else:
                    self._held.append((members, sums))

    def _room_for(self, members: list[int]) -> list[list[torch.Tensor]]:
        """Return the slots of tensors of one bucket. Wait for the means of a bucket before it, if they are in use."""
        assert self.reduction is not None
        if self.reduction.divisor is None and self.reduction.must_wait(members[0]):
            self.reduction.divide_by(self._divisor())
        return self.reduction.slots_of(members)

    def _last_gradients(self, group: GradientGroup) -> Values:
        """Return the last microbatch's gradients for a group, as they are summed, and clear ``.grad``."""
        given = set(group.arrived)
        if len(given) < len(group.arrived):
            twice = next(place for place in group.arrived if group.arrived.count(place) > 1)
            raise InputError(
                f"The parameter {self._names[twice]!r} got its gradient in two parts in one backward pass, as in "
                f"reentrant checkpointing of a shared layer. Use checkpoint(..., use_reentrant=False)."
            )
        gradients: Values = [None] * len(group.places)
        for index, place in enumerate(group.places):
            parameter = self._parameters[place]
            if place in given:
                gradients[index] = parameter.grad
                parameter.grad = None
        check_dense([self._names[place] for place in group.places], gradients)
        return self._codec.encode(gradients, self._step, self._last, group.places) if self._codec else gradients

    # When the sums are complete.

    def send(
        self, nodes: list[list[Node]], sums: list[Values], count: Callable[[], Divisor], held: bool = False
    ) -> None:
        """Send complete sums.

        Args:
            nodes: for each rank, the nodes whose sums it sends.
            sums: sums of this worker's nodes.
            count: function that returns the divisor of all sums, and raises if workers are at different steps. Called
                after the first bucket was sent.
            held: whether nothing waits for other workers before :meth:`go_on`.
        """
        if self.reduction is None:
            self._count = count
            self._means = divided(nodes[0], sums, self._divisor())
        else:
            self._begin(nodes, count, held)
            for members in filled(self.reduction.bucket_members, self._room_for, [*map(self._by_member, sums)]):
                self._written(members)
        if self._codec is not None:
            self._codec.send()

    def _by_member(self, values: Values) -> Values:
        """Return the value for each tensor of the reduction, given the value for each parameter."""
        found: Values = [None] * sum(len(group.members) for group in self._groups)
        for group in self._groups:
            for member, value in zip(group.members, group.cut([values[place] for place in group.places]), strict=True):
                found[member] = value
        return found

    def go_on(self) -> None:
        """Add up the sums that have been held, and start to distribute the means."""
        if self.reduction is not None:
            self.reduction.divide_by(self._divisor())
            self.reduction.go_on()

    def finish(self, measure: bool = False) -> bool:
        """Wait for the means and put them into ``.grad``.

        Args:
            measure: whether the update takes the norm of each mean as it arrives.

        Returns:
            Whether the means are valid. False if encoded gradients did not fit: compute the step :meth:`again`.
        """
        if self.reduction is None:
            means = [align_value(value) for value in self._means]
        else:
            if self.reduction.divisor is None:
                self.reduction.divide_by(self._divisor())
            self.reduction.finish(self._context.update.measure if measure and self._codec is None else None)
            if self._sliced:
                if self._codec is not None and not self._codec.fits():
                    return False
                for parameter in self._parameters:
                    parameter.grad = parameter.detach().new_zeros(()).expand_as(parameter)  # commit clears unused ones
                return True
            means = [*reversed(self.reduction.means())]
        if self._codec is not None:
            if not self._codec.fits():
                return False
            means = self._codec.decode(means, self._divisor(decodes=True))
        for parameter, mean in zip(self._parameters, means, strict=True):
            parameter.grad = mean
        return True

    def means_of(self, slices: Mapping[int, torch.Tensor], places: Sequence[int]) -> dict[int, torch.Tensor]:
        """Return the means of slices by index of the tensor, after :meth:`finish`. The next step may overwrite them.

        Args:
            slices: slices of the parameters, by index of the tensor.
            places: index of the parameter of each slice.
        """
        assert self.reduction is not None
        sums: Values = [self.reduction.mean(member) for member in slices]
        means = sums
        if self._codec is not None:
            means = self._codec.decode(sums, self._divisor(decodes=True), [*slices.values()], places)
        return {member: mean for member, mean in zip(slices, means, strict=True) if mean is not None}

    def again(self, step: int, groups: list[MicrobatchGroup], nodes: list[list[Node]], header: StepHeader) -> None:
        """Compute and send the gradients of a step again, encoded with scales that fit.

        Args:
            nodes: for each rank, the nodes whose sums it sends, as in the first attempt.
        """
        sums = Accumulator(self._context.settings.along_tree)
        for group in groups:
            self._context.world.check()
            self._context.compute.forward_pass(group, step).total.backward()
            sums.push(group.microbatches.start, self.take(step, group.microbatches.start))
        self.send(nodes, sums.values(), header.count)

    def accept(self, applied: bool = True) -> None:
        """Accept the step after the model was updated, unless it was skipped: its gradients determine later scales."""
        if self._codec is not None:
            self._codec.accept(applied)

    # Buffers.

    def statistics(self, nodes: list[list[Node]], sums: list[Values], samples: float) -> list[torch.Tensor]:
        """Return the means of the buffers that the forward passes change, such as running statistics.

        Args:
            nodes: for each rank, the nodes whose sums it has.
            sums: for each node of this worker, the sums of the results of :meth:`Buffers.collect`.
        """
        buffers = self._context.compute.buffers
        if not buffers.fixed:
            places = buffers.fix(chain.from_iterable(self._context.world.gather(buffers.live, "step")))
            sums = [[values[place] for place in places] for values in sums]
        if not buffers.live:
            return []
        if self._statistics is None:
            self._statistics = self._reduction_of(
                buffers.examples(), "buffers", _STATISTICS_TAGS, self._any_order and not self._context.settings.exact
            )
        if self._statistics is None:
            return [mean for mean in divided(nodes[0], sums, samples) if mean is not None]
        self._statistics.begin(nodes, samples)
        for members in filled(self._statistics.bucket_members, self._statistics.slots_of, sums):
            self._statistics.written(*members)
        self._statistics.finish()
        return self._statistics.means()
