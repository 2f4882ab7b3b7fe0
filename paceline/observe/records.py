"""Records of a run, read from its event files (:mod:`paceline.events`)."""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from paceline.errors import InputError
from paceline.system.regular_files import open_regular

Record: TypeAlias = Mapping[str, Any]

EVENT = re.compile(rb'"event": "([^"]*)"')
_STEP = re.compile(rb'"step": (\d{1,18})\b')
_LARGE = 1e15


def read(run: Path, events: Container[str], steps: Container[int] | None = None) -> Iterator[Record]:
    """Read the records of some events, in order for each rank.

    Only matching lines are decoded, because a long run has millions of others. Incomplete lines, which a killed worker
    may leave, are skipped.

    Args:
        steps: steps whose records to read. Defaults to all. A record without a step, such as an update of PipeDream,
            belongs to the preceding record of the same rank.
    """
    for path in sorted((run / "events").glob("rank-*.jsonl")):
        try:
            with open_regular(path) as file:
                for line in _about(file, events, steps):
                    if (record := parsed(line)) is not None:
                        yield record
        except OSError as error:
            raise InputError(f"The event file {path} cannot be read: {error.strerror}.") from None


def _about(lines: Iterable[bytes], events: Container[str], steps: Container[int] | None) -> Iterator[bytes]:
    """Yield a rank's lines with these events and steps."""
    wanted = steps is None
    for line in lines:
        event = EVENT.search(line)
        if event is None or event[1].decode(errors="replace") not in events:
            continue
        if steps is not None and (step := _STEP.search(line)) is not None:
            wanted = int(step[1]) in steps
        if wanted:
            yield line


def parsed(line: bytes | str) -> Record | None:
    """Parse a record. Returns None if the line is incomplete or a common field has the wrong type.

    >>> parsed('{"time": 1.5, "event": "note", "rank": 0, "generation": 0, "text": "hello"}')["text"]
    'hello'
    >>> parsed('{"time": 1.5, "event": "no')
    >>> parsed('{"time": null, "event": "note", "rank": 0, "generation": 0}')
    """
    record = checked(line)
    return record if record is not None and type(record["rank"]) is int else None


def checked(line: bytes | str) -> Record | None:
    """Parse a record of a worker, or of another process such as the launcher. Returns None as :func:`parsed` does."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or number(record.get("time")) is None or not isinstance(record.get("event"), str):
        return None
    return record if type(record.get("rank")) in (int, str) and type(record.get("generation")) is int else None


def number(value: object) -> float | None:
    """Return ``value`` as a float if it is finite and plausible for seconds, otherwise None.

    >>> [number(value) for value in (3, 2.5, "3", None, True, float("nan"), 10**400)]
    [3.0, 2.5, None, None, None, None, None]
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < _LARGE:
        return None
    return float(value)


def printable(text: str) -> str:
    """Escape characters that a terminal would act on.

    >>> printable("lost\\x1b[2J")
    'lost\\\\x1b[2J'
    """
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)


def encodable(text: str) -> str:
    """Replace halves of surrogate pairs, which JSON can hold but UTF-8 cannot."""
    return text.encode(errors="replace").decode()
