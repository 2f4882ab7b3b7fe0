"""Effect of random kills and stops on a run: lost time and, if something is wrong, a different result.

The same script trains twice with ``paceline run``: undisturbed, and with workers killed (SIGKILL) and stopped (SIGSTOP,
SIGCONT) at random moments. Then the ledger must show that each step, and so each sample of each epoch, was applied
exactly once, and the final fingerprint must be that of the undisturbed run. Prints the cost of each fault.

Where ``paceline run`` can replace workers (``--elastic``), the run continues by itself. With ``--restart`` the whole
run is started again from its newest checkpoint after each loss.

    python bench/chaos.py
    python bench/chaos.py --seconds 600 --workers 4 --state-mb 500 --seed 7
    python bench/chaos.py --restart
    python bench/chaos.py --strategy sharded --workers 4 --state-mb 300 --every 0 --kinds kill --faults 20
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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import durations

from paceline.data.order import Order
from paceline.observe import ledger

SCRIPT = """
import os, sys
from functools import partial
import torch
import paceline

steps, megabytes = int(sys.argv[1]), float(sys.argv[2])
open(os.path.join(os.path.dirname(__file__), f"process-{os.getpid()}"), "w").write(os.environ["PACELINE_WORKER"])
width = max(8, int((megabytes * 1e6 / 12 / 2) ** 0.5))  # AdamW: 12 bytes for each of about 2 * width ** 2 parameters
torch.manual_seed(0)
inputs = torch.randn(LENGTH, 32)
session = paceline.start(
    model=torch.nn.Sequential(
        torch.nn.Linear(32, width), torch.nn.Tanh(), torch.nn.Linear(width, width), torch.nn.Tanh(),
        torch.nn.Linear(width, width), torch.nn.Tanh(), torch.nn.Linear(width, 4),
    ),
    optimizer=partial(torch.optim.AdamW, lr=1e-3),
    loss=torch.nn.functional.cross_entropy,
    data=torch.utils.data.TensorDataset(inputs, inputs[:, :4].argmax(1)),
    batch=BATCH,
    microbatches=int(sys.argv[3]),
    exact=True,
)
for batch in session.batches(steps=steps):
    session.step(batch)
