"""Repack GGUF blocks for the GPU: uploaded as they are, taken apart and put together by torch on the device.

A packed weight is one int32 vector of planes, each with one row per output (all experts' outputs one after the other,
each expert's padded with zero rows to a multiple of 8). G groups of 32 columns a row:

  main   below 8 bits: [G][4] words; byte b of word i holds code 4i + b in its low, 16 + 4i + b in its high nibble
         8 bits: [2][G][4] words; byte b of word (h, g, i) is code 16h + 4i + b of group g, signed
  extra  5 bits: [G] words; bit i of byte b is bit 4 of code 4i + b, bit 4 + i that of code 16 + 4i + b
         6 bits: [2][G] words; bits 2i, 2i + 1 of byte b of word (h, g): bits 4, 5 of code 16h + 4i + b, bit 5 flipped
  scales [G] halves or words, see `triton_quant`
  super  [G / 8] words: halves d and dmin (0 where there is none)

Floats are one plane of values, their columns padded with zeros to a multiple of 8. What a format stores is kept as it
is: no scale is rounded.
"""

import ctypes
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sparkinfer.backend.cuda import CudaBackend
from sparkinfer.errors import ShapeError
from sparkinfer.kernels.triton_quant import FORMS, Form
from sparkinfer.quant.formats import QUANT_FORMATS
from sparkinfer.quant.iq4_nl import CODEBOOK

PAD = 8  # outputs of an expert are padded to a multiple of this
_SLAB = 1 << 26  # weights repacked at a time: bounds the temporaries
_STAGE_BYTES = 32 << 20
_LOCAL = threading.local()

Tensor = torch.Tensor


