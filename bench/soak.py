"""Every strategy, disturbed at random moments on a busy machine, until enough workers have been killed.

Each run is one strategy with ``paceline run --elastic``. Workers are killed (SIGKILL), stopped and continued, and asked
to leave (SIGTERM); others join in their place. All moments follow from the seed. Afterwards:

* the exit code must be 0, and each step applied exactly once (``paceline.observe.ledger``);
* where the strategy promises bits, the fingerprint must be that of one process;
* no undisturbed worker may have been lost (a false eviction);
* nothing may be left: no process, and so no port; no file in /dev/shm or in the folder for temporary files.

    python bench/soak.py                          # 300 kills beside 10 busy processes: hours
    python bench/soak.py --kills 20 --load 2 --seed 7 --cases allreduce hogwild
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from paceline.observe import ledger

SCRIPT = """
import sys, time
from functools import partial
import torch
import paceline

def loss(output, target):
    time.sleep(0.01)
    return torch.nn.functional.cross_entropy(output, target)

torch.manual_seed(0)
inputs = torch.randn(1000, 16)
session = paceline.start(
    model=torch.nn.Sequential(*(
        layer for _ in range(4) for layer in (torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Dropout(0.1))
    )),
    optimizer=partial(torch.optim.AdamW, lr=1e-3),
    loss=loss,
    data=torch.utils.data.TensorDataset(inputs, inputs[:, :4].argmax(1)),
    batch=32,
    microbatches=4,
)
for batch in session.batches(steps=int(sys.argv[1])):
    session.step(batch)
