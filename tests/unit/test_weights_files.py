"""Files of weights: what is written loads with plain torch, and what is read fits the model or says why not."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from paceline.checkpoint.weights import files
from paceline.checkpoint.weights.files import check_suffix, complete_weights, write
from paceline.checkpoint.weights.match import match
from paceline.checkpoint.weights.read import read
from paceline.errors import CheckpointError, ConfigError


def tied() -> nn.Sequential:
    model = nn.Sequential(nn.Embedding(5, 3), nn.BatchNorm1d(3), nn.Linear(3, 5, bias=False))
    model[2].weight = model[0].weight
    return model


@pytest.mark.parametrize("name", ["w.safetensors", "w.pt", "new/w.pth"])
def test_written_weights_load_with_plain_torch(tmp_path: Path, name: str) -> None:
    model, path = tied(), tmp_path / name
    weights = complete_weights(model)
    assert weights["0.weight"] is weights["2.weight"]
    assert write(path, weights) == path
    assert [one.name for one in path.parent.iterdir()] == [path.name]
    back: dict[str, Any] = load_file(path) if name.endswith("safetensors") else torch.load(path, weights_only=True)
    assert list(back) == list(weights) or name.endswith("safetensors")
    other = tied()
    other.load_state_dict(back)
    assert all(torch.equal(value, other.state_dict()[key]) for key, value in model.state_dict().items())


def test_a_type_for_inference_changes_floating_point_tensors_only(tmp_path: Path) -> None:
    write(tmp_path / "w.safetensors", tied().state_dict(), torch.bfloat16)
    found = load_file(tmp_path / "w.safetensors")
    assert {value.dtype for value in found.values()} == {torch.bfloat16, torch.int64}
    assert found["1.num_batches_tracked"].dtype == torch.int64


@pytest.mark.parametrize("folder", ["", "memory://parts"])
def test_large_weights_are_in_several_files(tmp_path: Path, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is converted and written alone. Files of an earlier export are gone."""
    model, path = tied(), f"{folder or tmp_path}/w.safetensors"
    source, held, moved = path if folder else Path(path), list[int](), files.on_host

    def recorded(*given: Any) -> dict[str, Any]:
        found = moved(*given)
        held.append(sum(value.nbytes for value in found.values()))
        return found

    monkeypatch.setattr(files, "on_host", recorded)
    write(path, model.state_dict(keep_vars=True), None, 20)
    write(path, model.state_dict(keep_vars=True), torch.bfloat16, 50)
    assert held[-2:] == [48, 44] and max(held[:-2]) == 60
    names = [f"w-{number:05d}-of-00002.safetensors" for number in (1, 2)]
    if not folder:
        index = json.loads((tmp_path / "w.safetensors.index.json").read_text())
        assert index["metadata"] == {"total_size": 48 + 44}
        assert sorted(one.name for one in tmp_path.iterdir()) == [*names, "w.safetensors.index.json"]
        for name, file in index["weight_map"].items():
            assert load_file(tmp_path / file)[name].equal(read(source)[name])
    found = read(source)
    assert found.keys() == model.state_dict().keys()
    assert torch.equal(found["2.weight"], model.state_dict()["2.weight"].bfloat16())
    write(path, model.state_dict())
    assert torch.equal(read(source)["2.weight"], model.state_dict()["2.weight"])
    if not folder:
        assert [one.name for one in tmp_path.iterdir()] == ["w.safetensors"]


def test_a_place_that_cannot_be_written_is_named_and_what_was_there_stays(tmp_path: Path) -> None:
    path = tmp_path / "w.pt"
    path.write_bytes(b"before")
    path.with_name(".w.pt.0011.partial").touch()  # of a process that was killed
    with pytest.raises(ConfigError, match=r"must end in \.safetensors, or in \.pt"):
        check_suffix(tmp_path / "w.bin2")
    with pytest.raises(CheckpointError, match="extra state of a module"):
        write(tmp_path / "w.safetensors", {"a._extra_state": {"x": 1}})
    with pytest.raises(CheckpointError, match=r"cannot be written to .*File exists"):
        write(path / "below.pt", {})
    with pytest.raises(Exception, match="pickle"):
        write(path, {"a": lambda: 0})
    assert path.read_bytes() == b"before"
    assert not list(tmp_path.glob(".*"))
    assert [one.name for one in tmp_path.iterdir()] == ["w.pt"]


