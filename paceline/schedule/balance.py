"""Where to cut a model: PipeDream's dynamic program (arXiv 1806.03377, section 3.1).

::

    slowest(from layer i on, k stages, w workers)
        = min over j, m of  max( stage(layers i..j-1, m replicas), slowest(from j on, k - 1 stages, w - m workers) )

    stage = max( computing, transfers ) / m  +  all-reduce of its weights between its replicas / microbatches

All times are for one microbatch. A worker computes and transfers at the same time, and sends and receives at the same
time: forward it receives what enters the stage and sends what leaves it, backward the other way round. So its
transfers take (bytes that enter + bytes that leave) / bandwidth. Of the replicas each takes every m-th microbatch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from paceline.errors import ConfigError

COPIES = 4
"""Of each weight a worker holds itself, its gradient, and up to two values of the optimizer (Adam)."""


@dataclass(frozen=True)
class LayerCost:
    """What one layer costs for one microbatch.

    Attributes:
        name: of the layer.
        forward: seconds.
        backward: seconds.
        output_bytes: what crosses a boundary after it.
        parameter_bytes: of its weights.
        kept_bytes: what it keeps from its forward pass for its backward pass.
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
        replicas: how many workers compute each stage.
        seconds: that each stage takes for a microbatch.
    """

    names: tuple[str, ...]
    bounds: tuple[tuple[int, int], ...]
    replicas: tuple[int, ...]
    seconds: tuple[float, ...]

    @property
    def slowest(self) -> float:
        """Seconds of the slowest stage: the pipeline gives one microbatch in this time."""
        return max(self.seconds)


@dataclass(frozen=True)
class Cluster:
    """What the stages run on.

    Attributes:
        link_bytes_per_second: between two workers, in each direction.
        memory_bytes: of each worker; none: enough.
        workers: how many there are; none: one for each stage.
        microbatches: of a step.
    """

    link_bytes_per_second: float = math.inf
    memory_bytes: float | None = None
    workers: int | None = None
    microbatches: int = 8


def balance(layers: Sequence[LayerCost], stages: int, cluster: Cluster) -> Cut:
    """The cut whose slowest stage is the fastest; of equal ones that with the more even stages.

    Not all workers need to be used: a replica that costs more than it gives is left out.

    Raises:
        ConfigError: there is no stage, there are more stages than layers or workers, or a stage cannot fit the memory.
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
    prices = StageCosts(layers, cluster)
    limit = cluster.memory_bytes

    def seconds(begin: int, end: int, replicas: int, after: int) -> float:
        if limit is not None and prices.memory(begin, end, replicas, after) > limit:
            return math.inf
        return prices.seconds(begin, end, replicas)

    found = _best(len(layers), stages, workers, seconds)
    if math.isinf(found[0][0]):
        raise _does_not_fit(layers, stages, workers, prices, cluster)
    bounds, replicas = found[1], found[2]
    times = tuple(prices.seconds(*bound, count) for bound, count in zip(bounds, replicas, strict=True))
    return Cut(tuple(layers[begin].name for begin, _ in bounds[1:]), bounds, replicas, times)


def check_memory(layers: Sequence[LayerCost], bounds: Sequence[tuple[int, int]], cluster: Cluster) -> None:
    """Refuse a cut of which a stage does not fit, one worker each.

    Raises:
        ConfigError: names the stage, and what it needs.
    """
    prices, limit = StageCosts(layers, cluster), cluster.memory_bytes
    for place, (begin, end) in enumerate(bounds):
        needs = prices.memory(begin, end, 1, len(bounds) - place - 1)
        if limit is not None and needs > limit:
            raise ConfigError(
                f"Stage {place} (layers {layers[begin].name!r} to {layers[end - 1].name!r}) needs {needs:,.0f} bytes, "
                f"and a worker has {limit:,.0f}. Cut elsewhere, or let the cut be found: leave out pipeline.cut."
            )


def fit_bounds(costs: Sequence[float], factors: Sequence[float]) -> tuple[tuple[int, int], ...]:
    """The cut whose slowest stage is the fastest, where the worker of a stage has a speed of its own.

    Args:
        costs: seconds of each layer.
        factors: by which they are longer in each stage.

    >>> fit_bounds([1.0] * 6, [1.0, 2.0])
    ((0, 4), (4, 6))
    """
    sums, count = _sums(costs), len(costs)
    # of the stages so far, ending at each layer: the seconds of the slowest one, and where each begins
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
        self._computing = _sums([layer.forward + layer.backward for layer in layers])
        self._weights = _sums([layer.parameter_bytes for layer in layers])
        self._kept = _sums([layer.kept_bytes for layer in layers])
        self._crossing = [0, *(layer.output_bytes for layer in layers[:-1]), 0]

    def seconds(self, begin: int, end: int, replicas: int = 1) -> float:
        """For one microbatch."""
        link = self._cluster.link_bytes_per_second
        computing = self._computing[end] - self._computing[begin]
        transfers = (self._crossing[begin] + self._crossing[end]) / link
        weights = self._weights[end] - self._weights[begin]
        reduce = 2 * (replicas - 1) / replicas * weights / link
        return max(computing, transfers) / replicas + reduce / self._cluster.microbatches

    def memory(self, begin: int, end: int, replicas: int, after: int) -> float:
        """Bytes on each worker; as many microbatches are under way in it as there are stages from it on."""
        share = math.ceil(self._cluster.microbatches / replicas)
        kept = (self._kept[end] - self._kept[begin]) * min(share, after + 1)
        return COPIES * (self._weights[end] - self._weights[begin]) + kept


Price = Callable[[int, int, int, int], float]
"""Of a stage: first layer, the one after its last, replicas, stages after it."""
_Found = tuple[tuple[float, float], tuple[tuple[int, int], ...], tuple[int, ...]]


def _best(layers: int, stages: int, workers: int, price: Price) -> _Found:
    """The cut with the least dearest stage, and of these one with a small sum of squares."""
    nothing: _Found = (math.inf, math.inf), (), ()
    # what is best from a layer on, with so many workers at most; at first with no stages left
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
                        cost = price(begin, end, replicas, behind)
                        value = max(cost, worst), squares + cost * cost
                        if value < best[0] or not best[1]:
                            best = value, ((begin, end), *bounds), (replicas, *counts)
                now[begin, left] = best
        after = now
    return after[0, workers]


def _does_not_fit(
    layers: Sequence[LayerCost], stages: int, workers: int, prices: StageCosts, cluster: Cluster
) -> ConfigError:
    """Names the stage that needs most in the cut that needs least."""
    _, bounds, replicas = _best(len(layers), stages, workers, prices.memory)
    needs = [
        prices.memory(*bound, count, stages - place - 1)
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


def _sums(values: Sequence[float]) -> list[float]:
    return [0.0, *accumulate(values)]
