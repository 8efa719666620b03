"""GPU form of a router and a shared expert for few rows: all rows of a program at once, one launch for both, and for
the norm before them where there is one.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from sparkinfer.backend.base import Activation
from sparkinfer.backend.cuda import CudaRecorder, Launch
from sparkinfer.kernels.linear.triton_impl import EXACT, constants, is_late, stride_of
from sparkinfer.kernels.linear.triton_pack import TritonWeight
from sparkinfer.kernels.rms_norm.triton_impl import norm_row, rms_norm_kernel
from sparkinfer.kernels.triton_overlap import await_inputs, release_next
from sparkinfer.kernels.triton_quant import (
    block_words,
    decode_parts,
    input_parts,
    int8_blocks,
    load_parts,
    parts_dot,
    sigmoid,
)

_ROWS = 8  # of a router's program
_GATED_ROWS = 2  # of a gated program
_WARPS = 8
_OUTPUTS = 2  # of a router's program
_WIDEST = 2048  # row of a router whose parts stay in registers


@triton.jit
def float_rows(
    x, x_stride, rows, start, w, first, out, out_stride, groups,
    R: tl.constexpr, BITS: tl.constexpr, B: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """out[r, n] = w[n] . x[r] of float weights: B outputs from `first` on, R rows from `start` on at once.

    The axis that is summed lies over the lanes and warps of the program whatever R is.
    """
    n = first + tl.arange(0, B)
    r = start + tl.arange(0, R)
    k = tl.arange(0, WIDTH)[None, :]
    if BITS == 32:
        at = w.to(tl.pointer_type(tl.float32))
        inputs = groups * 4
    else:
        at = w.to(tl.pointer_type(tl.float16 if BITS == 16 else tl.bfloat16))
        inputs = groups * 8
    a = tl.load(at + n[:, None] * inputs + k, mask=k < inputs, other=0.0).to(tl.float32)
    await_inputs()
    live = (r < rows)[:, None]
    y = tl.load(x + r[:, None] * x_stride + k, mask=(k < inputs) & live, other=0.0)
    v = tl.sum(a[None, :, :] * y[:, None, :], 2)
    tl.store(out + r[:, None] * out_stride + n[None, :], v, mask=live)


@triton.jit(do_not_specialize=["unit", "rows"])
def router_gated_kernel(
    lx, lx_stride, lgroups, w, lout, lout_stride, tiles, programs, rows,
    x, xf, x_stride, unit, gate, up, total, groups, out, out_stride, own,
    LR: tl.constexpr, LBITS: tl.constexpr, LB: tl.constexpr, WIDTH: tl.constexpr,
    R: tl.constexpr, LATE: tl.constexpr, BITS: tl.constexpr, MODE: tl.constexpr, ZERO: tl.constexpr,
    F: tl.constexpr, G: tl.constexpr, B: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """A product of float weights and a gated product of the same rows: neither reads what the other writes.

    `programs` have `tiles` tiles of the first, LR rows each, the others `own` tiles of the second, R rows each. All the
    rows of a program are on their way before it computes: one after the other would wait for memory each time.
    """
    release_next()
    pid = tl.program_id(0)
    if pid < programs:
        float_rows(
            lx, lx_stride, rows, pid // tiles * LR, w, pid % tiles * LB, lout, lout_stride, lgroups,
            LR, LBITS, LB, WIDTH,
        )  # fmt: skip
    else:
        pid -= programs
        SUMS: tl.constexpr = MODE == 1 or MODE == 2 or ZERO > 0
        N: tl.constexpr = F // G * B
        first = pid % own * N
        row = first.to(tl.int64)
        g = load_parts(gate, total, row, groups, unit, BITS, MODE, F, G, B, CHUNKS, True)
        u = load_parts(up, total, row, groups, unit, BITS, MODE, F, G, B, CHUNKS, True)
        await_inputs()
        start = pid // own * R
        values = ()
        for r in tl.static_range(R):
            at = tl.minimum(start + r, rows - 1) * x_stride  # the last row again: same results
            part = input_parts(
                x + at, xf + at, groups, unit, LATE, SUMS, BITS, F, G, B, CHUNKS, True
            )
            values = values + (part,)  # noqa: RUF005 Triton knows no unpacking
        g = decode_parts(g, BITS, MODE, ZERO, CHUNKS)
        u = decode_parts(u, BITS, MODE, ZERO, CHUNKS)
        results = ()
        for r in tl.static_range(R):
            a = parts_dot(g, values[r], BITS, MODE, ZERO, F, G, B, CHUNKS)
            b = parts_dot(u, values[r], BITS, MODE, ZERO, F, G, B, CHUNKS)
            results = results + (a * sigmoid(a) * b,)  # noqa: RUF005
        target = out + first + tl.arange(0, N)
        for r in tl.static_range(R):
            tl.store(target + tl.minimum(start + r, rows - 1) * out_stride, results[r])


@triton.jit
def normed_float_rows(
    x, x_stride, rows, start, norm, eps, w, first, out, out_stride,
    R: tl.constexpr, BITS: tl.constexpr, B: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """`float_rows` of the normed rows: with f the norm's factors, (w f) . x over the root of x's mean square.

    Both sums are over an axis that lies over the lanes and warps of the program whatever R is. All is read in three
    dimensions, as the products are summed: in two, rows would change their layout by way of shared memory.
    """
    n = first + tl.arange(0, B)
    r = start + tl.arange(0, R)
    k = tl.arange(0, WIDTH)[None, None, :]
    if BITS == 32:
        at = w.to(tl.pointer_type(tl.float32))
    else:
        at = w.to(tl.pointer_type(tl.float16 if BITS == 16 else tl.bfloat16))
    a = tl.load(at + n[None, :, None] * WIDTH + k).to(tl.float32) * tl.load(norm + k)
    await_inputs()
    live = (r < rows)[:, None]
    y = tl.load(x + tl.minimum(r, rows - 1)[:, None, None] * x_stride + k)
    square = tl.sum(y * y, 2)
    v = tl.sum(a * y, 2)
    length = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(square, 1.0 * WIDTH) + eps))
    tl.store(out + r[:, None] * out_stride + n[None, :], v * length, mask=live)


@triton.jit
def halves_of(x, RUNS: tl.constexpr, G: tl.constexpr):
    """[2 G] as two [RUNS * G, 1]: each half for RUNS runs of lanes."""
    a, b = tl.split(tl.permute(tl.reshape(x, [2, G]), (1, 0)))
    a = tl.reshape(tl.broadcast_to(a[None, :], [RUNS, G]), [RUNS * G])
    b = tl.reshape(tl.broadcast_to(b[None, :], [RUNS, G]), [RUNS * G])
    return a[:, None], b[:, None]


@triton.jit
def word_halves(x, RUNS: tl.constexpr, G: tl.constexpr):
    """[2 G, 4] as two [RUNS * G, 1, 4]."""
    a, b = tl.split(tl.permute(tl.reshape(x, [2, G, 4]), (1, 2, 0)))
    a = tl.reshape(tl.broadcast_to(a[None, :, :], [RUNS, G, 4]), [RUNS * G, 4])
    b = tl.reshape(tl.broadcast_to(b[None, :, :], [RUNS, G, 4]), [RUNS * G, 4])
    return a[:, None, :], b[:, None, :]


@triton.jit
def normed_parts(x, factor, eps, F: tl.constexpr, G: tl.constexpr):
    """A row as `parts_dot` takes it, without the norm's length, and that: 2 G blocks, made once for all runs."""
    RUNS: tl.constexpr = F // G
    at = tl.arange(0, 2 * G)[:, None] * 32 + tl.arange(0, 32)[None, :]
    y = tl.load(x + at)
    square = tl.sum(tl.sum(y * y, 1), 0)
    code, scale, total = int8_blocks(y * factor)
    lo, hi = block_words(code, 2 * G)
    lo0, lo1 = word_halves(lo, RUNS, G)
    hi0, hi1 = word_halves(hi, RUNS, G)
    d0, d1 = halves_of(scale, RUNS, G)
    t0, t1 = halves_of(total, RUNS, G)
    length = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(square, 64.0 * G) + eps))
    return ((lo0, hi0, d0, t0), (lo1, hi1, d1, t1)), length


