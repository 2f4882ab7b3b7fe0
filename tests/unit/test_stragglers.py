"""The benchmark of slow workers: what is pure of it."""

from __future__ import annotations

import importlib.util
import math
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "bench" / "stragglers"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # as where it is run; dataclasses look there
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def modules() -> Iterator[dict[str, ModuleType]]:
    names = ("patterns", "measures", "rules")
    before = {name: sys.modules.get(name) for name in names}
    yield {name: load(name) for name in names}
    for name, module in before.items():
        if module is None:
            del sys.modules[name]
        else:
            sys.modules[name] = module


@pytest.fixture
def patterns(modules: dict[str, ModuleType]) -> ModuleType:
    return modules["patterns"]


@pytest.fixture
def measures(modules: dict[str, ModuleType]) -> ModuleType:
    return modules["measures"]


def grid(pattern, steps: int = 400) -> list[list[float]]:
    """The slowdowns, for each step those of all workers."""
    return [[pattern.slowdown(worker, step) for worker in range(pattern.workers)] for step in range(steps)]


def test_a_pattern_is_a_pure_function(patterns: ModuleType) -> None:
    for name in patterns.PATTERNS:
        assert grid(patterns.Pattern(name, 8, seed=3)) == grid(patterns.Pattern(name, 8, seed=3))


@pytest.mark.parametrize("name", ["transient", "noise"])
def test_the_seed_decides_what_is_drawn(name: str, patterns: ModuleType) -> None:
    assert grid(patterns.Pattern(name, 8, seed=0)) != grid(patterns.Pattern(name, 8, seed=1))


def test_one_worker_is_twice_as_slow_for_good(patterns: ModuleType) -> None:
    rows = grid(patterns.Pattern("permanent", 8))
    assert sorted(rows[0]) == [1.0] * 7 + [2.0]
    assert all(row == rows[0] for row in rows)


def test_each_worker_is_slow_in_a_tenth_of_the_steps(patterns: ModuleType) -> None:
    rows = grid(patterns.Pattern("transient", 8), 2000)
    assert {value for row in rows for value in row} == {1.0, 4.0}
    for worker in range(8):
        assert 0.07 < sum(row[worker] == 4.0 for row in rows) / len(rows) < 0.13


def test_the_slow_worker_changes_after_each_period(patterns: ModuleType) -> None:
    rows = grid(patterns.Pattern("rotating", 8, period=5), 40)
    slow = [row.index(3.0) for row in rows]
    assert all(sorted(row) == [1.0] * 7 + [3.0] for row in rows)
    assert all(slow[step] == slow[step - 1] for step in range(1, 40) if step % 5)
    assert all(slow[step] != slow[step - 1] for step in range(5, 40, 5))
    assert set(slow) == set(range(8))


def test_noise_is_log_normal(patterns: ModuleType) -> None:
    logarithms = [math.log(value) for row in grid(patterns.Pattern("noise", 8)) for value in row]
    assert abs(statistics.mean(logarithms)) < 0.02
    assert 0.13 < statistics.stdev(logarithms) < 0.17


def test_the_ideal_is_the_work_over_the_sum_of_the_speeds(patterns: ModuleType) -> None:
    speeds = patterns.Pattern("speeds", 8)
    assert speeds.speed(0) == pytest.approx(sum(patterns.SPEEDS))
    assert speeds.ideal_seconds(0, 120, 0.5) == pytest.approx(120 * 0.5 / 12)


def test_what_is_possible_adds_up_over_the_steps_of_a_pattern(patterns: ModuleType) -> None:
    pattern = patterns.Pattern("transient", 8)
    slot, base = 0.3, 0.02
    whole = pattern.possible(0.1, 4.4, slot, base)
    assert whole == pytest.approx(pattern.possible(0.1, 2.0, slot, base) + pattern.possible(2.0, 4.4, slot, base))
    assert pattern.possible(0.6, 0.9, slot, base) == pytest.approx(0.3 * pattern.speed(2) / base)


def test_steps_without_waste_are_ideal(measures: ModuleType, patterns: ModuleType) -> None:
    pattern = patterns.Pattern("transient", 4)
    now, ends = 0.0, []
    for step in range(20):
        now += pattern.ideal_seconds(step, 64, 0.01)
        ends.append(now)
    found = measures.of_steps([ends] * 4, pattern, 64, 0.01)
    assert (found.whole, found.median, found.tail) == pytest.approx((1.0, 1.0, 1.0))
    late = [end + 1.0 * (step >= 10) for step, end in enumerate(ends)]
    held_up = measures.of_steps([ends, ends, late, ends], pattern, 64, 0.01)
    assert held_up.tail > 2 and held_up.median == pytest.approx(1.0) and held_up.whole > 1.1


def test_the_first_steps_do_not_count(measures: ModuleType, patterns: ModuleType) -> None:
    ends = [9.0, 20.0, *(20.0 + step for step in range(1, 9))]
    found = measures.of_steps([ends], patterns.Pattern("none", 1), 10, 0.1)
    assert found.each == pytest.approx([1.0] * 8)


def test_microbatches_without_waste_are_ideal(measures: ModuleType, patterns: ModuleType) -> None:
    pattern, microbatches, base = patterns.Pattern("speeds", 8), 64, 0.01
    rate = pattern.speed(0) / base
    done = [(place + 1) / rate for place in range(microbatches * 30)]
    found = measures.of_microbatches(done, pattern, microbatches, base)
    assert (found.whole, found.tail) == pytest.approx((1.0, 1.0))
    half = measures.of_microbatches([2 * moment for moment in done], pattern, microbatches, base)
    assert half.median == pytest.approx(2.0)


def test_samples_that_did_not_count_once_are_found(measures: ModuleType) -> None:
    assert measures.miscounted([-0.5, -0.47, -0.53], 0.5) == 0
    assert measures.miscounted([-0.5, 0.0, -1.0, -0.5], 0.5) == 2


def test_percentiles_are_values_that_there_are(measures: ModuleType) -> None:
    values = [float(value) for value in range(1, 201)]
    assert measures.percentile(values, 99) == 198.0
    assert measures.percentile([7.0], 99) == 7.0


def test_a_rule_settles_where_its_steps_stay_within_the_limit(measures: ModuleType) -> None:
    assert measures.settled_after([2.0] * 6 + [1.01] * 6, 1.06) == 4  # most of the next five are within it
    assert measures.settled_after([2.0] * 12, 1.06) is None


def test_every_rule_names_settings_that_there_are(modules: dict[str, ModuleType]) -> None:
    from paceline import config

    for rule in modules["rules"].RULES.values():
        resolved = config.resolve(dict(rule.settings))
        assert resolved.settings.strategy == rule.strategy


def test_a_rule_without_a_strategy_is_left_out_with_a_line(
    modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    from paceline.strategies import registry

    others = [name for name in registry.names() if name != "allreduce"]
    monkeypatch.setattr(registry, "names", lambda: others)
    there, missing = modules["rules"].available(["allreduce", "stealing"])
    assert [rule.name for rule in there] == ["stealing"]
    assert len(missing) == 1 and "allreduce" in missing[0]
