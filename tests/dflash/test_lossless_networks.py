"""Real networks of every published layout as drafts: outputs stay plain decoding's, or follow the exact law."""

import functools
from pathlib import Path

import golden_models
import numpy as np
import pytest
from lossless_cases import PATHS, ScriptedPolicy, outcome, plain_engine, plain_outcome, spec_engine
from test_sampling import oracle
from test_sampling_law import LIKELIEST_FAULT, chance

from sparkinfer.dflash.context import ContextRows
from sparkinfer.dflash.draft import BlockDraft, load_draft
from sparkinfer.dflash.loop import DFlashDecoder
from sparkinfer.dflash.verify import Paths
from sparkinfer.sampling import Sampler, SamplingParams, TokenHistory
from sparkinfer.state.kv_cache import KvShape
from sparkinfer.tokenizer import Tokenizer

FOLDER = Path(__file__).parents[1] / "data" / "draft"
LAYOUTS = sorted(path.parent.name for path in FOLDER.glob("*/config.json"))
TARGET = "llama-tiny-F32"


@functools.cache
def draft(layout: str, activations: str) -> BlockDraft:
    return load_draft(FOLDER / layout, golden_models.target(TARGET, activations))


@pytest.mark.parametrize("activations", ["int8", pytest.param("f32", marks=pytest.mark.long)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_published_layout_changes_an_output(layout, activations):
    """Two turns, the second over kept rows; greedy, sampled, and with penalties."""
    target = golden_models.target(TARGET, activations)
    tokenizer, model = Tokenizer.from_gguf(target.file), draft(layout, activations)
    plain = plain_engine(target, tokenizer)
    steps = [
        (min(width, model.max_depth + 1), path)
        for width, path in zip((16, 4, 3, 8), PATHS, strict=True)
    ]
    for options in (
        {"logprobs": 2},
        {"temperature": 1.0, "seed": 3, "logprobs": 0},
        {"repetition_penalty": 1.4, "frequency_penalty": 0.5},
    ):
        engine = spec_engine(target, tokenizer, model, steps)
        prompt = golden_models.tokens(33)
        for _ in range(2):
            request = {"max_tokens": 30, "ignore_eos": True, **options}
            wanted = plain_outcome(plain, prompt, **request)
            got, result = outcome(engine, prompt, **request)
            assert [d for d in wanted.differences(got) if d != "usage"] == []
            assert result.speculation.gap_rows == 0 and result.speculation.drafted > 0
            prompt = [*prompt, *got.tokens, 9]


@pytest.mark.parametrize("window", [0, 48, 256, 512, 2048])
@pytest.mark.parametrize("context", [40, 256, 512, 800, 801, 1024, 1800, 1809, 4096])
def test_assumed_rows_lie_inside_the_cache(window, context):
    """Measuring in a small context must not write before the draft's cache: other arrays lie there."""
    rows = ContextRows(KvShape(1, 1, 16, "f16"), context, window)
    for length in sorted({0, 8, 32, context // 2, context - 32, context - 1} & set(range(context))):
        rows.assume(length)
        assert rows.length == length
        assert 0 <= rows.base <= length, (rows.base, length)
        rows.make_room(16)
        assert 0 <= length - rows.base <= rows.size - 16, (rows.base, rows.size)


IDS = (20, 65, 140, 201)


@pytest.mark.parametrize("layout", ["dflash2", "qwen36-35b"])
def test_rejection_with_a_real_network_follows_the_exact_law(layout):
    """Four ids are far above all others, for target and draft alike; triples of them against the target's own law."""
    target = golden_models.target(TARGET, "f32")
    params = SamplingParams(temperature=1.5, logit_bias=dict.fromkeys(IDS, 100.0), top_p=0.97)
    prompt, n_vocab, size = golden_models.tokens(12), target.config.n_vocab, len(IDS)
    law = np.zeros((size, size, size))
    for a, first in enumerate(IDS):
        for b, second in enumerate(IDS):
            rows = target.forward(target.new_state(), [*prompt, first, second], rows="all")[-3:]
            laws = [
                oracle(row[:n_vocab], params, prompt, output)[list(IDS)]
                for row, output in zip(rows, ((), (first,), (first, second)), strict=True)
            ]
            law[a, b] = laws[0][a] * laws[1][b] * laws[2]
    assert law.sum() == pytest.approx(1.0)
    decoder = DFlashDecoder(
        target,
        draft(layout, "f32"),
        ScriptedPolicy([(4, "window"), (3, "compact"), (5, "token_loop"), (2, "block")]),
        Paths(target),
        rule="rejection",
    )
    counts, state, accepted = np.zeros((size, size, size)), target.new_state(), 0
    for seed in range(500):
        state.rewind(state.length)
        history = TokenHistory(prompt)
        decoder.begin(state, prompt, Sampler(params, n_vocab, seed=seed), history)
        while len(history.output) < 3:
            step = decoder.step(20)
            accepted += step.accepted
            decoder.commit(len(step.tokens))
        counts[tuple(IDS.index(token) for token in history.output[:3])] += 1
    assert accepted > (
        10 if layout == "dflash2" else 100
    )  # its sixteen candidates rarely hold one of the four
    for axes in ((), (0,), (2,), (0, 1), (0, 2), (1, 2)):
        p_value = chance(counts.sum(axis=axes).ravel(), law.sum(axis=axes).ravel())
        assert p_value > LIKELIEST_FAULT, axes
