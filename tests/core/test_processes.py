"""A test on several processes: the decorator, as a test runner and its reader see it."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
import unittest
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peers
import pytest
from fork_server import forked

from paceline.errors import ConfigError
from paceline.testing import Worker, decorator, faults, forks, processes, ranks, worker_main
from paceline.testing.decorator import WorkersFailed

HERE = os.getpid()


@pytest.mark.slow
@processes(3)
def test_each_has_its_rank_and_can_be_given_fixtures(worker: Worker, tmp_path: Path) -> None:
    (tmp_path / str(worker.rank)).touch()
    assert worker.size == 3 == int(os.environ["WORLD_SIZE"])
    assert worker.rank == int(os.environ["RANK"]) == int(os.environ["LOCAL_RANK"])
    assert os.environ["MASTER_ADDR"] == "127.0.0.1" and int(os.environ["MASTER_PORT"])
    until = time.monotonic() + 30
    while len(list(tmp_path.iterdir())) < 3:  # they run at the same time
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize("text", ["a", "b"])
@processes(2)
def test_each_is_a_process_of_its_own(worker: Worker, text: str) -> None:
    assert os.getpid() == HERE  # the file was imported here
    assert text in ("a", "b")


class TestMethods:
    @processes(2)
    def test_of_a_class(self, worker: Worker, tmp_path: Path) -> None:
        assert isinstance(self, TestMethods)
        assert tmp_path.is_dir()


class Unit(unittest.TestCase):
    def setUp(self) -> None:
        self.made = os.getpid()

    @processes(2)
    def test_of_unittest(self, worker: Worker) -> None:
        self.assertEqual(self.made, os.getpid())


@processes(3)
def one_fails(worker: Worker, folder: Path) -> None:
    wanted = 1
    print("here is", worker.rank)
    peers.note(folder, worker.rank)
    peers.await_all(folder, worker.size)
    if worker.rank == wanted:
        assert worker.rank == wanted + 1
    time.sleep(60)


@pytest.mark.slow
def test_the_traceback_of_the_one_that_failed_comes_first(tmp_path: Path) -> None:
    with pytest.raises(WorkersFailed) as caught:
        one_fails(folder=tmp_path)
    lines = str(caught.value).splitlines()
    assert lines[0] == "rank 1 of 3: AssertionError"
    assert lines[2].endswith("in one_fails")
    assert lines[3].strip() == "assert worker.rank == wanted + 1"
    text = str(caught.value)
    assert "where\n  worker = Worker(rank=1, size=3)\n  folder = " in text and "\n  wanted = 1\n" in text
    assert "rank 0 of 3 still ran 3 s later" in text
    assert "-- output of rank 2\nhere is 2" in text


@processes(2)
def all_fail(worker: Worker, folder: Path) -> None:
    peers.note(folder, worker.rank)
    peers.await_all(folder, worker.size)
    peers.await_end(folder, range(worker.rank))
    raise ValueError(f"wrong on {worker.rank}")


@pytest.mark.slow
def test_all_that_failed_are_told_in_the_order_of_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However late the second one is."""
    monkeypatch.setattr(decorator, "_AFTER_FAILURE_SECONDS", peers.SECONDS)
    with pytest.raises(AssertionError) as caught:
        all_fail(folder=tmp_path)
    assert re.findall(r"^rank \d of 2: .*", str(caught.value), re.MULTILINE) == [
        "rank 0 of 2: ValueError: wrong on 0",
        "rank 1 of 2: ValueError: wrong on 1",
    ]


@processes(2, deadline=6, start="fork")
def one_hangs(worker: Worker, folder: Path) -> None:
    (folder / f"errors-{worker.rank}").write_text(os.readlink("/proc/self/fd/2"))
    peers.note(folder, worker.rank)
    if worker.rank == 1:
        wait_for_nobody()


def wait_for_nobody() -> None:
    threading.Event().wait()


@pytest.mark.slow
def test_the_deadline_shows_where_it_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The deadline passes when rank 0 has ended and rank 1 has shown its stack, however long they take."""
    begin = time.monotonic()

    def now() -> float:
        given = tmp_path / "errors-1"
        shown = given.exists() and "in wait_for_nobody" in Path(given.read_text() or os.devnull).read_text()
        return begin + 7 if shown and peers.have_ended(tmp_path, [0]) else begin

    monkeypatch.setattr(ranks, "time", SimpleNamespace(monotonic=now, sleep=time.sleep))
    for module in (decorator, worker_main):  # a worker has its 5 s until it shows the stack from its own start
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: begin, time=time.time))
    with pytest.raises(TimeoutError, match=r"Still running after 6 s: ranks 1\.") as caught:
        one_hangs(folder=tmp_path)
    assert "in wait_for_nobody" in str(caught.value)


def test_an_output_is_there_before_the_process_has_opened_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process may be killed at its deadline before it has done anything."""
    monkeypatch.setattr(forks, "_be", lambda worker, call: threading.Event().wait())
    with pytest.raises(TimeoutError, match=r"Still running after 0 s: ranks 0, 1\."):
        ranks.run("", 2, tmp_path, deadline=0.0, start=partial(forks.fork, wait_for_nobody))


