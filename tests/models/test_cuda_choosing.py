"""A draft with a Markov head and a vocabulary of its own, of which a part waits: on a GPU, or under the interpreter."""

import functools
import json
from dataclasses import replace

import draft_models as dm
import golden_models as gm
import gpu_machine
import numpy as np
import pytest
from safetensors.numpy import save_file

from sparkinfer.bench.fixed import Forced
from sparkinfer.decoding import AutoregressiveDecoder
from sparkinfer.dflash import occurring
from sparkinfer.dflash.draft import load_draft
from sparkinfer.dflash.loop import DFlashDecoder
from sparkinfer.dflash.verify import Paths
from sparkinfer.kernels import run_params as P
from sparkinfer.models import load_target
from sparkinfer.sampling import Sampler, SamplingParams, TokenHistory

ACTIVE, ROOM, SLOTS = 19, 5, 3
IDS = np.random.default_rng(4).permutation(320)[:90]
WAITING = [int(token) for token in IDS[ACTIVE:]]
gpu_only = pytest.mark.skipif(gpu_machine.DEVICE != "cuda", reason="needs an NVIDIA GPU")


@functools.cache
def target():
    from sparkinfer.backend.cuda import CudaBackend

    backend = CudaBackend(gpu_machine.DEVICE)
    return load_target(gm.FOLDER / "llama-tiny-F32.gguf", context=96, backend=backend)


@pytest.fixture(
    params=[
        (True, True),
        pytest.param((True, False), marks=gpu_only),
        pytest.param((False, True), marks=gpu_only),
    ],
    ids=["both", "head", "words"],
)
def draft(request, tmp_path, monkeypatch):
    """With a mask of its own as a row, as training writes them; a Markov head, a vocabulary of its own, or both."""
    markov, own = request.param
    monkeypatch.setattr(occurring, "ROOM", ROOM)
    rng = np.random.default_rng(2)
    extra = (("draft_active_size", ACTIVE),) if own else ()
    recipe = dm.Recipe(2, 1, 16, 32, windows=(24,), taps=(1,), block=SLOTS + 1, extra=extra)
    outputs = len(IDS) if own else 320
    more = {"mask_embedding": rng.standard_normal(64).astype(np.float32)}
    if own:
        more["draft_ids"] = IDS.astype(np.int32)
    if markov:
        more["markov_head.markov_w1.weight"] = rng.standard_normal((320, 32)).astype(np.float32)
        w2 = rng.standard_normal((outputs, 32)).astype(np.float32)
        more["markov_head.markov_w2.weight"] = w2
    (tmp_path / "config.json").write_text(json.dumps(recipe.json()))
    save_file(recipe.tensors() | more, tmp_path / "model.safetensors")
    return load_draft(tmp_path, target(), context=64)


def extend(draft, tokens):
    backend, values = target().backend, dm.features(len(tokens), 1)
    there = backend.buffer(*values.shape)
    backend.upload(there, values)
    draft.extend(tokens, there.array)


@pytest.mark.timeout(600)
def test_tokens_and_claims_are_those_of_the_rows(draft):
    """Also after waiting tokens have come up; the target's run then finds the tokens where it reads them."""
    assert draft.runs_ahead
    for new in ([], WAITING[20:23])[0 if gpu_machine.DEVICE == "cuda" else 1 :]:
        extend(draft, [*new, 7])
        assert draft.output.ids is None or set(new) <= set(draft.output.ids.tolist())
        ahead = draft.propose_ahead(9, SLOTS)
        target().wait()
        tokens, claims = ahead.told(), ahead.claims()
        sent = target()._intake.params.array[0, P.WORDS + 1 : P.WORDS + 1 + SLOTS]
        assert tokens == sent.tolist()
        proposals, previous = draft.propose(9, SLOTS), 9
        chain = proposals.chain
        assert (chain.tokens, chain.chances) == (tokens, claims)
        for slot, (token, claim) in enumerate(zip(chain.tokens, chain.chances, strict=True)):
            row = proposals.row(slot, previous).astype(np.float64)
            assert row[token] > row.max() - 0.02 * np.abs(row).max()
            if row.argmax() == token:
                assert claim == pytest.approx(1 / np.exp(row - row[token]).sum(), rel=0.1)
            previous = token


def test_memory_that_is_used_again_has_another_host_side():
    """A draft that was closed leaves addresses to the next one's buffers."""
    backend = gpu_machine.backend()
    first = backend.buffer(1, 24)
    assert backend.staging(first).shape == (1, 24)
    assert backend.staging(replace(first, width=16)).shape == (1, 16)


@gpu_only
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_outputs_are_plain_decodings(draft, temperature):
    """Ahead, and with windows that wait for the claims and are cut."""

    def output(decoder):
        sampler = Sampler(SamplingParams(temperature=temperature), target().config.n_vocab, seed=7)
        history = TokenHistory(gm.tokens(12))
        decoder.begin(target().new_state(), gm.tokens(12), sampler, history)
        while (left := 40 - len(history.output)) > 0:
            tokens = decoder.step(left).tokens
            decoder.commit(min(len(tokens), left))
        return history.output

    plain = output(AutoregressiveDecoder(target()))
    policy = Forced("fixed", [(SLOTS + 1, "window")])
    decoder = DFlashDecoder(target(), draft, policy, Paths(target()))
    assert output(decoder) == plain
    draft.runs_ahead = False
    assert output(decoder) == plain
