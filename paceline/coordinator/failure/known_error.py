"""What is known of an error that hides its cause: one row of the table."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class KnownError:
    """One row of the table.

    Attributes:
        name: by which people look for it.
        pattern: finds it in a message, whatever the case of its letters.
        means: in plain words.
        causes: the usual ones, the most frequent first.
        cure: what to do.
        transport: only if the text also names a transport.
        kind: of the failure, if this decides it.
        doctor: the check of ``paceline doctor`` that finds it before the start, if any.
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
        """All of it in one line."""
        check = f" `paceline doctor` tests it before the start ({self.doctor})." if self.doctor else ""
        return f"What it means: {self.means}. Usual causes: {'; '.join(self.causes)}. What to do: {self.cure}.{check}"
