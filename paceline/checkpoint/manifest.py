"""Manifest of a checkpoint. It is written last, so its presence means that the checkpoint is complete.

Anyone who can write to the folder can also write a manifest. So types, names and the consistency of all sizes are
checked before its content is used. Its files have fixed names.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any

import torch
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from paceline.checkpoint.tensors import fingerprint_of
from paceline.errors import CheckpointError

FORMAT, EARLIER = 5, 4
"""Current format, and the earlier format that can be read, too. It has no shards, and hashes of whole files."""
FILE, TENSORS, METADATA = "manifest.json", "__0_0.distcp", ".metadata"
LARGEST = 1 << 28  # Maximum size of a manifest in bytes. A tensor takes about 200.
_MOST_STEPS = 10**11
_DEEPEST = 100
_OVERHEAD = 1 << 14  # Maximum bytes for each tensor besides its elements, in each file. About 2,000 are used.
_TOKENS = re.compile(r'"(?:[^"\\]|\\.)*+"|[\[\]{}]')
_DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}

_Count = Annotated[int, Field(ge=0, le=1 << 62)]
_Name = Annotated[str, Field(max_length=10_000)]
_Word = Annotated[str, Field(max_length=1000)]
_Part = Annotated[str, Field(pattern=r"^__[0-9]{1,6}_[01]\.distcp$")]
_Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class DamagedError(CheckpointError):
    """Raised for a damaged or unsigned checkpoint. Users see a CheckpointError, or the checkpoint is skipped."""


@dataclass(frozen=True)
class Manifest:
    """Description of a checkpoint."""

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid")

    step: Annotated[int, Field(ge=0, le=_MOST_STEPS)]  # number of completed steps. Training resumes at this position.
    # values that determine the sample order, such as length, batch, microbatches, seed and drop_last
    order: dict[_Word, bool | Annotated[int, Field(ge=-(1 << 64), le=1 << 64)]]
    tensors: dict[_Name, tuple[_Word, list[_Count]]]  # dtype and shape of each tensor by name
    offsets: dict[_Name, _Count]  # offset of the elements of each tensor in its file
    # size and SHA-256 of each file. Elements of tensors are not part of the SHA-256.
    files: dict[_Word, tuple[_Count, _Hash]]
    fingerprint: _Hash  # SHA-256 of the names and hashes of all tensors
    state: Any  # rest of the state (see encoding.py)
    # values besides the script that affect the bits: exact, threads, cpu, canary, gpu, float32 (precision), cublas
    # (workspace)
    numerics: dict[_Word, bool | int | _Word]
    versions: dict[_Word, _Word]  # versions of Python and the libraries
    time: Annotated[float, Field(ge=0, le=1e11)]  # time of the snapshot in seconds since 1970
    # 4 or 5. In format 4 the hash of a file covers all its bytes, and ``parts`` and ``hashes`` are empty.
    format: int = FORMAT
    signature: str = ""  # HMAC of all other fields with the key of the run; empty without a key
    parts: dict[_Name, _Part] = field(default_factory=dict)  # file name of each tensor
    hashes: dict[_Name, _Hash] = field(default_factory=dict)  # SHA-256 of each tensor, with its dtype and shape

    def part_of(self, name: str) -> str:
        return self.parts.get(name, TENSORS)

    def kind_of(self, name: str) -> tuple[torch.dtype, torch.Size]:
        dtype, shape = self.tensors[name]
        return dtype_of(dtype), torch.Size(shape)

    def tensors_by_file(self) -> dict[str, list[str]]:
        """Return the names of the tensors in each file that has tensors, in the order of their offsets."""
        found: dict[str, list[str]] = {}
        for name in sorted(self.offsets, key=self.offsets.__getitem__):
            found.setdefault(self.part_of(name), []).append(name)
        return found

    def to_json(self) -> str:
        """Return the manifest as JSON with its own SHA-256, and its signature if it has one."""
        return _sealed(self._body(), self.signature)

    def signed(self, key: bytes | None) -> Manifest:
        """Return a copy signed with a key (HMAC-SHA256), or the manifest itself without a key."""
        return self if key is None else replace(self, signature=self._signature(key))

    def check_signature(self, key: bytes | None, where: object) -> None:
        """Raise DamagedError if the manifest was not signed with ``key``. Without a key every manifest is accepted."""
        if key is None:
            return
        if not self.signature:
            raise DamagedError(f"{where} is refused: it is not signed, and checkpoint.key_file is set.")
        if not hmac.compare_digest(self.signature.encode(), self._signature(key).encode()):
            raise DamagedError(f"{where} is refused: it is not signed with the key in checkpoint.key_file.")

    def _signature(self, key: bytes) -> str:
        return hmac.digest(key, self._body().encode(), "sha256").hex()

    def _body(self) -> str:
        values = asdict(self)
        del values["signature"]
        if self.format == EARLIER:
            del values["parts"], values["hashes"]
        return json.dumps(values, indent=1)


_SCHEMA = TypeAdapter(Manifest)


def parse(text: str, where: object) -> Manifest:
    """Parse a result of :meth:`Manifest.to_json`. ``where`` names it in errors."""
    try:
        _check_depth(text)
        values = json.loads(text)
        values.pop("checksum")
        signature = str(values.pop("signature", ""))
        body = json.dumps(values, indent=1)
        if text != _sealed(body, signature):
            raise ValueError("its checksum does not match")
        if (known := values.get("format")) not in (FORMAT, EARLIER):
            raise DamagedError(
                f"{where} has format {str(known)[:20]}, and this version of Paceline reads formats {EARLIER} and "
                f"{FORMAT}. Resume with the version that wrote it, or start a new run."
            )
        manifest = _SCHEMA.validate_json(body)
        _check_sizes(manifest)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))[:100]
        raise DamagedError(f"{where} is damaged: {place}: {first['msg']}.") from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DamagedError(f"{where} is damaged: {error}.") from None
    return replace(manifest, signature=signature)


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype with a name such as ``torch.float32``."""
    if name not in _DTYPES:
        raise ValueError(f"there is no dtype {name[:50]!r}")
    return _DTYPES[name]


