"""What a checkpoint contains, as data. It is written last, so its presence means that the rest is complete.

Whoever can write into the folder can write a manifest too. So nothing in it is believed before it has been checked:
kinds, names, and that all sizes fit together. Its files have fixed names.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

import torch
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from paceline.errors import CheckpointError

FORMAT = 4
FILE, TENSORS, METADATA = "manifest.json", "__0_0.distcp", ".metadata"
LARGEST = 1 << 28
"""Bytes of a manifest: about 200 for each tensor."""
_MOST_STEPS = 10**11
_DEEPEST = 100
_OVERHEAD = 1 << 14
"""Bytes for each tensor beside its elements, in each file; about 2,000 are used."""
_TOKENS = re.compile(r'"(?:[^"\\]|\\.)*+"|[\[\]{}]')
_DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}

_Count = Annotated[int, Field(ge=0, le=1 << 62)]
_Name = Annotated[str, Field(max_length=10_000)]
_Word = Annotated[str, Field(max_length=1000)]
_Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class DamagedError(CheckpointError):
    """A checkpoint is not what was written. The user sees a plain CheckpointError, or it is skipped."""


@dataclass(frozen=True)
class Manifest:
    """Description of one checkpoint.

    Attributes:
        step: steps done; training resumes at this position.
        order: length, batch, microbatches, seed and drop_last of the data order.
        tensors: dtype and shape of each tensor by name.
        offsets: where the elements of each tensor begin in their file.
        files: size and SHA-256 of each file, checked on loading.
        fingerprint: SHA-256 of all tensors.
        state: the rest of the state (see encoding.py).
        numerics: what affects the bits besides the script: exact, threads, cpu, gpu, canary.
        versions: of Python and the libraries.
        time: when the state was taken, in seconds since 1970.
        signature: of all this, by the key of the run; empty if it has none.
    """

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid")

    step: Annotated[int, Field(ge=0, le=_MOST_STEPS)]
    order: dict[_Word, bool | Annotated[int, Field(ge=-(1 << 64), le=1 << 64)]]
    tensors: dict[_Name, tuple[_Word, list[_Count]]]
    offsets: dict[_Name, _Count]
    files: dict[_Word, tuple[_Count, _Hash]]
    fingerprint: _Hash
    state: Any
    numerics: dict[_Word, bool | int | _Word]
    versions: dict[_Word, _Word]
    time: Annotated[float, Field(ge=0, le=1e11)]
    format: int = FORMAT
    signature: str = ""

    def to_json(self) -> str:
        """As JSON with its own SHA-256, and its signature if it has one."""
        return _sealed(self._body(), self.signature)

    def signed(self, key: bytes | None) -> Manifest:
        """The same with its signature by a key: an HMAC-SHA256. Without a key there is none."""
        return self if key is None else replace(self, signature=self._signature(key))

    def check_signature(self, key: bytes | None, where: object) -> None:
        """Refuse a manifest that was not signed with a key; without a key every one is accepted.

        Raises:
            DamagedError: it was not.
        """
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
        return json.dumps(values, indent=1)


_SCHEMA = TypeAdapter(Manifest)


def parse(text: str, where: object) -> Manifest:
    """Parse what :meth:`Manifest.to_json` wrote; ``where`` names it in errors.

    Raises:
        DamagedError: it is not what was written, or has another format.
    """
    try:
        _check_depth(text)
        values = json.loads(text)
        values.pop("checksum")
        signature = str(values.pop("signature", ""))
        body = json.dumps(values, indent=1)
        if text != _sealed(body, signature):
            raise ValueError("its checksum does not match")
        if (known := values.get("format")) != FORMAT:
            raise DamagedError(
                f"{where} has format {str(known)[:20]}, and this version of Paceline reads format {FORMAT}. Resume "
                f"with the version that wrote it, or start a new run."
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
    """The dtype of this name, such as ``torch.float32``."""
    if name not in _DTYPES:
        raise ValueError(f"there is no dtype {name[:50]!r}")
    return _DTYPES[name]


def _sealed(body: str, signature: str = "") -> str:
    seals = {"checksum": hashlib.sha256(body.encode()).hexdigest()}
    if signature:
        seals["signature"] = signature
    return f"{body.removesuffix('}').rstrip()},{json.dumps(seals, indent=1)[1:]}"


def _check_depth(text: str) -> None:
    """Refuse deep nesting before the text is parsed: the parser has only the stack to stop it."""
    depth = 0
    for token in _TOKENS.finditer(text):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(token[0], 0)
        if depth > _DEEPEST:
            raise ValueError(f"it is nested more than {_DEEPEST} deep")


def _check_sizes(manifest: Manifest) -> None:
    """Refuse files and tensors that do not fit into each other, so that nothing is read or allocated for them."""
    if set(manifest.files) != {TENSORS, METADATA}:
        raise ValueError(f"its files are not {TENSORS} and {METADATA}")
    if set(manifest.offsets) != set(manifest.tensors):
        raise ValueError("not every tensor has an offset")
    place = used = 0
    for name, offset in sorted(manifest.offsets.items(), key=lambda one: one[1]):
        dtype, shape = manifest.tensors[name]
        size = dtype_of(dtype).itemsize * math.prod(shape)
        if offset < place:
            raise ValueError(f"the tensor {name[:100]!r} begins inside another one")
        place, used = offset + size, used + size
    overhead = _OVERHEAD * (1 + len(manifest.tensors)) + sum(map(len, manifest.tensors)) * 8
    sizes = {file: size for file, (size, _) in manifest.files.items()}
    if not place <= sizes[TENSORS] <= used + overhead or sizes[METADATA] > overhead:
        raise ValueError("the sizes of its files are not those of its tensors")


def step_of(name: str) -> int:
    """The number of steps in the name of a checkpoint; -1 for another name."""
    number = re.fullmatch("step-([0-9]{1,18})", name)
    return int(number[1]) if number else -1


def name_of(step: int) -> str:
    """The name of a checkpoint: ``step-000500`` after 500 steps."""
    return f"step-{step:06d}"


def first_difference(saved: Mapping[str, object], now: Mapping[str, object]) -> str:
    """Describe the first key whose values differ; empty if there is none."""
    for key in [*saved, *(key for key in now if key not in saved)]:
        if saved.get(key) != now.get(key):
            return f"{key} was {saved.get(key)!r} and is now {now.get(key)!r}"
    return ""
