"""Triton form of `gated_delta` for many rows: chunks of CHUNK rows as matrix products (the WY form of the delta rule).

With unit keys K and queries Q [CHUNK, n], values V, gates b, decays summed up in logarithms to G (all of one chunk and
head), M[i, j] = exp(G[i] - G[j]) on and below the diagonal and the state S before the chunk:
A = strictly lower part of b K K^T M;  T = (I + A)^-1;  U = T b V;  W = T b exp(G) K;
V' = U - W S;  out = exp(G) Q S + (lower part of Q K^T M) V';  S = exp(G_last) S + (exp(G_last - G) K)^T V'.
`chunk_kernel` does what needs no state for all chunks at once, `scan_kernel` takes the state through them and keeps it
as it was before each, `result_kernel` gives the rows, again for all chunks at once.
Products are taken of numbers in two bfloat16 parts (three products of parts): about 16 bits of them.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from sparkinfer.backend.base import Buffer
from sparkinfer.backend.cuda import CudaRecorder
from sparkinfer.kernels.gated_delta import DeltaInputs
from sparkinfer.kernels.shapes import RecurrentShape
from sparkinfer.kernels.triton_mixers import WORD_RECURRENT, floats_at, stride_of
from sparkinfer.kernels.triton_overlap import INTERPRETED, await_inputs, release_next

CHUNK = 64
SMALLEST = 64  # head size: for less, Triton 3.6 lets warps read shared memory before one of them has written it
BLOCK = 8  # rows of a diagonal block whose inverse is taken first: its powers cannot grow much
COLUMNS, RESULT_COLUMNS = 32, 128  # of the state, of a program of the scan and of the results
CHUNK_WARPS, SCAN_WARPS, RESULT_WARPS = 4, 4, 4
SCAN_STAGES = 2  # with one, ptxas 12.8 takes the changes from a wrong place (tests/sass.py, `misled_products`)


@triton.jit
def parts(x):
    """x in two bfloat16, made for two numbers at a time: single ones are converted at a quarter of the rate."""
    if INTERPRETED:
        high = x.to(tl.bfloat16)
        return high, (x - high.to(tl.float32)).to(tl.bfloat16)
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b;
            .reg .f32 c, d;
            cvt.rn.bf16x2.f32 $0, $3, $2;
            shl.b32 a, $0, 16;
            and.b32 b, $0, 0xffff0000;
            sub.f32 c, $2, a;
            sub.f32 d, $3, b;
            cvt.rn.bf16x2.f32 $1, d, c;
            }""",
            "=&r,=&r,r,r", [x], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip


@triton.jit
def store_parts(target, x, distance):
    high, low = parts(x)
    tl.store(target, high)
    tl.store(target + distance, low)


@triton.jit
def _product(high, low, right_high, right_low):
    """A product of numbers in two parts; that of the low parts is below what counts."""
    total = tl.dot(low, right_high)
    total = tl.dot(high, right_low, total)
    return tl.dot(high, right_high, total)


@triton.jit
def _series(x, one):
    """(I - x)(I + x^2)(I + x^4)."""
    high, low = parts(x)
    square = _product(high, low, high, low)
    total = one - x
    high, low = parts(square)
    total_high, total_low = parts(total)
    total += _product(total_high, total_low, high, low)
    square_high, square_low = parts(_product(high, low, high, low))
    total_high, total_low = parts(total)
    return total + _product(total_high, total_low, square_high, square_low)


