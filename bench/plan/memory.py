"""Predicted and measured memory of a worker's process, for strategies and models of 1 to 100 million parameters.

``paceline.plan`` measures a script that trains with 1 and 2 workers on this machine. Then each candidate runs. A thread
of each worker reads its proportional set size (anonymous and shared memory, as a control group counts it) all the time.
The table has the most of any worker, and the error of what it grew by since ``import paceline, torch``.

    python bench/plan/memory.py
    python bench/plan/memory.py --models mlp-8M --workers 2
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # before torch is imported
import torch

import paceline

MODELS: dict[str, dict[str, Any]] = {
    "mlp-1M": {"width": 512, "blocks": 4, "batch": 64},
    "mlp-8M": {"width": 1024, "blocks": 8, "batch": 64},
    "gpt-25M": {"width": 512, "blocks": 8, "batch": 16, "length": 32},
    "gpt-101M": {"width": 1024, "blocks": 8, "batch": 8, "length": 16},
}
STEPS = 20
_SAMPLE_SECONDS = 0.004


def held() -> int:
    """Return the bytes of this process that no file backs."""
    found = re.findall(r"^Pss_(?:Anon|Shmem): +(\d+)", Path("/proc/self/smaps_rollup").read_text(), re.MULTILINE)
    return sum(map(int, found)) << 10


def work(given: dict[str, Any], before: int) -> None:
    """Train, and write the most bytes of this process, and those after the imports, to a file of its own."""
    peak, ended = [before], threading.Event()

    def watch() -> None:
        while not ended.wait(_SAMPLE_SECONDS):
            peak.append(max(peak.pop(), held()))

    watcher = threading.Thread(target=watch)
    watcher.start()
    torch.manual_seed(0)
    model, data, loss = task(given)
    try:
        session = paceline.start(
            model=model,
            optimizer=partial(torch.optim.AdamW, lr=1e-4),
            loss=loss,
            data=data,
            batch=given["batch"],
            threads=1,
        )
        for batch in session.batches(steps=STEPS):
            session.step(batch)
    finally:
        ended.set()
        watcher.join()
    if "folder" in given:
        Path(given["folder"], f"{session.rank}.json").write_text(json.dumps([peak[0], before]))
        until = time.monotonic() + 60.0
        while time.monotonic() < until and len([*Path(given["folder"]).glob("*.json")]) < session.workers:
            time.sleep(0.01)  # pages shared with a worker that ends would count more for the others


def task(given: dict[str, Any]) -> tuple[torch.nn.Module, torch.utils.data.Dataset[Any], Any]:
    """Return a model, its data and its loss."""
    width, blocks = given["width"], given["blocks"]
    if "length" in given:
        sys.path.append(str(Path(__file__).resolve().parent.parent))
        from models import CHARACTERS, GPT

        tokens = torch.randint(0, CHARACTERS, (512, given["length"]))
        data = torch.utils.data.TensorDataset(tokens, tokens)
        return GPT(width, blocks), data, of_characters
    data = torch.utils.data.TensorDataset(torch.randn(512, width), torch.randint(10, (512,)))
    layers = [part for _ in range(blocks) for part in (torch.nn.Linear(width, width), torch.nn.ReLU())]
    return torch.nn.Sequential(*layers, torch.nn.Linear(width, 10)), data, torch.nn.functional.cross_entropy


def of_characters(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(output.flatten(0, -2), target.flatten())


def main() -> None:
    """Print a line for each configuration, then the errors."""
    from paceline.cli.report import run_quietly
    from paceline.launchers.base import Request
    from paceline.planning.search import candidates, named
    from paceline.planning.trials import layout_of, measure, settings_text

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--workers", default="2,4")
    options = parser.parse_args()
    errors, grown = [], []
    for name in options.models.split(","):
        given, cores = MODELS[name], os.cpu_count() or 1
        found = measure(Request(Path(__file__), (json.dumps(given),)), [1, 2], cores, run_quietly)
        for workers in map(int, options.workers.split(",")):
            layout = layout_of(cores, workers, (), 0.0, None)
            for one in candidates(found, layout, [workers], exact=False, convergent=True):
                with tempfile.TemporaryDirectory() as folder:
                    request = Request(Path(__file__), (json.dumps({**given, "folder": folder}),), workers)
                    run_quietly(replace(request, settings=settings_text(one), runs=Path(folder, "runs"), name="run"))
                    measured = [json.loads(path.read_text()) for path in Path(folder).glob("*.json")]
                peak, before = max(measured)
                errors.append(one.memory_bytes / peak - 1)
                grown.append((one.memory_bytes - before) / (peak - before) - 1)
                sizes = f"predicted {one.memory_bytes / 1e6:7.1f} MB  measured {peak / 1e6:7.1f} MB"
                ends = f"{errors[-1]:+.1%}  growth of {(peak - before) / 1e6:.1f} MB {grown[-1]:+.1%}"
                print(f"{name:9} {named(one):52} {sizes}  {ends}", flush=True)
    for what, every in (("memory", errors), ("growth", grown)):
        size = sorted(map(abs, every))
        worst = size[len(size) * 9 // 10]
        print(
            f"{what}: {len(size)} configurations, mean error {statistics.mean(size):.1%}, 90th percentile {worst:.1%}"
        )


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1].startswith("{"):
        work(json.loads(sys.argv[1]), held())
    else:
        main()
