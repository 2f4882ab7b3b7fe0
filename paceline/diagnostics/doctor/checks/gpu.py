"""Checks of the health of NVIDIA GPUs, as reported by nvidia-smi."""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence

from paceline.diagnostics.doctor.finding import Finding, ok, size, skipped
from paceline.errors import counted

FIELDS = (
    "name", "driver_version", "memory.total", "memory.used", "temperature.gpu",
    "ecc.errors.uncorrected.volatile.total", "clocks_throttle_reasons.hw_slowdown",
    "clocks_throttle_reasons.hw_thermal_slowdown", "clocks_throttle_reasons.sw_thermal_slowdown",
    "clocks_throttle_reasons.hw_power_brake_slowdown", "retired_pages.pending", "compute_mode",
)  # fmt: skip
_SECONDS = 30.0
_HINTS = "NCCL_DEBUG=WARN shows what NCCL cannot do, NCCL_DEBUG=INFO which interface and which links it takes"

Gpu = Mapping[str, str]


def query() -> tuple[list[Gpu], list[tuple[int, str, int]], str]:
    """Run nvidia-smi. Return the GPUs, the other processes on them (pid, name, bytes), and the error if it failed."""
    if shutil.which("nvidia-smi") is None:
        return [], [], ""
    try:
        gpus = parse(_ask(f"--query-gpu={','.join(FIELDS)}"), FIELDS)
        names = ("pid", "process_name", "used_memory")
        processes = parse(_ask(f"--query-compute-apps={','.join(names)}"), names)
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stdout", None) or str(error)
        return [], [], said.strip().splitlines()[0][:200]
    own = os.getpid()
    found = [(int(one["pid"]), one["process_name"], _bytes(one["used_memory"])) for one in processes]
    return gpus, [one for one in found if one[0] != own], ""


def _ask(question: str) -> str:
    command = ["nvidia-smi", question, "--format=csv,noheader,nounits"]
    return subprocess.run(
        command, check=True, text=True, timeout=_SECONDS, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
    ).stdout


def parse(text: str, fields: Sequence[str]) -> list[Gpu]:
    """Parse the CSV output of nvidia-smi. Lines of another shape, such as warnings, are ignored."""
    rows = csv.reader(text.splitlines(), skipinitialspace=True)
    return [dict(zip(fields, row, strict=True)) for row in rows if len(row) == len(fields)]


def _bytes(text: str) -> int:
    return int(text) << 20 if text.isdecimal() else 0


def check_gpus(gpus: Sequence[Gpu], processes: Sequence[tuple[int, str, int]], error: str) -> list[Finding]:
    """Return the findings of all checks of a machine's GPUs."""
    if error:
        return [
            Finding(
                "GPU driver",
                "failure",
                f"nvidia-smi fails: {error}",
                "Without the driver torch sees no GPU, and trains on the CPU.",
                "load the driver (modprobe nvidia), reinstall it for this kernel, or look for 'NVRM: Xid' in dmesg",
            )
        ]
    if not gpus:
        return [skipped("GPU", "nvidia-smi is not here, or shows none")]
    return [ecc(gpus), throttling(gpus), other_processes(gpus, processes), compute_mode(gpus)]


def _which(gpus: Sequence[Gpu], field: str, wrong: str) -> list[int]:
    return [number for number, gpu in enumerate(gpus) if gpu.get(field) == wrong]


def ecc(gpus: Sequence[Gpu]) -> Finding:
    check = "GPU memory errors"
    counts = [gpu["ecc.errors.uncorrected.volatile.total"] for gpu in gpus]
    bad = [f"GPU {number}: {count}" for number, count in enumerate(counts) if count.isdecimal() and int(count)]
    pending = [f"GPU {number}: a page waits to be retired" for number in _which(gpus, "retired_pages.pending", "Yes")]
    if not bad and not pending:
        return ok(check, f"none on {len(gpus)} GPUs" if any(map(str.isdecimal, counts)) else "ECC is off")
    return Finding(
        check,
        "failure",
        f"uncorrected ECC errors: {', '.join(bad + pending)}",
        "A GPU whose memory fails ends processes with 'uncorrectable ECC error encountered', or computes wrongly.",
        "drain the machine and reset the GPU (nvidia-smi -r); if they come back, have it replaced",
    )


def throttling(gpus: Sequence[Gpu]) -> Finding:
    check = "GPU clocks"
    slow = []
    for number, gpu in enumerate(gpus):
        reasons = [name.rpartition(".")[2] for name in FIELDS if "throttle" in name and gpu.get(name) == "Active"]
        if reasons:
            slow.append(f"GPU {number} at {gpu['temperature.gpu']} °C: {', '.join(reasons)}")
    if not slow:
        return ok(check, "no throttling")
    return Finding(
        check,
        "warning",
        f"throttled: {'; '.join(slow)}",
        "A step lasts as long as its slowest worker.",
        "look after cooling and power (nvidia-smi -q -d PERFORMANCE), or leave this GPU out (CUDA_VISIBLE_DEVICES)",
    )


def other_processes(gpus: Sequence[Gpu], processes: Sequence[tuple[int, str, int]]) -> Finding:
    check = "GPU processes"
    if not processes:
        used = ", ".join(size(_bytes(gpu["memory.used"])) for gpu in gpus)
        return ok(check, f"no other process; memory in use: {used}")
    return Finding(
        check,
        "warning",
        "other processes use the GPUs: " + ", ".join(f"{name} ({pid}, {size(room)})" for pid, name, room in processes),
        "They take memory and time: 'CUDA out of memory', and steps that vary.",
        "end them, or choose other GPUs with CUDA_VISIBLE_DEVICES",
    )


def compute_mode(gpus: Sequence[Gpu]) -> Finding:
    check = "GPU compute mode"
    if not (closed := _which(gpus, "compute_mode", "Prohibited")):
        return ok(check, f"open; {_HINTS}")
    return Finding(
        check,
        "failure",
        f"GPU {', '.join(map(str, closed))}: no process may compute there",
        "Workers fail with 'all CUDA-capable devices are busy or unavailable'.",
        "nvidia-smi -c DEFAULT",
    )


def visible(gpus: int, seen: int, variable: str | None, built_with: str | None, workers: int) -> Finding:
    """Check that torch sees the GPUs of the machine.

    Args:
        variable: value of CUDA_VISIBLE_DEVICES, or None.
        built_with: CUDA version that torch was built with, or None.
    """
    check = "visible GPUs"
    values = f"torch sees {seen} of {gpus} GPUs"
    if gpus == seen == 0:
        return skipped(check, "there is no GPU")
    if seen == gpus or (variable is not None and workers <= seen):
        return ok(check, values)
    reason = f"CUDA_VISIBLE_DEVICES={variable}" if variable is not None else f"torch is built for CUDA {built_with}"
    return Finding(
        check,
        "failure" if workers > seen and seen else "warning",
        f"hidden GPUs: {values} ({reason if variable is not None or built_with else 'torch is built without CUDA'}), "
        f"for {counted(workers, 'worker')}",
        "Each worker takes a GPU of its own; without one it trains on the CPU, or fails with 'invalid device ordinal'.",
        "unset CUDA_VISIBLE_DEVICES, install a torch built for this driver, or start as many workers as GPUs are seen",
    )
