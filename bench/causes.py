"""Whether ``paceline why`` finds the cause of lost time: one cause at a time, in runs of 3 to 8 workers.

A microbatch sleeps for 4 ms instead of computing, so a machine with few cores can run the workers. Prints the first
two culprits of each run, and whether the cause comes first, second, or not at all. With ``--gains``, each cause runs
again with the first setting that is advised. It then prints how much of the time the setting was to save, and how much
it has saved. Slow links need root, for network namespaces.

    python bench/causes.py
    python bench/causes.py --only hot-thread,slow-sender --gains
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import json
import logging
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn import functional
from torch.utils.data import Dataset

import paceline

sys.path.insert(0, str(Path(__file__).parent / "machines"))
from namespaces import network, obstacle, within

STEPS, MICROBATCH_SECONDS, SLOW = 40, 0.004, 1
"""Steps of a run, duration of a microbatch, and the rank that has the cause."""
WIDTH, LINK_WIDTH, LINK_STEPS = 16, 700, 20
RATE, BURST = "40mbit", "100kb"
"""Of a slow link. 2 MB of gradients then take 0.3 s."""


class Cause(NamedTuple):
    """Kind and ranks that are right, with the number of workers and the settings of the run."""

    kind: str
    ranks: tuple[int | None, ...] = (SLOW,)
    workers: int = 3
    settings: tuple[str, ...] = ("strategy=allreduce",)


CAUSES = {
    "slow-cpu": Cause("compute", workers=4),
    "hot-thread": Cause("compute"),
    "page-faults": Cause("compute"),
    "garbage-collection": Cause("compute", workers=5),
    "lock-contention": Cause("compute"),
    "uneven-microbatches": Cause("compute", workers=4),
    "stragglers-in-turn": Cause("compute", (0, 1, 2, 3), workers=4),
    "hiccup-of-a-host": Cause("compute", (2, 3), workers=6),
    "imbalanced-stage": Cause("compute", settings=("strategy=pipeline",)),
    "slow-replica": Cause("compute", workers=4, settings=("strategy=diloco", "local.every=5")),
    "slow-owner": Cause("update", workers=4, settings=("strategy=sharded",)),
    "slow-dedicated-server": Cause(
        "update", (0,), workers=4, settings=("strategy=parameter-server", "server.dedicated=true")
    ),
    "slow-server": Cause("update", (0,), settings=("strategy=parameter-server",)),
    "slow-updates": Cause("update", (None,)),
    "slow-first-step": Cause("start"),
    "small-loader": Cause("load", (None,)),
    "slow-data-of-a-rank": Cause("load", workers=8),
    "slow-evaluation": Cause("evaluate"),
    "large-checkpoints": Cause("checkpoint", (None,), settings=("checkpoint.every=2", "checkpoint.background=false")),
    "slow-disk": Cause("checkpoint", (None,), settings=("checkpoint.every=4", "checkpoint.background=false")),
    "chatty-logging": Cause("script"),
    "slow-tracker": Cause("script", (0,), workers=4),
    "sleep-in-the-loop": Cause("script", (None,)),
    "late-at-a-collective": Cause("script"),
    "slow-sender": Cause("exchange", workers=4),
    "slow-receiver": Cause("exchange"),
    "slow-links": Cause("exchange", (None,)),
    "stalled-start": Cause("start"),
    "costly-samples": Cause("load", (None, 0, 1, 2, 3), workers=4),
    "link-one-way": Cause("exchange", (1, 2), workers=4),
    "link-of-an-owner": Cause("exchange", settings=("strategy=sharded",)),
    "link-to-an-owner": Cause("exchange", workers=4, settings=("strategy=sharded",)),
    "link-of-a-server": Cause(
        "exchange", workers=4, settings=("strategy=parameter-server", "server.dedicated=true", "server.count=2")
    ),
    "link-to-a-server": Cause("exchange", settings=("strategy=parameter-server", "server.count=2")),
}
_TO = "slow-receiver", "link-to-an-owner", "link-to-a-server"
_SLOW_LINKS = *_TO, "slow-sender", "slow-links", "link-of-an-owner", "link-of-a-server"
LINKS = dict.fromkeys(_SLOW_LINKS, (f"qdisc add dev {{}} root tbf rate {RATE} burst {BURST} latency 500ms",)) | {
    "link-one-way": (
        "qdisc add dev {} root handle 1: htb",
        f"class add dev {{}} parent 1: classid 1:1 htb rate {RATE} burst {BURST}",
        "filter add dev {} parent 1: protocol ip u32 match ip dst 10.77.0.3/32 flowid 1:1",
    ),
}
"""What ``tc`` does to the slow devices, by cause."""
SLOW_UPDATES = {"slow-updates": range(8), "slow-server": range(8), "slow-dedicated-server": (0,), "slow-owner": (SLOW,)}
"""Ranks with slow updates, by cause."""


class Items(Dataset[Any]):
    """Items that take this time to load."""

    def __init__(self, width: int, seconds: float = 0.0, count: int = 4096, costly: bool = False) -> None:
        self.width, self.seconds, self.count, self.costly = width, seconds, count, costly

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(0.05 if self.costly and index % 32 == 0 else self.seconds)
        return torch.ones(self.width), torch.zeros(1)


class Layer(torch.nn.Linear):
    """Layer that takes time, and whatever else the cause does during a microbatch."""

    def __init__(self, inputs: int, outputs: int, seconds: float, cause: Callable[[], None]) -> None:
        super().__init__(inputs, outputs)
        self.seconds, self.cause = seconds, cause

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        self.cause()
        return super().forward(value)


class SlowSGD(torch.optim.SGD):
    """SGD whose updates take time on some ranks."""

    def step(self, closure: Any = None) -> Any:
        time.sleep(0.05 if int(os.environ["RANK"]) in SLOW_UPDATES[os.environ["CAUSE"]] else 0.0)
        return super().step(closure)


def nothing() -> None:
    """Do nothing."""


def slow_sync(sync: Callable[[Any], None], file: Any) -> None:
    """Write a file to the disk, which takes time."""
    time.sleep(0.1)
    sync(file)


def page_faults() -> Callable[[], None]:
    """Return a function that touches 32 MB of pages which are not mapped."""

    def touch() -> None:
        with mmap.mmap(-1, 32 << 20) as memory:
            for place in range(0, len(memory), mmap.PAGESIZE):
                memory[place] = 1

    return touch


def garbage_collection() -> Callable[[], None]:
    """Return a function that collects garbage among a million objects, now and then."""
    kept, calls = [[place] for place in range(500_000)], [0]

    def collect() -> None:
        calls[0] += 1
        if calls[0] % 8 == 0:
            gc.collect()
            assert kept

    return collect


def lock_contention() -> Callable[[], None]:
    """Return a function that takes a lock which another thread has for most of the time."""
    lock = threading.Lock()

    def hold() -> None:
        while True:
            with lock:
                time.sleep(0.02)
            time.sleep(0.001)

    threading.Thread(target=hold, daemon=True).start()
    return lambda: lock.release() if lock.acquire() else None


def hot_thread() -> Callable[[], None]:
    """Start a thread that gives up the interpreter's lock as rarely as it can."""

    def spin() -> None:
        while True:
            pass

    sys.setswitchinterval(0.02)
    threading.Thread(target=spin, daemon=True).start()
    return nothing


