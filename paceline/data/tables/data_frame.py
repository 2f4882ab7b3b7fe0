"""Write a DataFrame of Spark as Parquet files, in an order that follows from its rows alone.

The rows of a DataFrame have no order: after a shuffle it depends on which executor was quicker. So they are sorted by
a hash of all their columns. Spark numbers the files by ranges of that hash, and samples are numbered by file: however
many files and executors there are, a row has the same number.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError, InputError

_READABLE = re.compile(r"string|binary|(array<)*(boolean|tinyint|smallint|int|bigint|float|double)>*")
_VECTOR = "vector"
"""What pyspark.ml makes of numbers."""
_ROW_GROUP_BYTES = 2**20
"""Small, as samples are read in a random order; Spark's own are 128 times as large."""


def write(frame: Any, folder: str | Path) -> int:
    """Write the rows once; gives their number.

    Raises:
        ConfigError: pyspark is not installed.
        InputError: a column is of a type that a data set cannot read, or the folder is there already.
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
                f"Column {one.name!r} of the DataFrame is of type {kind}; what can be read are numbers, texts, bytes, "
                f"vectors, and arrays of numbers. Convert it, or select the others."
            )
        columns.append(vector_to_array(column).alias(one.name) if kind == _VECTOR else column)
    plain = frame.select(*columns)
    names = [functions.col(_quoted(name)) for name in plain.columns]
    counted, rows = Observation(), functions.count(functions.lit(1)).alias("rows")
    ordered = plain.orderBy(functions.xxhash64(*names), *names).observe(counted, rows)
    try:
        ordered.write.option("parquet.block.size", str(_ROW_GROUP_BYTES)).parquet(_url(folder))
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
    """As Spark reads it, for which a plain path may be one of another file system."""
    text = os.fspath(folder)
    return text if "://" in text else Path(text).absolute().as_uri()
