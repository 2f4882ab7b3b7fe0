"""Many workers as processes of this machine, in several namespaces: start, steps, one killed, the end.

The model is tiny and each microbatch only waits, so that the protocol is what is measured. Needs root, and about 60 MB
for each worker: they are forked from a process that has imported torch.

    python bench/scale                  # 4 machines of 16 workers
    python bench/scale --layout 2x4
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "machines"))

from namespaces import network, obstacle  # noqa: E402

DEADLINE = 900.0
PORT = 29517


def started(namespace: str, words: list[str], output: Path) -> subprocess.Popen[bytes]:
    """A Python with these words in a namespace."""
    command = ["ip", "netns", "exec", namespace, sys.executable, *words]
    with output.open("w") as file:
        return subprocess.Popen(
            command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=file, stderr=subprocess.STDOUT
        )


def run(machines: int, workers: int, folder: Path, start: Callable[[str, list[str], Path], Any] = started) -> float:
    """Run it; returns the seconds. ``start`` starts an agent."""
    size = machines * workers
    secret = folder / "secret"
    secret.write_text("5c" * 32)
    secret.chmod(0o600)
    begin = time.monotonic()
    with network(machines, None) as names, contextlib.ExitStack() as stack:
        running = []
        for place, name in enumerate(names):
            options = ["-n", str(workers), "--nodes", str(machines), "--rendezvous", f"10.77.0.1:{PORT}"]
            options += [
                "--elastic",
                f"{size - 1}:{size}",  # who is a moment late is waited for
                "--runs-dir",
                str(folder / "runs"),
                "--secret-file",
                str(secret),
            ]
            script = [str(HERE / "worker.py"), str(folder), str(size)]
            words = [str(HERE / "agent.py"), str(folder / f"agent-{place}.json"), "run", *options, *script]
            process = start(name, words, folder / f"output-{place}")
            stack.callback(process.wait)
            stack.callback(process.send_signal, signal.SIGTERM)
            running.append(process)
        ended: list[int | None] = [None]
        while None in ended and not any(ended):
            if time.monotonic() > begin + DEADLINE:
                raise SystemExit(f"not done within {DEADLINE:.0f} s\n{(folder / 'output-0').read_text()[-3000:]}")
            time.sleep(0.1)
            ended = [process.poll() for process in running]
        if any(ended):
            place = next(place for place, code in enumerate(ended) if code)
            raise SystemExit(f"machine {place}\n{(folder / f'output-{place}').read_text()[-3000:]}")
    return time.monotonic() - begin


def events(folder: Path) -> list[dict[str, Any]]:
    """The records of rank 0 and of the launcher."""
    found = []
    for path in sorted(folder.glob("runs/*/events/*.jsonl")):
        if path.stem in ("rank-0", "launcher"):
            found += [json.loads(line) for line in path.read_text().splitlines()]
    return found


def tell(folder: Path, seconds: float) -> None:
    """Print what was measured."""
    workers = [json.loads(path.read_text()) for path in sorted(folder.glob("worker-*.json"))]
    prints = {one["fingerprint"] for one in workers}
    print(f"{len(workers)} workers ended with {len(prints)} fingerprint, {seconds:.1f} s in all")
    for one in events(folder):
        if one["event"] in ("gathered", "recovered"):
            parts = ", ".join(f"{part} {one[part]:.2f} s" for part in ("agreeing", "connecting", "catching_up"))
            news = f"{len(one['joined'])} joined, {len(one['lost'])} lost"
            print(f"{one['event']} at step {one['step']}: {len(one['workers'])} workers, {news}: {parts}")
    for kind in ("descriptors", "sockets", "arenas", "processes", "threads", "python_threads", "private_kb"):
        values = sorted(one[kind] for one in workers)
        print(f"{kind} of a worker: {values[0]:,} to {values[-1]:,}")
    steps = sorted(second for one in workers for second in one["steps"][1:])
    print(f"seconds of a step: median {steps[len(steps) // 2]:.3f}, most {steps[-1]:.2f}")
    print(f"coordinator: {(folder / 'agent-0.json').read_text()}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", default="4x16", help="machines x workers of each")
    options = parser.parse_args()
    if missing := obstacle():
        raise SystemExit(f"left out, as {missing}")
    count, each = map(int, options.layout.split("x"))
    with tempfile.TemporaryDirectory() as name:
        tell(Path(name), run(count, each, Path(name)))
