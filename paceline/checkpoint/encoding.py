"""Encoding of Python values as JSON with separate tensors. Decoding creates plain values and never runs code.

A function or class is written by name, and decoded as the object that the script has at the same position.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch

from paceline.checkpoint.manifest import dtype_of

PREFIX = "state/"  # prefix of the tensors' names
_SEQUENCES: dict[type, str] = {
    tuple: "tuple", set: "set", frozenset: "frozenset", deque: "deque", torch.Size: "size"
}  # fmt: skip
_MAPPINGS: dict[type, str] = {dict: "dict", OrderedDict: "ordered", Counter: "counter"}
_MAKE: dict[str, Callable[[Any], Any]] = {tag: kind for kind, tag in (_SEQUENCES | _MAPPINGS).items()}
_NUMBERS = {
    kind.__name__: kind
    for kind in (np.bool_, np.int8, np.int16, np.int32, np.int64, np.uint8, np.float16, np.float32, np.float64)
}


class EncodingError(ValueError):
    """Raised for a value that cannot be encoded, or text that :func:`encode` did not write."""


def encode(value: Any, tensors: dict[str, torch.Tensor], where: str) -> Any:
    """Convert a value to types that JSON can hold.

    Args:
        value: value of the types that :func:`decode` creates.

    Raises:
        EncodingError: a value has another type. The message names the first such value.
    """
    if value.__class__ in (bool, int, float, str, type(None)):
        return value
    if value.__class__ is list:
        return [encode(one, tensors, f"{where}/{place}") for place, one in enumerate(value)]
    if tag := _SEQUENCES.get(value.__class__):
        ordered = sorted(value, key=repr) if isinstance(value, set | frozenset) else value
        return {f"${tag}": [encode(one, tensors, f"{where}/{place}") for place, one in enumerate(ordered)]}
    if tag := _MAPPINGS.get(value.__class__):
        if tag == "dict" and all(key.__class__ is str and key[:1] != "$" for key in value):
            return {key: encode(one, tensors, f"{where}/{key}") for key, one in value.items()}
        keys = [encode(key, tensors, f"a key of {where}") for key in value]
        return {
            f"${tag}": [
                [key, encode(one, tensors, f"{where}/{key}")] for key, one in zip(keys, value.values(), strict=True)
            ]
        }
    return _encode_single(value, tensors, where)


def _encode_single(value: Any, tensors: dict[str, torch.Tensor], where: str) -> Any:
    if isinstance(value, torch.Tensor):
        known = (name for name, tensor in tensors.items() if tensor is value)  # a tensor may occur several times
        name = next(known, f"{PREFIX}{len(tensors)}")
        tensors[name] = value
        return {"$tensor": name}
    if isinstance(value, np.generic) and type(value).__name__ in _NUMBERS:
        return {"$number": [type(value).__name__, value.item()]}
    if isinstance(value, torch.dtype | torch.device):
        return {f"${type(value).__name__}": str(value)}
    if isinstance(value, FunctionType | BuiltinFunctionType | MethodType | type):
        return {"$code": _name_of(value)}
    raise EncodingError(f"{where} is a {type(value).__module__}.{type(value).__qualname__}")


def decode(written: Any, tensors: Mapping[str, torch.Tensor], now: Any, where: str) -> Any:
    """Convert a result of :func:`encode` back to the value.

    Args:
        now: value that the script has at this position, or None.
    """
    if isinstance(written, list):
        return [decode(one, tensors, _at(now, place), f"{where}/{place}") for place, one in enumerate(written)]
    if not isinstance(written, dict):
        return written
    if len(written) != 1 or not next(iter(written)).startswith("$"):
        return {key: decode(one, tensors, _at(now, key), f"{where}/{key}") for key, one in written.items()}
    ((tag, held),) = written.items()
    try:
        return _tagged(tag[1:], held, tensors, now, where)
    except EncodingError:
        raise
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError, RuntimeError) as error:
        raise EncodingError(f"{where} is not a valid {tag[1:20]!r}: {error}") from None


def _tagged(tag: str, held: Any, tensors: Mapping[str, torch.Tensor], now: Any, where: str) -> Any:
    if tag in _MAPPINGS.values():
        read = [(decode(key, tensors, None, f"a key of {where}"), one) for key, one in held]
        return _MAKE[tag]({key: decode(one, tensors, _at(now, key), f"{where}/{key}") for key, one in read})
    if tag in _SEQUENCES.values():
        return _MAKE[tag](decode(list(held), tensors, now, where))
    return _decode_single(tag, held, tensors, now, where)


def _decode_single(tag: str, held: Any, tensors: Mapping[str, torch.Tensor], now: Any, where: str) -> Any:
    if tag == "tensor":
        return tensors[held].to(now.device) if isinstance(now, torch.Tensor) else tensors[held]
    if tag == "number":
        kind, value = held
        return _NUMBERS[kind](value)
    if tag == "dtype":
        return dtype_of(held)
    if tag == "device":
        return torch.device(held)
    if tag == "code":
        if not callable(now) or _name_of(now) != held:
            raise EncodingError(f"{where} was {held!r} and is now {_name_of(now) if callable(now) else now!r}")
        return now
    raise EncodingError(f"{where} is of an unknown kind, {tag[:20]!r}")


def _at(now: Any, key: Any) -> Any:
    """Return the script's value under a key or index, or None if there is no such value."""
    try:
        return now[key] if isinstance(now, dict | list | tuple | deque) else None
    except (KeyError, IndexError, TypeError):
        return None


def _name_of(code: Any) -> str:
    return f"{getattr(code, '__module__', '')}.{getattr(code, '__qualname__', type(code).__qualname__)}"
