"""Entry of the table of known errors: errors whose messages do not reveal their cause."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class KnownError:
    """Entry of the table of known errors.

    Attributes:
        name: name that users search for.
        pattern: regular expression that matches the message, ignoring case.
        means: explanation in plain words.
        causes: usual causes, most frequent first.
        cure: advice.
        transport: whether the entry only applies to texts that also name a transport.
        kind: kind of the failure. Empty if this error does not determine it.
        doctor: check of ``paceline doctor`` that finds the problem before the start. Empty if there is none.
    """

    name: str
    pattern: str
    means: str
    causes: tuple[str, ...]
    cure: str
    transport: bool = False
    kind: str = ""
    doctor: str = ""

    @property
    def paragraph(self) -> str:
        """Meaning, causes, advice and check in one line."""
        check = f" `paceline doctor` tests it before the start ({self.doctor})." if self.doctor else ""
        return f"What it means: {self.means}. Usual causes: {'; '.join(self.causes)}. What to do: {self.cure}.{check}"
