"""The built pages in a browser, from disk: search, dark mode, no other host, legible on a phone and in both modes."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import CHROMIUM, Browser

ROOT = Path(__file__).resolve().parents[2]
GROUPS = 8
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="needs a browser: apt-get install chromium"),
    pytest.mark.skipif(importlib.util.find_spec("mkdocstrings") is None, reason="needs paceline[docs]"),
]

FIRST_PAGES = {
    "DDP": {"porting.html", "beside.html"},
    "FSDP": {"sharded.html", "beside.html"},
    "NCCL timeout": {"ten-errors.html"},
    "hang": {"survive.html"},
    "OOM": {"memory.html", "ten-errors.html"},
    "out of memory": {"memory.html", "ten-errors.html"},
    "spot": {"tutorials/spot.html"},
    "slow": {"why.html"},
    "straggler": {"slow-workers.html"},
    "resume": {"checkpoints.html"},
    "Slurm": {"places/slurm.html"},
    "port": {"porting.html"},
    "bucket_megabytes": {"settings.html"},
    "checkpoint": {"checkpoints.html"},
    "Horovod": {"horovod.html"},
    "evaluate": {"evaluate.html"},
}
"""Words that users type, and the pages of which one must be the first result."""
SEARCH = """new Promise((done, failed) => {
  const words = WORDS, input = document.querySelector("[data-md-component=search-query]");
  const found = document.querySelector("[data-md-component=search-result]");
  input.focus();
  input.value = words;
  input.dispatchEvent(new KeyboardEvent("keyup", {bubbles: true}));
  const deadline = performance.now() + 60000, wanted = "h=" + words.toLowerCase().split(" ")[0];
  const look = () => {
    if ([...found.querySelectorAll("ol a")].some(one => one.href.includes(wanted)))
      done(found.querySelector("ol > li a").pathname);
    else if (performance.now() > deadline) failed(new Error("no answer: " + found.innerText));
    else requestAnimationFrame(look);
  };
  look();
})"""
STILL = "document.head.insertAdjacentHTML('beforeend', '<style>* {transition: none !important}</style>')"
"""Colours change at once, not in a quarter of a second."""
WIDE = """document.documentElement.scrollWidth > innerWidth
  ? [...document.querySelectorAll("article *")].filter(one => one.getBoundingClientRect().right > innerWidth)
      .map(one => one.outerHTML.slice(0, 200)).slice(0, 3) : []"""
PALE = """(() => {
  const paper = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const parsed = color => {
    paper.clearRect(0, 0, 1, 1);
    paper.fillStyle = color;
    paper.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = paper.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const cache = new Map();
  const rgba = color => cache.get(color) ?? cache.set(color, parsed(color)).get(color);
  const over = ([r, g, b, a], below) => [r, g, b].map((value, i) => value * a + below[i] * (1 - a));
  const ground = element => {
    if (element === null) return rgba(getComputedStyle(document.documentElement).backgroundColor)[3]
      ? rgba(getComputedStyle(document.documentElement).backgroundColor).slice(0, 3) : [255, 255, 255];
    const color = rgba(getComputedStyle(element).backgroundColor);
    return color[3] === 1 ? color.slice(0, 3) : over(color, ground(element.parentElement));
  };
  const light = color => {
    const [r, g, b] = color.map(value => value / 255)
      .map(value => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const bad = {};
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement, style = getComputedStyle(element);
    const text = walker.currentNode.textContent.trim(), seen = {opacityProperty: true, visibilityProperty: true};
    if (!text || !element.checkVisibility(seen) || element.closest("svg, script, style, noscript")) continue;
    const below = ground(element), above = over(rgba(style.color), below);
    const [high, low] = [light(above), light(below)].sort((a, b) => b - a);
    const size = parseFloat(style.fontSize), large = size >= 24 || (size >= 18.66 && style.fontWeight >= 700);
    const ratio = (high + 0.05) / (low + 0.05);
    const name = element.tagName + "." + element.className + " in " + element.parentElement.className;
    if (ratio < (large ? 3 : 4.5)) bad[name] = ratio.toFixed(2) + " " + text.slice(0, 40);
  }
  return bad;
})()"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the built pages: that of ``make docs``, if nothing has changed since."""
    sources = [ROOT / "mkdocs.yml", *(ROOT / "docs").rglob("*.*"), *(ROOT / "paceline").rglob("*.py")]
    built = ROOT / "site" / "index.html"
    if built.exists() and built.stat().st_mtime > max(path.stat().st_mtime for path in sources):
        return built.parent
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, check=True, timeout=240)
    return folder


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    shown = Browser(tmp_path / "profile")
    yield shown
    shown.close()


@pytest.mark.slow
def test_search_navigation_and_dark_mode(site: Path, browser: Browser) -> None:
    browser.open(f"file://{site}/index.html")
    wrong = {}
    for words, pages in FIRST_PAGES.items():
        found = Path(browser.run(SEARCH.replace("WORDS", json.dumps(words)))).relative_to(site).as_posix()
        if found not in pages:
            wrong[words] = found
    assert not wrong
    assert browser.run("document.querySelectorAll('nav.md-nav--primary a.md-nav__link[href]').length") > 80
    scheme = "document.body.getAttribute('data-md-color-scheme')"
    assert browser.run(scheme) == "default"
    browser.run("document.querySelector('label[for=__palette_1]:not([hidden]), label[title=Dark]').click()")
    assert browser.run(scheme) == "slate"
    browser.open(f"file://{site}/tutorials/first.html")
    assert browser.run(scheme) == "slate", "the next page forgets the mode"
    outside = [one for one in browser.requests if not one.startswith(("file://", "data:"))]
    assert not outside and not browser.complaints


@pytest.mark.slow(turns=GROUPS)
@pytest.mark.parametrize("group", range(GROUPS))
def test_pages_are_legible(site: Path, browser: Browser, group: int) -> None:
    """On a phone of 400 pixels, and with contrast AA (WCAG 2: 4.5, and 3 for large text) in both modes."""
    found = {path.relative_to(site).as_posix() for path in site.rglob("*.html")}
    pages = sorted(found - {"404.html"})[group::GROUPS]  # only a server shows that page
    assert pages
    wrong = {}
    for page in pages:
        browser.open(f"file://{site}/{page}", width=400)
        browser.run(STILL)
        for faults in (browser.run(WIDE), *map(browser.run, _in_both_modes())):
            if faults:
                wrong.setdefault(page, []).append(faults)
    assert not wrong, json.dumps(wrong, indent=1)
    outside = [one for one in browser.requests if not one.startswith(("file://", "data:"))]
    assert not outside and not browser.complaints


def _in_both_modes() -> list[str]:
    set_mode = "document.body.setAttribute('data-md-color-scheme', '{}')"
    return [f"{set_mode.format(mode)}, {PALE}" for mode in ("default", "slate")]
