"""A checkpoint that does not fit, or is damaged, is refused on every worker with what is wrong."""

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import paceline
from paceline.testing.ranks import Ended

Run = Callable[..., list[Ended]]
Printed = Callable[..., list[dict[str, Any]]]

SAVING = """
import os
from subjects import *
given = CASES["transformer, tied weights, clipping, schedule"]() | {"exact": True}
session = paceline.start(**given, checkpoint={"directory": os.environ["SAVED"], "every": 2, "keep": 3})
for batch in session.batches(steps=6):
    session.step(batch)
tell(fingerprint=session.fingerprint(), path=str(session.save()))
"""

# Each attempt is a start of its own; all workers must be refused alike.
RESUMING = """
import os, shutil
from pathlib import Path
from subjects import *

saved = Path(os.environ["SAVED"])
case = "transformer, tied weights, clipping, schedule"

def attempt(name, resume="auto", directory=saved, **changes):
    given = CASES[case]() | {"exact": True, "resume": resume}
    given["checkpoint"] = {"directory": directory, "retry_seconds": 0.3}
    try:
        session = paceline.start(**given | changes)
    except paceline.CheckpointError as error:
        tell(**{name: str(error)})
    else:
        tell(**{name: ["resumed", session.position, session.fingerprint()]})

class Wide(Transformer):
    def __init__(self):
        super().__init__()
        self.blocks[1].mix = torch.nn.Linear(8, 24, bias=False)

class Deep(Transformer):
    def __init__(self):
        super().__init__()
        self.blocks.append(Block(8, 0.1))

class Shallow(Transformer):
    def __init__(self):
        super().__init__()
        del self.blocks[1]

def model(kind):
    torch.manual_seed(0)
    return kind()

attempt("as it was")
attempt("an older one", resume=str(saved / "step-000004"), directory=saved.parent / "elsewhere")
attempt("before later ones", resume=str(saved / "step-000004"))
attempt("the folder", resume=str(saved), directory=None)
attempt("nowhere", resume=str(saved / "step-000099"))
attempt("empty", directory=saved / "empty")
attempt("not asked for", resume=None)
attempt("another batch", batch=24)
attempt("other microbatches", microbatches=16)
attempt("another seed", seed=3)
attempt("other data", data=Sentences(91))
attempt("threads", threads=2)
attempt("not exact", exact=False)
attempt("other tensors", model=model(Wide))
attempt("a new layer", model=model(Deep))
attempt("a layer less", model=model(Shallow))
attempt("another type", model=model(Transformer).double())
attempt("another optimizer", optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9))
attempt("named", resume=str(saved.parent / "flipped" / "step-000006"))
for name in DAMAGED:
    attempt(name, directory=saved.parent / name)
"""
DAMAGED = (
    "newer format",
    "flipped",
    "flipped elsewhere",
    "cut",
    "lost",
    "no text",
    "half a manifest",
    "another manifest",
    "all",
)
RESUMING = RESUMING.replace("DAMAGED", str(DAMAGED))


