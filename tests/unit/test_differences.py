"""The sentence about the first call that differs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from paceline.comm.desync import patch
from paceline.comm.desync.board import line, parse
from paceline.comm.desync.compare import Record, compare, swapped
from paceline.errors import name_ranks


def calls(*texts: str, first: int = 1, group: str = "", ranks: list[int] | None = None) -> list[Record]:
    """Records from "call @ site < site" or, where all meet, "call ! note"."""
    records = []
    for number, text in enumerate(texts, first):
        call, _, note = text.partition(" ! ")
        call, _, sites = call.partition(" @ ")
        records.append(
            Record(
                number=number,
                group=group,
                ranks=ranks,
                call=call,
                note=note,
                sites=sites.split(" < ") if sites else [],
            )
        )
    return records


STEP = "session.step ! step 11"


def test_the_first_call_that_differs() -> None:
    same = calls(
        "all_reduce of float32 [1] @ a.py:1", STEP, "barrier @ a.py:2", "reduce @ a.py:3", "all_reduce @ a.py:4"
    )
    other = calls("all_reduce of float32 [1] @ a.py:1", STEP, "barrier @ a.py:2", "reduce @ a.py:3", "barrier @ b.py:5")
    sentence = compare({0: same, 1: other, 2: same})
    assert sentence is not None
    assert sentence.startswith(
        "The workers called different operations since step 11: call 3 was all_reduce on ranks 0, 2 (a.py:4) but "
        "barrier on rank 1 (b.py:5). Make all workers"
    )


def test_a_worker_that_is_late_does_not_differ() -> None:
    early = calls("barrier @ a.py:1", STEP, "all_reduce @ a.py:2")
    assert compare({0: early, 1: early[:1], 2: [], 3: early}) is None
    assert compare({}) is None


def test_only_what_is_kept_is_compared() -> None:
    assert compare({0: calls("barrier", "reduce", first=10), 1: calls("reduce", "barrier", first=11)}) is None
    sentence = compare({0: calls("barrier", "reduce", first=10), 1: calls("gather", first=11)})
    assert sentence is not None
    assert "since the start: call 11 was reduce on rank 0 but gather on rank 1" in sentence


def test_the_lines_before_tell_calls_in_one_function_apart() -> None:
    sentence = compare({0: calls("reduce @ m.py:8 < a.py:1"), 1: calls("gather @ m.py:8 < a.py:2")})
    assert sentence is not None
    assert "reduce on rank 0 (m.py:8, called at a.py:1) but gather on rank 1 (m.py:8, called at a.py:2)" in sentence


def test_groups_have_sequences_of_their_own() -> None:
    pair = [0, 2]
    first = [*calls("barrier"), *calls("all_reduce of float32 [2] @ a.py:1", group="5", ranks=pair)]
    second = [*calls("barrier"), *calls("all_reduce of float32 [3] @ a.py:1", group="5", ranks=pair)]
    assert compare({0: first, 1: calls("barrier"), 2: first}) is None
    sentence = compare({0: first, 1: calls("barrier"), 2: second})
    assert sentence is not None
    assert "call 1 was in the group of ranks 0, 2, all_reduce of float32 [2] on rank 0" in sentence


ONE, TWO = "all_reduce of float32 [3] @ m.py:8 < a.py:1", "all_reduce of float32 [3] @ m.py:8 < a.py:2"


def test_an_order_that_differs() -> None:
    told = {0: calls(STEP, ONE, TWO, "session.step ! step 12"), 1: calls(STEP, TWO, ONE, "session.step ! step 12")}
    assert compare(told) is None
    sentence = swapped(told)
    assert sentence is not None
    assert sentence.startswith(
        "The workers called all_reduce of float32 [3] in different orders since step 11, so that values are mixed up: "
        "call 1 was the one at m.py:8, called at a.py:1 on rank 0 but at m.py:8, called at a.py:2 on rank 1."
    )


def test_lines_by_rank_are_no_other_order() -> None:
    other = "all_reduce of float32 [3] @ a.py:9"
    told = {0: calls(STEP, ONE, TWO, "session.step ! step 12"), 1: calls(STEP, TWO, other, "session.step ! step 12")}
    assert swapped(told) is None
    roots = "broadcast from rank 0 @ a.py:1", "broadcast from rank 0 @ a.py:2"
    end = "session.step ! step 12"
    assert swapped({0: calls(STEP, *roots, end), 1: calls(STEP, *roots[::-1], end)}) is None


def test_records_survive_the_post() -> None:
    for record in [
        *calls(ONE, STEP, "barrier"),
        *calls(TWO, group="5", ranks=[0, 2]),
        *calls("all_reduce of\ttabs\n @ a.py:1"),
    ]:
        back = parse(b"%d" % record["number"] + line(record))
        assert back == {**record, "call": record["call"].replace("\t", " ").replace("\n", " ")}
    assert parse(b"") is None
    assert parse(b"12\t\t") is None
    assert parse(b"\0" * 512) is None


def test_of_many_ranks_the_first_are_named() -> None:
    assert name_ranks([3], most=8) == "rank 3"
    assert name_ranks(range(12), most=8) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 4 more"


def test_a_call_that_meets_all_others_is_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = list[float]()
    calls = SimpleNamespace(enter=lambda what, group, frame, waits: what)
    monkeypatch.setattr(patch, "_current", lambda: calls)
    monkeypatch.setattr(patch, "_waited", waits.append)
    barrier = patch.recorder("barrier", lambda group=None, async_op=False: None)
    barrier(async_op=True)
    assert waits == []
    barrier()
    assert len(waits) == 1
