"""Guard of optimizers: only the session calls ``step``. A script that calls it too would update the model twice."""

from __future__ import annotations

import threading
from typing import Any

from torch.optim import Optimizer

from paceline.errors import InputError
from paceline.step.optimizers.several import parts_of, with_wrapped
from paceline.system.torch_internals import STEP_HOOKS


class _Updating(threading.local):
    """Context in which a thread may call ``step`` of a session's optimizers. Servers update in their own threads."""

    depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *error: object) -> None:
        self.depth -= 1


updating = _Updating()


def refuse_other_steps(optimizer: Optimizer) -> None:
    """Make ``step`` of an optimizer, and of the optimizers that it wraps, raise outside ``updating``.

    A copy by ``copy.deepcopy`` or pickle has no hooks and belongs to the script. A wrapper that does not call the
    constructor of ``Optimizer`` has no hooks either, but the optimizer that it wraps has.
    """
    for one in (inner for part in parts_of(optimizer) for inner in with_wrapped(part)):
        if hasattr(one, STEP_HOOKS[0]):
            one.register_step_pre_hook(_check)


def _check(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Raise InputError if ``step`` is called outside ``updating``. This is the hook."""
    if not updating.depth:
        raise InputError(
            f"The script calls step() of the optimizer {type(optimizer).__name__}, which session.step(batch) does: the "
            f"model would be updated twice. Remove optimizer.step() from the script, and the loss.backward() and "
            f"optimizer.zero_grad() that go with it. A further loss is added in forward(model, microbatch)."
        )
