"""The data of the dashboard's views, what its server refuses, and the page in a real browser without a window."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import ConfigError, InputError
from paceline.observe import cells
from paceline.observe.dashboard import views
from paceline.observe.dashboard.server import Dashboard
from paceline.observe.index import RecordIndex, Search
from paceline.observe.why.culprits import Findings

HOSTILE = "<img src=x onerror=document.title=1>"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = "--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--virtual-time-budget=20000"
VIEWS = "runs", "summary", "series", "stages", "heat", "waits", "membership", "memory", "network", "logs", "settings"


def step(rank: int, number: int, **more: Any) -> dict[str, Any]:
    """A step of a second, of which the worker waits 0.25 s for rank 1 and 0.125 s for data."""
    late = {"late": 1} if rank != 1 else {}
    common = {"time": 1000.0 + 2 * number, "event": "step", "rank": rank, "generation": 0, "step": number}
    return common | {"seconds": 1.0, "waited": 0.125, "awaited": 0.25 * (rank != 1), "loss": 4.0 - number} | late | more


def write(run: Path, rank: int | str, records: list[dict[str, Any]], torn: str = "") -> Path:
    (run / "events").mkdir(parents=True, exist_ok=True)
    name = f"rank-{rank}" if isinstance(rank, int) else rank
    path = run / "events" / f"{name}.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in records) + torn)
    return path


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Three ranks, three steps, and a launcher. The last line of each rank is torn."""
    for rank in range(3):
        start = {"event": "start", "time": 999.0, "rank": rank, "generation": 0, "workers": 3, "strategy": "allreduce"}
        sent = {
            "time": 1000.5,
            "event": "exchange",
            "rank": rank,
            "generation": 0,
            "step": 1,
            "seconds": 0.5,
            "bytes": 60,
        }
        known = {"time": 1000.6, "event": "usage", "rank": rank, "generation": 0, "step": 1, "bytes": 100 + rank}
        settings = {"settings": {"batch": "8", HOSTILE: "1"}}
        write(
            tmp_path, rank, [start | settings, *(step(rank, number) for number in range(3)), sent, known], '{"time": 10'
        )
    lost = {"time": 1003.0, "event": "lost", "rank": "launcher", "generation": 0, "reason": HOSTILE}
    formed = {"time": 1001.0, "event": "membership", "rank": "launcher", "generation": 0, "workers": [0, 1, 2]}
    write(tmp_path, "launcher", [formed, lost])
    return tmp_path


@pytest.fixture
def index(run: Path) -> Iterator[RecordIndex]:
    found = RecordIndex(run)
    found.update()
    yield found
    found.close()


def test_parts_of_a_step_and_series(index: RecordIndex) -> None:
    found = views.series(index)
    assert found["steps"] == [0, 1, 2] and found["loss"] == [4.0, 3.0, 2.0] and found["slowest"] == [1.0] * 3
    parts = views.stages(index)
    third = 0.5 / 3  # two of three ranks wait 0.25 s
    assert parts["parts"]["load"] == [0.125] * 3 and parts["parts"]["wait"] == pytest.approx([third] * 3)
    assert parts["parts"]["compute"] == pytest.approx([0.875 - third] * 3)
    assert parts["parts"]["between"] == [0.0, 1.0, 1.0], "two seconds from step to step, one of them in the step"
    assert parts["operations"] == {"exchange": [None, 0.5, None]}
    assert views.network(index)["bytes"] == {"exchange": [None, 60.0, None]}
    memory = views.memory(index)
    assert (memory["steps"], memory["mean"], memory["most"]) == ([1], [101.0], [102.0])


def test_the_pause_before_a_resume_is_not_between_steps(run: Path, index: RecordIndex) -> None:
    """An hour after step 2 the run is resumed, and repeats it."""
    for rank in range(3):
        start = {"event": "start", "time": 4999.0, "rank": rank, "generation": 0, "workers": 3}
        taken = [step(rank, number, time=4996.0 + 2 * number) for number in (2, 3)]
        with (run / "events" / f"rank-{rank}.jsonl").open("a") as file:
            file.write("\n" + "".join(json.dumps(one) + "\n" for one in (start, *taken)))
    index.update()
    assert views.stages(index)["parts"]["between"] == pytest.approx([0.0, 1.0, 0.0, 1.0], abs=0.51)


