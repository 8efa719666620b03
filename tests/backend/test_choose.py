"""Where a model runs: the GPU that was asked for, or one line that says why not."""

import pytest

torch = pytest.importorskip("torch")

from sparkinfer.backend import choose, cuda  # noqa: E402
from sparkinfer.errors import DeviceError  # noqa: E402


@pytest.fixture
def two_gpus(monkeypatch, tmp_path):
    """A machine whose driver runs and whose torch finds two devices, as far as choosing goes."""
    (tmp_path / "version").touch()
    monkeypatch.setattr(choose, "_DRIVER", tmp_path / "version")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


def chosen(device, tmp_path):
    return choose.choose_backend(device, isa="auto", threads=1, cache_dir=tmp_path)


@pytest.mark.parametrize(
    ("device", "made", "reason"),
    [("auto", "cuda", "a GPU is here"), ("cuda", "cuda", "as asked"), ("cuda:1", "cuda:1", "as asked")],
)  # fmt: skip
def test_the_backend_is_made_for_the_device_that_was_asked_for(
    monkeypatch, two_gpus, tmp_path, device, made, reason
):
    monkeypatch.setattr(cuda, "CudaBackend", lambda name: name)
    assert chosen(device, tmp_path) == (made, reason)


def test_a_number_that_no_gpu_has_is_refused(two_gpus, tmp_path):
    with pytest.raises(
        DeviceError, match="device cuda:2 is not usable here: there is no GPU 2: torch finds 2"
    ):
        chosen("cuda:2", tmp_path)


def test_without_a_driver_cuda_is_refused_and_auto_takes_the_cpu(monkeypatch, tmp_path):
    monkeypatch.setattr(choose, "why_no_gpu", lambda device: "no NVIDIA driver is running")
    with pytest.raises(DeviceError, match="device cuda:1 is not usable here: no NVIDIA driver"):
        chosen("cuda:1", tmp_path)
    backend, reason = chosen("auto", tmp_path)
    backend.close()
    assert (backend.name, reason) == ("cpu", "no NVIDIA driver is running")