def slow_cpu() -> Callable[[], None]:
    """Stop this process for half of the time, from a process of its own."""
    target = os.getpid()
    code = "import os, signal, sys, time\ntarget = int(sys.argv[1])\nwhile os.getppid() == target:\n"
    code += "".join(f" os.kill(target, signal.{way}); time.sleep(0.05)\n" for way in ("SIGSTOP", "SIGCONT"))
    subprocess.Popen([sys.executable, "-c", code, str(target)])
    return nothing


OF_A_MICROBATCH: dict[str, Callable[[], Callable[[], None]]] = {
    "page-faults": page_faults,
    "garbage-collection": garbage_collection,
    "lock-contention": lock_contention,
    "uneven-microbatches": lambda: lambda: time.sleep(MICROBATCH_SECONDS),
    "slow-replica": lambda: lambda: time.sleep(MICROBATCH_SECONDS),
}
OF_A_PROCESS = {"hot-thread": hot_thread, "slow-cpu": slow_cpu}


def train(cause: str) -> None:
    """Train with the cause."""
    torch.manual_seed(0)
    rank, link = int(os.environ["RANK"]), cause in LINKS
    width, slow = LINK_WIDTH if link else WIDTH, rank == SLOW
    usual = OF_A_MICROBATCH[cause]() if slow and cause in OF_A_MICROBATCH else nothing
    seconds = [MICROBATCH_SECONDS / 3] * 3
    if cause == "imbalanced-stage":
        seconds[1] *= 8
    layers = [Layer(width, width, each, usual) for each in seconds]
    model = torch.nn.Sequential(*layers)
    if cause == "large-checkpoints":
        model.register_buffer("ballast", torch.ones(16 << 20))
    if cause == "stalled-start" and slow:
        time.sleep(5.0)
    if cause == "slow-disk":
        os.fsync = functools.partial(slow_sync, os.fsync)
    loading = cause == "small-loader" or (cause == "slow-data-of-a-rank" and slow)
    session = paceline.start(
        model=model,
        optimizer=functools.partial(SlowSGD if cause in SLOW_UPDATES else torch.optim.SGD, lr=1e-3),
        loss=lambda output, target: functional.mse_loss(output[:, :1], target),
        data=Items(width, 0.005 if loading else 0.0, costly=cause == "costly-samples"),
        batch=24,
        microbatches=12,
        threads=1,
        audit="off",
    )
    if slow and cause in OF_A_PROCESS:
        OF_A_PROCESS[cause]()
    for batch in session.batches(steps=LINK_STEPS if link else STEPS):
        layers[0].cause = once(pause_of(cause, rank, batch.step, CAUSES[cause].workers), usual)
        session.step(batch)
        between_steps(cause, session, batch.step)


