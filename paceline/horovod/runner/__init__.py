"""Where scripts written for Horovod look for its launcher: ``horovod.run``."""

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
    """Call a function on many workers, here or by ssh, over :func:`paceline.launch`; gives the results by rank.

    Args:
        func: what each worker calls; it is sent by cloudpickle.
        args: its arguments.
        kwargs: its named arguments.
        num_proc: how many workers.
        min_num_proc: with fewer workers the run waits for others: see ``hvd.elastic``. None: a lost worker ends it.
        max_num_proc: the most workers of such a run; by default ``num_proc``.
        slots: workers of a host that is named without a number; 1 by default.
        reset_limit: without effect.
        cooldown_range: without effect.
        hosts: as in ``h1:4,h2:2``; started by ssh, with the current folder shared by all. None: this machine.
        hostfile: a file of lines such as ``h1 slots=4``, instead.
        start_timeout: seconds that ``hvd.init`` waits for the other workers.
        ssh_port: refused; set it in ``~/.ssh/config``.
        ssh_identity_file: refused, as well.
        disable_cache: without effect: nothing is kept of an earlier start.
        output_filename: without effect: what workers print is in ``runs``.
        verbose: without effect: the progress is always shown.
        use_gloo: true in any case.
        use_mpi: refused if true; so are ``mpi_args``.
        mpi_args: see ``use_mpi``.
        network_interface: names, separated by commas, for gloo and NCCL.
        executable: refused unless it is the Python of this process.
        np: the old name of ``num_proc``.
        min_np: the old name of ``min_num_proc``.
        max_np: the old name of ``max_num_proc``.

    Returns:
        what the function returned on each rank, in their order.

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
