"""Drafts that propose anything at all, and policies that ask for anything: no output may depend on them.

Every draft here also checks how the loop uses it: rows come for every token in order, at most 64 at a time, and an
anchor is the token at the position the context has reached.
"""

import json
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from golden_models import on_host
from numpy.typing import NDArray

MAX_DEPTH = 15
Floats = NDArray[np.float32]
Guess = Callable[[list[int | None], int], list[int]]  # (right tokens or None, turn) -> proposals


class TokenProposals:
    """One token a slot; its logit is 4 and all others are -4."""

    def __init__(self, tokens: Sequence[int], n_vocab: int, anchor: int) -> None:
        self.depth = len(tokens)
        self.tokens, self.n_vocab, self.anchor = list(tokens), n_vocab, anchor

    def best(self, slot: int, previous: int) -> int:
        self._check(slot, previous)
        return self.tokens[slot]

    def row(self, slot: int, previous: int) -> Floats:
        self._check(slot, previous)
        row = np.full(self.n_vocab, -4, np.float32)
        row[self.tokens[slot]] = 4
        return row

    def _check(self, slot: int, previous: int) -> None:
        assert 0 <= slot < self.depth, (slot, self.depth)
        assert slot or previous == self.anchor, (previous, self.anchor)
        assert 0 <= previous < self.n_vocab


class RowProposals(TokenProposals):
    """Logits for every slot and previous token, from a function."""

    def __init__(
        self, logits: Callable[[int, int], Floats], depth: int, n_vocab: int, anchor: int
    ) -> None:
        super().__init__([0] * depth, n_vocab, anchor)
        self.logits = logits

    def best(self, slot: int, previous: int) -> int:
        return int(self.row(slot, previous).argmax())

    def row(self, slot: int, previous: int) -> Floats:
        self._check(slot, previous)
        return self.logits(slot, previous)


class ZooDraft:
    """Keeps every context row it was given; None stands for a row it never got."""

    max_depth = MAX_DEPTH

    def __init__(self, name: str, n_vocab: int, taps: Sequence[int] = (0,)) -> None:
        self.name, self.n_vocab, self.taps = name, n_vocab, tuple(taps)
        self.tokens: list[int] = []
        self.rows: list[Floats | None] = []
        self.turns = 0
        self.depths: list[int] = []
        self.anchors: list[tuple[int, int]] = []  # (position, token)
        self.asked_for_rows = 0

    @property
    def plan(self) -> Mapping[str, Any]:
        return {"draft": self.name}

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def gap(self) -> int:
        return sum(row is None for row in self.rows)

    def begin(self, tokens: Sequence[int]) -> None:
        keep = 0
        for mine, theirs in zip(self.tokens, tokens, strict=False):
            if mine != theirs:
                break
            keep += 1
        self.tokens = list(tokens)
        self.rows = [*self.rows[:keep], *[None] * (len(tokens) - keep)]

    def extend(self, tokens: Sequence[int], features: Floats) -> None:
        features = on_host(features)
        assert len(tokens) >= 1
        assert features.shape[0] == len(tokens), (features.shape, len(tokens))
        assert features.dtype == np.float32 and np.isfinite(features).all()
        self.tokens += [int(token) for token in tokens]
        self.rows += list(features)

    def assume(self, length: int) -> None:
        self.tokens, self.rows = [0] * length, [np.zeros(0, np.float32)] * length

    def propose(self, anchor: int, depth: int) -> TokenProposals:
        assert 1 <= depth <= self.max_depth, depth
        self.anchors.append((self.length, anchor))
        self.depths.append(depth)
        self.turns += 1
        return self.proposals(anchor, depth)

    def proposals(self, anchor: int, depth: int) -> TokenProposals:
        raise NotImplementedError


class GuessDraft(ZooDraft):
    """Knows the whole text (prompt and plain output) and makes of it what `guess` says."""

    def __init__(
        self,
        name: str,
        n_vocab: int,
        known: Sequence[int],
        guess: Guess,
        taps: Sequence[int] = (0,),
    ) -> None:
        super().__init__(name, n_vocab, taps)
        self.known, self.guess = list(known), guess

    def proposals(self, anchor: int, depth: int) -> TokenProposals:
        here = self.length
        assert here >= len(self.known) or self.known[here] == anchor, (
            "an anchor off the plain output"
        )
        ahead = self.known[here + 1 : here + 1 + depth]
        right: list[int | None] = [*ahead, *[None] * (depth - len(ahead))]
        tokens = self.guess(right, self.turns)
        assert len(tokens) == depth
        return TokenProposals(tokens, self.n_vocab, anchor)


class RandomDraft(ZooDraft):
    """Random logits, new ones every time."""

    def __init__(self, n_vocab: int, seed: int = 0, taps: Sequence[int] = (0,)) -> None:
        super().__init__("random", n_vocab, taps)
        self.rng = np.random.default_rng(seed)

    def proposals(self, anchor: int, depth: int) -> TokenProposals:
        rows = (3 * self.rng.standard_normal((depth, self.n_vocab))).astype(np.float32)
        return RowProposals(lambda slot, _: rows[slot], depth, self.n_vocab, anchor)


