"""Compare what the workers are about to train, before the first step."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

from paceline.comm.world import World
from paceline.errors import DisagreementError

_CURES = {
    "code": "Give every worker the same files.",
    "version": "Install the same versions everywhere.",
    "setting": "Start every worker with the same settings.",
    "optimizer": "The optimizer factory must not depend on the rank.",
    "trained": "Freeze the same parameters, and give the optimizer the same ones, on every worker.",
    "data": "Every worker must see the whole data set, in the same order; Paceline hands out the shares. If the script "
    "shuffles or splits it, then with the same seed everywhere.",
    "initial": "Call torch.manual_seed(...) before the model is built, and build it alike on every worker.",
    "threads": "Set threads= to the same number everywhere; it changes the bits.",
    "canary": "The same small computation gives other bits on their processors. Use machines with the same processor "
    "and libraries, and the same variables for them (MKL_CBWR, ONEDNN_MAX_CPU_ISA), or exact=False.",
    "cpu": "Use machines with the same instruction set, or exact=False; it changes the bits.",
    "gpu": "Use machines with the same GPUs, or exact=False; others compute other bits.",
    "float32": "Set torch.backends.*.fp32_precision, allow_tf32 and NVIDIA_TF32_OVERRIDE alike on every worker.",
    "cublas": "Set CUBLAS_WORKSPACE_CONFIG alike on every worker.",
}


def versions() -> dict[str, str]:
    """Return the versions of Python and of the libraries that decide the numbers."""
    found = {"python": platform.python_version()}
    for name in ("torch", "numpy", "paceline"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def code_hashes() -> dict[str, str]:
    """Return the SHA-256 of the script and of the modules imported from its folder, by file name."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    if script is None:
        return {}
    home = Path(script).resolve().parent
    real_folder = functools.cache(os.path.realpath)  # 2,000 modules are in few folders: 0.02 s, not 0.2
    files = {Path(script).resolve()}
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if not file or not os.path.isabs(file) or not file.endswith(".py"):
            continue
        folder, name = os.path.split(file)
        real = os.path.realpath(file) if os.path.islink(file) else os.path.join(real_folder(folder), name)
        if real.startswith(os.path.join(home, "")):
            files.add(Path(real))
    kept = (file for file in files if file.is_file() and "site-packages" not in file.parts)
    return {str(file.relative_to(home)): hashlib.sha256(file.read_bytes()).hexdigest()[:16] for file in sorted(kept)}


def check(world: World, facts: Mapping[str, object]) -> None:
    """Compare facts among all workers; keys start with what they are about, as in ``version torch``.

    Raises:
        DisagreementError: names the first fact that differs, the workers and their values, and the cure.
    """
    compare(world.gather(dict(facts), "start"))


def compare(everyone: Sequence[Mapping[str, object]], where: str = "") -> None:
    """Compare the facts of all workers, which are ordered by rank.

    Args:
        everyone: the facts of each rank.
        where: how the message begins.

    Raises:
        DisagreementError: names the first fact that differs, the workers and their values, and the cure.
    """
    keys = dict.fromkeys(key for own in everyone for key in own)
    for key in keys:
        values = [own.get(key, "nothing") for own in everyone]
        if any(value != values[0] for value in values):
            each = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
            raise DisagreementError(f"{where}The workers do not agree on {key}: {each}. {_CURES[key.split()[0]]}")
