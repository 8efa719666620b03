"""The tape that applies recorded rows of a verified window to the recurrent layers."""

from sparkinfer.backend.base import Backend, Buffer, Tape
from sparkinfer.kernels.conv import commit_conv
from sparkinfer.kernels.gated_delta import commit_delta
from sparkinfer.kernels.shapes import RecurrentShape


def commit_tape(backend: Backend, shape: RecurrentShape, params: Buffer) -> Tape:
    """Record the commit; how many rows it applies is read from the run parameters."""
    recorder = backend.recorder(1)
    commit_conv(recorder, shape, params)
    commit_delta(recorder, shape, params)
    return recorder.finish()
