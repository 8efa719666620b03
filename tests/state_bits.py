"""Everything a sequence remembers, as digests of its bytes: what two equal states must share."""

import hashlib
from collections.abc import Sequence as Ids
from typing import Any

import numpy as np
from golden_models import on_host
from numpy.typing import NDArray

from sparkinfer.models import Target
from sparkinfer.state import Sequence

Bits = tuple[bytes, ...]


def state_bits(target: Target, state: Sequence) -> Bits:
    """Digests of the keys and values below the length, of the convolution and delta-rule states."""
    shape = target.state_shape.kv
    kind: type = np.float16 if shape.format == "f16" else np.float32
    planes, size = shape.layers * shape.kv_heads, shape.head_size
    positions = state.kv.plane_bytes // (size * np.dtype(kind).itemsize)
    keys = on_host(state.kv._keys).view(kind)
    if target.backend.on_host:  # tiles of 16 positions, one dimension after the other
        keys = keys.reshape(planes, positions // 16, size, 16).transpose(0, 1, 3, 2)
    keys = keys.reshape(planes, positions, size)[:, : state.length]
    values = on_host(state.kv._values).view(kind).reshape(planes, positions, size)
    values = values[:, : state.length]
    parts = [keys, values]
    if state.recurrent is not None:
        parts += [on_host(state.recurrent.conv), on_host(state.recurrent.delta)]
    return tuple(digest(part) for part in parts)


def digest(values: NDArray[Any]) -> bytes:
    return hashlib.blake2b(np.ascontiguousarray(values).tobytes(), digest_size=16).digest()


class Oracle:
    """Bits of the state after some tokens, and the logits of the last, run one token at a time from nothing."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._known: dict[tuple[int, ...], tuple[Bits, bytes]] = {}

    def __call__(self, tokens: Ids[int]) -> tuple[Bits, bytes]:
        key = tuple(tokens)
        if key not in self._known:
            state, logits = self._target.new_state(), b""
            for count, token in enumerate(key, 1):
                logits = digest(np.asarray(self._target.forward(state, [token])[0]))
                if key[:count] not in self._known:
                    self._known[key[:count]] = (state_bits(self._target, state), logits)
            self._known.setdefault(key, (state_bits(self._target, state), logits))
        return self._known[key]