def test_a_url_is_written_and_read() -> None:
    model = tied()
    assert write("memory://weights/w.safetensors", complete_weights(model)) == "memory://weights/w.safetensors"
    assert torch.equal(read("memory://weights/w.safetensors")["0.weight"], model[0].weight)


def test_a_folder_with_an_index_and_a_nested_file(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "model-1.safetensors")
    save_file({"b": torch.zeros(3)}, tmp_path / "model-2.safetensors")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert {name: value.tolist() for name, value in read(tmp_path).items()} == {"a": [1, 1], "b": [0, 0, 0]}
    index["weight_map"]["c"] = "../outside.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"names '\.\./outside.safetensors', which is not a file beside it"):
        read(tmp_path)
    torch.save({"epoch": 3, "model": {"a": torch.ones(2)}}, tmp_path / "w.pt")
    assert list(read(tmp_path / "w.pt", "model")) == ["a"]
    with pytest.raises(CheckpointError, match=r"holds no state_dict.*its keys are 'epoch', 'model'\. If one .*weights"):
        read(tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match=r"weights.key = 'x': .* has no such key: its keys are 'epoch', 'model'"):
        read(tmp_path / "w.pt", "x")


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("this must not run",)


def test_what_cannot_be_read_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CheckpointError, match=r"There are no weights at .*none.pt"):
        read(tmp_path / "none.pt")
    with pytest.raises(CheckpointError, match="not a complete checkpoint"):
        read(tmp_path)
    (tmp_path / "w.safetensors").write_bytes(b"\0" * 100)
    with pytest.raises(CheckpointError, match=r"w.safetensors cannot be read"):
        read(tmp_path / "w.safetensors")
    torch.save({"a": Evil()}, tmp_path / "evil.pt")
    with pytest.raises(CheckpointError, match="to open that could run code"):
        read(tmp_path / "evil.pt")
    assert "must not run" not in capsys.readouterr().out


def test_names_are_matched_renamed_and_skipped() -> None:
    model = tied()
    whole = complete_weights(model)
    assert not match(model, whole, "w").missing
    untied = {name: value for name, value in whole.items() if name != "2.weight"}
    assert not match(model, untied, "w").missing
    wrapped = {f"module.{name}": value for name, value in whole.items()}
    with pytest.raises(CheckpointError, match=r"Without 'module\.' in front names fit: weights\.rename=module\.="):
        match(model, wrapped, "w")
    assert len(match(model, wrapped, "w", rename=("module.=",)).tensors) == len(whole)
    with pytest.raises(CheckpointError, match=r"With '0\.' in front names fit: weights\.rename==0\."):
        match(nn.Sequential(model), whole, "w")
    with pytest.raises(CheckpointError, match=r"gives two tensors of w the name '1.weight'"):
        match(model, whole, "w", rename=("1.bias=1.weight",))


def test_other_names_and_shapes_are_named() -> None:
    model = tied()
    whole = complete_weights(model)
    other = {**whole, "0.weight": torch.zeros(7, 3), "2.weight": torch.zeros(7, 3)}
    with pytest.raises(CheckpointError, match=r"'0.weight' is \[7, 3\], the model's is \[5, 3\]; '2.weight' is"):
        match(model, other, "w", strict=False)
    assert match(model, other, "w", skip=("0.", "2.")).missing == ()
    part = {"1.weight": whole["1.weight"], "head.weight": torch.zeros(1)}
    with pytest.raises(
        CheckpointError, match=r"It has no '0.weight', '1.bias', .* 3 more.* model has no 'head.weight'"
    ):
        match(model, part, "w")
    said = match(model, part, "w", strict=False).describe("w")
    assert said.startswith("weights from w: 1 tensors; not in it, so with their initial values: '0.weight'")
    assert said.endswith("not in the model, so left out: 'head.weight'")
