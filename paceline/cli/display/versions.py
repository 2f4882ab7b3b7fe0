"""Lines of ``paceline --version``: what is installed, read without importing it."""

from __future__ import annotations

import importlib.metadata
import platform
import re

import paceline
from paceline.system.installed import version

_REQUIREMENT = re.compile(r"([\w.-]+).*;.*extra == [\"']([\w.-]+)[\"']")


def lines() -> list[str]:
    """Return the versions of Paceline, Python, torch and NumPy, and the extras that are installed and missing."""
    first = f"paceline {paceline.__version__}"
    libraries = [f"{name} {version(name) or 'not installed'}" for name in ("torch", "numpy")]
    return [first, ", ".join([f"Python {platform.python_version()}", *libraries]), *_extras()]


def _extras() -> list[str]:
    try:
        requirements = importlib.metadata.requires("paceline") or []
    except importlib.metadata.PackageNotFoundError:
        return ["from source, not installed"]
    missing: dict[str, list[str]] = {}
    for package, extra in re.findall(_REQUIREMENT, "\n".join(requirements)):
        missing.setdefault(extra, []).extend([package] if version(package) is None else [])
    found = [extra for extra, packages in missing.items() if not packages]
    rest = [f"{extra} ({', '.join(packages)})" for extra, packages in missing.items() if packages]
    return [
        f"{title}: {', '.join(names)}" for title, names in (("extras", found), ("extras not installed", rest)) if names
    ]
