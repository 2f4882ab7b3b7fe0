"""The pages are true: their Python runs, their links lead somewhere, nothing public is left out."""

from __future__ import annotations

import inspect
import os
import re
from dataclasses import fields
from pathlib import Path

import pytest
from fork_server import PACELINE, Command, ForkServer

import paceline
from paceline import config, errors
from paceline.cli.main import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS]

BLOCK = re.compile(r"^( *)```python\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
FENCE = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
NOT_RUN = re.compile(r"<!-- not run: .+ -->\s*$")
LINK = re.compile(r"(?<!!)\[[^\]]+\]\(([^)\s]+)\)")
OPTION = re.compile(r"(?<![\w-])--?[a-z][a-z-]*")


def _name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def snippets(page: Path) -> list[tuple[int, str]]:
    """The Python of a page that runs: lines before it, source."""
    text = page.read_text()
    found = []
    for match in BLOCK.finditer(text):
        if NOT_RUN.search(text[: match.start()]):
            continue
        indent = match[1]
        source = "".join(line.removeprefix(indent) for line in match[2].splitlines(keepends=True))
        found.append((text[: match.start()].count("\n") + 1, source))
    return found


def clean_environment() -> dict[str, str]:
    """That of a shell that has the package that is tested, and nothing of a launcher around."""
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("PACELINE_") and name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    }
    return {**clean, "PYTHONPATH": str(ROOT), "COLUMNS": "200", "NO_COLOR": "1"}


def anchors(page: Path) -> set[str]:
    """The names of a page's headings, as the documentation and code hosts make them."""
    titles = re.findall(r"^#+ +(.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", title.strip().lower())) for title in titles}


WITH_SNIPPETS = [page.name for page in PAGES if snippets(page)]


def _with_snippets() -> list[object]:
    """Return the pages with snippets; those that start many processes anew are slow."""
    slow = {
        "survive.md",
        "testing.md",
        "keras-models.md",
        "launch.md",
        "data.md",
        "streams.md",
        "augmentation.md",
        "growing-data.md",
        "located-data.md",
        "horovod.md",
        "horovod-functions.md",
        "faults.md",
        "optimizers.md",
        "several-losses.md",
        "weights.md",
        "averages.md",
    }
    pages = [page for page in PAGES if snippets(page)]
    return [pytest.param(page, marks=[pytest.mark.slow] * (page.name in slow), id=_name_of(page)) for page in pages]


@pytest.mark.parametrize("page", _with_snippets())
def test_snippets_run(page: Path, fork_server: ForkServer, tmp_path: Path) -> None:
    """All of a page in one process and in one namespace, in the lines in which they stand on the page.

    The workers that it starts are forked.
    """
    lines = ["import fork_server; fork_server.fork_workers()", *[""] * (len(page.read_text().splitlines()) - 1)]
    for before, source in snippets(page):
        lines[before : before + len(source.splitlines())] = source.splitlines()
    script, output = tmp_path / f"{page.stem}.py", tmp_path / "output"
    script.write_text("\n".join(lines))
    folder = tmp_path / "work"
    folder.mkdir()
    code = fork_server.run(Command((str(script),), clean_environment(), output, output, folder), 120)
    assert code == 0, output.read_text()


def test_pages_with_snippets_are_found() -> None:
    assert {"README.md", "train.md", "data.md", "batch-size.md", "evaluate.md", "api.md"} <= set(WITH_SNIPPETS)