print("fingerprint", session.fingerprint(), flush=True)
"""
LENGTH, BATCH = 1000, 64
CALIBRATION_STEPS = 30
MOST_RESTARTS = 1000
POLL_SECONDS, LOOK_SECONDS = 0.02, 0.1
LEAST_STEPS = 20
PATIENCE_SECONDS = 600.0
"""Seconds after its planned duration at which an attempt is given up."""


@dataclass(frozen=True)
class Fault:
    """Fault of a worker."""

    time: float
    kind: str
    trained: bool
    seconds: float = 0.0


@dataclass(frozen=True)
class Ran:
    """Whole run: its folder, last exit code, number of starts, and faults."""

    folder: Path
    code: int
    attempts: int
    faults: tuple[Fault, ...]
    output: str

    def fingerprints(self) -> set[str]:
        """Return the fingerprints that the workers printed at the end."""
        texts = [path.read_text(errors="replace") for path in (self.folder / "output").glob("*.log")]
        return {found for text in texts for found in re.findall(r"^fingerprint (\w+)$", text, re.MULTILINE)}


@dataclass(frozen=True)
class Worker:
    """Process that runs the script. ``trains`` is False for a standby, which waits for a place among the workers."""

    pid: int
    trains: bool


class Chaos:
    """Disturber of the workers of a run. It leaves one training worker alone, because without any the state is lost.

    With restarts it may kill any worker.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._random = random.Random(options.seed)
        self._mean = options.fault_seconds
        self._kinds = options.kinds.split(",")
        self._longest_stop = options.longest_stop
        self._left_alone = 0 if options.restart else 1
        self._left, self._whole = (options.faults, options.workers) if options.faults else (sys.maxsize, 0)
        self._next = float("inf")
        self._due: float | None = None
        self._stopped: list[tuple[float, int]] = []
        self.faults: list[Fault] = []

    def begin(self) -> None:
        """Training has begun."""
        self._next = time.time() + self._random.expovariate(1 / self._mean)

    def act(self, look: Callable[[], list[Worker]]) -> None:
        """Do what is due."""
        now = time.time()
        for until, pid in [one for one in self._stopped if one[0] <= now]:
            self._stopped.remove((until, pid))
            send(pid, signal.SIGCONT)
        if now < self._next:
            return
        workers = [one for one in look() if one.trains or not self._whole]
        if self._whole and not self._is_due(len(workers), now):
            self._next = now + LOOK_SECONDS
        if not workers or now < self._next:
            return
        self._next = now + self._random.expovariate(1 / self._mean)
        one, kind = self._random.choice(workers), self._random.choice(self._kinds)
        if kind == "kill":
            if one.trains and sum(worker.trains for worker in workers) <= self._left_alone:
                return
            self.faults.append(Fault(time.time(), kind, one.trains))
            send(one.pid, signal.SIGKILL)
            return
        seconds = self._random.uniform(0.1, self._longest_stop)
        self.faults.append(Fault(time.time(), kind, one.trains, seconds))
        self._stopped.append((now + seconds, one.pid))
        send(one.pid, signal.SIGSTOP)

    def _is_due(self, training: int, now: float) -> bool:
        """Whether all places have been taken for a random time since the last fault."""
        if training < self._whole:
            self._due = None
        elif self._due is None:
            self._due = now + self._mean / 2 + self._random.expovariate(2 / self._mean)
        due = self._left > 0 and self._due is not None and now >= self._due
        if due:
            self._left, self._due = self._left - 1, None
        return due

    def end(self) -> None:
        """Let go of all that is stopped."""
        for _, pid in self._stopped:
            send(pid, signal.SIGCONT)
        self._stopped = []
        self._next = float("inf")


def send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has since ended by itself
        os.kill(pid, number)


def children(pid: int) -> Iterator[int]:
    """All processes below this one."""
    for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found = [int(child) for child in tasks.read_text().split()]
        except OSError:  # the thread has ended
            continue
        for child in found:
            yield child
            yield from children(child)


def workers_of(launcher: int, script: Path, events: Path) -> list[Worker]:
    """The processes below the launcher that run the script and have not ended, and the one that forks them."""
    view, found = newest_view(events), []
    for pid in sorted(children(launcher)):
        try:
            line = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if os.fsencode(script) in line:
            said = script.with_name(f"process-{pid}")
            number = int(said.read_text() or -1) if said.exists() else -1
            found.append(Worker(pid, number in view))
    return found


def newest_view(events: Path) -> list[int]:
    """The numbers of the workers that train, as the launcher says."""
    try:
        records = [json.loads(line) for line in (events / "launcher.jsonl").read_text().splitlines()]
    except (OSError, ValueError):
        return []
    return next((record["workers"] for record in reversed(records) if record["event"] == "membership"), [])


def trained(events: Path, since: float) -> bool:
    """Whether a step was done since then."""
    for path in events.glob("rank-*.jsonl"):
        for line in reversed(path.read_text(errors="replace").splitlines()[-20:]):
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if record["event"] == "step" and record["time"] > since:
                return True
    return False


def command(options: argparse.Namespace, folder: Path, name: str, steps: int, elastic: bool) -> list[str]:
    words = [sys.executable, "-m", "paceline.cli.main", "run", "-n", str(options.workers), "--quiet"]
    words += ["--set", f"strategy={options.strategy}"]
    words += ["--runs-dir", str(folder), "--name", name]
    if options.every:
        words += ["--set", f"checkpoint.every={options.every}"]
    if elastic:
        words += ["--elastic", f"{options.least}:{options.workers}", "--standby", str(options.standby)]
    return [*words, str(folder / "script.py"), str(steps), str(options.state_mb), str(options.microbatches)]


