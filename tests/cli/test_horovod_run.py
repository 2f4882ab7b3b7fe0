"""``horovod.run``: a function on many workers, with the arguments of Horovod."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import paceline.horovod.torch as hvd
from paceline.errors import ConfigError
from paceline.horovod import run
from paceline.horovod.ray import RayExecutor

Script = Callable[..., Path]
Paceline = Callable[..., Any]

UNCHANGED = """
    import horovod
    import torch

    def total(start, step=1):
        import horovod.torch as hvd
        hvd.init()
        return hvd.rank(), hvd.allreduce(torch.tensor(start + step * hvd.rank()), op=hvd.Sum).item()

    print(horovod.run(total, (1,), {"step": 5}, num_proc=2))
"""


@pytest.mark.slow
def test_an_unchanged_script(paceline: Paceline, script: Script) -> None:
    result = paceline("run", "--horovod", script(UNCHANGED))
    assert "[rank 0] [(0, 7), (1, 7)]" in result.out.splitlines(), result.err


MODULE = """
import sys
import horovod.torch as hvd
from beside import size

hvd.init()
if __name__ == "__main__" and hvd.size() == size:
    print(hvd.allgather_object([sys.argv[1:], sys.argv[0] == __file__]))
"""


@pytest.mark.slow
def test_a_module_is_run_as_by_python_m(paceline: Paceline, tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "train.py").write_text(MODULE)
    (tmp_path / "beside.py").write_text("size = 2")
    result = paceline("horovodrun", "-np", "2", "python", "-m", "package.train", "-m", "5")
    assert f"[rank 0] {[[['-m', '5'], True]] * 2}" in result.out.splitlines(), result.err


VARIABLES = """
    import os
    import horovod.torch as hvd
    from horovod.common.util import env, nccl_built

    def variables():
        return [os.environ.get(f"HOROVOD_{name}") for name in ("RANK", "SIZE", "LOCAL_RANK", "CYCLE_TIME")]

    before = variables()
    with env(HOROVOD_CYCLE_TIME="2", HOROVOD_SIZE="7", HOROVOD_RANK=None):
        inside = variables()
    assert variables() == before and not nccl_built(verbose=True)
    hvd.init(process_sets=[hvd.ProcessSet(reversed(range(1, 2)))])
    print(hvd.allgather_object([before, inside]))
"""


@pytest.mark.slow
def test_what_a_script_finds_before_init(paceline: Paceline, script: Script) -> None:
    result = paceline("run", "--horovod", "-n", "2", script(VARIABLES))
    found = [[[rank, "2", rank, None], [rank, "7", rank, "2"]] for rank in "01"]
    assert f"[rank 0] {found}" in result.out.splitlines(), result.err


def fail(rank: int) -> None:
    hvd.init()
    if hvd.rank() == rank:
        raise LookupError(f"rank {rank} has no such thing, and waits {os.environ['HOROVOD_GLOO_TIMEOUT_SECONDS']} s")
    hvd.allreduce(torch.ones(2), name="never")


@pytest.mark.slow
def test_an_exception_of_one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with (
        pytest.warns(DeprecationWarning, match="np is deprecated, use num_proc"),
        pytest.warns(UserWarning, match="without effect here: output_filename, reset_limit"),
        pytest.raises(LookupError, match="rank 1 has no such thing, and waits 50 s") as caught,
    ):
        run(fail, (1,), np=2, hosts="localhost:4", start_timeout=50, output_filename="out", reset_limit=3)
    (note,) = caught.value.__notes__
    assert note.startswith("rank 1: LookupError: ") and 'raise LookupError(f"rank' in note


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"ssh_port": 22}, "ssh_port=22 has no counterpart here: set Port in ~/.ssh/config"),
        ({"use_mpi": True}, "use_mpi=True has no counterpart here: use `paceline run --horovod --on mpi`"),
        ({"executable": "python2"}, "executable='python2': workers run"),
        ({"hosts": "h1:2", "hostfile": "hosts"}, "hosts or hostfile, not both"),
        ({"num_proc": 3, "hosts": "h1:2"}, "-np 3: the hosts have 2 slots"),
        ({"min_num_proc": 3, "max_num_proc": 2}, "3:2"),
        ({"num_proc": 0}, "horovod.run: num_proc=0: give a whole number from 1 on"),
        ({"num_proc": "2"}, "num_proc='2': give a whole number from 1 on"),
    ],
    ids=lambda given: next(iter(given)) if isinstance(given, dict) else "",
)
def test_arguments_that_cannot_be_used(
    given: dict[str, Any], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=text):
        run(fail, (0,), **given)


def test_not_on_each_of_several_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="this process is one of 2: start the script as one process"):
        run(fail, (0,))


def test_an_executor_that_cannot_be_used() -> None:
    for given, text in (
        ({}, "give one of the three"),
        ({"num_workers": 2, "num_hosts": 2}, "give one of the three"),
        ({"num_workers": 2, "min_workers": 1}, "give one of the three"),
        ({"num_workers": -1}, "num_workers=-1: give a whole number from 1 on"),
        ({"max_workers": 2, "num_workers": 2}, "max_workers=2: give min_workers, too"),
        ({"max_workers": 2, "min_workers": 3}, "not more than that"),
        ({"num_workers": 2, "gpus_per_worker": 1}, "give use_gpu=True"),
    ):
        with pytest.raises(ConfigError, match=text):
            RayExecutor(None, **given)
    executor = RayExecutor(num_hosts=2, num_workers_per_host=2)
    with pytest.raises(ConfigError, match=r"call start\(\) before"):
        executor.run(fail, [0])
    with pytest.warns(UserWarning, match="create_settings: without effect here: ssh_identity_file"):
        RayExecutor.create_settings(ssh_identity_file="key")
