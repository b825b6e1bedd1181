"""The CUDA plugin's own kernels: they compile for the device that they are for, and are kept."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ds_runtime_cuda import nvrtc, streamed
from ds_runtime_cuda.driver import DriverError


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    monkeypatch.setattr(nvrtc, "folder", lambda: tmp_path / "kept")
    return tmp_path / "kept"


@pytest.mark.parametrize("fp8", [False, True])
def test_experts_compile(home, fp8):
    code = nvrtc.compile_for("sm_90a", "experts.cu", streamed._defines(fp8))
    assert code[:4] == b"\x7fELF"
    assert all(name in code for name in (b"arrange", b"experts", b"combine"))
    (kept,) = home.iterdir()
    assert kept.read_bytes() == code
    kept.write_bytes(b"as it was")
    assert nvrtc.compile_for("sm_90a", "experts.cu", streamed._defines(fp8)) == b"as it was"


def test_another_layout_of_the_arguments_does_not_compile():
    defines = {**streamed._defines(True), "ARGS": 640}
    with pytest.raises(DriverError, match="as the caller lays them out"):
        nvrtc.compile_for("sm_90a", "experts.cu", defines)


def test_without_a_folder_to_keep_it_is_compiled_all_the_same(home):
    home.write_text("a file is in its place")
    options = ("--gpu-architecture=sm_90a",)
    assert nvrtc.compiled("__global__ void nothing() {}", options)[:4] == b"\x7fELF"


def test_ahead_compiles_all_that_may_be_called(home, monkeypatch):
    monkeypatch.setattr(nvrtc.torch.cuda, "get_device_capability", lambda: (9, 0))

    streamed.compile_experts(SimpleNamespace(weight_format="fp8_block"), (8,))
    streamed.compile_experts(SimpleNamespace(weight_format="dense"), (8,))
    assert len(list(home.iterdir())) == 2
