"""Resolution of settings from the command line, the environment, a plan file and the script.

Each field of :class:`paceline.settings.Settings` can be set as an argument of ``paceline.start``, as ``--set
key=value`` on the command line, as a ``PACELINE_<KEY>`` variable and as a key of the plan file (TOML). Precedence:
command line, environment, plan file, script, default. On resume, values that the first three sources had when the
checkpoint was saved rank between the plan file and the script.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from paceline.environments import env
from paceline.errors import ConfigError
from paceline.settings import GROUPS, ONE_MACHINE, SHORT, STRATEGIES, Settings, WeightsSettings

OF_ONE_START = frozenset(
    {
        *("resume", "checkpoint.directory", "checkpoint.key_file", "tracking.directory"),
        *(f"weights.{key}" for key in WeightsSettings.model_fields),
        *("timeout_seconds", "hang_seconds", "checkpoint.retry_seconds", "local.grace_seconds"),
        *("threads", "workers_per_loader", "memory_gigabytes", "transport", "events", "profile_steps"),
    }
)
"""Settings that checkpoints do not store: locations, timeouts, records, and resources of a machine."""
_PLAN_BYTES = 1 << 20
_QUOTED = 80
_REASON = 400


class Resolved(BaseModel):
    """Resolved settings and, for each dotted key, the source of its value."""

    model_config = ConfigDict(frozen=True)

    settings: Settings
    sources: dict[str, str]


def flat_keys() -> dict[str, object]:
    """Return all dotted keys with their defaults."""
    return flattened(Settings().model_dump())


def flattened(values: Mapping[str, Any], prefix: str = "") -> dict[str, object]:
    """Return settings with dotted keys in place of groups."""
    flat: dict[str, object] = {}
    for key, value in values.items():
        name = prefix + (key if isinstance(key, str) else quoted(key))
        if isinstance(value, Mapping) and not prefix and key in GROUPS:
            flat.update(flattened(value, f"{name}."))
        else:
            flat[name] = value
    return flat


def describe(key: str) -> str:
    """Return the description of a dotted key, empty if it has none."""
    head, _, tail = key.partition(".")
    field = GROUPS[head].model_fields[tail] if tail else Settings.model_fields[head]
    return field.description or ""


_RATE = "The optimizer has it: optimizer=partial(torch.optim.AdamW, lr=...)."
_ELSEWHERE = {
    "lr": _RATE,
    "learning_rate": _RATE,
    "epochs": "The loop says how long it trains: `for epoch in session.epochs(...)`.",
    "steps": "The loop says how long it trains: `for batch in session.batches(steps=...)`.",
    "device": "Each worker moves the model and the batches to its own device, session.device: leave it out.",
    "shuffle": "Samples are shuffled again in each epoch: leave it out. sampler= gives them another order.",
    "workers": "The launcher starts them: paceline run -n 4 train.py.",
    "num_workers": "For loader processes set workers_per_loader=...; paceline run -n 4 train.py starts workers.",
    "batch_size": "Did you mean 'batch'? It is the number of samples over all workers.",
    **dict.fromkeys(("criterion", "loss_fn", "loss_function"), "It is the argument loss=..."),
    **dict.fromkeys(("dataset", "train_data", "train_set", "loader", "dataloader"), "It is the argument data=..."),
    **dict.fromkeys(("scheduler", "lr_scheduler"), "It is the argument schedule=..., a factory."),
    "collate_fn": "It is the argument collate=...",
    **dict.fromkeys(("amp", "precision", "fp16", "bf16"), "It is the setting autocast='bfloat16' or 'float16'."),
}
"""Arguments of other libraries, with the Paceline equivalent to suggest in the error message."""


def check_keys(keys: Mapping[str, object], where: str) -> None:
    """Check that all keys are known. ``where`` names their source in the error message."""
    known = list(flat_keys())
    for key in keys:
        if key in known or key in SHORT:  # checkpoint is short for checkpoint.directory
            continue
        near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
        cure = f"Did you mean {near[0]!r}?" if near else f"The settings are: {', '.join(known)}."
        cure = _ELSEWHERE.get(key, cure)
        raise ConfigError(f"{where}: there is no setting {quoted(key)}. {cure}")


def check_machines(strategy: str, machines: str) -> None:
    """Raise for a single-machine strategy on several machines; ``machines`` describes them in the message."""
    if strategy in ONE_MACHINE:
        raise ConfigError(
            f"strategy {strategy!r} is for one machine, whose workers share the weights in memory, and there are "
            f"several ({machines}): use 'parameter-server' with server.mode = 'async', or start all workers on one."
        )


def check_strategy(name: str, known: Sequence[str] = STRATEGIES) -> None:
    """Check that a strategy of this name exists.

    Args:
        known: strategy names. Defaults to the built-in ones; only the script knows strategies that it registers.
    """
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        own = " A strategy that the script registers can only be set there." if known is STRATEGIES else ""
        raise ConfigError(f"There is no strategy {quoted(name)}.{hint} The strategies are: {', '.join(known)}.{own}")


def environment_settings() -> dict[str, str]:
    """Return the settings in the environment, as strings by dotted key."""
    keys = {env.variable_of(key): key for key in flat_keys()}
    for name in env.unknown_variables(keys):
        if near := difflib.get_close_matches(name, keys, n=1, cutoff=0.9):
            raise ConfigError(
                f"{name} is set, but not a setting. Did you mean {near[0]}? Rename or unset this variable."
            )
    return env.environment_settings(flat_keys())


def _parsed(values: Mapping[str, str] | None) -> dict[str, object]:
    return {key: parse_value(value, _is_string_list(key)) for key, value in (values or {}).items()}


def _is_string_list(key: str) -> bool:
    """Return whether the setting of a dotted key is a list of strings."""
    head, _, tail = key.partition(".")
    group = GROUPS.get(head) if tail else Settings
    field = group.model_fields.get(tail or head) if group else None
    kind = tuple[str, ...]
    return field is not None and (field.annotation == kind or kind in get_args(field.annotation))


def parse_value(text: str, strings: bool = False) -> object:
    """Parse a command-line value: ``none``, a boolean, a TOML value, or otherwise a string.

    Args:
        strings: whether the setting is a list of strings. If so, only lists and quoted strings are parsed as TOML,
            because a layer may be named 0.10. Defaults to False.
    """
    if text.lower() == "none":
        return None
    if strings:
        return _toml(text, parse_float=str) if text.lstrip().startswith(("[", '"', "'")) else text
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    return _toml(text, parse_float=float)


def _toml(text: str, parse_float: Callable[[str], object]) -> object:
    try:
        value = tomllib.loads(f"value = {text}", parse_float=parse_float)["value"]
    except (ValueError, RecursionError):  # not TOML, a number with thousands of digits, or brackets nested too deeply
        return text
    return value if isinstance(value, int | float | str | list) else text


def quoted(value: object) -> str:
    """Return the ``repr`` of a value for a message, shortened to 80 characters."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - whatever the value's own code raises; a whole number of 5,000 digits does
        text = f"<{type(value).__name__}>"
    return text if len(text) <= _QUOTED else f"{text[: _QUOTED - 4]}...{text[-1]}"


