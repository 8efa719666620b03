"""Coverage-guided fuzzing of the GGUF reader: any bytes open, or give one expected error.

Needs atheris, in an environment of its own, beside numpy. From the root of the repository:

    PYTHONPATH=src python fuzz/gguf_reader.py CORPUS -max_total_time=600 -timeout=60 \
        -rss_limit_mb=512 -max_len=4096 -dict=fuzz/gguf.dict

CORPUS is a folder that grows; it is seeded with the files of the fault tests. An input that fails
is saved as crash-* or timeout-*: make it small with -minimize_crash=1, fix the reader, and keep
the input as tests/data/crashers/NAME.bin, which the tests replay.
"""

import sys
import tempfile
from pathlib import Path

import atheris

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "gguf"))

with atheris.instrument_imports(include=["sparkinfer.gguf", "sparkinfer.quant"]):
    import gguf_bytes

MEMORY = Path("/dev/shm")
FOLDER = tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None)
NEXT_SHARD = b"\0NEXT SHARD\0"


def test_one_input(content: bytes) -> None:
    """Use the input as a file, or as a split model where it holds the mark between two shards."""
    parts = content.split(NEXT_SHARD)[:3]
    names = ["m.gguf"]
    if len(parts) > 1:
        names = [f"m-{i + 1:05d}-of-{len(parts):05d}.gguf" for i in range(len(parts))]
    paths = [Path(FOLDER.name) / name for name in names]
    for path, part in zip(paths, parts, strict=True):
        path.write_bytes(part)
    gguf_bytes.use(paths[-1])


def seed(corpus: Path) -> None:
    """Fill an empty corpus with a good file and with every bad file of the tests."""
    corpus.mkdir(parents=True, exist_ok=True)
    contents = {"small_model": gguf_bytes.small_model()}
    for count in (2, 3):
        shards = [gguf_bytes.small_shard(index, count) for index in range(count)]
        contents[f"split_in_{count}"] = NEXT_SHARD.join(shards)
    try:
        from test_faults import FAULTS
    except ImportError:  # pytest is not in this environment
        FAULTS = {}
    contents |= {name: content for name, (content, _) in FAULTS.items() if len(content) <= 4096}
    for name, content in contents.items():
        (corpus / name).write_bytes(content)


def main() -> None:
    folders = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
    if folders and not any(Path(folders[0]).glob("*")):
        seed(Path(folders[0]))
    atheris.Setup(sys.argv, test_one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
