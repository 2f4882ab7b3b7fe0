"""The store at the coordinator does what torch's own stores do, and refuses what no worker of ours would send."""

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from paceline.comm.rendezvous.coordinator_store import CoordinatorStore
from paceline.coordinator.key_values import LARGEST_KEY, LARGEST_VALUE, KeyValues
from paceline.coordinator.wire.validation import check


@pytest.fixture
def store() -> CoordinatorStore:
    def send(message: dict[str, Any]) -> None:
        check(message, "worker")
        key_values.handle(0, message)

    store = CoordinatorStore(send, 0, 5.0)
    key_values = KeyValues(lambda worker, message: store.answer(message))
    return store


def test_like_a_store_of_torch(store: CoordinatorStore) -> None:
    both = [PrefixStore("a", one) for one in (store, dist.HashStore())]
    for one in both:
        one.set("text", "\x00ü")
        one.set("text", "x")
    for do in (
        lambda one: one.get("text"),
        lambda one: one.add("number", 3),
        lambda one: one.add("number", -5),
        lambda one: one.get("number"),
        lambda one: one.check(["text", "number"]),
        lambda one: one.check(["text", "nothing"]),
        lambda one: one.wait(["text"], timedelta(seconds=1)),
        lambda one: one.compare_set("text", "y", "z"),
        lambda one: one.compare_set("text", "x", "z"),
        lambda one: one.compare_set("new", "", "n"),
        lambda one: one.compare_set("newer", "other", "n"),
        lambda one: one.check(["newer"]),
        lambda one: one.multi_get(["text", "new"]),
        lambda one: one.delete_key("new"),
        lambda one: one.delete_key("new"),
        lambda one: one.append("text", "\x00+"),
        lambda one: one.append("appended", "a"),
        lambda one: one.multi_get(["text", "appended"]),
        lambda one: one.num_keys(),
    ):
        assert do(both[0]) == do(both[1])


def test_a_wait_ends_with_the_key_or_the_time_or_the_store(store: CoordinatorStore) -> None:
    found: list[object] = []

    def wait(key: str) -> None:
        try:
            found.append(store.get(key))
        except RuntimeError as error:
            found.append(str(error))

    waiting = threading.Thread(target=wait, args=("late",))
    waiting.start()
    with pytest.raises(RuntimeError, match=r"timeout after 0\.01 s, keys: never"):
        store.wait(["never"], timedelta(seconds=0.01))
    store.set("late", b"\xff\x00")
    waiting.join()
    waiting = threading.Thread(target=wait, args=("never",))
    waiting.start()
    store.close()
    waiting.join()
    assert found == [b"\xff\x00", "This group of workers has been left."]


def test_what_is_too_large_is_refused(store: CoordinatorStore) -> None:
    with pytest.raises(ValueError, match=f"{LARGEST_VALUE + 1} bytes"):
        store.set("key", bytes(LARGEST_VALUE + 1))
    with pytest.raises(ValueError, match=f"{LARGEST_KEY + 1} characters"):
        store.get("k" * (LARGEST_KEY + 1))


WHOLE = {"type": "store", "generation": 0, "call": 1, "do": "set", "keys": ["k"], "value": "", "expected": ""}


@pytest.mark.parametrize(
    "wrong",
    [
        {"keys": ["k" * 2000]},
        {"keys": [1]},
        {"keys": "k"},
        {"value": 5},
        {"value": "x" * (2 * LARGEST_VALUE + 1)},
        {"value": "not base64", "do": "append"},
        {"value": "many", "do": "add"},
        {"do": "burn"},
        {"call": []},
        {"generation": "0"},
    ],
)
def test_hostile_requests(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        check({**WHOLE, **wrong}, "worker")
        KeyValues(lambda worker, answer: None).handle(0, {**WHOLE, **wrong})


def test_the_store_does_not_grow_without_end() -> None:
    key_values = KeyValues(lambda worker, answer: None)
    with pytest.raises(ValueError, match="too much"):
        for number in range(1000):
            key_values.handle(0, {**WHOLE, "keys": [str(number)], "value": "x" * LARGEST_VALUE})
    with pytest.raises(ValueError, match="too many"):
        for _ in range(10_000):
            key_values.handle(0, {**WHOLE, "do": "take", "keys": ["nothing"]})


def test_who_waits_is_looked_at_when_its_own_key_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that come together each wait for the key of every other: P * P questions, not all at each key."""
    size, looks, answers = 64, 0, []
    look = KeyValues._await

    def counted(self: KeyValues, question: Any) -> None:
        nonlocal looks
        looks += 1
        look(self, question)

    monkeypatch.setattr(KeyValues, "_await", counted)
    key_values = KeyValues(lambda worker, answer: answers.append((worker, answer["value"])))
    for worker in range(size):
        key_values.handle(worker, {**WHOLE, "do": "wait", "keys": [str(worker ^ 1)]})
        key_values.handle(worker, {**WHOLE, "do": "take", "keys": [str(worker ^ 1)]})
    for worker in range(size):
        key_values.handle(worker, {**WHOLE, "call": None, "keys": [str(worker)], "value": "eA=="})
    assert looks == 4 * size
    assert sorted(answers, key=lambda one: one[0]) == [
        answer for worker in range(size) for answer in ((worker, None), (worker, ["eA=="]))
    ]
