"""``paceline timeline`` after a real run, and where there is nothing to draw."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

Script = Callable[..., Path]
Paceline = Callable[..., Any]

TRAINS = """
from functools import partial
import torch
import paceline

torch.manual_seed(0)
inputs = torch.randn(64, 8)
session = paceline.start(
    model=torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)),
    optimizer=partial(torch.optim.SGD, lr=0.1),
    loss=torch.nn.functional.mse_loss,
    data=torch.utils.data.TensorDataset(inputs, inputs.sum(dim=1, keepdim=True)),
    batch=16,
    microbatches=4,
    strategy="pipeline",
)
for batch in session.batches(steps=6):
    session.step(batch)
"""
WITHOUT_TORCH = """
import sys
from paceline.cli.main import main
try:
    main(sys.argv[1:])
finally:
    assert "torch" not in sys.modules
"""


def operations(page: Path) -> list[list[str]]:
    """What stands in each row of a page: that of predicted workers, then that of measured ones."""
    html = ElementTree.fromstring(page.read_text().partition("\n")[2])
    rows = html.findall(".//div[@class='wide']/svg/g/g")
    titles = [[group.findtext("title") or "" for group in row.findall("g")] for row in rows]
    return [sorted(title.split(", version")[0] for title in row if "version" in title) for row in titles]


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_a_run_is_drawn(
    paceline: Paceline, forked_paceline: Paceline, script: Script, tmp_path: Path, schedule: str
) -> None:
    settings = "--set", f"pipeline.schedule={schedule}", "--quiet", "--name", schedule
    assert forked_paceline("run", "-n", 2, *settings, script(TRAINS)).code == 0
    result = paceline("timeline")
    assert (result.code, result.err) == (0, "")
    page = Path("runs") / schedule / "timeline.html"
    lines = result.out.splitlines()
    assert lines[0].partition(": ")[2] == f"{schedule}, 2 workers, 2 stages, 4 microbatches"
    assert lines[-1] == f"Written to {page}"
    assert "Predicted from the times of the layers measured before training" in result.out
    assert [line.split()[0] for line in lines[2:5]] == ["ms", "predicted", "measured"]
    drawn = operations(tmp_path / page)
    assert len(drawn) == 4
    if schedule == "1f1b":
        each = [
            f"{way} pass, stage {{}}, microbatch {number}" for way in ("backward", "forward") for number in range(4)
        ]
        assert drawn == [[one.format(stage) for one in each] for stage in (0, 1, 0, 1)]
    else:
        assert all(any("forward pass, stage" in one for one in row) for row in drawn)


@pytest.mark.slow
def test_a_step_a_file_and_no_torch(
    paceline: Paceline, forked_paceline: Paceline, script: Script, tmp_path: Path
) -> None:
    given = "--set", 'pipeline.cut=["1"]', "--quiet", "--name", "mine", "--runs-dir", "all my runs"
    assert forked_paceline("run", "-n", 2, *given, script(TRAINS)).code == 0
    folder = tmp_path / "all my runs" / "mine"
    words = ["timeline", str(folder), "--step", "1", "--output", str(tmp_path / "page.html")]
    ended = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *words], env=dict(os.environ), capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("Step 1 of mine: 1f1b") and "median time" in ended.stdout
    assert len(operations(tmp_path / "page.html")) == 4 and not (folder / "timeline.html").exists()
    wrong = paceline("timeline", "mine", "--runs-dir", "all my runs", "--step", 17)
    assert (wrong.code, wrong.out) == (2, "")
    assert wrong.err == "paceline: --step 17: this step cannot be drawn. Steps that can: 0 to 5.\n"
    wrong = paceline("timeline", "mine", "--runs-dir", "all my runs", "--output", "nowhere/page.html")
    assert (wrong.code, wrong.out) == (2, "")
    assert "nowhere/page.html cannot be written: No such file or directory." in wrong.err


def a_run(tmp_path: Path, name: str, *records: dict[str, Any]) -> None:
    run = tmp_path / "runs" / name
    (run / "events").mkdir(parents=True)
    (run / "launch.json").write_text("{}")
    os.utime(run / "launch.json", (len(name), len(name)))
    if records:
        lines = [json.dumps({"time": 1.0, "rank": 0, "generation": 0, **record}) for record in records]
        (run / "events" / "rank-0.jsonl").write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "The run runs/the-newest has no events"),
        (
            ["nobody"],
            "There is no run 'nobody'. There are the-newest, reduced, old; give their directory with --runs-dir",
        ),
        (["", "--runs-dir", "runs"], "There is no run ''. There are the-newest"),
        (["old"], "The run runs/old has no events"),
        (["reduced"], "trained with strategy 'allreduce' on 2 workers"),
        (["runs/reduced"], "Timelines show pipelines"),
        (["--runs-dir", "elsewhere"], "There are no runs in elsewhere"),
        (["--step", "last"], "--step"),
    ],
)
def test_where_there_is_nothing_to_draw(paceline: Paceline, tmp_path: Path, arguments: list[str], says: str) -> None:
    a_run(tmp_path, "old")
    a_run(tmp_path, "reduced", {"event": "start", "strategy": "allreduce", "workers": 2})
    a_run(tmp_path, "the-newest")
    result = paceline("timeline", *arguments)
    assert (result.code, result.out) == (2, "")
    assert says in result.err and "Traceback" not in result.err
    assert not list(tmp_path.rglob("*.html"))
