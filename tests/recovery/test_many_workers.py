"""Up to twenty workers on machines in network namespaces: one is killed, all end with the bits of one process."""

import json
import os
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
from fork_server import Command, Forked, ForkServer

FOLDER = Path(__file__).resolve().parents[2] / "bench" / "scale"
bench = SimpleNamespace(**runpy.run_path(str(FOLDER / "__main__.py")))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("machines", "each"), [(2, 10), (4, 3), (3, 4)])
def test_many_workers(fork_server: ForkServer, tmp_path: Path, machines: int, each: int) -> None:
    if missing := bench.obstacle():
        pytest.skip(missing)
    size = machines * each
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    def start(namespace: str, words: list[str], output: Path) -> Forked:
        (agent,) = fork_server.start([Command(tuple(words), environment, output, output, network=namespace)])
        return agent

    bench.run(machines, each, tmp_path, start)
    ended = [json.loads(path.read_text()) for path in tmp_path.glob("worker-*.json")]
    assert len(ended) >= size - 1
    alone = tmp_path / "alone"
    alone.mkdir()
    words = str(FOLDER / "worker.py"), str(alone), str(size)
    command = Command(words, environment, tmp_path / "out", tmp_path / "err")
    assert fork_server.run(command, 300) == 0, command.err.read_text()
    (expected,) = [json.loads(path.read_text())["fingerprint"] for path in alone.glob("worker-*.json")]
    assert {one["fingerprint"] for one in ended} == {expected}
    for one in ended:
        assert one["arenas"] <= 2 * (each + 1)  # those of the generation before may not be closed yet
        assert one["processes"] == 0
        assert one["sockets"] <= size + 8
    heard = json.loads((tmp_path / "agent-0.json").read_text())["received"]
    assert heard["ready"] <= 2 * (size + 1) + size  # once for each generation
