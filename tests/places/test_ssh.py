"""Runs on hosts that are reached by ssh."""

import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hosts import Hosts, missing, until
from training import SCRIPT, alone, fingerprints, waiting_script, write_script

import paceline

PACELINE = str(Path(sys.executable).with_name("paceline"))


@pytest.fixture
def hosts(no_temporary_files: None) -> Iterator[Hosts]:
    """Two hosts, for one test."""
    if reason := missing():
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(prefix="hosts-", ignore_cleanup_errors=True) as folder:
        made = Hosts(Path(folder), 2)
        try:
            made.up()
            yield made
        finally:
            made.down()


def test_the_bits_of_one_process_through_a_kill(hosts: Hosts, tmp_path: Path) -> None:
    script = write_script(tmp_path)
    expected = alone(script)
    script.write_text("import os\nos.environ['KILL'] = '1'\n" + SCRIPT)
    run = hosts.start("sw", PACELINE, "run", "-H", "h1:1,h2:2", script, cwd=tmp_path)
    said, _ = run.communicate(timeout=250)
    assert run.returncode == 0, said
    assert (tmp_path / "killed").exists()
    assert fingerprints(said) == [expected], said
    hosts.await_end()


def all_wait(run: subprocess.Popen[str], folder: Path, count: int) -> bool:
    assert run.poll() is None, run.communicate()[0]
    return len(list(folder.glob("reached-*"))) == count


def test_a_host_is_lost(hosts: Hosts, tmp_path: Path) -> None:
    script, expected = waiting_script(tmp_path, 3)
    run = hosts.start("sw", PACELINE, "run", "-H", "h1:2,h2:1", "--elastic", "2:3", script, cwd=tmp_path)
    until(lambda: all_wait(run, tmp_path, 3), 120)
    hosts.power_off("h2")
    (tmp_path / "on").touch()
    said, _ = run.communicate(timeout=250)
    assert (run.returncode, fingerprints(said)) == (0, [expected]), said
    hosts.await_end()


def test_a_host_comes_back(hosts: Hosts, tmp_path: Path) -> None:
    script, expected = waiting_script(tmp_path, 2)
    run = hosts.start("sw", PACELINE, "run", "-H", "h1:1,h2:1", script, cwd=tmp_path)
    until(lambda: all_wait(run, tmp_path, 2), 120)
    hosts.power_off("h2")
    (tmp_path / "on").touch()
    hosts.power_on("h2")
    said, _ = run.communicate(timeout=250)
    assert (run.returncode, fingerprints(said)) == (0, [expected]), said
    assert "host h2 is lost; its agent is started again in 5 s" in said
    hosts.await_end()


def test_the_first_host_is_lost(hosts: Hosts, tmp_path: Path) -> None:
    script, expected = waiting_script(tmp_path, 2)
    words = ["--name", "one", "--resume", "auto", "--set", "checkpoint.every=2", "--set", "checkpoint.background=false"]
    command = [PACELINE, "run", "-H", "h1:1,h2:1", *words, script]
    run = hosts.start("sw", *command, cwd=tmp_path)
    until(lambda: all_wait(run, tmp_path, 2), 120)
    hosts.power_off("h1")
    said, _ = run.communicate(timeout=250)
    assert run.returncode == 5, said
    assert "The connection to h1, the first host, is lost" in said
    until(lambda: not hosts.running("h2"), 120)
    hosts.power_on("h1")
    (tmp_path / "on").touch()
    again = hosts.start("sw", *command, cwd=tmp_path)
    said, _ = again.communicate(timeout=250)
    assert (again.returncode, fingerprints(said)) == (0, [expected]), said
    assert "from step 0" not in said


@pytest.mark.skipif(shutil.which("nft") is None, reason="needs nft: apt-get install nftables")
def test_a_launcher_that_falls_silent(hosts: Hosts, tmp_path: Path) -> None:
    script, _ = waiting_script(tmp_path, 2)
    run = hosts.start("sw", PACELINE, "run", "-H", "h1:1,h2:1", "--grace", "3", script, cwd=tmp_path)
    until(lambda: all_wait(run, tmp_path, 2), 120)
    silence = "table ip test { chain one { type filter hook output priority 0; tcp dport 22 drop; }\n}\n"
    nft = ["ip", "netns", "exec", hosts.namespace("sw"), "nft", "-f", "-"]
    subprocess.run(nft, input=silence, text=True, check=True)
    hosts.await_end()
    said, _ = run.communicate(timeout=120)
    assert run.returncode == 5, said


def test_a_signal_saves_and_the_next_run_resumes(hosts: Hosts, tmp_path: Path) -> None:
    script, expected = waiting_script(tmp_path, 2)
    command = [PACELINE, "run", "-H", "h1:1,h2:1", "--name", "one", "--resume", "auto", script]
    run = hosts.start("sw", *command, cwd=tmp_path)
    until(lambda: all_wait(run, tmp_path, 2), 120)
    run.send_signal(signal.SIGTERM)
    said, _ = run.communicate(timeout=250)
    assert run.returncode == 75, said
    resume = f"paceline run --on ssh --hosts h1:1,h2:1 -n 1 --name one --resume auto {script}"
    assert f"resume with: {resume}" in said, said
    hosts.await_end()
    (tmp_path / "on").touch()
    again = hosts.start("sw", *command, cwd=tmp_path)
    said, _ = again.communicate(timeout=250)
    assert (again.returncode, fingerprints(said)) == (0, [expected]), said
    assert "from step 0" not in said