def run(options: argparse.Namespace, folder: Path, name: str, steps: int, chaos: Chaos | None) -> Ran:
    """Train to the end, started again as often as it takes."""
    words = command(options, folder, name, steps, chaos is not None and not options.restart)
    home = folder / name
    attempts, output, code = 0, "", 1
    while code != 0 and attempts < (MOST_RESTARTS if chaos is not None and options.restart else 1):
        place = words.index("--name")
        resumed = [*words[:place], "--resume", "auto", *words[place:]] if attempts else words
        attempts += 1
        code, said = attempt(resumed, home, folder / "script.py", chaos, options.seconds + PATIENCE_SECONDS)
        output += said
    return Ran(home, code, attempts, tuple(chaos.faults) if chaos else (), output)


def attempt(words: list[str], home: Path, script: Path, chaos: Chaos | None, patience: float) -> tuple[int, str]:
    """Start once, and disturb from the first step on; the exit code and what was printed."""
    began, begun = time.time(), False
    with tempfile.TemporaryFile("w+") as output:
        launcher = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
        try:
            while launcher.poll() is None:
                if time.time() > began + patience:
                    launcher.terminate()
                if chaos is not None and not begun and trained(home / "events", began):
                    begun = True
                    chaos.begin()
                if chaos is not None and begun:
                    chaos.act(lambda: workers_of(launcher.pid, script, home / "events"))
                time.sleep(POLL_SECONDS)
        finally:
            if chaos is not None:
                chaos.end()
            launcher.terminate()
            code = launcher.wait()
        output.seek(0)
        return code, output.read()


# What came out.


def marked(events: Path, event: str) -> list[dict[str, Any]]:
    """The workers' records of an event."""
    lines = [line for path in events.glob("rank-*.jsonl") for line in path.read_text(errors="replace").splitlines()]
    return [json.loads(line) for line in lines if f'"event": "{event}"' in line and line.endswith("}")]


def describe(given: Sequence[float | None]) -> str:
    values = [one for one in given if one is not None]
    if not values:
        return "none"
    parts = [f"{name} {durations.percentile(values, part):.2f}" for name, part in (("p50", 0.5), ("p99", 0.99))]
    return "   ".join([*parts, f"largest {max(values):.2f}", f"of {len(values)}"])


def judge(disturbed: Ran, undisturbed: Ran, steps: int, order: Order) -> bool:
    """Print what came out; whether all is as it must be."""
    records = ledger.read(disturbed.folder / "events")
    problems = ledger.check(records, steps, order.samples_of)
    print(f"end          exit code {disturbed.code} after {disturbed.attempts} starts")
    print(f"ledger       {f'{len(problems)} problems' if problems else f'each of {steps} steps exactly once'}")
    for problem in problems[:20]:
        print(f"             {problem}")
    wanted, got = undisturbed.fingerprints(), disturbed.fingerprints()
    same = len(wanted) == 1 and got == wanted
    print(f"fingerprint  {'that of the undisturbed run' if same else f'{sorted(got)} instead of {sorted(wanted)}'}")
    costs(records, disturbed, undisturbed)
    well = disturbed.code == 0 and not problems and same
    if not well:
        print(disturbed.output[-4000:])
    return well


