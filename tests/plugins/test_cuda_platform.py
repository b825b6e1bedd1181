"""The CUDA platform's facts, from a driver and libraries that stand in for the real ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from ds_runtime.api import DeviceInfo, Facts, Refusal
from ds_runtime.config import EngineConfig
from ds_runtime.ops.contract import Dims
from ds_runtime_cuda import defaults, platform, software
from ds_runtime_cuda.driver import DriverError, Gpu, gpu, links, memory


class Driver:
    """libcuda and libnvidia-ml as ctypes would call them."""

    names = ("NVIDIA H200", "NVIDIA B200")
    capabilities = ((9, 0), (10, 0))
    fails = ""

    def __init__(self, library):
        self.library = library
        self.shut = 0

    def __getattr__(self, name):
        if self.fails == name:
            return lambda *arguments: 100
        own = vars(Driver).get(f"_{name}")
        return (lambda *arguments: 0) if own is None else own.__get__(self)

    def _cuDeviceGetCount(self, count):
        count._obj.value = 2
        return 0

    def _cuDeviceGet(self, device, index):
        device._obj.value = 40 + index
        return 0

    def _cuDeviceTotalMem_v2(self, size, device):
        size._obj.value = 150 << 30
        return 0

    def _cuDeviceGetName(self, text, length, device):
        text.value = self.names[device.value - 40].encode()
        return 0

    def _cuDeviceGetPCIBusId(self, text, length, device):
        text.value = b"0000:%02d:00.0" % device.value
        return 0

    def _cuDeviceGetAttribute(self, value, attribute, device):
        major, minor = self.capabilities[device.value - 40]
        known = {16: 132, 75: major, 76: minor, 36: 3_201_000, 37: 6144}
        if attribute in (36, 37) and device.value == 41:
            return 1  # a driver that does not say
        value._obj.value = known[attribute]
        return 0

    def _nvmlDeviceGetHandleByPciBusId_v2(self, bus, handle):
        handle._obj.value = int(bus.split(b":")[1])
        return 0

    def _nvmlDeviceGetMemoryInfo(self, handle, found):
        found._obj.total, found._obj.free = 150 << 30, handle.value << 30
        return 0

    def _nvmlDeviceGetNvLinkState(self, handle, number, active):
        active._obj.value = number != 3  # one is down
        return 0 if handle.value in self.linked else 3

    def _nvmlDeviceGetNvLinkVersion(self, handle, number, version):
        version._obj.value = self.linked[handle.value]
        return 0


@pytest.mark.parametrize(
    ("linked", "rate"), [({40: 4}, 17 * 25 * 10**9), ({40: 5}, 17 * 50 * 10**9), ({}, 0)]
)
def test_links_between_gpus_are_counted(monkeypatch, linked, rate):
    monkeypatch.setattr(Driver, "linked", linked, raising=False)
    assert links("0000:40:00.0", Driver) == rate
    monkeypatch.setattr(Driver, "fails", "nvmlDeviceGetHandleByPciBusId_v2")
    assert links("0000:40:00.0", Driver) == 0

    def absent(name):
        raise OSError(f"{name}: no such library")

    assert links("0000:40:00.0", absent) == 0


@pytest.mark.parametrize(("found", "link"), [(450 * 10**9, "nvlink"), (0, "pcie")])
def test_the_link_is_a_fact_and_multicast_is_left_off(found, link):
    info = platform.describe(Gpu("x", (9, 0), 1, 2, "", links=found), frozenset())
    assert (info.link, info.link_bandwidth, info.multicast) == (link, found, False)


def test_a_gpu_is_read_from_the_driver():
    rate = 3_201_000_000 * 2 * 6144 // 8
    assert gpu(0, Driver) == Gpu("NVIDIA H200", (9, 0), 150 << 30, 132, "0000:40:00.0", rate)
    assert gpu(1, Driver).arch == "sm100" and gpu(1, Driver).bandwidth == 0
    assert memory("0000:41:00.0", Driver) == (150 << 30, 41 << 30)


def test_what_the_driver_refuses_is_a_sentence():
    with pytest.raises(DriverError, match="GPU 2 is asked for, and 2 are visible"):
        gpu(2, Driver)

    class NoDevice(Driver):
        fails = "cuInit"

    with pytest.raises(DriverError, match="cuInit failed with code 100"):
        gpu(0, NoDevice)


@pytest.mark.parametrize(
    ("capability", "fast", "features"),
    [
        ((7, 5), {"float32"}, set()),
        ((8, 0), {"float32", "bfloat16", "float16"}, {"bf16"}),
        ((9, 0), {"float32", "bfloat16", "float16", "float8_e4m3fn"}, {"bf16", "fp8"}),
    ],
)
def test_dtypes_follow_the_capability(capability, fast, features):
    info = platform.describe(Gpu("x", capability, 1, 2, ""), frozenset({"triton"}))
    assert (info.type, info.arch) == ("cuda", f"sm{capability[0]}{capability[1]}")
    assert info.fast_dtypes == fast and info.features == features | {"triton"}


def write_package(root: Path, name: str, text: str) -> None:
    (root / name).mkdir()
    (root / name / "__init__.py").write_text(text)


SOURCE = """
import os
from .moe import topk_softmax, silu as silu_and_mul
if os.name:
    from .gemm import a_gemm
