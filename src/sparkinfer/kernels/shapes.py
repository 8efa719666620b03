"""Shapes of layers that kernels and state agree on."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Heads:
    """Shape of an attention layer. `layer` counts attention layers only: it is the layer's place in the cache.

    `causal`: a row sees no later row of its run. `window` (0: none): keys less than that many positions away are seen.
    """

    layer: int
    heads: int
    kv_heads: int
    head_size: int
    rotated: int
    interleaved: bool
    gated: bool
    eps: float
    causal: bool = True
    window: int = 0


@dataclass(frozen=True)
class RecurrentShape:
    """`layers` Gated-DeltaNet layers, all alike; `taps` of the convolution; `window` rows of the commit record."""

    layers: int
    channels: int
    taps: int
    key_heads: int
    value_heads: int
    head_size: int
    window: int

    @property
    def state_bytes(self) -> int:
        per_layer = (self.taps - 1) * self.channels + self.value_heads * self.head_size**2
        return 4 * self.layers * per_layer

    @property
    def record_bytes(self) -> int:
        per_row = (
            self.channels + (self.key_heads + self.value_heads) * self.head_size + self.value_heads
        )
        return 4 * self.layers * self.window * per_row
