"""GPU form of a mixture for the rows of a window: hidden rows as int8 blocks, then a row's experts in one sum.

A slot is row x used + rank. `few_hidden_kernel`: a program makes the 32 outputs of an int8 block of a slot.
`few_out_kernel`: a program makes a few columns of a row of the stream; a lane has groups of columns of some experts, so
that a row's experts lie side by side as one long row of weights, and each part of the sum has its expert's share.

Row exactness: a program works for one row, and what it does depends on no other.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl

from sparkinfer.backend.base import Activation, Buffer
from sparkinfer.backend.cuda import EXACT_ROWS, CudaRecorder, Launch, q8_views
from sparkinfer.kernels.experts import ExpertBuffers
from sparkinfer.kernels.linear.triton_impl import EXACT, constants, linear_kernel, stride_of
from sparkinfer.kernels.linear.triton_pack import TritonWeight
from sparkinfer.kernels.route import Routing
from sparkinfer.kernels.route.triton_impl import route_kernel, slots_of
from sparkinfer.kernels.triton_overlap import await_inputs, release_next
from sparkinfer.kernels.triton_quant import (
    block_words,
    dot16,
    fold_sum,
    int8_blocks,
    load_parts,
    part_dot,
    sigmoid,
    store_blocks,
    weight_decode,
    weight_scales,
)

BLOCK = 32
_LANES = 16
_OUT_LANES = 64
_OUT_COLUMNS = 8
_HELD = 64  # words of codes that a lane holds
_REGISTERS = 128  # so that a program's loads are all on their way before the first is used


@triton.jit
def load_rows(
    w, total, base, g, unit,
    BITS: tl.constexpr, MODE: tl.constexpr, G: tl.constexpr, B: tl.constexpr, C: tl.constexpr = 0,
):  # fmt: skip
    """`weight_load` of group C + g [F, 1] of B outputs from `base` on, int64 [F, 1]: a lane's own. A row has G groups.

    Places are offsets, known to the compiler, of few addresses. C is a multiple of 8 where there are supers.
    """
    MAIN: tl.constexpr = 8 if BITS == 8 else 4
    EXTRA: tl.constexpr = 1 if BITS == 5 else 2 if BITS == 6 else 0
    n = tl.arange(0, B)[None, :]
    i = tl.arange(0, 4)[None, None, :]
    at = w + (base * (G * MAIN))[:, :, None] + (n[:, :, None] * (G * MAIN) + g[:, :, None] * 4 + i)
    at += C * 4
    q = tl.load(at)
    a, b = 0, 0
    if BITS == 8:
        a = tl.load(at + G * 4)
    plane = w + total.to(tl.int64) * (G * MAIN)
    if EXTRA > 0:
        place = plane + base * (G * EXTRA) + (n * (G * EXTRA) + g * unit) + C
        a = tl.load(place)
        if EXTRA > 1:
            b = tl.load(place + G)
    plane += total.to(tl.int64) * (G * EXTRA)
    if MODE == 1 or MODE == 4:
        word = tl.load(plane + base * G + (n * G + g * unit) + C)
        plane += total.to(tl.int64) * G
    else:
        word = tl.load(plane.to(tl.pointer_type(tl.int16)) + base * G + (n * G + g * unit) + C)
        plane += (total // 2).to(tl.int64) * G
    pair = 0
    if MODE >= 2:
        pair = tl.load(plane + base * (G // 8) + (n * (G // 8) + (C + g) // 8))
    return q, a, b, word, pair


@triton.jit
def row_part(x, xf, g, unit, SUMS: tl.constexpr, G: tl.constexpr, C: tl.constexpr):
    """`input_part` of group C + g [F, 1] of a row of G groups."""
    words = x + (g * 4)[:, :, None] + tl.arange(0, 4)[None, None, :] + C * 4
    scales = xf + g * unit + C
    sums = 0.0
    if SUMS:
        sums = tl.load(scales + G)
    return tl.load(words), tl.load(words + G * 4), tl.load(scales), sums


@triton.jit
def group_dot(v, raw, x, BITS: tl.constexpr, MODE: tl.constexpr, ZERO: tl.constexpr):
    """`part_dot` of a tile as `load_rows` gives it. Upper halves of 4 bits stay where they are: 16 times as large."""
    if BITS == 4 and MODE <= 2:
        xlo, xhi, xd, xs = x
        q, _, _, _, _ = raw
        none = tl.zeros([q.shape[0], q.shape[1]], tl.int32)
        upper = dot16(q & -0x0F0F0F10, xhi, none, True)
        dot = (dot16(q & 0x0F0F0F0F, xlo, none) << 4) + upper
        s, m, _ = weight_scales(raw, MODE, ZERO)
        v = tl.fma(s * (xd * 0.0625), dot.to(tl.float32), v)
        if MODE > 0 or ZERO > 0:
            v = tl.fma(m, xs, v)
        return v
    else:
        return part_dot(v, weight_decode(raw, BITS, MODE, ZERO), x, BITS, MODE, ZERO)


@triton.jit(do_not_specialize=["unit"])
def few_hidden_kernel(
    x, xf, x_stride, unit, slot_pairs, gate, up, total, expert_rows,
    out, out_stride, codes, floats, q_stride, blocks,
    USED: tl.constexpr, BITS: tl.constexpr, MODE: tl.constexpr, ZERO: tl.constexpr,
    F: tl.constexpr, G: tl.constexpr, B: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """A block of hidden[slot], as float32 and as int8.

    The next launch starts when this one has what it waited for: then it, too, may read what was written before.
    """
    N: tl.constexpr = F // G * B
    GROUPS: tl.constexpr = G * CHUNKS
    block = tl.program_id(0)
    slot = tl.program_id(1)
    SUMS: tl.constexpr = MODE == 1 or MODE == 2 or ZERO > 0
    await_inputs()
    release_next()
    expert = (tl.load(slot_pairs + slot) & 0xFFFF).to(tl.int64)
    at = (slot // USED) * x_stride
    f = tl.arange(0, F)[:, None]
    row = expert * expert_rows + (block * N + f // G * B)
    g, u, values = (), (), ()
    for c in tl.static_range(CHUNKS):
        g = g + (load_rows(gate, total, row, f % G, unit, BITS, MODE, GROUPS, B, c * G),)  # noqa: RUF005
        u = u + (load_rows(up, total, row, f % G, unit, BITS, MODE, GROUPS, B, c * G),)  # noqa: RUF005
    for c in tl.static_range(CHUNKS):  # after the weights: from the cache, and into registers too
        part = row_part(x + at, xf + at, f % G, unit, SUMS, GROUPS, c * G)
        values = values + (part,)  # noqa: RUF005
    a = tl.zeros([F, B], tl.float32)
    b = tl.zeros([F, B], tl.float32)
    for c in tl.static_range(CHUNKS):
        a = group_dot(a, g[c], values[c], BITS, MODE, ZERO)
        b = group_dot(b, u[c], values[c], BITS, MODE, ZERO)
    a = fold_sum(a, F, G, B)
    b = fold_sum(b, F, G, B)
    h = a * sigmoid(a) * b
    tl.store(out + slot.to(tl.int64) * out_stride + block * N + tl.arange(0, N), h)
    none = tl.zeros([1], tl.int32)
    y = tl.reshape(h, [1, N])
    store_blocks(codes, floats, q_stride, blocks, none + slot, none + block, y, none == 0)


@triton.jit
def narrow_input(x, G: tl.constexpr, RUNS: tl.constexpr):
    """`late_part` of a row of G groups, the same for RUNS runs of lanes, made once for all of them."""
    at = x + tl.arange(0, G)[:, None] * 32 + tl.arange(0, 32)[None, :]
    code, scale, total = int8_blocks(tl.load(at, cache_modifier=".cg"))
    lo, hi = block_words(code, G)
    F: tl.constexpr = RUNS * G
    lo = tl.reshape(tl.broadcast_to(lo[None, :, :], [RUNS, G, 4]), [F, 4])
    hi = tl.reshape(tl.broadcast_to(hi[None, :, :], [RUNS, G, 4]), [F, 4])
    scale = tl.reshape(tl.broadcast_to(scale[None, :], [RUNS, G]), [F])
    total = tl.reshape(tl.broadcast_to(total[None, :], [RUNS, G]), [F])
    return lo[:, None, :], hi[:, None, :], scale[:, None], total[:, None]


@triton.jit
def older_input(x, xf, g, unit, G: tl.constexpr):
    """`input_part` of groups g [F, 1] of a row of G, past the first cache."""
    words = x + (g * 4)[:, :, None] + tl.arange(0, 4)[None, None, :]
    scales = xf + g * unit
    return (
        tl.load(words, cache_modifier=".cg"),
        tl.load(words + G * 4, cache_modifier=".cg"),
        tl.load(scales, cache_modifier=".cg"),
        tl.load(scales + G, cache_modifier=".cg"),
    )


@triton.jit(do_not_specialize=["unit"])
def few_out_kernel(
    x, xf, x_stride, unit, slot_pairs, weights, weights_stride, w, total, expert_rows,
    shared, shared_codes, shared_stride, shared_w, shared_total, gates, gates_stride, out, out_stride,
    USED: tl.constexpr, EARLY: tl.constexpr, BITS: tl.constexpr, MODE: tl.constexpr, ZERO: tl.constexpr,
    SBITS: tl.constexpr, SMODE: tl.constexpr, SZERO: tl.constexpr,
    F: tl.constexpr, RUN: tl.constexpr, G: tl.constexpr, B: tl.constexpr, CHUNKS: tl.constexpr,
    READY: tl.constexpr,
):  # fmt: skip
    """F / RUN * B columns of a row of the stream, with what its experts and the shared one add.

    RUN lanes have the groups of B columns of all experts, in CHUNKS steps. EARLY: the launch just before is the one of
    `few_hidden_kernel`; all else that is read here is older, so the experts' weights are on their way and the shared
    expert is done before the hidden rows are there. What is older is read past the first cache, which may still hold
    what was there before. READY: the shared expert's hidden row is there as int8 blocks.
    """
    release_next()
    SUMS: tl.constexpr = MODE == 1 or MODE == 2 or ZERO > 0
    N: tl.constexpr = F // RUN * B
    ALONE: tl.constexpr = N // (F // G)  # columns of the shared expert that G lanes have
    first = tl.program_id(0) * N
    row = tl.program_id(1)
    f = tl.arange(0, F)[:, None]
    common = load_parts(
        shared_w, shared_total, first.to(tl.int64), G, unit, SBITS, SMODE, F, G, ALONE, 1, True
    )
    if not EARLY:
        await_inputs()
    raw, shares = (), ()
    for c in tl.static_range(CHUNKS):
        rank = (c * RUN + f % RUN) // G
        expert = tl.load(slot_pairs + row * USED + rank, cache_modifier=".cg") & 0xFFFF
        base = expert.to(tl.int64) * expert_rows + (first + f // RUN * B)
        raw = raw + (load_rows(w, total, base, f % G, unit, BITS, MODE, G, B),)  # noqa: RUF005 as above
        share = tl.load(weights + row * weights_stride + rank, cache_modifier=".cg")
        shares = shares + (share,)  # noqa: RUF005
    target = out + row * out_stride + first + tl.arange(0, N)
    before = tl.load(target, cache_modifier=".cg")
    opened = sigmoid(tl.load(gates + row * gates_stride, cache_modifier=".cg"))
    if READY:
        narrow = older_input(
            shared_codes + row * shared_stride, shared + row * shared_stride, f % G, unit, G
        )
    else:
        narrow = narrow_input(shared + row * shared_stride, G, F // G)
    v = tl.zeros([F, ALONE], tl.float32)
    part = weight_decode(common[0], SBITS, SMODE, SZERO)
    result = fold_sum(part_dot(v, part, narrow, SBITS, SMODE, SZERO), F, G, ALONE) * opened
    if EARLY:
        await_inputs()
    values = ()
    for c in tl.static_range(CHUNKS):
        rank = (c * RUN + f % RUN) // G
        at = (row * USED + rank) * x_stride
        words = x + (at + f % G * 4)[:, :, None] + tl.arange(0, 4)[None, None, :]
        scales = xf + at + f % G * unit
        sums = 0.0
        if SUMS:
            sums = tl.load(scales + G)
        values = values + ((tl.load(words), tl.load(words + G * 4), tl.load(scales), sums),)  # noqa: RUF005
    tl.debug_barrier()  # keeps the loads together
    v = tl.zeros([F, B], tl.float32)
    for c in tl.static_range(CHUNKS):
        part = weight_decode(raw[c], BITS, MODE, ZERO)
        product = part_dot(tl.zeros([F, B], tl.float32), part, values[c], BITS, MODE, ZERO)
        v = tl.fma(tl.zeros_like(product) + shares[c], product, v)
    tl.store(target, before + (result + fold_sum(v, F, RUN, B)))


@dataclass(frozen=True)
class OutLaunch(Launch):
    """The launch of the experts' results, and what it was made from: to replace it by their sum."""

    hidden: Activation
    down: TritonWeight


