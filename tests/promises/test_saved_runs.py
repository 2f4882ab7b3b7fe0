"""Checkpoints: a run goes on on other workers, and what does not fit or is damaged is refused.

Two workers save, three resume; in between the folders are damaged in several ways.
"""

from __future__ import annotations

import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest

SAVING = """
import os
from functools import partial
from pathlib import Path
import torch
from torch import nn
import paceline
from subjects import CASES, images, tell

folder = Path(os.environ["SAVED"])

def train(session, steps):
    kept = session.register(best=9.0, history=[])
    values = []
    for epoch in session.epochs(2):
        for batch in session.batches():
            report = session.step(batch)
            kept.history.append(report.loss.hex())
            kept.best = min(kept.best, report.loss)
            if session.position == steps:
                return {"fingerprint": session.fingerprint(), "history": kept.history}
        values.append(session.evaluate(images(40)).hex())
    return {
        "fingerprint": session.fingerprint(), "history": kept.history, "values": values, "best": kept.best.hex(),
        "loss": report.loss.hex(),
    }

def start(name, every=2, **more):
    given = CASES["batch norm, dropout, short batch"]() | {"exact": True, "timeout_seconds": 120}
    checkpoint = {"directory": folder / name, "every": every, "keep": 2, "background": False, "retry_seconds": 0.3}
    return paceline.start(**given | {"checkpoint": checkpoint | more.pop("checkpoint", {})} | more)
"""
FIRST = (
    SAVING
    + """
session = start("whole")
whole = train(session, 9)
try:
    tell(again=Path(session.save()).name)
except paceline.CheckpointError as error:
    tell(again=str(error))
signed = {"checkpoint": {"key_file": folder / "key"}}
train(start("signed", **signed), 6)
session = start("parts")
parts = train(session, 6)
session.export(folder / "weights.pt")
tell(whole=whole, parts=parts, kept=sorted(path.name for path in (folder / "parts").iterdir()))
"""
)
SECOND = (
    SAVING
    + """
def attempt(label, name="parts", resume="auto", then=lambda session: [session.position, session.fingerprint()], **more):
    try:
        tell(**{label: ["resumed", then(start(name, resume=resume, **more))]})
    except paceline.CheckpointError as error:
        tell(**{label: ["CheckpointError", str(error)]})

class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = CASES["batch norm, dropout, short batch"]()["model"]
    def forward(self, values):
        return self.inner(values)

attempt("not asked for", resume=None)
attempt("batch", batch=16)
attempt("seed", seed=3)
attempt("data", data=images(101))
attempt("model", model=Wide())
attempt("optimizer", optimizer=partial(torch.optim.SGD, lr=0.1))
attempt("sums", exact="fixed-point")
for name in ("flipped", "no manifest", "forged", "all"):
    attempt(name, name)
attempt("named", resume=str(folder / "named" / "step-000006"), name="elsewhere")
attempt("missing", resume=str(folder / "parts" / "step-000099"), name="elsewhere")
attempt("earlier", resume=str(folder / "parts" / "step-000004"))
attempt("a link", "linked")
signed = {"checkpoint": {"key_file": folder / "key"}}
attempt("signed", "signed", **signed)
attempt("signed, changed", "changed", **signed)
attempt("not signed", "unsigned", **signed)
attempt("empty", "nothing")
attempt("rest", "copy", then=lambda session: train(session, 9))
session = start("from weights", weights=folder / "weights.pt")
loaded, read = session.model_state(), torch.load(folder / "weights.pt", weights_only=True)
tell(weights=[bool(torch.equal(loaded[name], read[name])) for name in read], names=sorted(loaded) == sorted(read))
"""
)


