"""GGUF files byte by byte, right or wrong as a test asks for, and a call that reads all of one."""

import struct
from collections.abc import Iterable
from pathlib import Path

from sparkinfer.errors import GGUFError, SparkError, UnsupportedError
from sparkinfer.gguf import open_gguf
from sparkinfer.quant.formats import QUANT_FORMATS, dequantize

U8, U16, U32, I32, F32, BOOL, STRING, ARRAY, U64 = 0, 2, 4, 5, 6, 7, 8, 9, 10


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def kv(key: str | bytes, kind: int, payload: bytes) -> bytes:
    return string(key) + struct.pack("<I", kind) + payload


def kv_u32(key: str, value: int) -> bytes:
    return kv(key, U32, struct.pack("<I", value))


def kv_str(key: str, value: str | bytes) -> bytes:
    return kv(key, STRING, string(value))


def kv_array(key: str, kind: int, count: int, payload: bytes) -> bytes:
    return kv(key, ARRAY, struct.pack("<IQ", kind, count) + payload)


def kv_strings(key: str, values: Iterable[str | bytes]) -> bytes:
    items = list(values)
    return kv_array(key, STRING, len(items), b"".join(map(string, items)))


def tensor(
    name: str | bytes = "w", dims: Iterable[int] = (32,), kind: int = 0, offset: int = 0
) -> bytes:
    sizes = list(dims)
    head = string(name) + struct.pack("<I", len(sizes)) + struct.pack(f"<{len(sizes)}Q", *sizes)
    return head + struct.pack("<IQ", kind, offset)


def build(
    kvs: Iterable[bytes] = (),
    tensors: Iterable[bytes] = (),
    data: bytes = b"",
    *,
    version: int = 3,
    n_kvs: int | None = None,
    n_tensors: int | None = None,
    alignment: int = 32,
) -> bytes:
    """Return a file; `n_kvs` and `n_tensors` override the true counts."""
    pairs, infos = list(kvs), list(tensors)
    counts = (
        len(infos) if n_tensors is None else n_tensors,
        len(pairs) if n_kvs is None else n_kvs,
    )
    header = b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join(pairs + infos)
    return header + bytes(-len(header) % alignment) + data if data else header


def small_model() -> bytes:
    """A file with every kind of field: scalars, texts, arrays, five tensors of several types."""
    kvs = [
        kv_str("general.architecture", "llama"),
        kv_u32("general.alignment", 32),
        kv_u32("llama.context_length", 64),
        kv("llama.rope.freq_base", F32, struct.pack("<f", 1e4)),
        kv("tokenizer.ggml.add_bos_token", BOOL, b"\1"),
        kv_str("tokenizer.ggml.model", "gpt2"),
        kv_strings("tokenizer.ggml.tokens", ["a", "ü", b"\xff", "<|end|>"]),
        kv_strings("tokenizer.ggml.merges", ["a b", "\u0120 t"]),
        kv_array("tokenizer.ggml.scores", F32, 4, struct.pack("<4f", 0, 1, 2, 3)),
        kv_array("tokenizer.ggml.token_type", I32, 4, struct.pack("<4i", 1, 1, 6, 3)),
        kv_array("llama.flags", BOOL, 3, b"\0\1\1"),
        kv_u32("tokenizer.ggml.eos_token_id", 3),
    ]
    half = struct.pack("<e", 0.25)
    blocks = (
        ("token_embd.weight", (4, 4), 0, struct.pack("<16f", *range(16))),
        ("blk.0.attn_q.weight", (32, 2), 2, (half + bytes(range(16))) * 2),
        ("blk.0.attn_k.weight", (32, 2), 8, (half + bytes(range(32))) * 2),
        ("blk.0.ffn_up.weight", (256, 1), 12, half * 2 + bytes(range(140))),
        ("norm", (3,), 1, half * 3),
    )
    infos, data = [], b""
    for name, dims, kind, raw in blocks:
        infos.append(tensor(name, dims, kind, len(data)))
        data += raw + bytes(-len(raw) % 32)
    return build(kvs, infos, data)


def small_shard(index: int, count: int) -> bytes:
    """One of `count` files of a split model, each with two tensors."""
    kvs = [
        kv("split.no", U16, struct.pack("<H", index)),
        kv("split.count", U16, struct.pack("<H", count)),
        kv("split.tensors.count", I32, struct.pack("<i", 2 * count)),
    ]
    if index == 0:
        kvs.append(kv_str("general.architecture", "llama"))
    infos = [tensor(f"{index}.{name}", (8,), 0, 32 * place) for place, name in enumerate("ab")]
    return build(kvs, infos, bytes(64))


def use(path: Path) -> SparkError | None:
    """Open a file and read everything in it. Returns the error of a bad file; others propagate."""
    try:
        with open_gguf(path) as file:
            assert len(file.metadata) >= 0 and not file.changed()
            for key, value in file.metadata.items():
                file.require(key, type(value)) if value == value else None
            for name, info in file.tensors.items():
                if info.n_bytes:
                    assert file.data(name).nbytes == info.n_bytes
                    assert file.blocks(name).shape[0] == info.n_rows
            file.check_tensors()
            for name, info in file.tensors.items():
                spec = QUANT_FORMATS[info.type_name]
                blocks = file.data(name).reshape(-1, spec.block_bytes)[:9]
                assert dequantize(spec.name, blocks).shape == (len(blocks), spec.block_size)
    except (GGUFError, UnsupportedError) as error:
        assert "\n" not in str(error)
        return error
    return None
