"""Verbs on real (tiny) model files, and on a file that cannot run."""

import json
from pathlib import Path
from typing import Any

import pytest

from sparkinfer.cli import app
from sparkinfer.gguf import write_gguf

GOLDEN = Path(__file__).parent.parent / "data" / "golden"
LLAMA = str(GOLDEN / "llama-tiny-F32.gguf")


@pytest.fixture(autouse=True)
def shared_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled code is shared with all tests: compiling is not what these are about."""
    monkeypatch.delenv("SPARKINFER_CACHE_DIR")


def run(*arguments: str) -> int:
    return app.main(arguments)


def test_inspect_sums_up_a_file(capsys: Any) -> None:
    assert run("inspect", LLAMA, "--json", "--tensors") == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["architecture"], facts["runnable"], facts["shards"]) == ("llama", "yes", 1)
    assert sum(row["tensors"] for row in facts["types"]) == len(facts["tensors"])
    assert facts["tensor_bytes"] == sum(tensor["bytes"] for tensor in facts["tensors"])
    assert facts["types"][0]["bits_per_weight"] == 32.0
    assert facts["metadata"]["tokenizer.ggml.tokens"]["length"] > 4


def test_inspect_prints_tables(capsys: Any) -> None:
    assert run("inspect", LLAMA, "--tensors") == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["architecture", "llama"] in rows and ["runnable", "yes"] in rows
    assert any(row[:1] == ["token_embd.weight"] for row in rows)
    assert any(row[:1] == ["tokenizer.ggml.tokens"] and row[2] == "items:" for row in rows)


def test_inspect_shows_what_cannot_run(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "odd.gguf"
    tensors = [("w.weight", (256, 2), "IQ1_S", bytes(2 * 50)), ("b", (3,), "F32", bytes(12))]
    write_gguf(path, {"general.architecture": "mamba"}, tensors)
    assert run("inspect", str(path), "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["runnable"].startswith("no: unknown architecture 'mamba'; known: llama, ")
    assert facts["types"][0] == {
        "type": "IQ1_S",
        "tensors": 1,
        "parameters": 512,
        "bytes": 100,
        "decoder": False,
        "bits_per_weight": 1.562,
    }
    assert run("inspect", str(path)) == 0
    assert "no decoder in this build" in capsys.readouterr().out
    assert run("run", "-m", str(path), "hi") == 65


def test_run_continues_a_text(capsys: Any) -> None:
    arguments = ["run", "-m", LLAMA, "--raw", "abc", "-n", "4", "--json", "-c", "64", "-t", "2"]
    assert run(*arguments, "--isa", "portable", "--activations", "f32") == 0
    record = json.loads(capsys.readouterr().out)
    plan = record["plan"]
    assert record["usage"]["completion_tokens"] <= 4
    assert (plan["isa"], plan["threads"], plan["activations"]) == ("portable", 2, "f32")
    assert plan["context"] == 64


def test_bench_writes_a_record_for_each_workload(capsys: Any) -> None:
    counts = ["-p", "8", "-n", "3", "--widths", "1,2", "-d", "0,5", "-r", "2", "-t", "2"]
    assert run("bench", "-m", LLAMA, *counts, "--json") == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    names = ["pp8", "tg3", "v1", "v2"]
    assert [r["test"] for r in records] == [*names, *(f"{name} @ d5" for name in names)]
    for record in records:
        assert len(record["seconds"]) == 2 and min(record["seconds"]) > 0
        assert record["plan"]["threads"] == 2
        assert record["model"]["weight_bytes_per_token"] > 0
    assert records[2]["cost"] == 1.0 and records[3]["cost"] > 0


def test_bench_refuses_what_the_model_cannot_hold(capsys: Any) -> None:
    assert run("bench", "-m", LLAMA, "-p", "100000", "-r", "1") == 2
    assert run("bench", "-m", LLAMA, "--widths", "1,99", "-p", "0", "-n", "0", "-r", "1") == 2
    errors = capsys.readouterr().err
    assert "100000" in errors and "--widths 99 is too wide" in errors


def test_doctor_says_whether_a_model_fits(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("doctor", "-m", LLAMA, "--json") == 0
    findings = json.loads(capsys.readouterr().out)
    assert findings[-1] == {
        "section": "model",
        "name": "draft",
        "value": "none: tokens come one at a time; -md takes one",
        "problem": "",
    }
    assert findings[-2]["section"] == "model" and findings[-2]["problem"] == ""
    assert findings[-2]["value"] == "2 MiB for a context of 4096 (float16)"
    assert run("doctor", "-m", str(Path(LLAMA).parent / "qwen3-tiny-Q8_0.gguf"), "--json") == 0
    cache = json.loads(capsys.readouterr().out)[-2]["value"]
    assert cache == "4 MiB for a context of 4096 (float16), 2 MiB with --kv-cache q8_0"
    monkeypatch.setattr("sparkinfer.machine.available_memory", lambda: 1000)
    assert run("doctor", "-m", LLAMA) == 1
    assert "pull a smaller quant" in capsys.readouterr().out


def test_doctor_says_whether_a_draft_fits(capsys: Any) -> None:
    demo = Path(__file__).parents[2] / "examples" / "hybrid-demo"
    target, draft = str(demo / "target.gguf"), str(demo / "draft.gguf")
    assert run("doctor", "-m", target, "-md", draft, "--json") == 0
    finding = json.loads(capsys.readouterr().out)[-1]
    assert (finding["value"], finding["problem"]) == (draft, "")
    assert run("doctor", "-m", LLAMA, "-md", draft) == 1
    assert "does not fit: its hidden size is 512" in " ".join(capsys.readouterr().out.split())


def test_a_draft_is_checked_before_the_model_is_loaded(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def loaded(*_: Any, **__: Any) -> None:
        raise AssertionError("the model was loaded first")

    monkeypatch.setattr("sparkinfer.models.load_target", loaded)
    draft = Path(__file__).parents[2] / "examples" / "hybrid-demo" / "draft.gguf"
    assert run("run", "-m", LLAMA, "hi", "-md", str(tmp_path / "none")) == 66
    assert run("run", "-m", LLAMA, "hi", "-md", str(draft)) == 65
    (tmp_path / "part.gguf").write_bytes(draft.read_bytes()[:9000])
    assert run("run", "-m", LLAMA, "hi", "-md", str(tmp_path / "part.gguf")) == 65
    errors = capsys.readouterr().err
    assert "there is no draft at" in errors and "does not fit" in errors and "cut off" in errors


def test_a_draft_is_no_model(capsys: Any) -> None:
    draft = Path(__file__).parents[2] / "examples" / "hybrid-demo" / "draft.gguf"
    assert run("run", "-m", str(draft), "hi") == 65
    assert run("inspect", str(draft)) == 0
    out, err = capsys.readouterr()
    assert "no: a draft; -md takes it" in out
    assert "draft.gguf is a draft; give the model it was trained for" in err


def test_pull_checks_a_local_file(capsys: Any) -> None:
    assert run("pull", LLAMA) == 0
    out, err = capsys.readouterr()
    assert out == f"{LLAMA}\n"
    assert err.startswith("llama, ") and "SHA-256 " in err
