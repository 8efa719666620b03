"""What products in float16 share, in Triton and in Gluon: bytes of packed weights two at a time, and rows.

A byte under the exponent of 1024 is a float16 (1024 + byte), from which 1024 is taken exactly and which one fused
multiply-add scales.
"""

import triton
import triton.language as tl


@triton.jit
def half(word):
    """The float16 in the low 16 bits."""
    return word.to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def twice(x):
    """A float32 as two equal float16 of a word."""
    low = x.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return low | (low << 16)


@triton.jit
def unit_row(value, magnitude):
    """A row of float32 as float16 over its largest magnitude, which is written: NaN where a value is no number."""
    bits = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF  # a NaN is the largest
    top = tl.max(bits, 0).to(tl.float32, bitcast=True)
    tl.store(magnitude, top)
    return (value * tl.where(top > 1e-36, 1.0 / top, 0.0)).to(tl.float16)


@triton.jit
def pairs(words, s, m, SIGNED: tl.constexpr):
    """Bytes of words times s plus m, which are words of two float16: two words of float16 pairs."""
    FLIP: tl.constexpr = -0x7F7F7F80 if SIGNED else 0  # signed bytes + 128
    NONE: tl.constexpr = 0x64806480 if SIGNED else 0x64006400  # what a byte of 0 becomes
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 u, a, b;
        xor.b32 u, $2, $5;
        prmt.b32 a, u, 0x64646464, 0x4140;
        prmt.b32 b, u, 0x64646464, 0x4342;
        sub.rn.f16x2 a, a, $6;
        sub.rn.f16x2 b, b, $6;
        fma.rn.f16x2 $0, a, $3, $4;
        fma.rn.f16x2 $1, b, $3, $4;
        }""",
        "=&r,=&r,r,r,r,r,r", [words, s, m, FLIP, NONE], dtype=(tl.int32, tl.int32), is_pure=True, pack=1,
    )  # fmt: skip
