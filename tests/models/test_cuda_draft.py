"""A draft beside its target: windows whose tokens the host sees only after they were verified. Only on a GPU."""

import json

import draft_models as dm
import golden_models as gm
import gpu_machine
import pytest
from safetensors.numpy import save_file

from sparkinfer.bench.fixed import Forced
from sparkinfer.decoding import AutoregressiveDecoder
from sparkinfer.dflash.draft import load_draft
from sparkinfer.dflash.loop import DFlashDecoder
from sparkinfer.dflash.scripted import ScriptedDraft
from sparkinfer.dflash.verify import Paths
from sparkinfer.kernels import run_params as P
from sparkinfer.models import load_target
from sparkinfer.sampling import Sampler, SamplingParams, TokenHistory

pytestmark = pytest.mark.skipif(gpu_machine.DEVICE != "cuda", reason="needs an NVIDIA GPU")
COUNT, DEPTH = 60, 4


@pytest.fixture(params=["llama-tiny-F32", "qwen35moe-tiny-F32"])
def target(request):
    loaded = load_target(gm.FOLDER / f"{request.param}.gguf", context=gm.CONTEXT, device="cuda")
    yield loaded
    loaded.close()


@pytest.fixture
def draft(target, tmp_path):
    config = target.config
    recipe = dm.Recipe(windows=(0,), taps=(0, 2), h=config.n_embd, block=DEPTH + 1)
    shape = {"num_target_layers": config.n_layers, "vocab_size": config.n_vocab}
    (tmp_path / "config.json").write_text(json.dumps(recipe.json() | shape))
    save_file(recipe.tensors(), tmp_path / "model.safetensors")
    return load_draft(tmp_path, target)


def output(decoder, target, prompt, temperature):
    """COUNT tokens."""
    sampler = Sampler(SamplingParams(temperature=temperature), target.config.n_vocab, seed=7)
    history = TokenHistory(prompt)
    decoder.begin(target.new_state(), prompt, sampler, history)
    while (left := COUNT - len(history.output)) > 0:
        result = decoder.step(left)
        decoder.commit(min(len(result.tokens), left))
    return list(history.output)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_that_stay_on_the_device_are_those_the_host_reads(
    target, draft, temperature, monkeypatch
):
    prompt = gm.tokens(20)
    plain = output(AutoregressiveDecoder(target), target, prompt, temperature)
    decoder = DFlashDecoder(target, draft, Forced("fixed", [(DEPTH + 1, "window")]), Paths(target))
    assert draft.runs_ahead
    begin_next, windows, begun = DFlashDecoder._begin_next, 0, 0

    def compared(self, step, limit):
        nonlocal windows, begun
        sent = target._intake.params.array[0, P.WORDS : P.WORDS + len(step.window)].tolist()
        assert sent == list(step.window)
        windows += 1
        begin_next(self, step, limit)  # the next block leaves its tokens in the same place
        begun += self._begun is not None

    monkeypatch.setattr(DFlashDecoder, "_begin_next", compared)
    assert output(decoder, target, prompt, temperature) == plain
    assert windows > COUNT // (DEPTH + 2)
    assert begun > windows // 2


def test_accepted_windows_that_run_ahead_are_plain_decodings(target, draft):
    prompt = gm.tokens(20)
    plain = output(AutoregressiveDecoder(target), target, prompt, 0.0)
    oracle = ScriptedDraft(
        [*prompt, *plain], [4, 0, 2, 3, 1], target.config.n_vocab, inner=draft, max_depth=DEPTH
    )
    decoder = DFlashDecoder(target, oracle, Forced("fixed", [(DEPTH + 1, "window")]), Paths(target))
    assert oracle.runs_ahead
    assert output(decoder, target, prompt, 0.0) == plain
    assert decoder.report().tau > 2