print("fingerprint", session.fingerprint(), flush=True)
"""
TOKEN = "PACELINE_SOAK"
LOST = 5
"""Exit code when a worker was lost and the others could not continue."""
PREEMPTED = 75
"""Exit code when too few workers are left after one was asked to leave. The run is resumed."""
POLL_SECONDS = 0.02
OF_PYTHON_AND_TORCH = ("pymp-", "torchinductor_")
"""Prefixes of folders that stay: for a socket, of each killed loader process, and of a cache."""
END_SECONDS = 10.0
"""Timeout for processes of a run to end after it."""


@dataclass(frozen=True)
class Case:
    """Strategy under test: its settings, its workers, the fewest with which it continues, and its promises.

    Attributes:
        exact: whether it promises bits.
        single: whether a part of the model has one holder, so that a loss before the first checkpoint ends the run.
    """

    settings: tuple[str, ...]
    workers: int = 3
    least: int = 1
    exact: bool = False
    single: bool = False


CASES = {
    "allreduce": Case(("strategy=allreduce",), exact=True),
    "loaders": Case(("strategy=allreduce", "workers_per_loader=1"), exact=True),
    "stealing": Case(("strategy=stealing",), exact=True),
    "pipeline": Case(("strategy=pipeline", "pipeline.stages=2"), workers=4, least=2, exact=True),
    "sync server": Case(("strategy=parameter-server", "server.mode=sync"), exact=True),
    "backup": Case(("strategy=backup", "backup.workers=1"), least=2),
    "local-sgd": Case(("strategy=local-sgd", "local.every=3")),
    "async server": Case(("strategy=parameter-server", "server.mode=async")),
    "dedicated server": Case(("strategy=parameter-server", "server.mode=async", "server.dedicated=true"), least=2),
    "hogwild": Case(("strategy=hogwild",)),
    "pipedream": Case(("strategy=pipeline", "pipeline.schedule=pipedream"), workers=2, least=2, single=True),
}


@dataclass
class Outcome:
    """What was done to one run, and what is wrong with it."""

    touched: dict[int, str] = field(default_factory=dict)
    done: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--load", type=int, default=10, help="busy processes beside the runs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=300, help="of each run")
    parser.add_argument("--every", type=float, default=2.0, help="seconds between two disturbances, on average")
    parser.add_argument("--deadline", type=float, default=600.0, help="seconds for each run")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--folder", type=Path, help="keep the runs that went wrong in this folder")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # nothing is left of an interrupted soak either
    total: Counter[str] = Counter()
    wrong = number = 0
    with tempfile.TemporaryDirectory(prefix="paceline-soak-") as name, busy(options.load):
        home = options.folder or Path(name)
        home.mkdir(parents=True, exist_ok=True)
        (home / "script.py").write_text(SCRIPT)
        wanted = alone(home, options.steps)
        while total["kill"] < options.kills:
            case = options.cases[number % len(options.cases)]
            outcome = soak(case, number, home, wanted, options)
            total += outcome.done
            wrong += bool(outcome.wrong)
            number += 1
            what = ", ".join(f"{count} {kind}" for kind, count in sorted(outcome.done.items()))
            print(f"{number:4} {case:16} {what or 'undisturbed':44} {'; '.join(outcome.wrong) or 'well'}", flush=True)
    print(f"{number} runs, {dict(total)}: {wrong} went wrong")
    sys.exit(wrong > 0)


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """So many processes that compute without end."""
    loads = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for load in loads:
            load.kill()
            load.wait()


def alone(home: Path, steps: int) -> set[str]:
    """The fingerprint of one process."""
    words = [sys.executable, str(home / "script.py"), str(steps)]
    environment = os.environ | {"PACELINE_EXACT": "true"}
    ran = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    if ran.returncode:
        sys.exit(ran.stderr)
    return fingerprints(ran.stdout)


def fingerprints(text: str) -> set[str]:
    return set(re.findall(r"^fingerprint (\w+)$", text, re.MULTILINE))


def soak(name: str, number: int, home: Path, wanted: set[str], options: argparse.Namespace) -> Outcome:
    """Run once, disturb it, and look whether all is well."""
    case, folder = CASES[name], home / f"run-{number}"
    temporary = home / f"temporary-{number}"
    temporary.mkdir()
    words = [sys.executable, "-m", "paceline.cli.main", "run", "-n", str(case.workers), "--quiet"]
    words += ["--elastic", f"{case.least}:{case.workers}", "--standby", "1"]
    words += ["--runs-dir", str(home), "--name", folder.name, "--set", "checkpoint.every=50"]
    for setting in (*case.settings, *(["exact=true"] if case.exact else [])):
        words += ["--set", setting]
    words += [str(home / "script.py"), str(options.steps)]
    before, outcome = set(os.listdir("/dev/shm")), Outcome()
    token = f"{os.getpid()}-{number}"
    environment = os.environ | {TOKEN: token, "TMPDIR": str(temporary)}
    output, chance = home / f"output-{number}.txt", random.Random(f"{options.seed} {number}")
    ready = saved if case.single else trains
    code, said = launched(
        words, environment, output, lambda one: disturb(one, token, folder, ready, chance, options, outcome)
    )
    if code == PREEMPTED and outcome.done["leave"]:
        outcome.done["resumed"] += 1
        resume = [*words[:-2], "--resume", "auto", *words[-2:]]
        code, said = launched(resume, environment, output, lambda one: one.wait(options.deadline))
    check(case, code, said, folder, wanted, options.steps, outcome)
    left(token, before, temporary, outcome)
    return outcome


def launched(
    words: list[str], environment: dict[str, str], path: Path, act: Callable[[subprocess.Popen[bytes]], object]
) -> tuple[int, str]:
    """Start a run, do something to it, and return its exit code and what it said."""
    with path.open("w+") as output:
        launcher = subprocess.Popen(
            words, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            act(launcher)
        finally:
            launcher.kill()
            code = launcher.wait()
        output.seek(0)
        return code, output.read()


def disturb(
    launcher: subprocess.Popen[bytes],
    token: str,
    folder: Path,
    ready: Callable[[Path], bool],
    chance: random.Random,
    options: argparse.Namespace,
    outcome: Outcome,
) -> None:
    """Disturb the workers from when the run is ready, until it ends."""
    until, stopped = time.monotonic() + options.deadline, dict[int, float]()
    due = None
    while launcher.poll() is None:
        time.sleep(POLL_SECONDS)
        now = time.monotonic()
        for pid in [pid for pid, end in stopped.items() if end < now]:
            del stopped[pid]
            send(pid, signal.SIGCONT)
        if now > until:
            outcome.wrong.append(f"not over after {options.deadline:.0f} s")
            return
        if due is None:
            due = now + chance.expovariate(1 / options.every) if ready(folder) else None
            continue
        if now < due:
            continue
        due = now + chance.expovariate(1 / options.every)
        kind = chance.choices(["kill", "stop", "leave"], [6, 3, 1])[0]
        place, seconds = chance.random(), chance.uniform(0.05, 3.0)
        workers = workers_of(token)
        members = members_of(folder)
        pid = sorted(workers)[int(place * len(workers))] if workers else 0
        if not pid or (kind != "stop" and workers[pid] in members and len(members & {*workers.values()}) < 2):
            continue  # without any worker, the state is lost
        outcome.done[kind] += 1
        outcome.touched[workers[pid]] = kind
        if kind == "stop":
            stopped[pid] = now + seconds
        send(pid, {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "leave": signal.SIGTERM}[kind])


def send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has since ended by itself
        os.kill(pid, number)


def processes(token: str) -> dict[int, dict[str, str]]:
    """The environment of each process that was started by a run and has not ended."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            text = path.read_bytes().decode(errors="replace")
            state = (path.parent / "stat").read_text().rpartition(") ")[2][0]
        except OSError:
            continue
        if f"{TOKEN}={token}\0" in text and state not in "ZX":
            found[int(path.parent.name)] = dict(one.split("=", 1) for one in text.split("\0") if "=" in one)
    return found


