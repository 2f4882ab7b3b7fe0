"""Federated averaging: each site trains a replica of the model on its own data, and only updates of the model leave it.

::

    local.every = 3, local.sampled = 2      ░ inner step of a site on one of its microbatches   O outer step

    step                  0     1     2         3     4     5
    worker 0   site a     ░░    ░     ░░  O ┐                           A site with more data makes more inner steps.
               site b                     O ┤   ░     ░     ░   O ┐     A site that is not drawn for a round rests.
    worker 1   site c     ░     ░     ░   O ┘   ░     ░         O ┘

McMahan et al. 2017 (arXiv 1602.05629): with SGD as the inner optimizer and strategy ``local-sgd``, whose outer weights
are the mean of the sites weighted by their samples, this is FedAvg. With ``diloco`` the outer optimizer makes it
FedAvgM (Hsu et al. 2019, arXiv 1909.06335).

A site is a shard of Located data. It is trained by a worker that has the shard, from the outer weights and with a new
inner optimizer in each round, so a site has no state between rounds that another worker would need. A site that no
worker has does not train until a worker with its shard joins.
"""

from __future__ import annotations

import importlib.util
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from paceline.comm.collectives.step_header import agreed_names
from paceline.data.feed import MicrobatchGroup
from paceline.data.keys import SITES, seed_of
from paceline.data.located.order import LocatedOrder
from paceline.data.order import BatchOrder
from paceline.errors import ConfigError, InputError
from paceline.schedule.placement import place
from paceline.settings import LocalSettings, Settings
from paceline.step.checks import MicrobatchResult
from paceline.step.commit import means
from paceline.step.context import StepResult, TrainingContext
from paceline.step.gradients.fixed_point import TYPES
from paceline.strategies.base import Strategy
from paceline.strategies.full_batch import FullBatch
from paceline.strategies.local.agreement import check_trained
from paceline.strategies.local.inner import inner_step
from paceline.strategies.local.outer import STATE, OuterSteps
from paceline.strategies.local.replica import Replica, leave_averages

_WITHOUT = {"after": 0, "fragments": 1, "delay": 0, "mixing": 0.0, "uneven": False, "adaptive": False, "quorum": None}
"""Settings of replicas that keep a state between outer steps or share their data, with their values without effect."""


def validate(settings: Settings, model: nn.Module, order: BatchOrder) -> None:
    """Raise ConfigError if the settings do not fit replicas that are bound to sites."""
    local, every = settings.local, settings.checkpoint.every
    if not order.located:
        raise ConfigError(
            "local.sites = True trains a replica on each shard of Located data, but data is not Located: give "
            "data=paceline.data.Located({'name of a site': data set}), or leave out local.sites."
        )
    if order.moves:
        raise ConfigError(
            "local.sites = True sends updates only, but Located(..., move=...) lets workers send samples: leave out "
            "one of them."
        )
    for key, value in _WITHOUT.items():
        if (given := getattr(local, key)) != value:
            raise ConfigError(
                f"local.{key} = {given} cannot be combined with local.sites, whose replicas train on their own data "
                f"and begin each round with the outer weights: leave it out."
            )
    if local.sampled is not None and local.sampled >= 1 and local.sampled % 1:
        raise ConfigError(
            f"local.sampled = {local.sampled} is neither a whole number of sites nor a part of them below 1, such as "
            f"0.3."
        )
    if every is not None and (every == "auto" or every % local.every):
        raise ConfigError(
            f"checkpoint.every = {every} is not a multiple of local.every = {local.every}, but with local.sites only "
            f"the state after a round can be saved, because a replica does not leave its site: use a multiple."
        )
    if settings.memory_gigabytes is not None:
        raise ConfigError(
            "memory_gigabytes cannot be combined with local.sites, because the memory of a worker depends on its "
            "number of sites, which is not known before the workers meet: leave it out."
        )
    _check_masked(settings.local, model)


def _check_masked(local: LocalSettings, model: nn.Module) -> None:
    if not local.masked:
        if local.noise or local.clip:
            raise ConfigError("local.clip and local.noise are for masked sums: set local.masked, or leave them out.")
        return
    if local.threshold == 1:
        raise ConfigError("local.threshold = 1 would let a masked sum be the update of one site: use 2 or more.")
    if local.noise and not (local.clip and local.delta):
        raise ConfigError(
            f"local.noise = {local.noise} is in multiples of local.clip, the largest norm of the update of a site, and "
            f"has a privacy budget for local.delta above 0: set local.clip, and a local.delta such as 1e-5."
        )
    needed = [("masked", "cryptography", "sites"), *([("noise", "opacus", "privacy")] if local.noise else [])]
    for key, package, extra in needed:
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"local.{key} needs {package}: install it with pip install 'paceline[{extra}]'.")
    for name, value in model.named_parameters():
        if value.requires_grad and value.dtype not in TYPES:
            raise ConfigError(
                f"The parameter {name!r} is of type {value.dtype}, whose updates local.masked cannot add up: it takes "
                f"float16, bfloat16, float32 and float64. Leave out local.masked."
            )


