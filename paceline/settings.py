"""Pydantic models of all settings, one per group. :mod:`paceline.config` resolves their values."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator

from paceline.system.number_kinds import NonNegativeInt, PositiveFloat, PositiveInt, Seconds, Steps, number, whole
from paceline.system.wires import INTEGERS, PARTIAL_WIRES, checked, parsed, text_of

Exact = bool | Literal["fixed-point"]
"""Values of ``exact``. False: no bitwise reproducibility. True: tree reduction. ``fixed-point``: integer sums."""
Fraction = Annotated[float, Field(ge=0, lt=1), BeforeValidator(number)]
Part = Annotated[float, Field(gt=0, le=1), BeforeValidator(number)]


class _Group(BaseModel):
    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", frozen=True)


class CheckpointSettings(_Group):
    """Checkpoint settings: directory, interval and retention."""

    directory: Path | str | None = Field(
        None, description="directory of the checkpoints, or a URL; none: that of the run, else checkpoints/<script>"
    )
    every: PositiveInt | Literal["auto"] | None = Field(
        None, description="steps between saves; auto: the interval that costs least; none: only session.save()"
    )
    keep: PositiveInt = Field(2, description="how many checkpoints to keep")
    keep_hours: PositiveFloat | None = Field(
        None, description="remove checkpoints older than this, except the newest; none: keep them at any age"
    )
    background: bool | None = Field(
        None, description="save in the background; false: training waits; none: unless workers have shares of the state"
    )
    retry_seconds: Seconds = Field(300.0, description="how long to try again while the disk or object store fails")
    key_file: Path | None = Field(
        None, description="file with a secret that signs checkpoints: those that are not signed with it are refused"
    )
    mtbf_hours: PositiveFloat = Field(24.0, description="expected hours between two failures of the run, for auto")

    @field_validator("directory", mode="before")
    @classmethod
    def _path_or_url(cls, value: object) -> object:
        if isinstance(value, str):
            return value if "://" in value else Path(value)
        if isinstance(value, Path) and (found := re.match(r"(\w[\w+.-]+):/(?=[^/])", str(value))):
            raise ValueError(f"a Path cannot hold a URL; write {found[1]}://... as a string")
        return value


class WeightsSettings(_Group):
    """Initial weights from a file, folder, checkpoint or URL."""

    path: Path | str | None = Field(
        None, description="weights to start from: a .safetensors or .pt file, a folder of them, a checkpoint, or a URL"
    )
    strict: bool = Field(True, description="refuse weights that do not have all names of the model, or have others")
    rename: tuple[str, ...] = Field(
        (), description="beginnings of names in the file and in the model, as encoder.=backbone.; the longest counts"
    )
    skip: tuple[str, ...] = Field((), description="beginnings of names in the model that keep their initial values")
    key: str | None = Field(None, description="the key of the state_dict in a .pt file that holds more than that")

    @field_validator("path", mode="before")
    @classmethod
    def _path_or_url(cls, value: object) -> object:
        return Path(value) if isinstance(value, str) and "://" not in value else value

    @field_validator("rename", "skip", mode="before")
    @classmethod
    def _texts(cls, value: object) -> object:
        if isinstance(value, Mapping):
            return tuple(f"{old}={new}" for old, new in value.items())
        return tuple(part for part in value.split(",") if part) if isinstance(value, str) else value

    @field_validator("rename")
    @classmethod
    def _pairs(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for one in value:
            if one.count("=") != 1:
                raise ValueError(f"{one!r} is not two beginnings of names with = between them")
        return value


class AverageSettings(_Group):
    """Averaging of the weights over steps: exponential (EMA) or uniform (SWA)."""

    kind: Literal["ema", "swa"] | None = Field(
        None, description="keep an average of the weights: exponential (ema), or of equal parts (swa); none: keep none"
    )
    decay: Part = Field(0.999, description="ema: the part of the old average in the new one")
    after: NonNegativeInt = Field(0, description="steps before those that are averaged")
    every: PositiveInt = Field(1, description="steps from one to the next that is averaged")


class BackupSettings(_Group):
    """Settings of strategy ``backup``, whose steps do not wait for the slowest workers."""

    workers: NonNegativeInt | None = Field(
        None, description="how many workers a step does not wait for; none: 1 with strategy backup, else 0"
    )


class ServerSettings(_Group):
    """Settings of strategy ``parameter-server``."""

    mode: Literal["sync", "async", "bounded"] = Field(
        "sync", description="wait for all workers in each step; for none; or for those that are too far behind"
    )
    count: PositiveInt = Field(1, description="number of servers that share the parameters")
    dedicated: bool = Field(False, description="the first workers only serve; false: they also compute")
    copies: Literal[1, 2] = Field(
        2, description="on several machines: how many workers hold each server's part, so that one may be lost"
    )
    staleness: NonNegativeInt = Field(
        1, description="bounded: how many rounds (a step of each worker) the weights may be behind"
    )
    scale_lr: bool = Field(
        False, description="divide the learning rate of an update by 1 + the updates made since its weights were pulled"
    )
    drop_after: NonNegativeInt | None = Field(
        None, description="drop a gradient after more updates than this since its weights were pulled; none: never"
    )


class LocalSettings(_Group):
    """Settings of strategies ``diloco`` and ``local-sgd``, whose replicas of the model train independently."""

    every: PositiveInt = Field(8, description="steps between two outer steps")
    after: NonNegativeInt = Field(0, description="steps of synchronous training before that (post-local SGD)")
    replicas: PositiveInt = Field(4, description="replicas of the model, a divisor of microbatches")
    outer_lr: PositiveFloat = Field(0.7, description="diloco: learning rate of the outer steps")
    outer_momentum: Fraction = Field(0.9, description="diloco: Nesterov momentum of the outer steps")
    fragments: PositiveInt = Field(1, description="parts of the model, each with its own outer step in a period")
    delay: NonNegativeInt = Field(0, description="steps that go on while a fragment's outer step is on its way")
    mixing: Fraction = Field(0.0, description="share of its own weights that a replica keeps in an outer step")
    sites: bool = Field(False, description="a replica for each shard of Located data, from which only updates leave")
    sampled: PositiveFloat | None = Field(None, description="sites in a round: a number, or a part below 1; none: all")
    masked: bool = Field(False, description="sites: add updates up by secure aggregation, so that nobody sees one")
    threshold: PositiveInt | None = Field(None, description="masked: fewest sites in a sum; none: over two thirds")
    clip: PositiveFloat | None = Field(None, description="masked: largest norm of the update of a site; none: any")
    noise: PositiveFloat | None = Field(None, description="masked: deviation of noise in a sum, in multiples of clip")
    delta: Fraction = Field(1e-5, description="noise: delta of the privacy budget that the rounds have spent")


class PipelineSettings(BaseModel):
    """Settings of strategy ``pipeline``, which divides the model's layers among workers."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", frozen=True, coerce_numbers_to_str=True)

    schedule: Literal["layerwise", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "pipedream", "2bw"] = Field(
        "1f1b", description="in which order the stages compute the microbatches"
    )
    stages: PositiveInt | None = Field(None, description="number of stages; none: as many as the workers can hold")
    chunks: PositiveInt = Field(2, description="interleaved: how many stages each worker holds")
    cut: tuple[str, ...] | None = Field(
        None, description="the layers at which stages begin, except the first; none: balanced by measured times"
    )
    replicas: tuple[PositiveInt, ...] | None = Field(
        None, description="workers of each stage; none: the same for each, with one more for the first ones if needed"
    )
    recompute: bool = Field(False, description="recompute the activations of a stage in its backward pass")
    update_every: PositiveInt | None = Field(
        None, description="pipedream, 2bw: microbatches per update; none: those of a batch"
    )
    vertical_sync: bool = Field(False, description="pipedream: a microbatch uses the same weight version in all stages")
    flush_every: PositiveInt | None = Field(
        None, description="pipedream, 2bw: steps between flushes of the pipeline; none: only when needed"
    )

    @field_validator("cut", "replicas", mode="before")
    @classmethod
    def _parts(cls, value: object) -> object:
        if isinstance(value, int | float) and not isinstance(value, bool):  # a single number is a list of one
            return (value,)
        return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value


