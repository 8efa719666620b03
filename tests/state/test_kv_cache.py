"""Memory of keys and values: sizes of planes, what is cleared."""

import numpy as np
import pytest

from sparkinfer.state.kv_cache import KvCache, KvShape


@pytest.mark.parametrize(
    ("kind", "context", "wanted"),
    [("f32", 1, 16 * 64 * 4), ("f16", 17, 32 * 64 * 2), ("q8_0", 1, 32 * 68), ("q8_0", 33, 64 * 68)],
)  # fmt: skip
def test_positions_come_in_whole_tiles(kind, context, wanted):
    shape = KvShape(3, 2, 64, kind)
    assert shape.plane_bytes(context) == wanted
    assert shape.n_bytes(context) == 2 * 3 * 2 * wanted


def test_scales_follow_the_codes():
    """Kernels find them from the bytes of a plane alone."""
    shape = KvShape(1, 1, 96, "q8_0")
    for context in (1, 32, 100, 4096):
        assert shape.code_bytes(context) == shape.plane_bytes(context) // 17 * 16
        assert shape.scale_bytes(context) * 16 == shape.code_bytes(context)


@pytest.mark.parametrize("kind", ["f32", "f16", "q8_0"])
def test_clear_reaches_codes_and_scales_of_the_first_positions(kind):
    shape = KvShape(2, 2, 32, kind)
    cache = KvCache(shape, 256)
    cache._keys[:] = cache._values[:] = 7
    cache.clear(40)
    tiles = {"f32": 48, "f16": 48, "q8_0": 64}[kind]
    for planes in (cache._keys, cache._values):
        codes, scales = np.split(planes, [shape.code_bytes(256)], axis=1)
        for part, cleared in ((codes, shape.code_bytes(tiles)), (scales, shape.scale_bytes(tiles))):
            assert not part[:, :cleared].any()
            assert (part[:, cleared:] == 7).all()


def test_only_entries_without_scales_are_dropped():
    with pytest.raises(AssertionError, match="q8_0"):
        KvCache(KvShape(1, 1, 32, "q8_0"), 64).drop(16, 32)
