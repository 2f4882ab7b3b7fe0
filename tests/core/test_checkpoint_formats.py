"""A checkpoint of the format before is read; each file of a checkpoint is read by one worker, which checks it."""

import hashlib
import hmac
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.checkpoint import load
from paceline.checkpoint import manifest as manifests

Printed = Callable[..., list[dict[str, Any]]]

SAVING = """
import os
from subjects import *
given = CASES["transformer, tied weights, clipping, schedule"]() | {"exact": True}
session = paceline.start(**given, checkpoint={"directory": os.environ["SAVED"]})
for batch in session.batches(steps=3):
    session.step(batch)
session.save()
tell(fingerprint=session.fingerprint())
"""
RESUMING = """
import os
from paceline.checkpoint import files
from subjects import *
inner, names = files.read, []
def read(open_file, manifest, mine):
    names.extend(mine)
    return inner(open_file, manifest, mine)
files.read = read
given = CASES["transformer, tied weights, clipping, schedule"]() | {"exact": True}
session = paceline.start(**given, checkpoint={"directory": os.environ["SAVED"]}, resume="auto")
tell(position=session.position, fingerprint=session.fingerprint(), names=names)
"""


@pytest.fixture(scope="module")
def saved(printed: Printed, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a checkpoint, and its fingerprint."""
    folder = tmp_path_factory.mktemp("saved")
    (told,) = printed(SAVING, 1, folder, environment={"SAVED": str(folder / "saved")})
    return folder / "saved", told["fingerprint"]


def as_format_4(folder: Path, key: bytes | None = None) -> Path:
    """Write the manifest as the version before did: hashes of whole files, and none of tensors."""
    (path,) = folder.glob("step-*/*/manifest.json")
    values = json.loads(path.read_text())
    for name in ("checksum", "signature", "parts", "hashes"):
        values.pop(name, None)
    files = {name: (path.parent / name).read_bytes() for name in values["files"]}
    values["files"] = {name: [len(text), hashlib.sha256(text).hexdigest()] for name, text in files.items()}
    body = json.dumps(values | {"format": 4}, indent=1)
    signature = "" if key is None else hmac.digest(key, body.encode(), "sha256").hex()
    path.write_text(manifests._sealed(body, signature))
    return path


@pytest.mark.crossed
@pytest.mark.parametrize("earlier", [False, True], ids=["format 5", "format 4"])
@pytest.mark.parametrize(("workers", "path"), [(3, "memory"), (3, "network"), (1, "memory")])
def test_each_file_is_read_by_one_worker(
    printed: Printed, saved: tuple[Path, str], tmp_path: Path, earlier: bool, workers: int, path: str
) -> None:
    folder = copied(saved[0], tmp_path)
    if earlier:
        as_format_4(folder)
    script = RESUMING if path == "memory" else NETWORK + RESUMING
    everyone = printed(script, workers, tmp_path, environment={"SAVED": str(folder)})
    for told in everyone:
        assert (told["position"], told["fingerprint"]) == (3, saved[1])
    assert sorted(name for told in everyone for name in told["names"]) == [manifests.METADATA, manifests.TENSORS]


NETWORK = """
import paceline.comm.shm.arena, paceline.training.recovery.formation
paceline.training.recovery.formation.can_share = lambda: False
"""


def copied(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to / "copy"))


def test_the_signature_of_the_format_before_is_checked(saved: tuple[Path, str], tmp_path: Path) -> None:
    path = as_format_4(copied(saved[0], tmp_path), key=b"key")
    read = manifests.parse(path.read_text(), "here")
    read.check_signature(b"key", "here")
    with pytest.raises(manifests.DamagedError, match="not signed with the key"):
        read.check_signature(b"other", "here")


@pytest.mark.parametrize("earlier", [False, True], ids=["format 5", "format 4"])
@pytest.mark.parametrize("place", ["element", "beside the elements", "index"])
def test_every_byte_is_checked(saved: tuple[Path, str], tmp_path: Path, earlier: bool, place: str) -> None:
    folder = copied(saved[0], tmp_path)
    path = as_format_4(folder) if earlier else next(iter(folder.glob("step-*/*/manifest.json")))
    offsets = json.loads(path.read_text())["offsets"].values()
    at = {"element": max(offsets) + 1, "beside the elements": min(offsets) - 1, "index": 9}[place]
    file = path.parent / (manifests.METADATA if place == "index" else manifests.TENSORS)
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    load.read(path.parent, lambda *_: None)
    file.write_bytes(content)
    with pytest.raises(manifests.DamagedError, match="SHA-256"):
        load.read(path.parent, lambda *_: None)


DIVIDED = """
import os
from paceline.checkpoint import files, parts
from subjects import *
parts.LEAST_BYTES = 1
inner, written = files.write_part, []
def write_part(create, name, state, known):
    part = inner(create, name, state, known)
    written.append([name, sorted(state)])
    return part
files.write_part = write_part
given = CASES["transformer, tied weights, clipping, schedule"]() | {"exact": True}
session = paceline.start(**given, checkpoint={"directory": os.environ["SAVED"], "every": 2})
for batch in session.batches(steps=3):
    session.step(batch)
session.save()
session._loop._checkpointer.finish()
tell(fingerprint=session.fingerprint(), written=written, files=os.environ["SAVED"])
"""


def manifest_in(folder: Path, step: int) -> manifests.Manifest:
    (path,) = folder.glob(f"step-{step:06d}/*/manifest.json")
    found = manifests.parse(path.read_text(), path)
    assert {one.name for one in path.parent.iterdir()} == {*found.files, manifests.FILE}
    return found


@pytest.mark.sampled(1)
@pytest.mark.parametrize("path", ["memory", "network"])
@pytest.mark.parametrize("workers", [2, 4])
def test_each_worker_writes_and_reads_its_part(
    printed: Printed, saved: tuple[Path, str], tmp_path: Path, workers: int, path: str
) -> None:
    """The checkpoints have the content of one that one worker wrote, and another number of workers resumes from it."""
    network = "" if path == "memory" else NETWORK
    folder = tmp_path / "saved"
    everyone = printed(network + DIVIDED, workers, tmp_path, environment={"SAVED": str(folder)})
    for step in (2, 3):
        manifest = manifest_in(folder, step)
        assert step == 2 or manifest.fingerprint == saved[1] == everyone[0]["fingerprint"]
        assert len(manifest.files) == workers + 1
    own = [{name: tensors for name, tensors in told["written"] if "_0.d" in name} for told in everyone]
    for rank, parts in enumerate(own):
        assert set(parts) <= {f"__{rank}_0.distcp"}
    assert manifest_in(folder, 2).tensors.keys() == manifest_in(folder, 3).tensors.keys()
    for count in (1, 3):
        again = printed(network + RESUMING, count, tmp_path, environment={"SAVED": str(folder)})
        assert {(told["position"], told["fingerprint"]) for told in again} == {(3, saved[1])}
        assert sorted(name for told in again for name in told["names"]) == sorted(manifest_in(folder, 3).files)
