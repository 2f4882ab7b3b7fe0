"""Writer of readable manifests in a subset of YAML, with comments."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_PLAIN = re.compile(r"-{0,2}[A-Za-z_/][\w./:=@+-]*(?<!:)", re.ASCII)
_NOT_TEXT = frozenset({"true", "false", "yes", "no", "on", "off", "y", "n", "null"})
_WIDTH = 110


def dump(documents: Sequence[Mapping[str, Any]], comments: Mapping[str, str]) -> str:
    """Return documents as YAML text.

    Args:
        documents: documents of dictionaries, lists, text, numbers and booleans.
        comments: comments for the ends of lines, by the text of the line.
    """
    return "---\n".join("".join(f"{_commented(line, comments)}\n" for line in _lines(one)) for one in documents)


def _commented(line: str, comments: Mapping[str, str]) -> str:
    comment = comments.get(line.strip().removeprefix("- "))
    return f"{line}  # {comment}" if comment else line


def _lines(value: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    for key, one in value.items():
        if isinstance(one, Mapping) and one:
            yield f"{indent}{key}:"
            yield from _lines(one, indent + "  ")
        elif isinstance(one, Sequence) and not isinstance(one, str) and any(isinstance(item, Mapping) for item in one):
            yield f"{indent}{key}:"
            for item in one:
                first, *rest = _lines(item, indent + "    ")
                yield f"{indent}  - {first.strip()}"
                yield from rest
        else:
            yield from _wrapped(f"{indent}{key}: ", one)


def _wrapped(start: str, value: Any) -> Iterator[str]:
    if not isinstance(value, list) or not value:
        yield start + _scalar(value)
        return
    line, after = start + "[", " " * (len(start) + 1)
    for place, item in enumerate(value):
        word = _scalar(item) + ("," if place + 1 < len(value) else "]")
        if len(line) + len(word) > _WIDTH and not line.endswith("["):
            yield line.rstrip()
            line = after
        line += word + " "
    yield line.rstrip()


def _scalar(value: Any) -> str:
    if isinstance(value, str):
        plain = _PLAIN.fullmatch(value) and value.lower() not in _NOT_TEXT
        return value if plain else json.dumps(value, ensure_ascii=False)
    return json.dumps(value)


def comment(text: str) -> str:
    """Return text as full-line comments."""
    return textwrap.indent(text.rstrip("\n") + "\n", "# ", lambda line: True).replace("# \n", "#\n")
