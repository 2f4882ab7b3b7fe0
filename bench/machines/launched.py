"""Run one way of training on several machines, which are network namespaces."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

WORKER = Path(__file__).with_name("worker.py")
DEADLINE = 600.0


def run(
    names: Sequence[str], layout: Sequence[int], folder: Path, way: str, megabytes: int, steps: int
) -> list[dict[str, Any]]:
    """Run one way with ``layout`` workers on the machines. Return the report of each worker."""
    folder.mkdir()
    size = sum(layout)
    places = [(name, local, workers) for name, workers in zip(names, layout, strict=True) for local in range(workers)]
    with contextlib.ExitStack() as stack:
        running = []
        for rank, (name, local, workers) in enumerate(places):
            environment = {
                **os.environ,
                **{"RANK": str(rank), "WORLD_SIZE": str(size), "OMP_NUM_THREADS": "1"},
                **{"LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": str(workers)},
                **{"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29412", "GLOO_SOCKET_IFNAME": "eth0"},
            }
            command = ["ip", "netns", "exec", name, sys.executable, str(WORKER), str(folder), way]
            output = stack.enter_context((folder / f"output-{rank}").open("w"))
            process = subprocess.Popen(
                [*command, str(megabytes), str(steps)], env=environment, stdout=output, stderr=subprocess.STDOUT
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            running.append(process)
        end = time.monotonic() + DEADLINE
        while None in (codes := [process.poll() for process in running]) or any(codes):
            failed = next((rank for rank, code in enumerate(codes) if code), None)
            if failed is not None or time.monotonic() > end:
                raise SystemExit(f"{way}: worker {failed}\n{(folder / f'output-{failed or 0}').read_text()[-3000:]}")
            time.sleep(0.1)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]