def pause_of(cause: str, rank: int, step: int, workers: int) -> float:
    """Return the seconds for which a rank pauses in the first microbatch of a step."""
    if cause == "hiccup-of-a-host" and rank in (2, 3) and step % 4 == 3:
        return 0.2
    if cause == "stragglers-in-turn" and step % workers == rank:
        return 0.05
    return 2.0 if cause == "slow-first-step" and rank == SLOW and step == 0 else 0.0


def once(seconds: float, usual: Callable[[], None]) -> Callable[[], None]:
    """Return a function that sleeps when it is first called, and does the usual."""
    pauses = [seconds]

    def pause() -> None:
        time.sleep(pauses.pop() if pauses else 0.0)
        usual()

    return pause


def between_steps(cause: str, session: Any, step: int) -> None:
    """Do what the script of a cause does after a step."""
    if cause == "slow-evaluation" and step % 8 == 7:
        session.evaluate(Items(WIDTH, 0.005 if session.rank == SLOW else 0.0, 240))
    if cause == "chatty-logging" and session.rank == SLOW:
        log = logging.FileHandler(os.devnull)
        for line in range(4000):
            log.handle(logging.LogRecord("causes", logging.INFO, "", 0, "line %d", (line,), None))
        log.close()
    if cause == "late-at-a-collective":
        time.sleep(0.03 if session.rank == SLOW else 0.0)
        torch.distributed.all_reduce(torch.ones(1))
    if cause == "sleep-in-the-loop" or (cause == "slow-tracker" and session.rank == 0):
        time.sleep(0.03)


