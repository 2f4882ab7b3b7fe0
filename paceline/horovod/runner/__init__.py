"""Launcher ``horovod.run`` under Horovod's module path."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from paceline.errors import ConfigError
from paceline.horovod.runner.calls import call_on_workers
from paceline.horovod.runner.hosts import check_counts, fill, of_interfaces, refuse, renamed, warn_of

_T = TypeVar("_T")


def run(  # noqa: PLR0913 - the arguments are Horovod's
    func: Callable[..., _T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: Sequence[int] | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    start_timeout: int | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,
    output_filename: str | None = None,
    verbose: bool | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
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
        reset_limit: has no effect.
        cooldown_range: has no effect.
        hosts: hosts such as ``h1:4,h2:2``, reached by ssh, which share the current folder. Defaults to this machine.
        hostfile: file with lines such as ``h1 slots=4``, instead of ``hosts``.
        start_timeout: timeout in seconds for the other workers in ``hvd.init``.
        ssh_port: refused. Set it in ``~/.ssh/config``.
        ssh_identity_file: refused. Set it in ``~/.ssh/config``.
        disable_cache: has no effect, because nothing is cached between starts.
        output_filename: has no effect. The output of workers is in ``runs``.
        verbose: has no effect. Progress is always shown.
        use_gloo: has no effect. Gloo is always used.
        use_mpi: refused if true.
        mpi_args: refused.
        network_interface: comma-separated names of network interfaces for gloo and NCCL.
        executable: refused unless it is the Python of this process.
        np: deprecated name of ``num_proc``.
        min_np: deprecated name of ``min_num_proc``.
        max_np: deprecated name of ``max_num_proc``.

    Returns:
        the return values of the function, by rank.

    Raises:
        ConfigError: an argument cannot be used.
        RunFailed: a worker was lost. An exception of the function is raised itself, with rank and traceback added.
    """
    given = renamed("np", np, "num_proc", num_proc if num_proc != 1 else None)
    num_proc = 1 if given is None else given
    min_num_proc = renamed("min_np", min_np, "min_num_proc", min_num_proc)
    max_num_proc = renamed("max_np", max_np, "max_num_proc", max_num_proc)
    counts = {"num_proc": num_proc, "min_num_proc": min_num_proc, "max_num_proc": max_num_proc, "slots": slots}
    check_counts("horovod.run", counts)
    refused = {"ssh_port": ssh_port, "ssh_identity_file": ssh_identity_file, "use_mpi": use_mpi, "mpi_args": mpi_args}
    refuse("horovod.run", refused)
    if executable not in (None, sys.executable):
        raise ConfigError(f"horovod.run: executable={executable!r}: workers run {sys.executable}; leave it out.")
    if hosts is not None and hostfile is not None:
        raise ConfigError("horovod.run: give hosts or hostfile, not both.")
    without = {
        "output_filename": output_filename,
        "reset_limit": reset_limit,
        "cooldown_range": cooldown_range,
        "disable_cache": disable_cache,
    }
    warn_of("horovod.run", without)
    num_proc = max(num_proc, min_num_proc or 0)
    workers, there = fill(hosts, hostfile, slots or 1, num_proc)
    variables = {} if start_timeout is None else {"HOROVOD_GLOO_TIMEOUT_SECONDS": str(start_timeout)}
    if network_interface is not None:
        variables |= of_interfaces(network_interface)
    where: dict[str, Any] = {"workers": workers} if there is None else {"on": "ssh", "hosts": there}
    if min_num_proc is not None or max_num_proc is not None:
        where["elastic"] = f"{min_num_proc or num_proc}:{max_num_proc or num_proc}"
    return call_on_workers("horovod.run", func, args, kwargs, variables, **where)
