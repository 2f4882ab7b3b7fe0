"""Slurm jobs: write the batch script, submit it, follow the job until it ends."""

from __future__ import annotations

import math
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from paceline.config import quoted
from paceline.environments import env
from paceline.errors import PREEMPTED, ConfigError, StartError
from paceline.launchers import runs
from paceline.launchers.base import Request
from paceline.launchers.clusters.base import Options, Placement, given_options
from paceline.launchers.clusters.clients import say
from paceline.launchers.output import Lines
from paceline.launchers.workers import stop_signals

_LEAD_SECONDS = 35
"""Seconds that are added to --grace for the signal before the time limit, because Slurm may send it late."""
_TIME = re.compile(r"(\d{1,5})|(\d{1,5}):(\d{1,5})(?::(\d{1,5}))?|(\d{1,5})-(\d{1,5})(?::(\d{1,5}))?(?::(\d{1,5}))?")
_SCRIPT = """\
#!/bin/bash
{directives}

{command} &
run=$!
trap 'again=1; kill -USR1 $run' USR1               # the time is almost up: save
trap 'again=1; kill -USR1 $run; cancelled=1' TERM  # save, and do not come back
again=1
while [ $again ]; do again=; wait $run; code=$?; done  # a signal ends a wait
{requeue}exit $code
"""
_REQUEUE = 'if [ $code = {code} ] && [ ! $cancelled ]; then scontrol requeue "$SLURM_JOB_ID"; fi\n'
_ENDED = {
    "COMPLETED": 0,
    "FAILED": 1,
    "CANCELLED": 143,
    "TIMEOUT": PREEMPTED,
    "DEADLINE": PREEMPTED,
    "PREEMPTED": PREEMPTED,
    "NODE_FAIL": 5,
    "BOOT_FAIL": 3,
    "OUT_OF_MEMORY": 137,
}
"""Final states of a job, with the exit code for jobs without their own exit code."""
_STATE_SECONDS = 1.0
_OUTPUT_SECONDS = 0.1
_END_SECONDS = 60.0  # Timeout in seconds after the last signal. Slurm's own KillWait is 30.


def require(*programs: str) -> None:
    """Raise StartError if this machine lacks one of Slurm's programs."""
    for name in programs:
        if shutil.which(name) is None:
            raise StartError(
                f"--on slurm: there is no {name} here. Start this on a login node of the cluster, or install Slurm's "
                f"commands (apt-get install slurm-client)."
            )


