"""Records of a run as a Parquet file, for DuckDB, Polars and other tools."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError
from paceline.observe.index import columns_of
from paceline.observe.records import Record

_GROUP = 100_000  # records of a row group, which are in memory at once


def write(records: Iterable[tuple[int, Record]], path: Path) -> int:
    """Write records with the columns of the index. Return their number."""
    try:
        import pyarrow
        from pyarrow.parquet import ParquetWriter
    except ImportError:
        raise ConfigError("--parquet needs pyarrow: install it with pip install 'paceline[parquet]'.") from None
    kinds: Any = {"float": pyarrow.float64(), "int": pyarrow.int64(), "str": pyarrow.string()}
    names = ("time", "rank", "generation", "event", "step", "seconds", "bytes", "record")
    types = ("float", "str", "int", "str", "int", "float", "int", "str")
    schema = pyarrow.schema([(name, kinds[kind]) for name, kind in zip(names, types, strict=True)])
    count = 0
    try:
        with ParquetWriter(path, schema) as file:
            for rows in _groups(_row(record) for _, record in records):
                file.write_table(pyarrow.table(dict(zip(names, zip(*rows, strict=True), strict=True)), schema=schema))
                count += len(rows)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}. Name another file.") from None
    return count


def _row(record: Record) -> tuple[Any, ...]:
    time, rank, *rest = columns_of(record)
    return float(time), str(rank), *rest, json.dumps(record)


def _groups(rows: Iterator[tuple[Any, ...]]) -> Iterator[list[tuple[Any, ...]]]:
    while group := list(islice(rows, _GROUP)):
        yield group
