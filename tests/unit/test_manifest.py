"""What a checkpoint says about itself."""

import json

import pytest

from paceline.checkpoint import manifest
from paceline.checkpoint.manifest import DamagedError, Manifest
from paceline.checkpoint.tensors import fingerprint_of

EXAMPLE = Manifest(
    step=3,
    order={"batch": 8},
    tensors={"parameter/weight": ("torch.float32", [2, 3])},
    offsets={"parameter/weight": 704},
    files={manifest.TENSORS: (1600, "cd" * 32), manifest.METADATA: (900, "ef" * 32)},
    fingerprint=fingerprint_of({"parameter/weight": "12" * 32}),
    state={"groups": [{"lr": 0.1, "betas": {"$tuple": [0.9, 0.99]}}]},
    numerics={"exact": True},
    versions={"torch": "2"},
    time=1_700_000_000.25,
    parts={"parameter/weight": manifest.TENSORS},
    hashes={"parameter/weight": "12" * 32},
)
TEXT = EXAMPLE.to_json()


def sealed(**changes: object) -> str:
    """The manifest with other values, and the checksum of these, as an attacker would write it."""
    values = json.loads(TEXT) | changes
    del values["checksum"]
    return manifest._sealed(json.dumps(values, indent=1))


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
        with pytest.raises(DamagedError):
            manifest.parse(flipped, "here")


def test_another_format_is_not_called_damaged() -> None:
    with pytest.raises(DamagedError, match=r"here has format 99.*reads formats 4 and 5"):
        manifest.parse(sealed(format=99), "here")


def test_the_first_difference_in_words() -> None:
    assert manifest.first_difference({"a": 1, "b": 2}, {"a": 1, "b": 3}) == "b was 2 and is now 3"
    assert manifest.first_difference({"a": 1}, {"a": 1, "c": 3}) == "c was None and is now 3"
    assert manifest.first_difference({"a": 1}, {"a": 1}) == ""


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"step": 10**12}, "step: .*less than or equal to 100000000000"),
        ({"step": -1}, "step"),
        ({"step": True}, "step"),
        ({"step": 10**4000}, "step"),
        ({"time": 1e300}, "time"),
        ({"surprise": 1}, "surprise: .*nexpected"),
        ({"order": {"batch": "8"}}, "order.batch"),
        ({"versions": {"torch": "2" * 2000}}, "versions.torch"),
        ({"fingerprint": "AB" * 32}, "fingerprint"),
        ({"files": {"../../passwd": [1600, "cd" * 32], ".metadata": [900, "ef" * 32]}}, "its files are not"),
        ({"files": {"__0_0.distcp": [10**15, "cd" * 32], ".metadata": [900, "ef" * 32]}}, "sizes of its files"),
        ({"files": {"__0_0.distcp": [700, "cd" * 32], ".metadata": [900, "ef" * 32]}}, "sizes of its files"),
        ({"tensors": {"parameter/weight": ["torch.float32", [2, 10**12]]}}, "sizes of its files"),
        ({"tensors": {"parameter/weight": ["torch.float32", [2, -3]]}}, "tensors.parameter/weight"),
        ({"tensors": {"parameter/weight": ["torch.load", [2, 3]]}}, "there is no dtype 'torch.load'"),
        ({"offsets": {"parameter/other": 704}}, "not every tensor has an offset"),
        ({"hashes": {"parameter/weight": "34" * 32}}, "its fingerprint is not that of its hashes"),
        ({"hashes": {}}, "not every tensor has a file and a hash"),
        ({"parts": {"parameter/weight": "../../passwd"}}, "parts.parameter/weight"),
        ({"parts": {"parameter/weight": "__1_0.distcp"}}, "its files are not"),
        ({"format": 4}, "format 4 has no parts and hashes"),
        ({"state": json.loads("[" * 200 + "]" * 200)}, "nested more than 100 deep"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_hostile_values_with_a_right_checksum(changes: dict[str, object], words: str) -> None:
    with pytest.raises(DamagedError, match=words) as caught:
        manifest.parse(sealed(**changes), "here")
    assert len(str(caught.value)) < 500


def test_tensors_that_overlap_are_refused() -> None:
    two = {"tensors": {name: ["torch.float32", [2, 3]] for name in "ab"}, "offsets": {"a": 704, "b": 727}}
    two |= {"parts": dict.fromkeys("ab", manifest.TENSORS), "hashes": dict.fromkeys("ab", "12" * 32)}
    two |= {"fingerprint": fingerprint_of(two["hashes"])}
    with pytest.raises(DamagedError, match="'b' begins inside another one"):
        manifest.parse(sealed(**two), "here")


@pytest.mark.parametrize("text", ["[" * 200_000, '{"a":' * 200_000, "1" * 100_000, TEXT[:-2] + ',\n "step": 3\n}'])
def test_text_that_would_hurt_a_parser(text: str) -> None:
    with pytest.raises(DamagedError, match="here is damaged"):
        manifest.parse(text, "here")


def test_many_files_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"tensor {number}" for number in range(50)]
    files = {name: (4, "0" * 64) for name in (manifest.TENSORS, manifest.METADATA)}
    hashes = dict.fromkeys(names, "0" * 64)
    text = sealed(
        tensors={name: ("torch.float32", [1]) for name in names},
        offsets=dict.fromkeys(names, 0),
        files=files | {f"__{number}_0.distcp": (4, "0" * 64) for number in range(50)},
        fingerprint=fingerprint_of(hashes),
        parts={name: f"__{number}_0.distcp" for number, name in enumerate(names)},
        hashes=hashes,
    )
    asked: list[str] = []
    plain = Manifest.part_of
    monkeypatch.setattr(Manifest, "part_of", lambda one, name: (asked.append(name), plain(one, name))[1])
    manifest.parse(text, "it")
    assert sorted(asked) == sorted(names)
