"""Machine types, what their interruptions cost, and what training costs on them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import pytest

from paceline.errors import ConfigError
from paceline.planning.costs import Profile, Work
from paceline.planning.memory import Run
from paceline.planning.offers import Market, chosen, within
from paceline.planning.query import Query
from paceline.planning.renting.failures import History, Job, best_checkpoint_interval, replay
from paceline.planning.renting.interruptions import Exponential, Interruption, read_trace
from paceline.planning.renting.machines import MachineType, builtin, read, scale
from paceline.planning.renting.money import check_currency, interrupted, undisturbed
from paceline.planning.search import Candidate, Measured, best, front
from paceline.schedule.balance import LayerCost


@dataclass(frozen=True)
class Scripted:
    """Interruptions at fixed times."""

    losses: tuple[tuple[float, tuple[int, ...]], ...]
    delay: float = 0.0

    def history(self, random: Random, slots: int) -> Iterator[Interruption]:
        for time, lost in self.losses:
            yield Interruption(time, lost, self.delay)
        yield Interruption(math.inf, (), 0.0)


JOB = Job(100, 1.0, machines=4, copies=4, recovery_seconds=2.0, start_up_seconds=1000.0)


def once(job: Job, *losses: tuple[float, tuple[int, ...]], delay: float = 0.0) -> History:
    return replay(job, Scripted(losses, delay), histories=1).histories[0]


def test_a_lost_machine_costs_a_stall_the_step_in_progress_and_its_part_of_the_pace() -> None:
    # 10 of 100 steps, then a stall, then 90 steps on 3 of 4 machines
    assert once(JOB, (10.5, (1,))).seconds == pytest.approx(10.5 + 2 + 90 * 4 / 3)


def test_a_replacement_joins_with_a_stall() -> None:
    job = replace(JOB, start_up_seconds=12.0)
    # from 12 to 22 s on 3 machines, and a stall until 24 s; the rest on 4 machines
    assert once(job, (10.0, (1,))).seconds == pytest.approx(24 + 90 - 10 * 3 / 4)


def test_a_standby_takes_the_place_at_once() -> None:
    assert once(replace(JOB, standbys=1), (10.0, (1,))).seconds == pytest.approx(102)
    assert once(replace(JOB, standbys=1), (10.0, (4,))).seconds == pytest.approx(100)  # the standby itself


def test_a_second_loss_within_the_stall_is_a_loss_of_state_if_two_hold_it() -> None:
    job = replace(JOB, copies=2, standbys=2, restart_seconds=5.0, interval_seconds=4.0)
    apart, together = (10.0, (1,)), (11.0, (2,))
    assert once(job, apart, together).rollbacks == 1
    assert once(job, apart, together).seconds == pytest.approx(11 + 7 + 100 - 8)  # from the save after 8 steps
    assert once(job, apart, (13.0, (2,))).rollbacks == 0
    assert once(replace(job, copies=3), apart, together).rollbacks == 0
    assert once(job, (10.0, (1, 2))).rollbacks == 1


def test_the_last_machines_with_the_state_are_not_more_than_those_that_train() -> None:
    assert once(replace(JOB, start_up_seconds=50.0), (10.0, (0,)), (20.0, (1,)), (30.0, (2, 3))).rollbacks == 1


def test_a_checkpoint_is_loaded_once() -> None:
    job = replace(JOB, copies=2, standbys=1, restart_seconds=5.0, start_up_seconds=20.0)
    # from 17 to 30 s on 3 machines, then a stall of 2 s, and the rest on 4
    assert once(job, (10.0, (1, 2))).seconds == pytest.approx(32 + 100 - 13 * 3 / 4)


def test_a_recovery_does_not_put_off_the_next_save() -> None:
    job = replace(JOB, start_up_seconds=20.0, standbys=1, interval_seconds=10.0, checkpoint_seconds=1.0)
    # the save from 12 to 13 s is of 10 steps; one machine trains from 31 to 33.5 s, and the others come
    assert once(job, (9.0, (0,)), (13.5, (1, 2, 3, 4))).seconds == pytest.approx(33.5 + 2 + 90 - 2.5 / 4 + 9)


def test_training_returns_to_the_last_save_that_ended() -> None:
    job = replace(JOB, copies=1, standbys=1, interval_seconds=10.0, checkpoint_seconds=1.0)
    assert once(job).seconds == 109  # saves after 10, 20, ... 90 steps, and none after the last
    assert once(job, (21.5, (0,))).seconds == pytest.approx(21.5 + 2 + 90 + 8)  # the second save has not ended
    assert once(job, (22.5, (0,))).seconds == pytest.approx(22.5 + 2 + 80 + 7)


def test_training_waits_if_no_machine_is_left() -> None:
    lost = once(replace(JOB, start_up_seconds=50.0, restart_seconds=3.0), (10.0, (0, 1, 2, 3)))
    assert lost.seconds == pytest.approx(10 + 50 + 2 + 3 + 100)


def test_machines_that_the_provider_lacks_are_not_billed() -> None:
    assert once(JOB, (10.0, (1,)), delay=20.0).machine_seconds == pytest.approx(4 * (12 + 120) - 20)
    late = once(JOB, (10.0, (1,)), delay=1000.0)
    assert late.machine_seconds == pytest.approx(4 * 10 + 3 * 122)


def test_rollbacks_take_as_long_as_the_formula_says() -> None:
    """Daly 2006, equation 13: M exp(R / M) (exp((T + C) / M) - 1) for each T of work."""
    job = Job(20_000, 1.0, 8, 1, 30.0, checkpoint_seconds=10.0, interval_seconds=200.0)
    mean = 3600 / (8 * 0.5)
    exact = 100 * mean * math.exp(30 / mean) * (math.exp(210 / mean) - 1)
    hours = replay(job, Exponential(0.5), histories=300).hours
    assert hours.mean * 3600 == pytest.approx(exact, rel=0.01)
    assert hours.low < hours.mean < hours.high


def test_the_best_interval_is_better_than_others() -> None:
    job = Job(20_000, 1.0, 8, 1, 30.0, checkpoint_seconds=10.0)
    best = best_checkpoint_interval(job, Exponential(0.5))

    def hours(interval: float) -> float:
        return replay(replace(job, interval_seconds=interval), Exponential(0.5), histories=100).hours.mean

    assert hours(best) < min(hours(best / 3), hours(3 * best))
    assert best_checkpoint_interval(replace(job, copies=8), Exponential(0.5)) == math.inf


def test_training_that_never_ends_is_told() -> None:
    job = Job(1000, 1.0, 8, 1, recovery_seconds=600.0)
    found = replay(job, Exponential(2.0))
    assert found.hours.low == math.inf and found.goodput.mean == 0 and len(found.histories) < 10


TRACE = """time,machine,event
0,a,start
0,b,start
0,c,start
100,a,interruption
200,b,interruption
200,c,interruption
260,d,start
300,,observed
"""


def test_a_trace_is_replayed_with_its_bursts_and_delays(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    trace = read_trace(path)
    assert trace.losses == ((100, 1 / 3), (200, 1)) and trace.delays == (160,) and trace.seconds == 300
    random = Random(1)
    found = [one for _ in range(200) for one, _ in zip(trace.history(random, 30), range(2), strict=False)]
    assert fmean(len(one.slots) for one in found) == pytest.approx((10 + 30) / 2, abs=1)
    assert {one.delay for one in found} == {160}
    assert min(one.time for one in found) < 10 and max(one.time for one in found) < 300
    path.write_text("\ufefftime,machine,event\n2026-01-01,a,start\n\n2026-01-01T00:01:00Z,a,interruption\n\n")
    assert read_trace(path).losses == ((60, 1),)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "is empty: its first line must be time,machine,event"),
        (TRACE.replace("260", "2026-01-01"), "line 8: time 2026-01-01 is a date, and those above are in seconds"),
        ("time,machine\n", "has the columns time, machine: they must be time, machine, event"),
        (TRACE.replace("260", "90"), "line 8: time 90 is before that of the row above"),
        (TRACE.replace("260", "soon"), "line 8: time 'soon' is neither seconds nor a date"),
        (TRACE.replace("200,b,interruption", "200,b,start"), "gap: machine 'b' has the event 'start' in lines 3 and 6"),
        (TRACE.replace("200,b", "200,a"), "gap: machine 'a' has the event 'interruption' in lines 5 and 6"),
        (TRACE.replace("100,a,interruption", "100,a,stop"), "line 5: event 'stop' is unknown"),
        (TRACE.replace("100,a", "100,"), "line 5: the interruption has no machine"),
        (TRACE.replace("100,a,interruption", "100,a"), "line 5, has 2 values"),
        ("time,machine,event\n0,a,start\n", "has 1 events at one time"),
        (
            "time,machine,event\n0,a,start\n"
            + "".join(f"{100 * one + 9000 * (one > 30)},,observed\n" for one in range(60)),
            "gap: no event for 9,100 s between lines 33 and 34",
        ),
    ],
)
def test_a_broken_trace_is_refused(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(ConfigError) as raised:
        read_trace(path)
    assert told in str(raised.value)


def test_a_file_of_the_user_wins(tmp_path: Path) -> None:
    path = tmp_path / "machines.toml"
    path.write_text(
        '[[machine]]\nname = "g5.xlarge"\nspot_price_per_hour = 0.4\n\n[[machine]]\nname = "own"\ncores = 2\n'
    )
    found = read(path)
    assert [*found] == ["g5.xlarge", "own"]
    assert found["g5.xlarge"] == replace(builtin()["g5.xlarge"], spot_price_per_hour=0.4)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[[machine]\n", "is not TOML"),
        ("", "has nothing: write a table [[machine]]"),
        ("machine = []", "has 'machine': write a table [[machine]]"),
        ('[machine]\nname = "a"\n', "has 'machine': write a table [[machine]]"),
        ("[[machine]]\ncores = 2\n", "machine 1 (None): name cannot be used: each machine must have it"),
        ('[[machine]]\nname = "a"\ncores = 2\nprice = 1\n', "price = 1 cannot be used: there is no such field"),
        (
            '[[machine]]\nname = "a"\ncores = 2\nprice_per_hour = "1"\n',
            "price_per_hour = '1' cannot be used: it must be a number",
        ),
        ('[[machine]]\nname = "a"\ncores = 2\nflops = inf\n', "flops = inf cannot be used: it must be finite"),
        ('[[machine]]\nname = "a"\ncores = 0\n', "cores = 0 cannot be used: it must be above 0"),
        ('[[machine]]\nname = "a"\ncores = 1.5\n', "cores = 1.5 cannot be used: it must be a whole number"),
        ('[[machine]]\nname = "a"\ncores = 1\nwatts = nan\n', "watts = nan cannot be used: it must be finite"),
        ('[[machine]]\nname = "a"\ncores = 1\nspot_price_per_hour = -1.0\n', "it must be 0 or more"),
        ('[[machine]]\nname = ""\ncores = 1\n', "name = '' cannot be used: it must not be empty"),
        ('[[machine]]\nname = "a"\ncores = 1\ngpu = 4\n', "gpu = 4 cannot be used: it must be a text in quotes"),
        ('[[machine]]\nname = "a"\ncores = 2\n' * 2, "two machines with the name 'a'"),
    ],
)
def test_a_broken_machines_file_is_refused(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "machines.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as raised:
        read(path)
    assert told in str(raised.value)


SLOW = MachineType("slow", 1, flops=1e12, memory_bytes_per_second=100e9)


def layer(seconds: float, nbytes: int) -> LayerCost:
    return LayerCost("one", seconds, seconds, 0, 0, nbytes)


def test_each_pass_is_scaled_by_what_bounds_it() -> None:
    target = MachineType("fast", 1, flops=10e12, memory_bytes_per_second=400e9)
    few, many, between = layer(1.0, 10**9), layer(1.0, 80 * 10**9), layer(1.0, 45 * 10**9)
    found = scale([few, many, between], SLOW, target)
    # a tenth of the time of computing, a quarter of that of moving, and the latter where it is longer
    assert [one.forward for one in found.layers] == [pytest.approx(0.1), pytest.approx(0.25), pytest.approx(0.1125)]
    assert found.text == "extrapolated from slow to fast: 2 passes of layers by flops, 4 by memory bandwidth"
    weights = LayerCost("w", 1.0, 1.0, 0, 30 * 10**9, 0)  # its backward pass also writes the gradients
    assert "1 passes of layers by flops, 1 by memory bandwidth" in scale([weights], SLOW, target).text


def test_a_type_without_a_rate_is_named() -> None:
    with pytest.raises(ConfigError, match="'slow' has no bfloat16_flops, which scaling times from 'slow' to 'fast'"):
        scale([layer(1.0, 1)], SLOW, replace(SLOW, name="fast", bfloat16_flops=1.0), "bfloat16_flops")


RENTED = MachineType(
    "r", 4, price_per_hour=2.0, spot_price_per_hour=0.5, minimum_seconds=600.0, start_up_seconds=60.0, watts=300.0
)


def test_a_machine_is_billed_from_its_start_for_the_minimum_at_least() -> None:
    bill = undisturbed(RENTED, machines=2, seconds=3540.0)
    assert bill.kilowatt_hours is not None
    assert (bill.hours.mean, bill.machine_hours.mean, bill.money.mean) == (1.0, 2.0, 4.0)
    assert bill.kilowatt_hours.mean == pytest.approx(0.6)
    short = undisturbed(RENTED, machines=2, seconds=60.0)
    assert short.money.mean == pytest.approx(2 * 600 / 3600 * 2.0)


def test_interrupted_training_is_billed_with_its_standbys_and_replacements() -> None:
    job = replace(JOB, standbys=1)
    bill = interrupted(replace(RENTED, minimum_seconds=0.0), replay(job, Scripted(((10.0, (1,)),)), histories=3))
    assert bill.machine_hours.mean == pytest.approx(5 * (60 + 102) / 3600)
    minimum = interrupted(RENTED, replay(job, Scripted(((10.0, (1,)),)), histories=3))
    assert minimum.machine_hours.mean == pytest.approx(6 * 600 / 3600)


def test_prices_that_cannot_be_compared_are_named() -> None:
    euro = replace(RENTED, name="e", currency="EUR")
    check_currency([RENTED, replace(RENTED, name="same")])
    with pytest.raises(ConfigError, match="'r' is in USD, 'e' in EUR"):
        check_currency([RENTED, euro])
    with pytest.raises(ConfigError, match="'e' has no price_per_hour"):
        undisturbed(replace(euro, price_per_hour=None), 1, 10.0)


OFFERED = replace(RENTED, network_bytes_per_second=1e8, interruptions_per_hour=2.0, flops=1e11, memory_bytes=1e9)
FASTER = replace(OFFERED, name="f", flops=4e11, price_per_hour=3.0, spot_price_per_hour=1.0)


COSTS = tuple(LayerCost(str(one), 0.01, 0.02, 1000, 4_000_000, 500) for one in range(8))
SIZES = Run(32_000_000, 32_000_000, 64_000_000, 16_000_000, (), 32, 8)
MEASURED = Measured(
    Work({1: COSTS}, 8, update=0.001),
    Profile("Net", 4, 8, None, {1: COSTS}, 1, 0.001, 0, 32, 9, False, SIZES, ""),
    0.05,
)


def offers(market: Market, most: int = 2) -> list[Candidate]:
    return list(market.offers({1: MEASURED}, most, 10_000, exact=False, convergent=False))


def test_offers_have_bills_and_spot_machines_the_interval_between_saves() -> None:
    found = offers(Market([OFFERED], spot=True), most=8)
    assert {(one.workers, one.machines) for one in found} == {(1, 1), (2, 1), (4, 1), (8, 2)}
    whole = next(one for one in found if (one.strategy, one.workers, one.spot) == ("allreduce", 4, False))
    assert whole.bill is not None and whole.bill.hours.mean == pytest.approx((10_000 * whole.step_seconds + 60) / 3600)
    assert whole.bill.money.mean == pytest.approx(2.0 * whole.bill.hours.mean)
    spot = next(one for one in found if one.spot and one.strategy == "pipeline" and one.workers == 8)
    beside = next(one for one in found if not one.spot and one.settings == {"pipeline": spot.settings["pipeline"]})
    assert spot.settings["checkpoint"]["every"] > 1 and "checkpoint" not in beside.settings
    assert spot.time > beside.time and spot.price < beside.price
    waiting = next(one for one in found if one.standbys and one.settings == spot.settings)
    assert waiting.time < spot.time and waiting.price > spot.price
    given = Market([OFFERED], spot=True).offers({1: MEASURED}, 1, 10_000, exact=False, convergent=False, every=1)
    often = next(one for one in given if one.spot)
    assert "checkpoint" not in often.settings and often.time > next(one for one in found if one.spot).time
    assert best(found, cheapest=True)[0].spot and not best(found)[0].spot
    assert {one.spot for one in front(found)} == {False, True}


def test_offers_of_another_type_are_scaled_and_say_so() -> None:
    here = replace(OFFERED, memory_bytes_per_second=1e12)
    market = Market([here, replace(FASTER, memory_bytes_per_second=1e12)], here=here)
    slow, fast = (one for one in offers(market) if one.workers == 1)
    assert fast.step_seconds < slow.step_seconds
    assert market.extrapolated(MEASURED.profile) == [
        "extrapolated from r to f: 16 passes of layers by flops, 0 by memory bandwidth"
    ]
    half = replace(MEASURED, profile=replace(MEASURED.profile, autocast=True))
    with pytest.raises(ConfigError, match="'r' has no bfloat16_flops"):
        list(market.offers({1: half}, 2, 10_000, exact=False, convergent=False))


@pytest.mark.parametrize(("cores", "gpus", "flops", "most"), [(4, 0, 2e11, 2), (32, 0, 16e11, 16), (1, 1, 10e11, 10)])
def test_scaled_workers_are_together_no_faster_than_their_machine(
    cores: int, gpus: int, flops: float, most: int
) -> None:
    """Measured here with one worker on one of two cores, which has half of this machine's operations."""
    here = replace(OFFERED, cores=2, memory_bytes_per_second=1e12, price_per_hour=None)
    there = replace(FASTER, cores=cores, gpus=gpus, flops=flops, memory_bytes_per_second=1e14)
    ideal = 8 * sum(layer.forward + layer.backward for layer in COSTS) / 2 / most  # of both cores here, scaled
    found = [one for one in offers(Market([there, here], here), 8) if one.machines == 1]
    assert found and all(one.step_seconds >= 0.99 * ideal for one in found)
    usable = 1.0 if gpus else min(cores, 8) / cores
    assert min(one.step_seconds for one in found) < 1.2 * ideal / usable


