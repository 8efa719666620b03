"""Triton form of `gated_delta` for many rows: chunks of CHUNK rows as matrix products (the WY form of the delta rule).

With unit keys K and queries Q [CHUNK, n], values V, gates b, decays summed up in logarithms to G (all of one chunk and
head), M[i, j] = exp(G[i] - G[j]) on and below the diagonal and the state S before the chunk:
A = strictly lower part of b K K^T M;  T = (I + A)^-1;  U = T b V;  W = T b exp(G) K;
V' = U - W S;  out = exp(G) Q S + (lower part of Q K^T M) V';  S = exp(G_last) S + (exp(G_last - G) K)^T V'.
`chunk_kernel` does what needs no state for all chunks at once, `scan_kernel` the rest, chunk by chunk.
"""

import triton
import triton.language as tl

from sparkinfer.backend.base import Buffer
from sparkinfer.backend.cuda import CudaRecorder
from sparkinfer.kernels.gated_delta import DeltaInputs
from sparkinfer.kernels.shapes import RecurrentShape
from sparkinfer.kernels.triton_mixers import WORD_RECURRENT, floats_at, stride_of
from sparkinfer.kernels.triton_overlap import await_inputs, release_next

CHUNK = 64
SMALLEST = 64  # head size: for less, Triton 3.6 lets warps read shared memory before one of them has written it
BLOCK = 8  # rows of a diagonal block whose inverse is taken first: its powers cannot grow much
COLUMNS = 32  # of the state, of a program of the scan
PRECISION = "bf16x3"  # products of float32 numbers in three parts
CHUNK_WARPS, SCAN_WARPS, SCAN_STAGES = 4, 4, 2


