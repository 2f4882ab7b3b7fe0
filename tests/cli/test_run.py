import json
import os
import re
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.cli.options import not_resumed
from paceline.launchers.local import kernel

Script = Callable[..., Path]
Paceline = Callable[..., Any]


def only_run(tmp_path: Path) -> Path:
    (run,) = (tmp_path / "runs").iterdir()
    return run


def test_a_run(paceline: Paceline, script: Script, tmp_path: Path) -> None:
    path = script("print('hello from', rank, sys.argv[1:])")
    result = paceline("run", "-n", 2, path, "-n", "7", "--set", "a_b", "--", "--my_option")
    assert result.code == 0
    assert result.out == "[rank 0] hello from 0 ['-n', '7', '--set', 'a_b', '--', '--my_option']\n"
    run = only_run(tmp_path)
    assert re.fullmatch(r"train-\d{8}-\d{6}", run.name)
    assert f"runs/{run.name}" in result.err
    facts = json.loads((run / "launch.json").read_text())
    assert (facts["workers"], facts["script"], facts["arguments"][0]) == (2, str(path), "-n")
    assert {"paceline", "torch", "numpy"} == facts["versions"].keys()
    assert sorted(path.name for path in (run / "output").iterdir()) == ["rank-0.log", "rank-1.log"]


def test_a_saved_plan_says_how_many_workers_start_where(paceline: Paceline, script: Script, tmp_path: Path) -> None:
    path = script("print('hello')")
    plan = {"strategy": "allreduce", "workers": 4, "machines": 2, "settings": {}}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    result = paceline("run", "--plan", "plan.json", "--dry-run", path)
    assert result.out.startswith("on this machine: 4 x ")
    assert "plan.json is for 2 machines, and all of its 4 workers start on this one" in result.err
    result = paceline("run", "-n", 1, "--plan", "plan.json", "--dry-run", path)
    assert result.out.startswith("on this machine: 1 x ") and "note" not in result.err
    result = paceline("run", "--plan", "plan.json", "--on", "ssh", "--hosts", "a,b", "--dry-run", path)
    assert "-n 2" in result.out and "-n 4" not in result.out and "note" not in result.err


def test_the_number_of_workers_behind_the_script(paceline: Paceline, script: Script) -> None:
    path = script("print('hello', sys.argv[1:])")
    result = paceline("run", path, "-n", 2)
    assert result.code == 0 and result.out == "[rank 0] hello ['-n', '2']\n"
    assert "note: -n 2 comes after train.py, so the script gets it, and one worker starts." in result.err
    assert "comes after" not in paceline("run", "-n", 2, path, "-n", 2).err


def test_alerts(paceline: Paceline, script: Script, tmp_path: Path) -> None:
    path = script("sys.exit(3)")
    url = "http://127.0.0.1:1/f00"
    refused = paceline("run", "--alert", "stalled", path)
    assert refused.code == 2 and "--alert 'stalled' is not a condition" in refused.err
    assert paceline("run", "--alert", "run failed", "--notify", "./missing.sh", path).code == 2
    assert not (tmp_path / "runs").exists()
    result = paceline("run", "--quiet", "--alert", "run failed", "--notify", url, path)
    assert result.code == 3
    assert "alert: run failed: the run has ended with exit code 3" in result.err
    assert "warning: the alert was not delivered to http://127.0.0.1:1/***: " in result.err


