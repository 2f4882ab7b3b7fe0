"""Comparisons of the properties that must be the same on all machines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from paceline.diagnostics.doctor.finding import Finding, ok, size, skipped

_CLOCK_OFF, _CLOCK_FAR_OFF = 1.0, 60.0
_MEMORY_DIFFERS = 2.0

Facts = Mapping[str, Any]  # facts about a machine (:mod:`paceline.diagnostics.doctor.examine`)
Machines = Mapping[str, Facts]  # facts by machine name


def compare(machines: Machines) -> list[Finding]:
    loaded = {name: facts for name, facts in machines.items() if "error" not in facts["torch"]}
    return [
        *versions(machines),
        *(torch_loads(name, facts["torch"]) for name, facts in machines.items()),
        *cuda(loaded, {name: facts["driver"] for name, facts in machines.items()}),
        instructions(loaded),
        canary(loaded),
        gpus(loaded),
        script(machines),
        data(machines),
        mtu(machines),
        memory(machines),
    ]


def who(values: Mapping[str, object]) -> str:
    """Return text such as ``2.13.0 on h1, h3; 2.12.0 on h2``, with the most common value first."""
    shown = {name: "nothing" if value in (None, "") else str(value) for name, value in values.items()}
    order = [value for value, _ in Counter(shown.values()).most_common()]
    return "; ".join(f"{value} on {', '.join(name for name in shown if shown[name] == value)}" for value in order)


def same(check: str, values: Mapping[str, object], why: str, cure: str, label: str = "") -> Finding:
    if len({str(value) for value in values.values()}) < 2:
        return ok(check, f"{label or check} {next(iter(values.values()), None)}")
    return Finding(check, "failure", f"{label or check} differs: {who(values)}", why, cure)


def alike(check: str, values: Mapping[str, str], label: str, why: str, cure: str, unknown: str = "") -> Finding:
    """Compare values that should be equal on all machines but need not be. A difference is a warning."""
    if len(set(values.values())) < 2:
        return ok(check, next(iter(values.values()), unknown))
    return Finding(check, "warning", f"{label}: {who(values)}", why, cure)


def versions(machines: Machines) -> list[Finding]:
    libraries = ("Python", "torch", "numpy", "paceline")
    return [
        same(
            f"{name if name != 'numpy' else 'NumPy'} version",
            {machine: _version(name, facts) for machine, facts in machines.items()},
            "Another version may compute different bits, or order random numbers differently; workers refuse to start.",
            "install the same versions everywhere: pip freeze on one machine, pip install -r on the others",
        )
        for name in libraries
    ]


def _version(name: str, facts: Facts) -> object:
    """Return the installed version. For torch, add the imported version if it is different."""
    installed, imported = facts["versions"].get(name), facts["torch"].get(name)
    if imported is None or str(imported).partition("+")[0] == str(installed).partition("+")[0]:
        return installed
    return f"{installed} (imported: {imported})"


def torch_loads(machine: str, facts: Facts) -> Finding:
    check = "torch"
    if "error" not in facts:
        return ok(check, f"torch {facts.get('torch')} loads").at(machine)
    return Finding(
        check,
        "failure",
        f"torch cannot be imported: {facts['error']}",
        "No worker can start here.",
        "install it again in this environment: pip install --force-reinstall torch",
        machine,
    )


def cuda(loaded: Machines, drivers: Mapping[str, object]) -> list[Finding]:
    """Compare the CUDA, cuDNN and NCCL versions of torch where it loads, and the driver versions."""
    found = [
        same(
            f"{library} version",
            {name: facts["torch"].get(library) for name, facts in loaded.items()},
            "Two versions of NCCL cannot talk to each other, and two versions of a kernel compute different bits.",
            "install the same build of torch everywhere",
        )
        for library in ("CUDA", "cuDNN", "NCCL")
    ]
    why, cure = "An old driver may not load the newest kernels.", "install the same NVIDIA driver everywhere"
    driver = same("driver version", drivers, why, cure)
    driver = replace(driver, status="warning") if driver.status == "failure" else driver
    return [one for one in [*found, driver] if not one.values.endswith((" None", " "))]


def instructions(loaded: Machines) -> Finding:
    """Compare the instruction sets, which decide how libraries compute."""
    values = {
        name: f"{facts['torch'].get('instructions', 'unknown')} ({facts['processor']['instructions']})"
        for name, facts in loaded.items()
    }
    return alike(
        "instruction sets",
        values,
        "processors differ",
        "With other instructions, libraries add in another order and get other bits, which workers refuse with "
        "exact=True; the oldest processor sets the pace.",
        "use machines of one kind, or set ATEN_CPU_CAPABILITY on all of them to what the oldest supports",
    )


def canary(loaded: Machines) -> Finding:
    check = "processor canary"
    values = {name: facts["torch"].get("canary") for name, facts in loaded.items()}
    if len(set(values.values())) < 2:
        return ok(check, f"the same bits ({next(iter(values.values()), 'none')})")
    models = {name: facts["processor"]["model"] for name, facts in loaded.items()}
    return Finding(
        check,
        "failure",
        f"the same computation gives different bits: {who(values)} (processors: {who(models)})",
        "exact=True cannot give the same bits on these machines; without it results vary by rounding.",
        "use machines with the same processor and libraries, and the same variables for them (ATEN_CPU_CAPABILITY, "
        "MKL_ENABLE_INSTRUCTIONS, ONEDNN_MAX_CPU_ISA)",
    )


def gpus(loaded: Machines) -> Finding:
    check = "GPUs"
    values = {name: ", ".join(_counted(facts["torch"].get("gpus", ()))) for name, facts in loaded.items()}
    if not any(values.values()):
        return skipped(check, "torch sees none")
    return alike(
        check,
        values,
        "GPUs differ",
        "Workers without a GPU train on the CPU, or the run does not start; different GPUs compute different bits, and "
        "the slowest sets the pace.",
        "use machines of one kind, and look for CUDA_VISIBLE_DEVICES, nvidia-smi and a torch without CUDA",
    )


def _counted(names: Sequence[str]) -> list[str]:
    return [f"{count} x {name}" for name, count in Counter(names).items()]


def script(machines: Machines) -> Finding:
    check = "script"
    if not (given := {name: facts["script"] for name, facts in machines.items() if facts["script"]}):
        return skipped(check, "none was given")
    if missing := [f"{name} ({one['path']})" for name, one in given.items() if one["hash"] is None]:
        return Finding(
            check,
            "failure",
            f"the script is missing on {', '.join(missing)}",
            "Each machine starts its own copy.",
            "copy it there, into the same folder: rsync, git pull, or a shared file system",
        )
    return same(
        check,
        {name: one["hash"] for name, one in given.items()},
        "Machines would train different programs; workers compare the script, and refuse to start.",
        "copy the same files to every machine",
        "the content of the script",
    )


def data(machines: Machines) -> Finding:
    check = "data"
    if not (given := {name: facts["data"] for name, facts in machines.items() if facts["data"]}):
        return skipped(check, "none was given (--data)")
    cure = "copy the same files to every machine, or put them on a shared file system"
    absent = [f"{one['path']} {one['error']} on {name}" for name, one in given.items() if "error" in one]
    if absent:
        why = "Every worker reads its own share of every batch."
        return Finding(check, "failure", f"the data set {'; '.join(absent)}", why, cure)
    values = {name: f"{one['files']} files, {size(one['bytes'])}, hash {one['hash']}" for name, one in given.items()}
    why = "A sample number must mean the same sample on all machines."
    return same(check, values, why, cure, "the data set")


def clock(offsets: Mapping[str, float]) -> Finding:
    """Compare the clocks with the first machine's clock.

    Args:
        offsets: seconds by which each machine's clock is ahead of the first machine's.
    """
    check = "clock"
    if not (off := {name: offset for name, offset in offsets.items() if abs(offset) > _CLOCK_OFF}):
        return ok(check, f"within {max(map(abs, offsets.values()), default=0.0):.3f} s of each other")
    worst = max(map(abs, off.values()))
    each = [f"{name} is {abs(offset):.1f} s {'ahead' if offset > 0 else 'behind'}" for name, offset in off.items()]
    return Finding(
        check,
        "failure" if worst > _CLOCK_FAR_OFF else "warning",
        f"clocks differ: {', '.join(each)}",
        "Events of several machines cannot be put in order, the newest checkpoint may not be the newest, and "
        "certificates of object stores and Kubernetes are refused.",
        "let chrony or systemd-timesyncd set the clock (timedatectl set-ntp true)",
    )


def mtu(machines: Machines) -> Finding:
    values = {name: str(facts["interface"].get("mtu")) for name, facts in machines.items() if facts["interface"]}
    return alike(
        "MTU",
        values,
        "MTU differs",
        "A packet that one machine sends may be too large for the other, or for a switch between them: connections "
        "open, and stop at the first large message.",
        "set the same MTU on all interfaces of this network, and on its switches (ip link set DEVICE mtu 1500)",
        "unknown",
    )


def memory(machines: Machines) -> Finding:
    check = "memory of the machines"
    values = {name: facts["memory"] for name, facts in machines.items()}
    least, most = min(values.values()), max(values.values())
    if most <= _MEMORY_DIFFERS * least:
        return ok(check, ", ".join(sorted({size(value) for value in values.values()})))
    return Finding(
        check,
        "warning",
        f"memory differs: {who({name: size(value) for name, value in values.items()})}",
        "A worker that fits into one machine is killed on the other.",
        "give the machines the same memory limit, or start fewer workers where it is smaller",
    )
