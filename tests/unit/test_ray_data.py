"""Columns of a Dataset of Ray, as they are written; and what is said without Ray."""

import sys
from pathlib import Path

import pytest

from paceline import ParquetDataset
from paceline.data.tables.ray_data import plain
from paceline.errors import ConfigError, InputError

pa = pytest.importorskip("pyarrow")
pytest.importorskip("pyarrow.parquet")
numpy = pytest.importorskip("numpy")


def test_tensors_become_lists_of_lists(tmp_path: Path) -> None:
    images = numpy.arange(48, dtype=numpy.float32).reshape(8, 2, 3)
    tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(images)
    column = plain(pa.chunked_array([tensors[:3], tensors[3:]]), "image")
    pa.parquet.write_table(pa.table({"image": column}), tmp_path / "x.parquet")
    data = ParquetDataset(tmp_path / "x.parquet", columns=["image"])
    assert [data[sample][0].tolist() for sample in range(8)] == images.tolist()


def test_columns_that_cannot_be_read() -> None:
    with pytest.raises(
        InputError,
        match=r"Column 'pair' of the Dataset is of type struct<a: int64>; only numbers, texts, bytes, tensors",
    ):
        plain(pa.chunked_array([pa.array([{"a": 1}])]), "pair")


def test_without_ray(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'paceline\[ray\]'"):
        ParquetDataset.from_ray(object(), tmp_path / "x")
