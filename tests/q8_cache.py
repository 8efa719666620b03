"""Planes of a q8_0 cache as the GPU kernels keep them, by torch, from the description in kernels/triton_cache.py."""

from typing import Any

import torch

BLOCK = 32


def quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes int32 [.., size] and scales float16 [.., size / 32] of float32 numbers [.., size]."""
    blocks = x.float().unflatten(-1, (-1, BLOCK))
    scales = torch.clamp(blocks.abs().amax(-1) / 127, max=515.5).half()
    inverse = 1 / torch.where(scales > 0, scales, 1).float()[..., None]
    codes = torch.where(scales[..., None] > 0, blocks * inverse, 0).round().clamp(-127, 127)
    return codes.int().flatten(-2), scales


def read(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The numbers that a kernel reads, float32 [.., size]: float16(scale x code)."""
    wide = scales.float().repeat_interleave(BLOCK, -1) * codes
    return wide.half().float()


def places(size: int, values: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Where a unit of 32 positions has its codes [32, size] (bytes) and scales [32, size / 32] (float16)."""
    p, d, b = torch.arange(32)[:, None], torch.arange(size), torch.arange(size // BLOCK)
    if size not in (128, 256):
        return p * size + d, p * (size // BLOCK) + b
    if not values:
        codes = (d // 128 * 2 + d // 16 % 2) * 2048 + p * 64 + d // 32 % 4 * 16 + d % 16
        return codes, p * (size // BLOCK) + b % 4 * (size // 128) + b // 4
    s, t, pair = p // 8, p // 2 % 4, p % 2
    warp, g, e = d // (size // 4), d // (size // 32) % 8, d % (size // 32)
    row, thread = e % 2, (warp * 8 + g) * 4 + t
    if size == 256:
        y, m = e // 4, e // 2 % 2
        piece, word = s // 2 * 2 + y, s % 2 * 2 + m
    else:
        piece, word = e // 2 + 0 * p, s + 0 * d
    return piece * 2048 + thread * 16 + word * 4 + row * 2 + pair, b * 32 + t * 8 + s * 2 + pair


def planes(codes: torch.Tensor, scales: torch.Tensor, *, values: bool) -> torch.Tensor:
    """Bytes [.., positions x size x 17 / 16] of codes [.., positions, size] and scales; positions: a multiple of 32."""
    count, size = codes.shape[-2:]
    lead = codes.shape[:-2]
    where, where_scale = (x.to(codes.device) for x in places(size, values))
    packed = torch.zeros((*lead, count // 32, 32 * size), dtype=torch.uint8, device=codes.device)
    packed[..., where.flatten()] = (codes + 128).to(torch.uint8).unflatten(-2, (-1, 32)).flatten(-2)
    heads = torch.zeros((*lead, count // 32, size), dtype=torch.float16, device=codes.device)
    heads[..., where_scale.flatten()] = scales.unflatten(-2, (-1, 32)).flatten(-2)
    return torch.cat([packed.flatten(-2), heads.flatten(-2).view(torch.uint8)], -1)


def parts(plane: torch.Tensor, size: int, *, values: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes [.., positions, size] and scales [.., positions, size / 32] of planes: the way back from `planes`."""
    count = plane.shape[-1] // (size // 16 * 17)
    codes, scales = plane[..., : count * size], plane[..., count * size :].view(torch.float16)
    where, where_scale = places(size, values)
    units = codes.unflatten(-1, (count // 32, -1))[..., where]
    heads = scales.unflatten(-1, (count // 32, -1))[..., where_scale]
    return units.flatten(-3, -2), heads.flatten(-3, -2)


def unplaced(plane: Any, size: int, values: bool) -> tuple[Any, Any]:
    """`parts` of numpy's bytes, as numpy has them."""
    codes, scales = parts(torch.from_numpy(plane), size, values=values)
    return codes.numpy(), scales.numpy()
