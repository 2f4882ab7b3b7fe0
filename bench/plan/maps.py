"""Maps of the fastest strategy over the size of a model and the bandwidth of the links, drawn by the simulator.

The model has 24 equal layers; its batch takes a second on one worker, in 16 microbatches. Each worker has a machine of
its own. A cell names the fastest strategy that computes the function of one process, and how much faster than one
worker it is.

    python bench/plan/maps.py                          # writes docs/images/which-strategy.svg
"""

from __future__ import annotations

from pathlib import Path

from paceline.planning.costs import Profile, Work
from paceline.planning.memory import Run
from paceline.planning.search import Candidate, Layout, Measured, best, candidates
from paceline.planning.simulate import Machine
from paceline.schedule.balance import LayerCost

LAYERS, MICROBATCHES, SECONDS = 24, 16, 1.0
MEGABYTES = (1, 4, 16, 64, 256, 1024, 4096)
RATES = (10, 30, 100, 300, 1_000, 3_000, 10_000, 30_000)
"""Mbit/s."""
WORKERS = 4, 8
ACTIVATIONS = 1_000_000
"""Bytes that a microbatch sends from one layer to the next."""
COLORS = {"one worker": "#9aa0a6", "allreduce": "#4c78a8", "sharded": "#72b7b2", "pipeline": "#e8994a"}
CELL, LEFT, TOP = 58, 92, 64
OUTPUT = Path(__file__).resolve().parents[2] / "docs/images/which-strategy.svg"


def fastest(megabytes: int, rate: int, workers: int) -> tuple[str, float]:
    """Return the fastest strategy, and how many times as fast as one worker it is."""
    each = SECONDS / MICROBATCHES / LAYERS
    nbytes = int(megabytes * 1e6 / LAYERS)
    layers = tuple(LayerCost(str(one), each / 3, each * 2 / 3, ACTIVATIONS, nbytes, 0) for one in range(LAYERS))
    work = Work({1: layers}, MICROBATCHES, update=megabytes * 1e-4, add=megabytes * 3e-4)
    total = nbytes * LAYERS
    sizes = Run(total, total, 2 * total, total, (), MICROBATCHES, MICROBATCHES)
    profile = Profile("", 1, MICROBATCHES, None, {1: layers}, 1.0, 0, 0, MICROBATCHES, None, False, sizes, "")
    layout = Layout(Machine(bytes_per_second=rate * 1e6 / 8 * 0.95, latency=2e-4), 1)
    found = list(candidates({1: Measured(work, profile, 0.0)}, layout, [1, workers], exact=False, convergent=False))
    alone: Candidate = found[0]
    first = best(found)[0]
    name = "one worker" if first.workers == 1 else first.strategy
    return name, alone.step_seconds / first.step_seconds


def drawn() -> str:
    """Return the maps as SVG."""
    width = LEFT + (len(RATES) * CELL + 40) * len(WORKERS)
    height = TOP + len(MEGABYTES) * CELL + 76
    text = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for column, workers in enumerate(WORKERS):
        left = LEFT + column * (len(RATES) * CELL + 40)
        text.append(f'<text x="{left}" y="{TOP - 36}" font-size="18">{workers} workers</text>')
        for x, rate in enumerate(RATES):
            label = f"{rate / 1000:g}G" if rate >= 1000 else f"{rate}M"
            middle = left + x * CELL + CELL / 2
            text.append(f'<text x="{middle}" y="{TOP - 10}" font-size="13" text-anchor="middle">{label}</text>')
        for y, megabytes in enumerate(MEGABYTES):
            row = TOP + y * CELL
            if not column:
                label = f"{megabytes / 1024:g} GB" if megabytes >= 1024 else f"{megabytes} MB"
                place = f'x="{left - 10}" y="{row + CELL / 2 + 5}"'
                text.append(f'<text {place} font-size="13" text-anchor="end">{label}</text>')
            for x, rate in enumerate(RATES):
                name, gain = fastest(megabytes, rate, workers)
                cell = left + x * CELL
                size = f'width="{CELL - 2}" height="{CELL - 2}"'
                text.append(f'<rect x="{cell}" y="{row}" {size} fill="{COLORS[name]}"/>')
                where = f'x="{cell + CELL / 2}" y="{row + CELL / 2 + 5}"'
                text.append(f'<text {where} font-size="14" fill="black" text-anchor="middle">{gain:.1f}</text>')
    below = TOP + len(MEGABYTES) * CELL + 30
    for place, (name, color) in enumerate(COLORS.items()):
        text.append(f'<rect x="{LEFT + 150 * place}" y="{below - 14}" width="18" height="18" fill="{color}"/>')
        text.append(f'<text x="{LEFT + 150 * place + 26}" y="{below}" font-size="15">{name}</text>')
    text.append(f'<text x="{LEFT}" y="{below + 30}" font-size="13">rows: bytes of gradients; columns: bit/s</text>')
    return "\n".join([*text, "</svg>", ""])


if __name__ == "__main__":
    OUTPUT.write_text(drawn())
    print(f"written to {OUTPUT}")
