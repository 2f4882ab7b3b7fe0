"""Calls of a Horovod script's function on workers by :func:`paceline.launch`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial, update_wrapper
from typing import Any

import paceline
from paceline.environments import env
from paceline.errors import ConfigError
from paceline.horovod import unchanged
from paceline.horovod.errors import HorovodInternalError
from paceline.system import excepthook

_CAUSE_SECONDS = 5.0
"""Delay before a HorovodInternalError is recorded, so that the failed worker records the cause before its peers."""


def call_on_workers(
    name: str,
    function: Callable[..., Any],
    arguments: Sequence[Any] | None,
    named: Mapping[str, Any] | None,
    variables: Mapping[str, str],
    **where: Any,
) -> list[Any]:
    """Call a function on workers that can import ``horovod``, and return the results by rank.

    Args:
        variables: environment variables to set before the call. Variables that have the same value in this process do
            not replace those of a worker, because they may hold the identity of this process.
        **where: keyword arguments of :func:`paceline.launch`.

    Raises:
        ConfigError: the arguments cannot be used, or this process is one of several workers itself.
        RunFailed: the run failed without an exception of the function, which would be raised itself.
    """
    if (size := env.identity().world_size) > 1:
        raise ConfigError(
            f"{name} starts its own workers, and this process is one of {size}: start the script as one process."
        )
    here = env.inherited()
    others = {variable: value for variable, value in variables.items() if here.get(variable) != value}
    once = where.get("elastic") is None
    call = partial(_call, function, dict(named or {}), others, dict(variables), once)
    return paceline.launch(update_wrapper(call, function, ("__name__",), ()), *(arguments or ()), **where)


def _call(
    function: Callable[..., Any],
    named: dict[str, Any],
    variables: dict[str, str],
    defaults: dict[str, str],
    once: bool,
    *arguments: Any,
) -> Any:
    """Prepare a worker process and call the function in it."""
    for name, value in variables.items():
        env.put(name, value)
    for name, value in defaults.items():
        env.set_default(name, value)
    unchanged.make_importable()
    try:
        return function(*arguments, **named)
    except Exception as error:
        if once:
            _end_the_run(error)
        raise


def _end_the_run(error: Exception) -> None:
    """Make this exception end the run even if lost workers are replaced. The first recorded cause is the run's."""
    launched, run = env.launch_info(), env.run_directory()
    if launched is None or run is None:
        return
    if type(error) is HorovodInternalError:
        time.sleep(_CAUSE_SECONDS)
    who, path = env.identity(), run / "errors" / f"{launched.name}.json"
    excepthook.install(lambda: (who.rank, who.world_size), path, lambda: 0, lambda: None, lambda text: "")
