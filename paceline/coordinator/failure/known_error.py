"""Entry of the table of known errors: errors whose messages do not reveal their cause."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class KnownError:
    """Entry of the table of known errors."""

    name: str  # name that users search for
    pattern: str  # regular expression that matches the message, ignoring case
    means: str  # explanation in plain words
    causes: tuple[str, ...]  # usual causes, most frequent first
    cure: str  # advice
    transport: bool = False  # whether the entry only applies to texts that also name a transport
    kind: str = ""  # kind of the failure. Empty if this error does not determine it.
    doctor: str = ""  # check of ``paceline doctor`` that finds the problem before the start. Empty if there is none.

    @property
    def paragraph(self) -> str:
        """Meaning, causes, advice and check in one line."""
        check = f" `paceline doctor` tests it before the start ({self.doctor})." if self.doctor else ""
        return f"What it means: {self.means}. Usual causes: {'; '.join(self.causes)}. What to do: {self.cure}.{check}"
