"""The runs whose bits are kept: what is trained, how, and on which workers. Nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Case:
    """One training run.

    Attributes:
        workers: number of processes that train.
        model: name of the model in ``models``.
        settings: of ``paceline.start``.
        network: whether each worker counts as alone on its machine, so that all bytes go over the network.
        resumed: number of new processes that continue from a checkpoint after training stops in the middle. 0 for none.
    """

    workers: int
    model: str
    settings: dict[str, Any] = field(default_factory=dict)
    network: bool = False
    resumed: int = 0

    @property
    def name(self) -> str:
        """What is printed for it."""
        words = [self.model, f"{self.workers} workers" + (" over the network" if self.network else "")]
        words += [f"{key}={value}" for key, value in _flat(self.settings)]
        return ", ".join(words) + (f", resumed on {self.resumed}" if self.resumed else "")


def _flat(settings: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """The settings as ``--set`` takes them; those that are false or none are left out."""
    found: list[tuple[str, str]] = []
    for key, value in settings.items():
        if isinstance(value, dict):
            found += _flat(value, f"{key}.")
        elif isinstance(value, tuple):
            found.append((prefix + key, "/".join(map(str, value))))
        elif value is not None and value is not False:
            found.append((prefix + key, str(value)))
    return found


STEPS = 9
MODELS = ("mlp", "convnet", "transformer")
CUTS = {"mlp": ("1", "2", "4"), "convnet": ("3", "4", "7"), "transformer": ("blocks.0", "blocks.1", "norm")}


def pipeline(model: str, workers: int, schedule: str, stages: int | None = None, **more: Any) -> Case:
    """A pipeline with a given cut; synchronous schedules are exact."""
    groups = stages or workers * (2 if schedule in ("interleaved", "zb-v") else 1)
    names = CUTS[model]
    cut = {2: names[1:2], 3: names[:2], 4: names}[groups]
    settings = {"schedule": schedule, "cut": cut, **more}
    return Case(
        workers,
        model,
        {"strategy": "pipeline", "exact": schedule not in ("pipedream", "2bw"), "pipeline": settings},
    )


def server(workers: int, model: str, exact: bool = True, **settings: Any) -> Case:
    """Parameter servers."""
    return Case(workers, model, {"strategy": "parameter-server", "exact": exact, "server": settings})


def exact(workers: int, model: str, strategy: str = "allreduce", network: bool = False, **more: Any) -> Case:
    return Case(workers, model, {"strategy": strategy, "exact": True, **more}, network)


def fast(workers: int, model: str, strategy: str = "allreduce", network: bool = False, **more: Any) -> Case:
    return Case(workers, model, {"strategy": strategy, **more}, network)


CASES = [
    # one worker
    *(exact(1, model, "single") for model in (*MODELS, "double", "gated", "indivisible", "dropped")),
    exact(1, "transformer", "single", autocast="bfloat16"),
    exact(1, "transformer", "single", recompute=("Block",)),
    exact(1, "mlp", "allreduce", warmup_steps=4, scale_lr="linear", batch=None, batch_per_worker=64),
    exact(1, "mlp", "stealing"),
    fast(1, "mlp", "single"),
    fast(1, "convnet", "single", microbatches=4),
    fast(1, "transformer", "local-sgd", local={"every": 3}),
    *(fast(1, model, "parameter-server", server={"mode": "async"}) for model in MODELS),
    fast(1, "transformer", "parameter-server", server={"mode": "bounded", "staleness": 0, "scale_lr": True}),
    fast(1, "convnet", "hogwild"),
    # data parallel
    *(exact(workers, model) for workers in (2, 3, 4) for model in MODELS),
    exact(3, "indivisible"),
    exact(2, "dropped"),
    exact(4, "gated"),
    exact(2, "double"),
    exact(3, "transformer", autocast="bfloat16"),
    exact(2, "transformer", recompute=("Block",)),
    exact(2, "mlp", warmup_steps=4, scale_lr="linear", batch=None, batch_per_worker=32),
    *(fast(workers, model) for workers in (2, 3) for model in MODELS),
    fast(2, "mlp", microbatches=4),
    *(exact(workers, model, "stealing") for workers in (2, 3) for model in MODELS),
    exact(4, "transformer", "stealing", shares="even"),
    exact(3, "convnet", "auto"),
    exact(2, "transformer", "auto"),
    *(exact(3, model, "backup", backup={"workers": 0}) for model in MODELS),
    *(fast(workers, "transformer", "local-sgd", local={"every": 3}) for workers in (2, 3)),
    fast(4, "convnet", "local-sgd", local={"every": 2, "after": 3}),
    # parameter servers
    *(server(workers, model) for workers in (2, 3) for model in MODELS),
    *(server(3, model, count=2) for model in MODELS),
    server(2, "transformer", dedicated=True),
    server(4, "transformer", dedicated=True, count=2),
    server(4, "convnet", dedicated=True),
    server(2, "mlp", exact=False),
    fast(2, "convnet", "parameter-server", server={"mode": "async", "dedicated": True}),
    # pipelines
    *(pipeline(model, 2, schedule) for schedule in ("layerwise", "gpipe", "1f1b") for model in MODELS),
    *(pipeline(model, 2, schedule) for schedule in ("interleaved", "zb-v") for model in MODELS),
    *(pipeline(model, 2, "zb-h1") for model in MODELS),
    pipeline("transformer", 3, "1f1b"),
    pipeline("transformer", 4, "zb-h1"),
    pipeline("transformer", 4, "1f1b", stages=2),
    pipeline("convnet", 4, "gpipe", stages=2),
    pipeline("transformer", 3, "1f1b", stages=2, replicas=(2, 1)),
    pipeline("convnet", 3, "gpipe", stages=2, replicas=(1, 2)),
    pipeline("transformer", 2, "1f1b", recompute=True),
    exact(2, "transformer", "pipeline"),
    *(pipeline(model, 2, schedule) for schedule in ("pipedream", "2bw") for model in MODELS),
    pipeline("transformer", 3, "pipedream"),
    pipeline("transformer", 3, "pipedream", update_every=2, vertical_sync=True),
    pipeline("mlp", 3, "pipedream", update_every=1, flush_every=4),
    pipeline("mlp", 3, "pipedream", stages=2, replicas=(2, 1)),
    pipeline("transformer", 3, "2bw"),
    # over the network
    *(exact(workers, model, network=True) for workers in (2, 3) for model in MODELS),
    *(fast(2, model, network=True) for model in MODELS),
    exact(3, "transformer", "stealing", network=True),
    fast(3, "transformer", "local-sgd", network=True, local={"every": 3}),
    *(
        Case(2, "transformer", pipeline("transformer", 2, schedule).settings, network=True)
        for schedule in ("1f1b", "zb-v", "pipedream")
    ),
    # resumed
    Case(2, "convnet", {"strategy": "allreduce", "exact": True}, resumed=3),
    Case(3, "transformer", {"strategy": "stealing", "exact": True}, resumed=1),
    Case(2, "transformer", pipeline("transformer", 2, "1f1b").settings, resumed=2),
    Case(2, "transformer", {"strategy": "parameter-server", "exact": True}, resumed=2),
    Case(2, "transformer", {"strategy": "local-sgd", "local": {"every": 3}}, resumed=2),
    Case(2, "transformer", pipeline("transformer", 2, "pipedream").settings, resumed=2),
]
EXAMPLES = [("mlp", 1), ("mlp", 3), ("convnet", 1), ("convnet", 2), ("gpt", 1), ("gpt", 2)]