@processes(2, ends={1: "SIGKILL"})
def test_a_process_that_is_to_be_killed(worker: Worker) -> None:
    if worker.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


@processes(2, ends={0: 7})
def ends_otherwise(worker: Worker) -> None:
    os._exit(worker.rank)


def test_a_process_that_ends_otherwise() -> None:
    with pytest.raises(WorkersFailed, match=r"rank 0 of 2 ended with exit code 0 instead of exit code 7") as caught:
        ends_otherwise()
    assert "rank 1 of 2 ended with exit code 1\n" in str(caught.value) + "\n"


@processes(2)
def skips(worker: Worker) -> None:
    pytest.skip("nothing to do")


def test_a_skip_in_the_processes_skips_the_test() -> None:
    with pytest.raises(unittest.SkipTest, match="nothing to do"):
        skips()


@processes(3, start="fork")
def test_copies_of_this_process_may_use_anything(worker: Worker, request: Any) -> None:
    assert request.node.name.startswith("test_copies")  # not to be pickled
    assert os.getppid() == HERE


def test_a_function_inside_another_one_can_be_forked() -> None:
    seen = "from outside"

    @processes(2, start="fork")
    def inner(worker: Worker) -> None:
        assert seen == f"rank {worker.rank}"

    with pytest.raises(WorkersFailed, match=r"rank [01] of 2: AssertionError"):
        inner()


def test_what_cannot_be_run() -> None:
    @processes(2)
    def inner(worker: Worker) -> None: ...

    with pytest.raises(ConfigError, match=r"cannot find .*inner by its name: .*start='fork'"):
        inner()
    with pytest.raises(ConfigError, match="needs a parameter 'worker'"):
        processes(2)(test_what_cannot_be_run)
    with pytest.raises(ConfigError, match="ranks 0 to 1 only"):
        processes(2, ends={2: 0})
    with pytest.raises(ConfigError, match=r"The argument 'tmp_path' of .* cannot be given to another process"):
        test_each_has_its_rank_and_can_be_given_fixtures(lambda: None)


@pytest.mark.slow
@pytest.mark.usefixtures("fork_server")
@processes(3, one_machine=False, faults=faults.kill(rank=1, step=2), ends={1: "SIGKILL"}, deadline=120, start=forked)
def test_the_others_notice_that_one_was_killed(worker: Worker, tmp_path: Path) -> None:
    """Each of them stays until the other one has noticed it, else that one has lost two."""
    import torch

    import paceline

    torch.manual_seed(0)
    session = paceline.start(
        model=torch.nn.Linear(4, 2),
        optimizer=torch.optim.SGD,
        loss=torch.nn.functional.cross_entropy,
        data=torch.utils.data.TensorDataset(torch.randn(32, 4), torch.zeros(32, dtype=torch.long)),
        batch=8,
    )
    with pytest.raises(paceline.WorkerLost, match="rank 1"):
        for batch in session.batches(epochs=1):
            session.step(batch)
    (tmp_path / str(worker.rank)).touch()
    peers.until((tmp_path / str(2 - worker.rank)).exists)
    assert session.position == 2


UNITTEST = """
import unittest
from paceline.testing import processes

class Sum(unittest.TestCase):
    @processes(2)
    def test_sum(self, worker):
        self.assertEqual(worker.size, 2)

    @processes(2)
    def test_wrong(self, worker):
        self.assertEqual(worker.rank, 0)

unittest.main()
"""


@pytest.mark.slow
def test_a_file_of_unittest_that_is_run_itself(tmp_path: Path) -> None:
    path = tmp_path / "sums.py"
    path.write_text(UNITTEST.replace("\nunittest.main()", '\nif __name__ == "__main__":\n    unittest.main()'))
    package = str(Path(__file__).resolve().parents[2])
    ended = subprocess.run(
        [sys.executable, str(path)],
        env={**os.environ, "PYTHONPATH": package},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 1
    assert "FAILED (failures=1)" in ended.stderr
    assert "WorkersFailed: rank 1 of 2: AssertionError: 1 != 0" in ended.stderr


def test_the_names_come_without_torch() -> None:
    line = "import sys; from paceline.testing import faults, processes, run; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", line], cwd=Path(__file__).parents[2], check=False).returncode == 0
    import paceline.testing.decorator

    assert dir(paceline.testing) == sorted(paceline.testing.__all__)
    assert callable(processes) and processes is paceline.testing.processes
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = paceline.testing.nothing
