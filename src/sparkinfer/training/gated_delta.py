"""The gated delta rule in plain torch: a whole sequence chunk by chunk, or one token of every row.

A head's state S [d, d] follows, token by token, S = exp(g) S; S = S + k (beta (v - S^T k))^T; o = S^T q. The chunked
form is that of arXiv 2412.06464, section 3: inside a chunk of c tokens the corrections of all tokens solve one unit
triangular system (I + A) V' = R with A_ij = beta_i (k_i . k_j) exp(G_i - G_j) for j < i and G the running sum of g.
Everything is float32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64
_BASE = 8  # rows of a triangular block that is solved row by row


def unit(x: Tensor, eps: float) -> Tensor:
    """x / sqrt(sum(x^2) + eps) over the last dimension, float32."""
    wide = x.float()
    return wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)


def unit_inverse(a: Tensor) -> Tensor:
    """(I + a)^-1 of strictly lower triangular a [..., c, c], c a power of two times 8, or any c up to 8."""
    fixed = a.detach()
    size = min(_BASE, a.shape[-1])
    inverse = _solve_rows(_diagonal_blocks(fixed, size))
    while size < a.shape[-1]:
        size *= 2
        inverse = _merge(inverse, _diagonal_blocks(fixed, size))
    found = inverse[..., 0, :, :].contiguous()
    # The product is zero and has the derivative of an inverse, so nothing is kept of the steps above.
    return found - found @ (a - fixed) @ found


def _diagonal_blocks(a: Tensor, size: int) -> Tensor:
    """Blocks [..., c / size, size, size] along the diagonal of a [..., c, c]."""
    count = a.shape[-1] // size
    blocks = a.unflatten(-1, (count, size)).unflatten(-3, (count, size))
    return blocks.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


def _solve_rows(a: Tensor) -> Tensor:
    """(I + a)^-1 by forward substitution: row i is e_i less the rows before it times a_i."""
    size = a.shape[-1]
    identity = torch.eye(size, device=a.device, dtype=a.dtype).expand(a.shape)
    done = identity[..., :1, :]
    for row in range(1, size):
        left = (a[..., row, :row, None] * done).sum(-2, keepdim=True)
        done = torch.cat((done, identity[..., row : row + 1, :] - left), -2)
    return done


def _merge(inverse: Tensor, a: Tensor) -> Tensor:
    """Inverses [..., m, 2 s, 2 s] of I + a from the inverses [..., 2 m, s, s] of its diagonal blocks."""
    first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
    half = first.shape[-1]
    below = -(second @ a[..., half:, :half] @ first)
    upper = torch.cat((first, torch.zeros_like(first)), -1)
    return torch.cat((upper, torch.cat((below, second), -1)), -2)


def gated_delta(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, chunk: int = CHUNK
) -> Tensor:
    """Outputs [b, n, value_heads, d] of whole sequences that start from an empty state.

    q and k [b, n, key_heads, d], normalised and scaled; v [b, n, value_heads, d]; g and beta [b, n, value_heads].
    Value head i uses key head i % key_heads.
    """
    repeats = v.shape[2] // k.shape[2]
    length = v.shape[1]
    chunk = min(chunk, _chunk_for(length))
    q, k = (_chunks(x.repeat(1, 1, repeats, 1), chunk) for x in (q, k))
    v = _chunks(v, chunk)
    g, beta = _chunks(g[..., None], chunk)[..., 0], _chunks(beta[..., None], chunk)
    total = g.cumsum(-1)  # [b, heads, chunks, c]
    decay = (total[..., :, None] - total[..., None, :]).tril().exp().tril()
    inverse = unit_inverse((beta * (k @ k.transpose(-1, -2)) * decay).tril(-1))
    scores = (q @ k.transpose(-1, -2)) * decay
    start, end = total.exp()[..., None], (total[..., -1:] - total).exp()[..., None]
    keys, queries, later = k * start, q * start, (k * end).transpose(-1, -2)
    left = total[..., -1].exp()[..., None, None]
    state = torch.zeros_like(k[:, :, 0, :1].transpose(-1, -2) * v[:, :, 0, :1])
    out = []
    for at in range(v.shape[2]):
        right = beta[:, :, at] * (v[:, :, at] - keys[:, :, at] @ state)
        change = inverse[:, :, at] @ right
        out.append(queries[:, :, at] @ state + scores[:, :, at] @ change)
        state = left[:, :, at] * state + later[:, :, at] @ change
    return torch.stack(out, 2).flatten(2, 3)[:, :, :length].transpose(1, 2)


def _chunk_for(length: int) -> int:
    """The smallest chunk that holds the whole sequence."""
    size = _BASE
    while size < length:
        size *= 2
    return size


def _chunks(x: Tensor, chunk: int) -> Tensor:
    """[b, n, heads, d] -> float32 [b, heads, chunks, c, d]; the last chunk is filled up with zeros."""
    missing = -x.shape[1] % chunk
    padded = F.pad(x.float().transpose(1, 2), (0, 0, 0, missing))
    return padded.unflatten(2, (-1, chunk)).contiguous()


def gated_delta_step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> Tensor:
    """Outputs [b, value_heads, d] of one token of every row; `state` float32 [b, value_heads, d, d] is changed.

    q and k [b, key_heads, d], normalised and scaled; v [b, value_heads, d]; g and beta [b, value_heads].
    """
    repeats = v.shape[1] // k.shape[1]
    q, k = q.repeat(1, repeats, 1)[..., None], k.repeat(1, repeats, 1)[..., None]
    decayed = state * g.exp()[..., None, None]
    delta = beta[..., None] * (v.float() - (decayed * k).sum(-2))
    new = decayed + k * delta[..., None, :]
    state.copy_(new)
    return (new * q).sum(-2)
