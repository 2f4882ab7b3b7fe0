"""Writer of a Spark DataFrame to Parquet files.

The rows of a DataFrame have no fixed order: after a shuffle it depends on which executor finished first. So rows are
sorted by a hash of all columns. Spark numbers the files by ranges of that hash, and samples are numbered file by file,
so a row has the same number for any number of files and executors.

Shards for ``Located`` are not sorted, because that moves rows between machines: each partition becomes a file.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError, InputError

_READABLE = re.compile(r"string|binary|(array<)*(boolean|tinyint|smallint|int|bigint|float|double)>*")
_VECTOR = "vector"
"""Type name of pyspark.ml's vectors."""
_ROW_GROUP_BYTES = 2**20
"""Small, because samples are read in random order. Spark's default is 128 times as large."""
_IN_PLACE = {"mapreduce.fileoutputcommitter.algorithm.version": "2"}
"""Executors move their files into the folder. With version 1 the driver does, but sees only those of its machine."""


def write(frame: Any, folder: str | Path, *, in_place: bool = False) -> int:
    """Write the rows in one pass and return their number.

    Args:
        in_place: write each partition on the machine that computes it, to a folder on its disk.
    """
    try:
        from pyspark.ml.functions import vector_to_array
        from pyspark.sql import Observation, functions
    except ImportError as error:
        raise ConfigError(f"A DataFrame needs pyspark: pip install 'paceline[spark]' ({error}).") from None
    columns = []
    for one in frame.schema.fields:
        column = functions.col(_quoted(one.name))
        kind = one.dataType.simpleString()
        if kind != _VECTOR and _READABLE.fullmatch(kind) is None:
            raise InputError(
                f"Column {one.name!r} of the DataFrame is of type {kind}; only numbers, texts, bytes, vectors, and "
                f"arrays of numbers can be read. Convert it, or select the others."
            )
        columns.append(vector_to_array(column).alias(one.name) if kind == _VECTOR else column)
    plain = frame.select(*columns)
    names = [functions.col(_quoted(name)) for name in plain.columns]
    counted, rows = Observation(), functions.count(functions.lit(1)).alias("rows")
    ordered = plain if in_place else plain.orderBy(functions.xxhash64(*names), *names)
    options = {"parquet.block.size": str(_ROW_GROUP_BYTES), **(_IN_PLACE if in_place else {})}
    try:
        ordered.observe(counted, rows).write.options(**options).parquet(_url(folder))
    except Exception as error:
        if "PATH_ALREADY_EXISTS" not in str(error):
            raise
        raise InputError(
            f"{folder} is there already. Read it by paceline.ParquetDataset, or name another folder."
        ) from None
    return int(counted.get["rows"])


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


def _url(folder: str | Path) -> str:
    """Return the folder as a URL, because Spark may resolve a plain path on another file system."""
    text = os.fspath(folder)
    return text if "://" in text else Path(text).absolute().as_uri()
