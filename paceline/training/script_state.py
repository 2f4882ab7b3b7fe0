"""What a script keeps besides the model: its registered values, and the results that it was given.

A checkpoint and a joiner get the registered values as they were when the last step returned, as that is where a script
goes on: it gets the batch of that step once more, ``step`` returns the known result, and the lines behind it run.
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
    """The registered values of a script, and a copy of them after the last step."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self._progress: Progress | None = None
        self._kept: dict[str, Any] = {}

    def follow(self, progress: Progress) -> None:
        """Save the results from now on that this progress has."""
        self._progress = progress

    def register(self, values: Mapping[str, Any]) -> None:
        """Keep values from now on; those that were restored get their old content.

        Raises:
            InputError: a name is taken, or a value can neither be saved nor sent.
        """
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
        """Set a plain value."""
        self._check(name, _content(value))
        self.values[name] = value

    def keep(self) -> None:
        """Copy the values: a step has ended."""
        for name, value in self.values.items():
            self._kept[name] = copy.deepcopy(_content(value))

    @contextmanager
    def of_now(self) -> Iterator[None]:
        """In which :meth:`saved` returns the values as they are now."""
        before = self._kept
        self._kept = dict(before)
        self.keep()
        try:
            yield
        finally:
            self._kept = before

    def saved(self) -> dict[str, Any]:
        """What belongs to a checkpoint or goes to a joiner."""
        return {"registered": dict(self._kept), **({} if self._progress is None else self._progress.history())}

    def load(self, saved: Mapping[str, Any]) -> None:
        """Take over what :meth:`saved` gave; values that are registered later get their content then."""
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
    """Values that a script has registered, as attributes; plain ones are assigned as usual."""

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
    """What is saved of a value."""
    return value.state_dict() if _is_object(value) else value


def _restored(name: str, value: Any, content: Any) -> Any:
    """The value with its old content; a container that the script may hold elsewhere stays the same object."""
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
