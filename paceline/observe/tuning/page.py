"""Page of ``paceline tune``: one self-contained HTML file with a chart for each test."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from xml.etree.ElementTree import Element, SubElement, tostring

from paceline.observe.tuning import TOLERANCE, Advice, Branch

_STYLE = """
:root { color-scheme: light dark; --text: #1b1b1b; --faint: #8a8a8a; --line: #d0d0d0; --page: #ffffff; }
@media (prefers-color-scheme: dark) { :root { --text: #ececec; --faint: #8a8a8a; --line: #454545; --page: #16181b; } }
body { margin: 1.5rem; background: var(--page); color: var(--text); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.3rem; } h2 { font-size: 1.05rem; margin-top: 1.8rem; } p { max-width: 46rem; }
svg text { font: 12px system-ui, sans-serif; fill: var(--text); text-anchor: middle; }
.grid { stroke: var(--line); } .losses { fill: none; stroke: var(--faint); stroke-width: .7; }
.smoothed { fill: none; stroke: #0072b2; stroke-width: 2; } .point { fill: #0072b2; }
.interval { fill: #e69f00; opacity: .25; } .value { stroke: #d55e00; stroke-width: 2; }
.most { stroke: #d55e00; stroke-dasharray: 5 4; }
"""
_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 760, 300, 70, 40


class _Chart:
    """Chart with a logarithmic horizontal axis."""

    def __init__(self, parent: Element, title: str, ticks: Sequence[float], losses: Sequence[float]) -> None:
        shown = sorted(one for one in losses if math.isfinite(one))
        low, high = shown[0], shown[int(0.98 * (len(shown) - 1))]  # losses that diverge leave the chart
        room = 0.05 * (high - low) or 1.0
        self._low, self._high, self._ticks = low - room, high + room, (math.log(min(ticks)), math.log(max(ticks)))
        size = {"width": str(_LEFT + _WIDTH + 20), "height": str(_HEIGHT + _BOTTOM)}
        self.drawing = SubElement(parent, "svg", {**size, "role": "img"})
        SubElement(self.drawing, "title").text = title
        for tick in ticks:
            self.line("grid", (self.x(tick), 0), (self.x(tick), _HEIGHT))
            self._text(f"{tick:.3g}", self.x(tick), _HEIGHT + 20)
        for part in range(5):
            loss = low + part * (high - low) / 4
            self.line("grid", (_LEFT, self.y(loss)), (_LEFT + _WIDTH, self.y(loss)))
            self._text(f"{loss:.4g}", _LEFT / 2, self.y(loss) + 4)

    def x(self, value: float) -> float:
        first, last = self._ticks
        return _LEFT + _WIDTH * (math.log(value) - first) / ((last - first) or 1.0)

    def y(self, loss: float) -> float:
        return _HEIGHT * min(1.0, max(0.0, (self._high - loss) / (self._high - self._low)))

    def line(self, kind: str, *points: tuple[float, float]) -> None:
        text = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        SubElement(self.drawing, "polyline", {"class": kind, "points": text})

    def advice(self, advice: Advice, last: float) -> None:
        """Draw the interval as a band, to the edge if it has no end, and the value as a line."""
        if advice.low is not None:
            begin, end = self.x(advice.low), self.x(min(last, advice.high or last))
            box = {"x": f"{begin:.1f}", "width": f"{max(1.0, end - begin):.1f}", "y": "0", "height": str(_HEIGHT)}
            SubElement(self.drawing, "rect", {"class": "interval", **box})
        if advice.value is not None:
            self.line("value", (self.x(advice.value), 0), (self.x(advice.value), _HEIGHT))

    def _text(self, text: str, x: float, y: float) -> None:
        SubElement(self.drawing, "text", {"x": f"{x:.1f}", "y": f"{y:.1f}"}).text = text


def html(title: str, tests: Sequence[tuple[str, Callable[[Element], None] | None, Sequence[str]]]) -> str:
    """Return the page.

    Args:
        tests: title, function that draws the chart, and sentences of each test.
    """
    page = Element("html", {"lang": "en"})
    head, body = SubElement(page, "head"), SubElement(page, "body")
    SubElement(head, "meta", {"charset": "utf-8"})
    SubElement(head, "title").text = title
    SubElement(head, "style").text = _STYLE
    SubElement(body, "h1").text = title
    for name, draw, sentences in tests:
        SubElement(body, "h2").text = name
        if draw is not None:
            draw(body)
        for sentence in sentences:
            SubElement(body, "p").text = sentence
    return "<!DOCTYPE html>\n" + tostring(page, encoding="unicode") + "\n"


def draw_rates(parent: Element, branches: Sequence[Branch], advice: Advice) -> None:
    """Draw the losses over the learning rate: of each branch, and smoothed."""
    rates = [rate for branch in branches for rate in branch.rates]
    first, last = math.floor(math.log10(min(rates))), math.ceil(math.log10(max(rates)))
    ticks = [10.0**power for power in range(first, last + 1)]
    chart = _Chart(parent, "Loss over the learning rate", ticks, [x for one in branches for x in one.smoothed])
    chart.advice(advice, ticks[-1])
    for kind in "losses", "smoothed":
        for branch in branches:
            losses = branch.losses if kind == "losses" else branch.smoothed
            chart.line(kind, *((chart.x(x), chart.y(y)) for x, y in zip(branch.rates, losses, strict=True)))


def draw_batches(parent: Element, branches: Sequence[Branch], advice: Advice) -> None:
    """Draw the loss of each branch at its end over the batch, and the largest loss that counts as equal."""
    batches = sorted({branch.batch for branch in branches})
    chart = _Chart(parent, "Loss after equally many samples, over the batch", batches, [one.at_end for one in branches])
    chart.advice(advice, batches[-1])
    base = [branch.at_end for branch in branches if branch.batch == batches[0]]
    most = sum(base) / len(base) * (1 + TOLERANCE)
    if math.isfinite(most):
        chart.line("most", (chart.x(batches[0]), chart.y(most)), (chart.x(batches[-1]), chart.y(most)))
    for branch in branches:
        if math.isfinite(branch.at_end):
            at = {"cx": f"{chart.x(branch.batch):.1f}", "cy": f"{chart.y(branch.at_end):.1f}", "r": "4"}
            SubElement(chart.drawing, "circle", {"class": "point", **at})
