"""What a target offers beside logits: feature taps, checks of a request, its plan, an end."""

import threading

import golden_models as gm
import numpy as np
import pytest

from sparkinfer.errors import RequestError
from sparkinfer.models import load_target

TAPPED = ("llama-tiny-F32", "qwen35-tiny-F32", "qwen35moe-tiny-F32")


@pytest.fixture(params=[(n, a) for n in TAPPED for a in gm.ACTIVATIONS], ids="-".join)
def tapped(request):
    model = gm.target(*request.param)
    yield model
    model.set_taps(())


def test_taps_have_the_same_bits_at_every_width(tapped):
    model, tokens = tapped, gm.tokens(90)
    layers = (0, model.config.n_layers - 1, 1)
    model.set_taps(layers)
    state, alone = model.new_state(), []
    for token in tokens:
        model.forward(state, [token], rows="none")
        alone.append(model.tapped(1).copy())
    wanted, n_embd = np.concatenate(alone), model.config.n_embd
    assert wanted.shape == (len(tokens), len(layers) * n_embd)
    assert not np.array_equal(wanted[:, :n_embd], wanted[:, n_embd : 2 * n_embd])
    for width in (1, 3, 16):
        state = gm.state_at(model, tokens[:60])
        model.forward(state, tokens[60 : 60 + width], verify=True)
        gm.assert_same_bits(model.tapped(width), wanted[60 : 60 + width], f"{width} rows")
    model.forward(model.new_state(), tokens)  # chunks of 64 and 26: the last chunk's rows are kept
    gm.assert_same_bits(model.tapped(26), wanted[64:], "the last chunk")


def test_taps_leave_the_logits_as_they_are(tapped):
    plain = tapped.forward(tapped.new_state(), gm.tokens(20), rows="all").copy()
    tapped.set_taps((0, 2))
    gm.assert_same_bits(tapped.forward(tapped.new_state(), gm.tokens(20), rows="all"), plain)
    tapped.set_taps(())
    assert tapped.tapped(20).shape == (20, 0)
    gm.assert_same_bits(tapped.forward(tapped.new_state(), gm.tokens(20), rows="all"), plain)


@pytest.mark.parametrize("layer", [-1, 4, 10**6])
def test_a_tap_outside_the_model_is_refused(layer):
    with pytest.raises(RequestError, match=rf"tap layers \[{layer}\] are outside 0 .. 3"):
        gm.target("llama-tiny-F32").set_taps([0, layer])


@pytest.mark.parametrize(
    ("tokens", "options", "message"),
    [
        ([], {}, "at least one"),
        ([320], {}, "token 320 is outside the vocabulary of 320"),
        ([5, -1], {"verify": True}, "token -1 is outside"),
        ([1] * 17, {"verify": True}, "17 rows is wider than 16"),
        ([1] * (gm.CONTEXT + 1), {}, f"exceed the context of {gm.CONTEXT}"),
    ],
)
def test_a_bad_request_changes_nothing(tokens, options, message):
    model = gm.target("qwen35-tiny-F32")
    state = gm.state_at(model, [1, 2, 3])
    with pytest.raises(RequestError, match=message):
        model.forward(state, tokens, **options)
    if not options:
        with pytest.raises(RequestError, match=message):
            model.prefill(state, tokens)
    assert state.tokens == [1, 2, 3]
    row = model.forward(state, [4])[0].copy()
    gm.assert_same_bits(row, model.forward(model.new_state(), [1, 2, 3, 4])[0])


def test_numpy_tokens_are_tokens():
    model = gm.target("llama-tiny-F32")
    row = model.forward(model.new_state(), list(np.array([1, 2, 3])))[0].copy()
    gm.assert_same_bits(row, model.forward(model.new_state(), [1, 2, 3])[0])


def test_rows_none_gives_no_logits():
    model = gm.target("llama-tiny-F32")
    assert model.forward(model.new_state(), [1, 2], rows="none").shape == (0, 320)


@pytest.mark.parametrize("name", gm.MODELS)
def test_the_plan_says_what_was_chosen(name):
    model = gm.target(name)
    assert model.plan["architecture"] == name.split("-")[0]
    assert model.plan["threads"] == 2 and model.plan["activations"] == "int8"
    assert model.plan["cache"] == "float16" and gm.target(name, "f32").plan["cache"] == "float32"
    assert set(gm.target(name, "f32").plan["weight_bytes"]) == {"F32"}
    assert 0 < model.weight_bytes_per_token <= sum(model.plan["weight_bytes"].values())


def test_a_closed_target_leaves_no_thread_and_may_be_closed_again():
    before = threading.active_count()
    model = load_target(gm.FOLDER / "llama-tiny-F32.gguf", context=32, threads=3)
    model.forward(model.new_state(), [1, 2, 3])
    assert threading.active_count() == before + 2
    model.close()
    model.close()
    assert threading.active_count() == before


def test_progress_counts_to_the_files_size():
    seen = []
    load_target(
        gm.FOLDER / "qwen35-tiny-F32.gguf", context=32, threads=2,
        progress=lambda *step: seen.append(step),
    ).close()  # fmt: skip
    loads = [(done, total) for what, done, total in seen if what == "load"]
    assert loads[-1][0] <= loads[-1][1]
    assert [done for done, _ in loads] == sorted(done for done, _ in loads)
    assert max(done for done, _ in loads) >= 0.9 * loads[-1][1]
