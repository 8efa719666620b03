"""GPU form of `linear`: a program has the whole width of a few outputs in registers and takes row after row."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl

from sparkinfer.backend.base import Activation, Buffer
from sparkinfer.backend.cuda import CudaBackend, CudaRecorder, q8_views
from sparkinfer.kernels.linear.triton_pack import PAD, TritonWeight, pack_blocks
from sparkinfer.kernels.linear.triton_wide import record_wide, record_wide_floats
from sparkinfer.kernels.triton_overlap import await_inputs, release_next
from sparkinfer.kernels.triton_quant import Form, load_parts, rows_product

MOST = 4  # weights of one launch
LATE_INPUTS = 1024
EXACT = {"enable_fp_fusion": False}  # every multiply-add that is fused is written as one
_LANES = 32
# Programs of one warp that a multiprocessor has room for: with four outputs of 8 bits, and with eight.
_RESIDENT, _RESIDENT_TWICE, _TWICE_REGISTERS = 20, 12, 168


@dataclass(frozen=True)
class Tile:
    """How a weight is cut: `lanes` x `outputs` groups side by side, `groups` of a row, `chunks` times; `warps`.

    `ahead`: the next rows are read while two are computed.
    """

    lanes: int
    groups: int
    outputs: int
    chunks: int
    warps: int
    even: bool
    ahead: bool = False

    @property
    def rows(self) -> int:
        """Outputs of a program."""
        return self.lanes // self.groups * self.outputs

    def constants(self, prefix: str = "") -> dict[str, Any]:
        return {
            f"{prefix}F": self.lanes,
            f"{prefix}G": self.groups,
            f"{prefix}B": self.outputs,
            f"{prefix}CHUNKS": self.chunks,
            f"{prefix}EVEN": self.even,
        }


def choose_tile(
    form: Form, groups: int, outputs: int, sms: int, *, most: int = 8, words: int = 12
) -> Tile:
    """The tile for `outputs` outputs of rows of `groups` groups.

    It depends on the weight alone, never on the rows: it fixes the order of the float additions of an output.
    A lane takes about `words` words of an output (8 bits: 32, they need no decoding): a row of the input is read once
    for several outputs, and few warps have to meet. `outputs` of a program change no bits.
    """
    size = form.main_words + form.extra_words
    if groups <= 16:
        width, warps, chunks = _power(groups), 1, 1
    else:
        width = min((32, 64, 128), key=lambda width: (-(-groups // width) * width, -width))
        chunks = -(-groups // width)
        most = min(most, 4)  # two rows of four outputs share a warp's sums
        if form.quantised:
            fine = 32 if form.bits == 8 else words
            warps = next((n for n in (1, 2) if size * width * chunks <= fine * _LANES * n), 4)
            warps = min(warps, width // _LANES)
        else:
            warps = max(1, width // 64)
    lanes = max(width, min(_LANES * warps, PAD * width))
    held = size * lanes // (_LANES * warps) * chunks  # words a lane holds of one output
    fold = lanes // width
    room = 32 if not form.quantised else 64 if form.bits == 8 else 48
    count = max(1, min(most, PAD // fold, room // held))
    while count > 1 and outputs // (count * fold) < 6 * sms // warps:
        count //= 2
    count = 1 << (count.bit_length() - 1)
    ahead = form.bits == 8 and groups >= 128 and warps == 1
    return Tile(lanes, width, count, chunks, warps, width * chunks == groups, ahead)


def one_wave(tile: Tile, form: Form, outputs: int, sms: int) -> tuple[Tile, dict[str, int]]:
    """The tile for a single row, with launch options: programs twice as large where those of `tile` do not fit the
    chip at once and these do, so that all the weights are on their way before the row is there.
    """
    programs, small = outputs // tile.rows, form.bits == 8 and tile.warps == 1
    if small and tile.outputs == 4 and _RESIDENT * sms < programs <= 2 * _RESIDENT_TWICE * sms:
        return replace(tile, outputs=8), {"maxnreg": _TWICE_REGISTERS}
    return tile, {}


def _power(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


@triton.jit(do_not_specialize=["rows", "unit", "block"])
def linear_kernel(
    x, xf, x_stride, rows, block, groups, unit,
    w0, total0, out0, stride0, w1, total1, out1, stride1, first1,
    w2, total2, out2, stride2, first2, w3, total3, out3, stride3, first3,
    COUNT: tl.constexpr, ADD: tl.constexpr, ONE: tl.constexpr, LATE: tl.constexpr,
    BITS: tl.constexpr, MODE: tl.constexpr, ZERO: tl.constexpr,
    F: tl.constexpr, G: tl.constexpr, B: tl.constexpr, CHUNKS: tl.constexpr, EVEN: tl.constexpr,
    AHEAD: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """out[r, n] (+)= weight[n] . x[r] for the F / G * B outputs of a program and `block` rows."""
    release_next()
    pid = tl.program_id(0)
    w, total, out, stride = w0, total0, out0, stride0
    first = 0
    if COUNT > 1:
        if pid >= first1:
            w, total, out, stride, first = w1, total1, out1, stride1, first1
    if COUNT > 2:
        if pid >= first2:
            w, total, out, stride, first = w2, total2, out2, stride2, first2
    if COUNT > 3:
        if pid >= first3:
            w, total, out, stride, first = w3, total3, out3, stride3, first3
    N: tl.constexpr = F // G * B
    row = (pid - first).to(tl.int64) * N
    raw = load_parts(w, total, row, groups, unit, BITS, MODE, F, G, B, CHUNKS, EVEN)
    await_inputs()
    start = tl.program_id(1) * block
    rows_product(
        raw, x + start * x_stride, xf + start * x_stride, x_stride, tl.minimum(block, rows - start), groups, unit,
        out + start * stride + row, stride, ADD, ONE, LATE, BITS, MODE, ZERO, F, G, B, CHUNKS, EVEN, AHEAD, WARPS,
    )  # fmt: skip


def pack(
    backend: CudaBackend, format_name: str, blocks: Any, outputs: int, inputs: int, experts: int
) -> TritonWeight:
    return pack_blocks(backend, format_name, blocks, outputs, inputs, experts)


def processors(recorder: CudaRecorder) -> int:
    """Multiprocessors to spread programs over. The interpreter runs one after the other: few large ones are best."""
    return 1 if recorder.owner.interpreted else recorder.owner.sms


def stride_of(array: torch.Tensor) -> int:
    """Distance of two rows in elements; also right for one row."""
    return array.stride(0)


def is_late(weight: TritonWeight) -> bool:
    """Its programs make the int8 blocks of their input: cheaper than waiting for them when rows are narrow."""
    return weight.quantised and weight.inputs <= LATE_INPUTS


def reads_late(recorder: CudaRecorder, x: Activation, weight: TritonWeight) -> bool:
    """`is_late`, unless what wrote these rows has written their blocks too."""
    return is_late(weight) and x.f32.address not in recorder.blocked


def input_views(
    x: Activation, weight: TritonWeight, late: bool | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `weight` reads of an activation: words and floats of the int8 form, or twice its float32 rows.

    Narrow rows are read as float32 by quantised weights too (`late`, by default `is_late`).
    """
    if weight.quantised and not (is_late(weight) if late is None else late):
        assert x.q8 is not None, "a quantised weight needs a quantised activation"
        return q8_views(x.q8)
    return x.f32.array.view(torch.int32), x.f32.array


