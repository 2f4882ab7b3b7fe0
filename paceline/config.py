"""What can be set, and where a value came from.

Each field of :class:`Settings` is an argument of ``paceline.start``, a ``--set key=value`` of the command line,
a ``PACELINE_<KEY>`` variable and a key of the plan file (TOML). The first of these that names it wins:
command line, environment, plan file, script, default.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypedDict

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    field_validator,
)

from paceline import env
from paceline.errors import ConfigError


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

    model_config = ConfigDict(extra="forbid", frozen=True)

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
        None, description="how many workers hold each stage; none: as many for each"
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
        return tuple(part.strip() for part in value.split(",")) if isinstance(value, str) else value


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
    seed: int = Field(0, ge=0, description="of the order of samples and of all randomness inside a step")
    exact: bool = Field(False, description="the same bits for any number of workers")
    drop_last: bool = Field(False, description="leave out the short batch at the end of an epoch")
    scale_lr: Literal["linear", "sqrt"] | None = Field(
        None, description="scale the learning rate with the number of workers; needs batch_per_worker"
    )
    warmup_steps: int = Field(0, ge=0, description="steps from the base learning rate up to the scaled one")
    clip_norm: PositiveFloat | None = Field(None, description="clip gradients to this global norm")
    autocast: Literal["bfloat16"] | None = Field(None, description="run the forward pass in this type")
    recompute: tuple[str, ...] = Field(
        (), description="module classes whose activations are computed again in the backward pass"
    )
    compile: bool = Field(False, description="compile the model with torch.compile")
    workers_per_loader: int = Field(
        0, ge=0, description="processes that load data for each worker; 0: the worker itself"
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


class Resolved(BaseModel):
    """The settings in force and, for each dotted key, where its value came from."""

    model_config = ConfigDict(frozen=True)

    settings: Settings
    sources: dict[str, str]


def flat_keys() -> dict[str, object]:
    """Every key that can be set, dotted, with its default."""
    return _flatten(Settings().model_dump())


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat.update(_flatten(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = value
    return flat


def describe(key: str) -> str:
    """The one-sentence description of a dotted key."""
    head, _, tail = key.partition(".")
    field = GROUPS[head].model_fields[tail] if tail else Settings.model_fields[head]
    return field.description or ""


def check_keys(keys: Mapping[str, object], where: str) -> None:
    """Refuse a key that is not a setting, with the nearest one that is.

    Raises:
        ConfigError: for the first unknown key.
    """
    known = list(flat_keys())
    for key in keys:
        if key in known or key == "checkpoint":  # its directory alone
            continue
        near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"{where}: there is no setting {key!r}.{hint} The settings are: {', '.join(known)}.")


def parse_value(text: str) -> object:
    """A value as written on the command line: TOML's numbers and booleans, ``none``, or else the text."""
    if text.lower() == "none":
        return None
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
    return value if isinstance(value, int | float | str | list) else text


def parse_command_line(pairs: list[str]) -> dict[str, str]:
    """``["batch=64", "checkpoint.every=10"]`` as a mapping, checked for keys and kinds.

    Raises:
        ConfigError: a pair without ``=``, an unknown key, or a value of the wrong kind.
    """
    settings: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise ConfigError(f"--set {pair}: write --set key=value, for example --set batch=64.")
        settings[key.strip().replace("-", "_")] = value.strip()
    check_keys(settings, "--set")
    resolve({}, command_line=settings)
    return settings


def read_plan(path: Path) -> dict[str, object]:
    """The settings in a plan file (TOML).

    Raises:
        ConfigError: the file is missing, is not TOML, or sets something unknown.
    """
    try:
        values = _flatten(tomllib.loads(path.read_text()))
    except OSError as error:
        raise ConfigError(f"The plan file {path} cannot be read: {error.strerror}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"The plan file {path} is not TOML: {error}.") from None
    check_keys(values, str(path))
    return values


def resolve(
    script: Mapping[str, Any],
    plan: Mapping[str, object] | None = None,
    environment: Mapping[str, str] | None = None,
    command_line: Mapping[str, str] | None = None,
) -> Resolved:
    """Put the layers on top of each other: the command line is the topmost.

    Raises:
        ConfigError: an unknown key or a value of the wrong kind.
    """
    arguments = dict(script)
    for name in GROUPS:
        if isinstance(arguments.get(name), BaseModel):
            arguments[name] = arguments[name].model_dump(exclude_unset=True)
        elif name in arguments and name != "checkpoint" and not isinstance(arguments[name], Mapping):
            example = {next(iter(GROUPS[name].model_fields)): arguments[name]}
            raise ConfigError(f"{name} = {arguments[name]!r} cannot be used: {name} is a mapping, such as {example}.")
    if isinstance(arguments.get("checkpoint"), str | Path):
        arguments["checkpoint"] = {"directory": arguments["checkpoint"]}
    layers: list[tuple[str, Mapping[str, object]]] = [
        ("script", _flatten(arguments)),
        ("plan file", plan or {}),
        ("environment", {key: parse_value(value) for key, value in (environment or {}).items()}),
        ("command line", {key: parse_value(value) for key, value in (command_line or {}).items()}),
    ]
    sources = dict.fromkeys(flat_keys(), "default")
    values: dict[str, Any] = {}
    for where, layer in layers:
        check_keys(layer, where)
        for key, value in layer.items():
            key = "checkpoint.directory" if key == "checkpoint" else key
            sources[key] = where
            _put(values, key, value)
        _one_batch(values, layer)
    return Resolved(settings=_validated(values, sources), sources=sources)


def _one_batch(values: dict[str, Any], layer: Mapping[str, object]) -> None:
    """``batch`` and ``batch_per_worker`` replace each other: the upper layer's choice wins."""
    if "batch" in layer and "batch_per_worker" not in layer:
        values.pop("batch_per_worker", None)
    elif "batch_per_worker" in layer and "batch" not in layer:
        values.pop("batch", None)


def _put(values: dict[str, Any], key: str, value: object) -> None:
    head, _, tail = key.partition(".")
    if tail:
        values.setdefault(head, {})[tail] = value
    else:
        values[head] = value


def _validated(values: dict[str, Any], sources: Mapping[str, str]) -> Settings:
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"] if isinstance(part, str) and part in _PARTS)
        where = sources.get(key, "script")
        raise ConfigError(
            f"{key} = {first['input']!r} (from the {where}) cannot be used: {first['msg']}. It is: {describe(key)}."
        ) from None


_PARTS = {*Settings.model_fields, *(name for group in GROUPS.values() for name in group.model_fields)}


def resolve_here(script: Mapping[str, Any]) -> Resolved:
    """The settings of this process: the script's arguments under what its launcher and environment say."""
    plan = env.plan_file()
    return resolve(
        script,
        read_plan(plan) if plan else {},
        env.environment_settings(flat_keys()),
        env.command_line_settings(),
    )
