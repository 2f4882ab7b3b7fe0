"""Each promise that a test shows still stands in its page, in the same words."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


class Promise(NamedTuple):
    """A sentence of a page, and the test that shows it."""

    test: str
    page: str
    sentence: str


def _tests() -> Iterator[tuple[str, list[tuple[str, ...]]]]:
    """Return the name of each test here, with the pages and sentences of its marks."""
    for path in sorted(HERE.glob("test_*.py")):
        if path != Path(__file__):
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                    yield node.name, [_words_of(one) for one in node.decorator_list if _is_promise(one)]


def _is_promise(decorator: ast.expr) -> bool:
    return isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.promise"


def _words_of(mark: ast.expr) -> tuple[str, ...]:
    assert isinstance(mark, ast.Call) and not mark.keywords
    return tuple(ast.literal_eval(value) for value in mark.args)


TESTS = list(_tests())
PROMISES = [
    Promise(test, page, sentence) for test, marks in TESTS for page, *sentences in marks for sentence in sentences
]


def _normalised(text: str) -> str:
    return " ".join(text.split())


def test_each_promise_stands_in_its_page() -> None:
    pages = {one.page: _normalised((ROOT / one.page).read_text(encoding="utf-8")) for one in PROMISES}
    missing = [one for one in PROMISES if _normalised(one.sentence) not in pages[one.page]]
    assert not missing, "these sentences are not in their pages:\n" + "\n".join(map(str, missing))


def test_each_test_quotes_a_promise() -> None:
    assert not [name for name, marks in TESTS if not all(len(mark) > 1 for mark in marks) or not marks]


def test_the_names_of_the_tests_are_unique() -> None:
    assert not [name for name, count in Counter(name for name, _ in TESTS).items() if count > 1]


@pytest.mark.parametrize("sentence", ["", "No step is lost."])
def test_a_sentence_that_is_not_in_a_page_is_found(sentence: str) -> None:
    page = _normalised("- **No step is\n  lost,** and none is applied twice.")
    assert (_normalised(sentence) in page) == (not sentence)
