"""Machines are lost. Each is a launcher on this machine; what it started is killed with it."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fork_server import PACELINE, Command, ForkServer
from launching import check_nothing_is_left, environment_in
from patience import DEADLINE
from test_losses import SCRIPT, STEPS

from paceline.launchers.machine import choose_port
from paceline.observe import ledger
from paceline.observe.index import RecordIndex, Search
from paceline.observe.tracing.slices import workers_of

MACHINES = """
import os, time
if "AHEAD" in os.environ and int(os.environ["PACELINE_WORKER"]) >= 1000:
    begin, now = time.time(), time.time
    time.time = lambda: now() + float(os.environ["AHEAD"]) + 5e-5 * (now() - begin)

from paceline.comm.rendezvous.coordinator_client import CoordinatorClient

def register(client, about, *more, inner=CoordinatorClient.register):
    inner(client, about | {"host": f"machine-{int(os.environ['PACELINE_WORKER']) // 1000}"}, *more)

CoordinatorClient.register = register
"""
LOST = """
        if batch.step < 4 and number == 0:
            scripted.refill(session, int(os.environ["MACHINES"]))
        dies = json.loads(os.environ.get("DIES", "[]"))
        if dies == [number // 1000, batch.step] and not (done := Path(os.environ["MARK"])).exists():
            done.write_text(str(os.getppid()))
            os.kill(os.getppid(), signal.SIGKILL)
            signal.pause()
        report = session.step(batch)"""
WAITING = """
import os, sys, time
from pathlib import Path

mark, port = Path(os.environ["MARK"]), sys.argv[sys.argv.index("--rendezvous") + 1].split(":")[1]

def first_listens():
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return any(row[1].endswith(f":{int(port):04X}") and row[3] == "0A" for row in rows)

def first_is_gone():
    return mark.exists() and mark.read_text() and not Path(f"/proc/{mark.read_text()}").exists()

ready = first_is_gone if sys.argv[1] == "again" else first_listens
deadline = time.monotonic() + 120
while not ready():
    assert time.monotonic() < deadline, ready
    time.sleep(0.01)
from fork_server import _run_paceline
sys.exit(_run_paceline(sys.argv[2:]))
"""
"""Starts a launcher when that of the first machine listens, or again once it has been killed.

All machines have the address of the rendezvous, so whichever comes first has the coordinator.
"""

Machines = Callable[..., "Several"]


class Several:
    """What the launchers of a run left."""

    def __init__(self, folder: Path, codes: list[int]) -> None:
        self.folder = folder
        self.codes = codes

    def events(self) -> list[dict[str, Any]]:
        files = sorted(self.folder.glob("runs*/*/events/*.jsonl"))
        lines = [line for file in files for line in file.read_text(errors="replace").splitlines(keepends=True)]
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def printed(self) -> list[dict[str, Any]]:
        texts = [path.read_text() for path in self.folder.glob("runs*/*/output/*.log")]
        return [json.loads(line) for text in texts for line in text.splitlines() if line.startswith("{")]

    def report(self) -> str:
        files = [*self.folder.glob("*.out"), *self.folder.glob("*.err"), *self.folder.glob("runs*/*/output/*.log")]
        return f"{self.codes}\n" + "\n".join(f"-- {path.name}\n{path.read_text()}" for path in sorted(files))


@pytest.fixture(scope="module")
def machines(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Machines:
    """Start a launcher for each machine, and one more that comes when the first is killed if ``again``."""

    def start(count: int, *words: str, again: bool = False, **variables: str) -> Several:
        folder = tmp_path_factory.mktemp("machines")
        (folder / "train.py").write_text(MACHINES + SCRIPT.replace("\n        report = session.step(batch)", LOST))
        (folder / "waiting.py").write_text(WAITING)
        environment = environment_in(folder) | {"MARK": str(folder / "mark"), "MACHINES": str(count)} | variables
        where = ("--quiet", "-n", "1", "--rendezvous", f"127.0.0.1:{choose_port(None)}", *words)
        commands = []
        for number in [*range(count), *([0] if again else [])]:
            own = ("run", *where, "--runs-dir", f"runs{number}", *(("--name", "job") if number == 0 else ()))
            name = f"{number}-again" if len(commands) == count else str(number)
            program = ("waiting.py", "again" if len(commands) == count else "later") if commands else PACELINE
            out, err = folder / f"{name}.out", folder / f"{name}.err"
            commands.append(Command((*program, *own, "train.py"), environment, out, err, folder))
        processes = fork_server.start(commands)
        try:
            codes = [one.wait(DEADLINE) for one in processes]
        finally:
            for one in processes:
                one.send_signal(signal.SIGKILL)
            for one in processes:
                one.wait()
        check_nothing_is_left(folder)
        return Several(folder, codes)

    return start


@pytest.mark.promise("docs/several-machines.md", "its workers are lost; the others continue")
def test_a_machine_is_lost(machines: Any, undisturbed: Any) -> None:
    """Its launcher is killed, and with it the worker."""
    ran = machines(3, "--nodes", "1:3", DIES="[1, 6]")
    wanted = undisturbed(SCRIPT)
    assert sorted(ran.codes) == [-9, 0, 0], ran.report()
    assert len(ran.printed()) == 2, ran.report()
    assert {one["fingerprint"] for one in ran.printed()} == {wanted["fingerprint"]}, ran.report()
    assert ledger.check(ledger.records_of(ran.events()), STEPS) == [], ran.report()


@pytest.fixture(scope="module")
def returned(machines: Any) -> Several:
    saved = "--set", "checkpoint.directory=saved", "--resume", "auto"
    return machines(2, "--nodes", "2", *saved, again=True, DIES="[0, 6]")


@pytest.mark.promise(
    "docs/several-machines.md",
    "Start the same command there again, with `--name` of the run and `--resume auto`: the run continues "
    "by itself from the last checkpoint",
)
def test_the_machine_of_the_coordinator_comes_back(returned: Several, undisturbed: Any) -> None:
    assert returned.codes == [-9, 0, 0], returned.report()
    assert {one["fingerprint"] for one in returned.printed()} == {undisturbed(SCRIPT)["fingerprint"]}
    assert {one["step"] for one in returned.events() if one["event"] == "resume"} == {4}, returned.report()


@pytest.mark.promise("docs/several-machines.md", "the waiting machines come back without help")
def test_the_others_wait_for_the_coordinator(returned: Several) -> None:
    assert "waiting for it to come back" in (returned.folder / "1.err").read_text(), returned.report()
    assert len(returned.printed()) == 2, returned.report()


@pytest.mark.slow
@pytest.mark.promise("docs/logs.md", "Times are those of the clock of the machine on which the run was started.")
def test_a_machine_whose_clock_is_ahead(machines: Any) -> None:
    ran = machines(2, "--nodes", "2", "--set", "strategy=pipeline", AHEAD="5")
    assert ran.codes == [0, 0], ran.report()
    first, second = (path.parent for path in sorted(ran.folder.glob("runs*/*/events")))
    index = RecordIndex(first, [second])
    index.update()
    (clock,) = [one for (_, machine), one in index.clocks.all().items() if machine > 0]
    assert abs(clock.offset + 5) <= clock.worst + 0.005, "it drifts by at most 5 ms in 100 s"
    workers = workers_of(record for _, record in index.find(Search()))
    index.close()
    slices = [one for worker in workers.values() for track in worker.tracks.values() for one in track]
    began = {one.sends: one.begin for one in slices if one.sends is not None}
    ended = {one.receives: one for one in slices if one.receives is not None}
    assert ended and set(began) == set(ended)
    assert all(began[flow] <= one.end for flow, one in ended.items())
    assert all(one.values.get("moved", 0.0) <= 2 * clock.worst for one in ended.values())
