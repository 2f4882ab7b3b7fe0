"""Key-value store for torch, kept by the coordinator and reached over the worker's existing connection.

torch's own ``TCPStore`` would listen on a port and trust every client.
"""

from __future__ import annotations

import itertools
import queue
import threading
from base64 import b64decode, b64encode
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from paceline.coordinator.key_values import LARGEST_KEY, LARGEST_VALUE
from paceline.coordinator.types import Message

_CALLS = itertools.count(1)


class CoordinatorStore(Store):
    """Key-value store of one generation. Thread-safe."""

    def __init__(self, send: Callable[[Message], None], generation: int, timeout: float) -> None:
        super().__init__()
        self._send, self._generation, self._timeout = send, generation, timeout
        self._lock = threading.Lock()
        self._closed = False
        self._calls: dict[int, queue.SimpleQueue[Any]] = {}
        self.written: dict[str, bytes] = {}  # the newest value that this worker has set, by key
        self.read: dict[str, bytes] = {}  # the newest value that this worker has read, by key

    def answer(self, message: Message) -> None:
        """Pass an answer from the coordinator to the thread that waits for it."""
        with self._lock:
            waiting = self._calls.pop(message["call"], None)
        if waiting is not None:
            waiting.put(message["value"])

    def close(self) -> None:
        """Make all pending and later requests that wait for an answer raise DistNetworkError."""
        with self._lock:
            self._closed = True
            calls, self._calls = self._calls, {}
        for waiting in calls.values():
            waiting.put(_CLOSED)

    def _ask(self, do: str, keys: list[str], timeout: float | None = None, **more: str) -> Any:
        answers, call = queue.SimpleQueue[Any](), next(_CALLS)
        timeout = self._timeout if timeout is None else timeout
        with self._lock:
            if self._closed:
                raise dist.DistNetworkError("This group of workers has been left.")
            self._calls[call] = answers
        self._request(do, keys, call, **more)
        try:
            answer = answers.get(timeout=timeout)
        except queue.Empty:
            with self._lock:
                self._calls.pop(call, None)
            raise dist.DistStoreError(f"wait timeout after {timeout:.3g} s, keys: {', '.join(keys)}") from None
        if answer is _CLOSED:
            raise dist.DistNetworkError("This group of workers has been left.")
        return answer

    def _request(self, do: str, keys: list[str], call: int | None, **more: str) -> None:
        longest = max(map(len, keys), default=0)
        if longest > LARGEST_KEY:
            raise ValueError(f"A key of the store has {longest} characters; {LARGEST_KEY} are the most.")
        place = {"type": "store", "generation": self._generation, "call": call}
        self._send({**place, "do": do, "keys": keys, "value": "", "expected": "", **more})

    def set(self, key: str, value: bytes | str) -> None:
        """Set a value without waiting for the coordinator."""
        value = _checked(value)
        self.written[key] = value
        self._request("set", [key], None, value=b64encode(value).decode())

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        values = [b64decode(value) for value in self._ask("take", keys)]
        self.read.update(zip(keys, values, strict=True))
        return values

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._ask("wait", keys, None if timeout is None else timeout.total_seconds())

    def check(self, keys: list[str]) -> bool:
        return bool(self._ask("check", keys))

    def add(self, key: str, value: int) -> int:
        return int(self._ask("add", [key], value=str(value)))

    def append(self, key: str, value: bytes | str) -> None:
        """Append to a value, which need not exist, without waiting for the coordinator."""
        self._request("append", [key], None, value=b64encode(_checked(value)).decode())

    def compare_set(self, key: str, expected_value: bytes | str, desired_value: bytes | str) -> bytes:
        expected, desired = (b64encode(_checked(value)).decode() for value in (expected_value, desired_value))
        return b64decode(self._ask("swap", [key], expected=expected, value=desired))

    def delete_key(self, key: str) -> bool:
        """Remove a key and return whether it existed."""
        return bool(self._ask("delete", [key]))

    def num_keys(self) -> int:
        return len(self.list_keys())

    def list_keys(self) -> list[str]:
        return [str(key) for key in self._ask("list", [])]

    deleteKey, getNumKeys = delete_key, num_keys  # names in torch's Store

    def clone(self) -> CoordinatorStore:
        """Return this store, which any thread may use."""
        return self


_CLOSED = object()


def _checked(value: bytes | str) -> bytes:
    value = value.encode() if isinstance(value, str) else bytes(value)
    if len(value) > LARGEST_VALUE:
        raise ValueError(f"A value for the store has {len(value)} bytes; {LARGEST_VALUE} are the most.")
    return value