@dataclass(frozen=True)
class TritonWeight:
    """`outputs` x `inputs` weights on the device; `experts` matrices one after the other (1 for an ordinary weight)."""

    format_name: str
    outputs: int
    inputs: int
    words: Tensor
    experts: int = 1

    @property
    def form(self) -> Form:
        return FORMS[self.format_name]

    @property
    def quantised(self) -> bool:
        return self.form.quantised

    @property
    def padded_outputs(self) -> int:
        """Columns the result buffer must have."""
        return -(-self.outputs // PAD) * PAD

    @property
    def total(self) -> int:
        """Rows of every plane."""
        return self.experts * self.padded_outputs

    @property
    def groups(self) -> int:
        return -(-self.inputs // 8) * 8 // self.form.group

    @property
    def n_bytes(self) -> int:
        return self.words.numel() * 4

    def planes(self) -> list[Tensor]:
        """Views of the planes' bytes, each uint8 [rows, bytes of a row]."""
        widths = plane_widths(self.form, self.groups)
        parts = self.words.view(torch.uint8).split([self.total * width for width in widths])
        return [part.view(self.total, width) for part, width in zip(parts, widths, strict=True)]


@dataclass(frozen=True)
class Planes:
    """Parts of some rows before they are put into the vector: codes uint8 [rows, G, 32] and the scale planes' bytes."""

    codes: Tensor
    scales: Tensor
    super: Tensor | None = None


def pack_blocks(
    backend: CudaBackend, format_name: str, blocks: Any, outputs: int, inputs: int, experts: int
) -> TritonWeight:
    """GGUF blocks (numpy uint8 [n, block_bytes] of experts x outputs x inputs values) as a weight on the device.

    Raises ShapeError when the inputs are no whole number of blocks.
    """
    spec, form = QUANT_FORMATS[format_name], FORMS[format_name]
    if inputs % spec.block_size:
        raise ShapeError(
            f"{format_name} rows have a multiple of {spec.block_size} columns, not {inputs}"
        )
    backend.enter()  # loading threads come here
    shell = TritonWeight(format_name, outputs, inputs, torch.empty(0), experts)
    raw = upload(blocks, backend.device).reshape(experts * outputs, -1)
    widths = plane_widths(form, shell.groups)
    flat = backend.zeros((shell.total * sum(widths),), np.uint8)
    planes = [
        plane.reshape(shell.total, width)
        for plane, width in zip(
            flat.split([shell.total * width for width in widths]), widths, strict=True
        )
    ]
    padded, step = shell.padded_outputs, max(1, _SLAB // inputs)
    # without padding between them all experts are one matrix
    runs = (
        [(0, 0, len(raw))]
        if padded == outputs
        else [(e * padded, e * outputs, outputs) for e in range(experts)]
    )
    for target, source, count in runs:
        for first in range(0, count, step):
            last = min(count, first + step)
            part = raw[source + first : source + last]
            for plane, values in zip(planes, row_planes(format_name, part, inputs), strict=True):
                plane[target + first : target + last] = values.view(torch.uint8)
    return TritonWeight(format_name, outputs, inputs, flat.view(torch.int32), experts)


def plane_widths(form: Form, groups: int) -> list[int]:
    """Bytes of a row in each plane."""
    if not form.quantised:
        return [groups * 16]
    widths = [
        groups * form.main_words * 4,
        groups * form.extra_words * 4,
        groups * form.scale_halves * 2,
        groups // 8 * 4 if form.has_super else 0,
    ]
    return [width for width in widths if width]


def upload(blocks: Any, device: torch.device) -> Tensor:
    """Blocks as a uint8 vector on the device. The file's memory is read-only, which torch would warn about."""
    flat = np.ascontiguousarray(blocks).view(np.uint8).reshape(-1)
    view = np.ctypeslib.as_array((ctypes.c_uint8 * flat.size).from_address(flat.ctypes.data))
    source = torch.from_numpy(view)
    if device.type == "cpu":
        return source.clone()
    target = torch.empty(flat.size, dtype=torch.uint8, device=device)
    stage = _stage(device)
    for index, first in enumerate(range(0, flat.size, _STAGE_BYTES)):
        part = source[first : first + _STAGE_BYTES]
        pinned, done = stage[index % 2]
        done.synchronize()  # the device has read what was there
        pinned[: len(part)].copy_(part)
        target[first : first + len(part)].copy_(pinned[: len(part)], non_blocking=True)
        done.record(torch.cuda.current_stream(device))
    return target


def _stage(device: torch.device) -> list[tuple[Tensor, torch.cuda.Event]]:
    """Two pieces of pinned memory of this thread: the system copies ordinary memory at a fraction of the speed.

    An event belongs to the device it was first recorded on, so another device has pieces of its own.
    """
    if getattr(_LOCAL, "device", None) != device:
        _LOCAL.device = device
        _LOCAL.stage = [
            (torch.empty(_STAGE_BYTES, dtype=torch.uint8, pin_memory=True), torch.cuda.Event())
            for _ in range(2)
        ]
    found: list[tuple[Tensor, torch.cuda.Event]] = _LOCAL.stage
    return found


def row_planes(format_name: str, raw: Tensor, inputs: int) -> list[Tensor]:
    """The planes of some rows, each [rows, ...] of contiguous bytes, from their raw bytes [rows, row bytes]."""
    spec, form = QUANT_FORMATS[format_name], FORMS[format_name]
    rows = raw.shape[0]
    if not form.quantised:
        width = -(-inputs // 8) * 8 * spec.block_bytes
        padded = raw.new_zeros((rows, width))
        padded[:, : raw.shape[1]] = raw
        return [padded]
    blocks = raw.reshape(rows, inputs // spec.block_size, spec.block_bytes)
    parts = _READERS[format_name](blocks)
    codes = parts.codes.reshape(rows, inputs // 32, 32)
    planes = [_main_plane(form, codes)]
    if form.bits == 5:
        planes.append(_bit_plane(codes))
    elif form.bits == 6:
        planes.append(_two_bit_plane(codes))
    planes.append(parts.scales)
    if parts.super is not None:
        planes.append(parts.super)
    return [plane.contiguous().reshape(rows, -1) for plane in planes]


def _main_plane(form: Form, codes: Tensor) -> Tensor:
    if form.bits == 8:
        return codes.reshape(*codes.shape[:2], 2, 16).transpose(1, 2)
    nibbles = codes & 15
    return nibbles[..., :16] | (nibbles[..., 16:] << 4)


def _bit_plane(codes: Tensor) -> Tensor:
    fifth = (codes >> 4).reshape(*codes.shape[:2], 8, 4) & 1
    out = fifth[:, :, 0].clone()
    for j in range(1, 8):
        out |= fifth[:, :, j] << j
    return out


def _two_bit_plane(codes: Tensor) -> Tensor:
    upper = ((codes >> 4) ^ 2).reshape(*codes.shape[:2], 2, 4, 4) & 3
    out = upper[:, :, :, 0].clone()
    for i in range(1, 4):
        out |= upper[:, :, :, i] << (2 * i)
    return out.transpose(1, 2)


# ---- one reader per format: blocks uint8 [rows, n, block_bytes] to planes; byte layouts as in `sparkinfer.quant`


def _nibbles(packed: Tensor) -> Tensor:
    """All low halves of the last axis, then all high halves."""
    return torch.cat([packed & 15, packed >> 4], -1)


def _plain(zero_codes: Tensor, blocks: Tensor, halves: int) -> Planes:
    """Formats with a half, or two, per block of 32."""
    return Planes(zero_codes, blocks[..., : 2 * halves])


def _q4_0(blocks: Tensor) -> Planes:
    return _plain(_nibbles(blocks[..., 2:]), blocks, 1)


def _q4_1(blocks: Tensor) -> Planes:
    return _plain(_nibbles(blocks[..., 4:]), blocks, 2)


def _fifth_bits(packed: Tensor) -> Tensor:
    """Bit i of four bytes for value i, [.., 32], as bit 4."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    bits = (packed[..., None] >> shifts) & 1
    return bits.reshape(*packed.shape[:-1], 32) << 4


def _q5_0(blocks: Tensor) -> Planes:
    return _plain(_nibbles(blocks[..., 6:]) | _fifth_bits(blocks[..., 2:6]), blocks, 1)


def _q5_1(blocks: Tensor) -> Planes:
    return _plain(_nibbles(blocks[..., 8:]) | _fifth_bits(blocks[..., 4:8]), blocks, 2)


def _q8_0(blocks: Tensor) -> Planes:
    return _plain(blocks[..., 2:], blocks, 1)


def _look_up(indices: Tensor) -> Tensor:
    table = torch.tensor([value & 255 for value in CODEBOOK], dtype=torch.uint8)
    return table.to(indices.device)[indices.to(torch.int32)]


def _iq4_nl(blocks: Tensor) -> Planes:
    return _plain(_look_up(_nibbles(blocks[..., 2:])), blocks, 1)


def _runs(packed: Tensor, width: int, bits: int) -> Tensor:
    """Every run of `width` bytes as 8 / bits runs of codes, [.., 8 / bits * bytes]."""
    split = packed.reshape(*packed.shape[:-1], -1, 1, width)
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    codes = (split >> shifts[:, None]) & ((1 << bits) - 1)
    return codes.reshape(*packed.shape[:-1], -1)


def _six_bit_scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minima [.., 8] of 12 bytes."""
    first, second, low = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = torch.cat([first & 63, (low & 15) | ((first >> 2) & 48)], -1)
    minima = torch.cat([second & 63, (low >> 4) | ((second >> 2) & 48)], -1)
    return scales, minima


def _interleave(*items: Tensor) -> Tensor:
    return torch.stack(items, -1)


def _with_super(codes: Tensor, scales: Tensor, d: Tensor, dmin: Tensor | None = None) -> Planes:
    other = torch.zeros_like(d) if dmin is None else dmin
    return Planes(codes, scales, torch.cat([d, other], -1))


def _q4_k(blocks: Tensor) -> Planes:
    scales = _interleave(*_six_bit_scales(blocks[..., 4:16]))
    return _with_super(_runs(blocks[..., 16:], 32, 4), scales, blocks[..., :2], blocks[..., 2:4])


def _q5_k(blocks: Tensor) -> Planes:
    scales = _interleave(*_six_bit_scales(blocks[..., 4:16]))
    codes = _runs(blocks[..., 48:], 32, 4) | (_runs(blocks[..., 16:48], 32, 1) << 4)
    return _with_super(codes, scales, blocks[..., :2], blocks[..., 2:4])


def _q6_k(blocks: Tensor) -> Planes:
    codes = _runs(blocks[..., :128], 64, 4) | (_runs(blocks[..., 128:192], 32, 2) << 4)
    return _with_super(codes, blocks[..., 192:208], blocks[..., 208:])


def _q2_k(blocks: Tensor) -> Planes:
    packed = blocks[..., :16].reshape(*blocks.shape[:2], 8, 2)
    scales = torch.cat([packed & 15, packed >> 4], -1)  # two scales, two minima per group of 32
    return _with_super(
        _runs(blocks[..., 16:80], 32, 2), scales, blocks[..., 80:82], blocks[..., 82:]
    )


def _q3_k(blocks: Tensor) -> Planes:
    """w = d scale (q - 4) = d scale q - d (4 scale): the minima are four times the scales."""
    codes = _runs(blocks[..., 32:96], 32, 2) | (_runs(blocks[..., :32], 32, 1) << 2)
    packed = blocks[..., 96:108]
    low = torch.cat([packed[..., :8] & 15, packed[..., :8] >> 4], -1)
    top = torch.cat([(packed[..., 8:] >> (2 * quarter)) & 3 for quarter in range(4)], -1)
    scales = ((low | (top << 4)) - 32).reshape(*blocks.shape[:2], 8, 2)
    both = torch.cat([scales, scales << 2], -1)
    return _with_super(codes, both, blocks[..., 108:], blocks[..., 108:])


def _iq4_xs(blocks: Tensor) -> Planes:
    codes = _look_up(_runs(blocks[..., 8:], 16, 4))
    low, high = blocks[..., 4:8], blocks[..., 2:4]
    lows = _interleave(low & 15, low >> 4).reshape(*blocks.shape[:2], 8)
    highs = torch.stack([(high >> shift) & 3 for shift in (0, 2, 4, 6)], -1)
    scales = (lows | (highs.reshape(*blocks.shape[:2], 8) << 4)) - 32
    return _with_super(codes, _interleave(scales, torch.zeros_like(scales)), blocks[..., :2])


_READERS = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "IQ4_NL": _iq4_nl,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "IQ4_XS": _iq4_xs,
    "Q6_K": _q6_k,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
}
