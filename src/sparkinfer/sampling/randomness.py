"""Random numbers keyed by (seed, absolute position, stream): a counter-based generator, no state.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011), Philox4x64-10.
"""

from typing import Final

TARGET_STREAM: Final = 0  # the token the target draws at a position
DRAFT_STREAM: Final = 1  # the token a draft proposes for a position
ACCEPT_STREAM: Final = 2  # whether a proposal is kept

_MULTIPLIERS: Final = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
_WEYL: Final = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
_MASK: Final = 2**64 - 1
_ROUNDS: Final = 10

Block = tuple[int, int, int, int]


def philox(counter: Block, key: tuple[int, int]) -> Block:
    """Four 64-bit random words for one 256-bit counter and one 128-bit key."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        left = _MULTIPLIERS[0] * c0
        right = _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (right >> 64) ^ c1 ^ k0,
            right & _MASK,
            (left >> 64) ^ c3 ^ k1,
            left & _MASK,
        )
        k0 = (k0 + _WEYL[0]) & _MASK
        k1 = (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def uniform(seed: int, position: int, stream: int = TARGET_STREAM) -> float:
    """A number in [0, 1) with 53 random bits; the same arguments always give the same number.

    `position` is the index in the sequence (prompt included) of the token that is drawn, so neither
    the number of rows verified at once nor the path taken can change what is drawn.
    """
    word = philox((position, stream, 0, 0), (seed, 0))[0]
    return (word >> 11) * 2.0**-53