def _sealed(body: str, signature: str = "") -> str:
    seals = {"checksum": hashlib.sha256(body.encode()).hexdigest()}
    if signature:
        seals["signature"] = signature
    return f"{body.removesuffix('}').rstrip()},{json.dumps(seals, indent=1)[1:]}"


def _check_depth(text: str) -> None:
    """Raise ValueError for deep nesting before parsing, because the parser itself is limited only by the stack."""
    depth = 0
    for token in _TOKENS.finditer(text):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(token[0], 0)
        if depth > _DEEPEST:
            raise ValueError(f"it is nested more than {_DEEPEST} deep")


def _check_sizes(manifest: Manifest) -> None:
    """Raise ValueError if files and tensors are inconsistent, before anything is read or allocated for them."""
    names = set(manifest.tensors)
    if set(manifest.offsets) != names:
        raise ValueError("not every tensor has an offset")
    if manifest.format == EARLIER and (manifest.parts or manifest.hashes):
        raise ValueError(f"format {EARLIER} has no parts and hashes")
    if manifest.format == FORMAT:
        if set(manifest.parts) != names or set(manifest.hashes) != names:
            raise ValueError("not every tensor has a file and a hash")
        if fingerprint_of(manifest.hashes) != manifest.fingerprint:
            raise ValueError("its fingerprint is not that of its hashes")
    if set(manifest.files) != (expected := {TENSORS, METADATA, *manifest.parts.values()}):
        raise ValueError(f"its files are not {', '.join(sorted(expected))}"[:300])
    tensors = manifest.tensors_by_file()
    for file in expected - {METADATA}:
        _check_part(manifest, file, tensors.get(file, []))
    if manifest.files[METADATA][0] > _overhead(manifest.tensors):
        raise ValueError("the sizes of its files are not those of its tensors")


def _check_part(manifest: Manifest, file: str, tensors: list[str]) -> None:
    """Raise ValueError if a file does not fit its tensors, or tensors overlap."""
    place = used = 0
    for name in tensors:
        dtype, shape = manifest.tensors[name]
        size, offset = dtype_of(dtype).itemsize * math.prod(shape), manifest.offsets[name]
        if offset < place:
            raise ValueError(f"the tensor {name[:100]!r} begins inside another one")
        place, used = offset + size, used + size
    if not place <= manifest.files[file][0] <= used + _overhead(tensors):
        raise ValueError("the sizes of its files are not those of its tensors")


def _overhead(tensors: Collection[str]) -> int:
    """Return the maximum number of bytes besides the elements of these tensors."""
    return _OVERHEAD * (1 + len(tensors)) + sum(map(len, tensors)) * 8


def step_of(name: str) -> int:
    number = re.fullmatch("step-([0-9]{1,18})", name)
    return int(number[1]) if number else -1


def name_of(step: int) -> str:
    """Return the name of a checkpoint, ``step-000500`` after 500 steps."""
    return f"step-{step:06d}"


def first_difference(saved: Mapping[str, object], now: Mapping[str, object]) -> str:
    """Describe the first key whose values differ. Return an empty text if there is none."""
    for key in [*saved, *(key for key in now if key not in saved)]:
        if saved.get(key) != now.get(key):
            return f"{key} was {saved.get(key)!r} and is now {now.get(key)!r}"
    return ""
