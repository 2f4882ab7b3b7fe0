"""Pydantic models of all settings, one per group. :mod:`paceline.config` resolves their values."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator

from paceline.system.number_kinds import NonNegativeInt, PositiveFloat, PositiveInt, Seconds, Steps, number, whole
from paceline.system.wires import INTEGERS, OUTER, PARTIAL_WIRES, checked, parsed, text_of

Exact = bool | Literal["fixed-point"]
"""Values of ``exact``. False: no bitwise reproducibility. True: tree reduction. ``fixed-point``: integer sums."""
Fraction = Annotated[float, Field(ge=0, lt=1), BeforeValidator(number)]
Part = Annotated[float, Field(gt=0, le=1), BeforeValidator(number)]


def _path_or_url(value: object) -> object:
    if isinstance(value, str):
        return value if "://" in value else Path(value)
    if isinstance(value, Path) and (found := re.match(r"(\w[\w+.-]+):/(?=[^/])", str(value))):
        raise ValueError(f"a Path cannot hold a URL; write {found[1]}://... as a string")
    return value


def _split(value: object) -> object:
    """Split a text at commas."""
    return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value


Location = Annotated[Path | str, BeforeValidator(_path_or_url)]
Texts = Annotated[tuple[str, ...], BeforeValidator(_split)]


class _Group(BaseModel):
    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", frozen=True)


class CheckpointSettings(_Group):
    """Checkpoint settings: directory, interval and retention."""

    directory: Location | None = Field(
        None, description="directory of the checkpoints, or a URL; none: the run's, otherwise checkpoints/<script>"
    )
    every: PositiveInt | Literal["auto"] | None = Field(
        None, description="steps between saves; auto: the interval that costs least; none: only session.save()"
    )
    keep: PositiveInt = Field(2, description="number of checkpoints to keep")
    keep_hours: PositiveFloat | None = Field(
        None, description="remove checkpoints older than this, except the newest; none: keep them at any age"
    )
    background: bool | None = Field(
        None,
        description="save while training continues; false: training waits; none: it waits if workers divide the state",
    )
    retry_seconds: Seconds = Field(300.0, description="timeout for retries while the disk or object store fails")
    key_file: Path | None = Field(
        None, description="file with a secret that signs checkpoints; other checkpoints are refused"
    )
    mtbf_hours: PositiveFloat = Field(24.0, description="expected hours between two failures of the run, for auto")


class WeightsSettings(_Group):
    """Initial weights from a file, folder, checkpoint or URL."""

    path: Location | None = Field(
        None, description="weights to start from: a .safetensors or .pt file, a folder of them, a checkpoint, or a URL"
    )
    strict: bool = Field(True, description="refuse weights that lack names of the model or have other names")
    rename: Texts = Field(
        (), description="name prefixes in the file and in the model: encoder.=backbone.; the longest counts"
    )
    skip: Texts = Field((), description="name prefixes of parameters that keep their initial values")
    key: str | None = Field(None, description="key of the state_dict in a .pt file that holds more")

    @field_validator("rename", mode="before")
    @classmethod
    def _texts(cls, value: object) -> object:
        return tuple(f"{old}={new}" for old, new in value.items()) if isinstance(value, Mapping) else value

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
        None, description="keep an average of the weights: exponential (ema), or with equal weights (swa)"
    )
    decay: Part = Field(0.999, description="ema: weight of the old average in the new one")
    after: NonNegativeInt = Field(0, description="steps before averaging starts")
    every: PositiveInt = Field(1, description="steps between two averaged steps")


class BackupSettings(_Group):
    """Settings of strategy ``backup``, whose steps do not wait for the slowest workers."""

    workers: NonNegativeInt | None = Field(
        None, description="number of workers that a step does not wait for; none: 1 with strategy backup"
    )


class ServerSettings(_Group):
    """Settings of strategy ``parameter-server``."""

    mode: Literal["sync", "async", "bounded"] = Field(
        "sync", description="wait for all workers (sync), for none (async), or for workers too far behind (bounded)"
    )
    count: PositiveInt = Field(1, description="number of servers that share the parameters")
    dedicated: bool = Field(False, description="the first workers only serve; false: they compute as well")
    copies: Literal[1, 2] = Field(
        2, description="on several machines: workers that hold each server's shard; with 2, one may be lost"
    )
    staleness: NonNegativeInt = Field(1, description="bounded: number of rounds by which the weights may lag behind")
    scale_lr: bool = Field(
        False, description="divide the learning rate of an update by 1 + the updates since its weights were pulled"
    )
    drop_after: NonNegativeInt | None = Field(
        None, description="drop a gradient if more than this many updates came since its pull; none: never"
    )


class LocalSettings(_Group):
    """Settings of strategies ``diloco`` and ``local-sgd``, whose replicas of the model train independently."""

    every: PositiveInt = Field(8, description="inner steps between two outer steps")
    after: NonNegativeInt = Field(0, description="steps of synchronous training before local training")
    replicas: PositiveInt = Field(4, description="replicas of the model, a divisor of microbatches")
    outer_lr: PositiveFloat = Field(0.7, description="diloco: learning rate of the outer steps")
    outer_momentum: Fraction = Field(0.9, description="diloco: Nesterov momentum of the outer steps")
    fragments: PositiveInt = Field(1, description="fragments of the model, each with its own outer step in a period")
    delay: NonNegativeInt = Field(0, description="inner steps while a fragment is on its way")
    mixing: Fraction = Field(0.0, description="share of its own weights that a replica keeps when a fragment lands")
    uneven: bool = Field(False, description="each worker makes as many inner steps as it can, not its share of a batch")
    adaptive: bool = Field(False, description="shorten the periods, of at most local.every steps, as the loss falls")
    quorum: PositiveInt | None = Field(None, description="replicas that an outer step needs; none: all")
    grace_seconds: Seconds = Field(10.0, description="seconds that an outer step with a quorum waits for late replicas")
    sites: bool = Field(False, description="a replica for each shard of Located data, from which only updates leave")
    sampled: PositiveFloat | None = Field(None, description="sites in a round: a number, or a part below 1; none: all")
    masked: bool = Field(False, description="add up updates by secure aggregation, so that no party sees a single one")
    threshold: PositiveInt | None = Field(None, description="fewest sites in a masked sum; none: over two thirds")
    clip: PositiveFloat | None = Field(None, description="largest norm of an update in a masked sum; none: any")
    noise: PositiveFloat | None = Field(None, description="deviation of noise in a masked sum, in multiples of clip")
    delta: Fraction = Field(1e-5, description="delta of the privacy budget that the rounds have spent")


class PipelineSettings(BaseModel):
    """Settings of strategy ``pipeline``, which divides the model's layers among workers."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", frozen=True, coerce_numbers_to_str=True)

    schedule: Literal["layerwise", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "pipedream", "2bw"] = Field(
        "1f1b", description="order in which the stages compute the microbatches"
    )
    stages: PositiveInt | None = Field(None, description="number of stages; none: as many as the workers can hold")
    chunks: PositiveInt = Field(2, description="interleaved: number of stages on each worker")
    cut: tuple[str, ...] | None = Field(
        None, description="layers at which stages begin, except the first; none: where measured times are balanced"
    )
    replicas: tuple[PositiveInt, ...] | None = Field(
        None, description="workers of each stage; none: the same number, and one more for the first stages if needed"
    )
    recompute: bool = Field(False, description="recompute the activations of a stage in its backward pass")
    update_every: PositiveInt | None = Field(
        None, description="pipedream, 2bw: microbatches per update; none: as many as a batch has"
    )
    vertical_sync: bool = Field(False, description="pipedream: a microbatch uses weights of one age in all stages")
    flush_every: PositiveInt | None = Field(
        None, description="pipedream, 2bw: steps between drains of the pipeline; none: only when needed"
    )

    @field_validator("cut", "replicas", mode="before")
    @classmethod
    def _parts(cls, value: object) -> object:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return (value,) if is_number else _split(value)


