"""Where the script is: after how many steps, in which epoch, and at which of its calls."""

from __future__ import annotations

from collections.abc import Callable

from paceline.data.keys import LOOP, seed_all, seed_of
from paceline.errors import InputError
from paceline.step.job import Batch
from paceline.training.progress import Call


class Position:
    """The position of the script, with the random numbers that it draws there.

    Args:
        seed: of the run.
        steps: how many steps the script has come past.

    Attributes:
        steps: how many steps the script has come past.
        epoch: the one that ``session.epochs`` has given last; None outside of it.
        among_batches: whether the script is between a batch and the next one, or has left the loop there.
        given: the last step whose batch the script got; -1 before the first one.
        used: how many batches the script has given to a step.
    """

    def __init__(self, seed: int, steps: int) -> None:
        self._seed = seed
        self._target: Callable[[], int] = lambda: 0
        self._calls: dict[str, tuple[Call, int]] = {}  # where the script last made a call, and how often there
        self.epoch: int | None = None
        self.among_batches = False
        self.given = -1
        self.used = 0
        self._saved = -1  # the position at which the script saved last
        self._taken = -1, 0  # the step whose batch the script gave last, and how often: its phases
        self.move_to(steps)

    @property
    def target(self) -> int:
        """The position at which the present loop over batches ends; ``UNKNOWN`` while that is not known."""
        return self._target()

    @property
    def asked(self) -> int:
        """The position, but none that the script has not asked for yet: a resumed one is behind what is done."""
        return min(self.steps, self.target)

    def aim_at(self, target: Callable[[], int]) -> None:
        """Set where the present loop over batches ends."""
        self._target = target

    def count(self, kind: str) -> tuple[Call, int]:
        """Return where in the script this call is, and how many of its kind were made there before it."""
        call = self.asked, -1 if self.epoch is None else self.epoch, int(self.among_batches)
        before, count = self._calls.get(kind, (call, 0))
        number = count if before == call else 0
        self._calls[kind] = call, number + 1
        return call, number

    def move_to(self, steps: int, before: bool = False, turn: int = 0) -> None:
        """Set the position, and with it the random numbers that the script draws now.

        Args:
            steps: that the script has come past.
            before: whether it is about to take the step of this number; otherwise it has taken the one before.
            turn: of the phase after which the numbers are drawn, if a batch has several.
        """
        self.steps = steps
        seed_all(seed_of(LOOP, self._seed, steps, turn + 1 if turn else before))

    def stay(self) -> None:
        """Let the script draw the random numbers of its position again, which others may have used."""
        self.move_to(self.steps)

    def take(self, step: int, turn: int) -> None:
        """The script has taken a step, or a phase of it."""
        self._taken = step, turn + 1
        self.used += 1
        self.move_to(step + 1, turn=turn)

    def save(self, steps: int) -> None:
        """The script has saved after so many steps."""
        self._saved = steps

    def check(self, batch: object, is_phase: bool) -> int:
        """Refuse a batch that is over; return how many phases of it the script has taken.

        Args:
            batch: what the script has given to a step.
            is_phase: whether it takes a phase of it.

        Raises:
            InputError: it is over, or is no batch.
        """
        if not isinstance(batch, Batch):
            raise InputError(f"session.step takes a batch from session.batches(), not a {type(batch).__name__}.")
        step, turns = batch.step, self._taken[1] if self._taken[0] == batch.step else 0
        late = step < self.steps - 1
        if is_phase and (late or (turns and self._saved == step + 1)):
            why = "the script has the next one" if late else "the script has saved after it"
            raise InputError(
                f"The batch of step {step} is over: {why}. Take all phases of a batch one after the other, and save "
                f"after the last."
            )
        if not is_phase and turns:
            raise InputError(
                f"The batch of step {step} was given to session.step before: it has made its update. Call session.step "
                f"once for each batch; for more updates take a smaller batch or more epochs."
            )
        if not is_phase and late:
            raise InputError(
                f"The batch of step {step} is over: the script already has later ones. Give each batch to session.step "
                f"once, before you take the next."
            )
        return turns