@pytest.mark.parametrize("page", PAGES, ids=_name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(FENCE.sub("", page.read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{_name_of(page)}: {link} does not exist"
        if anchor:
            assert anchor in anchors(target), f"{_name_of(page)}: {target.name} has no heading for #{anchor}"


def test_pages_link_inside_docs_only() -> None:
    for page in DOCS:
        for link in LINK.findall(FENCE.sub("", page.read_text())):
            inside = (page.parent / link).resolve().is_relative_to(ROOT / "docs")
            assert inside or ":" in link, f"{_name_of(page)}: {link} is not part of the built pages"


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    assert set(re.findall(r": (\S+\.md)$", navigation, re.MULTILINE)) == {
        _name_of(page).removeprefix("docs/") for page in DOCS
    }


def test_pages_are_short() -> None:
    """A page is of one kind. Reference pages are looked up, not read, and may be longer."""
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    reference = set(re.findall(r": (\S+\.md)$", navigation.partition("  - Reference:")[2], re.MULTILINE))
    words = {_name_of(page).removeprefix("docs/"): len(page.read_text().split()) for page in DOCS}
    assert not {name: count for name, count in words.items() if count > 1200 and name not in reference}
    assert len(re.findall(r"^  - ", navigation, re.MULTILINE)) <= 7
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def test_every_public_name_is_in_the_reference() -> None:
    headings = re.findall(r"^#+ .*$", (ROOT / "docs/api.md").read_text(), re.MULTILINE)
    classes = re.findall(r"^\| `(\w+)` \| \d+ \|", (ROOT / "docs/errors.md").read_text(), re.MULTILINE)
    for name in set(paceline.__all__) - set(classes):
        assert any(f"`{name}" in heading or f".{name}" in heading for heading in headings), name


def test_every_argument_method_and_field_is_in_the_reference() -> None:
    text = (ROOT / "docs/api.md").read_text()
    methods = {name: value for name, value in vars(paceline.Session).items() if not name.startswith("_")}
    wanted = {*methods, *inspect.signature(paceline.start).parameters}
    for value in methods.values():
        if inspect.isfunction(value):
            wanted |= inspect.signature(value).parameters.keys() - {"self"}
    for record in (paceline.Batch, paceline.Report):
        wanted |= {field.name for field in fields(record)}
    missing = {name for name in wanted if not re.search(rf"`(Session\.)?{name}\b", text)}
    assert not missing


def test_every_setting_is_described_with_its_default() -> None:
    rows = re.findall(r"^\| `([\w.]+)` \| `([^`]*)` \| .+ \|$", (ROOT / "docs/api.md").read_text(), re.MULTILINE)
    written = {"None": "none", "False": "false", "True": "true"}
    defaults = {key: written.get(str(value), str(value)) for key, value in config.flat_keys().items()}
    assert dict(rows) == defaults


def test_every_error_is_described_with_its_exit_code() -> None:
    text = (ROOT / "docs/errors.md").read_text()
    for name, kind in vars(errors).items():
        if isinstance(kind, type) and issubclass(kind, errors.PacelineError):
            assert f"| `{name}` | {kind.exit_code} |" in text, name


def test_the_size_of_buckets_is_described_alike_in_the_settings_and_the_reference() -> None:
    text = (ROOT / "docs/api.md").read_text()
    (row,) = re.findall(r"^\| `bucket_megabytes` \| `none` \| (.+) \|$", text, re.MULTILINE)
    assert row.replace("`", "") == config.describe("bucket_megabytes")


@pytest.mark.parametrize("text", [(ROOT / "docs/errors.md").read_text(), errors.__doc__ or ""], ids=["page", "module"])
def test_the_tree_of_errors_has_every_class_below_its_base(text: str) -> None:
    """Only indentation differs between the page and the docstring."""
    (tree,) = re.findall(r"^ *PacelineError\n(?:.*[├└]── .*\n)+", text, re.MULTILINE)
    above, found = {}, {"PacelineError": "Exception"}
    for line in tree.splitlines():
        depth, name = re.search(r"\w", line).start(), re.search(r"\w+", line)[0]  # type: ignore[union-attr, index]
        above = {place: kind for place, kind in above.items() if place < depth} | {depth: name}
        found[name] = above[max(place for place in above if place < depth)] if len(above) > 1 else "Exception"
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, BaseException)]
    assert found == {kind.__name__: kind.__bases__[0].__name__ for kind in kinds}


@pytest.mark.parametrize("command", [one for one in COMMANDS if one != "horovodrun"])  # its options are Horovod's
def test_every_option_is_on_the_page_of_the_command_line(command: str, fork_server: ForkServer, tmp_path: Path) -> None:
    output = tmp_path / "output"
    asked = Command((*PACELINE, command, "--help"), clean_environment(), output, output, tmp_path)
    assert fork_server.run(asked, 60) == 0, output.read_text()
    section = re.search(rf"^## paceline {command}\n(.*?)(?=^## |\Z)", (ROOT / "docs/cli.md").read_text(), re.M | re.S)
    assert section is not None
    options = set(OPTION.findall(output.read_text().partition("Options:")[2])) - {"--help"}
    assert options
    missing = {option for option in options if f"`{option}" not in section[1]}
    assert not missing
