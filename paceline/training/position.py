"""Position of the script: its number of steps, epoch and collective calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from paceline.data.keys import LOOP, seed_all, seed_of
from paceline.errors import InputError
from paceline.step.context import Batch
from paceline.training.progress import BEFORE_TRAINING, WEIGHTS, Call

_NESTED = (
    "{inner} was called by a function that session.{outer} runs. All workers must make this call together, but they do "
    "not run the function together. Let it return the arguments of the call, and make the call afterwards."
)


class Position:
    """Position of the script, which also seeds the random numbers that the script draws.

    Attributes:
        steps: number of steps that the script has passed.
        epoch: epoch that ``session.epochs`` yielded last; None outside of that loop.
        among_batches: whether the script is in the body of a batch loop, or has left a loop early.
        given: last step whose batch the script received; -1 before the first one.
        used: number of batches, or phases of a batch, that the script has passed to ``step``.
    """

    def __init__(self, seed: int, steps: int) -> None:
        self._seed = seed
        self._target: Callable[[], int] = lambda: 0
        self._calls: dict[str, tuple[Call, int]] = {}  # by kind: position of the last call, number of calls there
        self.epoch: int | None = None
        self.among_batches = False
        self.given = -1
        self.used = 0
        self._making = ""  # collective call that the script is making
        self._saved = -1  # position of the script's last save
        self._taken = -1, 0  # step of the batch passed to step() last, and its number of phases taken
        self.move_to(steps)

    @property
    def target(self) -> int:
        """Position at which the current batch loop ends; ``UNKNOWN`` until the end is known."""
        return self._target()

    @property
    def asked(self) -> int:
        """Number of steps, at most the end of the current batch loop. A resumed run may be further ahead."""
        return min(self.steps, self.target)

    @property
    def last(self) -> int:
        """Last step that the script has passed, at which its values are recorded; 0 before the first one."""
        return max(self.steps - 1, 0)

    def aim_at(self, target: Callable[[], int]) -> None:
        """Set the function that returns the end of the current batch loop."""
        self._target = target

    def count(self, kind: str) -> tuple[Call, int]:
        """Return the position of a call in the script, and the number of earlier calls of its kind at this position."""
        call = self.asked, -1 if self.epoch is None else self.epoch, int(self.among_batches)
        before, count = self._calls.get(kind, (call, 0))
        number = count if before == call else 0
        self._calls[kind] = call, number + 1
        return call, number

    @contextmanager
    def counting(self, kind: str) -> Iterator[tuple[Call, int]]:
        """Return a context for a call, which :meth:`count` counts unless the call raises an error.

        Raises:
            InputError: the call is made inside another one.
        """
        self.check_outermost("session.model_state or session.export" if kind == WEIGHTS else f"session.{kind}")
        before, counted = self._calls.get(kind, (BEFORE_TRAINING, 0)), self.count(kind)
        self._making = kind
        try:
            yield counted
        except BaseException:
            self._calls[kind] = before
            raise
        finally:
            self._making = ""

    def check_outermost(self, inner: str) -> None:
        """Raise InputError if a user function calls a method of the session that all workers must call."""
        if self._making:
            raise InputError(_NESTED.format(inner=inner, outer=self._making))

    def move_to(self, steps: int, before: bool = False, turn: int = 0) -> None:
        """Set the position, and seed the global random number generators for it.

        Args:
            before: whether the script has received the batch of step ``steps`` without having taken the step.
            turn: index of the phase just taken, if a batch has several.
        """
        self.steps = steps
        seed_all(seed_of(LOOP, self._seed, steps, turn + 1 if turn else before))

    def stay(self) -> None:
        """Reseed the random number generators for the current position, after a collective call that may use them."""
        self.move_to(self.steps)

    def take(self, step: int, turn: int) -> None:
        """Record that the script has taken a step, or a phase of a step."""
        self._taken = step, turn + 1
        self.used += 1
        self.move_to(step + 1, turn=turn)

    def save(self, steps: int) -> None:
        """Record that the script has saved a checkpoint after this number of steps."""
        self._saved = steps

    def check(self, batch: object, is_phase: bool) -> int:
        """Check that a batch can still be passed to ``step``, and return the number of its phases already taken.

        Args:
            is_phase: whether the call takes one phase of the batch.
        """
        self.check_outermost("session.step")
        if not isinstance(batch, Batch):
            given = "got none" if batch is None else f"not a {type(batch).__name__}"
            raise InputError(f"session.step takes a batch from session.batches(), {given}.")
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
