"""Files, names, errors and pages use the field's words, not those that only this project understood."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import paceline

PACKAGE = Path(paceline.__file__).parent
ROOT = PACKAGE.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
RENAMED = "renamed.md"  # the page that lists the old names

ALWAYS = {
    *("roster", "seat", "roll call", "rollcall", "handover", "portion", "settle", "book", "standing", "remark"),
    *("meeting", "lane", "bell", "nap", "parcel", "contributor", "halves", "staged", "drift", "joining", "apart"),
    *("verdict", "outcome", "course", "lent", "tally", "story", "told", "letter", "post", "view", "note", "leaving"),
}
"""Private words that mean nothing else here: refused in names, in errors and in pages."""
NAMES_ONLY = {"sum", "group", "memory", "line", "version", "way", "program", "alias"}
"""Private words that are good English, too: refused in names."""

ALLOWED_NAMES = {
    # torch: a view of a tensor, a process group, a parameter group
    *("views", "view_of", "views_of", "ProcessGroup", "process_group", "await_process_group", "Group"),
    *("waiting_in_group", "ParameterGroup", "param_groups", "publish_in_group"),
    *("getGroupName", "setGroupName", "getGroupDesc", "setGroupDesc", "group_name", "group_desc"),  # torch calls them
    "open_group",  # of microbatches
    # the operating system: shared memory, a process group, what a script prints, what is typed
    *("SharedMemory", "shared_memory", "SharedMemoryQuorum", "SharedMemoryBoard", "SharedMemoryExchange"),
    *("shared_memory_of", "OutOfMemory", "ran_out_of_memory", "kill_group", "check_memory", "memory"),
    *(
        "LineDisplay",
        "lines",
        "line",
        "Lines",
        "line_of_script",
        "user_line",
        "parse_command_line",
        "command_line_settings",
    ),
    *("versions", "version"),  # of Python, of torch, of weights
    "alias_set",  # a compiler's
    "sum_and_count",
    # Horovod's operations
    *(f"grouped_{name}{end}" for name in ("allreduce", "allgather", "reducescatter") for end in ("", "_async")),
    *("grouped_allreduce_", "grouped_allreduce_async_"),
    *("test_pipeline_memory", "test_process_group"),
}
ALLOWED_TEXT = (
    *("report.notes", "`notes`", "`note`"),  # public names
    *("drift apart", "of course"),
    *("post-local", "post_accumulate", "views of the same memory"),  # of a paper, of torch
)
"""Public names, and plain English."""


def _old(words: set[str], old: set[str]) -> set[str]:
    """Which of the old words are there, also with the ending of a plural or of the past."""
    return {word for word in old for ending in ("", "s", "d", "ed") if word + ending in words}


def _words_of(text: str) -> set[str]:
    """The words of a text or of a name, and the pairs of neighbours."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", text)
    words = re.findall(r"[a-z]+", spaced.lower())
    return {*words, *(" ".join(pair) for pair in pairwise(words))}


def _public_names(path: Path) -> Iterator[str]:
    """The classes of a file, and its functions that do not begin with an underscore."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        public = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_")
        if public or isinstance(node, ast.ClassDef):
            yield node.name


def _errors(path: Path) -> Iterator[str]:
    """The texts in what is raised."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Raise) and node.exc is not None:
            for part in ast.walk(node.exc):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield part.value


def _old_in_text(text: str) -> set[str]:
    for allowed in ALLOWED_TEXT:
        text = text.replace(allowed, "")
    return _old(_words_of(text), ALWAYS)


def test_old_words_are_found() -> None:
    assert _old(_words_of("RosterServer"), ALWAYS) == {"roster"}
    assert _old(_words_of("settled_part"), ALWAYS) == {"settle"}
    assert _old(_words_of("weight_versions"), NAMES_ONLY) == {"version"}
    assert _old_in_text("The roll call is over; see `notes`.") == {"roll call"}
    assert not _old_in_text("A viewer of storybooks, postponed.")


def test_no_file_has_an_old_name() -> None:
    files = [path.relative_to(ROOT) for folder in ("paceline", "tests") for path in (ROOT / folder).rglob("*.py")]
    found = {str(path): _old(_words_of(str(path.with_suffix(""))), ALWAYS | NAMES_ONLY) for path in files}
    assert not {path: words for path, words in found.items() if words and path.split("/")[-1][:-3] not in ALLOWED_NAMES}


def test_no_class_or_public_function_has_an_old_name() -> None:
    found = {
        f"{path.relative_to(PACKAGE)}: {name}": words
        for path in PACKAGE.rglob("*.py")
        for name in _public_names(path)
        if name not in ALLOWED_NAMES and (words := _old(_words_of(name), ALWAYS | NAMES_ONLY))
    }
    assert not found


def test_no_error_speaks_in_old_words() -> None:
    found = {
        f"{path.relative_to(PACKAGE)}: {text}": words
        for path in PACKAGE.rglob("*.py")
        for text in _errors(path)
        if (words := _old_in_text(text))
    }
    assert not found


def test_no_page_speaks_in_old_words() -> None:
    found = {
        f"{path.name}:{number}: {line}": words
        for path in PAGES
        if path.name != RENAMED
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if (words := _old_in_text(line))
    }
    assert not found
