"""SVG drawing of two timelines of the same workers, above each other and to the same scale."""

from __future__ import annotations

import math
from statistics import median
from xml.etree.ElementTree import Element, SubElement

from paceline.observe.timeline.summary import milliseconds
from paceline.schedule.pipeline.clock import TRANSFERS, Span, Timeline
from paceline.schedule.pipeline.operations import Kind

NAMES = {
    Kind.FORWARD: "forward pass",
    Kind.BACKWARD: "backward pass",
    Kind.INPUT: "gradient for the input",
    Kind.WEIGHT: "gradients for the weights",
    Kind.SEND: "send",
    Kind.RECEIVE: "wait",
    Kind.REDUCE: "reduction",
    Kind.UPDATE: "update",
}
_LEFT, _RIGHT, _HEAD, _AXIS = 110, 60, 30, 30
_ROW, _GAP = 26, 6
_MARK = 3  # height of a transfer
_LETTER = 6.5
_BOX = 26  # width of an operation of median length, within the limits of the page
_NARROW, _WIDE = 900, 12_000


def svg_timelines(predicted: Timeline, measured: Timeline) -> Element:
    """Draw both timelines. Each operation has a tooltip."""
    seconds = max(predicted.seconds, measured.seconds)
    block = _HEAD + len(measured.workers) * (_ROW + _GAP)
    lengths = [end - begin for spans in measured.workers for one, begin, end in spans if one.kind not in TRANSFERS]
    width = min(_WIDE, max(_NARROW, _BOX * seconds / max(median(lengths), seconds / _WIDE))) if lengths else _NARROW
    scale = width / seconds if seconds else 1.0
    size = {"width": f"{_LEFT + width + _RIGHT:.0f}", "height": str(2 * block + _AXIS)}
    drawing = Element("svg", {**size, "role": "group", "aria-labelledby": "drawing"})
    SubElement(drawing, "title", {"id": "drawing"}).text = "What each worker does, predicted above measured"
    _axis(drawing, seconds, scale, 2 * block)
    for place, (name, timeline) in enumerate((("Predicted", predicted), ("Measured", measured))):
        group = SubElement(drawing, "g", {"transform": f"translate(0 {place * block})"})
        _block(group, name, timeline, scale, width)
    return drawing


def _axis(drawing: Element, seconds: float, scale: float, bottom: int) -> None:
    """Draw grid lines at round numbers of milliseconds."""
    step = _round(seconds * 1000 / 8) / 1000 if seconds else 1.0
    digits = max(0, -math.floor(math.log10(step * 1000)))
    for tick in range(math.floor(seconds / step) + 1):
        x = f"{_LEFT + tick * step * scale:.2f}"
        SubElement(drawing, "line", {"class": "grid", "x1": x, "x2": x, "y1": "0", "y2": str(bottom)})
        text = SubElement(drawing, "text", {"class": "tick", "x": x, "y": str(bottom + 18)})
        text.text = f"{tick * step * 1000:.{digits}f}" + (" ms" if tick == 0 else "")


def _round(value: float) -> float:
    """Round up to the next 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= value)


def _block(group: Element, name: str, timeline: Timeline, scale: float, width: float) -> None:
    """Draw a timeline with a row for each worker."""
    head = SubElement(group, "text", {"class": "head", "x": "0", "y": "20"})
    head.text = f"{name}: {milliseconds(timeline.seconds)} ms, bubble {timeline.bubble:.1%}"
    several = any(len({span.operation.stage for span in spans}) > 1 for spans in timeline.workers)
    for worker, spans in enumerate(timeline.workers):
        y = _HEAD + worker * (_ROW + _GAP)
        row = SubElement(group, "g", {"transform": f"translate({_LEFT} {y})"})
        label = SubElement(row, "text", {"x": str(-_LEFT), "y": "17"})
        label.text = f"rank {worker}, {1 - timeline.bubbles[worker]:.0%}"
        SubElement(row, "rect", {"class": "row", "width": f"{width:.0f}", "height": str(_ROW)})
        for span in spans:
            if visible(span):
                _operation(row, span, scale, several)
    x, bottom = f"{_LEFT + timeline.seconds * scale:.2f}", _HEAD + len(timeline.workers) * (_ROW + _GAP) - _GAP
    SubElement(group, "line", {"class": "end", "x1": x, "x2": x, "y1": str(_HEAD - 4), "y2": str(bottom + 4)})


def visible(span: Span) -> bool:
    """Return whether to draw a span. Spans of zero length are not drawn, except sends."""
    return span.end > span.begin or span.operation.kind is Kind.SEND


def _operation(row: Element, span: Span, scale: float, several: bool) -> None:
    kind = span.operation.kind
    x, width = span.begin * scale, (span.end - span.begin) * scale
    y, height = {Kind.SEND: (0, _MARK), Kind.RECEIVE: (_ROW - _MARK, _MARK)}.get(kind, (_MARK, _ROW - 2 * _MARK))
    group = SubElement(row, "g")
    SubElement(group, "title").text = describe(span)
    place = {"x": f"{x:.2f}", "y": str(y), "width": f"{max(width, 1.0):.2f}", "height": str(height)}
    SubElement(group, "rect", {"class": kind.name.lower(), **place})
    label = _label(span, width, several)
    if label:
        SubElement(group, "text", {"class": "box", "x": f"{x + width / 2:.2f}", "y": "17"}).text = label


def _label(span: Span, width: float, several: bool) -> str:
    """Return the longest label that fits: F1.3 if workers hold several stages, F3, or 3."""
    kind, stage, microbatch = span.operation[:3]
    if kind in TRANSFERS:
        return ""
    number = str(microbatch) if microbatch >= 0 else ""
    texts = [f"{kind}{stage}.{number}" if several and number else f"{kind}{number}", number]
    return next((text for text in texts if len(text) * _LETTER + 3 <= width), "")


def describe(span: Span) -> str:
    """Describe an operation.

    >>> from paceline.schedule.pipeline.operations import Operation
    >>> describe(Span(Operation(Kind.FORWARD, 1, 3), 0.0025, 0.0105))
    'forward pass, stage 1, microbatch 3, version 0: begins at 2.50 ms, takes 8.00 ms'
    """
    kind, stage, microbatch, version, peer = span.operation
    parts = [NAMES[kind], f"stage {stage}"]
    if peer >= 0:
        parts[-1] += f" {'to' if kind is Kind.SEND else 'for'} stage {peer}"
    if microbatch >= 0:
        parts.append(f"microbatch {microbatch}")
    if peer < 0:
        parts.append(f"version {version}")
    begin, seconds = milliseconds(span.begin), milliseconds(span.end - span.begin)
    return f"{', '.join(parts)}: begins at {begin} ms, takes {seconds} ms"
