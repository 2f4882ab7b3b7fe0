"""Requests of workers: one operation on one tensor or on a group of tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from paceline.errors import name_ranks

GLOBAL = 0  # ID of the process set of all workers

Key = tuple[int, str]  # process set ID and operation name, by which requests of different workers are matched
Shape = tuple[int, ...]


class Request(NamedTuple):
    """Operation that a worker requests.

    Attributes:
        set: ID of the process set.
        kind: name of the public function: "allreduce", "allgather", ...
        dtypes: dtypes of the tensors, without ``torch.``.
        root: global rank of a broadcast's root; ID of the process set in requests that add or remove process sets.
        prescale, postscale: factors before and after a reduction.
        splits: number of rows for each member in ``alltoall``; ranks of a process set that is added.
        detail: further arguments that must agree, or the reason for a refused request.
    """

    set: int
    name: str
    kind: str
    dtypes: tuple[str, ...] = ()
    shapes: tuple[Shape, ...] = ()
    op: str = ""
    root: int = -1
    prescale: float = 1.0
    postscale: float = 1.0
    splits: tuple[int, ...] = ()
    detail: str = ""

    @property
    def key(self) -> Key:
        """Process set ID and name, which matching requests of all workers have in common."""
        return self.set, self.name

    @property
    def words(self) -> str:
        called, _, name = self.name.partition(".")
        if name and called.removeprefix("grouped_") == self.kind:
            return f"{called} {name!r}"
        return self.kind if self.name in ("", self.kind) else f"{self.kind} {self.name!r}"


def from_json(values: list[Any]) -> Request:
    one = Request(*values)
    return one._replace(dtypes=tuple(one.dtypes), shapes=tuple(map(tuple, one.shapes)), splits=tuple(one.splits))


REFUSED = "refused"  # kind of a request that its own worker has found invalid
_COMPARED = ("kind", "op", "dtypes", "root", "prescale", "postscale", "detail")
_WORDS = {"dtypes": "type", "op": "reduction", "root": "root rank", "shapes": "shape", "detail": "arguments"}
_FIRST_DIFFERS = ("allgather", "alltoall")


def conflict(requests: Mapping[int, Request]) -> str:
    """Return why requests of different ranks do not match, or an empty string if they match."""
    first = next(iter(requests.values()))
    if first.kind != REFUSED and all(one == first for one in requests.values()):
        return ""
    refused = [f"rank {rank}: {one.detail}" for rank, one in requests.items() if one.kind == REFUSED]
    if refused:
        return f"{first.name!r} is refused on {'; '.join(refused)}"
    for field in _COMPARED:
        if any(getattr(one, field) != getattr(first, field) for one in requests.values()):
            return _differs(field, {rank: getattr(one, field) for rank, one in requests.items()}, first)
    shapes = {rank: _compared_shapes(one) for rank, one in requests.items()}
    if len(set(shapes.values())) > 1:
        rest = " but for its first dimension" if first.kind in _FIRST_DIFFERS else ""
        return _differs("shapes", {rank: one.shapes for rank, one in requests.items()}, first) + (
            f" All ranks must give {first.name!r} the same shape{rest}."
        )
    return ""


def _compared_shapes(request: Request) -> tuple[Shape, ...]:
    if request.kind in _FIRST_DIFFERS:
        return tuple((-1, *shape[1:]) for shape in request.shapes)
    return request.shapes


def _differs(field: str, values: Mapping[int, Any], first: Request) -> str:
    said: dict[str, list[int]] = {}
    for rank, value in values.items():
        said.setdefault(_shown(value), []).append(rank)
    what = _WORDS.get(field, field)
    listed = ", ".join(f"{text} on {name_ranks(ranks)}" for text, ranks in said.items())
    head = f"{first.name!r}" if field == "kind" else first.words
    return f"{head} differs in its {what}: {listed}."


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        shown = [list(one) if isinstance(one, tuple) else one for one in value]
        return str(shown[0]) if len(shown) == 1 else str(shown)
    return str(value)
