"""What was measured of a model, as a file; and the plan file that follows from it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from paceline.schedule.balance import Cluster, Cut, LayerCost


@dataclass(frozen=True)
class Profile:
    """What was measured.

    Attributes:
        model: the name of its class.
        layers: what each costs.
        samples: of the microbatch that was measured.
        microbatches: of a step.
        link_bytes_per_second: between two workers; none: there was one worker only.
    """

    model: str
    layers: tuple[LayerCost, ...]
    samples: int
    microbatches: int
    link_bytes_per_second: float | None

    def cluster(self, workers: int, memory_bytes: float | None = None) -> Cluster:
        """Workers like those that were measured; without a measured link transfers are free."""
        link = self.link_bytes_per_second or float("inf")
        return Cluster(link, memory_bytes, workers, self.microbatches)


def write(profile: Profile, path: Path) -> None:
    """As JSON."""
    path.write_text(json.dumps(asdict(profile)))


def read(path: Path) -> Profile:
    """What :func:`write` wrote."""
    values = json.loads(path.read_text())
    return Profile(**{**values, "layers": tuple(LayerCost(**layer) for layer in values["layers"])})


def plan_text(profile: Profile, cut: Cut) -> str:
    """A plan file (TOML) that cuts the model so. A person may edit it."""
    times = ", ".join(f"{seconds * 1000:.2f}" for seconds in cut.seconds)
    names = ", ".join(f'"{layer.name}"' for layer in profile.layers)
    return "\n".join(
        (
            f"# {profile.model}, measured with microbatches of {profile.samples}: milliseconds of the stages: {times}",
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
