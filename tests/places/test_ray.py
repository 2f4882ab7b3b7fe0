"""Training on a Ray cluster of two nodes, in network and process namespaces of its own."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from training import alone, fingerprints, waiting_script, write_script

ALONE = ["unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
WITH_LOOPBACK = ["sh", "-c", 'ip link set lo up; exec "$@"', "sh"]


@pytest.fixture
def folder() -> Iterator[Path]:
    """Where the cluster keeps its files: a short path, as those of sockets must be."""
    if find_spec("ray") is None:
        pytest.skip("Ray is not installed: pip install 'paceline[ray]'")
    if os.geteuid() or subprocess.run([*ALONE, *WITH_LOOPBACK, "true"], capture_output=True).returncode:
        pytest.skip("no right to make network namespaces")
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as made:
        yield Path(made)


def train(folder: Path, scenario: str, *arguments: str, **environment: str) -> tuple[int, str]:
    """Train on a new cluster; gives the exit code, and what was printed."""
    program = [sys.executable, str(Path(__file__).with_name("ray_cluster.py")), str(folder), scenario]
    variables = {**os.environ, "RAY_TMPDIR": str(folder), **environment}
    ended = subprocess.run(
        [*ALONE, *WITH_LOOPBACK, *program, *arguments], env=variables, capture_output=True, text=True, timeout=250
    )
    return ended.returncode, ended.stdout + ended.stderr


def test_a_killed_worker(folder: Path) -> None:
    script = write_script(folder)
    code, said = train(folder, "well", "-n", "2", "--nodes", "2", str(script), KILL="1")
    assert (code, fingerprints(said)) == (0, [alone(script)]), said
    assert (folder / "killed").exists()


def test_a_lost_node(folder: Path) -> None:
    script, expected = waiting_script(folder, 4)
    code, said = train(folder, "lost-node", "-n", "2", "--nodes", "1:2", "--elastic", "2:4", str(script))
    assert (code, fingerprints(said)) == (0, [expected]), said


def test_a_cluster_that_is_too_small(folder: Path) -> None:
    script = write_script(folder)
    code, said = train(folder, "well", "-n", "3", "--nodes", "2", "--patience", "8", str(script))
    assert code == 3, said
    assert "2 nodes with 3 CPU each asked for; there: 127.0.0.1 with 2 CPU; 127.0.0.1 with 2 CPU; free: 4 CPU" in said
    assert not (folder / "runs").exists()
