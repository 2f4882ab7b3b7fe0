"""Access to Parquet files by row group: find files, read footers, decode the columns of a row group.

Only this file reads with pyarrow, and imports it on first use.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy
import torch

from paceline.errors import ConfigError, InputError


@dataclass(frozen=True)
class File:
    """Parquet file."""

    source: str  # path or URL given by the user under which the file was found. It determines the file system.
    path: str  # path on that file system
    size: int  # size in bytes
    modified: int | None  # modification time in nanoseconds; None if the file system does not report it
    rows: tuple[int, ...]  # number of rows in each row group


@dataclass(frozen=True)
class Files:
    """Files of a data set, in the order of their paths."""

    files: tuple[File, ...]  # files that have rows
    columns: tuple[str, ...]  # names of the columns to read
    # SHA-256 of all footers: the schema, and the sizes and statistics of each column in each row group
    fingerprint: str


def find(paths: Sequence[str], columns: Sequence[str] | None) -> Files:
    """Find files and read their footers.

    Args:
        paths: files, folders (searched for ``*.parquet``), or URLs of them.
        columns: names of the columns to read. Defaults to all columns.

    Raises:
        ConfigError: pyarrow is not installed.
    """
    parquet = _pyarrow("parquet")
    found = sorted((path, source) for source in paths for path in _search(source))
    for (path, _), (other, _) in pairwise(found):
        if path == other:
            raise InputError(f"{path} is given twice; its rows would be in the data set twice.")
    files: list[File] = []
    chosen: tuple[str, ...] = ()
    first, digest = None, hashlib.sha256()
    for path, source in found:
        system = file_system(source)[0]
        try:
            with system.open_input_file(path) as opened:
                footer = parquet.read_metadata(opened)
        except (_pyarrow("lib").ArrowInvalid, OSError) as error:
            raise InputError(f"{path} cannot be read as a Parquet file: {_first_line(error)}") from None
        if not footer.num_rows:
            continue
        schema = footer.schema.to_arrow_schema()
        if first is None:
            chosen, first = _chosen(schema, columns, path), schema
        _check_alike(first, schema, chosen, (files[0].path if files else path, path))
        _check_values(footer, chosen, path)
        sink = _pyarrow("").BufferOutputStream()
        footer.write_metadata_file(sink)
        digest.update(hashlib.sha256(sink.getvalue()).digest())
        info = system.get_file_info(path)
        rows = tuple(footer.row_group(group).num_rows for group in range(footer.num_row_groups))
        files.append(File(source, path, info.size, info.mtime_ns, rows))
    if first is None:
        raise InputError(f"There are no rows in {', '.join(paths)}.")
    return Files(tuple(files), chosen, digest.hexdigest())


def file_system(source: str) -> tuple[Any, str]:
    """Return the file system of a path or URL, and the path on it."""
    fs = _pyarrow("fs")
    if "://" not in source:
        return fs.LocalFileSystem(), os.path.abspath(source)
    url = "s3://" + source.partition("://")[2] if source.startswith(("s3a://", "s3n://")) else source  # Spark's schemes
    try:
        system, path = fs.FileSystem.from_uri(url)
    except (ValueError, OSError) as error:  # pyarrow's errors are subclasses
        raise InputError(f"{source} cannot be opened: {_first_line(error)}") from None
    return system, str(path)


def read(system: Any, file: File, group: int, columns: Sequence[str], footer: Any = None) -> tuple[list[Column], Any]:
    """Read and decode columns of a row group. Return them and the footer of the file.

    Args:
        footer: footer of the file, if it has been read. Reading a footer of 2,000 row groups takes 6 ms.
    """
    parquet = _pyarrow("parquet")
    try:
        info = system.get_file_info(file.path)
        if (info.size, info.mtime_ns) != (file.size, file.modified):
            raise InputError(
                f"{file.path} has changed since this run began: it had {file.size} bytes, now it has {info.size}. The "
                f"samples of a run must not change; write new ones to another folder."
            )
        with system.open_input_file(file.path) as opened:
            inside = parquet.ParquetFile(opened, metadata=footer)
            table = inside.read_row_group(group, columns=list(columns), use_threads=False)
    except (_pyarrow("lib").ArrowInvalid, OSError) as error:
        raise InputError(f"Row group {group} of {file.path} cannot be read: {_first_line(error)}") from None
    decoded = []
    for name in columns:
        array = table.column(name).combine_chunks()
        try:
            decoded.append(Column(array))
        except _NullsError:
            raise _nulls_in(name, group, file.path) from None
    return decoded, inside.metadata


class Column:
    """Column of a row group.

    A number becomes a 0-dimensional tensor, a list of numbers a 1-dimensional tensor, a list of lists a 2-dimensional
    tensor. Text and bytes stay as they are.
    """

    def __init__(self, array: Any) -> None:
        types = _pyarrow("types")
        if types.is_dictionary(array.type):
            array = array.dictionary_decode()
        self._offsets: list[numpy.ndarray[Any, Any]] = []
        while _is_list(array.type):
            _refuse_nulls(array)
            if types.is_fixed_size_list(array.type):
                self._offsets.append(numpy.arange(len(array) + 1) * array.type.list_size)
                array = array.flatten()
            else:
                self._offsets.append(array.offsets.to_numpy())
                array = array.values
        _refuse_nulls(array)
        self._texts: Any = array if _is_text(array.type) else None
        self._values = numpy.empty(0) if _is_text(array.type) else array.to_numpy(zero_copy_only=False)
        self.bytes = array.nbytes + sum(one.nbytes for one in self._offsets)

    def row(self, row: int) -> torch.Tensor | str | bytes:
        """Return the value of a row. A tensor is a copy that the caller may change.

        Raises:
            ValueError: the lists in a list have unequal lengths.
        """
        if self._texts is not None:
            text: str | bytes = self._texts[row].as_py()
            return text
        first, last, shape = row, row + 1, []
        for offsets in self._offsets:
            lengths = numpy.diff(offsets[first : last + 1])
            if lengths.size and (lengths != lengths[0]).any():
                raise ValueError(f"lists of {lengths.min()} to {lengths.max()} elements make no tensor")
            shape.append(int(lengths[0]) if lengths.size else 0)
            first, last = offsets[first], offsets[last]
        return torch.from_numpy(self._values[first:last].reshape(shape).copy())


class _NullsError(Exception):
    """Raised for a column that has nulls."""


def _refuse_nulls(array: Any) -> None:
    if array.null_count:
        raise _NullsError


def _search(source: str) -> list[str]:
    """Return a file itself, or the Parquet files in a folder. Names that start with ``_`` or ``.`` are not data."""
    fs = _pyarrow("fs")
    system, path = file_system(source)
    try:
        info = system.get_file_info(path)
        if info.type == fs.FileType.File:
            return [path]
        if info.type == fs.FileType.NotFound:
            raise InputError(f"There is no file or folder {source}, or not on this machine.")
        inside = [one.path for one in system.get_file_info(fs.FileSelector(path, recursive=True)) if one.is_file]
    except OSError as error:
        raise InputError(f"{source} cannot be read: {_first_line(error)}") from None
    files = []
    for one in inside:
        names = Path(one).relative_to(path).parts
        if one.endswith(".parquet") and not any(name.startswith(("_", ".")) for name in names):
            files.append(one)
    if not files:
        raise InputError(f"The folder {source} has no file *.parquet.")
    return files


def _chosen(schema: Any, columns: Sequence[str] | None, path: str) -> tuple[str, ...]:
    """Return the names of the columns to read."""
    chosen = tuple(schema.names if columns is None else columns)
    for name in chosen:
        if name not in schema.names:
            raise InputError(f"{path} has no column {name!r}. Its columns are: {', '.join(schema.names)}.")
        if chosen.count(name) > 1:
            raise InputError(f"Column {name!r} is named twice.")
        kind = schema.field(name).type
        if not is_readable(kind):
            raise InputError(
                f"Column {name!r} of {path} is of type {kind}; only numbers, texts, bytes, and lists of numbers can be "
                f"read. Convert it when the file is written (a vector of Spark by vector_to_array), or name the "
                f"others in columns."
            )
    return chosen


def _check_alike(first: Any, schema: Any, columns: Sequence[str], paths: tuple[str, str]) -> None:
    for name in columns:
        wanted = first.field(name).type
        found = schema.field(name).type if name in schema.names else None
        if found != wanted:
            raise InputError(
                f"The files differ: column {name!r} is of type {wanted} in {paths[0]}, and "
                f"{f'of type {found}' if found else 'is not there'} in {paths[1]}."
            )


def _check_values(footer: Any, columns: Sequence[str], path: str) -> None:
    """Raise InputError for nulls in the statistics of a footer. Nulls inside lists are found when they are read."""
    places = [place for place in range(footer.num_columns) if footer.schema.column(place).path in columns]
    for group in range(footer.num_row_groups):
        for place in places:
            column = footer.row_group(group).column(place)
            if column.statistics is not None and column.statistics.null_count:
                raise _nulls_in(column.path_in_schema, group, path)


def _nulls_in(column: str, group: int, path: str) -> InputError:
    return InputError(
        f"Column {column!r} has nulls in row group {group} of {path}, and a tensor has no value for them: fill them, "
        f"or drop their rows."
    )


def is_readable(kind: Any) -> bool:
    """Return whether values of an Arrow type can become tensors, text or bytes."""
    types = _pyarrow("types")
    if types.is_dictionary(kind):
        kind = kind.value_type
    if _is_text(kind):
        return True
    while _is_list(kind):
        kind = kind.value_type
    return bool(types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind))


def _is_list(kind: Any) -> bool:
    types = _pyarrow("types")
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _is_text(kind: Any) -> bool:
    types = _pyarrow("types")
    return bool(
        types.is_string(kind) or types.is_large_string(kind) or types.is_binary(kind) or types.is_large_binary(kind)
    )


def check_installed() -> None:
    """Check that pyarrow can be imported.

    Raises:
        ConfigError: pyarrow cannot be imported.
    """
    _pyarrow("")


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _pyarrow(module: str) -> ModuleType:
    """Import pyarrow, and return a submodule by name, or pyarrow itself for an empty name."""
    try:
        import pyarrow
        import pyarrow.fs
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError(f"Parquet files need pyarrow: pip install 'paceline[parquet]' ({error}).") from None
    found: ModuleType = getattr(pyarrow, module) if module else pyarrow
    return found
