"""One layer of a draft: attention and feed-forward, each alone or between two convolutions over the block."""

from dataclasses import dataclass, replace

from sparkinfer.backend.base import Weight
from sparkinfer.dflash.config import DraftConfig
from sparkinfer.kernels.block_conv import BlockConv, block_conv, block_conv_add
from sparkinfer.kernels.linear import linear
from sparkinfer.kernels.shapes import Heads
from sparkinfer.models.layers import Attention, FeedForward, Run
from sparkinfer.models.weights import Weights


@dataclass(frozen=True)
class Convolution:
    """Of a second-generation draft: `projection` of the normed stream gives each row its own weights for both sides."""

    conv: BlockConv
    projection: Weight

    def record(self, run: Run, inner: Attention | FeedForward) -> None:
        """Convolve the normed stream, run `inner` on it, convolve its result and add that to the stream."""
        recorder = run.recorder
        x = run.norm(inner.norm, [self.projection], phases=2)
        deltas = run.output("conv deltas", self.projection)
        linear(recorder, x, [self.projection], [deltas])
        mixed = run.activation("convolved", run.x.width, inner.readers, cheap=True)
        block_conv(recorder, x.f32, deltas, self.conv, mixed)
        out = run.output("sublayer", inner.output)
        linear(recorder, inner.mix(run, mixed), [inner.output], [out])
        block_conv_add(recorder, out, deltas, self.conv, run.x)


@dataclass(frozen=True)
class DraftLayer:
    """`attention_conv` and `feed_forward_conv` belong to second-generation drafts."""

    attention: Attention
    feed_forward: FeedForward
    attention_conv: Convolution | None = None
    feed_forward_conv: Convolution | None = None

    def record(self, run: Run) -> None:
        for inner, conv in (
            (self.attention, self.attention_conv),
            (self.feed_forward, self.feed_forward_conv),
        ):
            if conv is None:
                inner.record(run)
            else:
                conv.record(run, inner)

    def record_last(self, run: Run, first: int, depth: int) -> Run:
        """As the last layer: a run on the rows first .. first + depth of the stream, the only ones that are finished.

        The other rows still give keys and values (and, where there are convolutions, everything).
        """
        whole = self.attention_conv is not None or self.feed_forward_conv is not None
        if whole:
            self.record(run)
        else:
            x = run.norm(self.attention.norm, self.attention.readers)
            mixed = self.attention.mix(run, x, (first, depth))
        run.recorder.rows = depth
        slots = replace(run, x=run.x.part(first, depth))
        if not whole:
            slots.add_to_stream(mixed, self.attention.output)
            self.feed_forward.record(slots)
        return slots


def build_layer(weights: Weights, config: DraftConfig, layer: int) -> DraftLayer:
    """Load one layer."""
    prefix = f"layers.{layer}."
    shape = Heads(
        layer=layer,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_size=config.head_size,
        rotated=config.head_size,
        interleaved=False,
        gated=False,
        eps=config.eps,
        causal=config.causal[layer],
        window=config.windows[layer],
    )
    gate, up = weights.pair(f"{prefix}mlp.gate_proj.weight", f"{prefix}mlp.up_proj.weight")
    attention = Attention(
        shape=shape,
        norm=weights.vector(f"{prefix}input_layernorm.weight"),
        q=weights.matrix(f"{prefix}self_attn.q_proj.weight"),
        k=weights.matrix(f"{prefix}self_attn.k_proj.weight"),
        v=weights.matrix(f"{prefix}self_attn.v_proj.weight"),
        output=weights.matrix(f"{prefix}self_attn.o_proj.weight"),
        q_norm=weights.vector(f"{prefix}self_attn.q_norm.weight"),
        k_norm=weights.vector(f"{prefix}self_attn.k_norm.weight"),
    )
    feed_forward = FeedForward(
        norm=weights.vector(f"{prefix}post_attention_layernorm.weight"),
        gate=gate,
        up=up,
        down=weights.matrix(f"{prefix}mlp.down_proj.weight"),
    )
    if not config.conv_taps:
        return DraftLayer(attention, feed_forward)
    convolutions = [_convolution(weights, config, f"{prefix}{name}") for name in CONVOLUTIONS]
    return DraftLayer(attention, feed_forward, *convolutions)


CONVOLUTIONS = ("attention_conv", "mlp_conv")


def _convolution(weights: Weights, config: DraftConfig, name: str) -> Convolution:
    base = weights.floats(f"{name}.base_kernel").reshape(2 * config.conv_taps, config.n_embd)
    conv = BlockConv(config.conv_taps, config.conv_group, weights.rows(base))
    return Convolution(conv, weights.matrix(f"{name}.kernel_projection.weight"))
