"""Twenty workers on two machines, network namespaces: one is killed, and all end with the bits of one process."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "bench" / "scale"
MACHINES, EACH = 2, 10
bench = SimpleNamespace(**runpy.run_path(str(FOLDER / "__main__.py")))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_many_workers(tmp_path: Path) -> None:
    if missing := bench.obstacle():
        pytest.skip(missing)
    size = MACHINES * EACH
    bench.run(MACHINES, EACH, tmp_path)
    ended = [json.loads(path.read_text()) for path in tmp_path.glob("worker-*.json")]
    assert len(ended) >= size - 1
    alone = tmp_path / "alone"
    alone.mkdir()
    command = [sys.executable, str(FOLDER / "worker.py"), str(alone), str(size)]
    subprocess.run(command, check=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"})
    (expected,) = [json.loads(path.read_text())["fingerprint"] for path in alone.glob("worker-*.json")]
    assert {one["fingerprint"] for one in ended} == {expected}
    for one in ended:
        assert one["arenas"] <= 2 * (EACH + 1)  # those of the generation before may not be closed yet
        assert one["processes"] == 0
        assert one["sockets"] <= size + 8
    heard = json.loads((tmp_path / "agent-0.json").read_text())["received"]
    assert heard["ready"] <= 2 * (size + 1) + size  # once for each generation
