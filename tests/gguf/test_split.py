"""Row 18, models in several files: whole sets open, and each kind of broken set is named."""

import shutil
from pathlib import Path

import pytest

from sparkinfer.errors import GGUFError, MissingFileError
from sparkinfer.gguf import Typed, open_gguf, write_gguf


def shard_path(folder: Path, number: int, count: int = 3, stem: str = "model") -> Path:
    return folder / f"{stem}-{number:05d}-of-{count:05d}.gguf"


def write_shard(path: Path, index: int, count: int = 3, total: int = 6, **extra: object) -> None:
    metadata: dict[str, object] = {
        "split.no": Typed(index, "uint16"),
        "split.count": Typed(count, "uint16"),
        "split.tensors.count": Typed(total, "int32"),
    }
    if index == 0:
        metadata |= {"general.architecture": "llama", "llama.block_count": 3}
    tensors = [(f"blk.{index}.{name}", (8,), "F32", bytes([index]) * 32) for name in ("a", "b")]
    write_gguf(path, metadata | extra, tensors)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    for index in range(3):
        write_shard(shard_path(tmp_path, index + 1), index)
    return tmp_path


@pytest.mark.parametrize("number", [1, 2, 3])
def test_row18_any_shard_opens_the_model(model: Path, number: int) -> None:
    file = open_gguf(shard_path(model, number), check_tensors=True)
    assert file.path == shard_path(model, 1)
    assert file.architecture == "llama"
    assert list(file.tensors) == [f"blk.{i}.{name}" for i in range(3) for name in ("a", "b")]
    assert [file.tensors[f"blk.{i}.b"].shard for i in range(3)] == [0, 1, 2]
    for index in range(3):
        assert set(file.data(f"blk.{index}.b").tolist()) == {index}
    assert not file.changed()
    shard_path(model, 3).unlink()
    assert file.changed()


def test_row18_missing(model: Path) -> None:
    shard_path(model, 2).unlink()
    with pytest.raises(MissingFileError, match=r"'model-00002-of-00003.gguf' is missing") as caught:
        open_gguf(shard_path(model, 1))
    assert caught.value.exit_code == 66
    shard_path(model, 1).unlink()
    with pytest.raises(MissingFileError, match=r"-00001-.*-00002-.* are missing"):
        open_gguf(shard_path(model, 3))


def test_row18_many_missing(tmp_path: Path) -> None:
    write_shard(shard_path(tmp_path, 1, 99), 0, 99)
    with pytest.raises(MissingFileError, match="and 95 more are missing"):
        open_gguf(shard_path(tmp_path, 1, 99))


def test_row18_duplicated(model: Path) -> None:
    shutil.copy(shard_path(model, 2), shard_path(model, 3))
    with pytest.raises(GGUFError, match=r"'split.no'.*00003-of-00003.*same as in.*duplicated"):
        open_gguf(shard_path(model, 1))


def test_row18_swapped_names(model: Path) -> None:
    shard_path(model, 2).rename(model / "x")
    shard_path(model, 3).rename(shard_path(model, 2))
    (model / "x").rename(shard_path(model, 3))
    with pytest.raises(GGUFError, match=r"'split.no'.*is 2, but the file name says shard 2"):
        open_gguf(shard_path(model, 1))


BROKEN = {
    "other-total": ({"total": 7}, "'split.tensors.count'.*is not 6 as in .*different models"),
    "other-count": ({"count": 4}, "'split.count'.*is 4, but the other shards say 3"),
    "same-tensor": ({"index": 0}, "same as in 'model-00001.*duplicated shard"),
    "other-architecture": (
        {"general.architecture": "qwen3"},
        "'general.architecture'.*is 'qwen3', but 'llama' in the first shard: .*different models",
    ),
    "number-type": ({"split.no": "one"}, "'split.no'.*has type string, expected an integer"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_row18_mixed(name: str, model: Path) -> None:
    change, message = BROKEN[name]
    write_shard(shard_path(model, 2), **({"index": 1} | change))
    with pytest.raises(GGUFError, match=message):
        open_gguf(shard_path(model, 1))


def test_row18_tensor_in_two_shards(model: Path) -> None:
    numbers = {"split.no": Typed(1, "uint16")}
    write_shard(shard_path(model, 2), 0, **numbers)
    with pytest.raises(GGUFError, match=r"'blk.0.a'.*is also in 'model-00001.*different models"):
        open_gguf(shard_path(model, 1))


def test_row18_total_does_not_add_up(tmp_path: Path) -> None:
    for index in range(3):
        write_shard(shard_path(tmp_path, index + 1), index, total=9)
    with pytest.raises(GGUFError, match="is 9, but the shards have 6 tensors"):
        open_gguf(shard_path(tmp_path, 1))


def test_row18_plain_file_among_shards(model: Path) -> None:
    write_gguf(shard_path(model, 2), {"general.name": "whole"})
    with pytest.raises(GGUFError, match=r"'split.count'.*is missing, but"):
        open_gguf(shard_path(model, 1))


def test_row18_renamed(model: Path) -> None:
    shard_path(model, 1).rename(model / "first.gguf")
    with pytest.raises(GGUFError, match="one of 3 shards, but the name does not"):
        open_gguf(model / "first.gguf")
    shard_path(model, 2).rename(shard_path(model, 2, 5))
    with pytest.raises(GGUFError, match="is 3, but the file name says 5"):
        open_gguf(shard_path(model, 2, 5))


def test_row18_count_out_of_bounds(tmp_path: Path) -> None:
    write_shard(tmp_path / "m.gguf", 0, 65535)
    with pytest.raises(GGUFError, match="is 65,535, accepted are 1 to 1,024"):
        open_gguf(tmp_path / "m.gguf")


def test_row18_damaged_shard(model: Path) -> None:
    path = shard_path(model, 3)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(GGUFError, match=r"00003-of-00003.*present are"):
        open_gguf(shard_path(model, 1))


def test_one_shard_needs_no_name(tmp_path: Path) -> None:
    write_shard(tmp_path / "m.gguf", 0, 1, total=2)
    assert len(open_gguf(tmp_path / "m.gguf").tensors) == 2
