"""Everything that Paceline raises on purpose.

::

    PacelineError
    ├── ConfigError (ValueError)        a setting that cannot be used; nothing has started
    ├── InputError (ValueError)         the model, the loss or the data cannot be used as given
    │   └── NonFiniteLoss               a loss is NaN or infinite: step, microbatch, rank
    ├── StartError                      the workers could not be brought together
    │   └── DisagreementError           workers differ in code, configuration, versions, weights or step
    ├── CheckpointError                 a checkpoint could not be written, read or matched
    ├── RunFailed                       the workers that ``paceline.launch`` started have failed
    └── WorkerLost                      another worker went away
        └── WorkerSilent                it is there, but stayed silent past the deadline

Each message says what is wrong, with which values, and what to do. ``exit_code`` is what the process
ends with when nobody catches the error.
"""

from __future__ import annotations

from collections.abc import Iterable

PREEMPTED = 75
"""The exit code of a worker, and of a run, that can be resumed: EX_TEMPFAIL of sysexits.h."""
DEADLINE_PASSED = 124
"""The exit code of a run that a hang has ended, as of ``timeout``."""
EXIT_CODES = {
    "0": "success",
    "1": "the script failed (or its own code)",
    "2": "wrong usage or settings",
    "3": "the workers could not start or do not agree",
    "4": "a checkpoint",
    "5": "a worker was lost for good",
    str(PREEMPTED): "preempted: start it again with --resume",
    str(DEADLINE_PASSED): "a deadline passed, something hangs",
    "128 + n": "ended by signal n",
}
"""What the exit codes of ``paceline run`` mean."""


class PacelineError(Exception):
    """Any error that Paceline raises on purpose."""

    exit_code = 1


class ConfigError(PacelineError, ValueError):
    """A setting that cannot be used: unknown, of the wrong kind, or against another one."""

    exit_code = 2


class InputError(PacelineError, ValueError):
    """The model, loss, optimizer or data set cannot be used as given."""

    exit_code = 2


class NonFiniteLoss(InputError):
    """The loss of a microbatch is NaN or infinite."""

    exit_code = 1


class StartError(PacelineError):
    """The workers could not be brought together before training."""

    exit_code = 3


class DisagreementError(StartError):
    """The workers do not agree on what they train, or on what they have come to."""


class RunFailed(PacelineError):
    """The workers that :func:`paceline.launch` started have failed, not by an exception of the function.

    ``exit_code`` is that of the run.
    """

    def __init__(self, message: str = "", exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class CheckpointError(PacelineError):
    """A checkpoint could not be written, read or matched with the model."""

    exit_code = 4


class WorkerLost(PacelineError):
    """Another worker went away.

    This is a consequence: see the output of the lost worker for the cause. ``ranks`` are those whose
    process is known to have ended.
    """

    exit_code = 5

    def __init__(self, message: str = "", ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class WorkerSilent(WorkerLost):
    """Another worker stayed silent past the deadline: it is stopped, or busy with something else."""

    exit_code = DEADLINE_PASSED


def name_ranks(ranks: Iterable[int], workers: int | None = None, most: int | None = None) -> str:
    """Name ranks in a message: ``rank 1``, ``ranks 0, 2``, or ``all 4 workers``.

    Args:
        ranks: which ones.
        workers: how many there are; none: list them all the same.
        most: how many to list before ``and 3 more``.
    """
    listed = sorted(ranks)
    if len(listed) == 1:
        return f"rank {listed[0]}"
    if len(listed) == workers:
        return f"all {workers} workers"
    more = f" and {len(listed) - most} more" if most is not None and len(listed) > most else ""
    return f"ranks {', '.join(map(str, listed[:most]))}{more}"


def name_microbatches(microbatches: range) -> str:
    """Name microbatches in a message: ``microbatch 3``, or ``microbatches 4 to 7``."""
    if len(microbatches) == 1:
        return f"microbatch {microbatches.start}"
    return f"microbatches {microbatches.start} to {microbatches.stop - 1}"
