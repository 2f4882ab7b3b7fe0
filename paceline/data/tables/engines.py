"""Tables of engines: only the process that made one can read it, until its engine has written it to files."""

from __future__ import annotations

_WRITERS = {
    ("ray.data", "Dataset"): "from_ray",
    ("ray.data", "MaterializedDataset"): "from_ray",
    ("pyspark.sql", "DataFrame"): "from_spark",
}


def writer_of(value: object) -> str | None:
    """The method of ``ParquetDataset`` that writes such a value to files; None if it is no table of an engine."""
    module, name = type(value).__module__, type(value).__name__
    return next(
        (writer for (home, kind), writer in _WRITERS.items() if f"{module}.".startswith(f"{home}.") and name == kind),
        None,
    )
