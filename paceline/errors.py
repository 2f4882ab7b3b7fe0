"""Everything that Paceline raises on purpose.

::

    PacelineError
    ├── ConfigError (ValueError)        a setting that cannot be used; nothing has started
    ├── InputError (ValueError)         the model, the loss or the data cannot be used as given
    │   └── NonFiniteLoss               a loss is NaN or infinite: step, microbatch, rank
    ├── StartError                      the workers could not be brought together
    │   └── DisagreementError           workers differ in code, configuration, versions, weights or step
    ├── CheckpointError                 a checkpoint could not be written, read or matched
    └── WorkerLost                      another worker went away or stayed silent past the deadline

Each message says what is wrong, with which values, and what to do. ``exit_code`` is what the process
ends with when nobody catches the error.
"""

from __future__ import annotations


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
    """The workers do not agree on what they are about to train."""


class CheckpointError(PacelineError):
    """A checkpoint could not be written, read or matched with the model."""

    exit_code = 4


class WorkerLost(PacelineError):
    """Another worker went away, or stayed silent past the deadline.

    This is a consequence: the cause stands in the output of the worker that was lost.
    """

    exit_code = 5
