"""Quick comparison of machines at every start. Reads only properties that cost no time."""

from __future__ import annotations

import importlib.util
import re
import socket
import time
from collections.abc import Mapping
from pathlib import Path

from paceline.coordinator.types import Message
from paceline.diagnostics.doctor.identity import versions
from paceline.system.installed import file_hash

_CLOCK_OFF = 5.0
_LONGEST = 60


def about(script: Path) -> Message:
    """Describe this machine without importing torch, in tens of milliseconds."""
    return {**versions(), "CUDA": _cuda() or "none", "script": file_hash(script) or "none"}


def _cuda() -> str | None:
    """Return the CUDA version of the torch build according to its version file, or None if it cannot be found."""
    try:
        found = importlib.util.find_spec("torch")
        text = (Path(str(found.origin)).parent / "version.py").read_text() if found else ""
    except (OSError, ValueError, ImportError):
        return None
    version = re.search(r"^cuda\b.*= '(.+)'", text, re.MULTILINE)
    return version[1] if version else None


def differences(own: Message, host: str, theirs: Mapping[str, object]) -> list[str]:
    """Return a line for each difference from a machine that has just joined. ``theirs`` holds its clock as ``time``."""
    lines = []
    for name, here in own.items():
        there = theirs.get(name)
        if there is not None and there != here:
            what = "the content of the script" if name == "script" else f"the version of {name}"
            lines.append(f"{what} differs: {_short(here)} on {socket.gethostname()}, {_short(there)} on {_short(host)}")
    clock = theirs.get("time")
    if isinstance(clock, int | float) and abs(off := clock - time.time()) > _CLOCK_OFF:
        lines.append(f"the clock of {_short(host)} is {abs(off):.0f} s {'ahead' if off > 0 else 'behind'}")
    return [f"{line}; `paceline doctor` on both says more" for line in lines]


def _short(value: object) -> str:
    return "".join(one for one in str(value)[:_LONGEST] if one.isprintable())