def parse_command_line(pairs: list[str]) -> dict[str, str]:
    """Parse and validate ``--set`` pairs such as ``["batch=64", "checkpoint.every=10"]``."""
    settings: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise ConfigError(f"--set {quoted(pair)}: write --set key=value, for example --set batch=64.")
        settings[key.strip().replace("-", "_")] = value.strip()
    check_keys(settings, "--set")
    resolve({}, command_line=settings)
    return settings


def read_plan(path: Path) -> dict[str, object]:
    """Read the settings of a plan file, at most 1 MiB: TOML, or the JSON of ``paceline plan --save``."""
    try:
        if path.exists() and not path.is_file():  # opening a pipe would block
            raise ConfigError(f"The plan file {path} is not a file.")
        with path.open("rb") as file:
            text = file.read(_PLAN_BYTES + 1)
        if len(text) > _PLAN_BYTES:
            raise ConfigError(f"The plan file {path} is longer than {_PLAN_BYTES} bytes: it is not a file of settings.")
        values = flattened(_of_json(path, text) if path.suffix == ".json" else tomllib.loads(text.decode()))
    except OSError as error:
        raise ConfigError(f"The plan file {path} cannot be read: {error.strerror}.") from None
    except RecursionError:
        raise ConfigError(f"The plan file {path} is not a file of settings: it nests brackets too deep.") from None
    except ConfigError:
        raise
    except ValueError as error:  # not TOML, not UTF-8, a number with thousands of digits, or an invalid path
        kind = "JSON" if path.suffix == ".json" else "TOML"
        raise ConfigError(f"The plan file {path} is not {kind}: {error}.") from None
    check_keys(values, str(path))
    return values


def _of_json(path: Path, text: bytes) -> dict[str, Any]:
    match json.loads(text):
        case {"strategy": str(strategy), "workers": int(workers), "settings": dict(settings)} if workers > 0:
            return {"strategy": strategy, **settings}
    raise ConfigError(f"The plan file {path} is not from paceline plan --save: write settings as TOML instead.")


class SavedPlan(NamedTuple):
    """Values that ``paceline plan --save`` writes besides settings."""

    workers: int
    machines: int
    high: float | None  # end of the interval of a step's seconds, if the plan is for one machine like this


def saved_plan(plan: Path | None, script: Path | None = None) -> SavedPlan | None:
    """Return the values that ``paceline plan`` has saved, or None for other plan files.

    Raises:
        ConfigError: the plan is unusable, or for a script of another name.
    """
    if plan is None or plan.suffix != ".json":
        return None
    read_plan(plan)  # raises if the file is not a plan
    values = json.loads(plan.read_bytes())
    planned = values.get("script")
    if script is not None and isinstance(planned, str) and planned != script.name:
        raise ConfigError(
            f"The plan file {plan} is for {quoted(planned)}, and this script is {script.name!r}, whose layers and "
            f"times may differ: run paceline plan --save again, or change 'script' in the file if it has a new name."
        )
    high = values.get("high") if values.get("machine") == "this machine" else None
    machines = values.get("machines")
    return SavedPlan(
        values["workers"],
        machines if type(machines) is int and machines > 0 else 1,
        high if type(high) is float and high > 0 else None,
    )