def scontrol(*words: str) -> str:
    done = subprocess.run(["scontrol", *words], capture_output=True, text=True, env=env.inherited())
    if done.returncode:
        raise StartError(f"scontrol {' '.join(words)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def fields_of(line: str) -> dict[str, str]:
    """Parse ``Name=value Name=value``. The first value of a repeated name counts."""
    return dict(reversed(re.findall(r"(\S+?)=(\S*)", line)))


def seconds_of(limit: str) -> int:
    """Return a time limit of Slurm in seconds: M, M:S, H:M:S, D-H, D-H:M, D-H:M:S."""
    if (found := _TIME.fullmatch(limit)) is None:
        raise ConfigError(f"--time {quoted(limit)}: give minutes, or hours as in 2:00:00, or days as in 1-12:00:00.")
    minutes, first, second, third, *days = [int(part or 0) for part in found.groups()]
    if found[5]:
        return ((days[0] * 24 + days[1]) * 60 + days[2]) * 60 + days[3]
    return (first * 60 + second) * 60 + third if found[4] else (minutes + first) * 60 + second


def batch_script(request: Request, options: Options, run: Path) -> str:
    """Return the batch script. Raises ConfigError if the time limit is invalid."""
    fewest, most = request.nodes or (1, 1)
    lead = math.ceil(request.grace_seconds) + _LEAD_SECONDS
    resumes = request.resume in (None, "auto")  # otherwise a requeued job would restart from that checkpoint
    directives = {
        "job-name": request.script.stem,
        "nodes": str(most) if fewest == most else f"{fewest}-{most}",
        "ntasks-per-node": "1",
        "cpus-per-task": str(request.workers + request.standby),
        "gpus-per-node": options.gpus,
        "time": options.time,
        "partition": options.partition,
        "account": options.account,
        "output": _pattern(run) + "/job-%j.out",
        "error": _pattern(run) + "/job-%j.err",
        "open-mode": "append",
        "signal": f"B:USR1@{lead}" if options.time is None or seconds_of(options.time) > 2 * lead else None,
    }
    lines = [f"#SBATCH --{name}={shlex.quote(str(value))}" for name, value in directives.items() if value is not None]
    lines.append("#SBATCH --requeue" if resumes else "#SBATCH --no-requeue")
    if request.smallest < request.largest:
        lines.append("#SBATCH --no-kill")
    named = replace(request, name=run.name, settings={"resume": "auto", **request.settings})
    command = [sys.executable, "-m", "paceline", "run", "--on", "slurm", *given_options(named)]
    return _SCRIPT.format(
        directives="\n".join(lines),
        command=shlex.join([*command, str(request.script), *request.arguments]),
        requeue=_REQUEUE.format(code=PREEMPTED) if resumes else "",
    )


def _pattern(path: Path) -> str:
    """Escape a path for Slurm, which expands patterns that begin with %."""
    return str(path).replace("%", "%%")


@dataclass(frozen=True)
class Job:
    """Submitted job."""

    number: str
    run: Path

    def output(self, suffix: str) -> Path:
        """Return the file with the output of the batch script, and so of rank 0."""
        return self.run / f"job-{self.number}{suffix}"


def submit(placement: Placement, request: Request) -> Job:
    """Write the batch script into the run directory and submit it.

    Raises:
        ConfigError: the run directory cannot be used.
    """
    command = placement.agents[0].command
    script = Path(command[-1])
    new = not script.parent.exists()
    with runs.claim(replace(request, name=script.parent.name)):
        script.write_text(placement.text)
    done = subprocess.run(command, capture_output=True, text=True, env=env.inherited())
    if done.returncode:
        if new:
            shutil.rmtree(script.parent)
        said = "; ".join(line.removeprefix("sbatch: error: ") for line in done.stderr.strip().splitlines())
        raise StartError(f"Slurm refuses the job: {said}.{_partitions(said)}")
    job = Job(done.stdout.strip().partition(";")[0], script.parent)
    say(f"job {job.number} is submitted; its output: {job.output('.out')} and .err")
    return job


def _partitions(said: str) -> str:
    if "partition" not in said or shutil.which("sinfo") is None:
        return ""
    names = subprocess.run(["sinfo", "-h", "-o", "%R"], capture_output=True, text=True).stdout.split()
    return f" The partitions are: {', '.join(names)}."


def follow_job(job: Job, grace_seconds: float) -> int:
    """Show output and state of a job until it ends. Return its exit code.

    A first signal asks a running job to save and end, and cancels a waiting job. A second signal, or the end of the
    grace period, cancels any job.
    """
    outputs = [_Output(job.output(".out"), sys.stdout), _Output(job.output(".err"), sys.stderr)]
    watch, deadline, cancelled = _Watch(job), math.inf, False
    with stop_signals() as received:
        while not watch.over and time.monotonic() < deadline + _END_SECONDS:
            if received and deadline == math.inf:
                deadline = time.monotonic() + grace_seconds
                cancelled = watch.state != "RUNNING"
                _scancel(job, *([] if cancelled else ["--batch", "--signal=TERM"]))
            elif not cancelled and (len(received) > 1 or time.monotonic() > deadline):
                cancelled = True
                _scancel(job)
            watch.poll()
            for output in outputs:
                output.show()
            time.sleep(_OUTPUT_SECONDS)
    return watch.end(received[0] if received else None)


def _scancel(job: Job, *options: str) -> None:
    subprocess.run(["scancel", *options, job.number], capture_output=True, env=env.inherited())


class _Output:
    """Output file of a job, shown as it grows."""

    def __init__(self, path: Path, to: IO[str]) -> None:
        self._path, self._to = path, to
        self._shown = 0
        self._lines = Lines()

    def show(self) -> None:
        try:
            with self._path.open("rb") as file:
                file.seek(self._shown)
                data = file.read()
        except FileNotFoundError:  # the job has not started
            return
        self._shown += len(data)
        self._to.write("".join(f"{line}\n" for line in self._lines.take(data)))
        self._to.flush()


class _Watch:
    """State of a job, polled from Slurm."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._fields: dict[str, str] = {}
        self._told = ""
        self._next = 0.0

    @property
    def state(self) -> str:
        return self._fields.get("JobState", "PENDING")

    @property
    def over(self) -> bool:
        return self.state in _ENDED

    def poll(self) -> None:
        """Poll the state if it is due, and print changes."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _STATE_SECONDS
        try:
            self._fields = fields_of(scontrol("show", "job", self._job.number, "-o"))
        except StartError as error:
            self._fields = {**self._fields, **self._recorded()}
            self._tell(str(error))
            return
        number, reason = self._job.number, self._fields.get("Reason")
        if self.state == "RUNNING":
            self._tell(f"job {number} runs on {self._fields.get('NodeList')}")
        elif self.state == "PENDING" and reason != "None":
            again = "is queued again and " if self._fields.get("Restarts", "0") != "0" else ""
            self._tell(f"job {number} {again}waits: {reason}")

    def _recorded(self) -> dict[str, str]:
        """Return the accounting record of a job, which the controller forgets minutes after its end."""
        command = ["sacct", "-X", "-n", "-P", "-o", "State,ExitCode", "-j", self._job.number]
        if shutil.which("sacct") is None:
            return {}
        done = subprocess.run(command, capture_output=True, text=True, env=env.inherited())
        state, _, code = done.stdout.strip().partition("|")
        return {"JobState": state.split()[0], "ExitCode": code} if done.returncode == 0 and code else {}

    def _tell(self, line: str) -> None:
        if line != self._told:
            self._told = line
            say(line)

    def end(self, signal_number: int | None) -> int:
        """Return the exit code. Print the final state unless the job completed or failed."""
        own, _, killed = self._fields.get("ExitCode", "0:0").partition(":")
        code = _ENDED.get(self.state, 1)
        if self.state == "FAILED":
            code = int(own) or 128 + int(killed)
        if self.state not in ("COMPLETED", "FAILED"):
            say(f"job {self._job.number} has ended: {self.state}; `sacct -j {self._job.number}` may say more")
        if code in (PREEMPTED, 143) and signal_number in (signal.SIGINT, signal.SIGHUP):
            return 128 + signal_number
        return code
