"""Attributes that the loop has set on some ranks only, as the cause of an audit's difference."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.data.objects.differing import differing_attribute


@pytest.mark.parametrize(
    ("everyone", "words"),
    [
        ([{"data": {"k": 1.5}}, {"data": {"k": 1.5}}], ""),
        ([{"data": {"k": 1.5}}, {"data": {"k": 2.0}}], "data.k to 1.5 on rank 0 and to 2.0 on rank 1"),
        ([{"data": {"k": 1.5}}, {}], "data.k to 1.5 on rank 0, and not on rank 1"),
        ([{}, {"model": {}}, {"model": {"p": 0.5}}], "model.p to 0.5 on rank 2, and not on rank 0"),
    ],
)
def test_who_has_set_it_is_named(everyone: list[dict[str, dict[Any, Any]]], words: str) -> None:
    said = differing_attribute(everyone)
    assert words in said and bool(words) == bool(said)
