"""CPU form of `quantise`: a phase with one chunk a row."""

from sparkinfer.backend.base import Activation
from sparkinfer.backend.compiled import job
from sparkinfer.backend.cpu import CpuRecorder, Job
from sparkinfer.backend.simd import load_i64
from sparkinfer.kernels.cpu_activation import quantise_row


@job
def quantise_job(args: int, chunk: int, thread: int) -> None:
    source = load_i64(args) + chunk * load_i64(args + 8)
    quantise_row(load_i64(args + 16), load_i64(args + 24), load_i64(args + 32), chunk, source)


def record(recorder: CpuRecorder, x: Activation) -> None:
    assert x.q8 is not None and not x.private and x.f32.width % 32 == 0, x
    args = (x.f32.address, x.f32.stride, x.q8.address, x.f32.width >> 5, recorder.rows)
    recorder.phase([Job(quantise_job, args, recorder.rows)])
