"""Row r of an N-row forward has the bits of that row alone at any width, length, chunking, threads, instruction set."""

import golden_models as gm
import numpy as np
import pytest

from sparkinfer.backend.isa import choose_isa
from sparkinfer.errors import OptionError

WIDTHS = range(1, 17)
CHUNKS = (16, 17, 24, 31, 32, 63, 64, 65, 100, 128, 129, 200, 320)
CASES = pytest.mark.parametrize(
    ("name", "activations"),
    [
        *((n, a) for n in gm.MODELS for a in gm.ACTIVATIONS),
        *((n, gm.BLOCK_CACHE) for n in gm.BLOCK_MODELS),
    ],
)


def needs(isa):
    try:
        choose_isa(isa)
    except OptionError as error:
        pytest.skip(str(error))


@CASES
def test_a_window_has_the_bits_of_single_rows(name, activations):
    model, length = gm.target(name, activations), gm.EDGES[-1] + 16
    alone, all_tokens = gm.single_rows(name, activations, length), gm.tokens(length)
    for edge in gm.EDGES:
        state = gm.state_at(model, all_tokens[:edge])
        for width in WIDTHS:
            window = all_tokens[edge : edge + width]
            rows = model.forward(state, window, rows="all", verify=True)
            gm.assert_same_bits(rows, alone[edge : edge + width], f"{width} rows after {edge}")


@CASES
def test_every_chunking_has_the_bits_of_single_rows(name, activations):
    model, length = gm.target(name, activations), gm.EDGES[-1] + 16
    alone, all_tokens = gm.single_rows(name, activations, length), gm.tokens(length)
    for size in CHUNKS:
        state = model.new_state()
        for start in range(0, length, size):
            part = all_tokens[start : start + size]
            rows = model.forward(state, part, rows="all")
            gm.assert_same_bits(rows, alone[start : start + size], f"{size} rows after {start}")


@CASES
def test_the_last_row_and_the_prefill_have_the_bits_of_all_rows(name, activations):
    model = gm.target(name, activations)
    for count in (1, 2, 9, 16, 17, 64, 65, 130):
        wanted = gm.single_rows(name, activations, 130)[count - 1]
        last = model.forward(model.new_state(), gm.tokens(130)[:count])
        gm.assert_same_bits(last, wanted[None], f"last of {count}")
        seen: list[tuple[int, int]] = []

        def note(done: int, total: int, seen: list[tuple[int, int]] = seen) -> None:
            seen.append((done, total))

        row = model.prefill(model.new_state(), gm.tokens(130)[:count], note)
        gm.assert_same_bits(row, wanted, f"prefill of {count}")
        assert seen == [(min(64 * i, count), count) for i in range(1, -(-count // 64) + 1)]


@CASES
@pytest.mark.parametrize("threads", [1, 3])
def test_every_number_of_threads_gives_the_same_bits(name, activations, threads):
    """More threads than cores among them; `gm.target` has two."""
    model = gm.target(name, activations, threads=threads)
    compare(model, name, activations, widths=(1, 2, 7, 16), edges=(0, 15, 250))


@CASES
@pytest.mark.parametrize("isa", ["portable", "avx2", "vnni512"])
def test_every_instruction_set_gives_the_same_bits(name, activations, isa):
    needs(isa)
    model = gm.target(name, activations, isa=isa)
    assert model.plan["isa"] == isa
    compare(model, name, activations, widths=(1, 3, 11), edges=(0, 64, 250))


def compare(model, name, activations, widths, edges):
    """Windows, then chunks, of `model` against the single rows of the first one."""
    alone = gm.single_rows(name, activations, 273)
    for edge in edges:
        state = gm.state_at(model, gm.tokens(273)[:edge])
        for width in widths:
            rows = model.forward(
                state, gm.tokens(273)[edge : edge + width], rows="all", verify=True
            )
            gm.assert_same_bits(rows, alone[edge : edge + width], f"{width} rows after {edge}")
    whole = model.forward(model.new_state(), gm.tokens(273)[:200], rows="all")
    gm.assert_same_bits(np.asarray(whole), alone[:200], "200 rows in chunks")