class Hostile:
    """Makes a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def flip(checkpoint: Path) -> None:
    for file in checkpoint.glob("*/*.distcp"):
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)


def damage(folder: Path) -> None:
    """Copy the checkpoints, and damage the newest of each copy, or all, in another way."""
    for name in ("flipped", "no manifest", "forged", "all", "named", "copy", "linked", "unsigned"):
        shutil.copytree(folder / "parts", folder / name)
    shutil.copytree(folder / "signed", folder / "changed")
    for name in ("flipped", "named", "changed", "all"):
        flip(folder / name / "step-000006")
    flip(folder / "all" / "step-000004")
    (manifest,) = (folder / "no manifest" / "step-000006").glob("*/manifest.json")
    manifest.unlink()
    latest = folder / "no manifest" / "latest"  # written when the manifest is there
    latest.write_text(latest.read_text().replace("6", "4"))
    (index,) = (folder / "forged" / "step-000006").glob("*/.metadata")
    index.write_bytes(pickle.dumps(Hostile(folder / "code ran")))
    (file,) = (folder / "linked" / "step-000006").glob("*/__0_0.distcp")
    file.rename(folder / "elsewhere.distcp")
    file.symlink_to(folder / "elsewhere.distcp")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("saved")
    (made / "key").touch(mode=0o600)
    (made / "key").write_text(64 * "7")
    return made


@pytest.fixture(scope="module")
def before(reported: Any, folder: Path) -> list[dict[str, Any]]:
    """What two workers found that saved."""
    return reported(FIRST, 2, environment={"SAVED": str(folder)})


@pytest.fixture(scope="module")
def after(before: Any, reported: Any, folder: Path) -> list[dict[str, Any]]:
    """What each of three workers found that resumed."""
    damage(folder)
    return reported(SECOND, 3, environment={"SAVED": str(folder)})


def check(after: list[dict[str, Any]], attempt: str, *words: str) -> None:
    for one in after:
        assert one[attempt][0] == "CheckpointError", one[attempt]
        assert all(word in one[attempt][1] for word in words), one[attempt]


def check_resumed(after: list[dict[str, Any]], attempt: str, position: int) -> None:
    assert [one[attempt][0] for one in after] == ["resumed"] * 3, after[0][attempt]
    assert {one[attempt][1][0] for one in after} == {position}
    assert len({one[attempt][1][1] for one in after}) == 1


@pytest.mark.promise(
    "docs/checkpoints.md",
    "The number of workers may change. With `exact=True` the result has the same bits as without the stop",
)
def test_a_run_goes_on_on_another_number_of_workers(after: Any, before: Any) -> None:
    for one in after:
        assert one["rest"][1]["fingerprint"] == before[0]["whole"]["fingerprint"]
        assert one["rest"][1]["loss"] == before[0]["whole"]["loss"]


@pytest.mark.promise(
    "docs/checkpoints.md",
    "A checkpoint has them as they were when the last step returned.",
    "Register what must not be forgotten",
)
def test_registered_values_go_on(after: Any, before: Any) -> None:
    for one in after:
        assert one["rest"][1]["history"] == before[0]["whole"]["history"]
        assert one["rest"][1]["best"] == before[0]["whole"]["best"]


@pytest.mark.promise(
    "docs/evaluate.md", "A resumed script that comes past an evaluation which the run has made gets its value"
)
def test_evaluations_of_a_resumed_run(after: Any, before: Any) -> None:
    """``session.epochs`` does not enter the first epoch again."""
    assert [one["rest"][1]["values"] for one in after] == [before[0]["whole"]["values"][1:]] * 3


@pytest.mark.promise("docs/checkpoints.md", "`checkpoint.keep` newest checkpoints stay (2); older ones are removed.")
def test_old_checkpoints_are_removed(before: Any) -> None:
    assert [one["kept"] for one in before] == [["latest", "step-000004", "step-000006"]] * 2


@pytest.mark.promise(
    "docs/augmentation.md", "and a resumed run draws the same numbers.", "a checkpoint needs no generator states"
)
def test_the_checkpoint_resumes_at_its_position(after: Any, before: Any) -> None:
    """Each refused attempt left the checkpoint as it was."""
    assert before[0]["parts"]["history"] == before[0]["whole"]["history"][:6]


@pytest.mark.promise("docs/checkpoints.md", "Without `resume`, a folder that already has checkpoints is refused")
def test_a_folder_with_checkpoints(after: Any) -> None:
    check(after, "not asked for", "step-000006", "resume='auto'")


@pytest.mark.promise(
    "docs/checkpoints.md",
    "another order of samples: length of the data set, batch, number of microbatches, seed, `drop_last`.",
)
def test_another_order_of_samples(after: Any) -> None:
    check(after, "batch", "batch was 32 and is now 16")
    check(after, "seed", "seed was 0 and is now 3")
    check(after, "data", "length was 100 and is now 101")


@pytest.mark.promise("docs/checkpoints.md", "another model: a parameter or buffer is missing, unknown")
def test_another_model(after: Any) -> None:
    check(after, "model", "another model")


@pytest.mark.promise("docs/checkpoints.md", "another update: another class of optimizer")
def test_another_optimizer(after: Any) -> None:
    check(after, "optimizer", "optimizer")


@pytest.mark.promise("docs/exact.md", "and a run that goes on in the other way is refused.")
def test_another_kind_of_sums(after: Any) -> None:
    check(after, "sums", "step-000006")


@pytest.mark.promise(
    "docs/checkpoint-stores.md",
    'If the newest checkpoint is damaged for one of the workers, `resume="auto"` takes the one before, on all workers.',
    "The damaged one is renamed to `damaged-step-000100`, so nothing is lost.",
)
def test_a_damaged_checkpoint(after: Any, folder: Path) -> None:
    check_resumed(after, "flipped", 4)
    assert (folder / "flipped" / "damaged-step-000006").is_dir()


@pytest.mark.promise(
    "docs/checkpoint-stores.md", "If all are damaged, the run stops with a `CheckpointError` that names each."
)
def test_damaged_checkpoints_alone(after: Any) -> None:
    check(after, "all", "step-000004", "step-000006", "damaged")


@pytest.mark.promise("docs/checkpoint-stores.md", "A checkpoint named by its path is never replaced by another one.")
def test_a_damaged_checkpoint_that_is_named(after: Any) -> None:
    check(after, "named", "step-000006", "damaged")
    check(after, "missing", "step-000099")


@pytest.mark.promise(
    "docs/checkpoint-files.md", "A directory `step-*` without a manifest is not a checkpoint and is skipped."
)
def test_a_checkpoint_that_was_not_finished(after: Any) -> None:
    check_resumed(after, "no manifest", 4)


@pytest.mark.promise(
    "docs/security.md",
    "The `.metadata` of `torch.distributed.checkpoint` and the archives of `torch.save` are pickles and are never "
    "opened.",
)
def test_code_in_a_checkpoint(after: Any, folder: Path) -> None:
    assert [one["forged"][0] for one in after] == ["resumed"] * 3
    assert not (folder / "code ran").exists()


@pytest.mark.promise("docs/security.md", "Links, pipes and devices inside a checkpoint are refused.")
def test_a_link_in_a_checkpoint(after: Any) -> None:
    check_resumed(after, "a link", 4)


@pytest.mark.promise("docs/checkpoints.md", "an earlier checkpoint, named by its path, in a folder with later ones")
def test_an_earlier_checkpoint(after: Any) -> None:
    check(after, "earlier", "step-000006", "step-000004")


@pytest.mark.promise(
    "docs/checkpoint-stores.md", "A checkpoint that is not signed, or with another key, is treated as damaged."
)
def test_signed_checkpoints(after: Any) -> None:
    check_resumed(after, "signed", 6)
    check_resumed(after, "signed, changed", 4)
    check(after, "not signed", "is not signed")


@pytest.mark.promise(
    "docs/checkpoints.md", "or starts from the beginning if there is none. So one command serves every start."
)
def test_nothing_to_resume_from(after: Any) -> None:
    check_resumed(after, "empty", 0)


@pytest.mark.promise("docs/weights.md", "`session.export(path)` writes them. Every worker must call it, rank 0 writes")
@pytest.mark.promise(
    "docs/weights.md", "Rank 0 reads the file if no worker has a state yet, and sends the weights to the others"
)
def test_weights_in_and_out(after: Any, before: Any) -> None:
    assert all(one["weights"] and all(one["weights"]) and one["names"] for one in after)


@pytest.mark.promise("paceline/session.py", "A complete checkpoint of this step is left as it is.")
def test_a_save_behind_an_evaluation(before: Any) -> None:
    assert [one["again"] for one in before] == ["step-000008"] * 2
