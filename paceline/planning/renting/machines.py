"""Types of machines: their speed, memory, bandwidth and price, and times of layers scaled from one type to another.

A user's file (TOML) has a table for each type. A field that it leaves out has the value of the package's table
(``machines.toml``) if that has a type of the same name::

    [[machine]]
    name = "g5.xlarge"
    spot_price_per_hour = 0.45
    interruptions_per_hour = 0.02
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from paceline.errors import ConfigError
from paceline.schedule.balance import LayerCost
from paceline.system.regular_files import read_text

Positive = Annotated[float, Field(gt=0, strict=True)]
NotNegative = Annotated[float, Field(ge=0, strict=True)]
Count = Annotated[int, Field(ge=0, strict=True)]
Text = Annotated[str, Field(min_length=1)]
Rate = Literal["flops", "bfloat16_flops"]

_MEMORY_BOUND = 0.5
"""Smallest part of a pass's time for which its memory traffic, at full bandwidth, counts as the cause."""


@dataclass(frozen=True)
class MachineType:
    """Type of a machine. None stands for unknown.

    A device is a GPU, or all cores of a machine without GPUs.
    """

    __pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False)

    name: Text  # name of the type
    cores: Annotated[Count, Field(gt=0)]  # physical cores
    gpus: Count = 0  # number of GPUs
    gpu: str = ""  # kind of the GPUs
    flops: Positive | None = None  # floating-point operations per second of a device in float32
    bfloat16_flops: Positive | None = None  # the same in bfloat16, for matrices without zeros that are left out
    memory_bytes_per_second: Positive | None = None  # bandwidth of a device's memory
    memory_bytes: Positive | None = None  # memory of the host
    gpu_memory_bytes: Positive | None = None  # memory of a GPU
    # bandwidth to other machines in each direction, which all devices share
    network_bytes_per_second: Positive | None = None
    network_latency: NotNegative = 0.0  # seconds that a message takes to another machine
    price_per_hour: NotNegative | None = None  # price on demand
    spot_price_per_hour: NotNegative | None = None  # price of a machine that the provider may take away
    currency: Text = "USD"  # currency of both prices
    minimum_seconds: NotNegative = 0.0  # seconds that are billed at least, each time that a machine starts
    start_up_seconds: NotNegative = 0.0  # seconds from the request of a machine until a worker on it can train
    # mean number of times per hour that the provider takes such a spot machine away
    interruptions_per_hour: NotNegative | None = None
    watts: Positive | None = None  # power of the machine while it trains

    def needs(self, field: str, purpose: str) -> float:
        """Return the value of a field.

        Raises:
            ConfigError: the value is unknown.
        """
        value: float | None = getattr(self, field)
        if value is None:
            raise ConfigError(
                f"Machine type {self.name!r} has no {field}, which {purpose}: add it to the machines file."
            )
        return value


_REASONS = {
    "missing": "each machine must have it",
    "unexpected_keyword_argument": "there is no such field",
    "float_type": "it must be a number",
    "int_type": "it must be a whole number",
    "finite_number": "it must be finite",
    "greater_than": "it must be above 0",
    "greater_than_equal": "it must be 0 or more",
    "string_type": "it must be a text in quotes",
    "string_too_short": "it must not be empty",
}
"""Reasons for which a value is refused, by the name of the check that failed."""
_TYPE = TypeAdapter(MachineType)
_FIELDS = [field.name for field in fields(MachineType)]


def builtin() -> dict[str, MachineType]:
    """Return the types of the package's table, by name.

    >>> builtin()["p5.48xlarge"].gpus, builtin()["p5.48xlarge"].gpu
    (8, 'H100')
    """
    return _parse(files("paceline.planning.renting").joinpath("machines.toml").read_text(), "machines.toml", {})