@pytest.mark.slow
def test_a_script_for_horovod(paceline: Paceline, script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    path = script(
        """
        import horovod
        import horovod.torch as hvd
        import paceline.horovod.torch as own
        from horovod.torch.compression import Compression

        hvd.init()
        print(horovod.__version__, hvd is own, Compression is own.Compression, hvd.size(), os.environ["HOROVOD_SIZE"])
        import horovod.tensorflow
        """
    )
    result = paceline("run", "--horovod", "-n", 2, path)
    assert result.out.splitlines()[0] == "[rank 0] 0.28.1 True True 2 2"
    assert "No module named 'horovod.tensorflow'" in result.err
    assert "No module named 'horovod'" in paceline("run", path).err
    monkeypatch.setattr("paceline.horovod.unchanged.is_installed", lambda: True)
    refused = paceline("run", "--horovod", path)
    assert "Horovod is installed, so --horovod has no effect" in refused.err
    assert "No module named 'horovod'" in refused.err  # it is not, in truth


@pytest.mark.parametrize("option", ["-n", "-np", "--workers", "--nproc-per-node", "--nproc_per_node"])
def test_every_spelling_of_the_number_of_workers(paceline: Paceline, script: Script, option: str) -> None:
    path = script("print(os.environ['WORLD_SIZE'])")
    assert paceline("run", option, 2, "--runs_dir", "mine", path).out == "[rank 0] 2\n"


def test_settings_reach_the_script(paceline: Paceline, script: Script, tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text("seed = 3\n")
    path = script("print(os.environ['PACELINE_SET'], os.environ['PACELINE_PLAN'])")
    result = paceline("run", "--set", "batch=64", "--set", "clip-norm=1", "--plan", "plan.toml", path)
    assert result.out == f'[rank 0] {{"batch": "64", "clip_norm": "1"}} {tmp_path / "plan.toml"}\n'


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nowhere.py"], "There is no script nowhere.py"),
        (["."], "is a directory"),
        (
            ["-n", "2", "python", "-u", "train.py", "--lr", "3"],
            "python is in the place of the script. Paceline starts Python itself: leave python and its options out, as "
            "in paceline run -n 2 train.py --lr 3.",
        ),
        ([sys.executable, "-m", "train"], "and its options out, as in paceline run -n 2 train.py."),
        (["-n", "0", "train.py"], "--workers 0: at least one"),
        (["--set", "batc=3", "train.py"], "Did you mean 'batch'?"),
        (["--set", "batch=-3", "train.py"], "batch = -3"),
        (["--set", "batch", "train.py"], "write --set key=value"),
        (
            ["--set", "strategy=hogwildd", "-n", "2", "train.py"],
            "There is no strategy 'hogwildd'. Did you mean 'hogwild'?",
        ),
        (["--plan", "nowhere.toml", "train.py"], "plan file nowhere.toml cannot be read"),
        (["--name", "a/b", "train.py"], "cannot be the name"),
        (["--port", "0", "train.py"], "1 to 65535"),
        (["-n", "many", "train.py"], "--workers"),
        (["--nme", "x", "train.py"], "--name"),
        ([], "SCRIPT"),
    ],
)
def test_wrong_usage(paceline: Paceline, script: Script, tmp_path: Path, arguments: list[str], says: str) -> None:
    script("print('never')")
    result = paceline("run", *arguments)
    assert result.code == 2
    assert says in result.err
    assert "Traceback" not in result.err
    assert result.out == ""
    assert not (tmp_path / "runs").exists()