try:
    def fp8_gemm_nt(a, b): ...
except ImportError:
    fallback = None
class Wrapper: ...
set_pdl = os.name
"""


def looked(folder, version):
    """Features of all libraries."""
    return {name for each in software.LIBRARIES for name in each.find(folder, version)}


def test_functions_are_found_without_an_import(tmp_path):
    write_package(tmp_path, "sgl_kernel", SOURCE)
    write_package(tmp_path, "flashinfer", "raise SystemExit")
    found = looked(lambda m: p if (p := tmp_path / m).is_dir() else None, lambda d: None)
    names = (
        "topk_softmax",
        "silu_and_mul",
        "a_gemm",
        "fp8_gemm_nt",
        "fallback",
        "Wrapper",
        "set_pdl",
    )
    assert {f"sgl_kernel.{n}" for n in names} <= found
    assert {"sgl_kernel", "flashinfer"} <= found
    assert not any(f.startswith(("deep_gemm", "flashinfer.")) for f in found)


def test_nvcc_is_looked_for_where_libraries_do(tmp_path):
    """CUDA_HOME, else CUDA_PATH, else PATH, else the usual folder."""
    compiler = tmp_path / "toolkit" / "bin" / "nvcc"
    compiler.parent.mkdir(parents=True)
    compiler.write_text("")
    compiler.chmod(0o755)
    home, other = str(compiler.parent.parent), str(tmp_path / "other")
    for environ, usual, expected in (
        ({"CUDA_HOME": home, "CUDA_PATH": other}, other, compiler),
        ({"CUDA_HOME": other, "CUDA_PATH": home, "PATH": str(compiler.parent)}, home, None),
        ({"CUDA_PATH": home}, other, compiler),
        ({"PATH": str(compiler.parent)}, other, compiler),
        ({}, home, compiler),
        ({}, other, None),
    ):
        assert software.nvcc(environ, usual) == expected
    missing = {"CUDA_HOME": other}
    assert set(software.compilers({"CUDA_HOME": home}, {}.get)) == {"nvcc"}
    assert set(software.compilers(missing, {}.get)) == set()
    jit_cache = {"flashinfer_jit_cache": tmp_path}.get
    assert set(software.compilers(missing, jit_cache)) == {"flashinfer_jit_cache"}
    assert dict(software.report(missing))["nvcc"].startswith("not found, which ")


def test_two_distributions_in_one_folder_are_told(tmp_path):
    write_package(tmp_path, "sgl_kernel", "")
    one = {"sglang-kernel": "0.4.10"}.get
    both = {"sglang-kernel": "0.4.10", "sgl-kernel": "0.3.21"}.get
    assert "sgl_kernel:mixed" not in looked(tmp_path.joinpath, one)
    assert "sgl_kernel:mixed" in looked(tmp_path.joinpath, both)


def test_doctor_lists_libraries_by_version():
    have = {"sglang-kernel": "0.4.10", "sgl-kernel": "0.3.21", "triton": "3.6.0"}.get
    said = dict(library.report(have) for library in software.LIBRARIES)
    assert said["sgl_kernel"] == "sglang-kernel 0.4.10, sgl-kernel 0.3.21"
    assert said["triton"] == "triton 3.6.0" and said["deep_gemm"].startswith("not installed")


def test_defaults_are_for_gpus_alone():
    def wishes(kind, arch):
        facts = Facts(DeviceInfo(kind, "one", arch), Dims({}))
        return {c.field: c.value for c in defaults(facts)}

    assert wishes("cpu", "x86-64") == {} == wishes("cuda", "gfx942")
    assert wishes("cuda", "sm90")["page_size"] == 64
    assert EngineConfig(**wishes("cuda", "sm90"))


def test_index_keys_are_fp8_where_the_device_multiplies_it():
    def wished(arch, fast=(), dims=None, **given):
        device = DeviceInfo("cuda", "one", arch, fast_dtypes=frozenset({"bfloat16", *fast}))
        dims = {"index_topk": 2048} if dims is None else dims
        facts = Facts(device, Dims(dims), **{"index_dtype": "float8_e4m3fn", **given})
        return {c.field: c.value for c in defaults(facts)}.get("index_cache_dtype")

    assert wished("sm80", dtype="bfloat16") == "bfloat16"
    assert wished("sm80", dtype="float16") == "float16"
    assert wished("sm90", fast=("float8_e4m3fn",)) is None
    assert wished("sm80", dims={}) is None is wished("sm80", index_dtype="float32")


def test_the_platform_says_what_it_can():
    made = platform.CudaPlatform()
    assert made.asynchronous and made.captures and made.score > 1
    assert isinstance(platform.probe(Path("/nowhere")), Refusal)
