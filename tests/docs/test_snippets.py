"""The pages are true: their Python runs, their links lead somewhere, nothing public is left out."""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
from pathlib import Path
from typing import Any

import pytest
from fork_server import Command, ForkServer

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
    text = FENCE.sub("", page.read_text())
    titles = re.findall(r"^#+ +(.+)$", text, re.MULTILINE)
    generated = re.findall(r"^::: (\S+)$", text, re.MULTILINE)
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", title.strip().lower())) for title in titles} | {*generated}


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


def _prose(text: str) -> str:
    """Return the text of a page without code, tables and headings. Each paragraph and each item of a list ends."""
    text = FENCE.sub("", re.sub(r"\A---\n.*?\n---\n|<!--.*?-->", "", text, flags=re.DOTALL))
    text = re.sub(r"^ *(\||#|!|<).*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"`[^`]*`", "it", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text))
    return re.sub(r"\n\s*\n|\n *(?=[-*] |\d+\. )", ".\n", text)


def _syllables(word: str) -> int:
    """Return the number of groups of vowels, less a silent ending."""
    silent = re.search(r"[^aeiouyl]e$|[^aeiouydt]ed$|[^aeioulsxzc]es$", word) is not None
    return max(1, len(re.findall(r"[aeiouy]+", word)) - silent)


def _grade(text: str) -> float:
    """Return the school grade of a text: Kincaid et al. 1975."""
    words = re.findall(r"[a-z][a-z']*", text.lower())
    sentences = [one for one in re.split(r"[.!?]+(?=\s|$)", text) if re.search(r"[A-Za-z]{2}", one)]
    return 0.39 * len(words) / len(sentences) + 11.8 * sum(map(_syllables, words)) / len(words) - 15.59


def test_pages_are_easy_to_read() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2].partition("  - Explanation:")[0]
    grades = {page: _grade(_prose((ROOT / "docs" / page).read_text())) for page in re.findall(r"\S+\.md", navigation)}
    assert not {page: round(grade, 1) for page, grade in grades.items() if grade > 9}


def test_every_public_name_is_in_the_reference() -> None:
    directives = re.findall(r"^::: paceline\.(\w+)$", (ROOT / "docs/api.md").read_text(), re.MULTILINE)
    kinds = {name for name, kind in vars(errors).items() if isinstance(kind, type)}  # in their own table
    assert sorted(directives) == sorted(set(paceline.__all__) - kinds)


def test_every_argument_is_described() -> None:
    methods = [value for name, value in vars(paceline.Session).items() if name[0] != "_" and inspect.isfunction(value)]
    for called in (paceline.start, paceline.launch, paceline.plan, *methods):
        for name in inspect.signature(called).parameters.keys() - {"self"}:
            named = re.search(rf"\b{name}: |``[^`]*\b{name}\b[^`]*``", called.__doc__ or "")
            assert named, f"{called.__qualname__} has an argument {name}, which its docstring does not describe"


def _marks(page: str, kind: str) -> list[str]:
    """Return what the generated tables of a page are of."""
    found = re.findall(rf"^<!-- {kind}: ([^>]+) -->$", (ROOT / "docs" / page).read_text(), re.MULTILINE)
    return " ".join(found).split()


def test_every_setting_and_every_command_has_its_row_and_its_section() -> None:
    assert sorted(_marks("settings.md", "settings")) == sorted(config.flat_keys())
    assert _marks("cli.md", "command") == re.findall(r"^## paceline (\w+)$", (ROOT / "docs/cli.md").read_text(), re.M)
    assert sorted(_marks("cli.md", "command")) == sorted(COMMANDS)


def _loaded(file: str) -> Any:
    spec = importlib.util.spec_from_file_location(Path(file).stem, ROOT / file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_figure_is_on_a_page_and_has_its_command() -> None:
    figures = _loaded("bench/figures.py")
    images = {path.name for path in (ROOT / "docs/images").iterdir()}
    assert images == figures.FIGURES.keys() | figures.BY_HAND
    text = "".join(page.read_text() for page in DOCS)
    assert not {name for name in images if f"images/{name})" not in text}


def test_generated_tables() -> None:
    hooks = _loaded("docs/hooks.py")
    page = hooks.on_page_markdown(
        "<!-- settings: wire_ratio\n     server.mode threads -->\n<!-- command: export -->\n<!-- command: tune -->\n"
    )
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    assert [
        "`wire_ratio`",
        "number >\u00a00, ≤\u00a01",
        "`0.05`",
        config.describe("wire_ratio"),
    ] in rows
    assert ["`server.mode`", "`sync`, `async`, `bounded`", "`sync`", config.describe("server.mode")] in rows
    assert ["`threads`", "integer ≥\u00a01, ≤\u00a01,024", "`none`", config.describe("threads")] in rows
    assert "paceline export [OPTIONS] CHECKPOINT FILE\n" in page and "Exit code: 2 if" in page
    assert ["`--dtype <float32|bfloat16|float16>`", "as it is", "Convert floating-point tensors."] in rows
    assert ["`--samples <int range>`", "128 batches", "Samples of a branch of the batch test.  [x>=1]"] in rows
    assert "| `WorkerSilent` | 124 | " in hooks.on_page_markdown("<!-- errors -->")


def test_the_tree_of_errors_has_every_class_below_its_base() -> None:
    (tree,) = re.findall(r"^ *PacelineError\n(?:.*[├└]── .*\n)+", errors.__doc__ or "", re.MULTILINE)
    above, found = {}, {"PacelineError": "Exception"}
    for line in tree.splitlines():
        depth, name = re.search(r"\w", line).start(), re.search(r"\w+", line)[0]  # type: ignore[union-attr, index]
        above = {place: kind for place, kind in above.items() if place < depth} | {depth: name}
        found[name] = above[max(place for place in above if place < depth)] if len(above) > 1 else "Exception"
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, BaseException)]
    assert found == {kind.__name__: kind.__bases__[0].__name__ for kind in kinds}
