"""Keys and values as the CPU's kernels keep them, [planes, positions, size], read from and written to a cache."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparkinfer.state.kv_cache import KvCache, KvShape

_KINDS = {"f16": np.float16, "f32": np.float32}


def _planes(cache: KvCache, memory: Any) -> NDArray[np.uint8]:
    planes: NDArray[np.uint8] = memory.reshape(-1, cache.plane_bytes)
    return planes


def read(cache: KvCache, shape: KvShape) -> tuple[NDArray[Any], NDArray[Any]]:
    """Keys and values [planes, positions, size]."""
    size, keys, values = shape.head_size, _planes(cache, cache._keys), _planes(cache, cache._values)
    kind = _KINDS[shape.format]
    tiles = keys.view(kind).reshape(len(keys), -1, size, 16)
    return (
        tiles.swapaxes(2, 3).reshape(len(keys), -1, size),
        values.view(kind).reshape(len(values), -1, size),
    )


def write(cache: KvCache, shape: KvShape, keys: NDArray[Any], values: NDArray[Any]) -> None:
    """All planes of a cache of float16 or float32."""
    kind, size = _KINDS[shape.format], shape.head_size
    tiles = keys.astype(kind).reshape(len(keys), -1, 16, size).swapaxes(2, 3)
    _planes(cache, cache._keys).view(kind).reshape(tiles.shape)[:] = tiles
    target = _planes(cache, cache._values).view(kind)
    target[:] = values.astype(kind).reshape(target.shape)


def read_codes(
    cache: KvCache, shape: KvShape
) -> tuple[NDArray[np.int8], NDArray[np.float16], NDArray[np.int8], NDArray[np.float16]]:
    """Codes [planes, positions, size] and scales [planes, positions, blocks] of keys, then of values, in q8_0."""
    (key_codes, key_scales), (value_codes, value_scales) = _views(cache, shape)
    planes, size, blocks = len(key_codes), shape.head_size, shape.head_size // 32
    return (
        key_codes.transpose(0, 1, 3, 2, 4).reshape(planes, -1, size),
        key_scales.swapaxes(2, 3).reshape(planes, -1, blocks),
        value_codes.transpose(0, 1, 3, 5, 2, 4).reshape(planes, -1, size),
        value_scales.swapaxes(2, 3).reshape(planes, -1, blocks),
    )


def write_codes(
    cache: KvCache,
    shape: KvShape,
    keys: tuple[NDArray[np.int8], NDArray[np.float16]],
    values: tuple[NDArray[np.int8], NDArray[np.float16]],
) -> None:
    """All planes of a cache in q8_0, from codes and scales."""
    (key_codes, key_scales), (value_codes, value_scales) = _views(cache, shape)
    planes, size, blocks = len(key_codes), shape.head_size, shape.head_size // 32
    key_codes[:] = keys[0].reshape(planes, -1, 16, size // 2, 2).transpose(0, 1, 3, 2, 4)
    key_scales[:] = keys[1].reshape(planes, -1, 16, blocks).swapaxes(2, 3)
    value_codes[:] = values[0].reshape(planes, -1, 16, 2, blocks, 32).transpose(0, 1, 4, 2, 5, 3)
    value_scales[:] = values[1].reshape(planes, -1, 32, blocks).swapaxes(2, 3)


def _views(cache: KvCache, shape: KvShape) -> Any:
    """Of keys and of values, codes and scales in the CPU's own order."""
    size, blocks = shape.head_size, shape.head_size // 32
    codes_end = cache.plane_bytes // 17 * 16
    orders = ((-1, size // 2, 16, 2), (-1, blocks, 16)), ((-1, blocks, 16, 32, 2), (-1, blocks, 32))
    for memory, (code_order, scale_order) in zip((cache._keys, cache._values), orders, strict=True):
        planes = _planes(cache, memory)
        codes, scales = planes[:, :codes_end].view(np.int8), planes[:, codes_end:].view(np.float16)
        yield _split(codes, code_order), _split(scales, scale_order)


def _split(planes: NDArray[Any], order: tuple[int, ...]) -> NDArray[Any]:
    """A view with the second axis split: planes lie apart, so that reshape alone could copy."""
    inner = int(np.prod(order[1:]))
    shape = (len(planes), planes.shape[1] // inner, *order[1:])
    item = planes.itemsize
    strides = [item * int(np.prod(order[i + 1 :])) for i in range(len(order))]
    return np.lib.stride_tricks.as_strided(planes, shape, (planes.strides[0], *strides))
