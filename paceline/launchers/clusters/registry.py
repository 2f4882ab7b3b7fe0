"""Places by name. A place is imported when it is used."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

from paceline.errors import ConfigError
from paceline.launchers.clusters.base import Place

LOCAL = "local"
"""This machine, and others that run the same command: no place of this folder."""
PLACES: dict[str, str] = {
    "ssh": "ssh.place:Ssh",
    "ray": "ray:RayPlace",
    "slurm": "slurm.place:Slurm",
    "mpi": "mpi:Mpi",
    "kubernetes": "kubernetes.place:Kubernetes",
    "spark": "spark.place:Spark",
}
"""The module and the class of each place. A process looks for the place it is in, in this order."""


def place_named(name: str) -> type[Place]:
    """Find a place.

    Raises:
        ConfigError: there is none of this name.
    """
    if name not in PLACES:
        raise ConfigError(f"--on {name}: there is no such place. The places are: {', '.join([LOCAL, *PLACES])}.")
    module, _, of = PLACES[name].partition(":")
    place: type[Place] = getattr(import_module(f"paceline.launchers.clusters.{module}"), of)
    return place


def find(environment: Mapping[str, str]) -> tuple[str, str] | None:
    """The place that this process is in, and how that shows; None: none but this machine."""
    for name in PLACES:
        if reason := place_named(name).found(environment):
            return name, reason
    return None
