"""Encoding of values as bytes: JSON, followed by the elements of tensors.

Data from sockets and shared memory is decoded by this module alone, so it cannot run code. Numbers keep their bits, and
containers keep their types. Instances of a class can be sent only if the class is marked :func:`sendable`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch

from paceline.comm.shm.tensors import bytes_of
from paceline.errors import InputError

_HEAD = struct.Struct("<QQ")
_DOUBLE = struct.Struct("<d")
_PLAIN = frozenset((type(None), bool, int, str))
_SEQUENCES: dict[type, str] = {tuple: "tuple", set: "set", frozenset: "frozenset", torch.Size: "size"}
_MAPPINGS: dict[type, str] = {dict: "dict", Counter: "counter", OrderedDict: "ordered"}
_TYPES = {name: kind for kind, name in (*_SEQUENCES.items(), *_MAPPINGS.items())}
_DTYPES = {str(one): one for one in vars(torch).values() if isinstance(one, torch.dtype)}
_PATH = type(Path())
_CLASSES: dict[str, type] = {}

_C = TypeVar("_C", bound=type)


def sendable(cls: _C) -> _C:
    """Mark a data class or named tuple so that its instances can be sent."""
    _CLASSES[cls.__name__] = cls
    return cls


def encode(value: object) -> bytes:
    """Encode a value.

    Raises:
        TypeError: part of the value cannot be sent. The message names this part.
    """
    encoder = _Encoder()
    text = _JSON_ENCODER.encode(encoder.plain(value, "")).encode()
    return b"".join((_HEAD.pack(len(text), sum(map(len, encoder.parts))), text, *encoder.parts))


def check(value: object) -> None:
    """Check that a value can be encoded, without copying its tensors.

    Raises:
        TypeError: part of the value cannot be sent. The message names this part.
    """
    _Checker().plain(value, "")


def encode_call(what: str, value: object, made: tuple[float, float]) -> bytes:
    """Encode a worker's message in a gather: the name of the call, the value, and the fingerprint of earlier calls."""
    try:
        return encode((what, value, made))
    except TypeError as error:
        raise InputError(f"Not all that belongs to {what!r} can be sent to other workers: {error}.") from error


def decode(data: bytes | memoryview) -> Any:
    """Decode the output of :func:`encode`. Raises ValueError if the data was not written by :func:`encode`."""
    try:
        length, rest = _HEAD.unpack_from(data)
        begin = _HEAD.size + length
        if begin + rest != len(data):
            raise ValueError(f"{len(data)} bytes instead of {begin + rest}")
        text = _JSON_DECODER.decode(str(data[_HEAD.size : begin], "utf-8"))
        return _Decoder(bytes(data[begin:])).value(text)
    except (LookupError, TypeError, AttributeError, RecursionError, RuntimeError, struct.error) as error:
        raise ValueError(f"not a value that was sent: {type(error).__name__}: {error}") from error


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a number")


_JSON_ENCODER = json.JSONEncoder(separators=(",", ":"))  # made once: json.dumps would make one for each message
_JSON_DECODER = json.JSONDecoder(parse_constant=_refuse)


