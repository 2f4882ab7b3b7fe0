"""Scripts as they are written for one process, and their ports: few lines change, and the losses stay."""

from __future__ import annotations

import difflib
import hashlib
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from fork_server import PACELINE, Command, ForkServer

from paceline.testing import ranks

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
PAGE = ROOT / "docs" / "porting.md"
IN_ORDER = Path(__file__).with_name("run_in_order.py")


@dataclass(frozen=True)
class Port:
    """A port.

    Attributes:
        most: lines that it may add.
        arguments: for little work.
        alike: how much its numbers may differ from the original's, relatively, where they are computed from the same
            samples and random numbers; they are printed with four digits.
    """

    most: int
    arguments: tuple[str, ...] = ("--epochs", "1")
    alike: float = 3e-4


PORTS = {
    "images": Port(most=11),
    "vae": Port(most=10),
    "recurrent": Port(most=15),
    "bert": Port(most=9),
    "dcgan": Port(most=18),
    "contrastive": Port(most=10),
    "muon": Port(most=8),
}

needs_muon = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this PyTorch has no Muon")
TRAINED = [pytest.param(name, marks=[needs_muon] if name == "muon" else []) for name in PORTS]


def code(name: str) -> list[str]:
    """The lines of an example but for its docstring, comments, empty lines and indentation."""
    lines = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8").splitlines()[1:]
    stripped = [re.sub(r"  # .*", "", line).strip() for line in lines]
    return [line for line in stripped if line and not line.startswith("#")]


def changes(name: str) -> tuple[list[str], list[str]]:
    """The lines that the port has added, and those that it has left out."""
    lines = list(difflib.unified_diff(code(f"{name}_plain"), code(name), n=0, lineterm=""))[2:]
    added = [line[1:] for line in lines if line.startswith("+")]
    return added, [line[1:] for line in lines if line.startswith("-")]


@pytest.mark.parametrize(
    ("name", "most"), [*((name, port.most) for name, port in PORTS.items()), ("convnet", 12), ("gpt", 15)]
)
def test_few_lines_change(name: str, most: int) -> None:
    added, removed = changes(name)
    assert len(added) <= most, added
    assert f"| `{name}.py` | {len(added)} | {len(removed)} |" in re.sub(r"  +", " ", PAGE.read_text(encoding="utf-8"))


def test_muon_beside_adamw_needs_few_more_lines() -> None:
    """Than the script that trains the same model with AdamW alone; without imports, printing and saving."""
    other = r"import |from |print|session\.(print|export|rank)|if session|fingerprint"
    muon, adamw = ([line for line in changes(name)[0] if not re.match(other, line)] for name in ("muon", "mlp"))
    assert len(muon) - len(adamw) <= 3, (muon, adamw)


class Runs:
    """Runs scripts in a folder, each with little work."""

    def __init__(self, server: ForkServer, folder: Path) -> None:
        self.server, self.folder = server, folder

    def environment(self, **variables: str) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": str(ROOT), **variables}

    def output_of(self, *words: object, **variables: str) -> str:
        """What a Python command prints; it must succeed."""
        out, err = self.folder / "out", self.folder / "err"
        command = Command(tuple(map(str, words)), self.environment(**variables), out, err, self.folder)
        assert self.server.run(command, 120) == 0, out.read_text() + err.read_text()
        return out.read_text()

    def words(self, name: str, save: str) -> tuple[object, ...]:
        return EXAMPLES / f"{name}.py", *PORTS[name.removesuffix("_plain")].arguments, "--save", self.folder / save

    def weights(self, save: str) -> str:
        """A hash of the weights that were saved."""
        made = hashlib.sha256()
        for name, value in torch.load(self.folder / save, weights_only=True).items():
            made.update(name.encode() + value.contiguous().numpy().tobytes())
        return made.hexdigest()


@pytest.fixture
def runs(fork_server: ForkServer, tmp_path: Path) -> Runs:
    return Runs(fork_server, tmp_path)


def numbers(output: str) -> list[float]:
    return [float(number) for number in re.findall(r"-?\d+\.\d+", output)]


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINED)
def test_the_losses_are_those_of_the_original(name: str, runs: Runs) -> None:
    """With its samples and random numbers; so that these are the same, a batch is one microbatch."""
    plain = runs.output_of(IN_ORDER, *runs.words(f"{name}_plain", "plain.pt"))
    ours = runs.output_of(*runs.words(name, "ours.pt"), PACELINE_MICROBATCHES="1")
    assert re.sub(r"\d+\.\d+", "", ours) == re.sub(r"\d+\.\d+", "", plain)
    assert numbers(ours) == pytest.approx(numbers(plain), rel=PORTS[name].alike)
    trained, expected = (torch.load(runs.folder / save, weights_only=True) for save in ("ours.pt", "plain.pt"))
    assert trained.keys() == expected.keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["convnet", "gpt"])
def test_losses_with_random_samples(name: str, runs: Runs) -> None:
    """Of examples whose data sets draw random numbers."""
    text = runs.folder / "text.txt"
    text.write_text("".join(f"{number} riders are faster than {number - 1}.\n" for number in range(2, 99)))
    arguments = ([text] if name == "gpt" else []) + ["--epochs", 1]
    plain = runs.output_of(IN_ORDER, EXAMPLES / f"{name}_plain.py", *arguments)
    ours = runs.output_of(EXAMPLES / f"{name}.py", *arguments, PACELINE_MICROBATCHES="1").splitlines()
    assert ours.pop().startswith("fingerprint ")
    assert numbers("\n".join(ours)) == pytest.approx(numbers(plain), rel=3e-4)


@pytest.mark.slow(turns=7)
@pytest.mark.parametrize("name", TRAINED)
def test_one_result_however_it_is_started(name: str, runs: Runs) -> None:
    """By Python, with the variables of torchrun, and by ``paceline run``: the same lines and weights."""
    alone = runs.output_of(*runs.words(name, "alone.pt"), PACELINE_EXACT="true")
    options = "run", "-n", 3, "--set", "exact=true", "--runs-dir", runs.folder / "runs"
    together = runs.output_of(*PACELINE, *options, *runs.words(name, "together.pt"))
    assert together.replace("[rank 0] ", "") == alone
    assert runs.weights("together.pt") == runs.weights("alone.pt")
    first, second = start_by_variables(name, runs)
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert (first.out, second.out) == (alone, "")
    assert runs.weights("ranks.pt") == runs.weights("alone.pt")


def start_by_variables(name: str, runs: Runs) -> list[ranks.Ended]:
    """Two processes with the variables that torchrun sets."""
    script, *arguments = runs.words(name, "ranks.pt")
    start = (
        f"import runpy, sys\nsys.argv = {[str(script), *map(str, arguments)]}\nsys.path.insert(0, {str(EXAMPLES)!r})\n"
        f"runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    variables = {"PACELINE_EXACT": "true"}
    return ranks.run(start, 2, runs.folder, environment=variables, start=runs.server.start_workers)


@pytest.mark.slow(turns=6)
def test_torchrun(runs: Runs) -> None:
    name = "vae"
    alone = runs.output_of(*runs.words(name, "alone.pt"), PACELINE_EXACT="true")
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    words = [str(word) for word in (*torchrun, *runs.words(name, "torchrun.pt"))]
    environment = runs.environment(PACELINE_EXACT="true", OMP_NUM_THREADS="1")
    done = subprocess.run(words, env=environment, cwd=runs.folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == alone
    assert runs.weights("torchrun.pt") == runs.weights("alone.pt")
