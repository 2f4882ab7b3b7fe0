"""SHA-256 of what runs of every strategy and schedule train, compared with a list that is kept beside this file.

A change of the code that is to keep all numbers keeps all fingerprints. The bits depend on torch and on the
processor: its instructions, and the kernels that libraries choose for it (``paceline.step.numerics``). So the list says
with which ones it was made.

    python bench/fingerprints                     # train all, compare with fingerprints.json; exit code 1: differences
    python bench/fingerprints --only pipeline     # those with this text in their names; several are possible
    python bench/fingerprints --write             # keep what was found as the list

The runs use the paceline that Python finds: ``PYTHONPATH=/another/tree`` trains with that one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cases import CASES, EXAMPLES, Case

HERE = Path(__file__).resolve().parent
KEPT = HERE / "fingerprints.json"
SECONDS = 600.0
MADE_WITH = ("torch", "capability", "canary")
DEFAULTS = {**dict.fromkeys(MADE_WITH, "?"), "package": "?"}


@dataclass(frozen=True)
class Found:
    """What was trained: with which versions, to which values, and what failed."""

    versions: dict[str, str]
    values: dict[str, str]
    failures: list[str]


def environment() -> dict[str, str]:
    """One without settings of Paceline or the variables of a launcher."""
    foreign = ("PACELINE_", "OMP_", "TORCHELASTIC_", "SLURM_")
    return {name: value for name, value in os.environ.items() if not name.startswith(foreign)}


def launched(workers: int, folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """A script under ``paceline run``."""
    run = [sys.executable, "-m", "paceline.cli.main", "run", "-n", str(workers), "--quiet", "--runs-dir", str(folder)]
    return subprocess.run([*run, *command], env=environment(), capture_output=True, text=True, timeout=SECONDS)


def by_hand(workers: int, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a script on processes that believe to be on separate machines, by torchrun's variables."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": workers, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": port}
    common |= {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": 1}
    variables = environment() | {name: str(value) for name, value in common.items()}
    processes = [
        subprocess.Popen(
            [sys.executable, *command],
            env=variables | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(workers)
    ]
    try:
        outputs = [process.communicate(timeout=SECONDS)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    code = max((process.returncode for process in processes), key=abs)
    return subprocess.CompletedProcess(command, code, outputs[0], "".join(outputs[1:]))


def trained(cases: list[Case], part: str, workers: int, folder: Path) -> Found:
    """The values of some cases that are trained in the same processes."""
    orders = folder / "orders.json"
    orders.write_text(json.dumps({"names": [case.name for case in cases], "part": part, "folder": str(folder)}))
    command = str(HERE / "worker.py"), str(orders)
    ended = by_hand(workers, *command) if cases[0].network else launched(workers, folder, *command)
    versions: dict[str, str] = {}
    values = {}
    for line in re.findall(r"\{.*\}", ended.stdout):
        with contextlib.suppress(json.JSONDecodeError):
            said = json.loads(line)
            versions |= said.get("versions", {})
            if "name" in said:
                values[said["name"]] = said["fingerprint"]
                if "losses" in said:
                    values[said["name"] + "; losses"] = said["losses"]
    missing = [case.name for case in cases if case.name not in values]
    failures = []
    if ended.returncode or missing:
        failures.append(f"{missing or 'all trained'}: exit code {ended.returncode}\n{ended.stdout}{ended.stderr}")
    return Found(versions, {} if part == "first" else values, failures)


def example(name: str, workers: int, folder: Path) -> Found:
    """The value of an example."""
    text = folder / "text.txt"
    text.write_text("".join(chr(97 + (place * place + place // 7) % 26) for place in range(20_000)), encoding="utf-8")
    more = [str(text), "--epochs", "1"] if name == "gpt" else ["--epochs", "1"]
    script = str(HERE.parents[1] / "examples" / f"{name}.py")
    ended = launched(workers, folder, "--set", "exact=true", "--set", "threads=1", script, *more)
    title = f"examples/{name}.py, {workers} workers"
    match = re.search(r"fingerprint ([0-9a-f]{64})", ended.stdout)
    if ended.returncode or match is None:
        return Found({}, {}, [f"{title}: exit code {ended.returncode}\n{ended.stdout}{ended.stderr}"])
    return Found({}, {title: match[1]}, [])


def all_trained(words: list[str]) -> Iterator[Found]:
    """Train all that have one of the words in their names; those alike in workers share processes."""
    cases = [case for case in CASES if not words or any(word in case.name for word in words)]
    groups: dict[tuple[int, bool, int], list[Case]] = {}
    for case in cases:
        groups.setdefault((case.workers, case.network, case.resumed), []).append(case)
    for (workers, _, resumed), group in groups.items():
        with tempfile.TemporaryDirectory() as folder:
            if resumed:
                yield trained(group, "first", workers, Path(folder))
                yield trained(group, "second", resumed, Path(folder))
            else:
                yield trained(group, "whole", workers, Path(folder))
    for name, workers in EXAMPLES:
        if not words or any(word in f"examples/{name}.py" for word in words):
            with tempfile.TemporaryDirectory() as folder:
                yield example(name, workers, Path(folder))


def compared(found: Found, kept: dict[str, str], complete: bool) -> list[str]:
    """What differs from the list, in words."""
    wrong = list(found.failures)
    wrong += [f"{name}: {value}, not {kept[name]}" for name, value in found.values.items() if kept.get(name) != value]
    if complete:
        wrong += [f"{name}: not trained" for name in kept if name not in found.values]
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="TEXT")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--to", type=Path, default=KEPT, help="the list")
    options = parser.parse_args()
    versions: dict[str, str] = dict(DEFAULTS)
    values: dict[str, str] = {}
    failures: list[str] = []
    for found in all_trained(options.only):
        versions |= found.versions
        values |= found.values
        failures += found.failures
        for name, value in found.values.items():
            print(f"{value}  {name}", flush=True)
        for failure in found.failures:
            print(f"FAILED {failure}", flush=True)
    print(f"{len(values)} values of {versions['package']}")
    if options.write:
        kept = {key: versions[key] for key in MADE_WITH} | {"values": values}
        options.to.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
        return bool(failures)
    kept = json.loads(options.to.read_text(encoding="utf-8"))
    for key in MADE_WITH:
        if kept[key] != versions[key]:
            print(f"The list was made with {key} {kept[key]}, here it is {versions[key]}: the bits may differ.")
    known = Found(versions, {name: value for name, value in values.items() if name in kept["values"]}, failures)
    wrong = compared(known, kept["values"], complete=not options.only)
    print("\n".join(wrong) if wrong else f"all {len(known.values)} are those of the list")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