def workers_of(token: str) -> dict[int, int]:
    """The numbers of the workers by their process; each leads a session, its loaders do not."""
    own = {pid: int(names["PACELINE_WORKER"]) for pid, names in processes(token).items() if "PACELINE_WORKER" in names}
    return {pid: number for pid, number in own.items() if is_leader(pid)}


def is_leader(pid: int) -> bool:
    try:
        return os.getsid(pid) == pid
    except ProcessLookupError:
        return False


def records(folder: Path) -> list[dict[str, object]]:
    """What the launcher has recorded."""
    try:
        lines = (folder / "events" / "launcher.jsonl").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        with contextlib.suppress(ValueError):  # it is being written
            found.append(json.loads(line))
    return found


def members_of(folder: Path) -> set[int]:
    numbers: set[int] = set()
    for record in records(folder):
        if record["event"] == "membership":
            numbers = set(record["workers"])  # type: ignore[call-overload]
    return numbers


def trains(folder: Path) -> bool:
    """Whether a first step was done."""
    return any('"event": "step"' in path.read_text() for path in (folder / "events").glob("rank-*.jsonl"))


def saved(folder: Path) -> bool:
    """Whether there is a checkpoint."""
    return any((folder / "checkpoints").glob("step-*"))


def check(case: Case, code: int, said: str, folder: Path, wanted: set[str], steps: int, outcome: Outcome) -> None:
    """Look at how the run ended."""
    problems = ledger.check(ledger.read(folder / "events"), steps)
    lost = [record for record in records(folder) if record["event"] == "lost"]
    if code == LOST and lost and lost[-1]["rank_lost"] == 0 and not problems:
        outcome.done["of rank 0 after the last step"] += 1  # its script may have had results to write
        return
    if code:
        outcome.wrong.append(f"exit code {code}: {said[-600:].strip()!r}")
        return
    outcome.wrong += problems[:3]
    texts = [path.read_text(errors="replace") for path in (folder / "output").glob("*.log")]
    got = set().union(*map(fingerprints, texts))
    if (case.exact and got != wanted) or len(got) != 1:
        outcome.wrong.append(f"fingerprints {sorted(got)}, wanted {sorted(wanted)}")
    for record in lost:
        number = int(str(record["worker"]))
        if number not in outcome.touched:
            outcome.wrong.append(f"false eviction: {record['reason']}")
        elif outcome.touched[number] == "stop":
            outcome.done["dropped after a stop"] += 1


def left(token: str, before: set[str], temporary: Path, outcome: Outcome) -> None:
    """Look for what the run has left behind."""
    until = time.monotonic() + END_SECONDS
    while (there := processes(token)) and time.monotonic() < until:
        time.sleep(POLL_SECONDS)
    if there:
        outcome.wrong.append(f"processes are left: {sorted(there)}")
    for pid in there:
        send(pid, signal.SIGKILL)
    blocks = [name for name in set(os.listdir("/dev/shm")) - before if not belongs_to_another(name)]
    if blocks:
        outcome.wrong.append(f"left in /dev/shm: {sorted(blocks)}")
    files = sorted(path.name for path in temporary.iterdir())
    if files := [name for name in files if not name.startswith(OF_PYTHON_AND_TORCH)]:
        outcome.wrong.append(f"left among temporary files: {files}")


def belongs_to_another(name: str) -> bool:
    """Whether a file of torch's is that of a process that still runs."""
    return any(Path(f"/proc/{number}").exists() for number in re.findall(r"\d+", name))


if __name__ == "__main__":
    main()
