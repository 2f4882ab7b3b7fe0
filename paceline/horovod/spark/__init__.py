"""Horovod on Spark: a function on the executors of the cluster that this process is connected to."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

from paceline.errors import ConfigError
from paceline.horovod.runner.calls import call_on_workers
from paceline.horovod.runner.hosts import check_counts, of_interfaces, refuse, warn_of

__all__ = ["run"]

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
    check_counts("horovod.spark.run", {"num_proc": num_proc})
    refuse("horovod.spark.run", {"use_mpi": use_mpi, "extra_mpi_args": extra_mpi_args})
    if executable not in (None, sys.executable):
        raise ConfigError(
            f"horovod.spark.run: executable={executable!r}: leave it out; PYSPARK_PYTHON names the executors' Python."
        )
    without = {"stdout": stdout, "stderr": stderr, "prefix_output_with_timestamp": prefix_output_with_timestamp or None}
    warn_of("horovod.spark.run", without)
    session = _session()
    tasks = session.sparkContext.defaultParallelism if num_proc is None else num_proc
    variables = dict(env or {})
    if start_timeout is not None:
        variables["HOROVOD_GLOO_TIMEOUT_SECONDS"] = str(start_timeout)
    if nics:
        variables |= of_interfaces(",".join(sorted(nics)))
    return call_on_workers("horovod.spark.run", fn, args, kwargs, variables, on=session, nodes=tasks)


def _session() -> Any:
    """The session of the cluster that this process is connected to."""
    try:
        from pyspark import SparkContext
        from pyspark.sql import SparkSession
    except ImportError:
        raise ConfigError("horovod.spark.run needs pyspark: pip install 'paceline[spark]'.") from None
    if SparkContext._active_spark_context is None:
        raise ConfigError("horovod.spark.run: there is no SparkContext here; make one, or a SparkSession, before.")
    return SparkSession.builder.getOrCreate()
