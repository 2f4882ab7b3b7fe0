"""Detection of data engine tables. Only the process that made a table can read it before it is written to files."""

from __future__ import annotations

_WRITERS = {
    ("ray.data", "Dataset"): "from_ray",
    ("ray.data", "MaterializedDataset"): "from_ray",
    ("pyspark.sql", "DataFrame"): "from_spark",
}


def writer_of(value: object) -> str | None:
    """Return the ``ParquetDataset`` method that writes this table to files, or None if the value is not a table."""
    module, name = type(value).__module__, type(value).__name__
    return next(
        (writer for (home, kind), writer in _WRITERS.items() if f"{module}.".startswith(f"{home}.") and name == kind),
        None,
    )
