"""Launcher ``horovod.run`` under Horovod's module path."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from paceline.errors import ConfigError
from paceline.horovod.runner.calls import call_on_workers
from paceline.horovod.runner.hosts import check_counts, check_others, check_python, fill, renamed, worker_variables

_T = TypeVar("_T")


def run(  # noqa: PLR0913 - the arguments are Horovod's
    func: Callable[..., _T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    *,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    start_timeout: int | None = None,
    network_interface: str | None = None,
    executable: str | None = None,
    **others: Any,
) -> list[_T]:
    """Call a function on workers of this machine or over ssh by :func:`paceline.launch`. Return the results by rank.

    Args:
        func: function that each worker calls, sent by cloudpickle.
        args: positional arguments of the function.
        kwargs: keyword arguments of the function.
        num_proc: number of workers. Defaults to 1.
        min_num_proc: minimum number of workers, below which an elastic run waits. See ``hvd.elastic``.
        max_num_proc: maximum number of workers of an elastic run. Without both, the loss of a worker ends the run.
        slots: number of workers on a host that is listed without a number. Defaults to 1.
        hosts: hosts such as ``h1:4,h2:2``, reached by ssh, which share the current folder. Defaults to this machine.
        hostfile: file with lines such as ``h1 slots=4``, instead of ``hosts``.
        start_timeout: timeout in seconds for the other workers in ``hvd.init``.
        network_interface: comma-separated names of network interfaces for gloo and NCCL.
        executable: refused unless it is the Python of this process.
        others: further arguments of Horovod: the deprecated ``np``, ``min_np`` and ``max_np``, and those that are
            refused or have no effect (``runner.hosts``).

    Returns:
        the return values of the function, by rank.

    Raises:
        ConfigError: an argument cannot be used.
        RunFailed: a worker was lost. An exception of the function is raised itself, with rank and traceback added.
    """
    num_proc = renamed(others, "np", "num_proc", num_proc)
    num_proc = 1 if num_proc is None else num_proc
    min_num_proc = renamed(others, "min_np", "min_num_proc", min_num_proc)
    max_num_proc = renamed(others, "max_np", "max_num_proc", max_num_proc)
    counts = {"num_proc": num_proc, "min_num_proc": min_num_proc, "max_num_proc": max_num_proc, "slots": slots}
    check_counts("horovod.run", counts)
    check_others("horovod.run", others)
    check_python("horovod.run", executable, f"workers run {sys.executable}; leave it out")
    if hosts is not None and hostfile is not None:
        raise ConfigError("horovod.run: give hosts or hostfile, not both.")
    num_proc = max(num_proc, min_num_proc or 0)
    workers, there = fill(hosts, hostfile, slots or 1, num_proc)
    variables = worker_variables(start_timeout, network_interface)
    where: dict[str, Any] = {"workers": workers} if there is None else {"on": "ssh", "hosts": there}
    if min_num_proc is not None or max_num_proc is not None:
        where["elastic"] = f"{min_num_proc or num_proc}:{max_num_proc or num_proc}"
    return call_on_workers("horovod.run", func, args, kwargs, variables, **where)
