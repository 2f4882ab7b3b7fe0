"""Guards of optimizers.

Only the session calls ``step``: a script that calls it too would update the model twice. And no other code may
mistake the state of an optimizer for the whole state while it is divided among the workers.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

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
_ENDED: WeakSet[Optimizer] = WeakSet()  # optimizers of ended sessions that have a part of their state only


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


def guard_parts(optimizer: Optimizer) -> Callable[[], None]:
    """Refuse the state of an optimizer to the script while this worker has a part of it.

    ``state_dict``, ``load_state_dict`` and ``state[parameter]`` raise, except for a parameter that has a state here. A
    copy belongs to the script, as in :func:`refuse_other_steps`. A ``state`` without default has no guard of its own.

    Returns:
        function that ends this.
    """
    hooks = [
        optimizer.register_state_dict_pre_hook(_refuse),
        optimizer.register_load_state_dict_pre_hook(_refuse),
    ]
    state = optimizer.state
    if isinstance(state, defaultdict):
        state.default_factory = _BeginState()

    def end() -> None:
        if isinstance(state, defaultdict):
            state.default_factory = dict
        for hook in hooks:
            hook.remove()

    return end


class _BeginState:
    """Function that returns the state of a parameter that the optimizer updates for the first time."""

    def __call__(self) -> dict[str, Any]:
        if not updating.depth:
            _refuse()
        return {}

    def __reduce__(self) -> tuple[Callable[[object], type], tuple[object]]:
        """Become ``dict`` in a copy."""
        return type, ({},)


def refuse_parts(optimizer: Optimizer) -> None:
    """Refuse an optimizer of an ended session, which has a part of its state only, for ever."""
    for one in parts_of(optimizer):
        guard_parts(one)
        _ENDED.add(one)


def check_whole(optimizer: Optimizer) -> None:
    """Raise InputError if an earlier session has left only a part of an optimizer's state on this worker."""
    if optimizer in _ENDED:
        _refuse()


def _refuse(*_: object) -> None:
    raise InputError(
        "This worker has only a part of the optimizer's state, because strategy 'sharded' divides it. Save it with "
        "session.save() and load it with resume=, or use strategy 'allreduce'."
    )
