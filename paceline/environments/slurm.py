"""Environment variables of Slurm."""

from __future__ import annotations

import re
from collections.abc import Mapping

from paceline.environments.start import LOOPBACK, Start, number, read_identity
from paceline.errors import ConfigError

_LOWEST_PORT, _PORTS = 10_000, 20_000
"""Port range below the system's ephemeral ports."""


def slurm_step(environment: Mapping[str, str]) -> Start | None:
    """Return the start by srun, or None."""
    names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
    if not {"SLURM_STEP_ID", "SLURM_JOB_ID", *names} <= environment.keys():
        return None
    tasks = tasks_per_node(environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    node = number(environment, "SLURM_NODEID", 0)
    who = read_identity(environment, *names, local_world_size=tasks[node] if 0 <= node < len(tasks) else None)
    host = first_host(environment.get("SLURM_STEP_NODELIST", "")) if len(tasks) > 1 else LOOPBACK
    job, step = (number(environment, f"SLURM_{name}_ID", 0) for name in ("JOB", "STEP"))
    cores = number(environment, "SLURM_CPUS_ON_NODE", 0) or None
    return Start("Slurm", who, host or None, _LOWEST_PORT + (101 * job + step) % _PORTS, cores=cores)


def tasks_per_node(text: str) -> list[int]:
    """Parse Slurm's list of tasks per node: ``3,1(x2)`` is ``[3, 1, 1]``."""
    counts: list[int] = []
    for part in filter(None, text.split(",")):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if found is None:
            raise ConfigError(f"{text!r} in the environment does not say how many tasks are on each node of Slurm.")
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def first_host(nodes: str) -> str:
    """Return the first host of a Slurm host list: ``a`` of ``a,b``, ``h08-ib`` of ``h[08-10,12]-ib,gpu1``."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    assert first is not None  # the pattern also matches an empty string
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0])
