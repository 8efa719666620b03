"""What `write_gguf` writes, both our reader and the PyPI reader read; what the writer refuses."""

from pathlib import Path

import gguf
import numpy as np
import pytest

from sparkinfer.errors import GGUFError, UnsupportedError
from sparkinfer.gguf import Typed, open_gguf, write_gguf
from sparkinfer.quant.formats import KNOWN_TYPES

METADATA = {
    "general.architecture": "llama",
    "general.name": "naïve \n 模型",
    "a.u8": Typed(255, "uint8"),
    "a.i8": Typed(-128, "int8"),
    "a.u16": Typed(65535, "uint16"),
    "a.i16": Typed(-32768, "int16"),
    "a.u32": 4294967295,
    "a.i32": -5,
    "a.f32": 0.5,
    "a.bool": True,
    "a.u64": Typed(2**64 - 1, "uint64"),
    "a.i64": -(2**63),
    "a.f64": Typed(0.1, "float64"),
    "b.empty": Typed([], "string"),
    "b.strings": ["", "a", "ü", "with \0 in it"],
    "b.bools": [True, False],
    "b.floats": [1.0, -0.0, 3.5],
    "b.ints": [1, -2, 3],
    "b.bytes": Typed([1, 2, 255], "uint8"),
}


def random_bytes(n: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(n)


def plain_values(metadata: dict) -> dict:
    return {k: v.value if isinstance(v, Typed) else v for k, v in metadata.items()}


def test_every_value_type_comes_back(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", METADATA)
    with open_gguf(tmp_path / "m.gguf") as file:
        assert dict(file.metadata) == plain_values(METADATA)
        assert [type(v) for v in file.metadata.values()] == [
            type(v) for v in plain_values(METADATA).values()
        ]
        assert (file.version, file.alignment, len(file.tensors)) == (3, 32, 0)
        assert file.type_name("a.u64") == "uint64"
        assert file.type_name("b.ints") == "array of int32"


def test_the_oracle_reads_what_we_write(tmp_path: Path) -> None:
    shapes = [("one", (5,), "F32"), ("two", (64, 3), "Q4_0"), ("three", (256, 2, 2), "Q6_K")]
    tensors = []
    for seed, (name, shape, kind) in enumerate(shapes):
        size = next(t for t in KNOWN_TYPES.values() if t.name == kind)
        n_bytes = int(np.prod(shape)) // size.block_size * size.block_bytes
        tensors.append((name, shape, kind, random_bytes(n_bytes, seed)))
    write_gguf(tmp_path / "m.gguf", METADATA, tensors, alignment=64)
    theirs = gguf.GGUFReader(tmp_path / "m.gguf")
    ours = open_gguf(tmp_path / "m.gguf")
    for key, value in plain_values(METADATA).items():
        field = theirs.get_field(key)
        assert field is not None
        assert field.contents() == value or value == []
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor, (name, shape, kind, data) in zip(theirs.tensors, tensors, strict=True):
        info = ours.tensors[name]
        assert (info.shape, info.type_name) == (shape, kind)
        assert tuple(tensor.shape) == shape and tensor.tensor_type.name == kind
        assert info.offset == tensor.data_offset and info.offset % 64 == 0
        assert tensor.data.tobytes() == data == ours.data(name).tobytes()


def test_we_read_what_the_oracle_writes(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "qwen3")
    writer.add_context_length(4096)
    writer.add_token_list(["a", b"\xff", "c"])
    writer.add_token_scores([0.0, 1.0, 2.0])
    writer.add_token_types([1, 1, 3])
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    writer.add_tensor("w", values)
    writer.add_tensor("half", values.astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = open_gguf(tmp_path / "m.gguf", check_tensors=True)
    assert file.architecture == "qwen3"
    assert file.require("qwen3.context_length", int) == 4096
    assert file.require("tokenizer.ggml.tokens", list) == ["a", "\udcff", "c"]
    assert file.tensors["w"].shape == (4, 3)
    assert file.blocks("w").shape == (3, 16)
    np.testing.assert_array_equal(file.data("w").view(np.float32).reshape(3, 4), values)
    np.testing.assert_array_equal(file.data("half").view(np.float16).reshape(3, 4), values)


def test_arrays_outlive_the_file_and_are_read_only(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", {}, [("w", (8,), "F32", bytes(range(32)))])
    with open_gguf(tmp_path / "m.gguf") as file:
        data = file.data("w")
    assert data.tobytes() == bytes(range(32))
    assert not data.flags.writeable
    with pytest.raises(ValueError, match="is closed"):
        file.data("w")


def test_changed(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, {"a": 1})
    file = open_gguf(path)
    assert not file.changed()
    write_gguf(path, {"a": 2})
    assert file.changed()
    path.unlink()
    assert file.changed()


BAD_WRITES = {
    "alignment": ({"alignment": 3}, "powers of two"),
    "same name": ({"tensors": [("w", (1,), "F32", bytes(4))] * 2}, "same name"),
    "short data": ({"tensors": [("w", (2,), "F32", bytes(4))]}, "its shape needs 8"),
    "row": ({"tensors": [("w", (31,), "Q4_0", bytes(18))]}, "multiple of 32"),
    "type": ({"tensors": [("w", (1,), "Q9", b"")]}, "known are"),
    "shape": ({"tensors": [("w", (0,), "F32", b"")]}, "positive"),
    "long name": ({"tensors": [("w" * 65, (1,), "F32", bytes(4))]}, "64 bytes"),
    "too wide": ({"metadata": {"a": Typed(256, "uint8")}}, "not uint8"),
    "empty list": ({"metadata": {"a": []}}, "empty list"),
    "no type": ({"metadata": {"a": None}}, "no type in GGUF"),
    "mixed": ({"metadata": {"a": [1, "b"]}}, "no type in GGUF"),
    "unknown": ({"metadata": {"a": Typed(1, "int128")}}, "unknown type"),
}


@pytest.mark.parametrize("name", BAD_WRITES)
def test_the_writer_refuses(name: str, tmp_path: Path) -> None:
    arguments, message = BAD_WRITES[name]
    with pytest.raises(GGUFError, match=message):
        write_gguf(tmp_path / "m.gguf", **({"metadata": {}} | arguments))
    assert list(tmp_path.iterdir()) == []


def test_typed_reads_name_key_and_both_types(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", {"x.rate": "high", "x.nan": float("nan"), "x.on": True})
    file = open_gguf(tmp_path / "m.gguf")
    with pytest.raises(GGUFError, match=r"'x.rate'.*has type string, expected a float"):
        file.require("x.rate", float)
    with pytest.raises(GGUFError, match=r"'x.on'.*has type bool, expected an integer"):
        file.get("x.on", int)
    with pytest.raises(GGUFError, match=r"'x.none'.*is missing, expected an array"):
        file.require("x.none", list)
    with pytest.raises(GGUFError, match=r"'x.nan'.*expected a finite number"):
        file.get("x.nan", float)
    assert file.get("x.none", int, 7) == 7
    assert file.get("x.none", int) is None


def test_decoders(tmp_path: Path) -> None:
    tensors = [("w", (32,), "Q4_0", bytes(18)), ("i", (256,), "IQ1_S", bytes(50))]
    write_gguf(tmp_path / "m.gguf", {}, tensors)
    file = open_gguf(tmp_path / "m.gguf")
    file.require_decodable(["w"])
    with pytest.raises(UnsupportedError, match=r"'i'.*IQ1_S.*supported types: F32, F16"):
        file.require_decodable()
    with pytest.raises(GGUFError, match="has no tensor 'none'"):
        file.data("none")


def test_a_vocabulary_of_152k_tokens_opens(tmp_path: Path) -> None:
    """How fast is for benchmarks/open_vocabulary.py."""
    path = tmp_path / "m.gguf"
    metadata = {
        "tokenizer.ggml.tokens": [f"token{i}" for i in range(151_936)],
        "tokenizer.ggml.merges": [f"to ken{i}" for i in range(150_000)],
        "tokenizer.ggml.token_type": Typed([1] * 151_936, "int32"),
    }
    write_gguf(path, metadata)
    file = open_gguf(path)
    for key in ("tokenizer.ggml.tokens", "tokenizer.ggml.merges"):
        assert file.metadata[key] == metadata[key]
