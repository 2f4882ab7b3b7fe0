"""Located data in a session: one result for any placement of the shards, and what is refused before training."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import paceline
from paceline.data import Growing, Located
from paceline.errors import ConfigError, InputError

Printed = Callable[..., list[dict[str, Any]]]

SCRIPT = """
import json, os, random
from functools import partial
import paceline, torch
from paceline.data import Located
from subjects import tell

class Shard(torch.utils.data.Dataset):
    def __init__(self, number, size):
        self.inputs, self.number = torch.randn(size, 8, generator=torch.Generator().manual_seed(number)), number
    def __len__(self):
        return len(self.inputs)
    def __getitem__(self, sample):
        return self.inputs[sample] + 0.1 * torch.randn(8), self.inputs[sample, :1] + self.number

class Stream(Shard, torch.utils.data.IterableDataset):
    def __iter__(self):
        yield from map(self.__getitem__, random.sample(range(len(self)), len(self)))

rank, workers = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
held = {
    "apart": lambda shard: shard % workers == rank,
    "in a row": lambda shard: shard * workers // 8 == rank,
    "twice": lambda shard: rank in (shard % workers, (shard + 1) % workers),
    "on the first": lambda shard: rank == 0 or shard == rank,
    "on the last only": lambda shard: rank == workers - 1,
}
warned, passed, mean = [], [], torch.zeros(1)

def sums(shard):
    passed[-1].append(shard.number)
    return len(shard), shard.inputs.sum().double(), torch.rand(()).item()

def train(placed, move="never", streams=False, **settings):
    torch.manual_seed(0)
    sizes, kind = enumerate([7, 130, 40, 3, 64, 22, 90, 11]), Stream if streams else Shard
    data = Located({str(shard): kind(shard, size) for shard, size in sizes if held[placed](shard)}, move=move)
    mean.zero_()
    session = paceline.start(
        model=torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Dropout(0.1), torch.nn.Linear(4, 1)),
        optimizer=partial(torch.optim.AdamW, lr=0.01), forward=forward, batch=32, exact=True, data=data, **settings,
    )
    passed.append([])
    counts, totals, draws = zip(*session.map(sums, data))
    mean.fill_(sum(totals) / sum(counts))
    for batch in session.batches(epochs=2):
        report = session.step(batch)
    assert move != "auto" or session._context.order._choice.sending  # both ways were used
    warned.append("; ".join(session._context.warnings))
    return [batch.step, report.loss, session.fingerprint(), mean.item(), counts, draws]

def forward(model, microbatch):
    inputs, targets = microbatch
    return torch.nn.functional.mse_loss(model(inputs - mean), targets)

