"""State of the script besides the model: registered values, and results that the session has returned to the script.

Checkpoints and joining workers get the registered values as of the return of the last step, because a script resumes at
that point: it gets the batch of that step again, ``step`` returns the stored result, and the code after it runs.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from paceline.checkpoint import encoding
from paceline.checkpoint.encoding import EncodingError
from paceline.errors import InputError
from paceline.training.progress import Progress

_IN_PLACE = (list, dict, set)


class ScriptState:
    """Registered values of a script, with a copy of their state after the last step."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self._progress: Progress | None = None
        self._kept: dict[str, Any] = {}
        self._in_step = False  # whether a step of the script has begun and not returned

    def follow(self, progress: Progress) -> None:
        """Use this progress as the source of the results to save."""
        self._progress = progress

    def register(self, values: Mapping[str, Any]) -> None:
        """Register values, and restore the content of those that a checkpoint or another worker has provided."""
        for name, value in values.items():
            if name in self.values:
                raise InputError(f"register({name}=...): there is a registered {name!r} already.")
            self._check(name, _content(value))
            self.values[name] = value
            if name in self._kept:
                self.values[name] = _restored(name, value, copy.deepcopy(self._kept[name]))
            else:
                self._kept[name] = copy.deepcopy(_content(value))

    def assign(self, name: str, value: Any) -> None:
        """Set a plain registered value."""
        self._check(name, _content(value))
        self.values[name] = value

    def begin_step(self) -> None:
        """Record that the script waits for a step, so that its values do not change until :meth:`keep`."""
        self._in_step = True

    def keep(self) -> None:
        """Copy the current values. Called when a step ends."""
        self._in_step = False
        self._copy()

    def keep_step(self) -> None:
        """Copy the current values if the script waits for a step. Called when other workers have sent its result."""
        if self._in_step:
            self.keep()

    def _copy(self) -> None:
        for name, value in self.values.items():
            self._kept[name] = copy.deepcopy(_content(value))

    @contextmanager
    def of_now(self) -> Iterator[None]:
        """Make :meth:`saved` return the current values inside the block."""
        before = self._kept
        self._kept = dict(before)
        self._copy()
        try:
            yield
        finally:
            self._kept = before

    def is_ahead(self, steps: int) -> bool:
        """Return whether the values belong to a later step, because the run repeats steps that it has completed."""
        return bool(self.values) and self._progress is not None and steps < self._progress.repeat_until

    def saved(self) -> dict[str, Any]:
        """Return the state for a checkpoint or a joining worker."""
        return {"registered": dict(self._kept), **({} if self._progress is None else self._progress.history())}

    def load(self, saved: Mapping[str, Any]) -> None:
        """Restore the state from :meth:`saved`. Values that are registered later are restored on registration."""
        self._kept = dict(saved.get("registered", {}))
        for name, value in self.values.items():
            if name in self._kept:
                self.values[name] = _restored(name, value, copy.deepcopy(self._kept[name]))

    @staticmethod
    def _check(name: str, content: Any) -> None:
        try:
            encoding.encode(content, {}, name)
        except EncodingError as error:
            raise InputError(
                f"register({name}=...): {error}, which cannot be saved. Register numbers, text, tensors, containers of "
                f"these, or an object with state_dict and load_state_dict that give such."
            ) from None


class Registered:
    """Registered values of a script as attributes. Plain values can be assigned."""

    def __init__(self, state: ScriptState, names: tuple[str, ...]) -> None:
        object.__setattr__(self, "_state", state)
        object.__setattr__(self, "_names", names)

    def __getattr__(self, name: str) -> Any:
        self._check(name)
        return self._state.values[name]

    def __setattr__(self, name: str, value: Any) -> None:
        self._check(name)
        self._state.assign(name, value)

    def __repr__(self) -> str:
        return f"Registered({', '.join(f'{name}={getattr(self, name)!r}' for name in self._names)})"

    def _check(self, name: str) -> None:
        if name not in object.__getattribute__(self, "_names"):
            known = ", ".join(object.__getattribute__(self, "_names"))
            raise AttributeError(f"{name!r} is not registered; there is: {known}")


def _is_object(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _content(value: Any) -> Any:
    """Return the part of a value to save: its ``state_dict()`` if it has one, otherwise the value."""
    return value.state_dict() if _is_object(value) else value


def _restored(name: str, value: Any, content: Any) -> Any:
    """Return the value with its saved content. Fills containers in place, because the script may reference them."""
    if _is_object(value):
        value.load_state_dict(content)
        return value
    if type(value) in _IN_PLACE and type(value) is type(content):
        value.clear()
        (value.extend if isinstance(value, list) else value.update)(content)
        return value
    if isinstance(value, type(content)) or isinstance(content, type(value)) or value is None or content is None:
        return content
    if isinstance(value, int | float) and isinstance(content, int | float):
        return content
    raise InputError(
        f"register({name}=...) was a {type(content).__name__} in the checkpoint and is a {type(value).__name__} now."
    )