class Sites(Strategy):
    """Strategy of replicas that are bound to the shards of Located data, with an outer step after each round."""

    def __init__(self, context: TrainingContext) -> None:
        order, settings = context.order, context.settings
        assert isinstance(order, LocatedOrder)
        self._context, self._order, self._local = context, order, settings.local
        if context.replicas:  # from the checkpoint of a run without sites
            context.replicas.clear()
            context.strategy_state.pop(STATE, None)
        context.strategy_state.setdefault(STATE, {"momentum": {}})
        self._shares = sites_of(order.holders, context.world.size)
        self._batch: FullBatch | None = None
        self._replicas: dict[int, Replica] = {}
        self._trained: list[int] = []  # steps of the current round
        self._outer = OuterSteps(context, self._shares, self._replicas)
        self._masked = None
        if self._local.masked:
            from paceline.strategies.local.masking.masked_sum import MaskedSum, Privacy

            length = sum(value.numel() for value in context.update.parameters.values())
            privacy = Privacy(self._local.clip, self._local.noise)
            self._masked = MaskedSum(context.world, context.events, length, context.revealed, privacy)
            self._check_buffers()
            self._check_threshold()
        if self._local.noise:
            from paceline.strategies.local.masking.accounting import epsilon_of

            self._epsilon_of = epsilon_of
        self._last = StepResult(math.nan, math.nan, context.update.learning_rate)
        absent = [name for name, ranks in zip(order.names, order.holders, strict=True) if not ranks]
        missed = f". No worker has the sites {', '.join(map(repr, absent))}, which are missed" if absent else ""
        context.warnings.append(
            f"{len(order.names)} sites train a replica each on their own data, with an outer step after every "
            f"{self._local.every} steps. The model has the weights of the last outer step; the loss is that of this "
            f"worker's sites{missed}"
        )

    @property
    def why_unsaved(self) -> str:
        if not self._trained:
            return ""
        return (
            f"The state after step {self._trained[-1]} cannot be saved, because the replicas of a round do not leave "
            f"their sites: save after a round, when the number of steps is a multiple of local.every = "
            f"{self._local.every}."
        )

    def point(self, steps: int) -> dict[str, torch.Tensor] | None:
        return None if self._trained else {}

    def close(self) -> frozenset[str] | None:
        self._outer.close()
        return frozenset() if self._trained and self._context.world.size > 1 else None

    def groups(self, step: int) -> list[range]:
        own = self._drawn(step).intersection(self._shares[self._context.world.rank])
        return [range(place, place + 1) for place, site in enumerate(self._order.shards_of(step)) if site in own]

    def _drawn(self, step: int) -> set[int]:
        """Return the sites of the round to which a step belongs."""
        return drawn(
            self._context.settings.seed, step // self._local.every, len(self._order.names), self._local.sampled
        )

    def step(self, step: int, groups: list[MicrobatchGroup]) -> StepResult:
        context, sites = self._context, self._order.shards_of(step)
        self._begin_round(step)
        assert self._batch is not None
        made, parts = list[StepResult](), list[MicrobatchResult]()
        for group in groups:
            context.world.check()
            replica = self._replicas[sites[group.microbatches.start]]
            result, results = inner_step(context, self._batch, step, [group], replica)
            made.append(result)
            parts += results
        context.update.advance()
        self._trained.append(step)
        if made:  # else this worker's sites have no microbatch in this step, and it repeats the last result
            loss, metrics = means(context, parts)
            norm = max(float(one.norm) for one in made)
            self._last = StepResult(loss, norm, made[-1].learning_rate, all(one.applied for one in made), 0, metrics)
        notice = self._end_round(step) if (step + 1) % self._local.every == 0 else 0
        return replace(self._last, notice=notice)

    def _begin_round(self, step: int) -> None:
        """Make the replicas of this worker's sites, unless the round has begun."""
        every = self._local.every
        if not self._trained:
            if self._batch is None:
                self._batch = FullBatch(self._context, encoded=False)
                leave_averages(self._context.update.optimizer)
            own = self._drawn(step).intersection(self._shares[self._context.world.rank])
            self._replicas.update((site, Replica(self._context, site, 1)) for site in sorted(own))
        elif self._trained[0] // every != step // every:
            raise InputError(
                f"The script has left out the batch of step {step // every * every - 1}, after which the sites of the "
                f"round of step {self._trained[0]} send their updates: pass the last batch of each round of "
                f"local.every = {every} steps to session.step."
            )

    def _end_round(self, step: int) -> int:
        """Make the outer step. Returns the notice of the workers."""
        begin, context = time.perf_counter(), self._context
        for site in [site for site, one in self._replicas.items() if not (one.counts[0] and self._can_send(one))]:
            del self._replicas[site]
        counts = {site: one.counts[0] for site, one in self._replicas.items()}
        own = list(self._trained), counts, context.compute.metrics, context.compute.buffers.live, context.world.notice()
        everyone = context.world.gather(own, f"outer step after step {step}")
        check_trained([trained for trained, *_ in everyone])
        if given := [(rank, one[2]) for rank, one in enumerate(everyone) if one[2]]:
            context.compute.metrics = agreed_names(given)
        context.compute.buffers.fix(name for *_, names, _ in everyone for name in names)
        known = dict(sorted(pair for _, counts, *_ in everyone for pair in counts.items()))
        if self._masked is not None:
            self._add_masked(step, known, begin)
        elif known:
            self._outer.send(step, 0, known, [], time.perf_counter() - begin)
            self._outer.go_on()
        self._replicas.clear()
        self._trained.clear()
        return max(int(notice) for *_, notice in everyone)

    def _can_send(self, replica: Replica) -> bool:
        """Return whether an update is finite. Masked sums look for themselves, when the sites have exchanged keys."""
        return self._masked is not None or all(bool(one.isfinite().all()) for one in replica.weights.values())

    def _add_masked(self, step: int, counts: Mapping[int, float], begin: float) -> None:
        """Make the outer step from the masked sum of the updates."""
        context, parameters = self._context, self._context.update.parameters
        assert self._masked is not None
        self._check_buffers()  # of which some are known after the first step only
        updates = {
            site: torch.cat(
                [(value.detach() - one.weights[name]).double().flatten() for name, value in parameters.items()]
            )
            for site, one in self._replicas.items()
        }
        weights = dict.fromkeys(counts, 1.0) if self._local.noise else counts
        again, found, added = self._masked.was_revealed(step), None, list[int]()
        if not again:
            found = self._masked.mean(step, updates, weights, threshold_of(self._local.threshold, len(counts)))
        if found is not None:
            mean, added = found
            pieces = mean.split([value.numel() for value in parameters.values()])
            for value, piece in zip(parameters.values(), pieces, strict=True):
                value.grad = piece.view(value.shape).to(value.device, value.dtype)
            self._outer.update(step, 0)
            for value in parameters.values():
                value.grad = None
        done = {site: counts[site] for site in added}
        spent = self._spent(again or found is not None)
        seconds = time.perf_counter() - begin
        context.events.mark("outer-step", step=step, fragment=0, counts=done, seconds=seconds, **spent)

    def _spent(self, shown: bool) -> dict[str, float]:
        """Return the privacy that all rounds have spent; ``shown`` if the sum of the last one was seen."""
        state, local = self._context.strategy_state[STATE], self._local
        state["shown"] = state.get("shown", 0) + shown
        if not (local.noise and state["shown"]):
            return {}
        return {"epsilon": self._epsilon_of(local.noise, state["shown"], local.delta), "delta": local.delta}

    def _check_buffers(self) -> None:
        if live := self._context.compute.buffers.live:
            raise InputError(
                f"local.masked adds up the updates of parameters, but the forward passes also change the buffer "
                f"{live[0]!r}, which would be sent as it is: use a layer without such statistics, such as "
                f"torch.nn.GroupNorm, or leave out local.masked."
            )

    def _check_threshold(self) -> None:
        """Raise ConfigError if a round has too few sites. Warn if a worker could remove the masks of all others."""
        sites = len(drawn(0, 0, len(self._order.names), self._local.sampled))
        threshold = threshold_of(self._local.threshold, sites)
        if sites < threshold:
            raise ConfigError(
                f"A masked sum needs {threshold} sites, but a round has {sites} of the {len(self._order.names)} sites: "
                f"give more sites, a larger local.sampled or a smaller local.threshold, of at least 2."
            )
        most = max(range(len(self._shares)), key=lambda rank: len(self._shares[rank]))
        if len(self._shares) > 1 and len(self._shares[most]) >= threshold:
            self._context.warnings.append(
                f"rank {most} has {len(self._shares[most])} sites, and {threshold} sites together can remove the masks "
                f"of the others: divide them among more workers, or set a larger local.threshold"
            )


def threshold_of(asked: int | None, sites: int) -> int:
    """Return the smallest number of sites in a masked sum: by default more than two thirds of those of the round."""
    return asked or max(2, 2 * sites // 3 + 1)


def drawn(seed: int, number: int, sites: int, sampled: float | None) -> set[int]:
    """Return the sites that train in a round, as a pure function of the seed and the number of the round.

    Args:
        sites: number of sites.
        sampled: number of sites that are drawn, or their part below 1. None draws all.
    """
    if sampled is None:
        return set(range(sites))
    count = round(sampled * sites) if sampled < 1 else int(sampled)
    generator = torch.Generator().manual_seed(seed_of(SITES, seed, number))
    return set(torch.randperm(sites, generator=generator)[: max(1, count)].tolist())


def sites_of(holders: Sequence[tuple[int, ...]], workers: int) -> list[list[int]]:
    """Return the sites of each worker, as evenly as their holders allow.

    >>> sites_of([(0,), (), (0, 1)], 2)
    [[0], [2]]
    """
    present = [site for site, ranks in enumerate(holders) if ranks]
    placed = place(tuple(holders[site] for site in present), workers)
    return [[present[index] for index in own] for own in placed]
