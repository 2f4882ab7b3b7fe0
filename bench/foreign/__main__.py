"""Whether models and optimizers of public packages train to the same bits on any number of workers, or are refused.

Each subject trains a few steps with ``exact`` in one process, on several workers, and in a pipeline. The table says
for each ``ok`` (one fingerprint), ``refused`` (with the number of steps before the error, and its text), or
``DIFFERENT``, which must never happen. A subject that a plain loop cannot train either is ``broken``.

    pip install timm transformers pytorch_optimizer torch_optimizer
    python bench/foreign                                  # all
    python bench/foreign --only optimizer --only Shampoo  # those with all these texts in their names
    python bench/foreign --workers 1,3 --no-pipeline --list
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import signal
import socket
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import torch
from subjects import SUBJECTS, Arguments, prepare

STEPS = 12
SECONDS = 90.0
AFTER_FAILURE = 5.0

Result = dict[str, Any]


def train(build: Callable[[], Arguments], extra: Arguments, done: list[int]) -> Result:
    """Train a subject in this process, one of several workers."""
    import paceline

    torch.manual_seed(0)
    session = paceline.start(**{"exact": True, "batch": 16, "microbatches": 8, **build(), **extra})
    for batch in session.batches(steps=STEPS):
        report = session.step(batch)
        done.append(batch.step)
    return {"fingerprint": session.fingerprint(), "loss": report.loss, "notes": report.notes}


def plain(build: Callable[[], Arguments], _: Arguments, done: list[int]) -> Result:
    """Train a subject without Paceline."""
    torch.manual_seed(0)
    given = build()
    model, data = given["model"], given["data"]
    optimizer = given["optimizer"](model.parameters())
    loss = 0.0
    for step in range(STEPS):
        batch = torch.utils.data.default_collate([data[place] for place in range(16)])
        optimizer.zero_grad()
        value = given["forward"](model, batch) if "forward" in given else given["loss"](model(batch[0]), batch[1])
        value.backward()
        optimizer.step()
        done.append(step)
        loss = value.item()
    return {"fingerprint": "", "loss": loss, "notes": ()}


def child(rank: int, workers: int, port: int, act: Callable[[list[int]], Result], out: int, hold: int) -> NoReturn:
    """Be a worker: report one line of JSON, and stay until the parent lets go."""
    os.setsid()
    silent = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(silent, stream)
    common = {"WORLD_SIZE": workers, "LOCAL_WORLD_SIZE": workers, "MASTER_PORT": port, "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**common, "RANK": rank, "LOCAL_RANK": rank}.items():
        os.environ[name] = str(value)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    done: list[int] = []
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    try:
        result = act(done)
    except BaseException as error:  # noqa: BLE001 - whatever a foreign subject raises is its result
        result = {"error": type(error).__name__, "text": str(error)[:400]}
    os.write(out, json.dumps({**result, "steps": len(done)}).encode() + b"\n")
    os.close(out)
    os.read(hold, 1)
    os._exit(0)


def together(workers: int, act: Callable[[list[int]], Result]) -> Result:
    """Return the result on which forked workers agree, or the first error if one of them fails."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    hold, release = os.pipe()
    pids, streams = [], []
    for rank in range(workers):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(release)
            child(rank, workers, port, act, write, hold)
        os.close(write)
        pids.append(pid)
        streams.append(read)
    try:
        results = collect(streams)
    finally:
        os.close(hold)
        os.close(release)
        for stream in streams:
            os.close(stream)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    failed = [one for one in results if "error" in one]
    if failed:
        lost = ("WorkerLost", "TimeoutError", "killed")  # another one's error is the cause
        return min(failed, key=lambda one: one["error"] in lost)
    prints = {one["fingerprint"] for one in results}
    return results[0] | ({"fingerprint": "ranks differ"} if len(prints) > 1 else {})


def collect(streams: list[int]) -> list[Result]:
    """One result of each worker; a missing one is an error."""
    until = time.monotonic() + SECONDS
    texts = {stream: b"" for stream in streams}
    open_ones = set(streams)
    while open_ones and time.monotonic() < until:
        for stream in select.select(list(open_ones), [], [], max(0.0, until - time.monotonic()))[0]:
            group = os.read(stream, 1 << 16)
            texts[stream] += group
            if not group:
                open_ones.discard(stream)
                if b'"error"' in texts[stream] or not texts[stream]:
                    until = min(until, time.monotonic() + AFTER_FAILURE)
    missing = {"error": "killed", "text": "no result", "steps": 0}
    return [json.loads(text) if text.endswith(b"\n") else missing for text in texts.values()]


def judged(found: dict[str, Result]) -> tuple[str, str]:
    """The verdict over all runs of a subject, and why."""
    prints = {name: one["fingerprint"] for name, one in found.items() if "fingerprint" in one}
    refused = {name: one for name, one in found.items() if "error" in one}
    late = {name for name, one in refused.items() if one["steps"] > 1}
    reasons = [f"{name}: after {one['steps']} steps, {one['error']}: {one['text']}" for name, one in refused.items()]
    if len(set(prints.values())) > 1 or "ranks differ" in prints.values():
        return "DIFFERENT", "; ".join(f"{name}: {value[:12]}" for name, value in prints.items())
    if not refused:
        return "ok", ""
    pipeline_only = all(name.startswith("pipeline") for name in refused)
    verdict = "LATE" if late else "ok, no pipeline" if pipeline_only else "refused"
    return verdict, reasons[0]


def main() -> int:
    parser = argparse.ArgumentParser(description="Models and optimizers of public packages, on any number of workers.")
    parser.add_argument("--only", action="append", default=[], help="a text in the name; all of several")
    parser.add_argument("--workers", default="1,2,3,5")
    parser.add_argument("--no-pipeline", dest="pipeline", action="store_false")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--limit", type=int, default=0)
    options = parser.parse_args()
    prepare()
    names = [name for name in SUBJECTS if all(text.lower() in name.lower() for text in options.only)]
    counts: Counter[str] = Counter()
    for name in names[: options.limit or None]:
        if options.list:
            print(name)
            continue
        build = SUBJECTS[name]
        alone = together(1, partial(plain, build, {}))
        if "error" in alone:
            verdict, reason = "broken", f"{alone['error']}: {alone['text']}"
        else:
            runs: dict[str, tuple[int, Arguments]] = {
                f"{count}": (int(count), {}) for count in options.workers.split(",")
            }
            if options.pipeline and "forward" not in build():
                runs["pipeline of 2"] = 2, {"strategy": "pipeline"}
            found = {run: together(count, partial(train, build, extra)) for run, (count, extra) in runs.items()}
            verdict, reason = judged(found)
        counts[verdict] += 1
        print(f"{name:45} {verdict:15} {reason}", flush=True)
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.most_common()))
    return 1 if counts["DIFFERENT"] or counts["LATE"] else 0


if __name__ == "__main__":
    sys.exit(main())
