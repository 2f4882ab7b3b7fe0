"""Bytes and step time of each format on the wire, over float32 in the same run, and what encoding costs.

The workers are network namespaces, one worker each, whose links are shaped. Each trains the perceptron of
``bench/machines`` with ``exact=True``, two microbatches for each worker. Bytes are counted by the kernel on a worker's
link, the most of all workers. The formats are measured in turn, several times, and the fingerprints of a format must be
those of one worker.

    python bench/wire.py                                   # as root
    python bench/wire.py --workers 2 --rates 100mbit --formats float32,int4 --steps 4
    python bench/wire.py --encoding                        # nanoseconds per byte of float32, on one core
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch

sys.path.insert(0, str(Path(__file__).with_name("machines")))
from launched import run
from namespaces import network, obstacle

from paceline.data.keys import seed_of
from paceline.settings import Settings
from paceline.step.gradients.accumulate import add
from paceline.step.gradients.formats import codec_for
from paceline.strategies.base import WIRES

NUMEL = 2**21


def encoding(wire: str) -> tuple[float, float, float]:
    """Nanoseconds per byte of a float32 gradient to encode it for one microbatch, to add it, and to decode the sum."""
    context = SimpleNamespace(
        update=SimpleNamespace(parameters={"weight": torch.nn.Parameter(torch.zeros(1024, NUMEL // 1024))}),
        compute=SimpleNamespace(
            model=torch.nn.Module(), scale=1.0, seed=lambda use, step, *place: seed_of(use, 0, step, *place)
        ),
        order=SimpleNamespace(microbatches=8, parts_of=lambda step: [range(1)] * 8),
        settings=Settings.model_validate({"wire": wire, "exact": True}),
        world=SimpleNamespace(device=torch.device("cpu"), rank=0, size=8),
        events=SimpleNamespace(mark=lambda *event, **values: None),
        strategy_state={},
        replicas={},
        warnings=[],
    )
    codec = codec_for(cast(Any, context))
    assert codec is not None
    found = []
    for step in range(7):
        gradient = torch.randn(1024, NUMEL // 1024)
        begin = time.perf_counter()
        sums = codec.encode([gradient], step, 0)
        middle = time.perf_counter()
        add(sums, sums)
        added = time.perf_counter()
        codec.fits()
        start = time.perf_counter()
        codec.decode(sums, 1.0)
        found.append((middle - begin, added - middle, time.perf_counter() - start))
        codec.accept()
    encode, sum_up, decode = (min(times) / NUMEL / 4 * 1e9 for times in zip(*found, strict=True))
    return encode, sum_up, decode


def measure(rate: str, workers: int, formats: list[str], megabytes: int, steps: int, rounds: int) -> list[str]:
    """Give a line for each format on links of a rate."""
    seconds, crossed, bits = defaultdict[str, list[float]](list), dict[str, float](), defaultdict[str, set[str]](set)
    with network(workers, rate) as names, tempfile.TemporaryDirectory() as folder:
        for turn in range(rounds):
            for wire in formats:
                place = Path(folder) / f"{turn}-{wire}"
                everyone = run(names, [1] * workers, place, f"wire-{wire}", megabytes, steps)
                seconds[wire] += [statistics.median(one["seconds"]) for one in everyone[:1]]
                crossed[wire] = max(one["bytes"] for one in everyone)
                bits[wire] |= {one["fingerprint"] for one in everyone}
    time_of = {wire: statistics.median(seconds[wire]) for wire in formats}
    first = formats[0]
    return [
        f"{workers} workers, {rate:>8}  {wire:>9}  bytes {crossed[wire] / crossed[first]:.3f}  "
        f"step {time_of[wire] / time_of[first]:.2f} ({time_of[wire]:.2f} s)  fingerprints {len(bits[wire])}"
        for wire in formats
    ]


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--rates", default="1gbit,200mbit,100mbit", help="of the links, as tc writes them")
    parser.add_argument("--formats", default=",".join(WIRES), help="the first one is the measure of the others")
    parser.add_argument("--megabytes", type=int, default=20, help="of gradients in float32")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument(
        "--rounds", type=int, default=3, help="number of rounds in which the formats are measured in turn"
    )
    parser.add_argument("--encoding", action="store_true", help="measure the encoding alone, without workers")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for wire in options.formats.split(",") if options.encoding else ():
        if wire != "float32":
            costs = zip(("encode", "add", "decode"), encoding(wire), strict=True)
            print(f"{wire:>9}", *(f"{what} {cost:.2f} ns/byte" for what, cost in costs), sep="  ", flush=True)
    if options.encoding:
        return
    missing = obstacle()
    if missing:
        raise SystemExit(f"left out, as {missing}")
    for rate in options.rates.split(","):
        formats = options.formats.split(",")
        lines = measure(rate, options.workers, formats, options.megabytes, options.steps, options.rounds)
        print(*lines, sep="\n", flush=True)


if __name__ == "__main__":
    main()
