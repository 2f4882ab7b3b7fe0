"""What this worker's script did with ``torch.distributed``, call by call, and whether all workers did the same.

Each call on the group of all workers goes into a running fingerprint, which the workers compare in every step, together
with their losses, and in every evaluation. Before a call is made it is published (``comm.desync.board``) for the
others to read, so a difference is named even if the call blocks or breaks the connections. On one machine a worker that
comes later sees the difference before it makes its call.

To record a call costs 3 microseconds, and 20 to 30 where it counts: after a call that waited, when the processor has
forgotten the code; gloo's smallest all_reduce takes 230 (``bench/overhead.py``).
"""

from __future__ import annotations

import hashlib
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType

from paceline.comm.desync.board import ALL, KEPT, Board, line
from paceline.comm.desync.compare import Record, compare, swapped
from paceline.errors import DisagreementError, PacelineError

_FACTOR = 0x5DEECE66D
_BITS = 52
"""Of a fingerprint: a float64 holds it exactly."""
_HALF = _BITS // 2
_ALL_BITS, _HALF_BITS = (1 << _BITS) - 1, (1 << _HALF) - 1
_MET = 256
"""So many kinds of calls are compared before the first of a kind is made, where that takes time."""
_MEET_SECONDS = 2.0
"""To wait for the others then; a worker that is gone is noticed in the call itself."""
_CACHED = 4096
_LATE_SECONDS = 0.5
_LOOKS = 50
"""So many looks, a second or so, from one comparison of the calls in smaller groups to the next."""
_LINES = 3
"""Lines of the script that tell one call from another: the nearest one and those that led to it."""
_NOT_THE_SCRIPT = ("torch", "paceline")
_FAILED = ("onnection", "imed out", "gloo/transport", "roken pipe", "NCCL", "closed by peer")
"""How torch says that the fault is not in the arguments of this call."""


@dataclass(frozen=True, eq=False)
class What:
    """What must be the same on all members of a group, in words and as a hash."""

    text: str
    hash: int
    symmetric: bool = False
    """Whether all members do the same, so that two such calls that are swapped mix values."""
    meets: bool = False
    """Whether every member has to come before any can go on."""


@dataclass(frozen=True, eq=False)
class Site:
    """The lines of the script that led to a call, the nearest first."""

    lines: list[str]
    hash: int


@dataclass(frozen=True)
class Group:
    """A group of some workers."""

    name: str
    ranks: list[int]


class Call:
    """One call of this worker."""

    __slots__ = ("group", "note", "number", "site", "what")

    def __init__(self, number: int, group: Group | None, what: What, site: Site, note: str) -> None:
        self.number = number
        self.group = group
        self.what = what
        self.site = site
        self.note = note

    def record(self) -> Record:
        """As plain data."""
        return Record(
            number=self.number,
            group=self.group.name if self.group else "",
            ranks=self.group.ranks if self.group else None,
            call=self.what.text,
            note=self.note,
            sites=self.site.lines,
        )


Compare = Callable[[dict[int, list[Record]]], "str | None"]

Lost = Callable[[list[int], str, RuntimeError], PacelineError]
"""What a worker says when a call failed: the peers it was about, where, and the error."""


