"""Everything a sequence remembers, as digests of its bytes: what two equal states must share."""

import hashlib
from collections.abc import Iterable
from collections.abc import Sequence as Ids
from typing import Any

import numpy as np
from cpu_kv import read, read_codes
from golden_models import on_host
from numpy.typing import NDArray

from sparkinfer.models import Target
from sparkinfer.state import Sequence

Bits = tuple[bytes, ...]


def state_bits(target: Target, state: Sequence) -> Bits:
    """Digests of the keys and values below the length, of the convolution and delta-rule states."""
    target.wait()  # a commit may still run beside other work
    parts = [part[:, : state.length] for part in _cached(target, state)]
    if state.recurrent is not None:
        parts += [on_host(state.recurrent.conv), on_host(state.recurrent.delta)]
    return tuple(digest(part) for part in parts)


def _cached(target: Target, state: Sequence) -> Iterable[NDArray[Any]]:
    """All that the cache holds, each [planes, positions, ...]."""
    shape = target.state_shape.kv
    if target.backend.on_host:
        return (read_codes if shape.format == "q8_0" else read)(state.kv, shape)
    memories = (state.kv._keys, state.kv._values)
    planes = [on_host(memory).reshape(-1, state.kv.plane_bytes) for memory in memories]
    if shape.format == "q8_0":
        from q8_cache import unplaced

        return [
            part
            for index, plane in enumerate(planes)
            for part in unplaced(plane, shape.head_size, index > 0)
        ]
    kind = np.float16 if shape.format == "f16" else np.float32
    return [plane.view(kind).reshape(len(plane), -1, shape.head_size) for plane in planes]


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
