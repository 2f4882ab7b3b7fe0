"""``paceline logs``: which records a search finds, in files that are hostile, torn or still written."""

from __future__ import annotations

import json
import math
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.main import main
from paceline.cli.observing import logs
from paceline.errors import InputError
from paceline.observe.index import FILE, RecordIndex, Search

LOST = {"time": 12.0, "event": "lost", "rank": "launcher", "generation": 1, "reason": "rank 1 ended", "workers": [0, 2]}


def line(event: str, rank: int | str = 0, step: int | None = None, at: float = 10.0, **more: Any) -> str:
    record = {"time": at, "event": event, "rank": rank, "generation": 0}
    return json.dumps(record | ({} if step is None else {"step": step}) | more) + "\n"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    events = tmp_path / "runs" / "one" / "events"
    events.mkdir(parents=True)
    for rank in range(2):
        lines = [
            line("exchange", rank, step, 10 + step + rank / 10, bytes=100, seconds=0.01 * (step + 1) + rank)
            + line("step", rank, step, 10.5 + step + rank / 10, loss=2.0 - step, seconds=0.5)
            for step in range(4)
        ]
        (events / f"rank-{rank}.jsonl").write_text("".join(lines))
    (events / "launcher.jsonl").write_text(json.dumps(LOST) + "\n")
    (tmp_path / "runs" / "one" / "launch.json").write_text("{}")
    return events.parent


def found(run: Path, **search: Any) -> list[Any]:
    index = RecordIndex(run)
    index.update()
    records = [record for _, record in index.find(Search(**search))]
    index.close()
    return records


