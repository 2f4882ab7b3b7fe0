"""Writer of the tables of data engines to files that stay on the machines that have the rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.data.tables import data_frame, parquet_files, ray_data
from paceline.data.tables.engines import writer_of
from paceline.errors import InputError


def write_shards(table: Any, folder: str | Path) -> int:
    """Write a Spark DataFrame or Ray Dataset to Parquet files on the machines that have its rows.

    Each partition or block becomes a file, a shard for :class:`~paceline.data.Located`. Compare the number of rows with
    those that the workers find, because this process does not see the files of other machines.

    Args:
        table: a ``pyspark.sql.DataFrame`` or a ``ray.data.Dataset``.
        folder: path of a folder on a disk of each machine. It must not exist yet.

    Returns:
        The number of rows.

    Raises:
        ConfigError: the engine or pyarrow is not installed.
        InputError: ``table`` is neither, a column cannot be read, or the folder exists on this machine.
    """
    writer = writer_of(table)
    if writer is None:
        raise InputError(f"write_shards takes a DataFrame of Spark or a Dataset of Ray, not a {type(table).__name__}.")
    if writer == "from_ray":
        return ray_data.write(table, folder)[0]
    parquet_files.check_installed()
    return data_frame.write(table, folder, in_place=True)