@triton.jit
def _inverse(a, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """(I + a)^-1 for a strictly lower triangular a.

    I + a = D (I + N) with D of the diagonal blocks. Both factors have inverses that are short products, because a
    block's and N's powers end: (I - x)(I + x^2)(I + x^4).
    """
    i, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    one = (i == j).to(tl.float32)
    near = tl.where(i // BLOCK == j // BLOCK, a, 0.0)
    inner = _series(near, one)
    high, low = parts(inner)
    far_high, far_low = parts(a - near)
    outer_high, outer_low = parts(_series(_product(high, low, far_high, far_low), one))
    return _product(outer_high, outer_low, high, low)


@triton.jit
def log_decay(alpha, bias, rate):
    """rate * softplus(alpha + bias)."""
    x = alpha + bias
    e = tl.exp(tl.minimum(x, 30.0))
    total = 1.0 + e
    soft = tl.where(total == 1.0, e, tl.log(total) * (e / tl.where(total == 1.0, 1.0, total - 1.0)))
    return rate * tl.where(x > 30.0, x, soft)


@triton.jit
def _rows_of(source, stride, row, rows, SIZE: tl.constexpr):
    """Rows [CHUNK, SIZE] of a matrix, zero beyond the last."""
    at = source + row.to(tl.int64)[:, None] * stride + tl.arange(0, SIZE)[None, :]
    return tl.load(at, mask=(row < rows)[:, None], other=0.0)


@triton.jit
def unit_scale(x, eps):
    return tl.div_rn(1.0, tl.sqrt_rn(tl.sum(x * x, 1) + eps))


@triton.jit(do_not_specialize=["rows"])
def chunk_kernel(
    qkv, qkv_stride, alpha, alpha_stride, beta, beta_stride, rates, biases, u, w, keys, inside, scales, decays, rows,
    eps, factor, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, SIZE: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """u [chunk, head, CHUNK, SIZE], w and keys [chunk, head, 2, CHUNK, SIZE] (both parts), inside [chunk, head, CHUNK,
    CHUNK], what queries and the state are multiplied by: scales [chunk, head, CHUNK] and decays [chunk, head].
    Sums of logarithms are float64: their differences are what counts.
    """
    release_next()
    chunk, head = tl.program_id(0), tl.program_id(1)
    key_head = head % KEY_HEADS
    i = tl.arange(0, CHUNK)
    row = chunk * CHUNK + i
    mine = row < rows
    await_inputs()
    k = _rows_of(qkv + (KEY_HEADS + key_head) * SIZE, qkv_stride, row, rows, SIZE)
    k_scale = unit_scale(k, eps)
    k *= k_scale[:, None]
    gate = tl.load(beta + row * beta_stride + head, mask=mine, other=0.0)
    gate = tl.where(mine, 1.0 / (1.0 + tl.exp(-gate)), 0.0)
    log = log_decay(tl.load(alpha + row * alpha_stride + head, mask=mine, other=0.0), tl.load(biases + head),
                     tl.load(rates + head))  # fmt: skip
    log = tl.where(mine, log, 0.0).to(tl.float64)
    total = tl.cumsum(log, 0)
    lower = i[:, None] >= i[None, :]
    ratio = tl.where(
        lower, tl.exp(tl.where(lower, total[:, None] - total[None, :], 0.0).to(tl.float32)), 0.0
    )
    place = (chunk * VALUE_HEADS + head).to(tl.int64) * CHUNK + i
    last = tl.sum(log, 0)
    q = _rows_of(qkv + key_head * SIZE, qkv_stride, row, rows, SIZE)
    q_scale = unit_scale(q, eps) * factor
    q *= q_scale[:, None]
    k_high, k_low = parts(k)
    q_high, q_low = parts(q)
    inner = _product(q_high, q_low, tl.trans(k_high), tl.trans(k_low))
    answers = _product(k_high, k_low, tl.trans(k_high), tl.trans(k_low))
    tl.store(inside + place[:, None] * CHUNK + i[None, :], inner * ratio)
    tl.store(scales + place, q_scale * tl.exp(total.to(tl.float32)))
    tl.store(decays + chunk * VALUE_HEADS + head, tl.exp(last.to(tl.float32)))
    a = tl.where(i[:, None] > i[None, :], gate[:, None] * answers * ratio, 0.0)
    t_high, t_low = parts(_inverse(a, CHUNK, BLOCK))
    d = tl.arange(0, SIZE)
    v = _rows_of(qkv + (2 * KEY_HEADS + head) * SIZE, qkv_stride, row, rows, SIZE)
    v_high, v_low = parts(v * gate[:, None])
    tl.store(u + place[:, None] * SIZE + d[None, :], _product(t_high, t_low, v_high, v_low))
    # keys again: kept in registers they would push others out
    k = (
        _rows_of(qkv + (KEY_HEADS + key_head) * SIZE, qkv_stride, row, rows, SIZE)
        * k_scale[:, None]
    )
    both = ((chunk * VALUE_HEADS + head).to(tl.int64) * 2 * CHUNK + i)[:, None] * SIZE + d[None, :]
    store_parts(keys + both, k * tl.exp((last - total).to(tl.float32))[:, None], CHUNK * SIZE)
    x_high, x_low = parts(k * (gate * tl.exp(total.to(tl.float32)))[:, None])
    store_parts(w + both, _product(t_high, t_low, x_high, x_low), CHUNK * SIZE)


@triton.jit(do_not_specialize=["rows", "layer"])
def scan_kernel(
    u, w, keys, decays, states, run, rows, layer,
    VALUE_HEADS: tl.constexpr, SIZE: tl.constexpr, CHUNK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """COLUMNS columns of one head's state through all chunks: u becomes V', states [chunk, head, 2, SIZE, SIZE] holds
    both parts of the state before each chunk.
    """
    release_next()
    part, head = tl.program_id(0), tl.program_id(1)
    i, d = tl.arange(0, CHUNK), tl.arange(0, SIZE)
    c = part * COLUMNS + tl.arange(0, COLUMNS)
    state = floats_at(run, WORD_RECURRENT) + (layer.to(tl.int64) * VALUE_HEADS + head) * SIZE * SIZE
    place = d[:, None] * SIZE + c[None, :]
    await_inputs()
    s = tl.load(state + place)
    for chunk in range((rows + CHUNK - 1) // CHUNK):
        here = chunk * VALUE_HEADS + head
        both = here.to(tl.int64) * 2 * CHUNK * SIZE + i[:, None] * SIZE + d[None, :]
        w_high, w_low = tl.load(w + both), tl.load(w + both + CHUNK * SIZE)
        k_high, k_low = tl.load(keys + both), tl.load(keys + both + CHUNK * SIZE)
        target = u + (here.to(tl.int64) * CHUNK + i)[:, None] * SIZE + c[None, :]
        before = tl.load(target)
        decay = tl.load(decays + here)
        s_high, s_low = parts(s)
        kept = states + here.to(tl.int64) * 2 * SIZE * SIZE + place
        tl.store(kept, s_high)
        tl.store(kept + SIZE * SIZE, s_low)
        change = before - _product(w_high, w_low, s_high, s_low)
        tl.store(target, change)
        c_high, c_low = parts(change)
        s = s * decay + _product(tl.trans(k_high), tl.trans(k_low), c_high, c_low)
    tl.store(state + place, s)


@triton.jit(do_not_specialize=["rows"])
def result_kernel(
    qkv, qkv_stride, u, inside, scales, states, out, out_stride, rows,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, SIZE: tl.constexpr, CHUNK: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """COLUMNS columns of a head's rows of one chunk."""
    release_next()
    part, chunk, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i, d = tl.arange(0, CHUNK), tl.arange(0, SIZE)
    c = part * COLUMNS + tl.arange(0, COLUMNS)
    row = chunk * CHUNK + i
    here = (chunk * VALUE_HEADS + head).to(tl.int64)
    at = here * CHUNK + i
    await_inputs()
    kept = states + here * 2 * SIZE * SIZE + d[:, None] * SIZE + c[None, :]
    s_high, s_low = tl.load(kept), tl.load(kept + SIZE * SIZE)
    q = (
        _rows_of(qkv + head % KEY_HEADS * SIZE, qkv_stride, row, rows, SIZE)
        * tl.load(scales + at)[:, None]
    )
    q_high, q_low = parts(q)
    result = _product(q_high, q_low, s_high, s_low)
    p_high, p_low = parts(tl.load(inside + at[:, None] * CHUNK + i[None, :]))
    c_high, c_low = parts(tl.load(u + at[:, None] * SIZE + c[None, :]))
    result += _product(p_high, p_low, c_high, c_low)
    target = out + row.to(tl.int64)[:, None] * out_stride + head * SIZE + c[None, :]
    tl.store(target, result, mask=(row < rows)[:, None])


def chunk_buffers(recorder: CudaRecorder, shape: RecurrentShape) -> tuple[torch.Tensor, ...]:
    """What either chunk kernel leaves for the others: u, w, keys, scales, decays."""
    heads, chunks = shape.value_heads, -(-recorder.rows // CHUNK)
    places = chunks * heads * CHUNK
    return (
        recorder.scratch("delta u", places * shape.head_size),
        recorder.scratch("delta w", 2 * places * shape.head_size, torch.bfloat16),
        recorder.scratch("delta keys", 2 * places * shape.head_size, torch.bfloat16),
        recorder.scratch("delta scales", places),
        recorder.scratch("delta decays", chunks * heads),
    )


def chunk_inputs(inputs: DeltaInputs) -> tuple[Any, ...]:
    """A chunk kernel's first arguments."""
    strided = [(b.array, stride_of(b.array)) for b in (inputs.qkv, inputs.alpha, inputs.beta)]
    return *strided[0], *strided[1], *strided[2], inputs.decay_rate.array, inputs.time_bias.array


def record_wide(
    recorder: CudaRecorder, inputs: DeltaInputs, shape: RecurrentShape, layer: int, params: Buffer, out: Buffer,
    eps: float,
) -> None:  # fmt: skip
    """Always advances the state. Deterministic: a head's columns belong to one program."""
    rows, heads, size = recorder.rows, shape.value_heads, shape.head_size
    if recorder.owner.warpgroups and size == 128:
        # Gluon is not everywhere
        from sparkinfer.kernels.gated_delta.triton_hopper import record_hopper

        record_hopper(recorder, inputs, shape, layer, params, out, eps)
        return
    chunks = -(-rows // CHUNK)
    u, w, keys, scales, decays = chunk_buffers(recorder, shape)
    inside = recorder.scratch("delta inside", chunks * heads * CHUNK * CHUNK)
    states = recorder.scratch("delta states", 2 * chunks * heads * size * size, torch.bfloat16)
    given = chunk_inputs(inputs)
    numbers = {"VALUE_HEADS": heads, "SIZE": size, "CHUNK": CHUNK}
    recorder.launch(
        chunk_kernel, (chunks, heads),
        *given, u, w, keys, inside, scales, decays, rows, eps, size**-0.5,
        KEY_HEADS=shape.key_heads, BLOCK=BLOCK, num_warps=CHUNK_WARPS, overlap=True, **numbers,
    )  # fmt: skip
    columns = min(size, COLUMNS)
    recorder.release()  # the scan leaves multiprocessors idle
    recorder.launch(
        scan_kernel, (size // columns, heads), u, w, keys, decays, states, params.array, rows, layer,
        COLUMNS=columns, num_warps=SCAN_WARPS, num_stages=SCAN_STAGES, overlap=True, **numbers,
    )  # fmt: skip
    columns = min(size, RESULT_COLUMNS)
    recorder.launch(
        result_kernel, (size // columns, chunks, heads),
        *given[:2], u, inside, scales, states, out.array, stride_of(out.array), rows,
        KEY_HEADS=shape.key_heads, COLUMNS=columns, num_warps=RESULT_WARPS, overlap=True, **numbers,
    )  # fmt: skip