@pytest.fixture
def printed(run: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def of(*words: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main(["logs", "--runs-dir", str(run.parent), *words])
        out, err = capsys.readouterr()
        return out if not ended.value.code else err

    return of


def test_all_conditions_hold_and_times_give_the_order(run: Path) -> None:
    every = found(run)
    assert len(every) == 17 and [one["time"] for one in every] == sorted(one["time"] for one in every)
    assert [(one["rank"], one["step"]) for one in found(run, events=("exchange",), steps=range(1, 3))] == [
        (0, 1),
        (1, 1),
        (0, 2),
        (1, 2),
    ]
    assert [one["step"] for one in found(run, ranks=("1",), slower_than=1.03)] == [2, 3]
    assert found(run, ranks=("launcher",)) == found(run, text="rank 1") == found(run, text="rank 1 end") == [LOST]
    assert found(run, text="ank") == found(run, text='"; drop') == [], "words, from their beginnings"


def test_only_what_is_new_is_read(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = RecordIndex(run)
    index.update()
    read: list[str] = []
    monkeypatch.setattr("paceline.observe.index.checked", lambda text: read.append(text) or json.loads(text))
    with (run / "events" / "rank-1.jsonl").open("a") as file:
        file.write(line("note", 1, text="written later"))
        file.write('{"time": 99.0, "event": "no')
    index.update()
    assert len(read) == 1 and [one["text"] for _, one in index.find(Search(text="later"))] == ["written later"]
    with (run / "events" / "rank-1.jsonl").open("a") as file:
        file.write('te", "rank": 1, "generation": 0}\n')
    index.update()
    assert len(read) == 2 and [one["time"] for _, one in index.find(Search(), after=18)] == [99.0]
    index.close()
    (run / "events" / "rank-1.jsonl").write_text(line("note", 1, text="another run"))
    assert len(found(run, ranks=("1",))) == 1 and not found(run, text="later"), "files of the same names"


def test_what_is_no_record_is_left_out_and_counted(run: Path, printed: Callable[..., str]) -> None:
    bad = [b"\xff\xfe\n", b"{}\n", b"[" * 100_000 + b"\n", b'{"time": "x", "event": "step", "rank": 0}\n', b"\n"]
    hostile = line("step", 0, 2**70, at=1e14, bytes=10**40, seconds="long", text="\x1b[2J clear \ud800")
    (run / "events" / "rank-7.jsonl").write_bytes(b"".join(bad) + hostile.encode() + line("note", 7)[:-5].encode())
    index = RecordIndex(run)
    index.update()
    assert index.skipped == len(bad) and len(list(index.find(Search()))) == 18
    index.close()
    assert "\x1b" not in printed("one") and "\\x1b[2J clear" in printed("one", "--text", "clear")


def test_numbers_that_are_not_finite_are_null(run: Path, printed: Callable[..., str]) -> None:
    with (run / "events" / "rank-0.jsonl").open("a") as file:
        file.write(line("skipped", 0, 4, norms=[math.nan, 1.0], loss=-math.inf, text="NaN"))
    assert printed("--sql", "select json_extract(record, '$.norms[1]') from records where step = 4").split()[-1] == "1"
    assert json.loads(printed("--json", "--step", "4"))["norms"] == [None, 1.0]


def test_readers_of_different_folders_have_indexes_of_their_own(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "copied" / "events").mkdir(parents=True)
    (tmp_path / "copied" / "events" / "rank-1000.jsonl").write_text(line("step", 2, 0))
    index = RecordIndex(run, [tmp_path / "copied"])
    index.update()
    assert len(list(index.find(Search()))) == 18
    assert len(found(run)) == 17
    monkeypatch.setattr(index, "_add", None)
    index.update()  # reads no line again
    index.close()


def test_an_index_that_cannot_be_used(run: Path, tmp_path: Path) -> None:
    (run / FILE).write_bytes(b"no database" * 1000)
    assert len(found(run)) == 17
    (run / FILE).unlink()
    (run / FILE).mkdir()
    assert len(found(run)) == 17, "in memory"
    (run / FILE).rmdir()
    other = tmp_path / "other"
    (run / FILE).symlink_to(other)
    assert len(found(run)) == 17 and not other.exists(), "a link is not followed"
    (run / FILE).unlink()
    base = sqlite3.connect(run / FILE)
    base.executescript("PRAGMA user_version = 99; CREATE TABLE records(one)")
    base.close()
    assert len(found(run)) == 17, "of another version"


def test_an_index_on_a_full_disk(run: Path) -> None:
    (run / "events" / "rank-4.jsonl").write_text("".join(line("step", 4, step, text="x" * 999) for step in range(99)))
    index = RecordIndex(run)
    index._base.execute("PRAGMA max_page_count = 1")
    index.update()
    assert len(list(index.find(Search(ranks=("4",))))) == 99, "in memory"
    assert index._base.execute("PRAGMA temp_store").fetchone() == (2,), "sorted there, too"
    index.close()


def test_files_that_are_none(run: Path, tmp_path: Path) -> None:
    os.mkfifo(run / "events" / "rank-5.jsonl")
    with pytest.raises(InputError, match=r"rank-5\.jsonl cannot be read: a pipe"):
        found(run)
    with pytest.raises(InputError, match="has no folder 'events'"):
        RecordIndex(tmp_path)


def test_machines_are_searched_together(run: Path, tmp_path: Path, printed: Callable[..., str]) -> None:
    (tmp_path / "copied" / "events").mkdir(parents=True)
    (tmp_path / "copied" / "events" / "rank-1000.jsonl").write_text(line("step", 2, 0, at=10.55))
    out = printed("one", "--collect", str(tmp_path / "copied"), "--event", "step", "--step", "0")
    assert [row.split("step")[0].split()[-1] for row in out.splitlines()] == ["0", "2", "1"]


def test_what_is_printed(printed: Callable[..., str]) -> None:
    assert json.loads(printed("one", "--json", "--rank", "launcher")) == LOST
    (row,) = printed("--rank", "1", "--step", "3", "--event", "exchange").splitlines()
    assert row.split()[1:] == ["rank", "1", "step", "3", "exchange", "bytes=100", "seconds=1.04"]
    assert len(printed("--slower-than", "1s", "--step", "2:").splitlines()) == 2
    query = "select rank, sum(bytes) as sent, max(json_extract(record, '$.loss')) from records where rank in (0, 1)"
    assert printed("--sql", f"{query} group by rank").splitlines()[1:] == ["0\t400\t2", "1\t400\t2"]
    assert json.loads(
        printed(
            "--json", "--sql", "select event, reason from (select event, 1 as reason from records) where event = 'lost'"
        )
    ) == {"event": "lost", "reason": 1}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--step", "20:10"], "--step 20:10 names no steps: the first number must be the smaller one"),
        (["--step", "9" * 30], "names no steps"),
        (["--json", "--parquet", "x"], "cannot be used with --follow or --json"),
        (["--step", "first"], "--step 'first' names no steps: write --step 800, or --step 800:820"),
        (["--slower-than", "5 minutes"], "is not a time: write a number and us, ms, s, m or h"),
        (["--sql", "delete from records"], "cannot be run: cannot modify records because it is a view"),
        (["--sql", "attach '/tmp/other' as other"], "cannot be run: not authorized"),
        (
            ["--sql", "select loss from records"],
            "no such column: loss. It reads the table records(time, rank, ",
        ),
        (["--sql", "select 1; select 2"], "cannot be run"),
        (["--sql", ""], "--sql needs a query"),
        (["--sql", "select 1", "--rank", "0"], "write the conditions into the query"),
        (["--follow", "--parquet", "x"], "cannot be used with --follow"),
        (["none"], "There is no run 'none'. There are one"),
    ],
)
def test_bad_input(printed: Callable[..., str], words: list[str], message: str) -> None:
    assert message in printed(*words)


def test_new_records_are_followed(run: Path) -> None:
    index = RecordIndex(run)
    index.update()
    records = logs._followed(index, Search(events=("note",)))
    for text in ("first", "second"):
        with (run / "events" / "rank-0.jsonl").open("a") as file:
            file.write(line("note", text=text))
        assert next(records)["text"] == text
    index.close()


def test_parquet(run: Path, tmp_path: Path, printed: Callable[..., str]) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    assert printed("--event", "step", "--parquet", str(tmp_path / "a")) == f"8 records written to {tmp_path / 'a'}\n"
    table = parquet.read_table(tmp_path / "a").to_pylist()
    assert [(row["rank"], row["step"]) for row in table[:3]] == [("0", 0), ("1", 0), ("0", 1)]
    assert json.loads(table[0]["record"])["loss"] == 2.0
    assert "cannot be written" in printed("--parquet", str(tmp_path / "no" / "a"))


def test_a_file_that_cannot_be_read_for_a_while(run: Path) -> None:
    index = RecordIndex(run)
    path = run / "events" / "rank-1.jsonl"
    kept = path.read_text()
    path.unlink()
    path.mkdir()
    with pytest.raises(InputError, match="rank-1"):
        index.update()
    path.rmdir()
    path.write_text(kept)
    index.update()
    assert len(list(index.find(Search(events=("step",))))) == 8
    index.close()


def test_a_run_that_was_deleted_and_started_again(run: Path) -> None:
    index = RecordIndex(run)
    index.update()
    for path in (run / "events").iterdir():
        text = path.read_text()
        path.rename(path.with_suffix(".old"))
        path.write_text(text.replace("loss", "gain") + text)  # longer than before
    index.update()
    records = [record for _, record in index.find(Search(events=("step",), ranks=("0",)))]
    assert sum("gain" in record for record in records) == sum("loss" in record for record in records) == 4
    assert [record["time"] for record in index.newest(Search(), 3)] == [13.6, 13.6, 13.5], "the newest by their times"
    index.close()


def test_a_rank_that_no_column_can_hold(run: Path) -> None:
    with (run / "events" / "rank-0.jsonl").open("a") as file:
        file.write(line("step", 10**30, 5))
    assert [one["rank"] for one in found(run, events=("step",), steps=range(5, 6))] == [10**30]
