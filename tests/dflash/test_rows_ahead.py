"""What is done ahead of time: the draft's rows before the engine has said how many tokens it keeps, windows at load."""

from pathlib import Path

import golden_models
import numpy as np
import pytest
from planner_simulator import cheap, cost_table

from sparkinfer.decoding import AutoregressiveDecoder
from sparkinfer.dflash.build import build_decoder
from sparkinfer.dflash.draft import BlockDraft, load_draft
from sparkinfer.dflash.loop import DFlashDecoder
from sparkinfer.dflash.planner import make_policy
from sparkinfer.dflash.scripted import ScriptedDraft
from sparkinfer.dflash.verify import Paths
from sparkinfer.models import load_target
from sparkinfer.options import resolve
from sparkinfer.sampling import Sampler, SamplingParams, TokenHistory

DRAFT = Path(__file__).parents[1] / "data" / "draft" / "qwen35-4b"
PROMPT, DEPTH = [5, 9, 2, 7, 11], 3


def started(decoder, target):
    """A request after its first token: the state and the history."""
    state, history = target.new_state(), TokenHistory(PROMPT)
    decoder.begin(state, PROMPT, Sampler(SamplingParams(), target.config.n_vocab, seed=0), history)
    decoder.step(1)
    decoder.commit(1)
    return state, history


def answer(target, count):
    decoder = AutoregressiveDecoder(target)
    _, history = started(decoder, target)
    while len(history.output) < count:
        decoder.step(1)
        decoder.commit(1)
    return history.output


def slots(draft: BlockDraft, anchor: int) -> np.ndarray:
    proposals = draft.propose(anchor, draft.max_depth)
    return np.stack([proposals.row(slot, anchor) for slot in range(proposals.depth)])


def alone(target, tokens: list[int]) -> BlockDraft:
    """A draft that was given these tokens' rows and nothing else."""
    draft = load_draft(DRAFT, target)
    target.set_taps(draft.taps)
    target.forward(target.new_state(), tokens)
    draft.begin([])
    draft.extend(tokens, target.tapped(len(tokens)))
    return draft


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kept", range(1, DEPTH + 2))
def test_an_output_that_ends_inside_a_step_leaves_the_draft_where_the_state_is(kept, threads):
    target = golden_models.target("llama-tiny-F32", threads=threads)
    recording = PROMPT + answer(target, 12)
    draft = load_draft(DRAFT, target)
    policy = make_policy(
        resolve({"dflash_proposals": DEPTH}), cost_table(cheap, 0.1), draft.max_depth, 16
    )
    scripted = ScriptedDraft(recording, [DEPTH], target.config.n_vocab, inner=draft)
    decoder = DFlashDecoder(target, scripted, policy, Paths(target))
    state, history = started(decoder, target)
    assert len(decoder.step(8).tokens) == DEPTH + 1
    decoder.commit(kept)
    assert state.length == len(PROMPT) + kept
    assert history.output == recording[len(PROMPT) : state.length + 1]
    decoder._flush()  # where rows wait for the next look
    assert draft.length == state.length
    anchor = history.output[-1]
    found = slots(draft, anchor)
    assert np.array_equal(found, slots(alone(target, state.tokens), anchor))


def test_no_request_waits_for_a_window_to_be_recorded(tmp_path):
    target = load_target(golden_models.FOLDER / "llama-tiny-F32.gguf", context=96, threads=2)
    draft = load_draft(DRAFT, target)
    build_decoder(target, draft, resolve({"cache_dir": tmp_path}))
    widths = {
        width for width, rows, taps, *_ in target._tapes if taps == draft.taps and rows == "all"
    }
    assert widths >= set(range(2, min(draft.max_depth + 1, target.max_width) + 1))
    target.close()
