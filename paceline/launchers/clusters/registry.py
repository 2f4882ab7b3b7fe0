"""Registry of clusters by name. A cluster's module is imported on first use."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

from paceline.errors import ConfigError
from paceline.launchers.clusters.base import Place

LOCAL = "local"  # Name for this machine, and others that run the same command. It has no module in this package.
PLACES: dict[str, str] = {
    "ssh": "ssh.place:Ssh",
    "ray": "ray:RayPlace",
    "slurm": "slurm.place:Slurm",
    "mpi": "mpi:Mpi",
    "kubernetes": "kubernetes.place:Kubernetes",
    "spark": "spark:Spark",
}
"""Module and class of each cluster, in the order in which clusters are detected."""


def place_named(name: str) -> type[Place]:
    """Return the cluster class with this name. Raises ConfigError if no cluster has this name."""
    if name not in PLACES:
        raise ConfigError(f"--on {name}: there is no such place. The places are: {', '.join([LOCAL, *PLACES])}.")
    module, _, of = PLACES[name].partition(":")
    place: type[Place] = getattr(import_module(f"paceline.launchers.clusters.{module}"), of)
    return place


def find(environment: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the name of the cluster in which this process runs and the evidence, or None if there is no cluster."""
    for name in PLACES:
        if reason := place_named(name).found(environment):
            return name, reason
    return None