@triton.jit(do_not_specialize=["unit", "rows", "programs", "own"])
def normed_router_gated_kernel(
    x, x_stride, norm, eps, y, y_stride, codes, floats, q_stride,
    w, lout, lout_stride, tiles, programs, rows, unit, gate, up, total, groups, out, out_stride, own,
    LR: tl.constexpr, LBITS: tl.constexpr, LB: tl.constexpr, WIDTH: tl.constexpr,
    R: tl.constexpr, BITS: tl.constexpr, MODE: tl.constexpr, ZERO: tl.constexpr,
    F: tl.constexpr, G: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """The norm of a row of the stream (a program a row writes it), and what `router_gated_kernel` makes of it.

    The others norm the rows they read by themselves: nobody waits for the norm.
    """
    release_next()
    pid = tl.program_id(0)
    if pid < programs:
        normed_float_rows(
            x, x_stride, rows, pid // tiles * LR, norm, eps, w, pid % tiles * LB, lout, lout_stride,
            LR, LBITS, LB, WIDTH,
        )  # fmt: skip
    elif pid < programs + rows:
        at = pid - programs
        norm_row(
            at, x, x_stride, norm, y, y_stride, codes, floats, q_stride, WIDTH, eps, WIDTH, True
        )
    else:
        pid -= programs + rows
        N: tl.constexpr = F // G * B
        first = pid % own * N
        row = first.to(tl.int64)
        g = load_parts(gate, total, row, groups, unit, BITS, MODE, F, G, B, 2, True)
        u = load_parts(up, total, row, groups, unit, BITS, MODE, F, G, B, 2, True)
        factor = tl.load(norm + tl.arange(0, 2 * G)[:, None] * 32 + tl.arange(0, 32)[None, :])
        await_inputs()
        start = pid // own * R
        values, lengths = (), ()
        for r in tl.static_range(R):
            place = tl.minimum(start + r, rows - 1) * x_stride  # the last row again: same results
            part, length = normed_parts(x + place, factor, eps, F, G)
            values = values + (part,)  # noqa: RUF005 Triton knows no unpacking
            lengths = lengths + (length,)  # noqa: RUF005
        g = decode_parts(g, BITS, MODE, ZERO, 2)
        u = decode_parts(u, BITS, MODE, ZERO, 2)
        target = out + first + tl.arange(0, N)
        for r in tl.static_range(R):
            a = parts_dot(g, values[r], BITS, MODE, ZERO, F, G, B, 2) * lengths[r]
            b = parts_dot(u, values[r], BITS, MODE, ZERO, F, G, B, 2) * lengths[r]
            tl.store(target + tl.minimum(start + r, rows - 1) * out_stride, a * sigmoid(a) * b)


def norm_before(
    recorder: CudaRecorder, x: torch.Tensor, words: torch.Tensor
) -> dict[str, Any] | None:
    """The arguments of the norm recorded last, if it wrote the rows x and their int8 blocks, of whole powers of two."""
    step = recorder.steps[-1] if recorder.steps else None
    if not isinstance(step, Launch) or step.kernel is not rms_norm_kernel:
        return None
    given = dict(zip(step.kernel.arg_names, step.args, strict=False))
    wrote = [given[name].data_ptr() for name in ("out", "codes")] == [
        x.data_ptr(),
        words.data_ptr(),
    ]
    whole = step.options["QUANTISED"] and step.options["BLOCK"] == given["width"]
    return given if wrote and whole else None


def record_rows(
    recorder: CudaRecorder,
    product: Launch,
    words: torch.Tensor,
    floats: torch.Tensor,
    gate: TritonWeight,
    up: TritonWeight,
    out: Activation,
) -> bool:
    """Both in one launch: `product` as recorded (a launch of `linear_kernel`), and the gated product of `words` and
    `floats`. False: the weights need the general form.

    Pinned: a row's sums have the same shapes and order whatever the rows; an output's lanes depend on its weight alone.
    """
    given = dict(zip(product.kernel.arg_names, product.args, strict=False))
    bits, groups = product.options["BITS"], given["groups"]
    inputs = groups * (4 if bits == 32 else 8)
    width = triton.next_power_of_2(inputs)
    lanes = min(gate.groups, 32)
    chunks = gate.groups // lanes
    alike = (gate.form, gate.inputs) == (up.form, up.inputs) and gate.quantised
    whole = lanes & (lanes - 1) == 0 and lanes * chunks == gate.groups
    held = gate.form.main_words * chunks
    if bits <= 8 or width > _WIDEST or not alike or not whole or held > 32 or gate.outputs % _WARPS:
        return False
    rows = recorder.rows
    at_once = min(_ROWS, triton.next_power_of_2(rows))
    turns = -(-rows // _GATED_ROWS)
    each = 4 if recorder.owner.interpreted and gate.outputs % (4 * _WARPS) == 0 else 1
    tiles, own, lx = given["total0"] // _OUTPUTS, gate.outputs // (_WARPS * each), given["xf"]
    programs = tiles * -(-rows // at_once)
    fits = chunks == 2 and width == inputs and not is_late(gate)
    normed = norm_before(recorder, lx, words) if fits else None
    if normed is not None:
        recorder.steps.pop()
        names = "x x_stride weight eps out out_stride codes floats q_stride".split()
        recorder.launch(
            normed_router_gated_kernel, (programs + rows + own * turns,), *(normed[name] for name in names),
            given["w0"], given["out0"], given["stride0"], tiles, programs, rows, 1,
            gate.words, up.words, gate.total, gate.groups, out.f32.array, stride_of(out.f32.array), own,
            LR=at_once, R=-(-rows // turns), LBITS=bits, LB=_OUTPUTS, WIDTH=width, **constants(gate),
            F=lanes * _WARPS, G=lanes, B=each, num_warps=_WARPS, overlap=True, **EXACT,
        )  # fmt: skip
        return True
    recorder.launch(
        router_gated_kernel, (programs + own * turns,),
        lx, stride_of(lx), groups, given["w0"], given["out0"], given["stride0"], tiles, programs, rows,
        words, floats, stride_of(words), 1, gate.words, up.words, gate.total, gate.groups,
        out.f32.array, stride_of(out.f32.array), own,
        LR=at_once, R=-(-rows // turns), LBITS=bits, LB=_OUTPUTS, WIDTH=width, LATE=is_late(gate), **constants(gate),
        F=lanes * _WARPS, G=lanes, B=each, CHUNKS=chunks, num_warps=_WARPS, overlap=True, **EXACT,
    )  # fmt: skip
    return True
