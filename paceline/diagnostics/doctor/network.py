"""Checks of this machine's network: names, interfaces, and the port of the rendezvous."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.coordinator.machines import interface_of
from paceline.diagnostics.doctor.finding import Finding, ok
from paceline.environments import env
from paceline.launchers.machine import number_in

_NET = Path("/sys/class/net")


@dataclass(frozen=True)
class Interface:
    """Network interface of this machine: its name, its MTU in bytes, and its speed in Mbit/s if known."""

    name: str
    mtu: int
    speed: int | None


def interface_at(address: str) -> Interface | None:
    if (name := interface_of(address)) is None:
        return None
    speed = number_in(_NET / name / "speed")
    return Interface(name, number_in(_NET / name / "mtu") or 0, speed if speed and speed > 0 else None)


def resolve(name: str) -> str | None:
    """Return the IPv4 address of a name as this machine resolves it, or None."""
    try:
        return str(socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError):
        return None


def own_name(name: str, address: str | None, machines: int) -> Finding:
    check = "own name"
    if address is not None and not (env.is_loopback(address) and machines > 1):
        return ok(check, f"{name} is {address}")
    found = f"resolves to {address}, which no other machine can reach" if address else "has no address here"
    return Finding(
        check,
        "warning",
        f"wrong name resolution: the machine's own name {name} {found}",
        "Paceline tells its workers the interface; torchrun, and gloo without GLOO_SOCKET_IFNAME, take the address of "
        "this name, and the others then fail with 'Connection refused'.",
        f"in /etc/hosts, give {name} the address of the network instead of {address or 'none'}",
    )


def rendezvous_name(text: str, name: str, address: str, machines: int) -> Finding:
    check = "rendezvous name"
    if machines < 2 or not env.is_loopback(address) or env.is_loopback(name):
        return ok(check, f"{name} is {address}")
    return Finding(
        check,
        "failure",
        f"wrong name resolution: {name} resolves to {address} on {socket.gethostname()}",
        "No other machine can reach that address (Debian writes 127.0.1.1 for a machine's own name into /etc/hosts): "
        "the first machine would listen where none can connect, and each other one would take itself for the first.",
        f"in /etc/hosts, give {name} the address of the network, or write the address into --rendezvous {text}",
    )


def same_address(name: str, found: Mapping[str, str | None]) -> Finding:
    check = "rendezvous name"
    known = {machine: address for machine, address in found.items() if address and not env.is_loopback(address)}
    if len(set(known.values())) < 2:
        return ok(check, f"{name} is the same address on all machines")
    return Finding(
        check,
        "warning",
        "wrong name resolution: " + ", ".join(f"{name} is {address} on {where}" for where, address in known.items()),
        "Machines that use different addresses do not meet, or meet over a different network from the rest.",
        "give the name one address: the same /etc/hosts or DNS on all machines",
    )


def check_names(machine: str, resolved: Mapping[str, str | None], addresses: Mapping[str, str]) -> Finding:
    """Check that a machine resolves the other machines' names to their addresses.

    Args:
        resolved: address of each name on that machine.
    """
    check = "names of the others"
    wrong = [
        f"{name} {f'is {found}' if found else 'has no address'}, and it is at {addresses[name]}"
        for name, found in resolved.items()
        if name != machine and found != addresses[name]
    ]
    if not wrong:
        return ok(check, f"{len(resolved)} names")
    return Finding(
        check,
        "warning",
        f"wrong name resolution: {'; '.join(wrong)}",
        "Paceline connects by address; MPI, Ray, Spark and ssh connect by name, and so do scripts.",
        "give all machines the same /etc/hosts, or DNS",
    )


def interface_variables(variables: Mapping[str, str], own: Interface | None, interfaces: Sequence[str]) -> Finding:
    """Check that the interfaces that the user chose for gloo and NCCL are those that reach the other machines."""
    check = "network interface"
    name = own.name if own else "unknown"
    wrong = []
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if (value := variables.get(variable)) is None:
            continue
        if not (chosen := _chosen(value, interfaces, prefixes=variable.startswith("NCCL"))):
            wrong.append(f"{variable}={value}, and there is no such interface (there are {', '.join(interfaces)})")
        elif own and own.name not in chosen:
            wrong.append(f"{variable}={value}, and the other machines are reached through {own.name}")
    if not wrong:
        speed = f", {own.speed} Mbit/s" if own and own.speed else ""
        return ok(check, f"{name}, MTU {own.mtu if own else 'unknown'}{speed}")
    return Finding(
        check,
        "failure",
        f"wrong interface: {'; '.join(wrong)}",
        "Workers would tell each other addresses that cannot be reached: they wait until the timeout, or fail with "
        "'Unable to find address for' or 'no socket interface found'.",
        f"unset the variable (Paceline chooses {name}), or set it to {name}",
    )


def _chosen(value: str, interfaces: Sequence[str], prefixes: bool) -> list[str]:
    """Return the interfaces that a variable names. NCCL takes prefixes, ``=`` for full names, ``^`` for exclusion."""
    if not prefixes:
        return [name for name in interfaces if name in value.split(",")]
    without, exact = value.startswith("^"), value.lstrip("^").startswith("=")
    words = value.lstrip("^").lstrip("=").split(",")
    named = {one for one in interfaces for word in words if one == word or (not exact and one.startswith(word))}
    return [one for one in interfaces if (one in named) != without]


def port_in_use(port: int, error: str) -> Finding:
    return Finding(
        "rendezvous port",
        "failure",
        f"port {port} is in use here: {error}",
        "The run cannot listen there, and the other machines would talk to that program.",
        "end that program (`ss -ltnp` names it), or choose another port in --rendezvous",
    )
