"""The xpu platform's facts, from a loader, packages and a torch.xpu that stand in for the real."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch

from ds_runtime.api import DeviceInfo, Facts, exports
from ds_runtime.ops.contract import Dims
from ds_runtime_xpu import defaults, platform, software
from ds_runtime_xpu.level_zero import Gpu, LoaderError, gpu, gpus


class Loader:
    """libze_loader as ctypes would call it: an integrated GPU, and two stacks of a Max 1550."""

    devices = (("Graphics", 0x46A6, 1, 1), ("Max", 0x0BD5, 0, 64), ("Max", 0x0BD5, 0, 64))
    fails = ""

    def __init__(self, library):
        assert library == "libze_loader.so.1"

    def __getattr__(self, name):
        if self.fails == name:
            return lambda *arguments: 0x78000001
        own = vars(Loader).get(f"_{name}")
        return (lambda *arguments: 0) if own is None else own.__get__(self)

    def _zeDriverGet(self, count, drivers):
        return self.fill(count, drivers, [7])

    def _zeDeviceGet(self, driver, count, devices):
        assert driver.value == 7
        return self.fill(count, devices, [100 + i for i in range(len(self.devices))])

    def fill(self, count, handles, values):
        count._obj.value = len(values)
        if handles is not None:
            for i, value in enumerate(values):
                handles[i] = value
        return 0

    def _zeDeviceGetProperties(self, handle, about):
        found, (name, pci_id, flags, cores) = about._obj, self.devices[handle.value - 100]
        assert found.stype == 3 and ctypes.sizeof(found) == 368
        found.type, found.device, found.flags, found.name = 1, pci_id, flags, name.encode()
        found.slices, found.subslices_per_slice = 8, cores // 8
        return 0

    def _zeDeviceGetMemoryProperties(self, handle, count, memories):
        count._obj.value = 1
        if memories is not None:
            assert memories[0].stype == 7
            memories[0].size = 64 << 30
        return 0


def test_gpus_are_read_from_the_loader_and_integrated_ones_left_out():
    assert gpus(Loader) == [Gpu("Max", 0x0BD5, 64 << 30, 64)] * 2
    info = platform.describe(gpu(1, Loader), frozenset({"triton"}))
    assert (info.type, info.arch, info.cores) == ("xpu", "xe-hpc", 64)
    assert info.features == {"triton", "bf16"} and "float8_e4m3fn" not in info.fast_dtypes


def test_what_the_loader_refuses_is_a_sentence():
    with pytest.raises(LoaderError, match="GPU 2 is asked for, and 2 are visible"):
        gpu(2, Loader)
    with pytest.raises(LoaderError, match="zeInit failed with code 0x78000001"):
        gpu(0, type("Failing", (Loader,), {"fails": "zeInit"}))
    with pytest.raises(LoaderError, match=r"libze_loader\.so\.1 cannot be opened"):
        gpu(0, lambda name: ctypes.CDLL("/nowhere/" + name))
    with pytest.raises(LoaderError, match="PCI id 0x56a0, which this plugin does not know"):
        platform.describe(Gpu("Arc A770", 0x56A0, 16 << 30, 32), frozenset())


def test_exports_are_found_without_an_import(tmp_path):
    files = {
        "vllm_xpu_kernels/fused_moe_interface.py": "class XpuFusedMoe:\n",
        "vllm_xpu_kernels/_C.abi3.so": "\0per_token_group_fp8_quant(Tensor input) -> ()\0",
        "vllm_xpu_kernels/_xpu_C.abi3.so": "",
        "sgl_kernel/attention.py": 'def flash_mla_decode(q):\n    assert q == "xpu"\n',
        "torch/nn/functional.py": "def scaled_mm(\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    def look():
        return {f for each in libraries for f in each.find(tmp_path.joinpath, lambda d: None)}

    libraries = (software.VLLM, software.SGL, software.TORCH)
    assert look() == {
        "vllm_xpu_kernels",
        "vllm_xpu_kernels.XpuFusedMoe",
        "vllm_xpu_kernels.per_token_group_fp8_quant",
        "sgl_kernel",
        "sgl_kernel.flash_mla_decode",
        "torch",
        "torch.scaled_mm",
    }
    (tmp_path / "sgl_kernel/attention.py").write_text("def flash_mla_decode(q):\n    ...\n")
    assert {f for f in look() if f.startswith("sgl")} == {"sgl_kernel:other"}
    torch_here = exports.holds(Path(torch.__file__).parent, "nn/functional.py", "def scaled_mm(")
    assert torch_here == hasattr(torch.nn.functional, "scaled_mm")


def test_doctor_says_what_became_of_ipex():
    for have, said in (({}, "not installed, and not used"), ({software.IPEX: "2.8.0"}, "2.8.0, ")):
        told = dict(software.report(have.get))
        assert told[software.IPEX].startswith(said) and "March 2026" in told[software.IPEX]
    have = {"vllm-xpu-kernels": "0.1.16.2"}
    assert dict(software.report(have.get))["vllm_xpu_kernels"] == "vllm-xpu-kernels 0.1.16.2"


def test_defaults_are_for_intel_gpus_alone():
    for arch, fields in (("sm90", []), ("xe-hpc", ["page_size", "max_step_tokens"])):
        facts = Facts(DeviceInfo("xpu", "x", arch), Dims({}))
        assert [c.field for c in defaults(facts)][:2] == fields


def test_index_keys_stay_wide_where_nothing_scores_them_in_fp8():
    scores = frozenset({"vllm_xpu_kernels", "vllm_xpu_kernels.fp8_paged_mqa_logits"})
    for arch, has, wide in (
        ("xe2-hpg", scores, []),
        ("xe2-hpg", frozenset(), ["bfloat16"]),
        ("xe-hpc", scores, ["bfloat16"]),
    ):
        device = DeviceInfo("xpu", "x", arch, features=has)
        for heads, wanted in ((64, wide), (8, ["bfloat16"])):
            dims = Dims({"index_topk": 2048, "index_heads": heads, "index_dim": 128})
            for page, kept in ((64, wanted), (16, ["bfloat16"])):
                changes = defaults(Facts(device, dims, "bfloat16", page_size=page))
                assert [c.value for c in changes if c.field == "index_cache_dtype"] == kept


def test_before_torch_has_the_device_all_its_memory_counts_as_free(monkeypatch):
    monkeypatch.setattr(torch.xpu, "is_initialized", lambda: False)
    monkeypatch.setattr(platform, "_gpu", lambda index: Gpu("x", 0xE20B, 12 << 30, 20))
    memory = platform.XpuPlatform().memory()
    assert memory.free == memory.total == 12 << 30
