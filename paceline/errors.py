"""Exceptions that Paceline raises.

::

    PacelineError
    ├── ConfigError (ValueError)        a setting is invalid; nothing has started
    ├── InputError (ValueError)         the model, the loss or the data is unusable
    │   └── NonFiniteLoss               a loss is NaN or infinite: step, microbatch, rank
    ├── StartError                      the workers could not connect before training
    │   └── DisagreementError           workers differ in code, configuration, versions, weights or step
    ├── RunFailed                       the workers that paceline.launch started have failed
    ├── CheckpointError                 a checkpoint could not be written, read or matched
    └── WorkerLost                      another worker has exited
        └── WorkerSilent                another worker is alive but did not respond before the timeout

Each message says what is wrong, with which values, and what to do. ``exit_code`` is the exit code of a process in which
the error is not caught.
"""

from __future__ import annotations

from collections.abc import Iterable

PREEMPTED = 75
"""Exit code of a preempted worker or run, which can be resumed: EX_TEMPFAIL of sysexits.h."""
DEADLINE_PASSED = 124
"""Exit code of a run that was ended because of a hang, the same as that of ``timeout``."""
EXIT_CODES = {
    "0": "success",
    "1": "the script failed (or its own code)",
    "2": "wrong usage or settings",
    "3": "the workers could not start or do not agree",
    "4": "a checkpoint could not be written, read or matched",
    "5": "a worker was lost for good",
    str(PREEMPTED): "preempted: start it again with --resume",
    str(DEADLINE_PASSED): "a deadline passed because something hangs",
    "128 + n": "ended by signal n",
}
"""Meanings of the exit codes of ``paceline run``."""


class PacelineError(Exception):
    """Base class of all Paceline errors."""

    exit_code = 1


class ConfigError(PacelineError, ValueError):
    """A setting is unknown, has an invalid value, or conflicts with another setting."""

    exit_code = 2


class InputError(PacelineError, ValueError):
    """The model, loss, optimizer or data set is unusable."""

    exit_code = 2


class NonFiniteLoss(InputError):
    """The loss of a microbatch is NaN or infinite."""

    exit_code = 1


class StartError(PacelineError):
    """The workers could not connect to each other before training."""

    exit_code = 3


class DisagreementError(StartError):
    """The workers differ in what they train, in their state, or in their position in the script."""


class RunFailed(PacelineError):
    """Workers that :func:`paceline.launch` started have failed, other than by an exception of the function.

    ``exit_code`` is the exit code of the run.
    """

    def __init__(self, message: str = "", exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class CheckpointError(PacelineError):
    """A checkpoint could not be written or read, or does not match the model."""

    exit_code = 4


class WorkerLost(PacelineError):
    """Another worker has exited or cannot be reached.

    This error is a consequence: the output of the lost worker has the cause. ``ranks`` are the ranks whose processes
    are known to have ended.
    """

    exit_code = 5

    def __init__(self, message: str = "", ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class WorkerSilent(WorkerLost):
    """Another worker did not respond before the timeout: it is stopped, or busy with something else."""

    exit_code = DEADLINE_PASSED


def name_ranks(ranks: Iterable[int], workers: int | None = None, most: int | None = None) -> str:
    """Return ranks as text for a message: ``rank 1``, ``ranks 0, 2``, or ``all 4 workers``.

    Args:
        ranks: ranks to name.
        workers: number of workers. If given, the complete set of ranks becomes ``all 4 workers``.
        most: largest number of ranks to list before ``and 3 more``. Defaults to no limit.
    """
    listed = sorted(ranks)
    if len(listed) == 1:
        return f"rank {listed[0]}"
    if len(listed) == workers:
        return f"all {workers} workers"
    more = f" and {len(listed) - most} more" if most is not None and len(listed) > most else ""
    return f"ranks {', '.join(map(str, listed[:most]))}{more}"


def counted(count: int, what: str) -> str:
    """Return a count as text for a message: ``1 worker``, ``2 workers``."""
    return f"{count} {what}{'' if count == 1 else 's'}"


def name_microbatches(microbatches: range) -> str:
    """Return microbatches as text for a message: ``microbatch 3``, or ``microbatches 4 to 7``."""
    if len(microbatches) == 1:
        return f"microbatch {microbatches.start}"
    return f"microbatches {microbatches.start} to {microbatches.stop - 1}"
