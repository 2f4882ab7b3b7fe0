"""Properties that must be the same on all machines: versions, the processor, the script, the data set."""

from __future__ import annotations

import hashlib
import json
import platform
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.environments import env
from paceline.system.installed import version

_TORCH_SECONDS = 120.0
_INSTRUCTIONS = ("avx", "avx2", "fma", "avx512f", "avx512_bf16", "amx_tile", "neon", "asimd", "sve", "bf16")
_BLOCK, _BLOCKS = 1 << 16, 64
_MOST_FILES, _FILES_READ = 100_000, 16
_WHOLE_BYTES = 256 << 20
"""Size in bytes up to which a data set is read completely, in a second. Blocks would miss differences."""


def versions() -> dict[str, str]:
    """Return the versions of Python and of the libraries, which are not imported."""
    found = {name: version(name) or "not installed" for name in ("torch", "numpy", "paceline")}
    return {"Python": platform.python_version(), **found}


def torch_facts() -> dict[str, Any]:
    """Collect facts about torch in a separate process. Return an ``error`` if torch does not load."""
    command = [sys.executable, "-P", "-m", "paceline.diagnostics.doctor.torch_facts"]
    try:
        ended = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TORCH_SECONDS,
            stdin=subprocess.DEVNULL,
            env=env.inherited(),
            check=False,
        )
        found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1]) if ended.returncode == 0 else {}
    except (OSError, ValueError, IndexError) as error:
        return {"error": str(error)}
    except subprocess.TimeoutExpired:
        return {"error": f"it did not load within {_TORCH_SECONDS:.0f} s"}
    last = (ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"])[-1]
    return found or {"error": last[:300]}


def processor() -> dict[str, str]:
    """Return the model of the processor, and the instruction sets that decide how libraries compute."""
    rows: dict[str, str] = {}
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            rows.setdefault(name.strip(), value.strip())
    except OSError:
        pass
    flags = (rows.get("flags") or rows.get("Features") or "").split()
    model = rows.get("model name") or platform.machine()
    return {"model": model, "instructions": " ".join(one for one in _INSTRUCTIONS if one in flags)}


def data_facts(path: Path) -> dict[str, Any]:
    """Return the number of files, the size and a hash of a data set, or an ``error``.

    The hash covers the names and sizes of up to 100,000 files. Of large data it covers only blocks of a few files.
    """
    try:
        if path.is_file():
            digest = hashlib.sha256()
            _read_blocks(path, digest, path.stat().st_size <= _WHOLE_BYTES)
            return {"files": 1, "bytes": path.stat().st_size, "hash": digest.hexdigest()[:16]}
        if path.is_dir():
            return _folder_facts(path)
        path.stat()
        return {"error": "is neither a file nor a folder"}
    except OSError as error:
        return {"error": "is missing" if isinstance(error, FileNotFoundError) else f"{error.strerror}"}


def _folder_facts(path: Path) -> dict[str, Any]:
    found = sorted(_files(path))
    digest = hashlib.sha256()
    for name, count in found:
        digest.update(f"{name}\0{count}\n".encode("utf-8", "surrogateescape"))
    total = sum(count for _, count in found)
    whole = total <= _WHOLE_BYTES
    for name, _ in found[:: 1 if whole else max(1, len(found) // _FILES_READ)]:
        _read_blocks(path / name, digest, whole)
    return {"files": len(found), "bytes": total, "hash": digest.hexdigest()[:16]}


def _files(path: Path) -> Iterator[tuple[str, int]]:
    count = 0
    for file in path.rglob("*"):
        try:
            about = file.stat()
        except OSError:  # broken symbolic link
            continue
        if stat.S_ISREG(about.st_mode) and count < _MOST_FILES:
            count += 1
            yield str(file.relative_to(path)), about.st_size


def _read_blocks(path: Path, digest: Any, whole: bool) -> None:
    """Add the size of a file to the digest, and blocks of it at equal distances or all of it."""
    count = path.stat().st_size
    digest.update(f"{count}\n".encode())
    with open(path, "rb") as file:
        if whole:
            digest.update(hashlib.file_digest(file, "sha256").digest())
            return
        for place in range(_BLOCKS):
            file.seek(count * place // _BLOCKS if count > _BLOCK * _BLOCKS else _BLOCK * place)
            digest.update(file.read(_BLOCK))