def test_who_waits_for_whom_and_the_heat_map(index: RecordIndex) -> None:
    found = views.waits(index)
    assert found["late"] == [{"rank": 1, "seconds": 1.5, "steps": 6}]
    assert {(pair["rank"], pair["for"], pair["seconds"]) for pair in found["pairs"]} == {(0, 1, 0.75), (2, 1, 0.75)}
    assert views.heat(index)["rows"] == [[0.75] * 3, [1.0] * 3, [0.75] * 3]
    with pytest.raises(ConfigError, match=r"what = 'x' is none of own, load, wait, step"):
        views.heat(index, "x")


def test_more_ranks_than_rows_share_one(index: RecordIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(views, "MOST_RANKS", 2)
    found = views.heat(index)
    assert found["together"] == 2 and found["rows"] == [[1.0] * 3, [0.75] * 3], "the slowest of each"


def test_ranges_widen_as_steps_are_added(run: Path, index: RecordIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cells, "RANGES", 2)
    views.series(index)  # three ranges of one step
    with (run / "events" / "rank-0.jsonl").open("a") as file:
        file.write("\n" + "".join(json.dumps(step(0, number)) + "\n" for number in range(3, 12)))
    index.update()
    found = views.series(index)
    assert found["width"] == 4 and found["steps"] == [0, 4, 8]
    assert found["loss"][1:] == pytest.approx([4 - 5.5, 4 - 9.5])
    rows = index.cells().rows("SELECT range, SUM(count), SUM(losses) FROM cells WHERE event = 'step' GROUP BY 1")
    assert rows == [(0, 10, 10), (1, 4, 4), (2, 4, 4)]
    assert index.cells().rows("SELECT SUM(count) FROM late") == [(15,)], "each record was summed up once"


def test_where_a_run_is(index: RecordIndex) -> None:
    found = views.summary(index, Findings(), now=1010.0)
    assert (found["steps"], found["workers"], found["seconds"], found["lost"]) == (3, 3, 4.0, 1)
    assert not found["silent"] and found["age"] == 6.0 and found["settings"] == {"batch": "8", HOSTILE: "1"}
    assert views.summary(index, Findings(), now=1100.0)["silent"]
    events = views.membership(index)
    assert events["workers"] == [[1001.0, 3]]
    assert [one["event"] for one in events["events"]] == ["membership", "lost"]
    assert events["events"][1]["text"] == f"reason {HOSTILE}"
    newest = views.logs(index, Search(events=("step",), ranks=("2",)))["records"]
    assert [record["step"] for record in newest] == [2, 1, 0]


@pytest.fixture
def served(run: Path, tmp_path: Path) -> Iterator[Dashboard]:
    """A dashboard of two runs of one name."""
    other = tmp_path / "elsewhere" / run.name
    write(other, 0, [step(0, 0)])
    with Dashboard([run, other], ("127.0.0.1", 0), "right") as server:
        thread = threading.Thread(target=lambda: server.serve_forever(poll_interval=0.01))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def get(server: Dashboard, path: str, **headers: str) -> tuple[int, str]:
    url = f"http://127.0.0.1:{server.server_port}{path}"
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_only_who_knows_the_token_is_answered(served: Dashboard) -> None:
    assert get(served, "/right/")[0] == 200
    for path in ("/", "/wrong/", "/wrong/runs", "/right", "/rightx/runs"):
        assert get(served, path)[0] == 403, path
    assert get(served, "/right/runs", Host="evil.example")[0] == 403, "a name that leads here by DNS rebinding"
    for path in ("/right/../../etc/passwd", "/right/page.html", "/right/runs/7/series", "/right/runs/0/series/x"):
        assert get(served, path)[0] == 404, path
    assert get(served, "/right/runs/0/nothing") == (400, '{"error": "There is no view \'nothing\'."}')
    assert get(served, "/right/runs/0/logs?steps=x")[0] == 400


def test_two_runs_of_one_name(served: Dashboard, run: Path) -> None:
    folders = [one["folder"] for one in json.loads(get(served, "/right/runs")[1])]
    assert folders[0] == str(run) and folders[1] != folders[0]
    assert json.loads(get(served, "/right/runs/1/series")[1])["steps"] == [0]
    status, text = get(served, "/right/metrics")
    assert status == 200 and f'paceline_steps_total{{run="{folders[0]}"}} 3.0' in text
    assert f'paceline_steps_total{{run="{folders[1]}"}} 1.0' in text
    assert f'paceline_lost_workers_total{{run="{folders[0]}"}} 1' in text


def test_a_link_in_the_folder_of_the_events_is_not_read(run: Path) -> None:
    (run / "events" / "rank-9.jsonl").symlink_to("/dev/zero")
    with (
        Dashboard([run], ("127.0.0.1", 0), "right") as server,
        pytest.raises(InputError, match="zero cannot be read"),
    ):
        server.runs[0].view("series", {})


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs a browser: apt-get install chromium")
def test_every_view_is_drawn(served: Dashboard, tmp_path: Path) -> None:
    """The browser reports a request to another host as an error, because the page's policy forbids it."""
    assert CHROMIUM is not None
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", served.url]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    states = dict(re.findall(r'<section id="(\w+)" data-state="(\w+)"', shown.stdout))
    assert states == dict.fromkeys(VIEWS, "drawn"), shown.stdout[-3000:]
    assert "&lt;img src=x" in shown.stdout and "<img" not in shown.stdout, "a name runs as a part of the page"
    assert "CONSOLE" not in shown.stderr, shown.stderr


def test_a_run_that_goes_on_after_its_end_is_not_over(run: Path, index: RecordIndex) -> None:
    ended = {"time": 1005.0, "event": "end", "rank": "launcher", "generation": 0, "reason": "preempted"}
    with (run / "events" / "launcher.jsonl").open("a") as file:
        file.write(json.dumps(ended) + "\n")
    index.update()
    assert views.summary(index, Findings(), now=1010.0)["end"] == "preempted"
    again = {"event": "start", "time": 1100.0, "rank": 0, "generation": 0, "workers": 2}
    write(run, 7, [again])  # read last, and of the latest time
    index.update()
    found = views.summary(index, Findings(), now=1110.0)
    assert (found["end"], found["workers"]) == (None, 2)


def test_metrics_are_those_of_rank_0(run: Path, index: RecordIndex) -> None:
    logged = {"time": 1001.0, "event": "metrics", "generation": 0, "step": 0}
    for rank in range(3):
        with (run / "events" / f"rank-{rank}.jsonl").open("a") as file:
            lines = [json.dumps(logged | {"rank": rank, "metrics": {"a": value}}) for value in (1, 2)]
            file.write("\n" + "\n".join(lines) + "\n")
    index.update()
    assert views.series(index)["metrics"] == {"a": [[0, 2.0]]}, "the last of a repeated step, once"


def test_views_and_metrics_at_once_and_a_run_that_goes(served: Dashboard, run: Path) -> None:
    paths = ["/right/metrics", "/right/runs/0/heat", "/right/runs/0/series", "/right/runs/1/waits"] * 10
    served.runs[0]._at = served.runs[1]._at = float("-inf")
    with ThreadPoolExecutor(8) as pool:
        assert {status for status, _ in pool.map(lambda path: get(served, path), paths)} == {200}
    shutil.rmtree(served.runs[1].folder)
    served.runs[1]._at = float("-inf")
    assert get(served, "/right/runs/1/series")[0] in (200, 400)
    status, text = get(served, "/right/metrics")
    assert status == 200 and f'paceline_steps_total{{run="{run}"}} 3.0' in text


def test_a_number_that_json_cannot_hold(run: Path, served: Dashboard) -> None:
    with (run / "events" / "rank-0.jsonl").open("a") as file:
        file.write("\n" + json.dumps(step(0, 3, loss=1e308)) + "\n" + json.dumps(step(0, 3, loss=1e308)) + "\n")
    served.runs[0]._at = float("-inf")
    status, text = get(served, "/right/runs/0/series")
    assert status == 200 and "Infinity" not in text
    assert get(served, "/right/runs/0/logs?steps=99999999999999999999")[0] == 400
