"""Balancing of pipeline stages by PipeDream's dynamic program (arXiv 1806.03377, section 3.1).

::

    slowest(from layer i on, k stages, w workers)
        = min over j, m of  max( stage(layers i..j-1, m replicas), slowest(from j on, k - 1 stages, w - m workers) )

    stage = max( computing, transfers ) / m  +  all-reduce of its weights between its replicas / microbatches

All times are per microbatch. A worker computes, sends and receives at the same time. It receives the stage's input and
sends the output in the forward pass, and the reverse in the backward pass, so its transfers take
(input bytes + output bytes) / bandwidth. Each of m replicas takes every m-th microbatch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from paceline.errors import ConfigError

COPIES = 4  # values that a worker holds per weight: the weight, its gradient, and up to two optimizer states (Adam)


@dataclass(frozen=True)
class LayerCost:
    """Cost of a layer for one microbatch."""

    name: str
    forward: float  # seconds of the forward pass
    backward: float  # seconds of the backward pass
    output_bytes: int  # bytes sent over a stage boundary after the layer
    parameter_bytes: int  # bytes of the layer's weights
    kept_bytes: int  # bytes kept from the forward pass for the backward pass


@dataclass(frozen=True)
class Cut:
    """Partition of a model into stages."""

    names: tuple[str, ...]  # names of the layers at which stages 1, 2, ... begin.
    bounds: tuple[tuple[int, int], ...]  # first layer and end (exclusive) of each stage
    replicas: tuple[int, ...]  # number of workers of each stage
    seconds: tuple[float, ...]  # seconds per microbatch of each stage

    @property
    def slowest(self) -> float:
        """Seconds per microbatch of the slowest stage, and thus of the pipeline."""
        return max(self.seconds)


@dataclass(frozen=True)
class Cluster:
    """Workers that run the stages."""

    link_bytes_per_second: float = math.inf  # bandwidth between two workers in each direction
    memory_bytes: float | None = None  # memory of each worker. Defaults to unlimited memory.
    workers: int | None = None  # number of workers. Defaults to one per stage.
    microbatches: int = 8  # number of microbatches of a step
    recompute: bool = False  # whether stages keep their inputs only, and compute their activations again


def balance(layers: Sequence[LayerCost], stages: int, cluster: Cluster) -> Cut:
    """Return the cut whose slowest stage takes the least time, preferring even stages among equal cuts.

    Omits replicas that cost more than they gain, so some workers may remain unused.
    """
    workers = stages if cluster.workers is None else cluster.workers
    if stages < 1:
        raise ConfigError(f"A model cannot be cut into {stages} stages: it must be at least 1.")
    if stages > len(layers):
        raise ConfigError(
            f"{stages} stages need as many layers, but the model has {len(layers)}: "
            f"{', '.join(layer.name for layer in layers)}. Use fewer stages (pipeline.stages, by default one for each "
            f"worker), or fewer workers."
        )
    if workers < stages:
        raise ConfigError(f"{stages} stages need as many workers, but there are {workers}: use fewer stages.")
    costs_of = StageCosts(layers, cluster)
    limit = cluster.memory_bytes

    def seconds(begin: int, end: int, replicas: int, after: int) -> float:
        if limit is not None and costs_of.memory(begin, end, replicas, after) > limit:
            return math.inf
        return costs_of.seconds(begin, end, replicas)

    found = _best(len(layers), stages, workers, seconds)
    if math.isinf(found[0][0]):
        raise _does_not_fit(layers, stages, workers, costs_of, cluster)
    bounds, replicas = found[1], found[2]
    times = tuple(costs_of.seconds(*bound, count) for bound, count in zip(bounds, replicas, strict=True))
    return Cut(tuple(layers[begin].name for begin, _ in bounds[1:]), bounds, replicas, times)


def check_memory(layers: Sequence[LayerCost], bounds: Sequence[tuple[int, int]], cluster: Cluster) -> None:
    costs_of, limit = StageCosts(layers, cluster), cluster.memory_bytes
    for place, (begin, end) in enumerate(bounds):
        needs = costs_of.memory(begin, end, 1, len(bounds) - place - 1)
        if limit is not None and needs > limit:
            raise ConfigError(
                f"Stage {place} (layers {layers[begin].name!r} to {layers[end - 1].name!r}) needs {needs:,.0f} bytes, "
                f"and a worker has {limit:,.0f}. Change pipeline.cut, or leave it out to balance the stages"
                f"{_or_recompute(cluster)}."
            )


def fit_bounds(costs: Sequence[float], factors: Sequence[float]) -> tuple[tuple[int, int], ...]:
    """Return the bounds of the cut whose slowest stage takes the least time, for workers of different speeds.

    Args:
        costs: seconds of each layer.
        factors: slowdown factor of each stage's worker.

    >>> fit_bounds([1.0] * 6, [1.0, 2.0])
    ((0, 4), (4, 6))
    """
    sums, count = _cumulative(costs), len(costs)
    # for the stages up to this one, by their end: seconds of the slowest stage, and the beginning of each stage
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for stage, factor in enumerate(factors):
        left = len(factors) - stage - 1
        best = {
            end: min(
                (max(slowest, factor * (sums[end] - sums[begin])), (*begins, begin))
                for begin, (slowest, begins) in best.items()
                if begin < end
            )
            for end in (range(stage + 1, count - left + 1) if left else [count])
        }
    _, begins = best[count]
    return tuple(pairwise((*begins, count)))


class StageCosts:
    """Time and memory of any possible stage."""

    def __init__(self, layers: Sequence[LayerCost], cluster: Cluster) -> None:
        self._cluster = cluster
        times = 2 if cluster.recompute else 1
        self._computing = _cumulative([times * layer.forward + layer.backward for layer in layers])
        self._weights = _cumulative([layer.parameter_bytes for layer in layers])
        self._kept = _cumulative([layer.kept_bytes for layer in layers])
        self._crossing = [0, *(layer.output_bytes for layer in layers[:-1]), 0]

    def seconds(self, begin: int, end: int, replicas: int = 1) -> float:
        """Return the seconds per microbatch of a stage."""
        link = self._cluster.link_bytes_per_second
        computing = self._computing[end] - self._computing[begin]
        transfers = (self._crossing[begin] + self._crossing[end]) / link
        weights = self._weights[end] - self._weights[begin]
        reduce = 2 * (replicas - 1) / replicas * weights / link
        return max(computing, transfers) / replicas + reduce / self._cluster.microbatches

    def memory(self, begin: int, end: int, replicas: int, after: int) -> float:
        """Return the bytes per worker, with at most one microbatch in flight for each stage from this stage on.

        A stage that recomputes has the inputs of all of these, and the activations of one.
        """
        flying = min(math.ceil(self._cluster.microbatches / replicas), after + 1)
        kept = self._kept[end] - self._kept[begin]
        activations = flying * self._crossing[begin] + kept if self._cluster.recompute else flying * kept
        return COPIES * (self._weights[end] - self._weights[begin]) + activations


Cost = Callable[[int, int, int, int], float]
"""Cost of a stage, given its first layer, its end, its replicas, and the number of stages after it."""
_Found = tuple[tuple[float, float], tuple[tuple[int, int], ...], tuple[int, ...]]


def _best(layers: int, stages: int, workers: int, cost: Cost) -> _Found:
    """Return the cut whose most expensive stage is cheapest, preferring a small sum of squared costs."""
    nothing: _Found = (math.inf, math.inf), (), ()
    # best cut from a layer to the end, by (layer, available workers); initially without stages
    after: dict[tuple[int, int], _Found] = {(layers, left): ((0.0, 0.0), (), ()) for left in range(workers + 1)}
    for behind in range(stages):
        ahead = stages - behind - 1  # each earlier stage needs a layer and a worker
        now: dict[tuple[int, int], _Found] = {}
        for begin in range(ahead, layers) if ahead else [0]:
            for left in range(behind + 1, workers - ahead + 1):
                best = nothing
                for end in range(begin + 1, layers - behind + 1) if behind else [layers]:
                    for replicas in range(1, left - behind + 1):
                        (worst, squares), bounds, counts = after[end, left - replicas]
                        seconds = cost(begin, end, replicas, behind)
                        value = max(seconds, worst), squares + seconds * seconds
                        if value < best[0] or not best[1]:
                            best = value, ((begin, end), *bounds), (replicas, *counts)
                now[begin, left] = best
        after = now
    return after[0, workers]


def _does_not_fit(
    layers: Sequence[LayerCost], stages: int, workers: int, costs_of: StageCosts, cluster: Cluster
) -> ConfigError:
    """Build the error that names the largest stage of the cut that needs the least memory."""
    _, bounds, replicas = _best(len(layers), stages, workers, costs_of.memory)
    needs = [
        costs_of.memory(*bound, count, stages - place - 1)
        for place, (bound, count) in enumerate(zip(bounds, replicas, strict=True))
    ]
    place = needs.index(max(needs))
    names = [layer.name for layer in layers[slice(*bounds[place])]]
    what = f"layer {names[0]!r}" if len(names) == 1 else f"layers {names[0]!r} to {names[-1]!r}"
    return ConfigError(
        f"The model does not fit into {stages} stages: even in the cut that needs least, stage {place} ({what}) needs "
        f"{needs[place]:,.0f} bytes, and a worker has {cluster.memory_bytes:,.0f}. Use more stages or smaller "
        f"microbatches{_or_recompute(cluster)}."
    )


def _or_recompute(cluster: Cluster) -> str:
    return "" if cluster.recompute else ', or set recompute="auto"'


def _cumulative(values: Sequence[float]) -> list[float]:
    return [0.0, *accumulate(values)]
