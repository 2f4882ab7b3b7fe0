"""The examples run as they stand, and the Paceline scripts differ little from the plain ones."""

from __future__ import annotations

import difflib
import gzip
import importlib
import os
import re
import struct
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from fork_server import PACELINE, Command, ForkServer

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
MNIST = ROOT.parent / "shared" / "data" / "mnist"
PICTURES, LABELS = "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"

NAMES = ["mlp", "convnet", "gpt"]
WORKERS = {"mlp": 3, "convnet": 2, "gpt": 2}

# Lines of a Paceline script that the plain one does not have: those that train, `start` to `evaluate`,
# and all, with imports and with printing by one worker. Docstring and indentation do not count.
MOST_CHANGES = {"mlp": (4, 8), "convnet": (9, 13), "gpt": (9, 13)}

needs_mnist = pytest.mark.skipif(not MNIST.is_dir(), reason=f"MNIST's test files are not in {MNIST}")


Output = Callable[..., str]


@pytest.fixture
def output_of(fork_server: ForkServer, tmp_path: Path) -> Output:
    """What a Python command prints; it must succeed."""

    def run(*command: object, **variables: str) -> str:
        out, err = tmp_path / "out", tmp_path / "err"
        words = tuple(map(str, command))
        code = fork_server.run(Command(words, os.environ | variables, out, err, tmp_path), 120)
        assert code == 0, out.read_text() + err.read_text()
        return out.read_text()

    return run


def fingerprint(output: str) -> str:
    return re.findall(r"fingerprint ([0-9a-f]{64})$", output, re.MULTILINE)[0]


def accuracy(output: str) -> float:
    return float(re.findall(r"test accuracy ([0-9.]+)%", output)[-1])


@pytest.fixture
def arguments(tmp_path: Path) -> dict[str, list[object]]:
    """Little work for each example: a short text, and one epoch."""
    text = tmp_path / "text.txt"
    lines = [f"{number} riders are faster together than {number - 1} alone.\n" for number in range(2, 80)]
    text.write_text("".join(lines), encoding="utf-8")
    return {"mlp": ["--epochs", 4], "convnet": ["--epochs", 1], "gpt": [text, "--epochs", 1]}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", NAMES)
def test_plain_script(name: str, arguments: dict[str, list[object]], output_of: Output) -> None:
    output = output_of(EXAMPLES / f"{name}_plain.py", *arguments[name])
    assert re.search(r"test accuracy|validation loss", output)


@pytest.mark.slow(turns=6)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name == "convnet" else []) for name in NAMES]
)
def test_same_output_on_any_number_of_workers(
    name: str, arguments: dict[str, list[object]], output_of: Output, tmp_path: Path
) -> None:
    """Also when the model is cut into as many stages."""
    script = EXAMPLES / f"{name}.py"
    alone = output_of(script, *arguments[name], PACELINE_EXACT="true")
    for strategy in ("allreduce", "pipeline"):
        choice = "--set", f"strategy={strategy}", "--set", "exact=true", "--runs-dir", tmp_path / "runs"
        together = output_of(*PACELINE, "run", "-n", WORKERS[name], *choice, script, *arguments[name])
        assert fingerprint(together) == fingerprint(alone)
        assert together.count("fingerprint") == 1, "one worker prints"
        assert together.replace("[rank 0] ", "") == alone
    if name == "mlp":
        assert accuracy(alone) > 80


def code(name: str) -> list[str]:
    """The lines of an example after its docstring, without indentation and empty lines."""
    lines = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8").splitlines()[1:]
    return [line.strip() for line in lines if line.strip()]


@pytest.mark.parametrize("name", NAMES)
def test_few_lines_change(name: str) -> None:
    changes = list(difflib.ndiff(code(f"{name}_plain"), code(name)))
    new = [line[2:] for line in changes if line.startswith("+ ")]
    reports = [line for line in new if re.search(r"print\(|fingerprint|session\.rank", line)]
    imports = [line for line in new if re.match(r"import|from", line)]
    training = [line for line in new if line not in reports + imports]
    most_training, most = MOST_CHANGES[name]
    assert len(training) <= most_training, training
    assert len(new) <= most, new


@pytest.mark.parametrize("name", NAMES)
def test_a_session_replaces_the_training_only(name: str) -> None:
    """Data, model and options are the same lines in the same order."""
    plain, ours = code(f"{name}_plain"), code(name)
    start = plain.index("def evaluate(model, data, metric):")
    plain = plain[:start] + plain[start + 6 :]
    before = ours[: next(place for place, line in enumerate(ours) if line.startswith(("optimizer =", "session =")))]
    kept = [line for line in before if line not in ("import paceline", "from functools import partial")]
    until = plain.index(next(line for line in plain if line.startswith("loader =")))
    assert kept == [line for line in plain[:until] if line != "from torch.utils.data import DataLoader"]


@needs_mnist
@pytest.mark.slow
def test_mnist(output_of: Output) -> None:
    assert accuracy(output_of(EXAMPLES / "mlp.py", MNIST, "--epochs", 1)) > 85


@pytest.fixture
def digits_data(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module("digits_data")


def write_idx(path: Path, values: torch.Tensor) -> None:
    head = struct.pack(f">BBBB{values.ndim}I", 0, 0, 8, values.ndim, *values.shape)
    data = head + bytes(values.flatten().tolist())
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


@needs_mnist
def test_mnist_by_files(digits_data: ModuleType) -> None:
    train, test = digits_data.read_digits([MNIST / f"{PICTURES}.gz", MNIST / f"{LABELS}.gz"])
    assert (len(train), len(test), train.side) == (8_000, 2_000, 28)


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_idx_files(ending: str, tmp_path: Path, digits_data: ModuleType) -> None:
    pictures = torch.arange(10 * 4 * 4).reshape(10, 4, 4)
    write_idx(tmp_path / f"{PICTURES}{ending}", pictures)
    write_idx(tmp_path / f"{LABELS}{ending}", torch.arange(10))
    train, test = digits_data.read_digits([tmp_path])
    assert (len(train), len(test), train.side) == (8, 2, 4)
    picture, label = test[1]
    assert label == 9
    assert torch.equal(picture, pictures[9:].float() / 255)

    write_idx(tmp_path / f"train-images-idx3-ubyte{ending}", pictures.flip(0))
    write_idx(tmp_path / f"train-labels-idx1-ubyte{ending}", torch.arange(10).flip(0))
    train, test = digits_data.read_digits([tmp_path])
    assert (len(train), len(test)) == (10, 10)
    assert (train[0][1], test[0][1]) == (9, 0)


def test_missing_files_are_named(tmp_path: Path, digits_data: ModuleType) -> None:
    with pytest.raises(SystemExit, match=f"There is no {PICTURES}.gz, zipped or not, in"):
        digits_data.read_digits([tmp_path])


def test_a_shift_moves_by_whole_pixels(digits_data: ModuleType) -> None:
    picture = torch.zeros(1, 5, 5)
    picture[0, 2, 2] = 1
    data = digits_data.Digits(picture, torch.tensor([3]), shift=1)
    torch.manual_seed(0)
    places = {tuple(data[0][0][0].nonzero()[0].tolist()) for _ in range(200)}
    assert places == {(row, column) for row in (1, 2, 3) for column in (1, 2, 3)}
    assert data[0][0].shape == (1, 5, 5)
