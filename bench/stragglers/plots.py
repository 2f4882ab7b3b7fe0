"""The plots, as PNG and SVG: bars of times over the ideal; held-out loss over seconds and over samples."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "paceline", "font.size": 9})

from matplotlib import pyplot  # noqa: E402 - after the choice of what draws
from matplotlib.axes import Axes  # noqa: E402
from patterns import PATTERNS  # noqa: E402
from rules import RULES  # noqa: E402

_GOAL = 1.10
_HIGHEST = 4.0
_POINTS = 40
"""Of a curve: the plots are to stay small."""


def draw(results: Mapping[str, Any], folder: Path) -> list[Path]:
    """Draw all that there are results for; returns the files."""
    files: list[Path] = []
    if results.get("steps"):
        files += _save(_bars(results["steps"]), folder, "step-time")
    for model, found in results.get("task", {}).items():
        files += _save(_curves(model, found), folder, f"task-{model}")
    return files


def _save(figure: Any, folder: Path, name: str) -> list[Path]:
    paths = [folder / f"{name}.{kind}" for kind in ("png", "svg")]
    for path in paths:
        date = {"Date": None} if path.suffix == ".svg" else None  # the same results give the same file
        figure.savefig(path, bbox_inches="tight", dpi=80, metadata=date)
    pyplot.close(figure)
    return paths


def _bars(found: Mapping[str, Any]) -> Any:
    steps = {name: found[name] for name in RULES if name in found}
    patterns = [name for name in PATTERNS if any(name in found for found in steps.values())]
    figure, axes = pyplot.subplots(figsize=(10, 3.6))
    width = 0.8 / len(steps)
    colors = pyplot.get_cmap("tab20").colors  # type: ignore[attr-defined]
    for place, (rule, found) in enumerate(steps.items()):
        where = [column + width * (place - (len(steps) - 1) / 2) for column in range(len(patterns))]
        shown = [found.get(name, {"median": math.nan, "tail": math.nan}) for name in patterns]
        middle = [one["median"] for one in shown]
        tail = [one["tail"] - one["median"] for one in shown]
        axes.bar(where, middle, width * 0.9, yerr=[[0.0] * len(tail), tail], label=rule, color=colors[place % 20])
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.axhline(_GOAL, color="black", linewidth=0.6, linestyle=":")
    axes.set_xticks(range(len(patterns)), patterns)
    axes.set_ylim(0.9, _HIGHEST)
    axes.set_ylabel("time over ideal: median, p99")
    axes.legend(ncols=6, fontsize=7, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    return figure


def _curves(model: str, found: Mapping[str, Any]) -> Any:
    rules = found["rules"]
    patterns = [name for name in PATTERNS if any(name in entry["patterns"] for entry in rules.values())]
    figure, rows = pyplot.subplots(2, len(patterns), figsize=(3.2 * len(patterns), 5.2), squeeze=False, sharey=True)
    for column, pattern in enumerate(patterns):
        rows[0][column].set_title(f"{model}, {pattern}", fontsize=9)
        for row, (axis, label) in enumerate(((0, "seconds"), (1, "samples"))):
            axes = rows[row][column]
            for place, (rule, entry) in enumerate(rules.items()):
                if pattern in entry["patterns"]:
                    _lines(axes, entry["patterns"][pattern]["curves"], axis, rule, f"C{place}")
            axes.axhline(found["target"], color="black", linewidth=0.6, linestyle=":")
            axes.set_ylim(0.3, 2.6)
            axes.set_xlim(0, _last(rules, pattern, axis))
            axes.set_xlabel(label)
    for axes in rows[:, 0]:
        axes.set_ylabel("held-out loss")
    handles, labels = rows[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, ncols=6, fontsize=7, loc="lower center", bbox_to_anchor=(0.5, -0.06))
    figure.tight_layout()
    return figure


def _lines(axes: Axes, curves: Sequence[Any], axis: int, rule: str, color: str) -> None:
    """A line for each seed; those of one rule have one colour, and one name."""
    for place, curve in enumerate(curves):
        points = list(_thinned(curve["points"]))
        x, y = [point[axis] for point in points], [point[2] for point in points]
        axes.plot(x, y, color=color, linewidth=0.8, alpha=0.8, label=rule if place == 0 else None)


def _thinned(points: Sequence[Any]) -> Iterator[Any]:
    every = max(1, len(points) // _POINTS)
    yield from points[::every]


def _last(rules: Mapping[str, Any], pattern: str, axis: int) -> float:
    """Where the slowest rule that reached the target did so, and a little more."""
    key = "seconds" if axis == 0 else "samples"
    ends = [curve[key] for entry in rules.values() for curve in entry["patterns"].get(pattern, {}).get("curves", [])]
    return 1.05 * max([end for end in ends if end] or [1.0])
