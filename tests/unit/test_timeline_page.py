"""The page of a timeline, read as a browser would: what stands where, and that it needs nothing else."""

import re
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

import event_files as files
import pytest

from paceline.observe.timeline import page
from paceline.observe.timeline.comparison import compare
from paceline.schedule.pipeline.clock import Times, simulate
from paceline.schedule.pipeline.interleaved import interleaved
from paceline.schedule.pipeline.synchronous import one_forward_one_backward

BOXES = {"forward", "backward", "input", "weight", "reduce", "update"}
TIMES = Times((1.0, 2.0), (0.0, 1.0), (2.0, 1.0), (1.0,), (0.0, 0.0), (0.0, 0.0))


def shown(run: Path) -> Element:
    text = page.html(compare(run))
    assert text.startswith("<!DOCTYPE html>\n<html")
    return ElementTree.fromstring(text.partition("\n")[2])


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A step that takes twice as long as predicted."""
    files.mark_cut(tmp_path, [["a", "b"], ["c"]], times=[[1.0, 2.0], [2.0, 2.0]])
    timeline = simulate(one_forward_one_backward(2, 3), TIMES)
    twice = Times(*(tuple(2 * one for one in values) for values in vars(TIMES).values()))
    files.mark_whole(tmp_path, simulate(one_forward_one_backward(2, 3), twice), 0, 0.0, 3)
    assert timeline.seconds == 18.0
    return tmp_path


def blocks(html: Element) -> list[list[list[Element]]]:
    """For predicted and measured, for each row, the operations."""
    svg = html.find(".//div[@class='wide']/svg")
    assert svg is not None
    return [[row.findall("g") for row in block.findall("g")] for block in svg.findall("g")]


def kind_of(operation: Element) -> str:
    return operation.find("rect").attrib["class"]  # type: ignore[union-attr]


def x_of(operation: Element) -> tuple[float, float]:
    box = operation.find("rect").attrib  # type: ignore[union-attr]
    return float(box["x"]), float(box["x"]) + float(box["width"])


def test_predicted_stands_above_measured(run: Path) -> None:
    html = shown(run)
    heads = [head.text or "" for head in html.findall(".//text[@class='head']")]
    assert [head.split(", b")[0] for head in heads] == ["Predicted: 15,000.00 ms", "Measured: 36,000.00 ms"]
    both = blocks(html)
    assert [len(rows) for rows in both] == [2, 2]
    for rows in both:
        assert ["".join(operation.findtext("text") or "" for operation in row) for row in rows] == [
            "F0F1B0F2B1B2",
            "F0B0F1B1F2B2",
        ]


def test_both_have_the_same_scale(run: Path) -> None:
    predicted, measured = ([x_of(one) for one in rows[0] if kind_of(one) == "forward"] for rows in blocks(shown(run)))
    assert predicted[0][0] == measured[0][0] == 0.0
    assert measured[0][1] == pytest.approx(2 * predicted[0][1], abs=0.02)


def test_boxes_of_a_worker_do_not_overlap_and_stay_in_the_row(run: Path) -> None:
    html = shown(run)
    width = float(html.find(".//rect[@class='row']").attrib["width"])  # type: ignore[union-attr]
    for rows in blocks(html):
        for row in rows:
            places = [x_of(one) for one in row if kind_of(one) in BOXES]
            assert len(places) == 6
            assert all(end <= begin + 0.02 for (_, end), (begin, _) in pairwise(places))
            assert places[0][0] >= 0 and places[-1][1] <= width + 0.02


def test_each_operation_tells_what_it_is(run: Path) -> None:
    _, measured = blocks(shown(run))
    titles = [one.findtext("title") for one in measured[1]]
    assert "forward pass, stage 1, microbatch 0, version 0: begins at 4,000.00 ms, takes 4,000.00 ms" in titles
    assert "send, stage 1 to stage 0, microbatch 0: begins at 12,000.00 ms, takes 2,000.00 ms" in titles
    assert "wait, stage 1 for stage 0, microbatch 2: begins at 20,000.00 ms, takes 2,000.00 ms" in titles


def test_stages_of_a_worker_are_told_apart(tmp_path: Path) -> None:
    files.mark_cut(
        tmp_path, [["a"], ["b"], ["c"], ["d"]], workers=2, microbatches=2, pipeline={"schedule": "interleaved"}
    )
    files.mark_whole(tmp_path, simulate(interleaved(2, 2, 2), Times.equal(4)), 0, 0.0, 2)
    _, measured = blocks(shown(tmp_path))
    assert "".join(one.findtext("text") or "" for one in measured[0]) == "F0.0F0.1F2.0F2.1B2.0B2.1B0.0B0.1"


def test_the_tables_have_the_numbers(run: Path) -> None:
    totals, workers, stages = [
        [["".join(cell.itertext()) for cell in row] for row in table.iter("tr")] for table in shown(run).iter("table")
    ]
    assert [row[:2] for row in totals[1:]] == [["predicted", "15,000.00"], ["measured", "36,000.00"]]
    assert [row[:3] for row in workers[1:]] == [["0", "0", "50.0%"], ["1", "1", "66.7%"]]
    assert [row[-1].split(":")[0] for row in workers[1:]] == ["rank 1", "rank 0"]
    assert [row[-1] for row in stages[1:]] == ["a to b", "c"]
    assert [row[1:3] for row in stages[1:]] == [["2,000.00", "1,000.00"], ["4,000.00", "2,000.00"]]


def test_the_legend_has_what_is_drawn(run: Path) -> None:
    """Updates that take no time are not."""
    html = shown(run)
    drawn = {kind_of(one) for rows in blocks(html) for row in rows for one in row}
    legend = {row.find("svg/rect").attrib["class"] for row in html.iter("li")}  # type: ignore[union-attr]
    assert legend == drawn == {"forward", "backward", "send", "receive"}


def test_the_page_needs_nothing_else(run: Path) -> None:
    text = page.html(compare(run))
    assert not re.search(r"https?:|//|src=|href=|@import|url\(|<script", text)


def test_hostile_names(run: Path) -> None:
    hostile = run / 'it\'s <script>alert(1) & "more"'
    files.mark_cut(hostile, [["<b>&amp;"], ["]]>"]])
    files.mark_whole(hostile, simulate(one_forward_one_backward(2, 3), TIMES), 0, 0.0, 3)
    html = shown(hostile)
    assert hostile.name in (html.findtext(".//h1") or "")
    assert not list(html.iter("script")) and not list(html.iter("b"))


def luminance(colour: str) -> float:
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_letters_can_be_read_on_every_colour(run: Path) -> None:
    """The contrast that WCAG 2 asks for, 4.5; both modes for text of the page."""
    style = shown(run).findtext(".//style") or ""
    fills = dict(re.findall(r"\.(\w+) \{ fill: (#\w{6}); \}", style))
    assert fills.keys() == BOXES
    pairs = [(fill, "#111111") for fill in fills.values()]
    for mode in re.findall(r"--text: (#\w{6}); --faint: (#\w{6}); --line: #\w{6}; --page: (#\w{6})", style):
        pairs += [(mode[2], mode[0]), (mode[2], mode[1])]
    assert len(pairs) == 10
    for one, other in pairs:
        dark, light = sorted((luminance(one), luminance(other)))
        assert (light + 0.05) / (dark + 0.05) >= 4.5, (one, other)
