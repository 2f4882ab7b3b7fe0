"""Timeline of a step as one self-contained HTML file: predicted above measured, to the same scale."""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree.ElementTree import Element, SubElement, tostring

from paceline.observe.timeline import summary
from paceline.observe.timeline.comparison import Comparison
from paceline.observe.timeline.drawing import NAMES, svg_timelines, visible
from paceline.schedule.pipeline.operations import Kind

_STYLE = """
:root { color-scheme: light dark; --text: #1b1b1b; --faint: #595959; --line: #d0d0d0; --page: #ffffff; }
@media (prefers-color-scheme: dark) {
  :root { --text: #ececec; --faint: #a8a8a8; --line: #454545; --page: #16181b; }
}
body { margin: 1.5rem; background: var(--page); color: var(--text); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.3rem; } h2 { font-size: 1.05rem; margin-top: 1.8rem; }
p, li { max-width: 46rem; }
table { border-collapse: collapse; }
th, td { padding: .25rem .9rem .25rem 0; border-bottom: 1px solid var(--line); text-align: left; }
td { font-variant-numeric: tabular-nums; }
.wide { overflow-x: auto; }
.legend { display: flex; flex-wrap: wrap; gap: .3rem 1.2rem; padding: 0; list-style: none; max-width: none; }
.legend svg { vertical-align: -2px; margin-right: .4rem; }
svg text { font: 12px system-ui, sans-serif; fill: var(--text); }
svg .head { font-weight: 600; font-size: 14px; }
svg .box { font-size: 11px; fill: #111111; text-anchor: middle; }
svg .tick { fill: var(--faint); text-anchor: middle; }
svg .grid { stroke: var(--line); }
svg .end { stroke: var(--text); stroke-dasharray: 4 3; }
svg .row { fill: none; stroke: var(--line); }
.forward { fill: #56b4e9; } .backward { fill: #e69f00; } .input { fill: #f0e442; } .weight { fill: #35b58a; }
.reduce { fill: #e2733d; } .update { fill: #cc79a7; }
.send { fill: var(--text); } .receive { fill: var(--faint); }
"""
"""The color-blind-safe palette of Okabe and Ito, with dark letters in light and dark mode."""

_LEGEND = {
    Kind.SEND: "send to another worker (mark on top)",
    Kind.RECEIVE: "wait for another worker (mark at the bottom)",
    Kind.REDUCE: "reduction over the workers of a stage",
    Kind.UPDATE: "update",
}


def html(comparison: Comparison) -> str:
    page = Element("html", {"lang": "en"})
    head, body = SubElement(page, "head"), SubElement(page, "body")
    SubElement(head, "meta", {"charset": "utf-8"})
    SubElement(head, "meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"})
    title = summary.headline(comparison)
    _add(head, "title", title)
    _add(head, "style", _STYLE)
    main = SubElement(body, "main")
    _add(main, "h1", title)
    _table(main, summary.totals(comparison))
    sentences = comparison.source, summary.clocks(comparison), summary.duration(comparison), summary.waiting(comparison)
    for sentence in sentences:
        if sentence:
            _add(main, "p", sentence)
    SubElement(main, "div", {"class": "wide"}).append(svg_timelines(comparison.predicted, comparison.measured))
    main.append(_legend(comparison))
    _add(main, "h2", "Workers")
    _table(main, summary.workers(comparison))
    _add(main, "p", "Kept: the most activations at a time, in microbatches and stages.")
    _add(main, "h2", "Stages")
    _table(main, summary.stages(comparison))
    _add(main, "p", "Per microbatch: the medians of the steps around this one, and the times of the prediction.")
    return "<!DOCTYPE html>\n" + tostring(page, encoding="unicode") + "\n"


def _legend(comparison: Comparison) -> Element:
    """Build the legend for the kinds of operations in the drawing."""
    both = comparison.predicted.workers + comparison.measured.workers
    there = {span.operation.kind for spans in both for span in spans if visible(span)}
    legend = Element("ul", {"class": "legend"})
    for kind in Kind:
        if kind in there:
            row = SubElement(legend, "li")
            sample = SubElement(row, "svg", {"width": "14", "height": "14", "aria-hidden": "true"})
            thin = {"y": "6", "height": "3"} if kind in (Kind.SEND, Kind.RECEIVE) else {"height": "14"}
            SubElement(sample, "rect", {"class": kind.name.lower(), "width": "14", **thin})
            sample.tail = _LEGEND.get(kind, NAMES[kind])
    return legend


def _table(parent: Element, rows: Sequence[Sequence[str]]) -> None:
    table = SubElement(SubElement(parent, "div", {"class": "wide"}), "table")
    head, body = SubElement(table, "thead"), SubElement(table, "tbody")
    for place, row in enumerate(rows):
        line = SubElement(body if place else head, "tr")
        for column, cell in enumerate(row):
            names = {"scope": "row" if place else "col"} if column == 0 or not place else {}
            _add(line, "th" if names else "td", cell or " ", names)


def _add(parent: Element, tag: str, text: str, attributes: dict[str, str] | None = None) -> None:
    SubElement(parent, tag, attributes or {}).text = text
