"""Recorder of the script's calls of ``torch.distributed``, which detects differences between workers.

Each call in the group of all workers enters a running fingerprint, which the workers compare in every step, together
with their losses, and in every evaluation. A call is published before it is made (``comm.desync.board``), so a
difference is reported even if the call blocks or breaks the connections. On one machine the later worker detects the
difference before it makes its call.

Recording a call takes 3 microseconds, or 20 to 30 after a call that waited, because the code has left the processor's
caches. gloo's smallest all_reduce takes 230 (``bench/overhead.py``).
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
_BITS = 52  # Bits of a fingerprint. A float64 holds it exactly.
_HALF = _BITS // 2
_ALL_BITS, _HALF_BITS = (1 << _BITS) - 1, (1 << _HALF) - 1
_MET = 256  # maximum number of kinds of calls whose first call waits for a comparison, on boards that are not immediate
_BARRIER_SECONDS = 2.0  # Timeout of that wait. The call itself detects a lost worker.
_CACHED = 4096
_LATE_SECONDS = 0.5
_GROUP_CHECKS = 50
"""Number of :meth:`CallRecorder.check` calls, about a second, between comparisons of the calls in smaller groups."""
_LINES = 3  # number of lines of the script that identify a call: the innermost line and its callers
_NOT_THE_SCRIPT = ("torch", "paceline")
_FAILED = ("onnection", "imed out", "gloo/transport", "roken pipe", "NCCL", "closed by peer")
"""Parts of torch's messages for errors that do not come from the arguments of the call."""


@dataclass(frozen=True, eq=False)
class What:
    """What must be equal on all members of a group, as text and as a hash."""

    text: str
    hash: int
    symmetric: bool = False  # whether all members have the same role, so that two swapped calls mix up values
    meets: bool = False  # whether no member can continue before every member has made the call


@dataclass(frozen=True, eq=False)
class Site:
    """Lines of the script that led to a call, innermost first."""

    lines: list[str]
    hash: int


@dataclass(frozen=True)
class Group:
    """A group that does not contain all workers."""

    name: str
    ranks: list[int]


@dataclass(slots=True, eq=False)
class Call:
    """A call of this worker."""

    number: int
    group: Group | None
    what: What
    site: Site
    note: str

    def record(self) -> Record:
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
"""Builds the error for a failed call from the peers, the activity, and the original error."""


class CallRecorder:
    """Recorder of this worker's calls in the thread that constructs the recorder.

    Args:
        lost: builds the error for a call that failed although all workers made the same calls.
    """

    def __init__(self, rank: int, board: Board, lost: weakref.WeakMethod[Lost]) -> None:
        self._rank, self._board, self._lost = rank, board, lost
        self._thread = threading.get_ident()
        self._kept: deque[Call] = deque(maxlen=sum(KEPT))
        self._number = self._others = self._agreed = self._checks = 0
        self._numbers: dict[str, int] = {}
        self._operations = self._line = self._ordered = self._sum = 0
        self._lines: dict[tuple[What, Site], bytes] = {}
        self._met: set[int] = set()

    def enter(self, what: What, group: Group | None, frame: FrameType | None, waits: bool) -> Call | None:
        """Record a call of ``torch.distributed`` before it is made. Return None if it does not come from the script.

        Args:
            what: the operation with its shapes and types.
            waits: whether the call returns only when the operation is complete.

        Raises:
            DisagreementError: another worker made a different call at this position.
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
                self._board.barrier(call.number, _BARRIER_SECONDS)
                self._refuse()
        return call

    def _all(self, what: What, site: Site, note: str) -> Call:
        """Record and publish a call in the group of all workers."""
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
        """Record and publish a call in a smaller group. Each group numbers its own calls."""
        number = self._numbers[group.name] = self._numbers.get(group.name, 0) + 1
        call = Call(number, group, what, site, "")
        self._kept.append(call)
        self._others += 1
        self._board.publish_in_group(self._others, b"%d" % number + line(call.record()))
        return call

    def barrier(self, name: str, note: str) -> tuple[float, float]:
        """Record a call of the session that synchronizes all workers, such as ``session.step``.

        Returns:
            the fingerprint that :meth:`check_agreement` compares: two integers below 2**52. The first covers all
            operations since the recorder was made, with shapes and types. The second covers the lines of the script's
            symmetric calls since the last fingerprint. Half of its bits depend on the order of the lines.

        Raises:
            DisagreementError: another worker made a different call at this position.
        """
        fingerprint = float(self._operations), float(self._ordered << _HALF | self._sum)
        self._ordered = self._sum = 0
        site = site_of(sys._getframe(1), own=True)
        assert site is not None
        self._all(_what_of(name), site, note)
        return fingerprint

    def check_agreement(self, fingerprints: list[tuple[float, float]]) -> None:
        """Compare the fingerprints that :meth:`barrier` returned on the workers."""
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

    def check(self) -> None:
        """Check, while this worker waits, whether another worker's published calls differ. This is cheap.

        Raises:
            DisagreementError: another worker made a different call.
        """
        last = next((call for call in reversed(self._kept) if call.group is None), None)
        self._checks += 1
        in_groups = self._others > 0 and self._checks % _GROUP_CHECKS == 0
        if in_groups or (last is not None and self._board.differs(last.number, last.what.hash)):
            self._refuse()

    def explain(self, lost: PacelineError) -> PacelineError:
        sentence = self._sentence(compare)
        return lost if sentence is None else DisagreementError(sentence)

    def failed(self, call: Call, error: RuntimeError) -> Exception:
        """Return the error to raise for a failed call: the original if it comes from the call's arguments."""
        if not any(word in str(error) for word in _FAILED):
            return error
        if (lost := self._lost()) is None:
            return error
        where = f" ({call.site.lines[0]})" if call.site.lines else ""
        return lost([], f"in {call.what.text}{where}", error)

    def _refuse(self, by: Compare = compare) -> None:
        if (sentence := self._sentence(by)) is not None:
            raise DisagreementError(sentence)

    def _sentence(self, by: Compare) -> str | None:
        if (sentence := by(self._read())) is None:
            return None
        self._board.barrier(self._number, _LATE_SECONDS)  # include workers that arrive slightly later
        sentence = by(self._read())
        self._board.linger(_LATE_SECONDS)
        return sentence

    def _read(self) -> dict[int, list[Record]]:
        """Return all workers' calls since the last agreement, and all kept calls of this worker."""
        found = self._board.read(range(self._agreed + 1, self._number + 1), self._others > 0)
        return found | {self._rank: [call.record() for call in self._kept]}


def hash_of(text: str) -> int:
    """Return a 52-bit hash of a text that is equal on every worker."""
    return int.from_bytes(hashlib.sha256(text.encode(errors="replace")).digest()[:8], "big") & _ALL_BITS


def site_of(frame: FrameType | None, own: bool) -> Site | None:
    """Return the lines of the script that led to a call, or None if the call does not come from the script.

    Lines contain only the file's name, because paths differ between machines.

    Args:
        own: whether to return the lines also for calls that Paceline makes, directly or through torch.
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
    if (found := _sites.get(tuple(key))) is not None:
        return found[0]
    return _remember(tuple(key), frames) if frames or own else None


_sites: dict[tuple[int, ...], tuple[Site, list[CodeType]]] = {}
"""Sites by ids of code objects and instruction offsets. Keeping the code objects keeps their ids unique."""


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
