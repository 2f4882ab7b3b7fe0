"""The balancer against brute force: every cut, and every share of the workers, is tried."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import combinations, pairwise, product

import pytest

from paceline.errors import ConfigError
from paceline.schedule.balance import Cluster, LayerCost, StageCosts, balance


def some_layers(count: int, draw: random.Random, ratio: float = 10.0) -> list[LayerCost]:
    """Layers whose costs differ up to tenfold."""
    return [
        LayerCost(
            f"blocks.{place}",
            forward=draw.uniform(1, ratio) * 1e-3,
            backward=draw.uniform(1, ratio) * 2e-3,
            output_bytes=int(draw.uniform(1, ratio) * 1e5),
            parameter_bytes=int(draw.uniform(1, ratio) * 1e6),
            kept_bytes=int(draw.uniform(1, ratio) * 1e6),
        )
        for place in range(count)
    ]


def all_cuts(layers: int, stages: int, workers: int) -> Iterator[tuple[list[tuple[int, int]], tuple[int, ...]]]:
    for places in combinations(range(1, layers), stages - 1):
        bounds = list(pairwise([0, *places, layers]))
        for replicas in product(range(1, workers - stages + 2), repeat=stages):
            if sum(replicas) <= workers:
                yield bounds, replicas


def brute_force(layers: list[LayerCost], stages: int, cluster: Cluster) -> float | None:
    prices = StageCosts(layers, cluster)
    best = None
    for bounds, replicas in all_cuts(len(layers), stages, cluster.workers or stages):
        pairs = list(zip(bounds, replicas, strict=True))
        needs = [prices.memory(*bound, count, stages - 1 - place) for place, (bound, count) in enumerate(pairs)]
        if cluster.memory_bytes is not None and max(needs) > cluster.memory_bytes:
            continue
        slowest = max(prices.seconds(*bound, count) for bound, count in pairs)
        best = slowest if best is None else min(best, slowest)
    return best


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("link", [1e7, 1e9])
def test_no_cut_is_better(seed: int, link: float) -> None:
    draw = random.Random(seed)
    layers = some_layers(draw.randint(4, 11), draw)
    stages = draw.randint(1, 4)
    cluster = Cluster(link_bytes_per_second=link)
    cut = balance(layers, stages, cluster)
    assert cut.slowest == brute_force(layers, stages, cluster)
    assert [begin for begin, _ in cut.bounds] == [0, *(end for _, end in cut.bounds[:-1])]
    assert cut.bounds[-1][1] == len(layers)
    assert cut.names == tuple(layers[begin].name for begin, _ in cut.bounds[1:])
    assert cut.replicas == (1,) * stages


@pytest.mark.parametrize("seed", range(20))
def test_no_use_of_replicas_is_better(seed: int) -> None:
    draw = random.Random(seed)
    layers = some_layers(draw.randint(3, 7), draw)
    stages = draw.randint(1, 3)
    cluster = Cluster(draw.choice([1e7, 1e8, 1e9]), workers=stages + draw.randint(0, 3), microbatches=4)
    cut = balance(layers, stages, cluster)
    assert cut.slowest == brute_force(layers, stages, cluster)
    assert sum(cut.replicas) <= (cluster.workers or 0)


@pytest.mark.parametrize("seed", range(20))
def test_no_cut_that_fits_is_better(seed: int) -> None:
    draw = random.Random(seed)
    layers = some_layers(7, draw)
    cluster = Cluster(1e8, memory_bytes=draw.uniform(6e7, 1.6e8), workers=3 + seed % 2, microbatches=3)
    best = brute_force(layers, 3, cluster)
    if best is None:
        with pytest.raises(ConfigError, match="does not fit"):
            balance(layers, 3, cluster)
    else:
        assert balance(layers, 3, cluster).slowest == best


def layer(name: str, **more: float) -> LayerCost:
    costs = {"forward": 1.0, "backward": 2.0, "output_bytes": 0, "parameter_bytes": 0, "kept_bytes": 0, **more}
    return LayerCost(name, **costs)  # type: ignore[arg-type]


def test_equal_layers_are_shared_out_evenly() -> None:
    layers = [layer(str(place)) for place in range(8)]
    cut = balance(layers, 4, Cluster())
    assert cut.bounds == ((0, 2), (2, 4), (4, 6), (6, 8))
    assert cut.names == ("2", "4", "6")
    assert cut.seconds == (6.0,) * 4


def test_a_dear_transfer_is_not_cut() -> None:
    layers = [layer("0", output_bytes=100), layer("1", output_bytes=100), layer("2", output_bytes=1), layer("3")]
    assert balance(layers, 2, Cluster()).names == ("2",)
    assert balance(layers, 2, Cluster(link_bytes_per_second=1.0)).names == ("3",)


def test_the_slow_stage_gets_the_replicas() -> None:
    layers = [layer("features", forward=10.0, backward=20.0), layer("classifier")]
    cut = balance(layers, 2, Cluster(workers=4))
    assert cut.replicas == (3, 1)
    assert cut.seconds == (10.0, 3.0)


def test_a_replica_whose_weights_are_dear_is_left_out() -> None:
    layers = [layer("0"), layer("1", parameter_bytes=1000)]
    assert balance(layers, 1, Cluster(link_bytes_per_second=1.0, workers=4)).replicas == (1,)


def test_the_first_stage_holds_most_microbatches() -> None:
    layers = [layer(str(place), kept_bytes=10) for place in range(6)]
    assert balance(layers, 3, Cluster()).bounds == ((0, 2), (2, 4), (4, 6))
    assert balance(layers, 3, Cluster(memory_bytes=40)).bounds == ((0, 1), (1, 3), (3, 6))
    assert balance(layers, 3, Cluster(memory_bytes=40, microbatches=1)).bounds == ((0, 2), (2, 4), (4, 6))


def test_what_does_not_fit_is_named() -> None:
    layers = [layer("embed"), layer("blocks.0", parameter_bytes=1000), layer("head")]
    with pytest.raises(ConfigError, match=r"stage 1 \(layer 'blocks.0'\) needs 4,000 bytes, and a worker has 3,999"):
        balance(layers, 3, Cluster(memory_bytes=3999))
    with pytest.raises(ConfigError, match=r"stage \d \(layers? .*blocks.0"):
        balance(layers, 2, Cluster(memory_bytes=3999))
    layers = [layer(str(place), kept_bytes=10) for place in range(3)]
    with pytest.raises(ConfigError, match=r"stage 0 \(layer '0'\) needs 30 bytes, and a worker has 29"):
        balance(layers, 3, Cluster(memory_bytes=29))


def test_stages_that_recompute_keep_their_inputs() -> None:
    layers = [layer(str(place), output_bytes=2, kept_bytes=10) for place in range(4)]
    cluster = Cluster(microbatches=4, recompute=True)
    again = StageCosts(layers, cluster)
    assert [again.memory(0, 2, 1, 1), again.memory(2, 4, 1, 0)] == [20, 22]  # one microbatch, and the inputs of each
    assert StageCosts(layers, Cluster(microbatches=4)).memory(0, 2, 1, 1) == 40
    assert again.memory(1, 2, 1, 2) == 10 + 3 * 2
    assert again.seconds(0, 2) == 2 * (2 * 1.0 + 2.0)
    with pytest.raises(ConfigError, match=r"needs 30 bytes, .* set recompute=\"auto\""):
        balance(layers[:3], 3, Cluster(memory_bytes=29))


def test_more_stages_than_layers_or_workers() -> None:
    layers = [layer("0"), layer("1")]
    with pytest.raises(ConfigError, match="into 0 stages: it must be at least 1"):
        balance(layers, 0, Cluster())
    with pytest.raises(ConfigError, match="3 stages need as many layers, but the model has 2: "):
        balance(layers, 3, Cluster())
    with pytest.raises(ConfigError, match="2 stages need as many workers, but there are 1"):
        balance(layers, 2, Cluster(workers=1))


def test_a_deep_model_is_cut_quickly() -> None:
    layers = some_layers(150, random.Random(0))
    assert len(balance(layers, 4, Cluster(1e9, workers=8)).bounds) == 4
