"""A data set that an engine writes first: the engine's part is made up, the files and what is read are not."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline import ParquetDataset
from paceline.data import write_shards
from paceline.data.tables import data_frame, ray_data
from paceline.errors import InputError

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


def write(folder: Any, rows: int) -> int:
    Path(folder).mkdir()
    parquet.write_table(pa.table({"a": list(range(5)), "b": list(range(10, 15))}), Path(folder) / "x.parquet")
    return rows


@pytest.mark.parametrize("engine", ["Ray", "Spark"])
def test_a_written_table_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, engine: str) -> None:
    rows = 5
    monkeypatch.setattr(ray_data, "write", lambda dataset, folder: (write(folder, rows), ["b", "a"]))
    monkeypatch.setattr(data_frame, "write", lambda frame, folder: write(folder, rows))
    make: Any = ParquetDataset.from_ray if engine == "Ray" else ParquetDataset.from_spark
    frame = SimpleNamespace(columns=["b", "a"])
    data = make(frame, tmp_path / "whole", transform=lambda row: tuple(map(int, row)), memory_gigabytes=0.5)
    assert [data[sample] for sample in range(5)] == [(10 + sample, sample) for sample in range(5)]
    rows = 6
    with pytest.raises(InputError, match=f"{engine} has written 6 rows to .*, but this process sees 5 of them"):
        make(frame, tmp_path / "part")


def test_shards_are_written_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_data, "write", lambda dataset, folder: (4, ["a"]))
    monkeypatch.setattr(data_frame, "write", lambda frame, folder, in_place: 5 if in_place else 0)
    for home, kind, count in (("ray.data.dataset", "Dataset", 4), ("pyspark.sql.classic.dataframe", "DataFrame", 5)):
        assert write_shards(type(kind, (), {"__module__": home})(), "samples") == count
    with pytest.raises(InputError, match="a DataFrame of Spark or a Dataset of Ray, not a list"):
        write_shards([1], "samples")


def test_names_of_columns_are_quoted() -> None:
    assert data_frame._quoted("a`b c") == "`a``b c`"
    assert data_frame._url("s3://bucket/x") == "s3://bucket/x"
    assert data_frame._url("/a b") == "file:///a%20b"
