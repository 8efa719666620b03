"""What a process is asked, and which figures its answers give."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sparkinfer.errors import OptionError
from sparkinfer.evaluation.builds import _building_environment
from sparkinfer.evaluation.guards import GUARD_TOKENS, context_text
from sparkinfer.evaluation.inputs import (
    Files,
    Prompts,
    encode_orders,
    group_of,
    held_out,
    make_prompts,
    open_questions,
)
from sparkinfer.evaluation.process import Run, measured_environment
from sparkinfer.evaluation.record import Guard, Metric, Scope
from sparkinfer.evaluation.tasks import one_time_costs, samples_of, warmup_orders
from sparkinfer.evaluation.timeleft import Timer

MODEL, OTHER = Path("model.gguf"), Path("other.gguf")
SCOPE = Scope(
    name="s",
    title="s",
    device="cpu",
    target="t",
    draft="auto",
    prompts={"chat": ("one", "two")},
    metrics=(Metric("dflash_tps", "primary"), Metric("ar_tps"), Metric("prefill_tps")),
    tokens=20,
    looks=(8,),
    contexts=(32,),
    guards=(Guard("target", (8, 16)), Guard("second", (64,), ("decode_tps",))),
)
FILES = Files(MODEL, guards={"second": OTHER})
PROMPTS = Prompts(
    {"chat": ((1, 2), (3, 4)), "ctx 32": (tuple(range(32)),)},
    {MODEL: tuple(range(32)), OTHER: tuple(range(64))},
)


def count(steps: int, accepted: int) -> dict[str, int]:
    return {"steps": steps, "rows": steps, "tokens": steps, "drafted": 9, "accepted": accepted}


def answer(tokens: int, seconds: float, **paths: dict[str, int]) -> dict[str, Any]:
    return {
        "tokens": list(range(tokens)),
        "in_first": 1,
        "first_s": 0.5,
        "decode_s": seconds,
        "total_s": seconds + 0.5,
        "paths": {"prefill": count(1, 0), **paths},
        "parts": {"draft": 0.1 * seconds, "target": 0.6 * seconds, "sample": 0.1 * seconds},
    }


def test_one_process_for_each_model_with_all_it_has_to_do() -> None:
    target, second = PROMPTS.groups(SCOPE, FILES, guards=True)
    assert (target.model, target.primary, second.model, second.primary) == (
        MODEL,
        True,
        OTHER,
        False,
    )
    assert [(task.cell, task.speculate) for task in target.tasks] == [
        ("chat", True),
        ("chat", False),
        ("chat", False),  # the second prompt is answered plainly first
        ("chat", True),
        ("ctx 32", True),
        ("ctx 32", False),
        ("target ctx 8", False),
        ("target ctx 16", False),
    ]
    assert [len(task.prompt) for task in second.tasks] == [64]
    assert second.tasks[0].order()["options"]["ignore_eos"] is True
    assert target.tasks[0].order()["options"] == {
        "temperature": 0.0,
        "reuse_prefix": False,
        "max_tokens": 20,
        "speculate": True,
        "ignore_eos": False,
    }
    (alone,) = PROMPTS.groups(SCOPE, FILES, guards=False)
    assert alone.context == target.context == group_of(SCOPE, FILES, MODEL).context
    assert alone.context % 256 == 0 and alone.context >= 32 + GUARD_TOKENS


def test_a_guard_without_a_file_is_named() -> None:
    with pytest.raises(OptionError, match="guard 'second' has no file"):
        PROMPTS.groups(SCOPE, Files(MODEL), guards=True)


def test_warm_up_has_one_short_request_of_each_kind() -> None:
    (target, _) = PROMPTS.groups(SCOPE, FILES, guards=True)
    orders = warmup_orders(target.tasks, 6)
    assert [order["id"] for order in orders] == [
        "warm-up/chat/0/draft",
        "warm-up/chat/0/plain",
        "warm-up/guard/target/8",
    ]
    assert {order["options"]["max_tokens"] for order in orders} == {6}
    assert warmup_orders(target.tasks, 0) == []


def test_figures_are_tokens_after_the_first_over_the_time_after_it() -> None:
    (target,) = PROMPTS.groups(SCOPE, FILES, guards=False)
    mine = [task for task in target.tasks if task.cell == "chat"]
    window, plain = {"window/graph": count(10, 9)}, {"ar": count(19, 0)}
    results = {
        "chat/0/draft": answer(20, 1.0, **window) | {"report": {"slots": [[10, 8], [8, 1]]}},
        "chat/1/draft": answer(11, 3.0, **window)
        | {"report": {"slots": [[9, 9], [9, 0], [2, 1], [0, 0]]}},
        "chat/0/plain": answer(20, 2.0, **plain) | {"report": None},
        "chat/1/plain": answer(20, 2.0, **plain),
    }
    found = samples_of(mine, Run(results=results), SCOPE, block=2, slot=1, side="base")
    by_metric = {sample.metric: sample for sample in found}
    fast = by_metric["dflash_tps"]
    assert (fast.tokens, fast.seconds, fast.value) == (29, 4.0, 29 / 4.0)
    assert fast.paths == {"window/graph": 20} and fast.accept == pytest.approx(1.9)
    assert fast.slots == ((19, 17), (17, 1), (2, 1)) and by_metric["ar_tps"].slots == ()
    assert fast.step_ms is not None
    assert (fast.step_ms.draft, fast.step_ms.target) == pytest.approx((20.0, 120.0))
    assert fast.step_ms.total == pytest.approx(200.0)
    assert by_metric["ar_tps"].value == 38 / 4.0 and by_metric["ar_tps"].accept == 1.0
    assert by_metric["prefill_tps"].value == pytest.approx((2 + 2) / 1.0)
    assert {(s.block, s.slot, s.side, s.guard) for s in found} == {(2, 1, "base", False)}


def test_an_answer_of_one_token_has_no_decoding_speed() -> None:
    (target,) = PROMPTS.groups(SCOPE, FILES, guards=False)
    mine = [task for task in target.tasks if task.cell == "ctx 32"]
    results = {task.id: answer(1, 0.0) for task in mine}
    found = samples_of(mine, Run(results=results), SCOPE, block=0, slot=0, side="base")
    assert [sample.metric for sample in found] == ["prefill_tps"]


def test_guards_give_the_metrics_that_the_scope_names() -> None:
    target, second = PROMPTS.groups(SCOPE, FILES, guards=True)
    for group, metrics in ((target, {"decode_tps", "prefill_tps"}), (second, {"decode_tps"})):
        mine = [task for task in group.tasks if task.guard]
        results = {task.id: answer(48, 1.0, ar=count(47, 0)) for task in mine}
        found = samples_of(
            mine, Run(results=results), SCOPE, block=0, slot=0, side="base", guards=SCOPE.guards
        )
        assert {sample.metric for sample in found} == metrics
        assert all(sample.guard for sample in found)


def test_prompts_are_the_bases_tokens_and_open_questions_name_them() -> None:
    target = encode_orders(SCOPE, 1, 32, primary=True)
    assert [order["id"] for order in target] == ["chat", "held out", "texts/context"]
    assert len(target[1]["texts"]) == 12 - 2 - 1  # what is missing to twelve
    ids = {"chat": [[1, 2], [3]], "held out": [[5]] * 9, "texts/context": [[9] * 40]}
    runs = {
        MODEL: Run(results={name: {"ids": found} for name, found in ids.items()}),
        OTHER: Run(results={"texts/context": {"ids": [[8] * 64]}}),
    }
    prompts = make_prompts(SCOPE, FILES, runs)
    assert prompts.cells == {"chat": ((1, 2), (3,)), "ctx 32": ((9,) * 32,)}
    keys = [question.key("plain") for question in prompts.questions()]
    assert keys == [question.key("plain") for question in open_questions(SCOPE, 1)]
    assert [question.order()["prompt_of"] for question in open_questions(SCOPE, 1)][:4] == [
        ["chat", 0, None],
        ["chat", 1, None],
        ["texts/context", 0, 32],
        ["held out", 0, None],
    ]
    assert held_out(SCOPE, 1) == held_out(SCOPE, 1) != held_out(SCOPE, 2)
    assert held_out(replace(SCOPE, prompts={"chat": ("x",) * 12}), 1) == ()
    runs[OTHER].results["texts/context"]["ids"] = [[8] * 63]
    with pytest.raises(OptionError, match="63 tokens of text for a context of 64"):
        make_prompts(SCOPE, FILES, runs)


def test_context_text_has_the_words_and_repeats_no_sentence() -> None:
    text = context_text(1, 4000)
    sentences = text.split(". ")
    assert len(text.split()) >= 4000 and len(set(sentences)) == len(sentences)
    assert text == context_text(1, 4000) != context_text(2, 4000)


def test_what_is_paid_once_is_kept_apart() -> None:
    run = Run(imported={"seconds": 0.1}, loaded={"seconds": 2.0, "phases": {"compile": 1.5}})
    run.results["warm-up/x"] = {"total_s": 0.25}
    costs = {c.what: c.seconds for c in one_time_costs(run, block=0, slot=0, side="base")}
    assert costs == {"import": 0.1, "load": 2.0, "load: compile": 1.5, "warm-up": 0.25}


def test_time_left_counts_both_parts() -> None:
    timer = Timer(SCOPE)
    assert timer.left(SCOPE, (), ()) == ""
    timer.add(10.0, guards=False)
    assert timer.left(SCOPE, (), ()) == ", at most about 8 min left"  # 4 x (4 + 8) slots of 10 s
    timer.add(1.0, guards=True)
    assert timer.left(SCOPE, (), ()) == ", at most about 3 min left"


def test_secrets_and_foreign_settings_stay_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GITHUB_TOKEN", "PYTHONPATH", "SPARKINFER_SPEC", "LD_PRELOAD", "GIT_DIR"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    measured = measured_environment({"SPARKINFER_THREADS": "2"})
    assert measured["CUDA_VISIBLE_DEVICES"] == "0" and "PATH" in measured
    own = {name for name in measured if name.startswith("SPARKINFER_")}
    assert own == {"SPARKINFER_THREADS"}
    assert not {"GITHUB_TOKEN", "PYTHONPATH", "LD_PRELOAD"} & set(measured)
    building = _building_environment()
    assert not {"PYTHONPATH", "SPARKINFER_SPEC", "GIT_DIR"} & set(building)