def constants(weight: TritonWeight, prefix: str = "") -> dict[str, int]:
    form = weight.form
    return {f"{prefix}BITS": form.bits, f"{prefix}MODE": form.mode, f"{prefix}ZERO": form.zero}


def record(
    recorder: CudaRecorder,
    x: Activation,
    weights: Sequence[TritonWeight],
    out: Sequence[Buffer],
    *,
    add: bool,
) -> None:
    """Weights of one form and width share a launch (up to 4), since they read the same rows.

    More rows than a window: tensor cores.
    Pinned: `choose_tile` looks at the weights of a launch only; rows are taken in a loop at run time, two at a time.
    """
    pending = list(zip(weights, out, strict=True))
    if recorder.wide:
        coded = [pair for pair in pending if pair[0].quantised]
        if coded:
            record_wide(recorder, x.f32.array, coded, add)
        for weight, buffer in pending:
            if not weight.quantised:
                record_wide_floats(recorder, x.f32.array, weight, buffer, add)
        return
    while pending:
        first = pending[0][0]
        group = [
            pair for pair in pending if (pair[0].form, pair[0].inputs) == (first.form, first.inputs)
        ]
        group = group[:MOST]
        pending = [pair for pair in pending if not any(pair is taken for taken in group)]
        _launch(recorder, x, group, add)


def _launch(
    recorder: CudaRecorder,
    x: Activation,
    group: Sequence[tuple[TritonWeight, Buffer]],
    add: bool,
) -> None:
    weight = group[0][0]
    outputs = sum(w.total for w, _ in group)
    tile = choose_tile(weight.form, weight.groups, outputs, processors(recorder))
    late = reads_late(recorder, x, weight)
    words, floats = input_views(x, weight, late)
    rows, options = recorder.rows, {}
    if rows == 1 and not recorder.owner.interpreted:
        tile, options = one_wave(tile, weight.form, outputs, recorder.owner.sms)
    block = min(rows, 16)
    args: list[Any] = []
    first = 0
    for index in range(MOST):
        w, buffer = group[min(index, len(group) - 1)]
        assert buffer.width >= w.padded_outputs, (buffer.width, w.padded_outputs)
        assert w.total % tile.rows == 0, (w.total, tile)
        args += [w.words, w.total, buffer.array, stride_of(buffer.array)]
        if index:
            args.append(first)
        if index < len(group):
            first += w.total // tile.rows
    recorder.launch(
        linear_kernel, (first, -(-rows // block)),
        words, floats, stride_of(words), rows, block, weight.groups, 1, *args,
        COUNT=len(group), ADD=add, ONE=rows == 1, LATE=late, **constants(weight), **tile.constants(),
        AHEAD=rows > 1 and tile.ahead, WARPS=tile.warps,
        num_warps=tile.warps, overlap=True, **options, **EXACT,
    )  # fmt: skip
