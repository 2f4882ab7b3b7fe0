"""What a checkpoint says about itself."""

import json

import pytest

from paceline.checkpoint import manifest
from paceline.checkpoint.manifest import DamagedError, Manifest
from paceline.errors import CheckpointError

EXAMPLE = Manifest(
    step=3,
    order={"batch": 8},
    tensors={"parameter/weight": ["torch.float32", [2, 3]]},
    fingerprint="ab" * 32,
    extra="cd" * 32,
    numerics={"exact": True},
    versions={"torch": "2"},
    time=1_700_000_000.25,
)
TEXT = EXAMPLE.to_json()


def test_written_and_read() -> None:
    assert manifest.parse(TEXT, "here") == EXAMPLE


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "3", '{"step": 3}', json.dumps(json.loads(TEXT) | {"surprise": 1}), TEXT.replace("8", "9", 1)],
)
def test_a_damaged_manifest_is_noticed(text: str) -> None:
    with pytest.raises(DamagedError, match="here is damaged"):
        manifest.parse(text, "here")


def test_every_flipped_bit_is_noticed() -> None:
    whole = TEXT.encode()
    for place in range(len(whole)):
        flipped = bytes([*whole[:place], whole[place] ^ 1, *whole[place + 1 :]]).decode()
        try:
            assert manifest.parse(flipped, "here") == EXAMPLE  # white space between the values
            assert chr(whole[place]).isspace()
        except CheckpointError:
            pass


def test_another_format_is_not_called_damaged() -> None:
    with pytest.raises(CheckpointError, match=r"format 99.*format 3") as caught:
        manifest.parse(json.dumps(json.loads(TEXT) | {"format": 99}), "here")
    assert not isinstance(caught.value, DamagedError)


def test_the_newest_is_the_one_with_the_most_steps() -> None:
    names = ["step-000005", "step-999999", "damaged-step-000099", "step-1000000", "latest", "step-x", "step-000040"]
    assert manifest.newest_first(names) == ["step-1000000", "step-999999", "step-000040", "step-000005"]
    assert manifest.name_of(5) == "step-000005" and manifest.name_of(1_000_000) == "step-1000000"


def test_the_first_difference_in_words() -> None:
    assert manifest.first_difference({"a": 1, "b": 2}, {"a": 1, "b": 3}) == "b was 2 and is now 3"
    assert manifest.first_difference({"a": 1}, {"a": 1, "c": 3}) == "c was None and is now 3"
    assert manifest.first_difference({"a": 1}, {"a": 1}) == ""
