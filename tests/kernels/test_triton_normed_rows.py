"""A norm, the router and the shared expert that read it, in one launch."""

import numpy as np
import pytest
from gpu_machine import backend, blank, blank_activation, filled, host, run
from kernel_machine import random_blocks, random_rows, same_bits

from sparkinfer.kernels.gated_linear import gated_linear, triton_rows
from sparkinfer.kernels.linear import linear, pack_weight
from sparkinfer.kernels.rms_norm import rms_norm


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1"])
def test_a_norm_joins_the_router_and_the_shared_expert(monkeypatch, kind):
    """Seven rows: the norm's rows have the bits of a launch of its own, the products those of single rows."""
    n = 2048
    router, gate, up = (
        pack_weight(backend(), form, random_blocks(form, outputs * n, seed), outputs, n)
        for form, outputs, seed in (("F32", 5, 1), (kind, 32, 2), (kind, 32, 3))
    )
    x, factors = random_rows(7, n, scale=3.0), filled(random_rows(1, n, seed=4))

    def record(part, launches):
        logits, hidden = blank(len(part), 8), blank_activation(len(part), 32, quantised=True)
        recorder = backend().recorder(len(part))
        act = blank_activation(len(part), n, quantised=True)
        rms_norm(recorder, filled(part), factors, act, eps=1e-6)
        linear(recorder, act, [router], [logits])
        gated_linear(recorder, act, gate, up, hidden)
        run(recorder)
        assert len(recorder.steps) == launches
        return host(logits)[:, :5], host(hidden.f32), host(act.f32), host(act.q8)

    together = record(x, 1)
    alone = [record(x[r : r + 1], 1) for r in (0, 5, 6)]
    for index, rows in enumerate(together):
        same_bits(rows[[0, 5, 6]], np.concatenate([part[index] for part in alone]))
    monkeypatch.setattr(triton_rows, "norm_before", lambda *_: None)
    apart = record(x, 2)
    for one, other in zip(together[:2], apart[:2], strict=True):
        assert np.isfinite(other).all()
        assert np.abs(one - other).max() <= 2e-6 * np.abs(other).max()
    for one, other in zip(together[2:], apart[2:], strict=True):
        same_bits(one, other)
