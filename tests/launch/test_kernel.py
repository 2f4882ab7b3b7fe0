import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.launchers.local import kernel
from paceline.launchers.local.kernel import STOPPED, OutOfMemory, is_ending, own_counters, start_of, state_of


def test_each_process_that_the_kernel_ended_counts_once(tmp_path: Path) -> None:
    counter = tmp_path / "memory.events"
    counter.write_text("low 0\noom 3\noom_kill 1\n")
    memory = OutOfMemory([counter])
    assert not memory.again()
    counter.write_text("low 0\noom 4\noom_kill 3\n")
    assert [memory.again() for _ in range(3)] == [True, True, False]


def test_without_a_counter_nothing_is_noticed(tmp_path: Path) -> None:
    assert not OutOfMemory([tmp_path / "nowhere"]).again()


@pytest.mark.parametrize(
    ("groups", "file"),
    [
        ("0::/pod/one\n", "pod/one/memory.events"),
        ("9:name=systemd:/\n4:cpu,memory:/pod\n0::/\n", "memory/pod/memory.oom_control"),
        ("4:memory:/unseen/from/inside\n", "memory/memory.oom_control"),
    ],
)
def test_the_counter_of_the_own_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: str, file: str) -> None:
    (tmp_path / "cgroup").write_text(groups)
    (tmp_path / "root" / file).parent.mkdir(parents=True)
    (tmp_path / "root" / file).write_text("oom_kill 0\n")
    monkeypatch.setattr(kernel, "_OWN_GROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(kernel, "_ROOT", tmp_path / "root")
    (found,) = own_counters()
    assert found.samefile(tmp_path / "root" / file)


def test_without_groups_the_machine_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "_OWN_GROUPS", tmp_path / "nowhere")
    assert own_counters() == [kernel._MACHINE]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_stopped_process() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        assert state_of(process.pid) == STOPPED
        process.kill()
    assert state_of(process.pid) == ""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_process_is_told_from_a_later_one_with_its_number() -> None:
    started = start_of(os.getpid())
    assert started is not None and not is_ending(os.getpid(), started)
    assert is_ending(os.getpid(), started - 1)
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        its = start_of(process.pid)
        assert not is_ending(process.pid, its)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie
        assert is_ending(process.pid, its)
    assert is_ending(process.pid, its) and start_of(process.pid) is None