def test_an_unknown_strategy_of_a_plan_or_the_environment(
    paceline: Paceline, script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script("print('never')")
    (tmp_path / "plan.toml").write_text('strategy = "alreduce"\n')
    results = [paceline("run", "-n", 2, "--plan", "plan.toml", "train.py")]
    monkeypatch.setenv("PACELINE_STRATEGY", "alreduce")
    results.append(paceline("run", "-n", 2, "train.py"))
    for result in results:
        assert (result.code, result.out) == (2, "")
        assert "There is no strategy 'alreduce'. Did you mean 'allreduce'?" in result.err
    assert not (tmp_path / "runs").exists()
    assert paceline("run", "--set", "strategy=single", "train.py").code == 0  # it goes before the environment


def test_a_port_in_use(paceline: Paceline, script: Script) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        result = paceline("run", "--port", taken.getsockname()[1], script("print('never')"))
    assert (result.code, result.out) == (3, "")
    assert "cannot be used: Address already in use. Choose another" in result.err


def test_the_scripts_exit_code_passes_through(paceline: Paceline, script: Script) -> None:
    result = paceline("run", "-n", 3, script("sys.exit(7) if rank == 1 else time.sleep(600)"))
    assert result.code == 7
    lines = result.err.splitlines()
    assert lines[0] == "rank 1: ended with exit code 7"
    assert "ranks 0, 2 stopped because they lost rank 1; what they report follows from that" in lines


def test_an_error_before_start_shows_its_traceback_once(paceline: Paceline, script: Script) -> None:
    result = paceline("run", "-n", 2, script("if rank == 1: raise ValueError('bad')\ntime.sleep(600)"))
    assert result.code == 1
    lines = result.err.splitlines()
    assert (lines[0], lines[-1]) == ("rank 1: ValueError: bad (train.py:11)", "ValueError: bad")
    assert result.err.count("Traceback") == 1


def test_the_cause_is_told_before_its_consequences(paceline: Paceline, script: Script, tmp_path: Path) -> None:
    path = script(
        """
        def wait_for(true):
            until = time.monotonic() + 60
            while not true():
                assert time.monotonic() < until
                time.sleep(0.01)

        cause = run / "errors" / "rank-1.json"
        if rank == 1:
            wait_for(lambda: all((run / f"up-{other}").exists() for other in (0, 2)))
            fail("CheckpointError", "step-10 is damaged", code=4)
        (run / f"up-{rank}").touch()
        wait_for(lambda: cause.exists() and cause.read_text().endswith("}"))
        fail("WorkerLost", "rank 1 went away", consequence=True, code=5)
        """
    )
    result = paceline("run", "-n", 3, path)
    assert result.code == 4
    lines = result.err.splitlines()
    assert (lines[0], lines[-1]) == ("rank 1: step-10 is damaged", "Traceback of rank 1")
    assert result.err.count("Traceback") == 1
    (run,) = (tmp_path / "runs").iterdir()
    assert (run / "failure.txt").read_text() == result.err
    told = json.loads((run / "failure.json").read_text())
    assert (told["kind"], told["rank"], told["step"], told["code"]) == ("checkpoint", 1, 3, 4)
    assert [one["rank"] for one in told["consequences"]] == [0, 2]


def test_a_worker_ended_by_a_signal(paceline: Paceline, script: Script) -> None:
    path = script("if rank == 1: os.kill(os.getpid(), signal.SIGSEGV)\ntime.sleep(600)")
    result = paceline("run", "-n", 2, path)
    assert result.code == 128 + 11
    assert result.err.startswith("rank 1: was killed by signal 11 (SIGSEGV)\n")


def test_the_kernel_ended_it_for_lack_of_memory(
    paceline: Paceline, script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counter = tmp_path / "memory.events"
    counter.write_text("oom_kill 4\n")
    monkeypatch.setattr(kernel, "own_counters", lambda: [counter])
    path = script(
        f"""
        if rank == 1:
            Path({str(counter)!r}).write_text("oom_kill 5\\n")
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)
        """
    )
    result = paceline("run", "-n", 2, path)
    assert (result.code, result.err.splitlines()[0]) == (5, "rank 1: ran out of memory (the kernel ended it)")
    assert any(line.startswith("fix: give each worker less to hold") for line in result.err.splitlines()[:10])


def test_killed_by_somebody(paceline: Paceline, script: Script) -> None:
    result = paceline("run", "-n", 2, script("os.kill(os.getpid(), 9) if rank == 1 else time.sleep(600)"))
    assert (result.code, result.err.splitlines()[0]) == (5, "rank 1: was killed by signal 9 (SIGKILL)")


SAVES = """
if "PACELINE_SET" in os.environ and "resume" in os.environ["PACELINE_SET"]:
    print("resumed")
    sys.exit(0)
manifest = run / "checkpoints" / "step-5" / "manifest.json"
manifest.parent.mkdir(parents=True)
manifest.touch()
fail("ValueError", "bad")
"""


def test_a_failed_run_says_how_to_resume_and_resumes(paceline: Paceline, script: Script, tmp_path: Path) -> None:
    path = script(SAVES)
    failed = paceline("run", "--set", "batch=4", "--runs-dir", "my runs", path, "an argument")
    (run,) = (tmp_path / "my runs").iterdir()
    (advice,) = re.findall("resume with: paceline (.*)", failed.err)
    assert advice == (
        f"run -n 1 --name {run.name} --resume auto --runs-dir 'my runs' --set batch=4 {path} 'an argument'"
    )
    assert list((run / "errors").iterdir())
    output = (run / "output" / "rank-0.log").read_text()

    resumed = paceline("run", "--runs-dir", "my runs", "--resume", "auto", path)
    assert (resumed.code, resumed.out) == (0, "[rank 0] resumed\n")
    assert [path.name for path in (tmp_path / "my runs").iterdir()] == [run.name]
    assert not list((run / "errors").iterdir())
    assert (run / "output" / "rank-0.log").read_text() == output + "resumed\n"


@pytest.mark.promise("docs/events.md", "A name that exists is refused, unless the run resumes.")
def test_a_taken_name(paceline: Paceline, script: Script, tmp_path: Path) -> None:
    path = script("print('done')")
    assert paceline("run", "--name", "mine", path).code == 0
    again = paceline("run", "--name", "mine", path)
    assert (again.code, again.out) == (2, "")
    assert "--resume auto" in again.err
    assert paceline("run", "--name", "mine", "--resume", "auto", path).code == 0
    assert "note: there is no run" not in paceline("run", "--name", "other", "--resume", "auto", path).err
    manifest = tmp_path / "runs" / "mine" / "checkpoints" / "step-000003" / "manifest.json"
    manifest.parent.mkdir(parents=True)
    manifest.touch()
    said = (
        "note: there is no run 'mne' in runs, so a new one starts. The newest run of train.py that can be resumed is "
    )
    assert f"{said}'mine'." in paceline("run", "--name", "mne", "--resume", "auto", path).err


def test_other_runs_that_come_and_go_stop_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def newest(*_: Any, **__: Any) -> None:
        raise FileNotFoundError("a checkpoint that was just removed")

    monkeypatch.setattr("paceline.launchers.runs.newest_resumable", newest)
    request: Any = SimpleNamespace(resume="auto", name="mine", runs=tmp_path, script=Path("train.py"))
    assert not_resumed(request) == ""


def test_quiet(paceline: Paceline, script: Script) -> None:
    result = paceline("run", "--quiet", script("print('done')"))
    assert (result.code, result.out, result.err) == (0, "[rank 0] done\n", "")


def test_hostile_paths(paceline: Paceline, script: Script, tmp_path: Path) -> None:
    name = "it's a [bold]ä %s $HOME.py"
    result = paceline("run", script("print(Path(__file__).name)", name))
    assert (result.code, result.out) == (0, f"[rank 0] {name}\n")
    assert os.path.basename(only_run(tmp_path)).startswith("it's a [bold]ä %s $HOME-")


@pytest.mark.promise("docs/events.md", "Only you can enter it;")
def test_nobody_else_may_enter_the_directory_of_a_run(paceline: Paceline, script: Script, tmp_path: Path) -> None:
    assert paceline("run", script("")).code == 0
    assert only_run(tmp_path).stat().st_mode & 0o777 == 0o700