def test_a_history_of_many_losses_ends() -> None:
    storm = replay(replace(JOB, steps=10**12), Exponential(per_hour=1e5), histories=20)
    assert storm.hours.low == math.inf and len(storm.histories) == 5


def test_what_is_over_the_limits_is_no_choice() -> None:
    found = offers(Market([OFFERED]))
    price = min(one.price for one in found)
    assert {one.price for one in within(found, math.inf, price)} == {price}
    assert within(found, math.inf, math.inf) == [one for one in found if one.fits]
    with pytest.raises(
        ConfigError, match=r"No candidate ends within 0.001 h. The nearest is .* h and .* USD. Allow that"
    ):
        within(found, 0.001, math.inf)
    with pytest.raises(
        ConfigError, match=r"No candidate costs at most 0.1 USD. The nearest is sharded .* on 2 workers .1 r."
    ):
        within(found, math.inf, 0.1)


def test_a_market_lacks_nothing_that_its_bills_need(tmp_path: Path) -> None:
    graphics = replace(OFFERED, name="g", gpus=1)
    for kinds, more, message in (
        ([replace(OFFERED, network_bytes_per_second=None)], {}, "'r' has no network_bytes_per_second"),
        ([replace(OFFERED, price_per_hour=None)], {}, "'r' has no price_per_hour"),
        (
            [replace(OFFERED, spot_price_per_hour=None)],
            {"spot": True},
            "'r' has no spot_price_per_hour, which spot needs",
        ),
        ([replace(OFFERED, interruptions_per_hour=None)], {"spot": True}, "no interruptions_per_hour, .*trace"),
        ([graphics], {}, "'g' has GPUs, .*here"),
        ([FASTER], {"here": replace(OFFERED, flops=None)}, "'r' has no flops"),
    ):
        with pytest.raises(ConfigError, match=message):
            Market(kinds, **more)
    with pytest.raises(ConfigError, match="machines x1: unknown type"):
        chosen("c5.4xlarge, x1")
    (tmp_path / "own.toml").write_text('[[machine]]\nname = "own"\ncores = 2\n')
    assert [kind.name for kind in chosen(str(tmp_path / "own.toml"))] == ["own"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"deadline": "24h"}, "deadline is for machines to rent"),
        ({"machines": "c5.4xlarge"}, "Give steps or epochs"),
        ({"machines": "c5.4xlarge", "steps": 5, "link": (10.0,)}, "link and machines"),
        ({"machines": "c5.4xlarge", "steps": 5, "deadline": "24"}, "deadline 24: give a time such as"),
        ({"machines": "c5.4xlarge", "steps": 5, "budget": -1.0}, "budget -1.0: give a finite number above 0"),
        ({"machines": "c5.4xlarge", "steps": 5, "here": "mine"}, "here mine: unknown type"),
        ({"steps": 5, "epochs": 1.0}, "steps and epochs"),
        ({"tolerance": "none"}, "tolerance none"),
    ],
)
def test_what_cannot_be_planned_is_told_at_once(given: dict[str, Any], message: str) -> None:
    unknown = dict.fromkeys(field.name for field in fields(Query))
    with pytest.raises(ConfigError, match=message):
        Query(
            **{
                **unknown,
                "workers": 0,
                "latency": 0.2,
                "tolerance": "rounding",
                "spot": False,
                "link": (),
                "speeds": (),
                **given,
            }
        )
