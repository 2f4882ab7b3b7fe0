"""A Ray cluster of two nodes on this machine, alone in its namespace: starts it, trains on it, and says how that ended.

python ray_cluster.py FOLDER lost-node|well ARGUMENTS...   runs `paceline run --on ray ARGUMENTS` in the folder
"""

import os
import subprocess
import sys
import time
from pathlib import Path

os.environ |= {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}


def main(folder: Path, scenario: str, arguments: list[str]) -> int:
    from ray.cluster_utils import Cluster

    one = {"num_cpus": 2, "object_store_memory": 100 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={**one, "include_dashboard": False})
    second = cluster.add_node(**one)
    words = [sys.executable, "-m", "paceline", "run", "--on", "ray", "--address", cluster.address, *arguments]
    run = subprocess.Popen(words, cwd=folder)
    if scenario == "lost-node":
        while len(waiting := list(folder.glob("reached-*"))) < 4 and run.poll() is None:
            time.sleep(0.05)
        time.sleep(0.5)  # their contents
        workers = [int(path.read_text()) for path in waiting]
        cluster.remove_node(second, allow_graceful=False)
        while sum(map(_runs, workers)) > 2 and run.poll() is None:
            time.sleep(0.05)
        (folder / "on").touch()
        cluster.add_node(**one)
    return run.wait()


def _runs(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:]))
