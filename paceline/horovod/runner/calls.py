"""A function of a script for Horovod, as :func:`paceline.launch` calls it on each worker."""

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
"""For the worker that has failed to say why, before others say that they lost it."""


def call_on_workers(
    name: str,
    function: Callable[..., Any],
    arguments: Sequence[Any] | None,
    named: Mapping[str, Any] | None,
    variables: Mapping[str, str],
    **where: Any,
) -> list[Any]:
    """Call a function on workers, which find ``horovod``, and return the results by rank.

    Args:
        name: of what the user has called, for errors.
        function: what each worker calls.
        arguments: of the function.
        named: more of them.
        variables: of the environment, set before the call; those that this process has, too, only where they are not
            set: they may say who it is.
        **where: what :func:`paceline.launch` takes.

    Raises:
        ConfigError: the arguments cannot be used, or this process is one of several workers itself.
        RunFailed: the run failed without an exception of the function; one of the function is raised itself.
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
    """In a worker: prepare the process, and call the function."""
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
    """Let this exception end the run, also where workers are replaced; the first cause is that of the run."""
    launched, run = env.launch_info(), env.run_directory()
    if launched is None or run is None:
        return
    if type(error) is HorovodInternalError:
        time.sleep(_CAUSE_SECONDS)
    who, path = env.identity(), run / "errors" / f"{launched.name}.json"
    excepthook.install(lambda: (who.rank, who.world_size), path, lambda: 0, lambda: None, lambda text: "")
