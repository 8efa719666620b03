"""The record: JSON there and back, one clear line for everything else."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from evaluation_records import evaluation, scope
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkinfer.errors import MissingFileError
from sparkinfer.evaluation.codec import RecordError, canonical, digest, parse_json
from sparkinfer.evaluation.record import Evaluation, Guard, Metric, Plan, load_evaluation


def test_json_there_and_back(tmp_path: Path) -> None:
    before = evaluation()
    assert Evaluation.from_json(before.to_json()) == before
    assert Evaluation.from_dict(json.loads(json.dumps(before.to_dict(), indent=4))) == before
    file = tmp_path / "record.json"
    file.write_text(before.to_json())
    assert load_evaluation(file).digest == before.digest
    with pytest.raises(MissingFileError, match=r"nothing\.json"):
        load_evaluation(tmp_path / "nothing.json")


def test_a_record_from_before_a_field_was_added_keeps_its_digest() -> None:
    record = evaluation()
    older = replace(record, samples=tuple(replace(s, slots=()) for s in record.samples))
    values = json.loads(older.to_json())
    assert all("slots" not in sample for sample in values["samples"])
    assert Evaluation.from_dict(values) == older and older.digest == digest(values)
    assert any("slots" in sample for sample in json.loads(record.to_json())["samples"])


def test_the_digest_is_of_the_content_not_of_the_file() -> None:
    record = evaluation()
    assert record.digest == digest(record.to_dict())
    values = json.loads(json.dumps(record.to_dict(), sort_keys=True))
    values["scope"]["alpha"] = 5e-2
    assert Evaluation.from_dict(values).digest == record.digest
    values["samples"][7]["value"] += 1e-9
    assert Evaluation.from_dict(values).digest != record.digest


def test_the_canonical_form() -> None:
    assert canonical({"b": (1, 2.5), "a": "é\n"}) == '{"a":"é\\n","b":[1,2.5]}'.encode()
    with pytest.raises(RecordError, match="finite"):
        canonical({"a": float("nan")})


def _without(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda values: values.pop(name)


def _with(path: str, entry: Any) -> Callable[[dict[str, Any]], None]:
    def change(values: Any) -> None:
        *folders, last = path.split(".")
        for name in folders:
            values = values[int(name)] if name.isdigit() else values[name]
        values[last] = entry

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without("plan"), r"^plan is missing \(Evaluation\)$"),
        (_with("colour", 1), r"^colour is unknown; Evaluation has id, "),
        (_with("a\nb", 1), r"^'a\\nb' is unknown; Evaluation has id"),
        (_with("samples.0.paths", {"a\nb": "x"}), r"^samples\[0\]\.paths\.'a\\nb' is 'x'"),
        (_with("plan.colour", 1), r"^plan\.colour is unknown; Plan has seed"),
        (_with("samples.3.value", "fast"), r"^samples\[3\]\.value is 'fast'; expected a number$"),
        (_with("samples.3.value", True), r"expected a number"),
        (_with("samples.3.value", float("inf")), r"expected a finite number"),
        (_with("samples.3.value", 0), r"^samples\[3\]\.value is 0\.0; expected 1e-12 to 1e\+12$"),
        (_with("samples.3.value", 10**400), r"expected a finite number"),
        (_with("samples.3.side", "a1"), r"^samples\[3\]\.side is 'a1'; expected base or candidate"),
        (_with("samples.3.side", "both"), r"expected one of base, candidate, a1, a2"),
        (_with("samples.3.block", -1), r"negative"),
        (_with("samples.3.block", 1.0), r"^samples\[3\]\.block is 1\.0; expected a whole number"),
        (_with("samples.0.paths", {"ar": "x"}), r"^samples\[0\]\.paths\.ar is 'x'"),
        (_with("samples.0.step_ms", {"draft": 1}), r"^samples\[0\]\.step_ms\.target is missing"),
        (_with("samples.0.slots", [[3, 4]]), r"^samples\[0\]\.slots has a place where more"),
        (_with("samples", {}), r"^samples is \{\}; expected a list$"),
        (_with("scope", "tiny"), r"^scope is 'tiny'; expected an object \(Scope\)$"),
        (_with("scope.draft", 3), r"^scope\.draft is 3; expected a string"),
        (_with("scope.looks", [8, 8]), r"looks are \[8, 8\]; expected rising numbers"),
        (_with("plan.looks", [8, 60]), r"a look after 60 of 12 blocks"),
        (_with("plan.blocks", [["base"]] * 12), r"block 0 is \['base'\]"),
        (_with("plan.alpha", 0.5), r"alpha is 0\.5"),
        (_with("plan.seed", -1), r"seed is -1; expected 0 or more"),
        (_with("scope.looks", [8, 10**9]), r"looks go to 1000000000; expected at most 400"),
        (_with("preflight.0.value", [1]), r"^preflight\[0\]\.value is \[1\]; expected a string or"),
        (_with("schema", "sparkinfer-eval/9"), r"this version reads 'sparkinfer-eval/1'"),
        (_with("schema", 1), r"^schema is 1; expected a string"),
    ],
)
def test_what_is_wrong_is_named(change: Callable[[dict[str, Any]], None], message: str) -> None:
    values = json.loads(evaluation().to_json())
    change(values)
    with pytest.raises(RecordError, match=message) as caught:
        Evaluation.from_dict(values)
    assert "\n" not in str(caught.value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_whatever_is_put_anywhere_is_read_or_refused(data: st.DataObject) -> None:
    root = json.loads(evaluation(blocks=1).to_json())
    place: Any = root
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        if not keys:
            return
        key = data.draw(st.sampled_from(keys))
        inside = place[key]
        if not isinstance(inside, dict | list) or data.draw(st.integers(0, 3)) == 0:
            break
        place = inside
    place[key] = data.draw(JSON)
    try:
        record = Evaluation.from_dict(root)
    except RecordError as error:
        assert "\n" not in str(error)
    else:
        assert Evaluation.from_json(record.to_json()) == record


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1, "a": 2}', "'a' is there twice"),
        ('{"a": NaN}', "NaN is not a number of JSON"),
        ("[1, 2", "not the JSON expected"),
        ("[" * 100_000, "not the JSON expected"),
        ("[1]", "expected an object"),
    ],
)
def test_text_that_is_no_record(text: str, message: str) -> None:
    with pytest.raises(RecordError, match=message):
        Evaluation.from_json(text)
    assert parse_json('{"a": 1}', "it") == {"a": 1}


def test_a_scope_that_contradicts_itself() -> None:
    for changes, message in (
        ({"metrics": (Metric("a"),)}, "primary metrics are"),
        ({"metrics": (Metric("a", "primary"), Metric("a"))}, "twice"),
        ({"prompts": {}}, "neither prompts nor contexts"),
        ({"prompts": {"all": ("x",)}}, "may not be called 'all'"),
        ({"prompts": {"chat": ()}}, r"\['chat'\] have no prompts"),
        ({"tokens": 0}, "tokens is 0"),
        ({"guards": (Guard("m", ()),)}, "guard 'm' has contexts"),
        ({"delta": 0.0}, "delta is"),
    ):
        with pytest.raises(RecordError, match=message):
            scope(**changes)
    assert scope().primary == "dflash_tps" and scope(contexts=(512,)).cells[-1] == "ctx 512"


def test_published_figures_need_one_pair_only() -> None:
    plan = Plan(0, (("base", "candidate"),), (1,), 0.02, 0.05, "dflash_tps", 0)
    record = replace(evaluation(), plan=plan, aa=(), source="published")
    assert Evaluation.from_json(record.to_json()) == record