def costs(records: ledger.Records, disturbed: Ran, undisturbed: Ran) -> None:
    """Print what the faults cost, in seconds beyond the median step of the same run: another run has other noise."""
    plain, times = ledger.completions(ledger.read(undisturbed.folder / "events")), ledger.completions(records)
    alone, usual = durations.step_seconds(plain), durations.step_seconds(times)
    if not times:
        return
    training = [one for one in disturbed.faults if one.trained]
    kills, stops = ([one for one in training if one.kind == kind] for kind in ("kill", "stop"))
    stalls = [durations.stall(times, one.time, usual) for one in kills]
    beyond = [max(0.0, durations.stall(times, one.time, usual) - one.seconds) for one in stops]
    again = [durations.trains_after(records, one.time) for one in kills]
    replaced = [durations.replaced_after(records, one.time) for one in kills]
    recovering = [one.seconds for one in records.recovered if one.survived]
    print(f"faults       {len(disturbed.faults)}, of them {len(training)} of workers that train")
    print(f"step         {usual:.4f} s in the median, {alone:.4f} s undisturbed")
    print(f"kill         stall in seconds: {describe(stalls)}")
    print(f"             until all train again, without the part of a step that was lost: {describe(again)}")
    if disturbed.faults:
        longer = (times[-1] - times[0]) - (plain[-1] - plain[0])
        each = longer / len(disturbed.faults)
        print(f"in all       {longer:.2f} s longer than the undisturbed run, {each:.2f} s for each fault")
    print(f"stop         stall in seconds beyond the stop itself: {describe(beyond)}")
    print(f"recovery     seconds after a loss, as the survivors say: {describe(recovering)}")
    for name in ("agreeing", "connecting", "catching_up"):
        lost = [one for one in marked(disturbed.folder / "events", "recovered") if one["lost"]]
        seconds = [one[name] for one in lost if one["workers"][one["rank"]] not in one["joined"]]
        print(f"             {name.replace('_', ' '):12} {describe(seconds)}")
    print(f"went back    {len(marked(disturbed.folder / 'events', 'went back'))} times to a checkpoint")
    print(f"replaced     seconds to a new worker: {describe(replaced)}")
    print(f"goodput      {durations.goodput(times, times[0] - usual, usual):.3f} of the time went into useful steps")


def steps_in(options: argparse.Namespace, folder: Path) -> int:
    """How many steps take as long as the run is to take."""
    if options.steps:
        return int(options.steps)
    tried = run(options, folder, "calibration", CALIBRATION_STEPS, None)
    if tried.code != 0:
        sys.exit(tried.output)
    times = ledger.completions(ledger.read(tried.folder / "events"))
    usual = durations.step_seconds(times[CALIBRATION_STEPS // 3 :])
    return max(LEAST_STEPS, int(options.seconds / usual))


def is_elastic() -> bool:
    shown = subprocess.run(
        [sys.executable, "-m", "paceline.cli.main", "run", "--help"], capture_output=True, text=True, check=False
    )
    return "--elastic" in shown.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60, help="approximate duration of the undisturbed run")
    parser.add_argument("--steps", type=int, help="number of steps, instead of seconds")
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--least", type=int, default=1, help="smallest number of workers with which the run continues")
    parser.add_argument("--standby", type=int, default=1, help="workers that wait to take the place of a lost one")
    parser.add_argument("--state-mb", type=float, default=20, help="size of parameters and optimizer state")
    parser.add_argument("--every", type=int, default=50, help="steps between checkpoints; 0: none")
    parser.add_argument("--strategy", default="allreduce")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fault-seconds", type=float, default=6, help="between two faults, on average")
    parser.add_argument("--kinds", default="kill,stop")
    parser.add_argument(
        "--faults", type=int, help="number of faults, each of a training worker while no place is empty"
    )
    parser.add_argument("--longest-stop", type=float, default=2)
    parser.add_argument("--folder", type=Path, help="keep the runs in this new folder")
    parser.add_argument("--restart", action="store_true", help="start the whole run again after each loss")
    options = parser.parse_args()
    options.restart = options.restart or not is_elastic()
    if options.folder:
        options.folder.mkdir(parents=True)
    with contextlib.nullcontext(options.folder) if options.folder else tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        script = SCRIPT.replace("LENGTH", str(LENGTH)).replace("BATCH", str(BATCH))
        (folder / "script.py").write_text(script)
        steps = steps_in(options, folder)
        mode = "restarts" if options.restart else "elastic"
        print(f"{mode}; {options.workers} workers, {steps} steps, seed {options.seed}", flush=True)
        undisturbed = run(options, folder, "undisturbed", steps, None)
        if undisturbed.code != 0:
            sys.exit(undisturbed.output)
        order = Order(LENGTH, BATCH, options.microbatches, seed=0)
        well = judge(run(options, folder, "disturbed", steps, Chaos(options)), undisturbed, steps, order)
    sys.exit(0 if well else 1)


if __name__ == "__main__":
    main()
