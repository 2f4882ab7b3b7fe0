"""Two machines for the doctor: network namespaces with names, addresses and a cable of their own."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PACELINE = str(Path(sys.executable).with_name("paceline"))
PORT = 29518
WITHOUT_TORCH = """
import json, os, sys
if "paceline.diagnostics.doctor.torch_facts" in sys.orig_argv:
    print(json.dumps({"torch": "2", "CUDA": None, "instructions": "", "canary": "", "gpus": []}), flush=True)
    os._exit(0)
"""
"""The facts about torch of two machines that are alike in it, without the seconds of its import."""
ETC = Path("/etc/netns")
SECONDS = 240.0


def missing(*commands: str) -> str | None:
    """Why there can be no namespaces here."""
    absent = [one for one in ("ip", "unshare", *commands) if shutil.which(one) is None]
    return "needs root" if os.getuid() else f"needs the command {absent[0]}" if absent else None


@dataclass
class Doctor:
    """A doctor that has ended."""

    code: int
    findings: list[dict[str, str]]
    said: str

    def found(self, check: str, place: str = "") -> str:
        """What is wrong, of one check."""
        return "; ".join(
            f"{one['status']}: {one['values']}"
            for one in self.findings
            if one["check"] == check and one["status"] in ("warning", "failure") and one["place"].startswith(place)
        )

    def wrong(self) -> set[str]:
        return {one["check"] for one in self.findings if one["status"] in ("warning", "failure")}


def ended(process: subprocess.Popen[str]) -> Doctor:
    out, said = process.communicate(timeout=SECONDS)
    found = json.loads(out) if out.startswith("{") else {"findings": []}
    return Doctor(process.returncode, found["findings"], said + (out if not out.startswith("{") else ""))


def doctor(
    folder: Path, *options: str, setup: str = "", before: tuple[str, ...] = (), **variables: str
) -> subprocess.Popen[str]:
    """Start the doctor behind some lines of shell, in a mount namespace of its own."""
    inside = ["unshare", "--mount", "--uts", "sh", "-ec", f'{setup}\nexec "$@"', "sh", PACELINE, "doctor", "--json"]
    return subprocess.Popen(
        [*before, *inside, *options],
        cwd=folder,
        env={**os.environ, **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@dataclass
class TwoHosts:
    """h1 and h2; h1 holds the doctor."""

    folder: Path
    running: list[subprocess.Popen[str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.mark = f"{os.getpid() % 100000}"
        self.net = f"10.{os.getpid() % 200 + 20}.78"
        self.spaces = {name: f"pd{self.mark}{name}" for name in ("h1", "h2")}
        (self.folder / "secret").touch(mode=0o600)
        (self.folder / "secret").write_text(32 * "x")
        (self.folder / "sitecustomize.py").write_text(WITHOUT_TORCH)

    def up(self) -> None:
        first, second = self.spaces.values()
        for name, space in self.spaces.items():
            self.names(name)
            ip(f"netns add {space}")
        ip(f"link add pdc{self.mark} netns {first} type veth peer name eth0 netns {second}")
        ip(f"-n {first} link set pdc{self.mark} name eth0")
        for place, space in enumerate(self.spaces.values(), 1):
            ip(f"-n {space} addr add {self.net}.{place}/24 dev eth0")
            ip(f"-n {space} link set eth0 up")
            ip(f"-n {space} link set lo up")

    def names(self, where: str, **others: str) -> None:
        """Write /etc/hosts of a machine; what is given there replaces an address, or takes away the name."""
        known = {"localhost": "127.0.0.1", "h1": f"{self.net}.1", "h2": f"{self.net}.2", **others}
        etc = ETC / self.spaces[where]
        etc.mkdir(parents=True, exist_ok=True)
        (etc / "hosts").write_text("".join(f"{address} {name}\n" for name, address in known.items() if address))

    def down(self) -> None:
        for process in self.running:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signal.SIGKILL)
            process.communicate()
        for space in self.spaces.values():
            subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True)
            shutil.rmtree(ETC / space, ignore_errors=True)

    def run(self, where: str, *command: str, **options: Any) -> None:
        """Run a command on a machine."""
        subprocess.run(
            ["ip", "netns", "exec", self.spaces[where], *command], check=True, capture_output=True, **options
        )

    def firewall(self, where: str, *rules: str, hook: str = "input") -> None:
        lines = "\n".join(rules)
        text = f"table inet test {{\n chain one {{\n type filter hook {hook} priority 0;\n{lines}\n }}\n}}\n"
        self.run(where, "nft", "-f", "-", input=text, text=True)

    def shape(self, where: str, rate: str) -> None:
        self.run(where, "tc", *f"qdisc add dev eth0 root tbf rate {rate} burst 32kb latency 50ms".split())

    def heal(self) -> None:
        """Take away all that a test has done to the network."""
        for name, space in self.spaces.items():
            if shutil.which("nft"):
                self.run(name, "nft", "flush", "ruleset")
            subprocess.run(["tc", "-n", space, "qdisc", "del", "dev", "eth0", "root"], check=False, capture_output=True)
            ip(f"-n {space} link set eth0 mtu 1500")
            self.names(name)

    def start(
        self, where: str, *options: str, setup: str = "", patience: float = 120.0, torch: bool = False, **variables: str
    ) -> subprocess.Popen[str]:
        """``paceline doctor`` on a machine, in a folder of its own; ``torch``: it looks at torch, too."""
        if not torch:
            variables["PYTHONPATH"] = str(self.folder)
        folder = self.folder / where
        folder.mkdir(exist_ok=True)
        shared = ["--nodes", "2", "--rendezvous", f"h1:{PORT}", "--patience", f"{patience}"]
        if "--secret-file" not in options:
            shared += ["--secret-file", str(self.folder / "secret")]
        before = ("ip", "netns", "exec", self.spaces[where])
        process = doctor(folder, *shared, *options, setup=f"hostname {where}\n{setup}", before=before, **variables)
        self.running.append(process)
        return process

    def both(self, *options: str, torch: bool = False) -> Doctor:
        """The report of two machines that are started alike."""
        first, second = (self.start(name, *options, torch=torch) for name in self.spaces)
        report, other = ended(first), ended(second)
        assert report.code == other.code, other.said
        return report


def ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True, capture_output=True)
