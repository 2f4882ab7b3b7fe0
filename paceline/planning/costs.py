"""Profile of a model as a file, and the plan file made from it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from paceline.planning.memory import Run, Segment
from paceline.schedule.balance import Cluster, Cut, LayerCost
from paceline.system.regular_files import read_text


@dataclass(frozen=True)
class Profile:
    """Measured costs of a model."""

    model: str  # name of the model's class
    samples: int  # number of samples in the measured microbatch
    microbatches: int  # number of microbatches in a step
    link_bytes_per_second: float | None  # bandwidth between two workers. None with a single worker.
    passes: Mapping[int, tuple[LayerCost, ...]]  # cost of each layer in a pass over so many microbatches at once
    core_load: float  # cores that a worker uses while it computes. 0 for layers that wait for something else.
    update_seconds: float  # seconds of the optimizer's update
    add_seconds: float  # seconds to add the gradients of a microbatch to those before it
    batch: int  # number of samples in a batch
    steps_per_epoch: int | None  # None for a stream, whose length is unknown
    exact: bool  # whether the settings ask for the same bits with any number of workers
    sizes: Run  # sizes on which the memory of a worker depends
    uncut: str  # why the model, measured as one layer, cannot be cut; empty if it can
    autocast: bool = False  # whether layers compute in 16 bits
    shard_copy: bool | None = None  # as the setting
    shard_within: str | None = None  # as the setting

    @property
    def layers(self) -> tuple[LayerCost, ...]:
        """Cost of each layer for one microbatch."""
        return self.passes[1]

    def holders(self, machines: int, workers: int) -> int:
        """Return the number of workers that keep and update each slice of the state with strategy ``sharded``."""
        if self.shard_within is not None and machines > 1:
            return machines
        return min(1 + bool(self.shard_copy), workers)

    def cluster(self, workers: int, memory_bytes: float | None = None) -> Cluster:
        """Return a cluster of workers with the measured costs. Without a measured link, transfers are free."""
        link = self.link_bytes_per_second or float("inf")
        return Cluster(link, memory_bytes, workers, self.microbatches)


def write(profile: Profile, path: Path) -> None:
    """Write a profile as JSON."""
    path.write_text(json.dumps(asdict(profile)))


def read(path: Path) -> Profile:
    """Read a profile written by :func:`write`."""
    values = json.loads(read_text(path))
    passes = {int(count): tuple(LayerCost(**one) for one in costs) for count, costs in values["passes"].items()}
    segments = tuple(Segment(**one) for one in values["sizes"]["segments"])
    sizes = Run(**{**values["sizes"], "segments": segments})
    return Profile(**{**values, "passes": passes, "sizes": sizes})


def plan_text(profile: Profile, cut: Cut) -> str:
    """Return a plan file (TOML) with this cut, for people to edit."""
    times = ", ".join(f"{seconds * 1000:.2f}" for seconds in cut.seconds)
    names = ", ".join(f'"{layer.name}"' for layer in profile.layers)
    return "\n".join(
        (
            f"# {profile.model}, measured with microbatches of {profile.samples}: milliseconds per stage: {times}",
            'strategy = "pipeline"',
            "",
            "[pipeline]",
            f"stages = {len(cut.bounds)}",
            "# The layers at which stages 1, 2, ... begin. All layers:",
            f"# {names}",
            f"cut = {json.dumps(list(cut.names))}",
            "# Workers of each stage.",
            f"replicas = {json.dumps(list(cut.replicas))}",
            "",
        )
    )
