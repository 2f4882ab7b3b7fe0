"""What a worker asks for: one operation on one tensor, or on a group of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from paceline.errors import name_ranks

GLOBAL = 0
"""The process set of all workers."""

Key = tuple[int, str]
"""Of a process set and a name: by this, requests of different workers belong together."""
Shape = tuple[int, ...]


class Request(NamedTuple):
    """An operation that a worker asks for.

    Attributes:
        set: the process set.
        name: of the operation.
        kind: "allreduce", "allgather", ..., as the public function is called.
        dtypes: of the tensors, without ``torch.``.
        shapes: of the tensors.
        op: of reductions.
        root: of broadcasts, a global rank.
        prescale, postscale: factors before and after a reduction.
        splits: of ``alltoall``: rows for each member.
        detail: what else must agree; of a refused request, why it is.
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
        """What it has in common with those of the other workers."""
        return self.set, self.name

    @property
    def words(self) -> str:
        """Its kind and name, for messages."""
        called, _, name = self.name.partition(".")
        if name and called.removeprefix("grouped_") == self.kind:
            return f"{called} {name!r}"
        return self.kind if self.name in ("", self.kind) else f"{self.kind} {self.name!r}"


def from_json(values: list[Any]) -> Request:
    """Read a request that was sent as a list."""
    one = Request(*values)
    return one._replace(dtypes=tuple(one.dtypes), shapes=tuple(map(tuple, one.shapes)), splits=tuple(one.splits))


REFUSED = "refused"
"""The kind of a request that its own worker has found wrong."""
_COMPARED = ("kind", "op", "dtypes", "root", "prescale", "postscale", "detail")
_WORDS = {"dtypes": "type", "op": "reduction", "root": "root rank", "shapes": "shape", "detail": "arguments"}
_FIRST_DIFFERS = ("allgather", "alltoall")


def conflict(requests: Mapping[int, Request]) -> str:
    """Why these requests of different ranks do not fit together; empty if they do."""
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