TRACKERS = ("comet", "csv", "mlflow", "tensorboard", "trackio", "wandb")
"""Tracker names in :mod:`paceline.adapters.trackers.registry`."""


class TrackingSettings(BaseModel):
    """Names and directories that the trackers use for the run."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", frozen=True, coerce_numbers_to_str=True)

    directory: Path | None = Field(
        None, description="directory of the trackers' files; none: trackers in that of the run, else in the present one"
    )
    project: str = Field("paceline", min_length=1, description="the project, or experiment, to which the run belongs")
    name: str | None = Field(None, description="name of the run; none: that of its directory, else of the script")

    @field_validator("name")
    @classmethod
    def _file_name(cls, value: str | None) -> str | None:
        if value is not None and (not value.strip() or "/" in value or len(value) > 200 or not value.isprintable()):
            raise ValueError("the name becomes that of a directory: at most 200 characters, without /")
        return value


class Settings(BaseModel):
    """All settings of a run, validated and immutable. Each field's description documents its meaning and default."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", frozen=True, coerce_numbers_to_str=True)

    strategy: str = Field("allreduce", description="who computes which microbatch, and how gradients are reduced")
    batch: PositiveInt | None = Field(None, description="samples per step over all workers")
    batch_per_worker: PositiveInt | None = Field(None, description="samples per step and worker, instead of batch")
    microbatches: Annotated[PositiveInt, Field(le=2**16)] | None = Field(
        None, description="microbatches per batch; none: 8, or fewer for a small batch"
    )
    shares: Literal["speed", "even"] = Field(
        "speed", description="how strategy stealing divides a batch among workers: by speed, or evenly"
    )
    reduction: Literal["auto", "tree", "collective"] = Field(
        "auto", description="who adds up gradients: the workers along a tree, or the all-reduce of the back end"
    )
    wire: Annotated[str, BeforeValidator(text_of)] = Field(
        "float32", description="format of gradients on the wire, also by module class: Embedding=bfloat16,default=int8"
    )
    transport: Literal["auto", "mpi"] = Field(
        "auto", description="what moves tensors between workers: mpi needs mpiexec; auto: what fits the devices"
    )
    shard: Literal["optimizer", "gradients", "parameters"] = Field(
        "parameters", description="what strategy sharded divides: the optimizer's state, gradients too, parameters too"
    )
    shard_copy: bool | None = Field(
        None, description="for strategy sharded: a second worker holds a copy of each slice; none: if elastic"
    )
    shard_within: Literal["machine"] | None = Field(
        None, description="for strategy sharded: divide the state within each machine; none: among all workers"
    )
    bucket_megabytes: PositiveFloat | None = Field(
        None,
        description="size of the gradient buckets that are sent together; none: along a tree 5 in shared memory, 5 to "
        "25 over the network, less where a link is slow; with collective 5 on CPUs and 25 on GPUs",
    )
    backup: BackupSettings = BackupSettings()
    server: ServerSettings = ServerSettings()
    local: LocalSettings = LocalSettings()
    pipeline: PipelineSettings = PipelineSettings()
    wire_ratio: Part = Field(0.05, description="randomk, topk: part of the gradients that a step sends, at most half")
    communication: Annotated[str, AfterValidator(checked)] = Field(
        "fixed", description="auto: buckets, and formats within tolerance, by measured times; or what a run has chosen"
    )
    tolerance: Literal["bits", "rounding", "convergent"] = Field(
        "bits", description="what communication=auto may change: no bit; rounding; or also how well the model learns"
    )
    wire_rank: PositiveInt = Field(4, description="powersgd: rank of the matrices that a step sends")
    seed: Annotated[int, Field(ge=0, lt=2**63), BeforeValidator(whole)] = Field(
        0, description="seed of the order of samples and of all random numbers in a step"
    )
    exact: Exact = Field(
        False, description="the same bits for any number of workers; fixed-point: by whole numbers, added in any order"
    )
    drop_last: bool = Field(False, description="drop the short batch at the end of an epoch")
    scale_lr: Literal["linear", "sqrt"] | None = Field(
        None, description="scale the learning rate with the number of workers; needs batch_per_worker"
    )
    warmup_steps: NonNegativeInt = Field(0, description="steps from the base learning rate up to the scaled one")
    clip_norm: Annotated[float, Field(gt=0), BeforeValidator(number)] | None = Field(
        None, description="clip gradients to this global norm"
    )
    autocast: Literal["bfloat16", "float16"] | None = Field(
        None, description="run the forward pass in this dtype; float16: with dynamic loss scaling"
    )
    recompute: tuple[str, ...] | Literal["auto"] = Field(
        (), description="module classes to recompute in the backward pass; auto: only what memory_gigabytes demands"
    )
    memory_gigabytes: PositiveFloat | None = Field(None, description="memory of each worker; none: not checked")
    compile: bool = Field(False, description="compile the model with torch.compile")
    workers_per_loader: Annotated[NonNegativeInt, Field(le=256)] = Field(
        0, description="loader processes per worker; 0: the worker loads itself"
    )
    checkpoint: CheckpointSettings = CheckpointSettings()
    weights: WeightsSettings = WeightsSettings()
    average: AverageSettings = AverageSettings()
    resume: str | None = Field(
        None, description="auto: from the newest complete checkpoint, if any; or the path of a checkpoint"
    )
    trackers: tuple[str, ...] = Field(
        (), description="who records metrics: comet, csv, mlflow, tensorboard, trackio, wandb; with commas for several"
    )
    tracking: TrackingSettings = TrackingSettings()
    nonfinite: Literal["stop", "skip"] = Field(
        "stop", description="on a NaN or infinite loss: stop the run, or skip the step"
    )
    missing_gradient: Literal["stop", "zero"] = Field(
        "stop", description="if only some microbatches use a parameter: stop, or count its gradient as zero"
    )
    audit: PositiveInt | Literal["auto", "off"] = Field(
        "auto", description="steps that compute a microbatch twice and compare: auto, off, or also each of so many"
    )
    audit_action: Literal["stop", "warn"] | None = Field(
        None, description="what follows if the two differ; none: stop with exact, else warn"
    )
    threads: Annotated[PositiveInt, Field(le=1024)] | None = Field(
        None, description="threads per worker; none: 1 with exact, else cores / workers on this machine"
    )
    events: Literal["minimal", "steps", "operations"] = Field(
        "steps", description="what is recorded: progress and failures, each step too, each transfer and wait too"
    )
    profile_steps: Steps | None = Field(None, description="steps that torch's profiler records, such as 100 or 100:103")
    timeout_seconds: Seconds = Field(600.0, description="how long a worker waits for another")
    hang_seconds: Seconds | None = Field(
        None,
        description="after how long a worker that the others wait for is named, and dropped if the run is elastic; "
        "none: 30 seconds or ten steps, whichever is longer",
    )

    @property
    def fixed_point(self) -> bool:
        """Whether gradients are summed as integers (``exact="fixed-point"``, or a format of integers in ``wire``)."""
        return self.exact == "fixed-point" or INTEGERS.issuperset(self.wires.values())

    @property
    def wires(self) -> dict[str, str]:
        """Format of each module class in ``wire``. ``default`` is the format of all other parameters."""
        return parsed(self.wire)

    @property
    def facts(self) -> dict[str, int | str]:
        """Settings that must be the same for the same bits after a resume."""
        form = f"{self.wire}, {self.wire_ratio:g}, rank {self.wire_rank}" if self.keeps_errors else self.wire
        return {"exact": self.exact, "wire": "chosen" if self.chooses_wire else form}

    @property
    def chooses_wire(self) -> bool:
        """Whether the format of gradients may change during the run."""
        return self.communication != "fixed" and (self.communication != "auto" or self.tolerance != "bits")

    @property
    def keeps_errors(self) -> bool:
        """Whether each microbatch keeps the part of its gradient that was not sent, for later steps."""
        return not {*PARTIAL_WIRES}.isdisjoint(self.wires.values())

    @property
    def stops_at_difference(self) -> bool:
        """Whether the run stops if a microbatch that is computed twice gives different results."""
        return self.audit_action == "stop" or (self.audit_action is None and bool(self.exact))

    @property
    def along_tree(self) -> bool:
        """Whether gradients are summed along the canonical tree (``exact=True`` without a format of integers)."""
        return self.exact is True and not self.fixed_point

    @field_validator("checkpoint", "weights", "average", mode="before")
    @classmethod
    def _one_value(cls, value: object, info: ValidationInfo) -> object:
        return {SHORT[info.field_name or ""]: value} if isinstance(value, str | Path | None) else value

    @field_validator("trackers", mode="before")
    @classmethod
    def _tracker_names(cls, value: object) -> object:
        names = [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value
        if not isinstance(names, list | tuple | set) or not all(isinstance(name, str) for name in names):
            return names
        for name in names:
            if name not in TRACKERS:
                raise ValueError(f"there is no tracker {name!r}; the trackers are {', '.join(TRACKERS)}")
        return tuple(dict.fromkeys(names))

    @field_validator("recompute", mode="before")
    @classmethod
    def _class_names(cls, value: object) -> object:
        if isinstance(value, str) and value != "auto":
            return tuple(part for part in value.split(",") if part)
        if isinstance(value, list | tuple | set):
            return tuple(item.__name__ if isinstance(item, type) else item for item in value)
        return value


STRATEGIES = (
    *("allreduce", "auto", "backup", "diloco", "hogwild", "local-sgd"),
    *("parameter-server", "pipeline", "sharded", "single", "stealing"),
)
"""Strategy names in :mod:`paceline.strategies.registry`, for code that does not import torch."""
ONE_MACHINE = frozenset({"hogwild"})
"""Strategies whose workers must all run on one machine."""

GROUPS: dict[str, type[BaseModel]] = {
    "checkpoint": CheckpointSettings,
    "backup": BackupSettings,
    "server": ServerSettings,
    "local": LocalSettings,
    "pipeline": PipelineSettings,
    "weights": WeightsSettings,
    "average": AverageSettings,
    "tracking": TrackingSettings,
}
"""Settings groups, by the name of their field in :class:`Settings`."""
SHORT = {"checkpoint": "directory", "weights": "path", "average": "kind"}
"""Groups that accept a plain value for one of their fields: ``checkpoint="dir"`` sets ``checkpoint.directory``."""
