"""Mapping views of values that no dictionary of an object holds: globals, slots, entries of lists, closures."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping
from types import CellType
from typing import Any


class Entries(MutableMapping[Any, Any]):
    """Mapping view of attributes of a class, slots of an object, globals of a module, or entries of a list.

    Args:
        owner: class, object, dictionary of the globals, or list.
        keys: initial keys of the entries. More may be added later.
    """

    def __init__(self, owner: Any, keys: Iterable[Any] = ()) -> None:
        self._owner = owner
        self.keys_known: dict[Any, None] = dict.fromkeys(keys)

    def __getitem__(self, key: Any) -> Any:
        try:
            return self._owner[key] if isinstance(self._owner, dict | list) else getattr(self._owner, key)
        except (AttributeError, IndexError):
            raise KeyError(key) from None

    def __setitem__(self, key: Any, value: Any) -> None:
        if isinstance(self._owner, dict | list):
            self._owner[key] = value
        else:
            setattr(self._owner, key, value)

    def __delitem__(self, key: Any) -> None:
        raise TypeError("entries are not removed")

    def __iter__(self) -> Iterator[Any]:
        return iter([key for key in self.keys_known if key in self])

    def __len__(self) -> int:
        return len(self.keys_known)


class Cells(MutableMapping[Any, Any]):
    """Mapping view of the variables that functions read from an enclosing function."""

    def __init__(self) -> None:
        self._cells: dict[str, CellType] = {}

    def add(self, cells: dict[str, CellType]) -> None:
        """Add variables. One of a name that another call of the enclosing function has, too, gets a number."""
        for key, cell in cells.items():
            if all(cell is not one for one in self._cells.values()):
                number = sum(one.partition(" ")[0] == key for one in self._cells)
                self._cells[f"{key} ({number + 1})" if number else key] = cell

    def __getitem__(self, key: Any) -> Any:
        try:
            return self._cells[key].cell_contents
        except ValueError:  # empty
            raise KeyError(key) from None

    def __setitem__(self, key: Any, value: Any) -> None:
        self._cells[key].cell_contents = value

    def __delitem__(self, key: Any) -> None:
        raise TypeError("variables are not removed")

    def __iter__(self) -> Iterator[Any]:
        return iter([key for key in self._cells if key in self])

    def __len__(self) -> int:
        return len(self._cells)
