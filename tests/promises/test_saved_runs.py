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

attempt("sums", exact="fixed-point")
for name in ("no manifest", "forged"):
    attempt(name, name)
attempt("a link", "linked")
signed = {"checkpoint": {"key_file": folder / "key"}}
attempt("signed", "signed", **signed)
attempt("signed, changed", "changed", **signed)
attempt("not signed", "unsigned", **signed)
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


def damage(folder: Path) -> None:
    """Copy the checkpoints, and damage the newest of each copy in another way."""
    for name in ("no manifest", "forged", "copy", "linked", "unsigned"):
        shutil.copytree(folder / "parts", folder / name)
    shutil.copytree(folder / "signed", folder / "changed")
    for file in (folder / "changed" / "step-000006").glob("*/*.distcp"):
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
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
    "Register values that the script must keep.",
)
def test_registered_values_go_on(after: Any, before: Any) -> None:
    for one in after:
        assert one["rest"][1]["history"] == before[0]["whole"]["history"]
        assert one["rest"][1]["best"] == before[0]["whole"]["best"]


@pytest.mark.promise(
    "docs/evaluate.md", "A resumed script that reaches an evaluation that the run has already made gets the saved value"
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


@pytest.mark.promise("docs/exact.md", "and a run that would continue with the other one is refused.")
def test_another_kind_of_sums(after: Any) -> None:
    check(after, "sums", "step-000006")


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


@pytest.mark.promise(
    "docs/checkpoint-stores.md",
    "A checkpoint that is not signed, or is signed with another key, is treated as damaged.",
)
def test_signed_checkpoints(after: Any) -> None:
    check_resumed(after, "signed", 6)
    check_resumed(after, "signed, changed", 4)
    check(after, "not signed", "is not signed")


@pytest.mark.promise("docs/weights.md", "`session.export(path)` writes them. Every worker must call it, rank 0 writes")
@pytest.mark.promise(
    "docs/weights.md", "Rank 0 reads the file if no worker has a state yet, and sends the weights to the others"
)
def test_weights_in_and_out(after: Any, before: Any) -> None:
    assert all(one["weights"] and all(one["weights"]) and one["names"] for one in after)


@pytest.mark.promise("paceline/session.py", "A complete checkpoint of this step is left as it is.")
def test_a_save_behind_an_evaluation(before: Any) -> None:
    assert [one["again"] for one in before] == ["step-000008"] * 2
