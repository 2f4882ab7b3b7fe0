"""What is sent comes out the same; what cannot be sent is named; what nobody has sent is refused, and runs nothing."""

import math
import pickle
import random
import struct
from collections import Counter, OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from paceline.comm.values import check, decode, encode, sendable


@sendable
@dataclass
class Point:
    x: Any
    y: Any = None


@sendable
class Pair(NamedTuple):
    left: Any
    right: Any


VALUES: list[Any] = [
    None,
    True,
    2**200,
    -1,
    "ü\x00\ud800",
    0.1,
    -0.0,
    5e-324,
    math.inf,
    -math.inf,
    1 + 2j,
    b"\x00\xff",
    [],
    (),
    (1, [2, (3,)], {"a": {1: (None,)}}),
    {(1, 2): {3}, "x": frozenset({"y"})},
    Counter({5: 2}),
    OrderedDict(b=1, a=2),
    range(2, 9, 3),
    torch.float16,
    torch.Size([2, 3]),
    Path("/a/b"),
    np.float32(0.1),
    np.float64(0.1),
    np.int8(-3),
    Point(1.5, Pair((1,), {"z": [None]})),
    {"tensor": 1},
    {"tuple": [1]},
]


@pytest.mark.parametrize("value", VALUES)
def test_the_same_comes_out(value: Any) -> None:
    found = decode(encode([value, value]))
    assert found == [value, value]
    assert [type(one) for one in found] == 2 * [type(value)]
    assert repr(found) == repr([value, value])


def test_bits_of_what_is_no_number() -> None:
    odd = struct.unpack("<d", bytes.fromhex("01000000000af87f"))[0]
    assert struct.pack("<d", decode(encode(odd))) == struct.pack("<d", odd)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6).view(2, 3).t(),
        torch.tensor(1.5),
        torch.empty(0, 3),
        torch.ones(()).expand(1),
        torch.ones(()).expand(0),
        torch.tensor([math.nan, -0.0]),
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.randn(4).to(torch.bfloat16),
        torch.tensor([True, False]),
        torch.nn.Parameter(torch.ones(2)),
    ],
)
def test_tensors(tensor: torch.Tensor) -> None:
    found, again = decode(encode((tensor, {"t": tensor})))
    assert found.dtype == tensor.dtype
    torch.testing.assert_close(found, tensor.detach(), rtol=0, atol=0, equal_nan=True)
    found += 1 if found.dtype != torch.bool else True
    torch.testing.assert_close(again["t"], tensor.detach(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ({"a": [{"b": print}]}, r"\['a'\]\['b'\] is a builtins.builtin_function_or_method"),
        (Point(object()), r"\.x is a builtins.object"),
        (ValueError("x"), "it is a builtins.ValueError"),
        (torch.eye(2).to_sparse(), "it is a torch.Tensor"),
        (np.array(["x"])[0], "numpy.str_"),
    ],
)
def test_what_cannot_be_sent_is_named(value: Any, named: str) -> None:
    for looks in (encode, check):
        with pytest.raises(TypeError, match=named):
            looks(value)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        pickle.dumps((1, 2)),
        struct.pack("<QQ", 2**63, 0),
        *(
            struct.pack("<QQ", len(text), 0) + text
            for text in (
                b"x",
                b"[" * 100_000,
                b"NaN",
                b'{"class":["Path","/"]}',
                b'{"class":["Point",1,2,3]}',
                b'{"class":[[1]]}',
                b'{"bytes":[0,9]}',
                b'{"bytes":[-2,-1]}',
                b'{"tensor":["torch.float32",[2,2],[0,0]]}',
                b'{"tensor":["torch.float32",[99999999999999],[0,0]]}',
                b'{"number":["O",[0,0]]}',
                b'{"dtype":"torch.load"}',
                b'{"a":1,"b":2}',
                b"{}",
                b'{"set":[[]]}',
                b'{"dict":[[1],[]]}',
                b'{"float":"00"}',
                b'{"range":[1,2,0]}',
            )
        ),
    ],
)
def test_what_nobody_has_sent_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError):
        decode(data)


def test_random_bytes_are_read_or_refused() -> None:
    numbers, whole = random.Random(1), encode([VALUES, torch.ones(3)])
    for _ in range(300):
        changed = bytearray(whole)
        for _ in range(numbers.randrange(1, 4)):
            changed[numbers.randrange(len(changed))] = numbers.randrange(256)
        try:
            decode(bytes(changed))
        except ValueError:
            continue
