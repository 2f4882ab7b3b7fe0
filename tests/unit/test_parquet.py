"""Parquet files as a data set: which samples, what they are, what is refused."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import ParquetDataset
from paceline.data.tables import parquet_files
from paceline.errors import ConfigError, InputError

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


def write(path: Path, first: int, rows: int, per_group: int = 4, **more: Any) -> None:
    """Rows whose ``number`` counts on from ``first``."""
    numbers = list(range(first, first + rows))
    columns = {"number": numbers, "pair": [[float(one), 0.5] for one in numbers], **more}
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path, row_group_size=per_group)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """23 rows in three files; written in another order than that of their names."""
    inside = tmp_path / "data"
    write(inside / "part-1.parquet", 10, 0)
    write(inside / "part-2.parquet", 10, 13)
    write(inside / "part-0.parquet", 0, 10)
    (inside / "_SUCCESS").touch()
    write(inside / "_temporary" / "part-9.parquet", 90, 5)
    write(inside / ".hidden.parquet", 90, 5)
    return inside


def numbers(data: ParquetDataset) -> list[int]:
    return [int(data[sample]["number"]) for sample in range(len(data))]


def test_samples_in_the_order_of_paths_and_row_groups(folder: Path) -> None:
    data = ParquetDataset(folder)
    assert len(data) == 23 and numbers(data) == list(range(23))
    assert numbers(ParquetDataset([folder / "part-2.parquet", str(folder / "part-0.parquet")])) == list(range(23))
    assert numbers(ParquetDataset(f"file://{folder}")) == list(range(23))
    assert int(data[-1]["number"]) == 22
    assert [int(one["number"]) for one in data.__getitems__([22, 3, 17, 3])] == [22, 3, 17, 3]
    with pytest.raises(IndexError, match="no sample 23; the data set has 23"):
        data[23]


def test_what_a_sample_is(folder: Path) -> None:
    row = ParquetDataset(folder)[5]
    assert list(row) == ["number", "pair"]
    assert row["number"].shape == () and row["number"].dtype == torch.int64
    assert torch.equal(row["pair"], torch.tensor([5.0, 0.5], dtype=torch.float64))
    pair, number = ParquetDataset(folder, columns=["pair", "number"])[5]
    assert torch.equal(pair, row["pair"]) and number == 5
    assert ParquetDataset(folder, columns=("number",), transform=lambda row: int(row[0]) * 2)[5] == 10


VALUES = {
    "bool": (pa.array([True, False]), torch.tensor(False)),
    "uint8": (pa.array([1, 200], pa.uint8()), torch.tensor(200, dtype=torch.uint8)),
    "float16": (pa.array([1, 0.5], pa.float16()), torch.tensor(0.5, dtype=torch.float16)),
    "float32": (pa.array([1, 0.1], pa.float32()), torch.tensor(0.1)),
    "ragged": (pa.array([[1], [2, 3]], pa.large_list(pa.int32())), torch.tensor([2, 3], dtype=torch.int32)),
    "empty list": (pa.array([[1], []], pa.list_(pa.int64())), torch.tensor([], dtype=torch.int64)),
    "fixed size": (pa.array([[1, 2], [3, 4]], pa.list_(pa.int64(), 2)), torch.tensor([3, 4])),
    "matrix": (pa.array([[[1]], [[2, 3], [4, 5], [6, 7]]]), torch.tensor([[2, 3], [4, 5], [6, 7]])),
    "text": (pa.array(["a", "bé"]), "bé"),
    "bytes": (pa.array([b"a", b"\x00\xff"]), b"\x00\xff"),
    "categories": (pa.array(["a", "b"]).dictionary_encode(), "b"),
}


@pytest.mark.parametrize(("array", "wanted"), VALUES.values(), ids=VALUES)
def test_types_of_columns(array: Any, wanted: Any, tmp_path: Path) -> None:
    pq.write_table(pa.table({"first": [0, 1], "x": array}), tmp_path / "x.parquet")
    (found,) = ParquetDataset(tmp_path / "x.parquet", columns=["x"])[1]
    assert type(found) is type(wanted)
    assert torch.equal(found, wanted) and found.dtype == wanted.dtype if torch.is_tensor(wanted) else found == wanted


def test_a_sample_may_be_changed(folder: Path) -> None:
    data = ParquetDataset(folder)
    data[5]["pair"].zero_()
    assert data[5]["pair"][0] == 5


def counted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Each row group that is read from now on."""
    read: list[tuple[str, int]] = []
    original = parquet_files.read

    def count(system: Any, file: Any, group: int, *more: Any) -> Any:
        read.append((Path(file.path).name, group))
        return original(system, file, group, *more)

    monkeypatch.setattr(parquet_files, "read", count)
    return read


