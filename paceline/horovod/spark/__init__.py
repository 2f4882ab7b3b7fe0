"""Horovod on Spark: a function on the executors of the cluster that this process is connected to."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

from paceline.errors import ConfigError
from paceline.horovod.runner.calls import call_on_workers
from paceline.horovod.runner.hosts import check_counts, of_interfaces, refuse, renamed, warn_of

__all__ = ["run", "run_elastic"]

_T = TypeVar("_T")


def run(  # noqa: PLR0913 - the arguments are Horovod's
    fn: Callable[..., _T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    start_timeout: int | None = None,
    use_mpi: bool | None = None,
    use_gloo: bool | None = None,
    extra_mpi_args: str | None = None,
    env: Mapping[str, str] | None = None,
    stdout: Any = None,
    stderr: Any = None,
    verbose: int = 1,
    nics: Collection[str] | None = None,
    prefix_output_with_timestamp: bool = False,
    executable: str | None = None,
) -> list[_T]:
    """Call a function on the executors of Spark, in one barrier stage, over :func:`paceline.launch`.

    Args:
        fn: what each worker calls; it is sent by cloudpickle.
        args: its arguments; a DataFrame becomes a :class:`paceline.ParquetDataset`.
        kwargs: its named arguments.
        num_proc: how many workers, each in a task of its own. None: ``spark.default.parallelism``.
        start_timeout: seconds that ``hvd.init`` waits for the other workers.
        use_mpi: refused if true; so are ``extra_mpi_args``.
        use_gloo: true in any case.
        extra_mpi_args: see ``use_mpi``.
        env: variables of the environment of the workers. Those that this process has, too, stay as a worker has them.
        stdout: without effect: what rank 0 prints is shown, and all is in ``runs``.
        stderr: without effect.
        verbose: without effect: the progress is always shown.
        nics: network interfaces for gloo and NCCL.
        prefix_output_with_timestamp: without effect.
        executable: refused; ``PYSPARK_PYTHON`` names the Python of the executors.

    Returns:
        what the function returned on each rank, in their order.

    Raises:
        ConfigError: an argument cannot be used, or this process is not connected to Spark.
        StartError: Spark has too few slots for the tasks.
        RunFailed: a worker was lost. An exception of the function is raised itself, with rank and traceback added.
    """
    refuse("horovod.spark.run", {"use_mpi": use_mpi, "extra_mpi_args": extra_mpi_args})
    if executable not in (None, sys.executable):
        raise ConfigError(
            f"horovod.spark.run: executable={executable!r}: leave it out; PYSPARK_PYTHON names the executors' Python."
        )
    without = {"stdout": stdout, "stderr": stderr, "prefix_output_with_timestamp": prefix_output_with_timestamp or None}
    warn_of("horovod.spark.run", without)
    session, tasks = _session("horovod.spark.run", num_proc)
    variables = _variables(env, start_timeout, nics)
    return call_on_workers("horovod.spark.run", fn, args, kwargs, variables, on=session, nodes=tasks)


def run_elastic(  # noqa: PLR0913 - the arguments are Horovod's
    fn: Callable[..., _T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    start_timeout: int | None = None,
    elastic_timeout: int | None = None,
    reset_limit: int | None = None,
    env: Mapping[str, str] | None = None,
    stdout: Any = None,
    stderr: Any = None,
    verbose: int = 1,
    nics: Collection[str] | None = None,
    prefix_output_with_timestamp: bool = False,
    min_np: int | None = None,
    max_np: int | None = None,
) -> list[_T]:
    """Call a function on the executors of Spark, which may be lost and come, over :func:`paceline.launch`.

    Each worker has a job of Spark to itself, which is submitted again when its task is lost. The function calls one
    under ``hvd.elastic.run``, which goes on from its last commit.

    Args:
        fn: what each worker calls; it is sent by cloudpickle.
        args: its arguments; a DataFrame becomes a :class:`paceline.ParquetDataset`.
        kwargs: its named arguments.
        num_proc: how many workers. None: ``spark.default.parallelism``.
        min_num_proc: with fewer workers the run waits for others; ``num_proc`` by default.
        max_num_proc: the most workers, as far as there are slots; ``num_proc`` by default.
        start_timeout: seconds that ``hvd.init`` waits for the other workers.
        elastic_timeout: seconds that a run waits for workers below the fewest; 600 by default.
        reset_limit: without effect: a run ends after ten losses without a commit in between.
        env: variables of the environment of the workers. Those that this process has, too, stay as a worker has them.
        stdout: without effect: what rank 0 prints is shown, and all is in ``runs``.
        stderr: without effect.
        verbose: without effect: the progress is always shown.
        nics: network interfaces for gloo and NCCL.
        prefix_output_with_timestamp: without effect.
        min_np: the old name of ``min_num_proc``.
        max_np: the old name of ``max_num_proc``.

    Returns:
        what the function returned on each worker that came to the end, by rank.

    Raises:
        ConfigError: an argument cannot be used, or this process is not connected to Spark.
        StartError: Spark runs no task in time, or its executors cannot start workers.
        RunFailed: too many workers were lost. An exception of the function that ends the run is raised itself, with
            rank and traceback added.
    """
    name = "horovod.spark.run_elastic"
    min_num_proc = renamed("min_np", min_np, "min_num_proc", min_num_proc)
    max_num_proc = renamed("max_np", max_np, "max_num_proc", max_num_proc)
    check_counts(name, {"min_num_proc": min_num_proc, "max_num_proc": max_num_proc})
    timestamp = prefix_output_with_timestamp or None
    without = {"stdout": stdout, "stderr": stderr, "prefix_output_with_timestamp": timestamp}
    warn_of(name, {**without, "reset_limit": reset_limit})
    session, workers = _session(name, num_proc)
    numbers = f"{min_num_proc or workers}:{max_num_proc or max(workers, min_num_proc or 1)}"
    where = {"elastic": numbers, "nodes": numbers, "patience": elastic_timeout or 600.0}
    variables = _variables(env, start_timeout, nics)
    return call_on_workers(name, fn, args, kwargs, variables, on=session, **where)


def _variables(
    given: Mapping[str, str] | None, start_timeout: int | None, nics: Collection[str] | None
) -> dict[str, str]:
    """Those of the workers."""
    seconds = {} if start_timeout is None else {"HOROVOD_GLOO_TIMEOUT_SECONDS": str(start_timeout)}
    return {**(given or {}), **seconds, **(of_interfaces(",".join(sorted(nics))) if nics else {})}


def _session(function: str, num_proc: int | None) -> tuple[Any, int]:
    """The session of the cluster that this process is connected to, and how many workers are wanted.

    Raises:
        ConfigError: there is none, or the number is none.
    """
    check_counts(function, {"num_proc": num_proc})
    try:
        from pyspark import SparkContext
        from pyspark.sql import SparkSession
    except ImportError:
        raise ConfigError(f"{function} needs pyspark: pip install 'paceline[spark]'.") from None
    if SparkContext._active_spark_context is None:
        raise ConfigError(f"{function}: there is no SparkContext here; make one, or a SparkSession, before.")
    session = SparkSession.builder.getOrCreate()
    return session, session.sparkContext.defaultParallelism if num_proc is None else num_proc