class _Encoder:
    """Converter to JSON. Values other than lists and JSON's scalars become objects whose only key is their kind."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self._size = 0

    def plain(self, value: Any, where: str) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind is float:
            return value if math.isfinite(value) else {"float": _DOUBLE.pack(value).hex()}
        if kind is list:
            return self._all(value, where)
        if kind in _SEQUENCES:
            return {_SEQUENCES[kind]: self._all(value, where)}
        if kind in _MAPPINGS:
            values = [self.plain(one, f"{where}[{key!r}]") for key, one in value.items()]
            return {_MAPPINGS[kind]: [self._all(value, where), values]}
        name, content = self._other(value, kind, where)
        return {name: content}

    def _all(self, values: Any, where: str) -> list[Any]:
        return [one if type(one) in _PLAIN else self.plain(one, where) for one in values]

    def _other(self, value: Any, kind: type, where: str) -> tuple[str, Any]:
        if kind in _WRITERS:
            name, write = _WRITERS[kind]
            return name, write(self, value)
        if isinstance(value, np.generic) and value.dtype.kind in "biufc":
            return "number", [value.dtype.str, self.put(value.tobytes())]
        if kind is np.ndarray and value.dtype.kind in "biufc":
            return "array", [value.dtype.str, list(value.shape), self.put(value.tobytes())]
        if kind in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided and not value.is_quantized:
            return "tensor", self.tensor(value)
        if _CLASSES.get(kind.__name__) is kind:
            fields = [self.plain(getattr(value, name), f"{where}.{name}") for name in _fields(kind)]
            return "class", [kind.__name__, *fields]
        raise TypeError(f"{where or 'it'} is a {kind.__module__}.{kind.__qualname__}, which cannot be sent")

    def tensor(self, value: torch.Tensor) -> list[Any]:
        data = bytes_of(value.detach().cpu().resolve_conj().resolve_neg()).numpy().tobytes()
        return [str(value.dtype), list(value.shape), self.put(data)]

    def put(self, data: bytes) -> list[int]:
        self.parts.append(data)
        self._size += len(data)
        return [self._size - len(data), self._size]


class _Checker(_Encoder):
    """Encoder that visits every value but does not copy tensors."""

    def tensor(self, value: torch.Tensor) -> list[Any]:
        return []


class _Decoder:
    def __init__(self, parts: bytes) -> None:
        self._parts = parts

    def value(self, plain: Any) -> Any:
        if type(plain) is list:
            return [one if type(one) in _PLAIN else self.value(one) for one in plain]
        if type(plain) is not dict:
            return plain
        ((kind, content),) = plain.items()
        if kind not in _TYPES:
            return _READERS[kind](self, content)
        if _TYPES[kind] not in _MAPPINGS:
            return _TYPES[kind](self.value(content))
        keys, values = map(self.value, content)
        return _TYPES[kind](dict(zip(keys, values, strict=True)))

    def take(self, place: list[int]) -> bytes:
        begin, end = place
        if not 0 <= begin <= end <= len(self._parts):
            raise ValueError(f"bytes {begin} to {end} of {len(self._parts)}")
        return self._parts[begin:end]

    def array(self, content: list[Any]) -> Any:
        dtype, shape, place = content
        return np.frombuffer(bytearray(self.take(place)), np.dtype(dtype)).reshape(shape)

    def tensor(self, content: list[Any]) -> torch.Tensor:
        dtype, shape, place = content
        data = bytearray(self.take(place))
        flat = torch.frombuffer(data, dtype=_DTYPES[dtype]) if data else torch.empty(0, dtype=_DTYPES[dtype])
        return flat.view(shape)


_WRITERS: dict[type, tuple[str, Callable[[_Encoder, Any], Any]]] = {
    bytes: ("bytes", _Encoder.put),
    range: ("range", lambda _, value: [value.start, value.stop, value.step]),
    complex: ("complex", lambda encoder, value: [encoder.plain(value.real, ""), encoder.plain(value.imag, "")]),
    torch.dtype: ("dtype", lambda _, value: str(value)),
    _PATH: ("path", lambda _, value: str(value)),
}
_READERS: dict[str, Callable[[_Decoder, Any], Any]] = {
    "float": lambda _, content: _DOUBLE.unpack(bytes.fromhex(content))[0],
    "bytes": _Decoder.take,
    "range": lambda _, content: range(*content),
    "complex": lambda decoder, content: complex(*decoder.value(content)),
    "dtype": lambda _, content: _DTYPES[content],
    "path": lambda _, content: Path(content),
    "number": lambda decoder, content: np.frombuffer(decoder.take(content[1]), np.dtype(content[0]))[0],
    "array": _Decoder.array,
    "tensor": _Decoder.tensor,
    "class": lambda decoder, content: _CLASSES[content[0]](*decoder.value(content[1:])),
}


def _fields(cls: Any) -> tuple[str, ...]:
    """Return the field names of a data class or named tuple."""
    return tuple(one.name for one in dataclasses.fields(cls)) if dataclasses.is_dataclass(cls) else cls._fields
