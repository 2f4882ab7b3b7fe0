"""Map-style data set over Parquet files.

::

    files, by path      part-0.parquet        part-1.parquet
    row groups          [0      ) [1        ) [0      )
    samples             0 ... 999 1000 ... 2k 2k ...

The number of a sample is its position in all files in order, so it depends only on the files' content.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from paceline.data.tables import data_frame, parquet_files, ray_data
from paceline.data.tables.parquet_files import Column
from paceline.errors import InputError

_GIGABYTE = 10**9
_MOST_FOOTERS = 64


class ParquetDataset(Dataset[Any]):
    """Map-style data set of the rows of Parquet files, read by row group on demand.

    A number becomes a 0-dimensional tensor, a list of numbers a 1-dimensional tensor, a list of lists a 2-dimensional
    tensor. Text becomes ``str``, binary data ``bytes``.

    Args:
        paths: file, folder to search for ``*.parquet``, or a sequence of both. pyarrow opens URLs (``s3://``,
            ``gs://``, ``hdfs://``).
        columns: columns of a sample, which is a tuple in this order. Without it, a sample is a dict of all columns.
        transform: function that makes the sample from that tuple or dict.
        memory_gigabytes: cache size in each process for decoded row groups, in GB. At least one row group is kept.

    Raises:
        ConfigError: pyarrow is not installed.
        InputError: a path does not exist, a column is missing or cannot be read, the files differ, or
            ``memory_gigabytes`` is negative.
    """

    def __init__(
        self,
        paths: str | Path | Sequence[str | Path],
        columns: Sequence[str] | None = None,
        transform: Callable[[Any], Any] | None = None,
        memory_gigabytes: float = 1.0,
    ) -> None:
        if isinstance(columns, str):
            raise InputError(f"columns = {columns!r}: give a list of names, such as [{columns!r}].")
        if not memory_gigabytes >= 0:
            raise InputError(f"memory_gigabytes = {memory_gigabytes}: give 0 or more.")
        given = [paths] if isinstance(paths, str | Path) else list(paths)
        if not given:
            raise InputError("No Parquet file is given.")
        found = parquet_files.find([os.fspath(one) for one in given], columns)
        self._reader = _Reader(found, int(memory_gigabytes * _GIGABYTE))
        self._names = None if columns is not None else found.columns
        self._transform = transform
        self.columns: tuple[str, ...] = found.columns
        self.fingerprint: str = found.fingerprint

    @classmethod
    def from_ray(
        cls,
        dataset: Any,
        folder: str | Path,
        transform: Callable[[Any], Any] | None = None,
        memory_gigabytes: float = 1.0,
    ) -> ParquetDataset:
        """Write a Ray Dataset to a new folder and open it. A sample is the tuple of its columns.

        Samples are numbered in the order of the Dataset, whichever nodes write them.

        Args:
            dataset: a ``ray.data.Dataset``.
            folder: path or URL of a folder that does not exist yet, on a file system that all nodes share.
            transform: see :class:`ParquetDataset`.
            memory_gigabytes: see :class:`ParquetDataset`.

        Raises:
            ConfigError: ray.data or pyarrow is not installed.
            InputError: a column cannot be read, the folder already exists, or this process does not see all its files.
        """
        rows, columns = ray_data.write(dataset, folder)
        return cls._written("Ray", rows, folder, columns, transform, memory_gigabytes)

    @classmethod
    def from_spark(
        cls,
        frame: Any,
        folder: str | Path,
        transform: Callable[[Any], Any] | None = None,
        memory_gigabytes: float = 1.0,
    ) -> ParquetDataset:
        """Write a Spark DataFrame to a new folder and open it. A sample is the tuple of its columns.

        Samples are numbered in an order that depends only on the rows, whichever executors write them.

        Args:
            frame: a ``pyspark.sql.DataFrame``.
            folder: path or URL of a folder that does not exist yet, on a file system that all machines share.
            transform: see :class:`ParquetDataset`.
            memory_gigabytes: see :class:`ParquetDataset`.

        Raises:
            ConfigError: pyspark or pyarrow is not installed.
            InputError: a column cannot be read, the folder already exists, or this process does not see all its files.
        """
        parquet_files.check_installed()
        rows = data_frame.write(frame, folder)
        return cls._written("Spark", rows, folder, frame.columns, transform, memory_gigabytes)

    @classmethod
    def _written(cls, by: str, rows: int, folder: str | Path, columns: Sequence[str], *more: Any) -> ParquetDataset:
        """Open the files that an engine has written, and check that this process sees all rows."""
        data = cls(folder, columns, *more)
        if len(data) != rows:
            raise InputError(
                f"{by} has written {rows} rows to {folder}, but this process sees {len(data)} of them: the other "
                f"machines have another folder of that name. Name one that all machines share."
            )
        return data

    def __len__(self) -> int:
        return self._reader.rows

    def __getitem__(self, sample: int) -> Any:
        """Read a sample.

        Raises:
            IndexError: the index is out of range.
            InputError: the file has changed since it was found, or the sample has a null or lists of unequal lengths.
        """
        if not -len(self) <= sample < len(self):
            raise IndexError(f"There is no sample {sample}; the data set has {len(self)}.")
        values = self._reader.row(sample % len(self))
        row = values if self._names is None else dict(zip(self._names, values, strict=True))
        return row if self._transform is None else self._transform(row)

    def __getitems__(self, samples: Sequence[int]) -> list[Any]:
        """Read samples. Each row group is read only once."""
        items: list[Any] = [None] * len(samples)
        for index in sorted(range(len(samples)), key=samples.__getitem__):
            items[index] = self[samples[index]]
        return items


class _Reader:
    """Reader of row groups by number with a cache in memory. Pickling leaves the cache out."""

    def __init__(self, files: parquet_files.Files, most_bytes: int) -> None:
        self._columns = files.columns
        self._groups = [(file, group) for file in files.files for group in range(len(file.rows))]
        self._starts = [0, *accumulate(file.rows[group] for file, group in self._groups)]
        self._most_bytes = most_bytes
        self._kept: OrderedDict[int, list[Column]] = OrderedDict()
        self._bytes = 0
        self._footers: OrderedDict[str, Any] = OrderedDict()
        self._process = 0
        self._systems: dict[str, Any] = {}

    @property
    def rows(self) -> int:
        return self._starts[-1]

    def row(self, sample: int) -> tuple[Any, ...]:
        number = bisect_right(self._starts, sample) - 1
        row = sample - self._starts[number]
        values = []
        for name, column in zip(self._columns, self._group(number), strict=True):
            try:
                values.append(column.row(row))
            except ValueError as error:
                file, group = self._groups[number]
                raise InputError(
                    f"Column {name!r}, row {row} of row group {group} in {file.path}: {error}. Write all lists of a "
                    f"row with one length."
                ) from None
        return tuple(values)

    def _group(self, number: int) -> list[Column]:
        if number in self._kept:
            self._kept.move_to_end(number)
            return self._kept[number]
        file, group = self._groups[number]
        footer = self._footers.pop(file.path, None)
        columns, footer = parquet_files.read(self._system(file.source), file, group, self._columns, footer)
        self._footers[file.path] = footer
        if len(self._footers) > _MOST_FOOTERS:
            self._footers.popitem(last=False)
        self._kept[number] = columns
        self._bytes += _size(columns)
        while self._bytes > self._most_bytes and len(self._kept) > 1:
            self._bytes -= _size(self._kept.popitem(last=False)[1])
        return columns

    def _system(self, source: str) -> Any:
        if self._process != os.getpid():  # file system connections do not survive a fork
            self._process, self._systems = os.getpid(), {}
        if source not in self._systems:
            self._systems[source] = parquet_files.file_system(source)[0]
        return self._systems[source]

    def __getstate__(self) -> dict[str, Any]:
        empty = {"_footers": OrderedDict[str, Any](), "_kept": OrderedDict[int, list[Column]](), "_bytes": 0}
        return {**vars(self), "_process": 0, "_systems": {}, **empty}


def _size(columns: list[Column]) -> int:
    return sum(column.bytes for column in columns)
