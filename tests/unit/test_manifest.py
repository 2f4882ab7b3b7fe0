"""What a checkpoint says about itself."""

import json
from pathlib import Path

import pytest

from paceline.checkpoint import manifest
from paceline.checkpoint.manifest import Manifest
from paceline.errors import CheckpointError


def example(step: int = 3) -> Manifest:
    return Manifest(step, {"batch": 8}, {"parameter/weight": ["torch.float32", [2, 3]]}, "ab" * 32, {}, {"torch": "2"})


def test_written_and_read(tmp_path: Path) -> None:
    (tmp_path / manifest.FILE).write_text(example().to_json())
    assert manifest.read(tmp_path) == example()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "damaged"),
        ("[]", "damaged"),
        ('{"step": 3}', "damaged"),
        (json.dumps(json.loads(example().to_json()) | {"surprise": 1}), "damaged"),
        (json.dumps(json.loads(example().to_json()) | {"format": 99}), "format 99.*format 1"),
    ],
)
def test_a_bad_manifest_is_refused(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / manifest.FILE).write_text(text)
    with pytest.raises(CheckpointError, match=words):
        manifest.read(tmp_path)


def test_only_a_directory_with_a_manifest_is_complete(tmp_path: Path) -> None:
    assert manifest.complete(tmp_path / "missing") == []
    for step in (5, 40, 999_999):
        (tmp_path / manifest.name_of(step)).mkdir()
    for step in (5, 40):
        (tmp_path / manifest.name_of(step) / manifest.FILE).touch()
    assert [path.name for path in manifest.complete(tmp_path)] == ["step-000040", "step-000005"]
    with pytest.raises(CheckpointError, match="not a complete checkpoint"):
        manifest.read(tmp_path / manifest.name_of(999_999))


def test_the_newest_is_the_one_with_the_most_steps(tmp_path: Path) -> None:
    for step in (999_999, 1_000_000):
        (tmp_path / manifest.name_of(step)).mkdir()
        (tmp_path / manifest.name_of(step) / manifest.FILE).touch()
    assert manifest.complete(tmp_path)[0].name == "step-1000000"


def test_the_first_difference_in_words() -> None:
    assert manifest.first_difference({"a": 1, "b": 2}, {"a": 1, "b": 3}) == "b was 2 and is now 3"
    assert manifest.first_difference({"a": 1}, {"a": 1, "c": 3}) == "c was None and is now 3"
    assert manifest.first_difference({"a": 1}, {"a": 1}) == ""
