"""What can be set, as one record for each concern; :mod:`paceline.config` says where a value comes from."""

from __future__ import annotations

import re
from numbers import Integral
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

import pydantic
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator
from pydantic_core import PydanticKnownError


def _whole(value: object) -> object:
    """Pydantic alone takes True and 1.0 for 1; a text may be that of a number."""
    if isinstance(value, bool) or not isinstance(value, Integral | str):
        raise PydanticKnownError("int_type")
    return value


def _number(value: object) -> object:
    """Pydantic alone takes True for 1.0."""
    if isinstance(value, bool):
        raise PydanticKnownError("float_type")
    return value


PositiveInt = Annotated[pydantic.PositiveInt, BeforeValidator(_whole)]
NonNegativeInt = Annotated[pydantic.NonNegativeInt, BeforeValidator(_whole)]
PositiveFloat = Annotated[pydantic.PositiveFloat, BeforeValidator(_number)]


class CheckpointSettings(BaseModel):
    """Where checkpoints go, how often, and how many stay."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    directory: Path | str | None = Field(
        None, description="folder of the checkpoints, or a URL; the run's own folder when started by paceline run"
    )
    every: PositiveInt | Literal["auto"] | None = Field(
        None, description="save after every so many steps; auto: as often as is worth it; none: only session.save()"
    )
    keep: PositiveInt = Field(2, description="how many of the newest checkpoints stay")
    keep_hours: PositiveFloat | None = Field(
        None, description="remove checkpoints older than this, but never the newest; none: at any age"
    )
    background: bool = Field(True, description="save while training goes on; false: training waits for each save")
    mtbf_hours: PositiveFloat = Field(24.0, description="expected hours between two failures of the run, for auto")

    @field_validator("directory", mode="before")
    @classmethod
    def _path_or_url(cls, value: object) -> object:
        if isinstance(value, str):
            return value if "://" in value else Path(value)
        if isinstance(value, Path) and (found := re.match(r"(\w[\w+.-]+):/(?=[^/])", str(value))):
            raise ValueError(f"a Path cannot hold a URL; write {found[1]}://... as text")
        return value


class BackupSettings(BaseModel):
    """Backup workers: a step does not wait for the last ones."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    workers: NonNegativeInt | None = Field(
        None, description="how many workers a step does not wait for; none: 1 with strategy backup, else 0"
    )
    late: Literal["return", "lose"] = Field(
        "return", description="what becomes of the samples of late workers: back into the epoch, or left out of it"
    )


class ServerSettings(BaseModel):
    """Parameter servers."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    mode: Literal["sync", "async", "bounded"] = Field(
        "sync", description="wait for all workers in each step; for none; or for those that are too far behind"
    )
    count: PositiveInt = Field(1, description="how many servers share the parameters")
    dedicated: bool = Field(False, description="the first workers only serve; false: they compute as well")
    staleness: NonNegativeInt = Field(
        1, description="bounded: by how many rounds (a step of each worker) the weights used may lag behind"
    )
    scale_lr: bool = Field(
        False, description="divide the learning rate of an update by 1 + the updates made since its weights were pulled"
    )
    drop_after: NonNegativeInt | None = Field(
        None, description="drop a gradient when more updates than this were made since; none: never"
    )


class LocalSettings(BaseModel):
    """Local averaging."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    every: PositiveInt = Field(8, description="average the models after so many steps")
    after: NonNegativeInt = Field(0, description="steps of synchronous training before that (post-local SGD)")


class PipelineSettings(BaseModel):
    """Models across workers."""

    model_config = ConfigDict(extra="forbid", frozen=True, coerce_numbers_to_str=True)

    schedule: Literal["layerwise", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "pipedream", "2bw"] = Field(
        "1f1b", description="in which order the stages compute the microbatches"
    )
    stages: PositiveInt | None = Field(
        None, description="into how many stages the model is cut; none: as many as the workers can hold"
    )
    chunks: PositiveInt = Field(2, description="interleaved: how many stages each worker holds")
    cut: tuple[str, ...] | None = Field(
        None, description="the layers at which stages begin, except the first; none: where measured times are balanced"
    )
    replicas: tuple[PositiveInt, ...] | None = Field(
        None, description="how many workers hold each stage; none: as many for each, the first ones one more if need be"
    )
    memory_gigabytes: PositiveFloat | None = Field(
        None, description="of each worker for its stages: weights, optimizer, activations; none: not checked"
    )
    recompute: bool = Field(False, description="compute the activations of a stage again in its backward pass")
    update_every: PositiveInt | None = Field(
        None, description="pipedream, 2bw: microbatches of an update; none: those of a batch"
    )
    vertical_sync: bool = Field(False, description="pipedream: a microbatch uses weights of the same age in all stages")
    flush_every: PositiveInt | None = Field(
        None, description="pipedream, 2bw: let the pipeline run empty after so many steps; none: only when it must"
    )

    @field_validator("cut", "replicas", mode="before")
    @classmethod
    def _parts(cls, value: object) -> object:
        if isinstance(value, int | float) and not isinstance(value, bool):  # one number is a list of one
            return (value,)
        return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value


