"""Horovod on Spark: functions on the executors of the cluster to which this process is connected."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

from paceline.errors import ConfigError
from paceline.horovod.runner.calls import call_on_workers
from paceline.horovod.runner.hosts import check_counts, check_others, check_python, renamed, worker_variables

__all__ = ["run", "run_elastic"]

_T = TypeVar("_T")


def run(  # noqa: PLR0913 - the arguments are Horovod's
    fn: Callable[..., _T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    *,
    start_timeout: int | None = None,
    env: Mapping[str, str] | None = None,
    nics: Collection[str] | None = None,
    executable: str | None = None,
    **others: Any,
) -> list[_T]:
    """Call a function on Spark's executors by :func:`paceline.launch`.

    Args:
        fn: function that each worker calls, sent by cloudpickle.
        args: positional arguments of the function. A DataFrame becomes a :class:`paceline.ParquetDataset`.
        kwargs: keyword arguments of the function.
        num_proc: number of workers, each in its own task. Defaults to ``spark.default.parallelism``.
        start_timeout: timeout in seconds for the other workers in ``hvd.init``.
        env: environment variables of the workers. Variables equal to this process's do not replace a worker's own.
        nics: network interfaces for gloo and NCCL.
        executable: refused unless it is this process's Python. ``PYSPARK_PYTHON`` names the executors' Python.
        others: further arguments of Horovod, which are refused or have no effect (``runner.hosts``).

    Returns:
        the return values of the function, by rank.

    Raises:
        ConfigError: an argument cannot be used, or this process is not connected to Spark.
        StartError: Spark has too few slots for the tasks, or its executors cannot start workers.
        RunFailed: a worker was lost. An exception of the function is raised itself, with rank and traceback added.
    """
    check_others("horovod.spark.run", others)
    check_python("horovod.spark.run", executable, "leave it out; PYSPARK_PYTHON names the executors' Python")
    session, tasks = _session("horovod.spark.run", num_proc)
    variables = {**(env or {}), **worker_variables(start_timeout, nics)}
    return call_on_workers("horovod.spark.run", fn, args, kwargs, variables, on=session, nodes=tasks)


def run_elastic(  # noqa: PLR0913 - the arguments are Horovod's
    fn: Callable[..., _T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    *,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    start_timeout: int | None = None,
    elastic_timeout: int | None = None,
    env: Mapping[str, str] | None = None,
    nics: Collection[str] | None = None,
    **others: Any,
) -> list[_T]:
    """Call a function on Spark's executors by :func:`paceline.launch`, in an elastic run.

    Each worker has its own Spark job, which is submitted again when its task is lost. The function calls another
    function under ``hvd.elastic.run``, which continues from its last commit.

    Args:
        fn, args, kwargs, start_timeout, env, nics, others: as for :func:`run`, with the deprecated ``min_np`` and
            ``max_np``. A run ends after ten losses without a commit in between.
        num_proc: number of workers. Defaults to ``spark.default.parallelism``.
        min_num_proc: minimum number of workers, below which the run waits. Defaults to ``num_proc``.
        max_num_proc: maximum number of workers, if there are enough slots. Defaults to ``num_proc``.
        elastic_timeout: timeout in seconds for reaching ``min_num_proc`` workers. Defaults to 600.

    Returns:
        the return values of the function on the workers that finished, by rank.

    Raises:
        ConfigError: an argument cannot be used, or this process is not connected to Spark.
        StartError: Spark runs no task before the timeout, or its executors cannot start workers.
        RunFailed: too many workers were lost. An exception of the function that ends the run is raised itself, with
            rank and traceback added.
    """
    name = "horovod.spark.run_elastic"
    min_num_proc = renamed(others, "min_np", "min_num_proc", min_num_proc)
    max_num_proc = renamed(others, "max_np", "max_num_proc", max_num_proc)
    check_counts(name, {"min_num_proc": min_num_proc, "max_num_proc": max_num_proc})
    check_others(name, others)
    session, workers = _session(name, num_proc)
    numbers = f"{min_num_proc or workers}:{max_num_proc or max(workers, min_num_proc or 1)}"
    where = {"elastic": numbers, "nodes": numbers, "patience": elastic_timeout or 600.0}
    variables = {**(env or {}), **worker_variables(start_timeout, nics)}
    return call_on_workers(name, fn, args, kwargs, variables, on=session, **where)


def _session(function: str, num_proc: int | None) -> tuple[Any, int]:
    """Return the Spark session of this process and the number of workers."""
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
