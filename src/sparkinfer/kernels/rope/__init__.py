"""Rotary positions (with the optional per-head norm before them), and the write into the key/value cache."""

from sparkinfer.backend.base import Buffer, Recorder
from sparkinfer.kernels.select import select
from sparkinfer.kernels.shapes import Heads


def rope(
    recorder: Recorder,
    q: Buffer,
    k: Buffer,
    v: Buffer,
    shape: Heads,
    table: Buffer,
    params: Buffer,
    out: Buffer,
    q_norm: Buffer | None,
    k_norm: Buffer | None,
) -> None:
    """Record out[r] = rotate(norm(q[r])) and the cache rows of rotate(norm(k[r])) and v[r] at position + r.

    Shapes: q rows x heads x head_size (x 2 when `gated`: query then gate inside each head), k and v rows x kv_heads x
    head_size, table positions x 2 rotated (`reference.factors`), norms 1 x head_size.
    The first `rotated` dimensions turn: adjacent pairs when `interleaved`, else halves.
    Writes `out` and the caches named by `params`. Rows do not mix. The run parameter ROTATION is added to the position
    that a row turns by, not to the cache row it goes to.
    """
    select("rope", recorder.backend)(recorder, q, k, v, shape, table, params, out, q_norm, k_norm)


def cache_rows(
    recorder: Recorder,
    k: Buffer,
    v: Buffer,
    shape: Heads,
    table: Buffer,
    params: Buffer,
    k_norm: Buffer | None,
) -> None:
    """Record what `rope` does for keys and values alone, as a phase that may run beside others (`together`)."""
    select("rope", recorder.backend, "record_cache")(recorder, k, v, shape, table, params, k_norm)
