"""Writer of a Ray Dataset to Parquet files, in the order of the Dataset.

A Dataset is a list of blocks. By default Ray yields them in the order in which they are computed, so ``preserve_order``
is set. Each block then becomes a file with its number, written where the block is stored. A row has the same position
across all files for any number of blocks and nodes.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.data.tables import parquet_files
from paceline.errors import ConfigError, InputError

_ROW_GROUP_BYTES = 2**20
"""Small, because samples are read in random order."""


def write(dataset: Any, folder: str | Path) -> tuple[int, list[str]]:
    """Write the rows in one pass. Return their number and the names of the columns."""
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise ConfigError(f"A Dataset of Ray needs ray.data: pip install 'paceline[ray]' ({error}).") from None
    if not isinstance(dataset, ray.data.Dataset):
        raise InputError(f"dataset is a {type(dataset).__name__}; give a ray.data.Dataset.")
    target = os.fspath(folder) if "://" in os.fspath(folder) else str(Path(folder).absolute())
    system, path = parquet_files.file_system(target)
    if system.get_file_info(path).type.name != "NotFound":
        raise InputError(f"{folder} is there already. Read it by paceline.ParquetDataset, or name another folder.")
    with _in_order(dataset.context.execution_options):
        tables = dataset.to_arrow_refs()
    writer: Any = ray.remote(_write_table)
    try:
        written = ray.get([writer.remote(table, target, number) for number, table in enumerate(tables)])
    except InputError as error:  # a subclass made by Ray, whose text has the stack of the task
        raise InputError(str(getattr(error, "cause", error))) from None
    if (names := next((names for rows, names in written if rows), None)) is None:
        raise InputError("The Dataset has no rows.")
    return sum(rows for rows, _ in written), names


@contextlib.contextmanager
def _in_order(options: Any) -> Iterator[None]:
    before, options.preserve_order = options.preserve_order, True
    try:
        yield
    finally:
        options.preserve_order = before


def _write_table(table: Any, target: str, number: int) -> tuple[int, list[str]]:
    """Write a block. Return the number of rows and the names of the columns."""
    from pyarrow import parquet

    if not table.num_rows:
        return 0, []
    for place, name in enumerate(table.column_names):
        table = table.set_column(place, name, plain(table.column(name), name))
    system, path = parquet_files.file_system(target)
    system.create_dir(path, recursive=True)
    rows = max(1, _ROW_GROUP_BYTES * table.num_rows // max(1, table.nbytes))
    with system.open_output_stream(f"{path}/part-{number:06}.parquet") as opened:
        parquet.write_table(table, opened, row_group_size=rows)
    return table.num_rows, list(table.column_names)


def plain(column: Any, name: str) -> Any:
    """Return a column without Ray's extension types: tensors of one shape become nested lists."""
    import pyarrow

    kind, shape = column.type, None
    if isinstance(kind, pyarrow.BaseExtensionType):
        shape = getattr(kind, "shape", None)
        if not shape or None in shape:
            raise InputError(f"Column {name!r} of the Dataset has tensors of several shapes; give all of them one.")
        column = pyarrow.chunked_array([_as_lists(chunk.storage, shape) for chunk in column.chunks])
    if not parquet_files.is_readable(column.type):
        raise InputError(
            f"Column {name!r} of the Dataset is of type {kind}; only numbers, texts, bytes, tensors, and lists of "
            f"numbers can be read. Convert it, or select the others."
        )
    return column


def _as_lists(storage: Any, shape: tuple[int, ...]) -> Any:
    from pyarrow import FixedSizeListArray

    values = storage.flatten()
    for size in reversed(shape):
        values = FixedSizeListArray.from_arrays(values, size)
    return values
