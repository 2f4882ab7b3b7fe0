"""Choice of the blocks to recompute within a memory budget, and of settings with which the run would fit if that fails.

::

    saved      │        ┌───┐                   forward saves the activations of each segment; backward releases them
    activations│    ┌───┘   └───┐               from the last to the first. A recomputed block keeps only its inputs,
               │┌───┘           └───┐           and needs its own activations again during its backward pass.
               └──────────────────────► time

Blocks that free the most bytes per second of computation are recomputed first (after Chen et al. 2016, arXiv
1604.06174), until a pass fits. Everything here is arithmetic; :mod:`paceline.planning.blocks` measures.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain

from paceline.schedule.shares import even
from paceline.schedule.slices import STAGES
from paceline.schedule.tree import Node, push
from paceline.settings import LocalSettings

_MOST_TRIED = 256
"""Largest number of workers that :func:`cures` tries."""
_ALL = STAGES["parameters"]


@dataclass(frozen=True)
class Segment:
    """Section of a forward pass: a call of a block, or the unnamed code between two blocks."""

    name: str
    saved_bytes: int  # saved for the backward pass by this section alone
    input_bytes: int = 0  # inputs that only recomputing the block needs
    seconds: float = 0.0  # duration of the forward pass


@dataclass(frozen=True)
class Run:
    """Sizes of a run on which the memory of a worker depends."""

    weights: int  # bytes of parameters and buffers
    gradients: int  # bytes of the gradients of a microbatch
    optimizer: int  # bytes of the optimizer's state for all parameters
    sums: int  # bytes of a sum of gradients over microbatches
    segments: tuple[Segment, ...]  # forward pass of the largest microbatch
    batch: int  # samples of a batch
    microbatches: int  # microbatches of a batch
    workers: int = 1  # number of workers
    tree: bool = False  # whether sums follow the canonical tree, so that a worker may hold several
    # stage of ZeRO: the workers divide (1) the optimizer's state, (2) also gradients, (3) also weights
    stage: int = 0
    sharing: int = 1  # workers that share one copy of the weights in stage 3
    window: int = 0  # bytes of the sums that are on their way, from stage 2 on
    holders: int = 1  # number of workers that keep and update each part of the divided state
    even_shares: bool = True  # whether workers get even shares of a batch. Otherwise one worker may compute all of it.


@dataclass(frozen=True)
class Need:
    """Bytes that a worker needs."""

    weights: int
    gradients: int
    optimizer: int
    sums: int
    activations: int

    @property
    def total(self) -> int:
        """Sum of all bytes."""
        return self.weights + self.gradients + self.optimizer + self.sums + self.activations

    def __str__(self) -> str:
        return (
            f"weights {self.weights:,}, gradients {self.gradients:,}, optimizer {self.optimizer:,}, sums of "
            f"microbatches {self.sums:,}, activations {self.activations:,}"
        )


def peak_bytes(segments: Sequence[Segment], recomputed: Collection[str] = ()) -> int:
    """Return the peak number of bytes of activations during a pass.

    >>> layers = [Segment("a", 100, 10), Segment("b", 100, 10), Segment("", 30)]
    >>> peak_bytes(layers), peak_bytes(layers, {"a"}), peak_bytes(layers, {"a", "b"})
    (230, 140, 120)
    """
    held = peak = 0
    for segment in segments:
        again = bool(segment.name) and segment.name in recomputed
        held += segment.input_bytes if again else segment.saved_bytes
        peak = max(peak, held + segment.saved_bytes if again else held)
    return peak


def choose(segments: Sequence[Segment], limit: int) -> frozenset[str] | None:
    """Return the blocks to recompute so that activations take at most ``limit`` bytes, or None if that is impossible.

    Takes the blocks that free the most bytes per second first, then drops blocks that turn out to be unnecessary.

    >>> layers = [Segment("wide", 100, 10, 1.0), Segment("slow", 100, 10, 9.0), Segment("last", 100, 10, 1.0)]
    >>> [choose(layers, limit) for limit in (300, 210)]
    [frozenset(), frozenset({'wide'})]
    >>> choose(layers, 100) is None
    True
    """
    worth, chosen = _worth(segments), set[str]()
    if min(peak_bytes(segments), peak_bytes(segments, worth)) > limit:
        return None
    for name in worth:
        if peak_bytes(segments, chosen) <= limit:
            break
        chosen.add(name)
    seconds = _totals(segments)
    for name in sorted(chosen, key=lambda one: (-seconds[one][1], one)):
        if peak_bytes(segments, chosen - {name}) <= limit:
            chosen.remove(name)
    return frozenset(chosen)


def _totals(segments: Sequence[Segment]) -> dict[str, tuple[int, float]]:
    """Return the bytes that recomputing each block frees, and the seconds that it takes, over all of its calls."""
    totals: dict[str, tuple[int, float]] = {}
    for segment in segments:
        freed, seconds = totals.get(segment.name, (0, 0.0))
        totals[segment.name] = freed + segment.saved_bytes - segment.input_bytes, seconds + segment.seconds
    totals.pop("", None)
    return totals


def _worth(segments: Sequence[Segment]) -> list[str]:
    """Return the blocks whose recomputation frees memory, in descending order of bytes freed per second.

    Recomputing the last section of a pass frees nothing, because its backward pass follows at once.
    """
    totals = _totals([*segments][:-1])
    worth = {name: freed / max(seconds, 1e-9) for name, (freed, seconds) in totals.items() if freed > 0}
    return sorted(worth, key=lambda name: -worth[name])


@lru_cache(maxsize=512)
def held_sums(microbatches: int, workers: int, tree: bool) -> int:
    """Return the largest number of sums that a worker holds while it computes a microbatch of its share.

    >>> held_sums(8, 1, tree=False), held_sums(8, 1, tree=True), held_sums(8, 8, tree=True)
    (1, 3, 0)
    """
    shares = even(microbatches, workers)
    if not tree:
        return int(len(shares[0]) > 1)
    most = 0
    for share in shares:
        stack: list[tuple[Node, None]] = []
        for microbatch in share:
            most = max(most, len(stack))
            push(stack, Node(0, microbatch), None, lambda *_: None)
    return most


def need(run: Run, recomputed: Collection[str] = (), fused: bool = False) -> Need:
    """Return the bytes that a worker needs if these blocks are recomputed.

    Args:
        fused: whether a worker computes its share of a batch in one pass. Defaults to one pass for each microbatch.
    """
    workers = run.workers if run.even_shares else 1
    passes = -(-run.microbatches // workers) if fused else 1
    sums = 0 if fused else held_sums(run.microbatches, workers, run.tree)
    copied = (run.holders - 1) * math.ceil(run.gradients / run.workers) if run.stage else 0
    owned = math.ceil(run.gradients / run.workers) + run.window if run.stage >= 2 else run.gradients
    kept = copied if run.sharing == run.workers else 0  # weights of a copy on the machine of their owner
    return Need(
        math.ceil(run.weights / run.sharing) + kept if run.stage >= _ALL else run.weights,
        owned + copied,
        math.ceil(run.holders * run.optimizer / run.workers) if run.stage else run.optimizer,
        sums * run.sums,
        passes * peak_bytes(run.segments, recomputed),
    )


def of_replicas(
    local: LocalSettings, count: int, workers: int, keeps: bool, weights: int, optimizer: int, gradients: int
) -> tuple[int, int]:
    """Return the bytes of weights and of the optimizers' state on a worker with ``count`` replicas of the model.

    The outer momentum counts as state, and so do recovery points, if the worker ``keeps`` them:
    two while a new one is made, each with the replicas of two workers. Replicas keep the weights of a fragment in
    flight, and are never all at rest if the model has several fragments or a delay.
    """
    sent = gradients // local.fragments if local.delay else 0
    apart = gradients if local.fragments > 1 or local.delay else 0
    points = 2 * (weights + gradients + min(2, workers) * count * (optimizer + apart)) if keeps else 0
    return weights + count * (gradients + sent), count * optimizer + gradients + points


def of_servers(weights: int, optimizer: int, gradients: int, workers: int, shared: bool) -> int:
    """Return the bytes that a synchronous parameter server of all weights holds beside those of all-reduce.

    It keeps two versions of the weights and of the optimizer's state, and receives the sums of all workers. In
    ``shared`` memory, pages count in part for each worker that uses them: all read the weights, and the others have
    written their sums.
    """
    if shared:
        return 2 * (weights // workers + optimizer) + (workers - 1) * gradients // 2
    return 2 * (weights + optimizer) + (workers - 1) * gradients


@dataclass(frozen=True)
class Choice:
    """Blocks to recompute, and the bytes that a worker then needs."""

    recomputed: frozenset[str]  # names of the blocks
    fused: bool  # whether a worker may compute its share of a batch in one pass
    need: Need  # bytes that a worker needs
    fits: bool  # whether ``need`` is within the budget


def fit(run: Run, limit: int, able: bool, fusible: bool, fixed: frozenset[str] = frozenset()) -> Choice:
    """Return the choice with which a run fits into a budget, or the one that needs the least memory if none fits.

    Prefers computing microbatches one by one to recomputing blocks, because that costs less.

    Args:
        limit: bytes of a worker.
        able: whether blocks may be chosen. Otherwise the blocks in ``fixed`` are recomputed.
        fusible: whether a worker might compute its share of a batch in one pass.

    >>> layers = (Segment("a", 100, 10, 1.0), Segment("b", 100, 10, 1.0), Segment("", 30))
    >>> run = Run(1000, 1000, 2000, 1000, layers, batch=16, microbatches=4, workers=4)
    >>> [sorted(fit(run, limit, able=True, fusible=False).recomputed) for limit in (4230, 4200)]
    [[], ['a']]
    >>> fit(run, 4000, able=True, fusible=False).fits
    False
    """
    if fusible:  # after the first step, which computes microbatches one by one
        whole = max(need(run, fixed), need(run, fixed, fused=True), key=lambda one: one.total)
        if whole.total <= limit:
            return Choice(fixed, True, whole, True)
    chosen: frozenset[str] | None = fixed
    if able:
        chosen = choose(run.segments, limit - need(run).total + peak_bytes(run.segments))
    if chosen is None:
        chosen = frozenset(_worth(run.segments))
    needed = need(run, chosen)
    return Choice(chosen, False, needed, needed.total <= limit)


def cures(run: Run, limit: int, able: bool, fixed: frozenset[str] = frozenset()) -> list[str]:
    """Return the settings with which the run would fit, each with the bytes that a worker would need.

    Args:
        limit: bytes of a worker.
        able: whether blocks may be chosen, see :func:`fit`.

    >>> layers = (Segment("a", 4000), Segment("", 300))
    >>> run = Run(1000, 1000, 2000, 1000, layers, batch=16, microbatches=2, workers=2)
    >>> cures(run, 7400, able=True)
    ['microbatches=4 (7,150 bytes)', 'strategy="sharded" (6,800 bytes)']
    """
    found: list[str] = []
    if not (able or fixed) and (choice := fit(run, limit, able=True, fusible=False)).fits:
        found.append(f'recompute="auto" ({choice.need.total:,} bytes)')
    changes = [_smaller_microbatches(run), chain(_divided(run), _more_workers(run))]
    found += [text for kind in changes if (text := _first(kind, limit, able, fixed))]
    if not found and (text := _first(_all_at_once(run), limit, able=True, fixed=frozenset())):
        found.append(text)
    return found


def _first(others: Iterable[tuple[str, Run]], limit: int, able: bool, fixed: frozenset[str]) -> str:
    """Return the description of the first run that fits, with its bytes, or an empty string."""
    for text, other in others:
        choice = fit(other, limit, able, fusible=False, fixed=fixed)
        if choice.fits:
            return f"{text} ({choice.need.total:,} bytes)"
    return ""


def _smaller_microbatches(run: Run) -> Iterator[tuple[str, Run]]:
    count, samples = 2 * run.microbatches, -(-run.batch // run.microbatches)
    while count <= run.batch:
        part = -(-run.batch // count) / samples
        smaller = [
            replace(one, saved_bytes=math.ceil(part * one.saved_bytes), input_bytes=math.ceil(part * one.input_bytes))
            for one in run.segments
        ]
        yield f"microbatches={count}", replace(run, segments=tuple(smaller), microbatches=count)
        count *= 2


def _divided(run: Run) -> Iterator[tuple[str, Run]]:
    if not run.stage and run.workers > 1:
        yield 'strategy="sharded"', replace(run, stage=_ALL, even_shares=True)


def _more_workers(run: Run) -> Iterator[tuple[str, Run]]:
    """Yield runs of strategy sharded on more workers, up to the number of microbatches."""
    strategy = "" if run.stage else ' and strategy="sharded"'
    for count in range(run.workers + 1, min(run.microbatches, _MOST_TRIED) + 1):
        yield f"{count} workers{strategy}", _on(run, count)


def _on(run: Run, workers: int) -> Run:
    """Return a run with divided state on more workers, on the same machine if all are on one."""
    sharing = workers if run.sharing == run.workers else run.sharing
    return replace(run, stage=run.stage or _ALL, even_shares=True, workers=workers, sharing=sharing)


def _all_at_once(run: Run) -> Iterator[tuple[str, Run]]:
    """Yield runs with smaller microbatches, as many workers, and divided state, whose blocks may be recomputed."""
    for text, smaller in _smaller_microbatches(run):
        workers = max(run.workers, min(smaller.microbatches, _MOST_TRIED))
        yield (
            f'{text}, recompute="auto", strategy="sharded" and {workers} workers',
            _on(smaller, workers),
        )