tell(**{f"{placed} {settings}": train(placed, **settings) for placed, settings in json.loads(os.environ["CASES"])})
tell(warned=warned, passed=passed)
"""


def results(printed: Printed, folder: Path, workers: int, cases: list[Any], **options: Any) -> tuple[Any, list[Any]]:
    """The results of all workers and cases, and the warnings of rank 0 in each case."""
    everyone = printed(SCRIPT, workers, folder / str(workers), environment={"CASES": json.dumps(cases)}, **options)
    warned, *_ = [one.pop("warned") for one in everyone]
    for passed in zip(*(one.pop("passed") for one in everyone), strict=True):
        assert sorted(shard for own in passed for shard in own) == [*range(8)], passed  # each shard is read once
    return [result for one in everyone for result in one.values()], warned


def test_one_result_for_any_placement(printed: Printed, tmp_path: Path) -> None:
    streams = {"streams": True}
    (alone, turns), nothing = results(printed, tmp_path, 1, [["apart", {}], ["apart", streams]])
    cases: list[Any] = [["twice", {}], ["apart", {}], ["twice", {"strategy": "stealing"}]]
    cases += [["on the last only", {"move": "auto"}], ["twice", {"move": "samples", **streams}]]
    found, warned = results(printed, tmp_path, 3, cases)
    assert found == [*[alone] * 4, turns] * 3
    assert nothing == ["", ""] and "the others wait for rank 1" in warned[1] and warned[::3] == ["", ""], warned


@pytest.mark.slow
def test_one_result_for_any_workers_and_machines(printed: Printed, tmp_path: Path) -> None:
    (alone,), _ = results(printed, tmp_path, 1, [["apart", {}]])
    for workers, placed in ((2, "in a row"), (2, "on the first"), (4, "apart"), (8, "twice")):
        assert results(printed, tmp_path, workers, [[placed, {}]])[0] == [alone] * workers
    others: list[Any] = [["twice", {"strategy": strategy}] for strategy in ("sharded", "stealing", "auto")]
    others.append(["in a row", {"workers_per_loader": 1}])
    others += [["apart", {"move": "samples", "strategy": strategy}] for strategy in ("sharded", "stealing", "auto")]
    others.append(["on the last only", {"move": "samples", "workers_per_loader": 1}])
    assert results(printed, tmp_path, 3, others, machines=[2, 1])[0] == [alone] * 24


@pytest.mark.slow
def test_one_result_for_any_placement_of_streams(printed: Printed, tmp_path: Path) -> None:
    def cases(*given: tuple[str, dict[str, Any]]) -> list[Any]:
        return [[placed, {"streams": True, **settings}] for placed, settings in given]

    (alone,), _ = results(printed, tmp_path, 1, cases(("apart", {})))
    two = cases(("in a row", {}), ("on the first", {}), ("on the last only", {"move": "auto"}))
    assert results(printed, tmp_path, 2, two)[0] == [alone] * 6
    four = cases(*(("twice", {"strategy": strategy}) for strategy in ("sharded", "stealing", "auto")))
    assert results(printed, tmp_path, 4, four)[0] == [alone] * 12


def rows(count: int, seed: int = 0) -> TensorDataset:
    inputs = torch.randn(count, 4, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(inputs, inputs[:, :1])


def start(data: Any, **given: Any) -> paceline.Session:
    settings = {"loss": torch.nn.functional.mse_loss, "batch": 8} | given
    return paceline.start(
        model=torch.nn.Linear(4, 1), optimizer=partial(torch.optim.SGD, lr=0.1), data=data, **settings
    )


class Stream(IterableDataset[Any]):
    def __init__(self, size: int = 1) -> None:
        self.size = size

    def __iter__(self) -> Any:
        yield from ((torch.full((4,), float(number)), torch.zeros(1)) for number in range(self.size))


class Engine:
    """A table of an engine such as ``ray.data``, whose length takes a computation."""

    def __len__(self) -> int:
        raise AttributeError("use count()")


class DataFrame:
    __module__ = "pyspark.sql.classic.dataframe"

    def __getitem__(self, column: str) -> Any:
        raise AssertionError


class Unreadable(list[Any]):
    def __len__(self) -> int:
        raise OSError("no such bucket")


def carried(model: Any, microbatch: Any, state: Any) -> Any:
    raise AssertionError


@pytest.mark.parametrize(
    ("shards", "text"),
    [
        ({}, "the names of no shard"),
        (Located({}, move="samples"), "No worker has a shard"),
        ([rows(8)], r"but it got \[<torch"),
        ({3: rows(8)}, "the names 3"),
        ({"a": []}, "Shard 'a' .* is empty"),
        ({"a": rows(8), "b": Stream()}, "Shard 'b' of rank 0 .* is a stream, and shard 'a' of rank 0 .* a data set"),
        ({"a": Stream(0)}, "Shard 'a': The stream gave no samples in epoch 0"),
        ({"a": iter(Stream(8))}, "Shard 'a': This generator gives its samples only once"),
        ({"a": Stream(3), "b": Stream(3)}, "'a' of rank 0 .* an epoch would use twice"),
        ({"a": Growing(rows(8))}, "Shard 'a' .* is a Growing"),
        ({"a": DataLoader(rows(8))}, "Shard 'a' .* is a DataLoader"),
        ({"a": Engine()}, "Shard 'a' .* Engine has no items by number"),
        ({"a": DataFrame()}, "Shard 'a' .* is a DataFrame, .* by paceline.data.write_shards"),
        ({"a": "rows.parquet"}, "Shard 'a' .* does not open files"),
        ({"a": rows(8), "b": rows(8)}, "'a' of rank 0 .* an epoch would use twice"),
    ],
)
def test_shards_that_cannot_be_used_are_refused(shards: Any, text: str) -> None:
    with pytest.raises(InputError, match=text):
        start(shards if isinstance(shards, Located) else Located(shards))


def test_a_length_that_cannot_be_read_names_its_shard() -> None:
    with pytest.raises(OSError, match="no such bucket") as raised:
        Located({"a": rows(8), "b": Unreadable()})
    assert raised.value.__notes__ == ["Shard 'b' was asked for its length."]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"move": "always"}, "move='always'.* give 'never', 'samples' .* or 'auto'"),
        ({"lost": "skip"}, "lost='skip'.* give 'stop', or 'leave out'"),
        ({"wait_seconds": -1}, "wait_seconds=-1"),
    ],
)
def test_options_that_cannot_be_used_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(InputError, match=text):
        Located({"a": rows(8)}, **options)


@pytest.mark.parametrize(
    ("options", "given", "text"),
    [
        ({"lost": "leave out"}, {"exact": True}, "leave out exact or lost"),
        ({"move": "samples"}, {"strategy": "diloco", "local": {"sites": True}}, "lets workers send samples"),
        ({"move": "auto"}, {"strategy": "local-sgd", "local": {"sites": True}}, "lets workers send samples"),
    ],
)
def test_options_that_contradict_settings_are_refused(
    options: dict[str, Any], given: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        start(Located({"a": rows(9)}, **options), **given)


@pytest.mark.parametrize(
    ("options", "given", "text"),
    [
        ({"lost": "leave out"}, {}, "leave out lost='leave out'"),
        ({}, {"workers_per_loader": 1}, "each loader process .* leave out workers_per_loader"),
        ({}, {"memory_gigabytes": 1}, "leave out memory_gigabytes"),
        ({}, {"strategy": "diloco", "local": {"sites": True}}, "leave out local.sites"),
    ],
)
def test_settings_that_need_lengths_are_refused_for_streams(
    options: dict[str, Any], given: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError, match=f"Shard 'a' of Located is a stream, and .*{text}"):
        start(Located({"a": Stream(9)}, **options), **given)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"sampler": lambda seed, epoch: range(16)}, "leave out sampler"),
        ({"microbatch_order": paceline.in_turn}, "microbatch_order mixes the samples"),
        ({"drop_last": True}, "leave out sampler, drop_last"),
        ({"loss": None, "forward": carried}, r"forward\(model, microbatch, state\) that needs an order"),
        ({"strategy": "pipeline"}, "strategy 'pipeline' decides which worker .* use strategy 'allreduce'"),
        ({"strategy": "parameter-server"}, "strategy 'parameter-server' decides which worker"),
        ({"wire": "powersgd"}, "wire = 'powersgd' decides which worker"),
    ],
)
def test_settings_that_divide_the_samples_are_refused(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        start(Located({"a": rows(9), "b": rows(9, seed=1)}), **given)


class Changing(list[Any]):
    reads = 0

    def __getitem__(self, sample: Any) -> Any:
        self.reads += 1
        return tuple(value + self.reads / 99 * (self.reads > 9) for value in super().__getitem__(sample))


@pytest.mark.parametrize(
    ("other", "text"),
    [
        ([(torch.ones(4), None)] * 4, r"the loading of microbatch \d of shard 'b' of step 0"),
        ([(torch.ones(5), torch.ones(1))] * 4, r"the forward pass of microbatch \d \(1 sample of shard 'b'\) of"),
        (Changing(rows(20)), "loaded twice from shard 'b', does not have"),
    ],
)
def test_errors_name_the_shard(other: Any, text: str) -> None:
    session = start(Located({"a": rows(8), "b": other}), audit=1, audit_action="stop")
    with pytest.raises((InputError, RuntimeError, TypeError)) as raised:
        for batch in session.batches(epochs=1):
            session.step(batch)
    assert re.search(text, "\n".join([str(raised.value), *getattr(raised.value, "__notes__", [])])), raised.value


def test_a_shard_that_changes_and_an_evaluation_are_refused() -> None:
    growing = [(torch.zeros(4), torch.zeros(1)), *rows(8)]
    session = start(Located({"a": growing, "b": rows(5, seed=1)}))
    with pytest.raises(InputError, match=r"evaluate.* of Located data each worker has its own only"):
        session.evaluate(Located({"a": rows(8)}))
    batches = session.batches(epochs=1)
    session.step(next(batches))
    growing.append(growing[0])
    with pytest.raises(InputError, match=r"Shard 'a' had 9 samples at the start and has 10 in step 1\."):
        session.step(next(batches))
