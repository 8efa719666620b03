"""Faults that users of other engines have reported: paths, prefixes, recurrent state. README.md has the list."""

import itertools

import golden_models
import numpy as np
import pytest
from draft_zoo import accepting, make_draft
from fault_cases import ANY, HYBRIDS, Golden, free
from lossless_cases import (
    PATHS,
    ScriptedPolicy,
    check_context,
    outcome,
    step_paths,
)
from state_bits import Oracle, state_bits

from sparkinfer.dflash.verify import COMPACT_MAX_ROWS, Paths

# --- which path ran --------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
def test_5_28_the_path_that_was_asked_for_did_run(path):
    """5, 28: a mode that never engages looks like one that works; steps, rows and drafts are counted by path."""
    golden = Golden("qwen35-tiny-F32")
    prompt = golden_models.tokens(9)
    plain = golden.plain(prompt, **free(40))
    draft = golden.draft("oracle", [*prompt, *plain.tokens])
    _, result = outcome(golden.speculative(draft, [(4, path)]), prompt, **free(40))
    assert step_paths(result) == {"prefill": 1, path: 10}
    count = next(c for name, c in result.paths.items() if name.startswith(path))
    assert (count.rows, count.drafted, count.accepted, count.tokens) == (39, 29, 29, 39)
    report = result.speculation
    assert (report.steps, report.drafted, report.accepted) == (10, 29, 29)
    assert report.tau == 1 + 29 / 10 and report.widths == {3: 1, 4: 9} and not report.refusals


def test_5_28_a_path_that_declines_says_why_and_another_one_runs():
    """28: compact takes four rows; a wider window goes on to the next path, whole, and the refusal is counted."""
    golden = Golden("llama-tiny-F32")
    prompt = golden_models.tokens(9)
    plain = golden.plain(prompt, **free(31))
    draft = golden.draft("oracle", [*prompt, *plain.tokens])
    got, result = outcome(golden.speculative(draft, [(6, "compact")]), prompt, **free(31))
    assert not plain.differences(got)
    assert step_paths(result) == {"prefill": 1, "window": 5}
    [(reason, count)] = result.speculation.refusals.items()
    assert reason.startswith("compact: ") and str(COMPACT_MAX_ROWS) in reason and count == 5


@pytest.mark.parametrize(("rows", "compact"), list(itertools.product((True, False), (0, 1, 2))))
def test_28_every_switch_leaves_a_path_and_the_same_output(rows, compact):
    """28: with paths switched off the rest serves every width, and nothing is truncated."""
    golden = Golden("qwen35-tiny-F32")
    prompt = golden_models.tokens(9)
    plain = golden.plain(prompt, **free(40))
    for width, path in itertools.product((2, 4, 5, 16), PATHS):
        draft = golden.draft("oracle", [*prompt, *plain.tokens])
        engine = golden.speculative(draft, [(width, path)], rows=rows, compact=compact)
        got, result = outcome(engine, prompt, **free(40))
        assert not plain.differences(got)
        ran = set(step_paths(result)) - {"prefill", "ar"}
        assert ran and (rows or not ran & {"window", "block"}) and (compact or "compact" not in ran)


# --- prefixes and the draft's context --------------------------------------------------------


@pytest.mark.parametrize("name", ANY)
def test_6_7_a_long_shared_prefix_keeps_its_tokens_its_draft_rows_and_its_acceptance(name):
    """6, 7: other engines lost the draft's rows (tau about 1) or the whole prefix (0 cached tokens)."""
    golden = Golden(name)
    prefix = golden_models.tokens(500)[:448]
    prompts = [[*prefix, 11, 12], [*prefix, 13, 14, 15]]
    plain = [golden.plain(prompt, **free(60)) for prompt in prompts]
    draft = golden.draft("random", [])
    draft = make_draft("oracle", 320, [], taps=draft.taps)
    draft.guess = accepting([3, 0, 5, 1], 320)
    engine = golden.speculative(draft, [(6, "window")])
    reports = []
    for prompt, wanted in zip(prompts, plain, strict=True):
        draft.known, draft.turns = [*prompt, *wanted.tokens], 0
        got, result = outcome(engine, prompt, **free(60))
        assert [d for d in wanted.differences(got) if d != "usage"] == []
        assert not check_context(golden.target, draft, draft.known)
        reports.append((result.speculation, result.usage.cached_tokens))
    (cold, nothing), (warm, cached) = reports
    assert nothing == 0 and cached > 380
    assert cold.gap_rows == warm.gap_rows == 0
    assert cold.tau == warm.tau