def damage(folder: Path, saved: Path) -> None:
    """Copies of the checkpoints, the newest of each damaged in another way."""

    def copy(name: str) -> Path:
        (newest,) = (Path(shutil.copytree(saved, folder / name)) / "step-000006").iterdir()
        return newest

    for name in ("flipped", "flipped elsewhere", "cut", "lost"):
        newest = copy(name)
        flip(newest, 100 if name == "flipped elsewhere" else None)
        (data,) = newest.glob("*.distcp")
        if name == "cut":
            data.write_bytes(data.read_bytes()[: data.stat().st_size // 3])
        if name == "lost":
            data.unlink()
    (copy("no text") / "manifest.json").write_bytes(b"\xff\xfe\x00")
    manifest = copy("half a manifest") / "manifest.json"
    manifest.write_text(manifest.read_text()[:200])
    manifest = copy("another manifest") / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"step": 6', '"step": 7'))
    manifest = copy("newer format") / "manifest.json"
    body = re.sub(r'(?s)"format": \d+.*', '"format": 99\n}', manifest.read_text())
    checksum = hashlib.sha256(body.encode()).hexdigest()
    manifest.write_text(f'{body[:-2]},\n "checksum": "{checksum}"\n}}')
    copy("all")
    for checkpoint in (folder / "all").glob("step-*/*"):
        flip(checkpoint)


def flip(checkpoint: Path, place: int | None = None) -> None:
    """Turn one bit of a tensor round, or one elsewhere in its file."""
    (file,) = checkpoint.glob("*.distcp")
    content = bytearray(file.read_bytes())
    if place is None:
        place = json.loads((checkpoint / "manifest.json").read_text())["offsets"]["parameter/embedding.weight"] + 7
    content[place] ^= 1
    file.write_bytes(content)


@pytest.fixture(scope="module")
def attempts(printed: Printed, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two workers was told; ``fingerprint`` is what the checkpoint should give."""
    folder = tmp_path_factory.mktemp("attempts")
    saved = folder / "saved"
    (before,) = printed(SAVING, 1, folder, environment={"SAVED": str(saved)})
    assert before["path"] == str(saved / "step-000006")
    assert sorted(path.name for path in saved.iterdir()) == ["latest", "step-000002", "step-000004", "step-000006"]
    damage(folder, saved)
    return [before | one for one in printed(RESUMING, 2, folder, environment={"SAVED": str(saved)})]


@pytest.mark.parametrize(
    ("attempt", "words"),
    [
        ("nowhere", ["step-000099", "not a complete checkpoint"]),
        ("not asked for", ["step-000006", "resume='auto'"]),
        ("before later ones", ["holds step-000006, later than step-000004", "checkpoint.directory"]),
        ("another batch", ["order of samples", "batch was 32 and is now 24"]),
        ("other microbatches", ["microbatches was 8 and is now 16"]),
        ("another seed", ["seed was 0 and is now 3"]),
        ("other data", ["length was 90 and is now 91"]),
        ("threads", ["same bits", "threads was 1 and is now 2"]),
        ("not exact", []),
        ("other tensors", ["another model", "the model has no parameter 'blocks.1.mix.bias'"]),
        ("a new layer", ["another model", "no parameter 'blocks.2.mix.weight'"]),
        ("a layer less", ["another model", "the model has no parameter 'blocks.1.mix.weight'"]),
        ("another type", ["parameter 'embedding.weight'", "torch.float32 [16, 8]", "torch.float64 [16, 8]"]),
        ("another optimizer", ["optimizer"]),
        ("named", ["step-000006", "damaged"]),
        ("all", ["step-000006", "step-000004", "step-000002", "is damaged", "Remove them"]),
    ],
)
@pytest.mark.promise("docs/checkpoints.md", "Without `resume`, a folder that already has checkpoints is refused")
@pytest.mark.promise(
    "docs/checkpoints.md",
    "another order of samples: length of the data set, batch, number of microbatches, seed, `drop_last`.",
)
@pytest.mark.promise("docs/checkpoints.md", "another model: a parameter or buffer is missing, unknown")
@pytest.mark.promise("docs/checkpoints.md", "another update: another class of optimizer")
@pytest.mark.promise("docs/checkpoints.md", "an earlier checkpoint, named by its path, in a folder with later ones")
@pytest.mark.promise(
    "docs/checkpoint-stores.md",
    "If all are damaged, the run stops with a `CheckpointError` that names each.",
    "A checkpoint named by its path is never replaced by another one.",
)
def test_refused(attempts: list[dict[str, Any]], attempt: str, words: list[str]) -> None:
    for one in attempts:
        if attempt == "not exact":
            assert one[attempt][:2] == ["resumed", 6]
            continue
        assert isinstance(one[attempt], str), one[attempt]
        for word in words:
            assert word in one[attempt]


@pytest.mark.promise(
    "docs/checkpoints.md", "or starts from the beginning if there is none. So one command serves every start."
)
def test_resumed(attempts: list[dict[str, Any]]) -> None:
    for one in attempts:
        assert one["as it was"] == one["the folder"] == ["resumed", 6, one["fingerprint"]]
        assert one["an older one"][:2] == ["resumed", 4]
        assert one["an older one"][2] != one["fingerprint"]
        assert one["empty"][:2] == ["resumed", 0]


@pytest.mark.promise(
    "docs/checkpoint-stores.md",
    'If the newest checkpoint is damaged for one of the workers, `resume="auto"` takes the previous one, on all '
    "workers.",
    "The damaged one is renamed to `damaged-step-000100`, so nothing is lost.",
)
@pytest.mark.parametrize("how", DAMAGED[:-1])
def test_a_damaged_checkpoint_is_passed_over(attempts: list[dict[str, Any]], how: str) -> None:
    for one in attempts:
        assert one[how] == ["resumed", 4, attempts[0]["an older one"][2]]
        there = {path.name for path in Path(one["path"]).parents[1].joinpath(how).iterdir()}
        lost = "step-000006" if how == "lost" else "damaged-step-000006"  # a file may come back
        assert there == {"latest", "step-000002", "step-000004", lost}


def test_every_worker_ends(ranks: Run, tmp_path: Path) -> None:
    saved = {"SAVED": str(tmp_path / "saved")}
    ranks(SAVING, 1, tmp_path, environment=saved)
    ended = ranks(SAVING, 2, tmp_path, environment=saved)
    for one in ended:
        assert one.code == 4
        assert one.err.startswith(f"paceline: rank {one.rank}: CheckpointError: The checkpoint folder already holds ")


def test_a_skipped_step_is_saved_once(tmp_path: Path) -> None:
    """Its loss is NaN, which equals no number, not even itself."""
    data = torch.utils.data.TensorDataset(torch.full((8, 4), torch.nan), torch.zeros(8, 1))
    session = paceline.start(
        model=torch.nn.Linear(4, 1),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        loss=torch.nn.functional.mse_loss,
        data=data,
        batch=8,
        nonfinite="skip",
        checkpoint={"directory": tmp_path, "every": 1},
    )
    for batch in session.batches(steps=1):
        session.step(batch)
    assert session.save() == session.save()