def resolve(
    script: Mapping[str, Any],
    plan: Mapping[str, object] | None = None,
    environment: Mapping[str, str] | None = None,
    command_line: Mapping[str, str] | None = None,
    checkpoint: Mapping[str, object] | None = None,
) -> Resolved:
    """Merge the sources and validate the result. Later sources override: script, checkpoint, plan, environment, line.

    ``checkpoint`` has the values that were set outside of the script when the checkpoint to resume from was saved.
    """
    arguments = dict(script)
    for name in GROUPS:
        if isinstance(arguments.get(name), BaseModel):
            arguments[name] = arguments[name].model_dump(exclude_unset=True)
        elif name in SHORT and isinstance(arguments.get(name, ()), str | Path | None):
            arguments[name] = {SHORT[name]: arguments[name]}
        elif name in arguments and not isinstance(arguments[name], Mapping):
            example = {next(iter(GROUPS[name].model_fields)): arguments[name]}
            raise ConfigError(
                f"{name} = {quoted(arguments[name])} cannot be used: {name} is a mapping, such as {example}."
            )
    layers: list[tuple[str, Mapping[str, object]]] = [
        ("script", flattened(arguments)),
        ("checkpoint", checkpoint or {}),
        ("plan file", plan or {}),
        ("environment", _parsed(environment)),
        ("command line", _parsed(command_line)),
    ]
    sources = dict.fromkeys(flat_keys(), "default")
    values: dict[str, Any] = {}
    for where, layer in layers:
        check_keys(layer, where)
        for key, value in layer.items():
            key = f"{key}.{SHORT[key]}" if key in SHORT else key
            sources[key] = where
            _put(values, key, value)
        _one_batch(values, layer)
    return Resolved(settings=_validated(values, sources), sources=sources)


def _one_batch(values: dict[str, Any], layer: Mapping[str, object]) -> None:
    """Drop ``batch`` if this source sets ``batch_per_worker`` only, and vice versa: the higher source wins."""
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
        why = first["msg"] if len(first["msg"]) <= _REASON else f"{first['msg'][:_REASON]}..."
        raise ConfigError(
            f"{key} = {quoted(first['input'])} (from the {where}) cannot be used: {why}. It is: {describe(key)}."
        ) from None
    except ValueError as error:  # pydantic fails to print a number with thousands of digits
        given = ", ".join(key for key, where in sources.items() if where != "default")
        raise ConfigError(f"One of {given} cannot be used: {error}.") from None


_PARTS = {*Settings.model_fields, *(name for group in GROUPS.values() for name in group.model_fields)}


def resolve_here(script: Mapping[str, Any], checkpoint: Mapping[str, object] | None = None) -> Resolved:
    """Resolve the settings of this process from the command line, environment, plan file, checkpoint and script."""
    plan = env.plan_file()
    return resolve(
        script, read_plan(plan) if plan else {}, environment_settings(), env.command_line_settings(), checkpoint
    )


def flat(settings: Settings) -> dict[str, object]:
    """Return the JSON value of each dotted key."""
    return flattened(settings.model_dump(mode="json"))


def kept(settings: Settings, sources: Mapping[str, str]) -> dict[str, list[object]]:
    """Return the settings to store in a checkpoint, by dotted key: the value, and whether the script has set it."""
    values = flat(settings)
    return {key: [values[key], source == "script"] for key, source in sources.items() if key not in OF_ONE_START}


def outside(saved: Mapping[str, list[object]]) -> dict[str, object]:
    """Return the stored settings (:func:`kept`) that were set outside of the script, which sets its own again."""
    known = flat_keys()
    return {
        key: value
        for key, (value, by_script) in saved.items()
        if not by_script and key in known and key not in OF_ONE_START
    }


def given_outside(settings: Settings, sources: Mapping[str, str]) -> dict[str, str]:
    """Return the settings that were set outside of the script, as ``--set`` accepts them, for a replay."""
    values = flat(settings)
    return {
        key: ",".join(map(str, value)) if isinstance(value := values[key], tuple | list) else shown(value)
        for key, source in sources.items()
        if source != "script" and key not in ("resume", "transport")
    }


def changes(saved: Mapping[str, list[object]], now: Resolved) -> list[str]:
    """Describe each setting that differs from the checkpoint: name, old value, new value and its source."""
    defaults, values = flat(Settings()), flat(now.settings)
    before = {key: saved[key][0] if key in saved else value for key, value in defaults.items()}
    return [
        f"{key} was {shown(before[key])}, is {shown(values[key])} ({now.sources[key]})"
        for key in defaults
        if key not in OF_ONE_START and before[key] != values[key]
    ]


def shown(value: object) -> str:
    """Format a value as ``--set`` accepts it."""
    return str(value).lower() if isinstance(value, bool | None) else str(value)
