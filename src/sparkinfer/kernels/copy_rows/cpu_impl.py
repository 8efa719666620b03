"""CPU form of `copy_rows`."""

from sparkinfer.backend.base import Buffer
from sparkinfer.backend.compiled import job
from sparkinfer.backend.cpu import CpuRecorder, Job
from sparkinfer.backend.simd import load_i64
from sparkinfer.kernels.cpu_activation import copy_row


@job
def copy_job(args: int, chunk: int, thread: int) -> None:
    source = load_i64(args) + chunk * load_i64(args + 8)
    copy_row(load_i64(args + 16) + chunk * load_i64(args + 24), source, load_i64(args + 32))


def record(recorder: CpuRecorder, source: Buffer, out: Buffer) -> None:
    assert source.width == out.width and source.width % 16 == 0, (source.width, out.width)
    recorder.phase(
        [
            Job(
                copy_job,
                (source.address, source.stride, out.address, out.stride, source.width),
                recorder.rows,
            )
        ]
    )
