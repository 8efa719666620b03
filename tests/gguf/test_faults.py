"""Bad files by row of the fault contract: one line, the right exit code, at once, in little memory.

Row 1 not a file, 2 other formats, 3 versions, 4 truncation, 5 counts, 6 lengths, 7 value types,
8 names, 9 alignment, 10 dimensions, 11 offsets, 12 tensor types, 13 rows, 17 and 19 tokenizer.
"""

import os
import struct
import time
import tracemalloc
from pathlib import Path

import pytest
from gguf_bytes import (
    ARRAY,
    BOOL,
    F32,
    I32,
    STRING,
    U8,
    U64,
    build,
    kv,
    kv_array,
    kv_str,
    kv_strings,
    kv_u32,
    small_model,
    string,
    tensor,
)

from sparkinfer.errors import GGUFError, MissingFileError, UnsupportedError
from sparkinfer.gguf import open_gguf
from sparkinfer.gguf.shard import open_shard

TOKENS = kv_strings("tokenizer.ggml.tokens", ["a", "b", "c"])
NESTED = struct.pack("<IQ", ARRAY, 1) * 5000 + struct.pack("<IQ", U8, 0)
DATA = bytes(256)


def with_type(kind: int, payload: bytes = b"") -> bytes:
    return build([kv("some.key", kind, payload)])


