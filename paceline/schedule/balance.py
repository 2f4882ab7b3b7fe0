"""Balance stages: PipeDream's dynamic program (arXiv 1806.03377, section 3.1).

::

    slowest(from layer i on, k stages, w workers)
        = min over j, m of  max( stage(layers i..j-1, m replicas), slowest(from j on, k - 1 stages, w - m workers) )

    stage = max( computing, transfers ) / m  +  all-reduce of its weights between its replicas / microbatches

All times are per microbatch. A worker computes, sends and receives at the same time: forward it receives the input of
the stage and sends its output, backward the reverse. So its transfers take (input bytes + output bytes) / bandwidth.
Each of m replicas takes every m-th microbatch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from paceline.errors import ConfigError

COPIES = 4
"""Values a worker holds per weight: itself, its gradient, and up to two of the optimizer (Adam)."""


@dataclass(frozen=True)
class LayerCost:
    """The cost of one layer for one microbatch.

    Attributes:
        name: of the layer.
        forward: seconds.
        backward: seconds.
        output_bytes: sent over a boundary after it.
        parameter_bytes: of its weights.
        kept_bytes: kept from the forward pass for the backward pass.
    """

    name: str
    forward: float
    backward: float
    output_bytes: int
    parameter_bytes: int
    kept_bytes: int


@dataclass(frozen=True)
class Cut:
    """A model cut into stages.

    Attributes:
        names: of the layers at which stages 1, 2, ... begin.
        bounds: the first layer of each stage, and the one after its last.
        replicas: the workers of each stage.
        seconds: of each stage for a microbatch.
    """

    names: tuple[str, ...]
    bounds: tuple[tuple[int, int], ...]
    replicas: tuple[int, ...]
    seconds: tuple[float, ...]

    @property
    def slowest(self) -> float:
        """Seconds of the slowest stage: the pipeline finishes a microbatch in this time."""
        return max(self.seconds)


@dataclass(frozen=True)
class Cluster:
    """The workers that the stages run on.

    Attributes:
        link_bytes_per_second: between two workers, in each direction.
        memory_bytes: of each worker; none: enough.
        workers: their number; none: one per stage.
        microbatches: of a step.
    """

    link_bytes_per_second: float = math.inf
    memory_bytes: float | None = None
    workers: int | None = None
    microbatches: int = 8


def balance(layers: Sequence[LayerCost], stages: int, cluster: Cluster) -> Cut:
    """The cut with the fastest slowest stage; of equal ones, the one with the most even stages.

    A replica that costs more than it gains is left out, so some workers may stay unused.

    Raises:
        ConfigError: no stages, more stages than layers or workers, or a stage that does not fit into memory.
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
    """Refuse a cut with a stage that does not fit into the memory of its worker.

    Raises:
        ConfigError: names the stage and its size.
    """
    costs_of, limit = StageCosts(layers, cluster), cluster.memory_bytes
    for place, (begin, end) in enumerate(bounds):
        needs = costs_of.memory(begin, end, 1, len(bounds) - place - 1)
        if limit is not None and needs > limit:
            raise ConfigError(
                f"Stage {place} (layers {layers[begin].name!r} to {layers[end - 1].name!r}) needs {needs:,.0f} bytes, "
                f"and a worker has {limit:,.0f}. Change pipeline.cut, or leave it out to balance the stages."
            )


def fit_bounds(costs: Sequence[float], factors: Sequence[float]) -> tuple[tuple[int, int], ...]:
    """The cut with the fastest slowest stage, where the workers of the stages have different speeds.

    Args:
        costs: seconds of each layer.
        factors: by which layers are slower in each stage.

    >>> fit_bounds([1.0] * 6, [1.0, 2.0])
    ((0, 4), (4, 6))
    """
    sums, count = _cumulative(costs), len(costs)
    # for the stages so far, by the layer they end at: seconds of the slowest, and where each begins
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
    """Time and memory of any stage."""

    def __init__(self, layers: Sequence[LayerCost], cluster: Cluster) -> None:
        self._cluster = cluster
        self._computing = _cumulative([layer.forward + layer.backward for layer in layers])
        self._weights = _cumulative([layer.parameter_bytes for layer in layers])
        self._kept = _cumulative([layer.kept_bytes for layer in layers])
        self._crossing = [0, *(layer.output_bytes for layer in layers[:-1]), 0]

    def seconds(self, begin: int, end: int, replicas: int = 1) -> float:
        """Seconds for one microbatch."""
        link = self._cluster.link_bytes_per_second
        computing = self._computing[end] - self._computing[begin]
        transfers = (self._crossing[begin] + self._crossing[end]) / link
        weights = self._weights[end] - self._weights[begin]
        reduce = 2 * (replicas - 1) / replicas * weights / link
        return max(computing, transfers) / replicas + reduce / self._cluster.microbatches

    def memory(self, begin: int, end: int, replicas: int, after: int) -> float:
        """Bytes per worker; as many microbatches are in flight as there are stages from this one on."""
        share = math.ceil(self._cluster.microbatches / replicas)
        kept = (self._kept[end] - self._kept[begin]) * min(share, after + 1)
        return COPIES * (self._weights[end] - self._weights[begin]) + kept


Cost = Callable[[int, int, int, int], float]
"""The cost of a stage, from its first layer, the one after its last, its replicas, and the stages after it."""
_Found = tuple[tuple[float, float], tuple[tuple[int, int], ...], tuple[int, ...]]


def _best(layers: int, stages: int, workers: int, cost: Cost) -> _Found:
    """The cut with the cheapest most expensive stage; of these, one with a small sum of squares."""
    nothing: _Found = (math.inf, math.inf), (), ()
    # the best from a layer on, with at most so many workers; at first with no stages left
    after: dict[tuple[int, int], _Found] = {(layers, left): ((0.0, 0.0), (), ()) for left in range(workers + 1)}
    for behind in range(stages):
        ahead = stages - behind - 1  # each stage before needs a layer and a worker
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
    """Name the stage that needs most memory in the cut that needs least."""
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
        f"microbatches."
    )


def _cumulative(values: Sequence[float]) -> list[float]:
    return [0.0, *accumulate(values)]