@triton.jit
def _dot(a, b, PRECISION: tl.constexpr):
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def _inverse(a, CHUNK: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr):
    """(I + a)^-1 for a strictly lower triangular a.

    I + a = D (I + N) with D of the diagonal blocks. Both factors have inverses that are short products, because a
    block's and N's powers end: (I - x)(I + x^2)(I + x^4).
    """
    i, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    one = (i == j).to(tl.float32)
    near = tl.where(i // BLOCK == j // BLOCK, a, 0.0)
    square = _dot(near, near, PRECISION)
    inner = one - near
    inner += _dot(inner, square, PRECISION)
    inner += _dot(inner, _dot(square, square, PRECISION), PRECISION)
    far = _dot(inner, a - near, PRECISION)
    square = _dot(far, far, PRECISION)
    outer = one - far
    outer += _dot(outer, square, PRECISION)
    outer += _dot(outer, _dot(square, square, PRECISION), PRECISION)
    return _dot(outer, inner, PRECISION)


@triton.jit
def _log_decay(alpha, bias, rate):
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
def _unit_scale(x, eps):
    return tl.div_rn(1.0, tl.sqrt_rn(tl.sum(x * x, 1) + eps))


@triton.jit(do_not_specialize=["rows"])
def chunk_kernel(
    qkv, qkv_stride, alpha, alpha_stride, beta, beta_stride, rates, biases, u, w, inside, scales, rows, eps, factor,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, SIZE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """u, w [chunk, head, CHUNK, SIZE], inside [chunk, head, CHUNK, CHUNK] and what the scan multiplies queries, keys
    and the state by, scales [chunk, head, 3, CHUNK]. Sums of logarithms are float64: their differences are what counts.
    """
    release_next()
    chunk, head = tl.program_id(0), tl.program_id(1)
    key_head = head % KEY_HEADS
    i = tl.arange(0, CHUNK)
    row = chunk * CHUNK + i
    mine = row < rows
    await_inputs()
    k = _rows_of(qkv + (KEY_HEADS + key_head) * SIZE, qkv_stride, row, rows, SIZE)
    k_scale = _unit_scale(k, eps)
    k *= k_scale[:, None]
    gate = tl.load(beta + row * beta_stride + head, mask=mine, other=0.0)
    gate = tl.where(mine, 1.0 / (1.0 + tl.exp(-gate)), 0.0)
    log = _log_decay(tl.load(alpha + row * alpha_stride + head, mask=mine, other=0.0), tl.load(biases + head),
                     tl.load(rates + head))  # fmt: skip
    log = tl.where(mine, log, 0.0).to(tl.float64)
    total = tl.cumsum(log, 0)
    lower = i[:, None] >= i[None, :]
    ratio = tl.where(
        lower, tl.exp(tl.where(lower, total[:, None] - total[None, :], 0.0).to(tl.float32)), 0.0
    )
    a = gate[:, None] * _dot(k, tl.trans(k), PRECISION) * ratio
    inverse = _inverse(tl.where(i[:, None] > i[None, :], a, 0.0), CHUNK, BLOCK, PRECISION)
    place = (chunk * VALUE_HEADS + head).to(tl.int64) * CHUNK + i
    d = tl.arange(0, SIZE)
    v = _rows_of(qkv + (2 * KEY_HEADS + head) * SIZE, qkv_stride, row, rows, SIZE)
    tl.store(u + place[:, None] * SIZE + d[None, :], _dot(inverse, v * gate[:, None], PRECISION))
    scaled = k * (gate * tl.exp(total.to(tl.float32)))[:, None]
    tl.store(w + place[:, None] * SIZE + d[None, :], _dot(inverse, scaled, PRECISION))
    q = _rows_of(qkv + key_head * SIZE, qkv_stride, row, rows, SIZE)
    q_scale = _unit_scale(q, eps) * factor
    q *= q_scale[:, None]
    tl.store(inside + place[:, None] * CHUNK + i[None, :], _dot(q, tl.trans(k), PRECISION) * ratio)
    scale = scales + (chunk * VALUE_HEADS + head).to(tl.int64) * 3 * CHUNK + i
    last = tl.sum(log, 0)
    tl.store(scale, q_scale * tl.exp(total.to(tl.float32)))
    tl.store(scale + CHUNK, k_scale * tl.exp((last - total).to(tl.float32)))
    tl.store(scale + 2 * CHUNK, tl.exp(last.to(tl.float32)) + tl.zeros((CHUNK,), tl.float32))


@triton.jit(do_not_specialize=["rows", "layer"])
def scan_kernel(
    qkv, qkv_stride, u, w, inside, scales, run, out, out_stride, rows, layer,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, SIZE: tl.constexpr, CHUNK: tl.constexpr,
    COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """COLUMNS columns of one head's state through all chunks."""
    release_next()
    part, head = tl.program_id(0), tl.program_id(1)
    key_head = head % KEY_HEADS
    i, d = tl.arange(0, CHUNK), tl.arange(0, SIZE)
    c = part * COLUMNS + tl.arange(0, COLUMNS)
    state = floats_at(run, WORD_RECURRENT) + (layer.to(tl.int64) * VALUE_HEADS + head) * SIZE * SIZE
    place = d[:, None] * SIZE + c[None, :]
    await_inputs()
    s = tl.load(state + place)
    for chunk in range((rows + CHUNK - 1) // CHUNK):
        row = chunk * CHUNK + i
        here = (chunk * VALUE_HEADS + head).to(tl.int64) * CHUNK
        at = here + i
        scale = scales + here * 3
        q_scale, k_scale = tl.load(scale + i), tl.load(scale + CHUNK + i)
        decay = tl.load(scale + 2 * CHUNK)
        change = tl.load(u + at[:, None] * SIZE + c[None, :])
        change -= _dot(tl.load(w + at[:, None] * SIZE + d[None, :]), s, PRECISION)
        q = _rows_of(qkv + key_head * SIZE, qkv_stride, row, rows, SIZE) * q_scale[:, None]
        result = _dot(q, s, PRECISION)
        result += _dot(tl.load(inside + at[:, None] * CHUNK + i[None, :]), change, PRECISION)
        target = out + row.to(tl.int64)[:, None] * out_stride + head * SIZE + c[None, :]
        tl.store(target, result, mask=(row < rows)[:, None])
        k = (
            _rows_of(qkv + (KEY_HEADS + key_head) * SIZE, qkv_stride, row, rows, SIZE)
            * k_scale[:, None]
        )
        s = s * decay + _dot(tl.trans(k), change, PRECISION)
    tl.store(state + place, s)


def record_wide(
    recorder: CudaRecorder, inputs: DeltaInputs, shape: RecurrentShape, layer: int, params: Buffer, out: Buffer,
    eps: float,
) -> None:  # fmt: skip
    """Always advances the state. Deterministic: a head's columns belong to one program."""
    rows, heads, size = recorder.rows, shape.value_heads, shape.head_size
    chunks = -(-rows // CHUNK)
    places = chunks * heads * CHUNK
    precision = "ieee" if recorder.owner.interpreted else PRECISION  # the interpreter knows one
    u, w = recorder.scratch("delta u", places * size), recorder.scratch("delta w", places * size)
    inside, scales = (
        recorder.scratch("delta inside", places * CHUNK),
        recorder.scratch("delta scales", 3 * places),
    )
    qkv = (inputs.qkv.array, stride_of(inputs.qkv.array))
    numbers = {"KEY_HEADS": shape.key_heads, "VALUE_HEADS": heads, "SIZE": size, "CHUNK": CHUNK}
    recorder.launch(
        chunk_kernel, (chunks, heads),
        *qkv, inputs.alpha.array, stride_of(inputs.alpha.array), inputs.beta.array, stride_of(inputs.beta.array),
        inputs.decay_rate.array, inputs.time_bias.array, u, w, inside, scales, rows, eps, size**-0.5,
        BLOCK=BLOCK, PRECISION=precision, num_warps=CHUNK_WARPS, overlap=True, **numbers,
    )  # fmt: skip
    columns = min(size, COLUMNS)
    recorder.launch(
        scan_kernel, (size // columns, heads),
        *qkv, u, w, inside, scales, params.array, out.array, stride_of(out.array), rows, layer,
        COLUMNS=columns, PRECISION=precision, num_warps=SCAN_WARPS, num_stages=SCAN_STAGES, overlap=True, **numbers,
    )  # fmt: skip
