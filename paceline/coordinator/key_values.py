"""Key-value store for the rendezvous of one generation, for example for the addresses on which gloo listens.

The coordinator holds the store, so that values travel over authenticated connections and no other port is needed.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Callable
from typing import Any, NamedTuple

from paceline.coordinator.types import Message

LARGEST_KEY, LARGEST_VALUE = 1 << 10, 1 << 19
_MOST_BYTES = 1 << 28
_MOST_WAITING = 1 << 12


class _Question(NamedTuple):
    """Request of a worker which waits for keys, and possibly wants their values."""

    worker: int
    call: int
    keys: list[str]
    wants_values: bool


class KeyValues:
    """Store of base64 values by key."""

    def __init__(self, send: Callable[[int, Message], None]) -> None:
        self._send = send
        self.clear()

    def clear(self) -> None:
        """Remove all values and pending requests, because a new generation begins."""
        self._values: dict[str, str] = {}
        self._waiting: dict[str, list[_Question]] = {}
        self._asked = 0
        self._bytes = 0

    def handle(self, worker: int, message: Message) -> None:
        """Handle a request of a worker's ``comm.rendezvous.coordinator_store``.

        Raises:
            ValueError: the request is invalid or exceeds a limit.
        """
        do, call, keys = message["do"], message["call"], message["keys"]
        if do in ("take", "wait"):
            self._await(_Question(worker, call, keys, do == "take"))
            return
        if do == "check":
            answer: Any = all(key in self._values for key in keys)
        elif do == "list":
            answer = sorted(self._values)
        else:
            answer = self._change(do, keys[0], message)
        if call is not None:
            self._send(worker, {"type": "store", "call": call, "value": answer})

    def _change(self, do: str, key: str, message: Message) -> object:
        before = b64decode(self._values.get(key, ""), validate=True)
        if do == "set":
            self._set(key, message["value"])
        elif do == "append":
            self._set(key, b64encode(before + b64decode(message["value"], validate=True)).decode())
        elif do == "add":
            total = int(before or b"0") + int(message["value"])
            self._set(key, b64encode(str(total).encode()).decode())
            return total
        elif do == "swap":
            return self._swap(key, message["expected"], message["value"])
        elif do == "delete":
            return self._remove(key)
        else:
            raise ValueError(f"unknown request {do!r}")
        return None

    def _set(self, key: str, value: str) -> None:
        self._remove(key)
        self._bytes += len(key) + len(value)
        if self._bytes > _MOST_BYTES:
            raise ValueError("too much is stored")
        self._values[key] = value
        for question in self._waiting.pop(key, ()):
            self._asked -= 1
            self._await(question)

    def _swap(self, key: str, expected: str, value: str) -> str:
        """Set a value if the current one (empty if missing) equals ``expected``. Return the current value."""
        if self._values.get(key, "") == expected:
            self._set(key, value)
        return self._values.get(key, expected)

    def _remove(self, key: str) -> bool:
        value = self._values.pop(key, None)
        self._bytes -= 0 if value is None else len(key) + len(value)
        return value is not None

    def _await(self, question: _Question) -> None:
        """Answer when all keys are set. Until then, check again only when the first missing key is set."""
        if (missing := next((key for key in question.keys if key not in self._values), None)) is None:
            values = [self._values[key] for key in question.keys] if question.wants_values else None
            self._send(question.worker, {"type": "store", "call": question.call, "value": values})
            return
        self._asked += 1
        if self._asked > _MOST_WAITING:
            raise ValueError("too many wait")
        self._waiting.setdefault(missing, []).append(question)
