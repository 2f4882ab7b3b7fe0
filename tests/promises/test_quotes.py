"""Each promise that a test shows still stands in its page, in the same words."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

HERE = Path(__file__).parent
TESTS = HERE.parent
ROOT = TESTS.parent


class Promise(NamedTuple):
    """A sentence of a page, and the file with the test that shows it."""

    file: Path
    page: str
    sentence: str


def _marks_in(node: ast.AST) -> Iterator[tuple[str, ...]]:
    """Return the page and the sentences of each mark ``promise``."""
    for call in ast.walk(node):
        if isinstance(call, ast.Call) and ast.unparse(call.func) in ("pytest.mark.promise", "promise"):
            assert len(call.args) > 1 and not call.keywords, f"a mark without a sentence in line {call.lineno}"
            yield tuple(ast.literal_eval(value) for value in call.args)


TREES = {
    path: ast.parse(text)
    for path in sorted(TESTS.rglob("test_*.py"))
    if path != Path(__file__) and "promise(" in (text := path.read_text(encoding="utf-8"))
}
PROMISES = [
    Promise(path, page, sentence)
    for path, tree in TREES.items()
    for page, *sentences in _marks_in(tree)
    for sentence in sentences
]
TESTS_HERE = [
    node
    for path, tree in TREES.items()
    for node in tree.body
    if path.parent == HERE and isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
]


def _normalised(text: str) -> str:
    return " ".join(text.split())


def test_each_promise_stands_in_its_page() -> None:
    pages = {one.page: _normalised((ROOT / one.page).read_text(encoding="utf-8")) for one in PROMISES}
    missing = [one for one in PROMISES if _normalised(one.sentence) not in pages[one.page]]
    assert not missing, "these sentences are not in their pages:\n" + "\n".join(map(str, missing))


def test_each_test_quotes_a_promise() -> None:
    assert not [node.name for node in TESTS_HERE if not any(map(list, map(_marks_in, node.decorator_list)))]


def test_the_names_of_the_tests_are_unique() -> None:
    assert not [name for name, count in Counter(node.name for node in TESTS_HERE).items() if count > 1]


@pytest.mark.parametrize("sentence", ["", "No step is lost."])
def test_a_sentence_that_is_not_in_a_page_is_found(sentence: str) -> None:
    page = _normalised("- **No step is\n  lost,** and none is applied twice.")
    assert (_normalised(sentence) in page) == (not sentence)