@contextlib.contextmanager
def launched(cause: str, run: Path, more: tuple[str, ...] = ()) -> Iterator[None]:
    """Run the workers of a cause to their end with more settings, and with records in a folder."""
    about = CAUSES[cause]
    about = about._replace(settings=(*about.settings, *more))
    environment = {**os.environ, "CAUSE": cause}
    if cause not in LINKS:
        words = [sys.executable, "-m", "paceline", "run", "--quiet", "-n", str(about.workers), "--runs-dir", str(run)]
        words += [word for setting in about.settings for word in ("--set", setting)]
        subprocess.run([*words, "--name", "run", __file__], check=True, env=environment, stdout=subprocess.DEVNULL)
        yield
        return
    with network(about.workers, None) as names, contextlib.ExitStack() as stack:
        ends = [(names[SLOW], "eth0")]
        if cause in _TO:
            ends = [(names[SLOW][: names[SLOW].rindex("m")], f"p{SLOW}")]
        if cause == "slow-links":
            ends = [(name, "eth0") for name in names]
        for name, device in ends:
            for command in LINKS[cause]:
                within(name, "tc", *command.format(device).split())
        environment |= {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29413", "GLOO_SOCKET_IFNAME": "eth0"}
        environment |= {
            "WORLD_SIZE": str(about.workers),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "OMP_NUM_THREADS": "1",
        }
        for key, value in (setting.split("=", 1) for setting in about.settings):
            environment["PACELINE_" + key.upper().replace(".", "__")] = value
        workers = []
        for rank, name in enumerate(names):
            words = ["ip", "netns", "exec", name, sys.executable, __file__]
            worker = subprocess.Popen(words, env=environment | {"RANK": str(rank), "PACELINE_RUN": str(run / "run")})
            stack.callback(worker.wait)
            stack.callback(worker.kill)
            workers.append(worker)
        if any(worker.wait(timeout=300) for worker in workers):
            raise SystemExit(f"{cause}: a worker failed")
        yield


def found_in(run: Path) -> dict[str, Any]:
    """Return what ``paceline why`` says of a run."""
    words = [sys.executable, "-m", "paceline", "why", str(run), "--json"]
    found: dict[str, Any] = json.loads(subprocess.run(words, check=True, capture_output=True).stdout)
    return found


def seconds_of_a_step(run: Path) -> float:
    """Return the mean duration of a step of rank 0, with what comes between steps, without the first three."""
    lines = (run / "events" / "rank-0.jsonl").read_text().splitlines()
    ends = [record["time"] for record in map(json.loads, lines) if record["event"] == "step"][2:]
    return (ends[-1] - ends[0]) / (len(ends) - 1)


def gain(cause: str, advice: list[dict[str, Any]], before: float) -> str:
    """Run a cause with the first setting that is advised, and return what it was to save beside what it has saved."""
    if not advice:
        return ""
    with tempfile.TemporaryDirectory() as folder, launched(cause, Path(folder), (advice[0]["set"],)):
        saved = 1 - seconds_of_a_step(Path(folder) / "run") / before
    return f"; {advice[0]['set']}: promised {advice[0]['gain']:.0%}, saved {saved:.0%}"


def main() -> None:
    """Run each cause, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="causes, with commas between them")
    parser.add_argument("--gains", action="store_true", help="run each cause again with the first advised setting")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    places = []
    for cause in options.only.split(",") if options.only else CAUSES:
        if cause in LINKS and (missing := obstacle()):
            print(f"{cause:<22} left out, as {missing}")
            continue
        with tempfile.TemporaryDirectory() as folder, launched(cause, Path(folder)):
            found, before = found_in(Path(folder) / "run"), seconds_of_a_step(Path(folder) / "run")
        about, culprits = CAUSES[cause], found["culprits"]
        right = [one["kind"] == about.kind and one["rank"] in about.ranks for one in culprits]
        places.append(right.index(True) if True in right else len(right) + 2)
        text = ", ".join(f"{one['kind']} of {one['rank']} {one['share']:.0%}" for one in culprits[:2])
        text += gain(cause, found["advice"], before) if options.gains else ""
        print(f"{cause:<22} {'first' if places[-1] == 0 else 'second' if places[-1] == 1 else 'MISSED':<7} {text}")
        sys.stdout.flush()
    print(f"first {places.count(0)}, in the first two {sum(place < 2 for place in places)}, of {len(places)}")


if __name__ == "__main__":
    train(os.environ["CAUSE"]) if "RANK" in os.environ else main()
