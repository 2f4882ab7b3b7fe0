"""Measured costs of training a model: as a file, the plan file made from it, and as the simulator takes them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
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
    passes: Mapping[int, tuple[LayerCost, ...]]  # costs of layers in one pass, by its number of microbatches
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
    message_seconds: float | None = None  # seconds of a worker to send or to receive a message. None with one worker.
    pass_seconds: float = 0.0  # seconds of a pass of a pipeline's stage besides its layers
    half_pass_seconds: float = 0.0  # the same of each half of a split backward pass
    # bytes of the process besides the weights, with the libraries and data, before it trains; 0 if unknown or on GPUs
    process_bytes: int = 0

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


@dataclass(frozen=True)
class Work:
    """Measured costs of training a model."""

    # costs of layers in one pass, by its number of microbatches. A backward pass adds its
    # gradients to those before it.
    passes: Mapping[int, tuple[LayerCost, ...]]
    microbatches: int  # microbatches of a batch
    fused: bool = False  # whether a worker computes its microbatches in one pass
    update: float = 0.0  # seconds of the optimizer's update of all parameters
    overhead: float = 0.0  # seconds of a step besides all these
    core_load: float = 1.0  # cores used while computing; 0 for layers that sleep
    add: float = 0.0  # seconds to add the gradients of all parameters to another sum
    message_seconds: float = 1e-4  # seconds for which a worker is busy when it sends a message, or receives one
    pass_seconds: float = 0.0  # seconds of a pass of a pipeline's stage besides its layers
    half_pass_seconds: float = 0.0  # the same of each half of a split backward pass

    def layers(self, microbatches: int) -> tuple[LayerCost, ...]:
        """Return the cost of each layer in a pass over ``microbatches``, interpolated between measured numbers."""
        if microbatches in self.passes:
            return self.passes[microbatches]
        sizes = sorted(self.passes)
        if len(sizes) == 1:
            return _line(self.passes[sizes[0]], self.passes[sizes[0]], microbatches / sizes[0] - 1, scale=True)
        above = next((place for place, size in enumerate(sizes) if size > microbatches), len(sizes) - 1)
        low, high = sizes[max(above - 1, 0)], sizes[max(above, 1)]
        return _line(self.passes[low], self.passes[high], (microbatches - low) / (high - low))

    @property
    def add_bytes_per_second(self) -> float:
        """Bytes of a sum that a worker adds to another one in a second."""
        return self.parameter_bytes / self.add if self.add else math.inf

    @property
    def parameter_bytes(self) -> int:
        """Bytes of all weights."""
        return sum(layer.parameter_bytes for layer in self.passes[min(self.passes)])


def _line(
    low: Sequence[LayerCost], high: Sequence[LayerCost], part: float, scale: bool = False
) -> tuple[LayerCost, ...]:
    def between(one: float, other: float) -> float:
        return one * (1 + part) if scale else one + part * (other - one)

    return tuple(
        LayerCost(
            one.name,
            between(one.forward, other.forward),
            between(one.backward, other.backward),
            int(between(one.output_bytes, other.output_bytes)),
            one.parameter_bytes,
            int(between(one.kept_bytes, other.kept_bytes)),
        )
        for one, other in zip(low, high, strict=True)
    )