@pytest.mark.parametrize("name", ANY)
def test_8_a_second_turn_computes_only_its_new_tokens(monkeypatch, name):
    """8: rows forwarded by the second turn's prompt, with drafting on."""
    golden = Golden(name)
    first = golden_models.tokens(90)
    plain = golden.plain(first, **free(20))
    draft = golden.draft("oracle", [*first, *plain.tokens])
    engine = golden.speculative(draft, [(5, "window")])
    result = engine.generate(first, **free(20))
    second = [*first, *result.tokens, 21, 22, 23, 24]
    draft.known = [*second, *golden.plain(second, **free(8)).tokens]
    rows, forward = [], golden.target.forward

    def counting(state, tokens, **more):
        rows.append(len(tokens))
        return forward(state, tokens, **more)

    monkeypatch.setattr(golden.target, "forward", counting)
    generation = engine.stream(second, **free(8))
    next(generation)
    assert sum(rows) == 5  # the last token of the answer was never computed
    assert generation.result.usage.cached_tokens == len(second) - 5
    assert draft.gap == 0


def test_23_a_prompt_that_is_all_there_works():
    """23: no new context row, or one, must not break the draft."""
    golden = Golden("qwen3-tiny-Q8_0")
    prompt = golden_models.tokens(30)
    plain = golden.plain(prompt, **free(12))
    draft = golden.draft("oracle", [*prompt, *plain.tokens])
    engine = golden.speculative(draft, [(4, "window")])
    for _ in range(3):
        got, result = outcome(engine, prompt, **free(12))
        assert [d for d in plain.differences(got) if d != "usage"] == []
    assert result.usage.cached_tokens == 29
    one = golden.plain([7], **free(12))
    draft.known = [7, *one.tokens]
    assert not one.differences(outcome(engine, [7], **free(12))[0])


@pytest.mark.parametrize("name", ANY)
def test_26_the_size_of_prompt_chunks_changes_nothing(monkeypatch, name):
    """26: chunks of 7, 16, 33 and 64 rows give the same output and the same draft rows."""
    golden = Golden(name)
    prompt = golden_models.tokens(150)
    plain = golden.plain(prompt, **free(30))
    contexts = []
    for chunk in (64, 33, 16, 7):
        monkeypatch.setattr(type(golden.target.backend), "chunk", chunk)
        draft = golden.draft("scripted", [*prompt, *plain.tokens])
        got, _ = outcome(golden.speculative(draft, [(6, "window")]), prompt, **free(30))
        assert not plain.differences(got)
        contexts.append(np.stack(draft.rows[: len(prompt)]).tobytes())
    assert len(set(contexts)) == 1


@pytest.mark.parametrize("name", ANY)
def test_26_prompts_in_turn_never_see_each_others_rows(name):
    """26: a slot that was given to another prompt must not serve an old one."""
    golden = Golden(name)
    prompts = [golden_models.tokens(70, seed=seed) for seed in (1, 2)]
    prompts.append([*prompts[0][:40], *prompts[1][:9]])
    plain = [golden.plain(prompt, **free(20)) for prompt in prompts]
    draft = golden.draft("scripted", [])
    engine = golden.speculative(draft, [(6, "window"), (3, "compact")])
    for turn in (0, 1, 0, 2, 2, 1, 0):
        draft.known = [*prompts[turn], *plain[turn].tokens]
        got, _ = outcome(engine, prompts[turn], **free(20))
        assert [d for d in plain[turn].differences(got) if d != "usage"] == []
        assert not check_context(golden.target, draft, draft.known) and draft.gap == 0


@pytest.mark.parametrize("name", HYBRIDS)
def test_21_a_prefix_that_ends_inside_an_accepted_block_resumes_exactly(name):
    """21: whichever accepted row a prefix ends in, what follows is as if it had been computed afresh."""
    golden = Golden(name)
    prompt = golden_models.tokens(20)
    plain = golden.plain(prompt, **free(24))
    draft = golden.draft("oracle", [*prompt, *plain.tokens])
    for cut in range(9, 17):
        engine = golden.speculative(draft, [(8, "window")])
        draft.known = [*prompt, *plain.tokens]
        first = engine.generate(prompt, **free(24))
        second = [*prompt, *first.tokens[:cut], 31]
        wanted = golden.plain(second, **free(16))
        draft.known = [*second, *wanted.tokens]
        got, _ = outcome(engine, second, **free(16))
        assert [d for d in wanted.differences(got) if d != "usage"] == []
        assert not check_context(golden.target, draft, draft.known)


