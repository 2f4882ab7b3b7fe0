"""Local training: replicas train on their own, and an outer optimizer brings them together periodically.

::

    local.replicas = 4, local.every = 3       ░ inner step of a replica, on its share of the batch   O outer step

    step                    0   1   2       3   4   5
    worker 0   replica 0    ░   ░   ░ O ┐   ░   ░   ░ O ┐    outer gradient = outer weights - mean of the replicas
               replica 1    ░   ░   ░ O ┤   ░   ░   ░ O ┤    momentum       = outer_momentum * momentum + gradient
    worker 1   replica 2    ░   ░   ░ O ┤   ░   ░   ░ O ┤    outer weights -= outer_lr * (gradient
               replica 3    ░   ░   ░ O ┘   ░   ░   ░ O ┘                                 + outer_momentum * momentum)

Strategy ``diloco``: Douillard et al. 2023 (arXiv 2311.08105). Strategy ``local-sgd`` is its simplest case: ``outer_lr``
is 1 and ``outer_momentum`` is 0, so the outer weights become the mean. Stich 2018 (arXiv 1805.09767); after
``local.after`` synchronous steps, post-local SGD (Lin et al. 2018, arXiv 1808.07217).

A replica belongs to the settings, not to a worker: P workers hold R replicas, several each if P < R. The weight of a
replica in the mean is the number of samples that it has trained on since the last outer step. With ``exact``, the mean
follows the canonical tree over the replicas. After an outer step all replicas begin with the outer weights, and keep
the state of their inner optimizers. Between two outer steps the model has the outer weights, and no worker waits.
Recovery points, and changes of the membership, come after a period's last fragment has landed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import cycle

import torch
from torch import nn

from paceline.checkpoint.tensors import REPLICA
from paceline.comm.collectives.step_header import agreed_names
from paceline.comm.collectives.subgroup import Subgroup
from paceline.comm.world import World
from paceline.data.feed import MicrobatchGroup
from paceline.data.order import BatchOrder
from paceline.errors import CheckpointError, ConfigError
from paceline.schedule.shares import even
from paceline.settings import Settings
from paceline.step.checks import MicrobatchResult
from paceline.step.commit import means
from paceline.step.context import StepResult, TrainingContext
from paceline.step.divided.optimizer_state import DividedOptimizerState
from paceline.strategies.base import WHOLE_WIRES, Capabilities, Strategy
from paceline.strategies.data_parallel.allreduce import AllReduce
from paceline.strategies.full_batch import FullBatch
from paceline.strategies.local import sites, sparse
from paceline.strategies.local.agreement import check_trained
from paceline.strategies.local.inner import inner_step
from paceline.strategies.local.outer import STATE, OuterSteps, fragments_of
from paceline.strategies.local.periods import adapted
from paceline.strategies.local.replica import Replica, leave_averages
from paceline.strategies.local.uneven import ClaimedParts
from paceline.strategies.single import Single
from paceline.system.wires import OUTER

OF_SITES = tuple(f"local.{key}" for key in ("sampled", "masked", "threshold", "clip", "noise", "delta"))
"""Settings that only replicas of sites read."""
_MOST_INCOMPLETE = 8
"""Most consecutive outer steps without late workers. The next one needs all workers."""


def capabilities(settings: Settings, workers: int) -> Capabilities:
    outer = ("local.outer_lr", "local.outer_momentum") * (settings.strategy == "local-sgd")
    bound, uneven = settings.local.sites, settings.local.uneven
    quorum = settings.local.quorum is not None
    uneven_with = "local.uneven = False" + " and no local.quorum" * quorum
    exact_with = 'reduction="tree"' + ' or exact="fixed-point"' * (settings.wire == "float32")
    return Capabilities(
        exact=not uneven and (settings.fixed_point or settings.reduction != "collective"),
        exact_with=uneven_with if uneven else exact_with,
        fixed_point=not bound,
        wires=("float32",) if bound else (*WHOLE_WIRES, OUTER),
        replicated=False,
        replicas=1 if bound else settings.local.replicas,  # of sites, which keep nothing from round to round
        located=bound,
        averages=not quorum,
        loop_weights=False,
        carries=False,
        even_shares=not bound,
        reads=("local", "reduction", "bucket_megabytes"),
        ignores=outer + ("local.grace_seconds",) * (not quorum) + (("local.replicas",) if bound else OF_SITES),
    )


def validate(settings: Settings, model: nn.Module, order: BatchOrder, workers: int, largest: int) -> None:
    """Raise ConfigError if the microbatches of a batch, or the workers, do not fit the number of replicas."""
    if settings.local.sites:
        sites.validate(settings, model, order)
        return
    replicas, count, most = settings.local.replicas, order.microbatches, max(workers, largest)
    if count % replicas:
        divisors = ", ".join(str(one) for one in range(1, count + 1) if count % one == 0)
        raise ConfigError(
            f"local.replicas = {replicas} does not divide the {count} microbatches of a batch, of which each replica "
            f"trains on as many: use one of {divisors}, or set microbatches to a multiple of {replicas}."
        )
    if most > replicas:
        grows = f" (the run may grow from {workers} to {most})" if most > workers else ""
        raise ConfigError(
            f"{most} workers{grows} are more than local.replicas = {replicas}, so a worker would have nothing to "
            f"train. Use at most {replicas} workers, or more replicas, which give another result."
        )
    local = settings.local
    if local.fragments > local.every:
        raise ConfigError(
            f"local.fragments = {local.fragments} is more than local.every = {local.every}, but a step sends at most "
            f"one fragment: use at most {local.every} fragments, or a longer period."
        )
    if local.delay >= (between := local.every // local.fragments):
        raise ConfigError(
            f"local.delay = {local.delay} is too long: with local.every = {local.every} and local.fragments = "
            f"{local.fragments} a fragment is sent after every {between} steps, and it must land before the next one: "
            f"use at most {between - 1}."
        )
    _check_quorum(settings)
    sparse.validate(settings, model)
    fragments_of({name: one for name, one in model.named_parameters() if one.requires_grad}, local.fragments)


def _check_quorum(settings: Settings) -> None:
    local = settings.local
    if local.quorum is None:
        return
    if local.quorum > local.replicas:
        raise ConfigError(
            f"local.quorum = {local.quorum} is more than local.replicas = {local.replicas}: use at most "
            f"{local.replicas}, or leave it out to wait for all replicas."
        )
    if not local.uneven:
        raise ConfigError(
            f"local.quorum = {local.quorum} lets outer steps proceed without a late worker, which catches up only if "
            f"others take its parts of the batches: set local.uneven = True, or leave out local.quorum."
        )
    given = {"wire": repr(settings.wire)} if settings.wire != "float32" else {}
    plain = {"adaptive": False, "fragments": 1, "delay": 0}
    given |= {f"local.{key}": value for key, other in plain.items() if (value := getattr(local, key)) != other}
    for key, value in given.items():
        raise ConfigError(
            f"{key} = {value} cannot be combined with local.quorum, because a late worker would lack the decisions of "
            f"the others in the outer steps without it: leave out one of them."
        )


def build(context: TrainingContext) -> Strategy:
    return sites.Sites(context) if context.settings.local.sites else LocalTraining(context)


class LocalTraining(Strategy):
    """Strategy of replicas that train on their own, with an outer step after every ``local.every`` steps."""

    def __init__(self, context: TrainingContext) -> None:
        settings, world, replicas = context.settings, context.world, context.settings.local.replicas
        self._context, self._local = context, settings.local
        self._shares = even(replicas, world.size)
        synchronous = Single if world.size == 1 else AllReduce
        self._synchronous: Strategy | None = synchronous(context) if settings.local.after else None
        self._batch: FullBatch | None = None
        self._replicas: dict[int, Replica] = {}
        self._turns: Iterator[Replica] = iter(())  # replicas of this worker, in turn, for parts that it claims
        self._claimed = ClaimedParts(world) if self._local.uneven and world.size > 1 else None
        self._outer = OuterSteps(context, self._shares, self._replicas)
        self._last = StepResult(math.nan, math.nan, context.update.learning_rate)
        if self._local.quorum is not None and world.transport.capabilities.ordered:
            raise ConfigError(
                f"local.quorum = {self._local.quorum}: on GPUs the exchanges are those of all workers, so none can be "
                f"left out. Train on CPUs, or leave out local.quorum."
            )
        self._notice, self._complete = 0, True  # whether all workers took part in the last outer step
        self._last_complete = -1  # number of the last outer step in which all took part
        self._needs_all = False  # whether the next one needs all workers, as far as this worker knows
        self._divided = DividedOptimizerState(context, self._tensors, REPLICA)
        if not context.replicas:
            context.strategy_state.pop(STATE, None)  # of a run that has gone on with another strategy since
        divided = {"replicas": replicas, "fragments": self._local.fragments}
        period = {"every": self._local.every, "delay": self._local.delay}
        kept = context.strategy_state.setdefault(STATE, {**divided, **period, "trained": [], "momentum": {}})
        begun = bool(kept["trained"]) or self._outer.flight is not None  # else a period of another length may follow
        for what, number in {**divided, **(period if begun else {})}.items():
            if (before := kept.get(what, 1 if what in divided else number)) != number:
                raise CheckpointError(
                    f"The state is one of local.{what} = {before}, but local.{what} = {number} now: use the same "
                    f"number, or start a new run."
                )
        kept.update(period)
        before = kept.get("period", self._local.every)
        kept["period"] = before if begun else self._bounded(before if self._local.adaptive else self._local.every)
        often = "at most" if self._local.adaptive else "every"
        context.warnings.append(
            f"from step {self._local.after} on {replicas} replicas of the model train on their own, with an outer step "
            f"after {often} {self._local.every} steps. The model has the weights of the last outer step; in between, "
            f"the loss is that of this worker's replicas"
        )

    @property
    def _trained(self) -> list[int]:
        """Steps of the current period."""
        trained: list[int] = self._context.strategy_state[STATE]["trained"]
        return trained

    @property
    def _period(self) -> int:
        """Number of steps of the current period."""
        steps: int = self._context.strategy_state[STATE]["period"]
        return steps

    @property
    def _due(self) -> list[int]:
        """For each fragment, the number of steps of the period after which it is sent."""
        return [share.stop for share in even(self._period, self._local.fragments)]

    @property
    def _settled(self) -> bool:
        """Whether the last fragment of a period has just landed, on all workers."""
        return self._complete and self._outer.flight is None and len(self._trained) == self._local.delay

    # Replicas.

    def _begin(self) -> None:
        """Make the replicas of this worker: from the state that was loaded, or from the model and its optimizer."""
        if self._replicas:
            return
        context, loaded = self._context, self._context.replicas
        own, fragments = self._shares[context.world.rank], self._local.fragments
        self._replicas.update((number, Replica(context, number, fragments)) for number in own)
        self._turns = cycle(self._replicas.values())
        if loaded:
            for one in self._replicas.values():
                one.load(loaded)
            loaded.clear()
        leave_averages(context.update.optimizer)

    def _tensors(self) -> dict[str, torch.Tensor]:
        self._begin()
        local = self._local
        apart = bool(self._trained) or local.fragments > 1 or local.delay > 0 or local.mixing > 0
        return {name: value for one in self._replicas.values() for name, value in one.tensors(weights=apart).items()}

    @property
    def divided(self) -> DividedOptimizerState | None:
        return self._divided if self._replicas or self._context.replicas else None

    def point(self, steps: int) -> Mapping[str, torch.Tensor] | None:
        if steps >= self._local.after and self.divided is None:
            return {}  # replicas begin as the model at rest
        return self._tensors() if steps >= self._local.after and self._settled else None

    def synchronize(self, steps: int) -> None:
        if self._claimed is not None and self._local.quorum is not None:
            self._outer.catch_up(self._context.world, self._context.world.gather(self._outer.made, "step"))

    def close(self) -> frozenset[str] | None:
        if self._synchronous is not None:
            self._synchronous.close()
        self._outer.close()
        if self.divided is None:
            return None
        self._context.replicas.update(self._tensors())
        return None if len(self._shares) == 1 else frozenset()

    # Steps.

    def groups(self, step: int) -> list[range]:
        if step < self._local.after:
            assert self._synchronous is not None
            return self._synchronous.groups(step)
        if self._batch is None:  # after the synchronous steps, which may have decided on fusion
            self._batch = FullBatch(self._context, encoded=False)
        if self._claimed is not None:
            return []
        own = self._shares[self._context.world.rank]
        return [group for number in own for group in self._batch.groups(step, self._share(step, number))]

    def _share(self, step: int, number: int) -> range:
        return even(len(self._context.order.parts_of(step)), self._local.replicas)[number]

    def step(self, step: int, groups: list[MicrobatchGroup]) -> StepResult:
        if step < self._local.after:
            assert self._synchronous is not None
            return self._synchronous.step(step, groups)
        self._begin()
        self._outer.send_again()
        context, made, parts = self._context, list[StepResult](), list[MicrobatchResult]()
        assert self._batch is not None
        for replica, own in self._work(step, groups, self._batch):
            context.world.check()
            updated, results = inner_step(context, self._batch, step, own, replica)
            made.append(updated)
            parts += results
        context.update.advance()
        self._trained.append(step)
        self._divided.hashes = None
        if made:  # else the batch is short, or others have claimed its parts, and this worker repeats the last result
            loss, metrics = means(context, parts)
            norm = max(float(one.norm) for one in made)
            self._last = StepResult(loss, norm, made[-1].learning_rate, all(one.applied for one in made), 0, metrics)
        result = self._last
        if len(self._trained) in self._due:
            result = self._send(step, parts, self._due.index(len(self._trained)))
        self._outer.go_on()
        if len(self._trained) == self._period:
            self._trained.clear()
            self._begin_period(step, result.loss)
        if self._settled:
            result, self._notice = replace(result, notice=self._notice), 0
        # a worker takes no time for a batch whose parts others have claimed
        return result if self._claimed is None else replace(result, paced_over=self._local.every)

    def _begin_period(self, step: int, loss: float) -> None:
        """Choose the length of the next period, by the loss at the end of this one if ``local.adaptive``."""
        kept, before, steps = self._context.strategy_state[STATE], self._period, self._local.every
        if self._local.adaptive:
            if 0 < loss < math.inf:
                kept.setdefault("first loss", loss)
            steps = self._bounded(adapted(steps, kept.get("first loss", loss), loss))
        kept["period"] = steps
        if self._period != before:
            self._context.events.mark("period", step=step, steps=self._period, loss=loss)

    def _bounded(self, steps: int) -> int:
        """Return a number of steps in which each fragment can be sent and land, and at most ``local.every``."""
        return max(self._local.fragments * (self._local.delay + 1), min(self._local.every, steps))

    def _work(
        self, step: int, groups: list[MicrobatchGroup], batch: FullBatch
    ) -> Iterator[tuple[Replica, list[MicrobatchGroup]]]:
        """Yield the inner steps of this worker: a replica, and the microbatches on which it trains."""
        if self._claimed is None:
            for number, replica in self._replicas.items():
                share = self._share(step, number)
                if own := [group for group in groups if group.microbatches.start in share]:
                    yield replica, own
            return
        shares = [share for number in range(self._local.replicas) if (share := self._share(step, number))]
        done = len(self._trained) + 1
        later = min(due - done for due in self._due if due >= done) * self._local.replicas
        for share in self._claimed.claim(step, shares, later):
            yield next(self._turns), self._context.feed.load(step, batch.groups(step, share))

    def _present(self, step: int) -> World | Subgroup | None:
        """Return the workers of the outer step after ``step``. None if they have gone on without this one."""
        world, quorum, shares = self._context.world, self._local.quorum, self._shares
        if self._claimed is None or quorum is None:
            return world

        def enough(here: Sequence[int]) -> bool:
            return not self._needs_all and sum(len(shares[rank]) for rank in here) >= quorum

        with world.awaiting(f"in the outer step after step {step}"):
            ranks = self._claimed.arrive(step, enough, self._local.grace_seconds)
        self._complete = len(ranks) == world.size
        if self._complete:
            return world
        return Subgroup(world, ranks) if ranks else None

    def _send(self, step: int, parts: list[MicrobatchResult], fragment: int) -> StepResult:
        """Send a fragment, unless this worker is late. Returns the step's result with the loss of the whole batch."""
        begin, context = time.perf_counter(), self._context
        workers = self._present(step)
        if workers is None:
            return self._last
        world, live, metrics = context.world, context.compute.buffers.live, context.compute.metrics
        sums = [(part.microbatches, part.rank, part.loss, part.counted, part.metrics) for part in parts]
        counts = {number: one.counts[fragment] for number, one in self._replicas.items()}
        pace = self._claimed.pace if self._claimed is not None else 0.0
        largest = self._outer.largest(fragment)
        own = list(self._trained), counts, sums, pace, metrics, largest, live, world.notice(), self._outer.made
        everyone = workers.gather(own, f"outer step after step {step}")
        check_trained([trained for trained, *_ in everyone])
        quorum = workers if isinstance(workers, Subgroup) else None
        if self._claimed is not None:
            paces = [one[3] for one in everyone] if self._local.quorum is None else ()
            self._claimed.exchanged(paces, self._complete)
            self._outer.catch_up(workers, [made for *_, made in everyone])
        if given := [(rank, one[4]) for rank, one in enumerate(everyone) if one[4]]:
            context.compute.metrics = agreed_names(given)
        context.compute.buffers.fix(name for *_, names, _, _ in everyone for name in names)
        known = {number: count for _, counts, *_ in everyone for number, count in counts.items()}
        bounds = [one[5] for one in everyone]
        self._outer.send(step, fragment, known, bounds, time.perf_counter() - begin, quorum)
        notice, made = max(notice for *_, notice, _ in everyone), max(made for *_, made in everyone)
        if self._complete:
            self._notice, self._last_complete, self._needs_all = notice, made, False
        else:  # alike on all that take part. Late workers do not know, and leave the next decision to them
            self._notice, self._needs_all = 0, notice > 0 or made - self._last_complete >= _MOST_INCOMPLETE
        whole = [
            MicrobatchResult(at, rank, loss, counted, metrics=tuple(found))
            for _, _, sums, *_ in everyone
            for at, rank, loss, counted, found in sums
        ]
        if not whole:  # late workers have claimed all parts of this batch
            return self._last
        loss, averages = means(context, sorted(whole, key=lambda part: part.microbatches.start))
        return replace(self._last, loss=loss, metrics=averages)
