"""Validation of messages to the coordinator: the allowed sender and fields of each kind of message.

Invalid messages close the connection, so handlers can rely on the types and sizes of fields.
"""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.coordinator.key_values import LARGEST_KEY, LARGEST_VALUE
from paceline.coordinator.types import LONGEST_TEXT, Message

BLOCK = 1000  # size of the range of worker numbers of each agent
_MOST_WORKERS = 10**9
_LARGEST = 2**63
_HEX = re.compile(r"[0-9a-f]{0,128}")

Check = Callable[[Any], bool]


def _flag(value: Any) -> bool:
    return isinstance(value, bool)


def _text_of(most: int) -> Check:
    return lambda value: isinstance(value, str) and len(value) <= most


def _mapping(value: Any) -> bool:
    return isinstance(value, dict)


def _whole(least: int, below: int) -> Check:
    return lambda value: type(value) is int and least <= value < below


def _number(least: float, most: float = 1e12) -> Check:
    return lambda value: type(value) in (int, float) and least <= value <= most and math.isfinite(value)


def _address(value: Any) -> bool:
    try:
        return isinstance(value, str) and bool(ipaddress.ip_address(value))
    except ValueError:
        return False


def _optional(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _each(check: Check) -> Check:
    return lambda value: isinstance(value, list) and all(map(check, value))


def _pair(first: Check, second: Check) -> Check:
    return lambda value: isinstance(value, list) and len(value) == 2 and first(value[0]) and second(value[1])


def _fields(checks: Mapping[str, Check]) -> Check:
    return lambda value: isinstance(value, dict) and not _wrong(checks, value)


def _report(value: Any) -> bool:
    """Return whether a value is a valid failure report. Fields for display only may be any string or number."""
    plain = isinstance(value, dict) and all(one is None or _text(one) or _scalar(one) for one in value.values())
    return plain and not _wrong(_REPORT, _OF_REPORT | {name: one for name, one in value.items() if name in _REPORT})


def _scalar(value: Any) -> bool:
    return _flag(value) or _number(-1e12)(value)


@dataclass(frozen=True)
class Kind:
    """Kind of message: the role that may send it, and the checks of its fields."""

    sender: str
    fields: Mapping[str, Check]


_worker = _whole(0, _MOST_WORKERS)
_text = _text_of(LONGEST_TEXT)
_count = _whole(0, _LARGEST)
_pid = _whole(1, 2**31)
_seconds = _number(0.0)
_deadline = _number(0.01, 1e9)
_REPORT: Mapping[str, Check] = {
    "type": _text,
    "message": _text,
    "consequence": _flag,
    "time": _number(0.0),
    "exit_code": _whole(0, 256),
    "step": _optional(_count),
    "pid": _pid,
}
_OF_REPORT = {"exit_code": 1, "step": None, "pid": 1}
_STATUS: Mapping[str, Check] = {
    "step": _count,
    "doing": _text,
    "waiting": _flag,
    "busy": _flag,
    "since": _seconds,
    "step_seconds": _optional(_seconds),
    "line": _text,
}
_ABOUT: Mapping[str, Check] = {"host": _text, "pid": _pid, "address": _address}
_stored = _text_of(2 * LARGEST_VALUE)
KINDS: Mapping[str, Kind] = {
    "hello": Kind(
        "worker",
        {
            "about": _fields(_ABOUT),
            "facts": _mapping,
            "hang_seconds": _optional(_deadline),
            "timeout_seconds": _deadline,
            "fits": _each(_whole(1, _MOST_WORKERS)),
            "session": _whole(1, _LARGEST),
        },
    ),
    "ready": Kind(
        "worker",
        {
            "progress": _optional(_each(_whole(-_LARGEST, _LARGEST))),
            "arena": _optional(_pair(_count, lambda value: isinstance(value, str) and bool(_HEX.fullmatch(value)))),
            "leaving": _flag,
            "planned": _flag,
            "ended": _each(_worker),
        },
    ),
    "heartbeat": Kind("worker", {"status": _fields(_STATUS)}),
    "clock": Kind("worker", {"sent": _number(0.0)}),
    "ending": Kind("worker", {}),
    "store": Kind(
        "worker",
        {
            "generation": _count,
            "call": _optional(_count),
            "do": _text,
            "keys": _each(_text_of(LARGEST_KEY)),
            "value": _stored,
            "expected": _stored,
        },
    ),
    "agent": Kind(
        "agent",
        {"workers": _whole(1, BLOCK), "host": _text, "script": _text, "name": _optional(_text), "about": _mapping},
    ),
    "started": Kind("agent", {"worker": _worker}),
    "output": Kind("agent", {"stream": _text_of(len("stdout")), "line": _text}),
    "ended": Kind(
        "agent",
        {
            "worker": _worker,
            "code": _whole(-256, 256),
            "out_of_memory": _flag,
            "report": lambda value: value == {} or _report(value),
        },
    ),
}


DOCTOR_KINDS: Mapping[str, Kind] = {
    "machine": Kind("agent", {"host": _text}),
    "answer": Kind("agent", {"value": _mapping}),
}
"""Kinds of messages that machines send to the coordinator of ``paceline doctor``."""


def check(message: Message, role: str, kinds: Mapping[str, Kind] = KINDS) -> None:
    """Validate a message of a worker or an agent.

    Raises:
        ValueError: the role may not send this kind of message, or a field is missing, unexpected or invalid.
    """
    kind = kinds.get(message["type"])
    if kind is None or kind.sender != role:
        raise ValueError(f"a message that no {role} sends")
    fields = {name: value for name, value in message.items() if name != "type"}
    if wrong := _wrong(kind.fields, fields):
        raise ValueError(f"{message['type']}: wrong {', '.join(wrong)}")


def _wrong(checks: Mapping[str, Check], values: Mapping[str, Any]) -> list[str]:
    """Return the names of missing or invalid fields, and ``fields`` if there are unexpected ones."""
    wrong = [name for name, check in checks.items() if name not in values or not check(values[name])]
    return wrong if values.keys() <= checks.keys() else [*wrong, "fields"]