def read(path: Path) -> dict[str, MachineType]:
    """Return the types of a user's file, by name and in its order.

    Raises:
        ConfigError: the file cannot be read, is not TOML, or has a field or value that no type has.
    """
    try:
        text = read_text(path)
    except OSError as error:
        raise ConfigError(f"The machines file {path} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"The machines file {path} is not TOML: {error}.") from None
    return _parse(text, str(path), builtin())


def _parse(text: str, where: str, known: Mapping[str, MachineType]) -> dict[str, MachineType]:
    try:
        values = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"The machines file {where} is not TOML: {error}.") from None
    tables = values.get("machine")
    if (
        [*values] != ["machine"]
        or not isinstance(tables, list)
        or not tables
        or not all(isinstance(one, dict) for one in tables)
    ):
        keys = ", ".join(map(repr, values)) or "nothing"
        raise ConfigError(f"The machines file {where} has {keys}: write a table [[machine]] for each type.")
    found: dict[str, MachineType] = {}
    for number, table in enumerate(tables, start=1):
        one = _validated(table, f"The machines file {where}, machine {number}", known)
        if one.name in found:
            raise ConfigError(f"The machines file {where} has two machines with the name {one.name!r}: rename one.")
        found[one.name] = one
    return found


def _validated(table: dict[str, Any], where: str, known: Mapping[str, MachineType]) -> MachineType:
    name = table.get("name")
    base = known.get(name) if isinstance(name, str) else None
    try:
        return _TYPE.validate_python({**(vars(base) if base else {}), **table})
    except ValidationError as error:
        first = error.errors()[0]
        field = str(first["loc"][0])
        given = f" = {table[field]!r}" if field in table else ""
        raise ConfigError(
            f"{where} ({name!r}): {field}{given} cannot be used: {_REASONS[first['type']]}. The fields are "
            f"{', '.join(_FIELDS)}."
        ) from None


@dataclass(frozen=True)
class Extrapolated:
    """Costs of layers on a type of machine on which they were not measured."""

    layers: tuple[LayerCost, ...]  # the costs
    text: str  # label for people


def scale(
    layers: Sequence[LayerCost], measured: MachineType, target: MachineType, rate: Rate = "flops"
) -> Extrapolated:
    """Return the costs of layers on another type of machine by a roofline (Williams et al. 2009) for each pass.

    ::

        seconds = max( operations / FLOP rate, bytes / memory bandwidth )

    A profile knows seconds and bytes, and no operations. A forward pass reads the weights, and writes the tensors that
    it keeps and its output. A backward pass reads the weights, the kept tensors and the gradient of the output, and
    writes the gradients of the weights and of its input. If the measured bandwidth explains at least half of the
    seconds, the pass is bound by memory and scales with the bandwidth. Otherwise it is bound by computing: it scales
    with the FLOP rate, but takes at least the time of its bytes at the target's bandwidth. Reading bytes twice and
    starting many small operations are in neither, so the result is a guess: calibrate it by a short run.

    Both types describe a whole device. If a worker was measured on a part of the cores, it has the same part there.

    Raises:
        ConfigError: a type has no such rate, or no memory bandwidth.
    """
    purpose = f"scaling times from {measured.name!r} to {target.name!r} needs"
    computing = measured.needs(rate, purpose) / target.needs(rate, purpose)
    bandwidth = measured.needs("memory_bytes_per_second", purpose)
    moving = bandwidth / target.needs("memory_bytes_per_second", purpose)

    def one_pass(seconds: float, nbytes: float) -> tuple[float, bool]:
        """Return the seconds there, and whether memory bounds them."""
        least = nbytes / bandwidth
        if least >= _MEMORY_BOUND * seconds:
            return seconds * moving, True
        return max((seconds * computing, False), (least * moving, True))

    found, by_memory = [], 0
    for layer in layers:
        kept = layer.kept_bytes + layer.parameter_bytes
        forward, forward_bound = one_pass(layer.forward, kept + layer.output_bytes)
        backward, backward_bound = one_pass(layer.backward, kept + layer.parameter_bytes + 2 * layer.output_bytes)
        found.append(replace(layer, forward=forward, backward=backward))
        by_memory += forward_bound + backward_bound
    text = (
        f"extrapolated from {measured.name} to {target.name}: {2 * len(found) - by_memory} passes of layers by "
        f"{rate}, {by_memory} by memory bandwidth"
    )
    return Extrapolated(tuple(found), text)
