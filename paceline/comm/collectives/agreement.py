"""Check that all workers agree on code, versions, settings, data and model before the first step."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence

from paceline.errors import DisagreementError
from paceline.system import user_code
from paceline.system.installed import file_hash, version

_CURES = {
    "code": "Give every worker the same files.",
    "version": "Install the same versions everywhere.",
    "setting": "Start every worker with the same settings.",
    "optimizer": "The factories of optimizer and schedule must not depend on the rank, nor draw random numbers.",
    "trained": "Freeze the same parameters, and give the optimizer the same ones, on every worker.",
    "data": "Every worker must see the whole data set, in the same order; Paceline hands out the shares. If the script "
    "shuffles or splits it, then with the same seed everywhere. For machines that have different data, give every "
    "worker a paceline.data.Located.",
    "items": "Give session.map the same items, in the same order, on every worker; Paceline hands them out.",
    "initial": "Call torch.manual_seed(...) before the model is built, and build it alike on every worker.",
    "threads": "Set threads= to the same number everywhere; it changes the bits.",
    "canary": "The same small computation gives different bits on their processors. Use machines with the same "
    "processor and libraries, and the same variables for them (MKL_CBWR, ONEDNN_MAX_CPU_ISA), or exact=False.",
    "cpu": "Use machines with the same instruction set, or exact=False; it changes the bits.",
    "gpu": "Use machines with the same GPUs, or exact=False; other GPUs compute different bits.",
    "float32": "Set torch.backends.*.fp32_precision, allow_tf32 and NVIDIA_TF32_OVERRIDE alike on every worker.",
    "cublas": "Set CUBLAS_WORKSPACE_CONFIG alike on every worker.",
}


def versions() -> dict[str, str]:
    """Return the versions of Python, torch, NumPy and Paceline, which affect numerical results."""
    return {"python": platform.python_version()} | {
        name: version(name) or "not installed" for name in ("torch", "numpy", "paceline")
    }


def code_hashes() -> dict[str, str | None]:
    """Return the first 16 hex digits of the SHA-256 of the script and each module from its folder, by relative path."""
    return {name: file_hash(path) for name, path in user_code.script_files().items()}


def compare(everyone: Sequence[Mapping[str, object]], where: str = "") -> None:
    """Compare the facts of all workers. The first word of a key, as in ``version of torch``, selects the advice."""
    keys = dict.fromkeys(key for own in everyone for key in own)
    for key in keys:
        values = [own.get(key, "nothing") for own in everyone]
        if any(value != values[0] for value in values):
            each = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
            raise DisagreementError(f"{where}The workers do not agree on {key}: {each}. {_CURES[key.split()[0]]}")