class LawDraft(ZooDraft):
    """Logits that depend on the position of a slot and the token chosen before it: `logits(position, previous)`."""

    def __init__(
        self, n_vocab: int, logits: Callable[[int, int], Floats], taps: Sequence[int] = (0,)
    ) -> None:
        super().__init__("law", n_vocab, taps)
        self.logits = logits

    def proposals(self, anchor: int, depth: int) -> TokenProposals:
        first = self.length + 1
        return RowProposals(
            lambda slot, previous: self.logits(first + slot, previous), depth, self.n_vocab, anchor
        )


def accepting(script: Iterable[int], n_vocab: int) -> Guess:
    """Right for `script[turn]` slots (in a circle), then wrong in all that follow."""
    counts = list(script)

    def guess(right: list[int | None], turn: int) -> list[int]:
        count = counts[turn % len(counts)]
        return [
            _token(token, turn) if slot < count else _wrong(token, turn, n_vocab)
            for slot, token in enumerate(right)
        ]

    return guess


def alternating(n_vocab: int) -> Guess:
    """Right and wrong in turn, starting with either."""

    def guess(right: list[int | None], turn: int) -> list[int]:
        return [
            _wrong(token, turn, n_vocab) if (slot + turn) % 2 else _token(token, turn)
            for slot, token in enumerate(right)
        ]

    return guess


def ending(stop_ids: Sequence[int]) -> Guess:
    """Right, but for one slot that proposes an id which would end the output."""

    def guess(right: list[int | None], turn: int) -> list[int]:
        stop = stop_ids[turn % len(stop_ids)]
        at = turn % len(right)
        return [stop if slot == at else _token(token, turn) for slot, token in enumerate(right)]

    return guess


def constant(ids: Sequence[int]) -> Guess:
    """The same ids over and over: the mask token, or the edges of the vocabulary."""

    def guess(right: list[int | None], turn: int) -> list[int]:
        return [ids[(slot + turn) % len(ids)] for slot in range(len(right))]

    return guess


def _token(right: int | None, turn: int) -> int:
    return turn % 3 if right is None else right


def _wrong(right: int | None, turn: int, n_vocab: int) -> int:
    return ((right or 0) + 1 + turn % (n_vocab - 1)) % n_vocab


KINDS = (
    "oracle", "scripted", "random", "mask", "late", "alternating", "ending", "edges", "wrong",
)  # fmt: skip


def make_draft(
    kind: str,
    n_vocab: int,
    known: Sequence[int],
    *,
    seed: int = 0,
    taps: Sequence[int] = (0,),
    stop_ids: Sequence[int] = (0,),
) -> ZooDraft:
    """A draft by name; `known` is the prompt and what plain decoding makes of it."""
    rng = np.random.default_rng(seed)
    if kind == "random":
        return RandomDraft(n_vocab, seed, taps)
    scripts = {
        "oracle": [MAX_DEPTH],
        "scripted": [int(n) for n in rng.integers(0, MAX_DEPTH + 1, 64)],
        "late": [MAX_DEPTH, 0],
        "wrong": [0],
    }
    if kind in scripts:
        guess = accepting(scripts[kind], n_vocab)
    else:
        guess = {
            "mask": constant([n_vocab - 2]),
            "alternating": alternating(n_vocab),
            "ending": ending(list(stop_ids) or [0]),
            "edges": constant([n_vocab - 1, 0]),
        }[kind]
    return GuessDraft(kind, n_vocab, known, guess, taps)


def write_block_draft(
    folder: Path, target: Any, *, block: int = 16, seed: int = 0, **more: Any
) -> Path:
    """A folder with a draft of random weights for a loaded target: one sliding and one full layer, two taps."""
    config = target.config
    n, inner, heads, kv_heads, head = config.n_embd, min(2 * config.n_embd, 512), 4, 2, 16
    values = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": n,
        "intermediate_size": inner,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 4096,
        "vocab_size": config.n_vocab,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 48,
        "use_sliding_window": True,
        "num_target_layers": config.n_layers,
        "dflash_config": {
            "block_size": block,
            "mask_token_id": config.n_vocab - 2,
            "target_layer_ids": [0, config.n_layers - 2],
        },
    } | more
    shapes = {"fc.weight": (n, 2 * n), "hidden_norm.weight": (n,), "norm.weight": (n,)}
    for layer in range(2):
        at = f"layers.{layer}."
        shapes |= {
            f"{at}input_layernorm.weight": (n,),
            f"{at}post_attention_layernorm.weight": (n,),
            f"{at}self_attn.q_proj.weight": (heads * head, n),
            f"{at}self_attn.k_proj.weight": (kv_heads * head, n),
            f"{at}self_attn.v_proj.weight": (kv_heads * head, n),
            f"{at}self_attn.o_proj.weight": (n, heads * head),
            f"{at}self_attn.q_norm.weight": (head,),
            f"{at}self_attn.k_norm.weight": (head,),
            f"{at}mlp.gate_proj.weight": (inner, n),
            f"{at}mlp.up_proj.weight": (inner, n),
            f"{at}mlp.down_proj.weight": (n, inner),
        }
    rng, header, parts, offset = np.random.default_rng(seed), {}, [], 0
    for name, shape in shapes.items():
        array = rng.standard_normal(shape) / shape[-1] ** 0.5 if len(shape) > 1 else np.ones(shape)
        parts.append(array.astype(np.float32).tobytes())
        ends = [offset, offset + len(parts[-1])]
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": ends}
        offset = ends[1]
    text = json.dumps(header).encode()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    (folder / "model.safetensors").write_bytes(
        struct.pack("<Q", len(text)) + text + b"".join(parts)
    )
    return folder