def test_a_row_group_is_read_once_while_there_is_room(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = counted(monkeypatch)
    data = ParquetDataset(folder)
    numbers(data), numbers(data)
    assert read == [("part-0.parquet", group) for group in range(3)] + [("part-2.parquet", group) for group in range(4)]
    read.clear()
    small = ParquetDataset(folder, memory_gigabytes=0)
    small.__getitems__([22, 0, 21, 1, 20])
    assert read == [("part-0.parquet", 0), ("part-2.parquet", 2), ("part-2.parquet", 3)]


def test_a_pickle_is_small_and_a_fork_reads(folder: Path) -> None:
    data = ParquetDataset(folder)
    before = len(pickle.dumps(data))
    numbers(data)
    assert len(pickle.dumps(data)) == before
    assert numbers(pickle.loads(pickle.dumps(data))) == list(range(23))
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply(numbers, (ParquetDataset(folder, memory_gigabytes=0),)) == list(range(23))
    loader = torch.utils.data.DataLoader(data, batch_size=5, num_workers=2)
    assert torch.cat([batch["number"] for batch in loader]).tolist() == list(range(23))


def other(path: Path) -> None:
    write(path, 0, 3)


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


@pytest.mark.parametrize("change", [other, truncated, os.unlink])
def test_files_that_change_during_a_run(change: Callable[[Path], None], folder: Path) -> None:
    data = ParquetDataset(folder, memory_gigabytes=0)
    data[0]
    change(folder / "part-2.parquet")
    with pytest.raises(InputError, match=r"part-2\.parquet (has changed since this run began|cannot be read)"):
        data[22]


def test_the_fingerprint_is_that_of_the_contents(folder: Path, tmp_path: Path) -> None:
    first = ParquetDataset(folder).fingerprint
    assert first == ParquetDataset(folder).fingerprint
    (folder / "part-0.parquet").rename(folder / "part-00.parquet")
    assert first == ParquetDataset(folder).fingerprint
    write(folder / "part-00.parquet", 1, 10)
    assert first != ParquetDataset(folder).fingerprint


def no_such_path(folder: Path) -> None:
    ParquetDataset(folder / "nowhere")


def no_such_column(folder: Path) -> None:
    ParquetDataset(folder, columns=["number", "label"])


def a_column_twice(folder: Path) -> None:
    ParquetDataset(folder, columns=["number", "number"])


def columns_as_one_text(folder: Path) -> None:
    ParquetDataset(folder, columns="number")


def twice(folder: Path) -> None:
    ParquetDataset([folder, folder / "part-0.parquet"])


def nothing_inside(folder: Path) -> None:
    (folder / "empty").mkdir()
    ParquetDataset(folder / "empty")


def no_path(folder: Path) -> None:
    ParquetDataset([])


def no_rows(folder: Path) -> None:
    ParquetDataset(folder / "part-1.parquet")


def another_format(folder: Path) -> None:
    (folder / "part-3.parquet").write_text("number\n1\n")
    ParquetDataset(folder)


def another_type(folder: Path) -> None:
    pq.write_table(pa.table({"number": [1.5], "pair": [[1.0, 2.0]]}), folder / "part-3.parquet")
    ParquetDataset(folder)


def a_missing_column(folder: Path) -> None:
    pq.write_table(pa.table({"number": [1]}), folder / "part-3.parquet")
    ParquetDataset(folder)


def a_struct(folder: Path) -> None:
    pq.write_table(pa.table({"number": [{"type": 1, "size": 2}]}), folder / "part-0.parquet")
    ParquetDataset(folder)


def nulls(folder: Path) -> None:
    pq.write_table(pa.table({"number": [1, None]}), folder / "x.parquet")
    ParquetDataset(folder / "x.parquet")


def nulls_without_statistics(folder: Path) -> None:
    pq.write_table(pa.table({"number": [1, None]}), folder / "x.parquet", write_statistics=False)
    ParquetDataset(folder / "x.parquet")[0]


def nulls_in_a_list(folder: Path) -> None:
    pq.write_table(pa.table({"number": [[1], [1, None]]}), folder / "x.parquet")
    ParquetDataset(folder / "x.parquet")[0]


def an_uneven_matrix(folder: Path) -> None:
    pq.write_table(pa.table({"number": [[[1], [2]], [[1], [2, 3]]]}), folder / "x.parquet")
    ParquetDataset(folder / "x.parquet")[1]


def an_unknown_url(folder: Path) -> None:
    ParquetDataset("nothing://host/folder")


def less_than_no_memory(folder: Path) -> None:
    ParquetDataset(folder, memory_gigabytes=-1)


REFUSED = {
    no_such_path: "There is no file or folder .*nowhere",
    no_such_column: r"part-0\.parquet has no column 'label'\. Its columns are: number, pair\.",
    a_column_twice: "Column 'number' is named twice",
    columns_as_one_text: r"give a list of names, such as \['number'\]",
    twice: r"part-0\.parquet is given twice",
    nothing_inside: r"The folder .*empty has no file \*\.parquet",
    no_rows: r"There are no rows in .*part-1\.parquet",
    no_path: "No Parquet file is given",
    another_format: r"part-3\.parquet cannot be read as a Parquet file: ",
    another_type: r"'number' is of type int64 in .*part-0\.parquet, and of type double in .*part-3\.parquet",
    a_missing_column: r"'pair' is of type list<element: double> in .*part-0\.parquet, and is not there in .*part-3",
    a_struct: "'number' of .* is of type struct<.*vector_to_array",
    nulls: r"Column 'number' has nulls in row group 0 of .*x\.parquet",
    nulls_without_statistics: r"Column 'number' has nulls in row group 0 of .*x\.parquet",
    nulls_in_a_list: r"Column 'number' has nulls in row group 0 of .*x\.parquet",
    an_uneven_matrix: r"'number', row 1 of row group 0 in .*x\.parquet: lists of 1 to 2 elements",
    an_unknown_url: "nothing://host/folder cannot be opened: ",
    less_than_no_memory: "memory_gigabytes = -1: give 0 or more",
}


@pytest.mark.parametrize(("case", "message"), REFUSED.items(), ids=lambda one: getattr(one, "__name__", ""))
def test_what_is_refused(case: Callable[[Path], None], message: str, folder: Path) -> None:
    with pytest.raises(InputError, match=message):
        case(folder)


def test_without_pyarrow(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"pip install 'paceline\[parquet\]'"):
        ParquetDataset(folder)
