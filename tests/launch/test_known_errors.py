import re
from pathlib import Path

import pytest
from error_texts import KNOWN, OTHERS

from paceline.coordinator.failure.known_errors import KNOWN_ERRORS, find, find_printed

PAGE = Path(__file__).parents[2] / "docs" / "ten-errors.md"


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in KNOWN.items() for text in texts])
def test_what_was_recorded_is_explained(name: str, text: str) -> None:
    found = find(text)
    assert found is not None
    assert found.name == name


@pytest.mark.parametrize("text", OTHERS)
def test_other_errors_are_not_explained(text: str) -> None:
    assert find(text) is None


def test_each_row_has_a_recorded_text() -> None:
    assert {one.name for one in KNOWN_ERRORS} == KNOWN.keys()


def test_a_warning_of_torch_explains_no_end() -> None:
    warning = (
        "socket.cpp:764] [c10d] The IPv6 network addresses of (a, 1) cannot be retrieved (Name or service not known)."
    )
    assert find_printed([f"[W1122 22:10:44.084102631 {warning}", f"[rank1]:[W1122 {warning}", "ended"]) is None
    assert find_printed([f"[E1122 22:10:44.084102631 {warning}"]) is not None


def test_the_page_and_the_table_are_the_same() -> None:
    page = PAGE.read_text()
    parts = dict(re.findall(r"^## (.+?)\n(.+?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL))
    assert {one.name for one in KNOWN_ERRORS} <= parts.keys()
    for one in KNOWN_ERRORS:
        part = parts[one.name]
        shown = re.findall(r"^```text\n(.+?)\n```", part, re.MULTILINE | re.DOTALL)
        told = one.paragraph.replace(f" Usual causes: {'; '.join(one.causes)}.", "")
        assert told != one.paragraph and told in " ".join(part.split()), f"{one.name}: write\n{told}"
        assert shown
        for text in shown:
            assert find(" ".join(text.split())) is one, text


def test_the_checks_of_the_doctor_have_these_names() -> None:
    page = PAGE.with_name("doctor.md").read_text()
    checks = {name for row in re.findall(r"^\| (.+?) \|", page, re.MULTILINE) for name in row.split(", ")}
    assert {one.doctor for one in KNOWN_ERRORS} - {""} <= checks
