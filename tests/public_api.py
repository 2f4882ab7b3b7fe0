"""The public names of Paceline with their signatures, as text: python tests/public_api.py > tests/public_api.txt"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from typing import Any

from pydantic import BaseModel

import paceline


def _signature(function: Callable[..., Any]) -> str:
    return re.sub(r"(: |-> )'([^']*)'", r"\1\2", str(inspect.signature(function)))


def _public(kind: type) -> Iterator[str]:
    """The lines of a class: bases, how to make it, attributes and methods. The settings have their own test."""
    bases = [base.__name__ for base in kind.__bases__ if base is not object]
    lines = {}
    for base in reversed(kind.__mro__):
        if not base.__module__.startswith("paceline.") or issubclass(base, BaseModel):
            continue
        lines |= {name: f"{name}: {one}" for name, one in inspect.get_annotations(base).items()}
        for name, one in vars(base).items():
            if isinstance(one, property):
                lines[name] = f"{name}{_signature(one.fget).removeprefix('(self)')}"
            elif isinstance(one, staticmethod | classmethod) or inspect.isfunction(one):
                lines[name] = f"{name}{_signature(getattr(base, name))}"
    yield f"class {kind.__name__}({', '.join(bases)})"
    made = set() if is_dataclass(kind) else {"__init__"}
    yield from (f"    {line}" for name, line in lines.items() if name in made or name[0] != "_")


def listed() -> str:
    lines = []
    for name in sorted(paceline.__all__):
        one = getattr(paceline, name)
        lines += _public(one) if inspect.isclass(one) else [f"{name}{_signature(one)}"]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(listed(), end="")