class CallRecorder:
    """The calls of this worker. Only those of the thread that made this object are recorded.

    Args:
        rank: of this worker.
        board: where the workers leave their last calls.
        lost: makes the error of a call that failed although all workers did the same.
    """

    def __init__(self, rank: int, board: Board, lost: weakref.WeakMethod[Lost]) -> None:
        self._rank = rank
        self._board = board
        self._lost = lost
        self._thread = threading.get_ident()
        self._kept: deque[Call] = deque(maxlen=sum(KEPT))
        self._number = self._others = self._agreed = self._looks = 0
        self._numbers: dict[str, int] = {}
        self._operations = self._line = self._ordered = self._sum = 0
        self._lines: dict[tuple[What, Site], bytes] = {}
        self._met: set[int] = set()

    def enter(self, what: What, group: Group | None, frame: FrameType | None, waits: bool) -> Call | None:
        """Record a call of ``torch.distributed`` that is about to be made; none if it is not the script's.

        Args:
            what: the operation with its shapes and types.
            group: none for all workers.
            frame: of the caller.
            waits: whether the call returns only when it is done.

        Raises:
            DisagreementError: another worker makes another call at this place.
        """
        site = site_of(frame, own=False) if threading.get_ident() == self._thread else None
        if site is None:
            return None
        if group is not None:
            call = self._some(what, group, site)
        else:
            self._operations = (self._operations * _FACTOR + what.hash) & _ALL_BITS
            if what.symmetric:
                self._ordered = (self._ordered * _FACTOR + site.hash) & _HALF_BITS
                self._sum = (self._sum + site.hash) & _HALF_BITS
            call = self._all(what, site, "")
            if (
                waits
                and what.meets
                and not self._board.immediate
                and what.hash not in self._met
                and len(self._met) < _MET
            ):
                self._met.add(what.hash)
                self._board.meet(call.number, _MEET_SECONDS)
                self._refuse()
        return call

    def _all(self, what: What, site: Site, note: str) -> Call:
        """A call in which all workers take part."""
        self._number = number = self._number + 1
        call = Call(number, None, what, site, note)
        self._kept.append(call)
        text = self._lines.get((what, site)) if not note else None
        if text is None:
            text = line(call.record())
            if not note and len(self._lines) < _CACHED:
                self._lines[what, site] = text
        if self._board.publish(number, what.hash, b"%d" % number + text):
            self._refuse()
        return call

    def _some(self, what: What, group: Group, site: Site) -> Call:
        """A call in a smaller group: the others know nothing of it, so it has a sequence of its own."""
        number = self._numbers[group.name] = self._numbers.get(group.name, 0) + 1
        call = Call(number, group, what, site, "")
        self._kept.append(call)
        self._others += 1
        self._board.publish_in_group(self._others, b"%d" % number + line(call.record()))
        return call

    def meet(self, name: str, note: str) -> tuple[float, float]:
        """Record a call of the session in which all workers meet, such as ``session.step``.

        Returns:
            the fingerprint that :meth:`check_agreement` compares: two whole numbers below 2**52. The first is made of
            all operations so far with their shapes and types; the second of the lines of the script since the last
            comparison: half of its bits depend on their order, the other half does not.

        Raises:
            DisagreementError: another worker makes another call at this place.
        """
        fingerprint = float(self._operations), float(self._ordered << _HALF | self._sum)
        self._ordered = self._sum = 0
        site = site_of(sys._getframe(1), own=True)
        assert site is not None
        self._all(_what_of(name), site, note)
        return fingerprint

    def check_agreement(self, fingerprints: list[tuple[float, float]]) -> None:
        """Compare what :meth:`meet` returned on each worker.

        Raises:
            DisagreementError: names the first call that differs, the ranks and the lines of the script.
        """
        if all(one == fingerprints[0] for one in fingerprints):
            self._agreed = self._number
            return
        if any(one[0] != fingerprints[0][0] for one in fingerprints):
            self._refuse()
            raise DisagreementError(
                f"The workers called different operations of torch.distributed, before the last {KEPT[ALL]} calls, "
                f"which are kept. Make all workers call the same operations in the same order."
            )
        orders: dict[int, set[int]] = {}
        for _, lines in fingerprints:
            orders.setdefault(int(lines) & _HALF_BITS, set()).add(int(lines) >> _HALF)
        if any(len(each) > 1 for each in orders.values()):
            self._refuse(swapped)
        self._agreed = self._number

    def look(self) -> None:
        """Look, while this worker waits, whether another is known to have made a different call; it costs very little.

        Raises:
            DisagreementError: it has.
        """
        last = next((call for call in reversed(self._kept) if call.group is None), None)
        self._looks += 1
        in_groups = self._others > 0 and self._looks % _LOOKS == 0
        if in_groups or (last is not None and self._board.differs(last.number, last.what.hash)):
            self._refuse()

    def explain(self, lost: PacelineError) -> PacelineError:
        """A better error than that a worker was lost, if the workers called different things."""
        sentence = self._sentence(compare)
        return lost if sentence is None else DisagreementError(sentence)

    def failed(self, call: Call, error: RuntimeError) -> Exception:
        """What to raise instead of the error with which a call ended; the same if it is about the arguments."""
        if not any(word in str(error) for word in _FAILED):
            return error
        lost = self._lost()
        if lost is None:
            return error
        where = f" ({call.site.lines[0]})" if call.site.lines else ""
        return lost([], f"in {call.what.text}{where}", error)

    def _refuse(self, by: Compare = compare) -> None:
        sentence = self._sentence(by)
        if sentence is not None:
            raise DisagreementError(sentence)

    def _sentence(self, by: Compare) -> str | None:
        sentence = by(self._read())
        if sentence is None:
            return None
        self._board.meet(self._number, _LATE_SECONDS)  # those that come a little later are named too
        sentence = by(self._read())
        self._board.linger(_LATE_SECONDS)
        return sentence

    def _read(self) -> dict[int, list[Record]]:
        """The calls of all workers since they agreed last; this one's own as far back as they are kept."""
        found = self._board.read(range(self._agreed + 1, self._number + 1), self._others > 0)
        return found | {self._rank: [call.record() for call in self._kept]}


def hash_of(text: str) -> int:
    """The same 52 bits of a text on every worker."""
    return int.from_bytes(hashlib.sha256(text.encode(errors="replace")).digest()[:8], "big") & _ALL_BITS


def site_of(frame: FrameType | None, own: bool) -> Site | None:
    """The lines of the script from which a call comes.

    Paths differ between machines, so that a line is named by its file's name only.

    Args:
        frame: of the caller.
        own: also if Paceline makes the call itself, perhaps through a function of torch; else there is none then.
    """
    key: list[int] = []
    frames: list[FrameType] = []
    while frame is not None and len(frames) < _LINES:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package not in _NOT_THE_SCRIPT:
            code = frame.f_code
            key += (id(code), frame.f_lasti)
            frames.append(frame)
            if code.co_name == "<module>":
                break
        elif not frames and not own and package == "paceline":
            return None
        frame = frame.f_back
    found = _sites.get(tuple(key))
    if found is not None:
        return found[0]
    return _remember(tuple(key), frames) if frames or own else None


_sites: dict[tuple[int, ...], tuple[Site, list[CodeType]]] = {}
"""By code and place in it. The code objects are kept, so that no other gets the same id."""


def _remember(key: tuple[int, ...], frames: list[FrameType]) -> Site:
    lines = [f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}" for frame in frames]
    site = Site(lines, hash_of("<".join(lines)))
    _sites[key] = site, [frame.f_code for frame in frames]
    return site


_whats: dict[str, What] = {}


def _what_of(name: str) -> What:
    if name not in _whats:
        _whats[name] = What(name, hash_of(name))
    return _whats[name]