FAULTS: dict[str, tuple[bytes, str]] = {
    "row01-empty": (b"", r"is not a GGUF file \(0 bytes\)"),
    "row01-three-bytes": (b"GGU", r"is not a GGUF file \(3 bytes\)"),
    "row02-html": (b"\n<!DOCTYPE html><html>", "this is an HTML page; .*use its /resolve/ link"),
    "row02-xml": (b"<?xml version='1.0'?><Error>", "this is an XML page"),
    "row02-ggml": (b"lmgg" + bytes(60), "this is an old GGML file"),
    "row02-ggml-text": (b"GGML" + bytes(60), "this is an old GGML file"),
    "row02-safetensors": (struct.pack("<Q", 70) + b'{"a":{"dtype":"F32"}}', "safetensors file"),
    "row02-zip": (b"PK\x03\x04" + bytes(60), "zip archive, perhaps a PyTorch checkpoint"),
    "row02-pickle": (b"\x80\x02}q\x00.", "Python pickle"),
    "row02-lfs": (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer; run `git lfs"),
    "row02-gzip": (b"\x1f\x8b\x08\x00", "gzip archive"),
    "row02-tar": (b"x" * 257 + b"ustar\0", "tar archive"),
    "row02-json": (b'{"error": "not found"}', "JSON text"),
    "row02-text": (b"404: Not Found", "text file"),
    "row02-zeros": (bytes(4096), "zero bytes; the download was not completed"),
    "row02-other": (b"\xde\xad\xbe\xef", r"it starts with de ad be ef"),
    "row02-one-pickle-byte": (b"\x80\x80\x80\x80", r"it starts with 80 80 80 80"),
    "row03-version-0": (build(version=0), "is 0, supported are 2 and 3"),
    "row03-version-1": (build(version=1), "is 1, supported are 2 and 3"),
    "row03-version-99": (build(version=99), "is 99, supported are 2 and 3"),
    "row03-big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian.*versions 2 and 3"),
    "row03-swapped-magic": (b"FUGG" + bytes(20), "GGUF file with swapped bytes"),
    "row04-magic-only": (b"GGUF", "version .*needs 8 bytes of file, present are 4; .*fetch"),
    "row04-counts": (build()[:20], "metadata count .*needs 24 bytes of file, present are 20"),
    "row05-kv-count": (build(n_kvs=2**63), "metadata count .*is 9,223,372,036,854,775,808"),
    "row05-kv-count-by-size": (build(n_kvs=60000), "needs 780,024 bytes of file, present are 24"),
    "row05-tensor-count": (build(n_tensors=2**63), "tensor count .*is 9,223,372,036,854,775,808"),
    "row05-tensor-count-by-size": (build(n_tensors=9999), "tensor count of 9,999 .*needs"),
    "row06-key-length": (
        build([struct.pack("<Q", 2**63) + bytes(20)], n_kvs=1),
        "key 0.* has 9,223,372,036,854,775,808 bytes, accepted are 1 to 65,535",
    ),
    "row06-string-length": (with_type(STRING, struct.pack("<Q", 2**63)), "'some.key'.*needs"),
    "row06-string-length-wraps": (with_type(STRING, struct.pack("<Q", 2**64 - 1)), "needs"),
    "row06-array-length-63": (build([kv_array("a.b", U8, 2**63, b"")]), "'a.b'.*needs"),
    "row06-array-length-40": (build([kv_array("a.b", F32, 2**40, b"")]), "needs 4,398,046,511"),
    "row06-strings-length": (build([kv_array("a.b", STRING, 2**40, b"")]), "needs 8,796,093,022"),
    "row06-item-length": (
        build([kv_array("a.b", STRING, 2, string("x") + struct.pack("<Q", 2**62))]),
        "item 1 of metadata array 'a.b'.*needs 4,611,686,018,427,38",
    ),
    "row06-item-cut": (
        build([kv_array("a.b", STRING, 3, string("x" * 20))]),
        "length of item 1 of metadata array 'a.b'.*needs",
    ),
    "row06-nested": (with_type(ARRAY, NESTED), "holds arrays, which are not supported"),
    "row06-too-many-items": (
        build([kv_array("a.b", U8, 5 << 20, bytes(5 << 20))]),
        "has 5,242,880 items, the arrays of a file may have 4,194,304 together",
    ),
    "row07-unknown-type": (with_type(13, bytes(8)), "is 13, known are 0 uint8, .*12 float64"),
    "row07-unknown-item-type": (build([kv_array("a.b", 77, 1, bytes(8))]), "is 77, known are"),
    "row07-bool-2": (with_type(BOOL, b"\2"), "a bool of 2, accepted are 0 and 1"),
    "row07-bools": (build([kv_array("a.b", BOOL, 3, b"\0\1\7")]), "a bool of 7"),
    "row07-architecture": (
        build([kv_u32("general.architecture", 1)]),
        "'general.architecture'.*has type uint32, expected string",
    ),
    "row08-duplicate-key": (build([kv_u32("a", 1), kv_u32("a", 2)]), "key 'a'.*occurs twice"),
    "row08-duplicate-tensor": (build([], [tensor(), tensor()], DATA), "'w'.*occurs twice"),
    "row08-key-not-utf8": (build([kv(b"\xff", U8, b"\0")]), "metadata key 0.*is not UTF-8"),
    "row08-key-empty": (build([kv("", U8, b"\0")]), "key 0.*has 0 bytes"),
    "row08-name-not-utf8": (build([], [tensor(b"\xc3(")], DATA), "name of tensor 0.*not UTF-8"),
    "row08-name-empty": (build([], [tensor("")], DATA), "name of tensor 0.*has 0 bytes"),
    "row08-name-65": (build([], [tensor("n" * 65)], DATA), "has 65 bytes, accepted are 1 to 64"),
    "row08-value-not-utf8": (build([kv_str("a.b", b"\xff")]), "'a.b'.*is not UTF-8"),
    "row08-item-not-utf8": (
        build([kv_strings("a.b", ["x", b"\xe2\x82"])]),
        "item 1 of metadata array 'a.b'.*is not UTF-8",
    ),
    "row08-item-split-over-two": (
        build([kv_strings("a.b", [b"\xc3", b"\xa9"])]),
        "item 0 of metadata array 'a.b'.*is not UTF-8",
    ),
    **{
        f"row09-alignment-{value}": (
            build([kv_u32("general.alignment", value)]),
            f"'general.alignment'.*is {value}, accepted are powers of two from 8",
        )
        for value in (0, 3, 4, 33, 2**31, 2**32 - 1)
    },
    "row09-alignment-type": (
        build([kv("general.alignment", U64, struct.pack("<Q", 32))]),
        "has type uint64, expected uint32",
    ),
    **{
        f"row10-{n}-dimensions": (
            build([], [string("w") + struct.pack("<I", n) + bytes(64)], DATA),
            f"'w'.*has {n:,} dimensions, accepted are 1 to 4",
        )
        for n in (0, 5, 10**6)
    },
    "row10-zero": (build([], [tensor("w", (32, 0))], DATA), r"'w'.*shape \(32, 0\) with a zero"),
    "row10-product": (build([], [tensor("w", (2**62, 4))], DATA), r"'w'.*more than 2\^63"),
    "row10-product-wraps": (build([], [tensor("w", (2**32,) * 4)], DATA), r"'w'.*more than 2"),
    "row11-unaligned": (build([], [tensor(offset=8)], DATA), "8 is not a multiple of the align"),
    "row11-past-end": (build([], [tensor(offset=2**40)], DATA), "'w'.*needs 1,099,511,.*present"),
    "row11-past-2-64": (build([], [tensor(offset=2**64 - 32)], DATA), "'w'.*needs 18,446,744"),
    "row11-overlap": (
        build([], [tensor("w"), tensor("v", offset=96)], DATA),
        r"tensor 'v'.*inside tensor 'w' \(bytes 96 to 224\)",
    ),
    "row11-same-place": (build([], [tensor("w"), tensor("v")], DATA), "'v'.*inside tensor 'w'"),
    "row11-unknown-type-inside": (
        build([], [tensor("w"), tensor("v", kind=250, offset=64)], DATA),
        "tensor 'v'.*inside tensor 'w'",
    ),
    "row13-row-of-33": (
        build([], [tensor("w", (33, 32), kind=2)], bytes(4096)),
        "'w'.*rows have 33 values, which is not a multiple of 32, the block size of Q4_0",
    ),
    "row13-row-of-128": (
        build([], [tensor("w", (128, 2), kind=14)], bytes(4096)),
        "multiple of 256, the block size of Q6_K",
    ),
    "row17-scores": (
        build([TOKENS, kv_array("tokenizer.ggml.scores", F32, 2, bytes(8))]),
        "scores'.*has 2 entries, but there are 3 tokens",
    ),
    "row17-token-type-length": (
        build([TOKENS, kv_array("tokenizer.ggml.token_type", I32, 4, bytes(16))]),
        "token_type'.*has 4 entries, but there are 3 tokens",
    ),
    "row17-token-type-u8": (
        build([TOKENS, kv_array("tokenizer.ggml.token_type", U8, 3, bytes(3))]),
        "token_type'.*has type array of uint8, expected array of int32",
    ),
    "row17-tokens-are-numbers": (
        build([kv_array("tokenizer.ggml.tokens", I32, 1, bytes(4))]),
        "tokens'.*has type array of int32, expected array of string",
    ),
    **{
        f"row19-{name}": (
            build([kv_u32(f"tokenizer.ggml.{name}_token_id", 3), TOKENS]),
            f"{name}_token_id'.*is 3, but the vocabulary has ids 0 to 2",
        )
        for name in ("bos", "eos", "mask", "padding", "unknown")
    },
    "row19-draft-mask": (
        build([kv_u32("dflash.mask_token_id", 2**32 - 1), TOKENS]),
        "'dflash.mask_token_id'.*is 4294967295",
    ),
    "row19-negative": (
        build([kv("tokenizer.ggml.eos_token_id", I32, struct.pack("<i", -1)), TOKENS]),
        "is -1, but the vocabulary",
    ),
    "row19-type": (
        build([kv_str("tokenizer.ggml.eos_token_id", "2"), TOKENS]),
        "has type string, expected an integer",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_bad_file(name: str, tmp_path: Path) -> None:
    content, message = FAULTS[name]
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    start = time.process_time()
    with pytest.raises(GGUFError, match=message) as caught:
        open_gguf(path)
    seconds = time.process_time() - start
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    text = str(caught.value)
    assert caught.value.exit_code == 65
    assert text.isprintable() and "bad.gguf" in text and "; " in text
    assert " at byte " in text or name.startswith("row01")
    assert seconds < 0.1 and peak < (8 << 20) + len(content)


def test_row01_other_than_files(tmp_path: Path) -> None:
    fifo, link = tmp_path / "fifo.gguf", tmp_path / "link.gguf"
    os.mkfifo(fifo)
    link.symlink_to(fifo)
    for path in (fifo, link, tmp_path, Path("/dev/zero"), Path("/dev/null")):
        with pytest.raises(MissingFileError, match="is not a regular file") as caught:
            open_gguf(path)
        assert caught.value.exit_code == 66
    for absent in (tmp_path / "none.gguf", fifo / "x", tmp_path / "a\nb", Path("a\0b"), "n" * 999):
        with pytest.raises(MissingFileError) as caught:
            open_gguf(absent)
        assert str(caught.value).isprintable()


def test_row04_every_sixteenth(tmp_path: Path) -> None:
    content = small_model()
    path = tmp_path / "cut.gguf"
    for sixteenth in range(16):
        size = len(content) * sixteenth // 16
        path.write_bytes(content[:size])
        with pytest.raises(GGUFError, match="fetch it again") as caught:
            open_gguf(path)
        if sixteenth:
            assert f"bytes of file, present are {size:,}" in str(caught.value)


def test_row05_sparse_file_of_a_terabyte(tmp_path: Path) -> None:
    """A size that vouches for any count must not lead to reading a terabyte."""
    path = tmp_path / "sparse.gguf"
    for kind, count in ((U8, 2**39), (STRING, 2**34), (BOOL, 2**28 - 100)):
        path.write_bytes(build([kv_array("a.b", kind, count, b"")]))
        os.truncate(path, 2**40)
        with pytest.raises(GGUFError, match=r"'a.b'.*(accepted|together)"):
            open_gguf(path)
    path.write_bytes(with_type(STRING, struct.pack("<Q", 2**39)))
    os.truncate(path, 2**40)
    with pytest.raises(GGUFError, match="headers up to 268,435,456 are accepted"):
        open_gguf(path)


def test_row08_tokens_may_be_any_bytes(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    tokens = [b"\xff", b"\xe2\x82", b"\xac", b"\0", b"a\0\0\0\0\0\0\0\0b", b"", "ü".encode()]
    path.write_bytes(build([kv_strings("tokenizer.ggml.tokens", tokens)]))
    texts = open_gguf(path).require("tokenizer.ggml.tokens", list)
    assert [text.encode("utf-8", "surrogateescape") for text in texts] == tokens


def test_row12_unknown_type_opens_but_has_no_data(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(build([], [tensor("w", (7, 3), kind=250), tensor("v", offset=32)], DATA))
    file = open_gguf(path)
    assert (file.tensors["w"].type_name, file.tensors["w"].n_bytes) == ("type 250", 0)
    assert file.data("v").nbytes == 128
    for call in (lambda: file.data("w"), file.require_decodable, file.check_tensors):
        with pytest.raises(UnsupportedError, match=r"'w'.*unknown type 250; supported.*Q4_K"):
            call()
    with pytest.raises(UnsupportedError):
        open_gguf(path, check_tensors=True)


def test_row12_known_type_without_decoder(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(build([], [tensor("w", (256,), kind=19)], DATA))
    file = open_gguf(path)
    assert (file.tensors["w"].type_name, file.data("w").nbytes) == ("IQ1_S", 50)
    with pytest.raises(UnsupportedError, match=r"'w'.*IQ1_S, which has no decoder; supported"):
        file.require_decodable()


SCALES = {
    "nan": (b"\x00\x7e", r"'w' \(Q4_0\).*block 2 of 4 has a scale that is NaN or infinite"),
    "inf": (b"\x00\x7c", "block 2 of 4"),
    "minus-inf": (b"\x00\xfc", "block 2 of 4"),
}


@pytest.mark.parametrize("name", SCALES)
def test_row14_block_scales(name: str, tmp_path: Path) -> None:
    bits, message = SCALES[name]
    good = b"\x00\x3c" + bytes(16)
    path = tmp_path / "m.gguf"
    path.write_bytes(build([], [tensor("w", (64, 2), kind=2)], good * 2 + bits + bytes(16) + good))
    open_gguf(path)
    with pytest.raises(GGUFError, match=message):
        open_gguf(path, check_tensors=True)


def test_row14_all_scales_zero(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(build([], [tensor("w", (64,), kind=2)], bytes(2) + b"\x55" * 16 + bytes(18)))
    with pytest.raises(GGUFError, match="all scales of its 2 blocks are zero"):
        open_gguf(path, check_tensors=True)


@pytest.mark.parametrize(("kind", "bits"), [(0, "0000807f"), (1, "007c"), (30, "c0ff")])
def test_row14_plain_values(kind: int, bits: str, tmp_path: Path) -> None:
    raw = bytes.fromhex(bits)
    path = tmp_path / "m.gguf"
    path.write_bytes(build([], [tensor("norm", (5,), kind=kind)], bytes(len(raw) * 4) + raw))
    with pytest.raises(GGUFError, match=r"'norm'.*value 4 of 5 is not a finite number"):
        open_gguf(path, check_tensors=True)


def test_empty_array_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "模型.gguf"
    for kind in (STRING, BOOL, F32):
        path.write_bytes(build([kv_array("a.b", kind, 0, b"")]))
        assert dict(open_gguf(path).metadata) == {"a.b": []}
    path.write_bytes(b"no model")
    with pytest.raises(GGUFError, match="模型.gguf' at byte 0: not a GGUF file"):
        open_gguf(path)


def test_version_2_and_no_tensors(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(build([kv_u32("a.b", 3)], version=2))
    assert open_shard(path).version == 2
    assert dict(open_gguf(path).metadata) == {"a.b": 3}