def test_4_6_tokens_the_draft_never_saw_are_counted_and_do_not_change_the_output():
    """4, 6: after a plain request on the same engine the draft has a gap, says so, and drafts on."""
    golden = Golden("qwen35-tiny-F32")
    prompt = golden_models.tokens(40)
    plain = golden.plain(prompt, **free(20))
    draft = golden.draft("scripted", [*prompt, *plain.tokens])
    engine = golden.speculative(draft, [(6, "window")])
    first = engine.generate(prompt, **free(20), speculate=False)
    assert first.speculation is None and set(step_paths(first)) == {"prefill", "ar"}
    second = [*prompt, *first.tokens, 9]
    wanted = golden.plain(second, **free(20))
    draft.known = [*second, *wanted.tokens]
    got, result = outcome(engine, second, **free(20))
    assert [d for d in wanted.differences(got) if d != "usage"] == []
    assert result.speculation.gap_rows == result.usage.cached_tokens == 59
    assert result.speculation.accepted > 0


def test_52_no_gap_over_a_long_output_and_acceptance_does_not_decline():
    """52: gaps made acceptance fall in long outputs elsewhere; rows stay complete, late steps accept as early ones."""
    golden = Golden("qwen35-tiny-F32")
    prompt = golden_models.tokens(10)
    plain = golden.plain(prompt, **free(600))
    draft = golden.draft("oracle", [*prompt, *plain.tokens])
    draft.guess = accepting([2, 5, 0, 3], 320)
    steps = [(8, "window"), (3, "compact"), (1, "ar"), (6, "block"), (1, "ar"), (5, "token_loop")]
    policy = ScriptedPolicy(steps)
    engine = golden.speculative(draft, [], policy=policy)
    got, result = outcome(engine, prompt, **free(600))
    assert not plain.differences(got) and len(got.tokens) == 600
    assert draft.gap == 0 == result.speculation.gap_rows
    assert not check_context(golden.target, draft, draft.known)
    drafting = [step.accepted for step in policy.seen if step.width > 1]
    early, late = drafting[:40], drafting[-42:-2]
    assert sum(early) == sum(late) > 60


# --- recurrent state -------------------------------------------------------------------------


@pytest.mark.parametrize("name", HYBRIDS)
@pytest.mark.parametrize("path", PATHS)
def test_20_alternating_widths_on_recurrent_layers(name, path):
    """20: a wide window, then a step without drafts, then a wide one again: stale state showed here."""
    golden = Golden(name)
    prompt = golden_models.tokens(9)
    plain = golden.plain(prompt, **free(64))
    for kind in ("oracle", "wrong", "scripted"):
        draft = golden.draft(kind, [*prompt, *plain.tokens])
        engine = golden.speculative(draft, [(8, path), (1, "ar")])
        got, _ = outcome(engine, prompt, **free(64))
        assert not plain.differences(got)


@pytest.mark.parametrize("name", HYBRIDS)
@pytest.mark.parametrize("path", PATHS)
def test_62_the_state_after_every_rollback_is_the_sequential_one(name, path):
    """62: for every number of accepted drafts 0 .. 15 and every window width, the bits of single steps."""
    golden = Golden(name)
    model, oracle = golden.target, Oracle(golden.target)
    head, block = golden_models.tokens(37)[:21], golden_models.tokens(37)[21:]
    paths = {p.name: p for p in Paths(model).order}
    widths = range(2, COMPACT_MAX_ROWS + 1) if path == "compact" else (2, 3, 8, 16)
    for width in widths:
        for accepted in range(width):
            state = golden_models.state_at(model, head)

            def judge(index, row, accepted=accepted):
                return index < accepted

            verified = paths[path].run(state, block[:width], judge)
            assert verified.rows == (accepted + 1 if path == "token_loop" else width)
            paths[path].commit(state, accepted + 1)
            kept = [*head, *block[: accepted + 1]]
            assert state.tokens == kept
            assert state_bits(model, state) == oracle(kept)[0]
