"""Validation of messages to the coordinator: the allowed sender and fields of each kind of message.

Invalid messages close the connection, so handlers can rely on the types and sizes of fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from ipaddress import ip_address
from typing import Annotated, Any, NamedTuple

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, InstanceOf, ValidationError

from paceline.coordinator.key_values import LARGEST_KEY, LARGEST_VALUE
from paceline.coordinator.types import LONGEST_TEXT, Message

BLOCK = 1000  # size of the range of worker numbers of each agent
_MOST_WORKERS = 10**9
_LARGEST = 2**63

_Str = InstanceOf[str]  # a plain str would refuse names of files that are not UTF-8
_Text = Annotated[_Str, Field(max_length=LONGEST_TEXT)]
_Stored = Annotated[_Str, Field(max_length=2 * LARGEST_VALUE)]
_Count = Annotated[int, Field(ge=0, lt=_LARGEST)]
_Worker = Annotated[int, Field(ge=0, lt=_MOST_WORKERS)]
_Pid = Annotated[int, Field(ge=1, lt=2**31)]
_Seconds = Annotated[float, Field(ge=0, le=1e12)]
_Deadline = Annotated[float, Field(ge=0.01, le=1e9)]
_Number = Annotated[float, Field(ge=-1e12, le=1e12)]
_Hex = Annotated[str, Field(pattern="^[0-9a-f]{0,128}$")]


class _Fields(BaseModel):
    """Fields of a message, or of an object in a message. Values are not converted."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class _About(_Fields):
    host: _Text
    pid: _Pid
    address: Annotated[str, AfterValidator(ip_address)]


class _Hello(_Fields):
    about: _About
    facts: dict[Any, Any]
    hang_seconds: _Deadline | None
    timeout_seconds: _Deadline
    fits: list[Annotated[int, Field(ge=1, lt=_MOST_WORKERS)]]
    session: Annotated[int, Field(ge=1, lt=_LARGEST)]


class _Ready(_Fields):
    progress: list[Annotated[int, Field(ge=-_LARGEST, lt=_LARGEST)]] | None
    arena: Annotated[tuple[_Count, _Hex], Field(strict=False)] | None  # JSON has lists only
    leaving: bool
    planned: bool
    ended: list[_Worker]


class _Status(_Fields):
    step: _Count
    doing: _Text
    waiting: bool
    busy: bool
    since: _Seconds
    step_seconds: _Seconds | None
    line: _Text


class _Heartbeat(_Fields):
    status: _Status


class _Clock(_Fields):
    sent: _Seconds


class _Store(_Fields):
    generation: _Count
    call: _Count | None
    do: _Text
    keys: list[Annotated[_Str, Field(max_length=LARGEST_KEY)]]
    value: _Stored
    expected: _Stored


class _Agent(_Fields):
    workers: Annotated[int, Field(ge=1, lt=BLOCK)]
    host: _Text
    script: _Text
    name: _Text | None
    about: dict[Any, Any]


class _Started(_Fields):
    worker: _Worker


class _Output(_Fields):
    stream: Annotated[_Str, Field(max_length=len("stdout"))]
    line: _Text


class _Report(_Fields, extra="allow"):
    """Failure report of a worker. Other fields, which are only shown, may be any text or number."""

    __pydantic_extra__: dict[str, bool | _Number | _Text | None]
    type: _Text
    message: _Text
    consequence: bool
    time: _Seconds
    exit_code: Annotated[int, Field(ge=0, lt=256)] = 1
    step: _Count | None = None
    pid: _Pid = 1


class _Ended(_Fields):
    worker: _Worker
    code: Annotated[int, Field(ge=-256, lt=256)]
    out_of_memory: bool
    report: _Report | Annotated[dict[str, Any], Field(max_length=0)]


class _Machine(_Fields):
    host: _Text


class _Answer(_Fields):
    value: dict[Any, Any]


class Kind(NamedTuple):
    """Kind of message: the role that may send it, and its fields."""

    sender: str
    fields: type[BaseModel]


KINDS: Mapping[str, Kind] = {
    "hello": Kind("worker", _Hello),
    "ready": Kind("worker", _Ready),
    "heartbeat": Kind("worker", _Heartbeat),
    "clock": Kind("worker", _Clock),
    "ending": Kind("worker", _Fields),
    "unfit": Kind("worker", _Fields),
    "store": Kind("worker", _Store),
    "agent": Kind("agent", _Agent),
    "started": Kind("agent", _Started),
    "output": Kind("agent", _Output),
    "ended": Kind("agent", _Ended),
}
DOCTOR_KINDS: Mapping[str, Kind] = {"machine": Kind("agent", _Machine), "answer": Kind("agent", _Answer)}
"""Kinds of messages that machines send to the coordinator of ``paceline doctor``."""


def check(message: Message, role: str, kinds: Mapping[str, Kind] = KINDS) -> None:
    """Validate a message of a worker or an agent.

    Raises:
        ValueError: the role may not send this kind of message, or a field is missing, unexpected or invalid.
    """
    kind = kinds.get(message["type"])
    if kind is None or kind.sender != role:
        raise ValueError(f"a message that no {role} sends")
    try:
        kind.fields.model_validate({name: value for name, value in message.items() if name != "type"})
    except ValidationError as error:
        wrong = dict.fromkeys(str(one["loc"][0]) for one in error.errors(include_url=False, include_input=False))
        raise ValueError(f"{message['type']}: wrong {', '.join(wrong)}") from None