class Settings(BaseModel):
    """How to train; see each field's description."""

    model_config = ConfigDict(extra="forbid", frozen=True, coerce_numbers_to_str=True)

    strategy: str = Field("allreduce", description="who computes which microbatch and how gradients come together")
    batch: PositiveInt | None = Field(None, description="samples per step over all workers")
    batch_per_worker: PositiveInt | None = Field(None, description="samples per step and worker, instead of batch")
    microbatches: PositiveInt | None = Field(
        None, description="into how many microbatches a batch is cut; none: 8, or fewer for a small batch"
    )
    shares: Literal["speed", "even"] = Field(
        "speed", description="how strategy stealing cuts a batch between workers: by their speed, or evenly"
    )
    backup: BackupSettings = BackupSettings()
    server: ServerSettings = ServerSettings()
    local: LocalSettings = LocalSettings()
    pipeline: PipelineSettings = PipelineSettings()
    seed: NonNegativeInt = Field(0, description="of the order of samples and of all randomness inside a step")
    exact: bool = Field(False, description="the same bits for any number of workers")
    drop_last: bool = Field(False, description="leave out the short batch at the end of an epoch")
    scale_lr: Literal["linear", "sqrt"] | None = Field(
        None, description="scale the learning rate with the number of workers; needs batch_per_worker"
    )
    warmup_steps: NonNegativeInt = Field(0, description="steps from the base learning rate up to the scaled one")
    clip_norm: PositiveFloat | None = Field(None, description="clip gradients to this global norm")
    autocast: Literal["bfloat16"] | None = Field(None, description="run the forward pass in this type")
    recompute: tuple[str, ...] = Field(
        (), description="module classes whose activations are computed again in the backward pass"
    )
    compile: bool = Field(False, description="compile the model with torch.compile")
    workers_per_loader: NonNegativeInt = Field(
        0, description="processes that load data for each worker; 0: the worker itself"
    )
    checkpoint: CheckpointSettings = CheckpointSettings()
    resume: str | None = Field(
        None, description="auto: from the newest complete checkpoint if there is one; or the path of a checkpoint"
    )
    nonfinite: Literal["stop", "skip"] = Field(
        "stop", description="what a NaN or infinite loss does to the run or to the step"
    )
    missing_gradient: Literal["stop", "zero"] = Field(
        "stop", description="what to do about a parameter that only some microbatches use"
    )
    threads: PositiveInt | None = Field(
        None, description="threads of each worker; none: 1 with exact, else cores / workers on this machine"
    )
    timeout_seconds: PositiveFloat = Field(600.0, description="how long a worker waits for another one")
    hang_seconds: PositiveFloat | None = Field(
        None,
        description="after how long a worker that the others wait for is named, and dropped if the run is elastic; "
        "none: 30 seconds or ten steps, whichever is longer",
    )

    @field_validator("checkpoint", mode="before")
    @classmethod
    def _directory_alone(cls, value: object) -> object:
        return {"directory": value} if isinstance(value, str | Path) else value

    @field_validator("recompute", mode="before")
    @classmethod
    def _class_names(cls, value: object) -> object:
        if isinstance(value, str):
            return tuple(part for part in value.split(",") if part)
        if isinstance(value, list | tuple | set):
            return tuple(item.__name__ if isinstance(item, type) else item for item in value)
        return value


STRATEGIES = (
    "allreduce",
    "auto",
    "backup",
    "hogwild",
    "local-sgd",
    "parameter-server",
    "pipeline",
    "single",
    "stealing",
)
"""The names of those in :mod:`paceline.strategies.registry`, for those who do without torch."""

GROUPS: dict[str, type[BaseModel]] = {
    "checkpoint": CheckpointSettings,
    "backup": BackupSettings,
    "server": ServerSettings,
    "local": LocalSettings,
    "pipeline": PipelineSettings,
}
"""The settings that have settings of their own."""


class Arguments(TypedDict, total=False):
    """The settings as keyword arguments of ``paceline.start``."""

    strategy: str
    batch: int
    batch_per_worker: int
    microbatches: int
    shares: Literal["speed", "even"]
    backup: BackupSettings | dict[str, Any]
    server: ServerSettings | dict[str, Any]
    local: LocalSettings | dict[str, Any]
    pipeline: PipelineSettings | dict[str, Any]
    seed: int
    exact: bool
    drop_last: bool
    scale_lr: Literal["linear", "sqrt"] | None
    warmup_steps: int
    clip_norm: float | None
    autocast: Literal["bfloat16"] | None
    recompute: tuple[str | type, ...] | list[str | type]
    compile: bool
    workers_per_loader: int
    checkpoint: CheckpointSettings | dict[str, Any] | str | Path
    resume: str | None
    nonfinite: Literal["stop", "skip"]
    missing_gradient: Literal["stop", "zero"]
    threads: int
    timeout_seconds: float
    hang_seconds: float | None