TRACKERS = ("comet", "csv", "mlflow", "tensorboard", "trackio", "wandb")
"""Tracker names in :mod:`paceline.adapters.trackers.registry`."""


class TrackingSettings(BaseModel):
    """Names and directories that the trackers use for the run."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", frozen=True, coerce_numbers_to_str=True)

    directory: Path | None = Field(None, description="of the trackers' files; none: trackers in the run's, or here")
    project: str = Field("paceline", min_length=1, description="project, or experiment, of the run")
    name: str | None = Field(None, description="name of the run; none: that of its directory or of the script")

    @field_validator("name")
    @classmethod
    def _file_name(cls, value: str | None) -> str | None:
        if value is not None and (not value.strip() or "/" in value or len(value) > 200 or not value.isprintable()):
            raise ValueError("the name becomes that of a directory: at most 200 characters, without /")
        return value


class Settings(BaseModel):
    """All settings of a run, validated and immutable. Each field's description documents its meaning and default."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", frozen=True, coerce_numbers_to_str=True)

    strategy: str = Field("allreduce", description="which worker computes what, and how gradients are reduced")
    batch: PositiveInt | None = Field(None, description="samples per step over all workers")
    batch_per_worker: PositiveInt | None = Field(None, description="samples per step and worker, instead of batch")
    microbatches: Annotated[PositiveInt, Field(le=2**16)] | None = Field(
        None, description="microbatches per batch; none: 8, or fewer for a small batch"
    )
    shares: Literal["speed", "even"] = Field(
        "speed", description="how stealing first divides a batch among the workers: by their speed, or evenly"
    )
    reduction: Literal["auto", "tree", "collective"] = Field(
        "auto", description="how gradients are added up: along a tree, or by the all-reduce of the back end"
    )
    wire: Annotated[str, BeforeValidator(text_of)] = Field(
        "float32", description="format of gradients on the wire, also by module class: Embedding=bfloat16,default=int8"
    )
    transport: Literal["auto", "mpi"] = Field(
        "auto", description="what moves tensors: MPI, under mpiexec; auto: shared memory and gloo, or NCCL"
    )
    shard: Literal["optimizer", "gradients", "parameters"] = Field(
        "parameters", description="state that sharded divides: the optimizer's, also gradients, or also parameters"
    )
    shard_copy: bool | None = Field(
        None, description="sharded: a second worker keeps a copy of each slice; none: only in a run with --elastic"
    )
    shard_within: Literal["machine"] | None = Field(
        None, description="sharded: divide the state among the workers of each machine; none: among all"
    )
    bucket_megabytes: PositiveFloat | None = Field(
        None,
        description="size of the gradient buckets that are sent together; none: along a tree 5 in shared memory (2.6 "
        "if they are sharded), 5 to 25 over the network, less for a slow link; with collective 5 on CPUs, 25 on GPUs",
    )
    backup: BackupSettings = BackupSettings()
    server: ServerSettings = ServerSettings()
    local: LocalSettings = LocalSettings()
    pipeline: PipelineSettings = PipelineSettings()
    wire_ratio: Part = Field(0.05, description="randomk, topk, topk-2bit: part of the gradients that a step sends")
    communication: Annotated[str, AfterValidator(checked)] = Field(
        "fixed", description="auto: buckets, and formats within tolerance, by measured times; or what a run has chosen"
    )
    tolerance: Literal["bits", "rounding", "convergent"] = Field(
        "bits", description="changes by communication=auto: no bit; rounding; or also the quality of the model"
    )
    wire_rank: PositiveInt = Field(4, description="powersgd: rank of the matrices that a step sends")
    seed: Annotated[int, Field(ge=0, lt=2**63), BeforeValidator(whole)] = Field(
        0, description="seed of the sample order and of all random numbers in a step, but not of initial weights"
    )
    exact: Exact = Field(
        False, description="the same bits for any number of workers; fixed-point: by sums of whole numbers"
    )
    drop_last: bool = Field(False, description="drop the short batch at the end of an epoch")
    scale_lr: Literal["linear", "sqrt"] | None = Field(
        None, description="scale the learning rate with the number of workers; needs batch_per_worker"
    )
    warmup_steps: NonNegativeInt = Field(0, description="steps from the base learning rate up to the scaled one")
    clip_norm: Annotated[float, Field(gt=0), BeforeValidator(number)] | None = Field(
        None, description="clip the mean gradient to this norm over all parameters"
    )
    autocast: Literal["bfloat16", "float16"] | None = Field(
        None, description="run the forward pass in this dtype; float16: with dynamic loss scaling"
    )
    recompute: tuple[str, ...] | Literal["auto"] = Field(
        (), description="module classes to recompute in the backward pass; auto: only what memory_gigabytes demands"
    )
    memory_gigabytes: PositiveFloat | None = Field(None, description="memory of a worker, in 10⁹ bytes; none: any")
    compile: bool = Field(False, description="compile the model with torch.compile")
    workers_per_loader: Annotated[NonNegativeInt, Field(le=256)] = Field(
        0, description="loader processes per worker; 0: the worker itself loads"
    )
    checkpoint: CheckpointSettings = CheckpointSettings()
    weights: WeightsSettings = WeightsSettings()
    average: AverageSettings = AverageSettings()
    resume: str | None = Field(
        None, description="auto: from the newest complete checkpoint if there is one; or the path of a checkpoint"
    )
    trackers: tuple[str, ...] = Field(
        (), description="recorders of metrics: comet, csv, mlflow, tensorboard, trackio, wandb; with commas between"
    )
    tracking: TrackingSettings = TrackingSettings()
    nonfinite: Literal["stop", "skip"] = Field("stop", description="NaN or infinite loss: stop, or skip the step")
    missing_gradient: Literal["stop", "zero"] = Field(
        "stop", description="if only some microbatches use a parameter: stop, or count its gradient as zero"
    )
    audit: PositiveInt | Literal["auto", "off"] = Field(
        "auto", description="audited steps, which compute a microbatch twice; a number adds every N-th step"
    )
    audit_action: Literal["stop", "warn"] | None = Field(
        None, description="if the two results of an audit differ; none: stop with exact, otherwise warn"
    )
    threads: Annotated[PositiveInt, Field(le=1024)] | None = Field(
        None, description="threads per worker; none: 1 with exact, otherwise the cores divided by the machine's workers"
    )
    events: Literal["minimal", "steps", "operations"] = Field(
        "steps", description="records of a run: progress and failures, also each step, or also each transfer and wait"
    )
    profile_steps: Steps | None = Field(None, description="steps that torch's profiler records, such as 100 or 100:103")
    timeout_seconds: Seconds = Field(600.0, description="longest time that a worker waits for another")
    hang_seconds: Seconds | None = Field(
        None,
        description="time after which a worker that others wait for is named, and dropped if elastic; "
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
        whole = {*PARTIAL_WIRES, OUTER}.isdisjoint(self.wires.values())
        form = self.wire if whole else f"{self.wire}, {self.wire_ratio:g}, rank {self.wire_rank}"
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
        return _split(value)

    @field_validator("trackers")
    @classmethod
    def _known_trackers(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if name not in TRACKERS:
                raise ValueError(f"there is no tracker {name!r}; the trackers are {', '.join(TRACKERS)}")
        return tuple(dict.fromkeys(names))

    @field_validator("recompute", mode="before")
    @classmethod
    def _class_names(cls, value: object) -> object:
        if isinstance(value, list | tuple | set):
            return tuple(item.__name__ if isinstance(item, type) else item for item in value)
        return value if value == "auto" else _split(value)


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