def test_nothing_is_left_when_the_launcher_is_killed(hosts: Hosts, tmp_path: Path) -> None:
    script, _ = waiting_script(tmp_path, 2)
    run = hosts.start("sw", PACELINE, "run", "-H", "h1:1,h2:1", "--grace", "3", script, cwd=tmp_path)
    until(lambda: all_wait(run, tmp_path, 2), 120)
    run.kill()
    hosts.await_end()


def test_hosts_that_cannot_be_used(hosts: Hosts, tmp_path: Path) -> None:
    script = write_script(tmp_path)

    def refused(words: str, where: Path | str = tmp_path) -> str:
        run = hosts.start("sw", PACELINE, "run", "-H", words, script, cwd=Path(where))
        said, _ = run.communicate(timeout=120)
        assert run.returncode == 3, said
        # what waits on the other host for its orders hears from the SSH server that the launcher has ended
        hosts.await_end()
        return said

    assert "nowhere: " in refused("h1:1,nowhere:1")
    for folder, text in (
        (tmp_path, f"h2: there is no {script}"),
        (Path(paceline.__file__).parent, "cannot import paceline"),
        (Path(sys.executable).parent, f"h2: there is no Python to run at {sys.executable}"),
    ):
        hosts.mount("h2", folder)
        assert text in refused("h1:1,h2:1")
        hosts.unmount("h2", folder)
    known = hosts.folder / "known"
    before = known.read_text()
    known.write_text("".join(line for line in before.splitlines(keepends=True) if not line.startswith("h2")))
    said = refused("h1:1,h2:1")
    assert "h2: " in said and "host key" in said.lower()
    known.write_text(before)
    (hosts.folder / "user.pub").write_text("")
    assert "without a password" in refused("h1:1,h2:1")


def test_an_agent_that_cannot_begin_ends_the_run(hosts: Hosts, tmp_path: Path) -> None:
    script = write_script(tmp_path)
    (tmp_path / "runs").mkdir()
    hosts.mount("h2", tmp_path / "runs", "-o", "ro")
    run = hosts.start("sw", PACELINE, "run", "-H", "h1:1,h2:1", "--patience", "1000", script, cwd=tmp_path)
    said, _ = run.communicate(timeout=120)
    assert "the agent of h2 has ended with exit code 2; see its lines above" in said, said
    assert run.returncode == 2
    hosts.await_end()


CALL = """
import socket, sys
import paceline.horovod

def who():
    import horovod.torch as hvd
    hvd.init()
    names = hvd.allgather_object(socket.gethostname())
    return hvd.rank(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size(), names

print(paceline.horovod.run(who, num_proc=3, hosts="h1:2,h2:2"))
"""


@pytest.mark.parametrize("command", [(sys.executable,), (PACELINE, "run", "--horovod")])
def test_a_function_is_called_on_two_hosts(hosts: Hosts, tmp_path: Path, command: tuple[str, ...]) -> None:
    (tmp_path / "call.py").write_text(CALL)
    run = hosts.start("sw", *command, "call.py", cwd=tmp_path)
    said, _ = run.communicate(timeout=250)
    names = ["h1", "h1", "h2"]
    assert str([(0, 0, 2, 0, 2, names), (1, 1, 2, 0, 1, names), (2, 0, 1, 1, 2, names)]) in said, said
    assert run.returncode == 0


ELASTIC = """
import os, signal, socket, time
from pathlib import Path
import torch
import horovod.torch as hvd

hvd.init()

@hvd.elastic.run
def train(state):
    while state.step < 12 or not (Path("killed").exists() and state.hosts[-1] == ["h1", "h2", "h2"]):
        if state.step == 4:
            Path("on").touch()
        if state.step > 5 and hvd.size() == 3 and socket.gethostname() == "h1" and not Path("killed").exists():
            Path("killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        state.total += hvd.allreduce(torch.tensor(state.step), op=hvd.Max, name="step").item()
        state.hosts.append(sorted(hvd.allgather_object(socket.gethostname(), name="hosts")))
        state.step += 1
        state.commit()
        time.sleep(0.05)

state = hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank, step=0, total=0, hosts=[None])
train(state)
if hvd.rank() == 0:
    print("told", os.environ["HOROVOD_LOG_LEVEL"], state.total == sum(range(state.step)), state.hosts[1], flush=True)
"""


def test_a_discovery_script_names_another_host_later(hosts: Hosts, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(ELASTIC)
    script, named = tmp_path / "discover.sh", tmp_path / "named"
    script.write_text(f"#!/bin/sh\ncat {named}\n")
    script.chmod(0o700)
    named.write_text("h1:1\n")
    words = ["-np", "1", "--max-np", "3", "--host-discovery-script", script, "--log-level", "info"]
    run = hosts.start("sw", PACELINE, "horovodrun", *words, "python", "train.py", cwd=tmp_path)
    until(lambda: (tmp_path / "on").exists() or run.poll() is not None, 120)
    named.write_text("h1:1\nnowhere:2\nh2:4\n")  # two of them are one too many
    said, _ = run.communicate(timeout=250)
    assert run.returncode == 0, said
    assert said.count("without effect here: HOROVOD_LOG_LEVEL") == 1
    assert "told info True ['h1']" in said and "nowhere: there is no host of this name" in said
    assert "1 worker was lost on the way; 1 was replaced" in said
    hosts.await_end()