def mark_out(recorder: CudaRecorder, hidden: Activation, down: TritonWeight) -> None:
    """Say what the launch just recorded computes."""
    step = recorder.steps.pop()
    recorder.steps.append(OutLaunch(**vars(step), hidden=hidden, down=down))


@dataclass(frozen=True)
class HiddenCut:
    """Of a hidden program: lanes, lanes of an output, outputs of a lane, steps over the columns, warps."""

    lanes: int
    groups: int
    outputs: int
    chunks: int
    warps: int


def hidden_cut(weight: TritonWeight) -> HiddenCut | None:
    """None: these weights do not fit. Only `groups` and `chunks` order a sum."""
    # lanes of an output: fewer of them meet in fewer steps, more read the input again
    groups = min(weight.groups, _LANES)
    chunks = weight.groups // groups
    if groups & (groups - 1) or groups * chunks != weight.groups or weight.outputs % BLOCK:
        return None
    warps = 8
    while warps < 16 and weight.form.main_words * chunks * 2 * BLOCK * groups > 32 * warps * _HELD:
        warps *= 2
    lanes = max(groups, min(32 * warps, BLOCK * groups))
    return HiddenCut(lanes, groups, BLOCK * groups // lanes, chunks, warps)


@dataclass(frozen=True)
class OutCut:
    """Of an out program: lanes, lanes of a column, columns of a lane, steps over the experts."""

    lanes: int
    run: int
    columns: int
    chunks: int


def out_cut(down: TritonWeight, used: int, interpreted: bool) -> OutCut | None:
    """None: `few_out_kernel` does not fit. `run` and `chunks` order a sum."""
    groups = down.groups
    if groups & (groups - 1) or groups > _OUT_LANES or not down.quantised:
        return None
    run = groups
    while run < _OUT_LANES and used * groups % (2 * run) == 0:
        run *= 2
    chunks = used * groups // run
    columns = max(_OUT_COLUMNS, run // groups)
    while columns > run // groups and down.form.main_words * columns * chunks > _HELD:
        columns //= 2
    if interpreted and down.outputs % 64 == 0:
        columns = 64  # few large programs
    return OutCut(run, run, columns, chunks) if down.outputs % columns == 0 else None


def record_hidden(
    recorder: CudaRecorder,
    x: Activation,
    gate: TritonWeight,
    up: TritonWeight,
    routing: Routing,
    buffers: ExpertBuffers,
) -> bool:
    """False: these weights need the general form. Pinned: as this file and `hidden_cut` say."""
    slots = recorder.rows * routing.used
    cut = hidden_cut(gate)
    alike = (gate.form, gate.inputs) == (up.form, up.inputs) and gate.quantised
    if cut is None or not alike or x.q8 is None or buffers.hidden.q8 is None:
        return False
    words, floats = q8_views(x.q8)
    codes, scales = q8_views(buffers.hidden.q8)
    hidden, blocks = buffers.hidden.f32.array, gate.outputs // BLOCK
    options = {} if recorder.owner.interpreted else {"maxnreg": _REGISTERS}
    recorder.launch(
        few_hidden_kernel, (blocks, slots),
        words, floats, stride_of(words), 1, slots_of(recorder, routing),
        gate.words, up.words, gate.total, gate.padded_outputs,
        hidden, stride_of(hidden), codes, scales, stride_of(codes), blocks,
        USED=routing.used, **constants(gate),
        F=cut.lanes, G=cut.groups, B=cut.outputs, CHUNKS=cut.chunks,
        num_warps=cut.warps, overlap=True, **options, **EXACT,
    )  # fmt: skip
    return True


def record_sum(
    recorder: CudaRecorder, routing: Routing, shared: Buffer, gates: torch.Tensor, out: Buffer
) -> bool:
    """Replace the two launches just before, the experts' results and the shared one's, by one that adds them to `out`.

    False: not possible. `gates`: the shared expert's gate of each row. Pinned: as this file and `out_cut` say.
    """
    before, product = recorder.steps[-2:] if len(recorder.steps) > 1 else (None, None)
    if not isinstance(before, OutLaunch) or not _is_narrow_product(product, recorder.rows, shared):
        return False
    down, q8 = before.down, before.hidden.q8
    cut = out_cut(down, routing.used, recorder.owner.interpreted)
    given, options = arguments(product), product.options
    same = given["groups"] == down.groups and out.width == down.outputs
    if cut is None or q8 is None or not same:
        return False
    del recorder.steps[-2:]
    words, floats = q8_views(q8)
    shares = routing.weights.array
    last = recorder.steps[-1] if recorder.steps else None
    early = getattr(last, "kernel", None) is few_hidden_kernel
    common = given["xf"]
    blocks = _blocks_by_route(recorder, common, down.groups) if early else None
    codes, common, stride = blocks or (common, common, stride_of(common))
    recorder.launch(
        few_out_kernel, (out.width // (cut.lanes // cut.run * cut.columns), recorder.rows),
        words, floats, stride_of(words), 1, slots_of(recorder, routing), shares, stride_of(shares),
        down.words, down.total, down.padded_outputs, common, codes, stride, given["w0"], given["total0"],
        gates, stride_of(gates), out.array, stride_of(out.array),
        USED=routing.used, EARLY=early, READY=blocks is not None, **constants(down),
        **{f"S{name}": options[name] for name in ("BITS", "MODE", "ZERO")},
        F=cut.lanes, RUN=cut.run, G=down.groups, B=cut.columns, CHUNKS=cut.chunks,
        num_warps=max(1, cut.lanes // 32), overlap=True, **EXACT,
    )  # fmt: skip
    return True


def _blocks_by_route(
    recorder: CudaRecorder, rows: torch.Tensor, groups: int
) -> tuple[torch.Tensor, torch.Tensor, int] | None:
    """Let the choice of experts, just before the hidden launch, make the int8 blocks of rows that are older than it.

    Their codes, floats and stride in words; None where the launches before are others.
    """
    writer, step = recorder.steps[-3:-1] if len(recorder.steps) > 2 else (None, None)
    if getattr(step, "kernel", None) is not route_kernel or not isinstance(writer, Launch):
        return None
    if not any(getattr(arg, "data_ptr", int)() == rows.data_ptr() for arg in writer.args):
        return None
    stride = 10 * groups  # words of a row: 32 codes and two floats a group
    codes = recorder.scratch("narrow blocks", EXACT_ROWS * stride, torch.int32)
    floats = codes.view(torch.float32)[8 * groups :]
    given = arguments(step)
    given |= {"narrow": rows, "narrow_stride": stride_of(rows)}
    given |= {"codes": codes, "floats": floats, "q_stride": stride}
    options = {**step.options, "BLOCKS": groups}
    recorder.steps[-2] = replace(
        step, grid=(2 * recorder.rows,), args=tuple(given.values()), options=options
    )
    return codes, floats, stride


def arguments(step: Launch) -> dict[str, Any]:
    """A launch's arguments by name."""
    return dict(zip(step.kernel.arg_names, step.args, strict=False))


def _is_narrow_product(step: Any, rows: int, out: Buffer) -> bool:
    """A product of one quantised weight with narrow rows that writes `out`."""
    if getattr(step, "kernel", None) is not linear_kernel:
        return False
    given, options = arguments(step), step.options
    alone = options["COUNT"] == 1 and not options["ADD"] and options["LATE"]
    return bool(alone and given["rows"] == rows and given["out0"].data_ptr() == out.address)
