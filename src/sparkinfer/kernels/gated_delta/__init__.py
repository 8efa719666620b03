"""The gated delta rule of Gated DeltaNet, and the commit of its state."""

from dataclasses import dataclass

from sparkinfer.backend.base import Buffer, Recorder
from sparkinfer.kernels.select import select
from sparkinfer.kernels.shapes import RecurrentShape


@dataclass(frozen=True)
class DeltaInputs:
    """What a step reads: the convolved q, k, v rows, the projections a and b, ssm_a and ssm_dt of each value head."""

    qkv: Buffer
    alpha: Buffer
    beta: Buffer
    decay_rate: Buffer
    time_bias: Buffer


def gated_delta(
    recorder: Recorder,
    inputs: DeltaInputs,
    shape: RecurrentShape,
    layer: int,
    params: Buffer,
    out: Buffer,
    eps: float,
) -> None:
    """Record, for every row and value head i with key head i % key_heads and state S [head_size (k), head_size (v)]:

    q, k = x / sqrt(sum(x^2) + eps) per head, q also / sqrt(head_size);
    S = exp(ssm_a * softplus(alpha + ssm_dt)) * S;  delta = sigmoid(beta) * (v - S^T k);
    S = S + k delta^T;  out = S^T q.
    Shapes: inputs.qkv rows x channels (q, k, v), alpha and beta rows x value_heads, out rows x value_heads x head_size.
    When the run advances, S is updated in place; otherwise it stays and (k, delta, decay) are recorded for the commit.
    Pinned: sums over k as four chains (k mod 4) added pairwise.
    """
    select("gated_delta", recorder.backend)(recorder, inputs, shape, layer, params, out, eps)


def commit_delta(recorder: Recorder, shape: RecurrentShape, params: Buffer) -> None:
    """Record S = S * decay + k delta^T for the first COMMIT_ROWS recorded rows of every layer: the same bits."""
    select("gated_delta", recorder.backend, "record_commit")(recorder, shape, params)
