"""Probes of the device plugins, against copies of other machines' /dev, /proc and /sys."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import ds_runtime_cuda.platform as cuda
import ds_runtime_npu.platform as npu
import ds_runtime_rocm.platform as rocm
import ds_runtime_triton
import ds_runtime_xpu.platform as xpu
from ds_runtime.api import Refusal, install_command


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def pci(address: str, vendor: str, cls: str) -> dict[str, str]:
    folder = f"sys/bus/pci/devices/{address}"
    return {f"{folder}/vendor": f"{vendor}\n", f"{folder}/class": f"{cls}\n"}


def have(*names: str, **versions: str):
    known = dict.fromkeys(names, "1.0") | versions
    return lambda name: known.get(name)


NETWORK_CARD = pci("0000:00:03.0", "0x10de", "0x020000") | pci("0000:00:04.0", "0x8086", "0x020000")
GPU = pci("0000:17:00.0", "0x10de", "0x030200")
DRIVER = {
    "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  "
    "580.95.05  Release Build\nGCC version: 12\n",
    "dev/nvidia0": "",
    "dev/nvidia1": "",
    "dev/nvidiactl": "",
}
CUDA_LIBRARY = {"usr/lib/x86_64-linux-gnu/libcuda.so.1": ""}


@pytest.mark.parametrize("module", [cuda, rocm, npu, xpu])
def test_absent_on_a_machine_without_devices(module, tmp_path):
    assert module.probe(tmp_path).kind == "absent"
    assert module.probe(write(tmp_path, NETWORK_CARD)).kind == "absent"


def test_cuda_stages(tmp_path):
    none = have()
    root = write(tmp_path, GPU)
    first = cuda.probe(root, none, ())
    assert first.kind == "not installed" and "driver is not loaded" in first.reason
    write(root, {"proc/driver/nvidia/version": DRIVER["proc/driver/nvidia/version"]})
    hidden = cuda.probe(root, none, ())
    assert hidden.kind == "broken" and "/dev/nvidia0" in hidden.reason
    write(root, DRIVER)
    for version, said in (
        ("2.13.0+cpu", "torch 2.13.0+cpu is another build"),
        (None, "torch is not"),
    ):
        bare = cuda.probe(root, {"torch": version}.get, ())
        assert bare.kind == "not installed" and said in bare.reason
        assert "2 NVIDIA GPUs with driver 580.95.05" in bare.reason
        assert install_command("cuda") in bare.reason
    unlinked = cuda.probe(root, have("torch"), ())
    assert unlinked.kind == "broken" and "libcuda" in unlinked.reason
    write(root, CUDA_LIBRARY)
    assert cuda.probe(root, have(torch="2.11.0+cu130"), ()) is None
    for hidden_by in ("", "-1"):
        none_left = cuda.probe(root, have("torch"), (), {"CUDA_VISIBLE_DEVICES": hidden_by})
        assert none_left.kind == "absent" and "CUDA_VISIBLE_DEVICES" in none_left.reason


def test_rocm_stages(tmp_path):
    root = write(tmp_path, pci("0000:05:00.0", "0x1002", "0x120000"))
    assert rocm.probe(root, have(), {}).kind == "not installed"
    nodes = "sys/class/kfd/kfd/topology/nodes"
    mi300 = "simd_count 1216\nsimd_per_cu 4\ngfx_target_version 90402\n"
    write(
        root,
        {
            f"{nodes}/0/properties": "cpu_cores_count 64\ngfx_target_version 0\n",
            f"{nodes}/1/properties": mi300,
            f"{nodes}/1/mem_banks/0/properties": "heap_type 1\nsize_in_bytes 206141652992\n",
            f"{nodes}/10/properties": "gfx_target_version 90010\n",
        },
    )
    first, second = rocm.gpus(root)
    assert (first.arch, first.units, first.memory) == ("gfx942", 304, 206141652992)
    assert second.arch == "gfx90a"
    assert rocm.probe(root, have(), {}).kind == "broken"  # no /dev/kfd
    write(root, {"dev/kfd": ""})
    for version, said in (
        (None, "torch is not installed: install a ROCm build"),
        ("2.13.0+cpu", "torch 2.13.0+cpu is another build: install a ROCm build"),
        ("2.5.0+rocm6.2", "torch 2.5.0+rocm6.2 is for a ROCm before 7.0"),
    ):
        assert said in rocm.probe(root, {"torch": version}.get, {}).reason
    good = have(torch="2.14.0+rocm7.2")
    assert rocm.probe(root, good, {}) is None
    assert "HIP_VISIBLE_DEVICES" in rocm.probe(root, good, {"HIP_VISIBLE_DEVICES": "-1"}).reason
    for name, value in (
        ("HIP_VISIBLE_DEVICES", ""),
        ("CUDA_VISIBLE_DEVICES", ""),
        ("CUDA_VISIBLE_DEVICES", "-1"),
        ("ROCR_VISIBLE_DEVICES", "7"),
        ("ROCR_VISIBLE_DEVICES", "-1"),
    ):
        none_left = rocm.probe(root, good, {name: value})
        assert none_left.kind == "absent" and f"{name}={value!r} hides" in none_left.reason
    own = {"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "-1"}
    assert rocm.probe(root, good, own) is None, "HIP reads CUDA's where its own is not set"
    assert rocm.probe(root, have(torch="2.14.0+rocm7"), {}) is None
    source = have(torch="2.9.0a0+git1c57644")  # as in the vendor's containers
    folder = write(tmp_path / "torch", {"version.py": "hip: Optional[str] = '7.1.25424'\n"})
    assert rocm.probe(root, source, {}, lambda name: folder) is None
    for text, said in (
        ("hip = '6.4.1'\n", "torch 2.9.0a0+rocm6.4.1 is for a ROCm before 7.0"),
        ("hip: Optional[str] = None\n", "torch 2.9.0a0+git1c57644 is another build"),
    ):
        write(folder, {"version.py": text})
        assert said in rocm.probe(root, source, {}, lambda name: folder).reason
    write(root, {f"{nodes}/1/properties": "gfx_target_version 110000\n"})
    other = rocm.probe(root, good, {})
    assert other.kind == "unsupported" and "(gfx1100, gfx90a): this release serves" in other.reason


@pytest.mark.parametrize(
    ("arch", "build", "before"),
    [
        (90402, "7.0", ""),
        (90402, "6.4", "7.0, which gfx942 needs"),
        (90500, "7.0", "7.2, which gfx950 needs"),
        (90500, "7.1", "7.2, which gfx950 needs"),
        (90500, "7.2", ""),
        (90500, "7.10", ""),
    ],
)
def test_each_architecture_has_an_oldest_rocm(tmp_path, arch, build, before):
    nodes = "sys/class/kfd/kfd/topology/nodes"
    root = write(tmp_path, {f"{nodes}/0/properties": f"gfx_target_version {arch}\n", "dev/kfd": ""})
    found = rocm.probe(root, have(torch=f"2.10.0+rocm{build}"), {})
    if not before:
        assert found is None
    else:
        assert found.kind == "unsupported"
        assert f"torch 2.10.0+rocm{build} is for a ROCm before {before}: install" in found.reason


def test_a_rocm_gpu_as_kernels_see_it(tmp_path):
    node = tmp_path / "1"
    known = rocm.describe(rocm.Gpu("gfx950", 256, 10**9, node), frozenset({"aiter"}))
    assert known.fast_dtypes >= {"float8_e4m3fn", "bfloat16"} and known.features >= {"fp8", "aiter"}
    older = rocm.describe(rocm.Gpu("gfx942", 304, 10**9, node), frozenset())
    assert "float8_e4m3fn" not in older.fast_dtypes and older.features == {"bf16"}


def test_a_rank_has_the_gpu_that_is_visible_to_it_or_a_sentence(tmp_path):
    made = [rocm.Gpu(arch, 304, 10**9, tmp_path) for arch in ("gfx1036", "gfx942", "gfx950")]
    assert rocm.visible(made, {}) == made
    assert rocm.visible(made, {"HIP_VISIBLE_DEVICES": "2,1"}) == [made[2], made[1]]
    both = {"ROCR_VISIBLE_DEVICES": "1,2", "CUDA_VISIBLE_DEVICES": "1", "X": ""}
    assert rocm.visible(made, both) == [made[2]]
    assert rocm.visible(made, {"ROCR_VISIBLE_DEVICES": "GPU-1f"}) == made
    assert rocm.visible(made, {"HIP_VISIBLE_DEVICES": ""}) == []
    assert rocm.visible(made, {"HIP_VISIBLE_DEVICES": "2,-1,0"}) == [made[2]], "what follows is not"
    assert rocm.gpu(1, made).arch == "gfx942"
    with pytest.raises(rocm.DeviceError, match=r"GPU 3 is asked for, and 3 are visible .*--tp"):
        rocm.gpu(3, made)
    with pytest.raises(rocm.DeviceError, match="GPU 0 is gfx1036, and this release serves gfx942"):
        rocm.gpu(0, made)


def test_npu_stages(tmp_path):
    root = write(tmp_path, pci("0000:c1:00.0", "0x19e5", "0x120000"))
    chip = "sys/bus/pci/devices/0000:c1:00.0/device"
    assert npu.probe(root, have(), (), {}).kind == "not installed"
    write(root, {"dev/davinci0": "", chip: "0xd500"})
    assert npu.probe(root, have(), (), {}).kind == "broken"
    write(root, {"dev/davinci_manager": ""})
    assert "CANN" in npu.probe(root, have(), (), {}).reason
    write(root, {"usr/local/Ascend/ascend-toolkit/latest/version.cfg": ""})
    other = npu.probe(root, have(), (), {})
    assert other.kind == "unsupported" and "PCI device 0xd500: this release serves" in other.reason
    write(root, {chip: "0xd802"})
    info = "usr/local/Ascend/ascend-toolkit/latest/aarch64-linux/ascend_toolkit_install.info"
    write(root, {info: "package_name=Ascend-cann-toolkit\nversion=8.2.RC1\narch=aarch64\n"})
    toolkit = npu.probe(root, have(), (), {})
    assert toolkit.kind == "unsupported" and "CANN 8.2.RC1 is older than 8.5" in toolkit.reason
    write(root, {info: "package_name=Ascend-cann-toolkit\nversion=9.1.0\n"})
    missing = npu.probe(root, have(), (), {})
    assert missing.kind == "not installed" and install_command("npu") in missing.reason
    old = npu.probe(root, {"torch-npu": "2.1.0.post8"}.get, (), {})
    assert old.kind == "unsupported" and "torch-npu 2.1.0.post8 is older than 2.9" in old.reason
    pair = {"torch-npu": "2.13.0", "torch": "2.11.0+cpu"}.get
    other = npu.probe(root, pair, (), {})
    assert other.kind == "unsupported"
    assert "torch-npu 2.13.0 is made for torch 2.13.0, not 2.11.0+cpu: pip install" in other.reason
    ready = {"torch-npu": "2.13.0", "torch": "2.13.0+cpu"}.get
    unlinked = npu.probe(root, ready, (), {})
    assert unlinked.kind == "broken" and "libascendcl.so of the toolkit is in no" in unlinked.reason
    assert "ascend-toolkit/latest/set_env.sh before starting" in unlinked.reason
    write(root, {"lib64/libascendcl.so": ""})
    assert npu.probe(root, ready, (str(root / "lib64"),), {}) is None
    write(root, {"etc/ld.so.conf.d/ascend.conf": "/lib64\n"})
    assert npu.probe(root, ready, (), {}) is None


def npus(root, cann="9.1.0"):
    """Two 910B that are ready, less torch and torch-npu."""
    files = {"dev/davinci_manager": "", "lib64/libascendcl.so": ""}
    for i, address in enumerate(("0000:c1:00.0", "0000:c2:00.0")):
        files |= pci(address, "0x19e5", "0x120000")
        files |= {f"sys/bus/pci/devices/{address}/device": "0xd802", f"dev/davinci{i}": ""}
    info = "usr/local/Ascend/cann/aarch64-linux/ascend_toolkit_install.info"
    return write(root, files | {info: f"version={cann}\n"})


@pytest.mark.parametrize(
    ("release", "cann", "wanted"),
    [
        ("2.9.0", "8.5.0", ""),
        ("2.9.0.post2", "8.5.0", "9.0"),
        ("2.9.0.post9", "9.0.0", "9.1"),
        ("2.10.0.post4", "9.0.0", "9.1"),
        ("2.11.0", "9.0.0", "9.1"),
        ("2.12.0.post3", "9.0.RC1", "9.1"),
        ("2.14.0", "9.1.0", ""),
        ("2.14.0", "10.0.0", ""),
    ],
)
def test_each_torch_npu_has_an_oldest_toolkit(tmp_path, release, cann, wanted):
    root = npus(tmp_path, cann)
    pair = {"torch-npu": release, "torch": f"{npu._pinned(release)}+cpu"}.get
    found = npu.probe(root, pair, (str(root / "lib64"),), {})
    if not wanted:
        assert found is None
    else:
        assert found.kind == "unsupported"
        said = f"CANN {cann} is older than {wanted}, which torch-npu {release} is made for"
        assert said in found.reason


@pytest.mark.parametrize(
    ("release", "torch", "fits"),
    [
        ("2.14.0", "2.14.0+cpu", True),
        ("2.14.0", "2.14.1+cpu", False),
        ("2.9.0.post9", "2.9.1", False),
        ("2.9.0.post9", "2.9.0+cpu", True),
        ("2.13.0", "2.13.0a0+git1c57644", True),
    ],
)
def test_torch_and_torch_npu_agree_in_three_parts(tmp_path, release, torch, fits):
    root = npus(tmp_path)
    found = npu.probe(root, {"torch-npu": release, "torch": torch}.get, (str(root / "lib64"),), {})
    assert (found is None) == fits
    if not fits:
        assert f"is made for torch {npu._pinned(release)}, not {torch}" in found.reason


def test_a_rank_has_the_npu_that_is_visible_to_it_or_a_sentence(tmp_path):
    root, ready = npus(tmp_path), {"torch-npu": "2.13.0", "torch": "2.13.0"}.get
    write(root, {"sys/bus/pci/devices/0000:c2:00.0/device": "0xd803"})
    for hidden in ("", "-1", "2", "x"):
        found = npu.probe(root, ready, (str(root / "lib64"),), {npu.VISIBLE: hidden})
        assert found.kind == "absent" and f"{npu.VISIBLE}={hidden!r} hides" in found.reason
    assert npu.probe(root, ready, (str(root / "lib64"),), {npu.VISIBLE: "1"}) is None
    assert [npu.chip(r, root, {}) for r in (0, 1)] == ["0xd802", "0xd803"]
    assert npu.chip(0, root, {npu.VISIBLE: "1"}) == "0xd803"
    for rank, environ, count in ((99, {}, 2), (1, {npu.VISIBLE: "1"}, 1)):
        said = rf"NPU {rank} is asked for, and {count} are visible \({npu.VISIBLE} .*--tp"
        with pytest.raises(npu.DeviceError, match=said):
            npu.chip(rank, root, environ)


def test_a_toolkit_elsewhere_is_found_through_the_environment(tmp_path):
    root = write(tmp_path / "root", pci("0000:c1:00.0", "0x19e5", "0x120000"))
    chip = "sys/bus/pci/devices/0000:c1:00.0/device"
    write(root, {"dev/davinci0": "", "dev/davinci_manager": "", chip: "0xd802"})
    info = "aarch64-linux/ascend_toolkit_install.info"
    home = write(tmp_path / "home", {info: "version=9.1.0\n", "lib64/libascendcl.so": ""})
    ready, found = {"torch-npu": "2.13.0", "torch": "2.13.0"}.get, (str(home / "lib64"),)
    without = npu.probe(root, ready, found, {})
    assert "in /usr/local/Ascend, and ASCEND_HOME_PATH names none" in without.reason
    environ = {"ASCEND_HOME_PATH": str(home)}
    assert npu.probe(root, ready, found, environ) is None
    write(root, {f"usr/local/Ascend/cann/{info}": "version=8.0.0\n"})
    assert npu.probe(root, ready, found, environ) is None, "that of the environment is used"
    assert "CANN 8.0.0 is older than 8.5" in npu.probe(root, ready, found, {}).reason


def test_an_npu_as_kernels_see_it():
    known = npu.describe("0xd803", frozenset({"torch_npu"}))
    assert (known.type, known.arch) == ("npu", "ascend910_93") and "torch_npu" in known.features
    assert "float8_e4m3fn" not in known.fast_dtypes


def test_xpu_stages(tmp_path):
    root = write(tmp_path, pci("0000:03:00.0", "0x8086", "0x038000"))
    device = root / "sys/bus/pci/devices/0000:03:00.0"
    (device / "device").write_text("0x9a49\n")
    iris = xpu.probe(root, have(), ())
    assert iris.kind == "unsupported" and "PCI id 0x9a49; this plugin knows Max" in iris.reason
    (device / "device").write_text("0xe211\n")
    assert "neither kernel driver" in xpu.probe(root, have(), ()).reason
    (root / "sys/bus/pci/drivers/xe").mkdir(parents=True)
    (device / "driver").symlink_to(root / "sys/bus/pci/drivers/xe")
    assert xpu.probe(root, have(), ()).kind == "broken"
    write(root, {"dev/dri/renderD128": ""})
    bare = xpu.probe(root, have(), ())
    assert bare.kind == "not installed" and "torch is not installed" in bare.reason
    other = xpu.probe(root, have(torch="2.14.0+cu130"), ())
    assert "torch 2.14.0+cu130 is another build: pip install" in other.reason
    for versions, said in (
        ({"torch": "2.9.1+xpu"}, "torch 2.9.1+xpu is older than 2.13"),
        (
            {"torch": "2.14.0+xpu", "vllm-xpu-kernels": "0.1.9"},
            "vllm-xpu-kernels 0.1.9 is older than 0.1.16",
        ),
    ):
        old = xpu.probe(root, versions.get, ())
        assert old.kind == "unsupported" and said in old.reason
    source = have(torch="2.14.0a0+git1c57644")
    folder = write(tmp_path / "torch", {"version.py": "xpu: Optional[str] = '20250301'\n"})
    assert "libze_loader" in xpu.probe(root, source, (), lambda name: folder).reason
    write(folder, {"version.py": "xpu: Optional[str] = None\n"})
    assert "is another build" in xpu.probe(root, source, (), lambda name: folder).reason
    ready = have(torch="2.14.0+xpu")
    unlinked = xpu.probe(root, ready, ())
    assert unlinked.kind == "broken" and "libze_loader" in unlinked.reason
    write(root, {"opt/level-zero/libze_loader.so.1": ""})
    assert xpu.probe(root, ready, (str(root / "opt/level-zero"),)) is None


def test_triton_says_what_it_found():
    assert ds_runtime_triton.probe(()).kind == "not installed"
    assert ds_runtime_triton.probe(("pytest",)) is None


@pytest.mark.parametrize("name", ["cuda", "rocm", "npu", "xpu", "triton", "cpu"])
def test_probe_is_quick_and_starts_no_process(name):
    """In a fresh interpreter, with torch and subprocess blocked."""
    code = f"""
import sys
sys.modules["torch"] = None
sys.modules["subprocess"] = None
import importlib.metadata, pathlib, time
import ds_runtime.api
plugin = __import__("ds_runtime_{name}")
begun = []
forks = ("os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "os.system", "subprocess.Popen")
sys.addaudithook(lambda event, _: begun.append(event) if event in forks else None)
begin = time.thread_time()
found = getattr(plugin, 'hooks', plugin).PROBE()
spent = time.thread_time() - begin
assert found is None or found.kind in ("absent", "not installed", "unsupported", "broken")
assert spent < 0.1 and not begun, (spent, begun)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_refusals_are_sentences(tmp_path):
    for module in (cuda, rocm, npu, xpu):
        found = module.probe(tmp_path)
        assert isinstance(found, Refusal) and len(found.reason.split()) > 3


@pytest.mark.parametrize(
    ("said", "command"),
    [
        ({"url": "file:///x", "dir_info": {"editable": True}}, 'pip install -e ".[cuda]"'),
        ({"url": "file:///x", "dir_info": {}}, 'pip install ".[cuda]"'),
        (None, 'pip install "acme[cuda]"'),
        (
            {"url": "https://x/y", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
            'pip install "acme[cuda] @ git+https://x/y@abc"',
        ),
    ],
)
def test_a_remedy_installs_from_where_the_package_came(tmp_path, monkeypatch, said, command):
    """The package is on no index for whoever works in its sources."""
    info = tmp_path / "acme-1.dist-info"
    files = {"METADATA": "Metadata-Version: 2.1\nName: acme\nVersion: 1\n"}
    if said is not None:
        files["direct_url.json"] = json.dumps(said)
    write(info, files)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert install_command.__wrapped__("cuda", "acme") == command


def test_sources_on_the_path_are_installed_from_their_folder():
    assert install_command.__wrapped__("cpu", "nobody-has-this") == 'pip install -e ".[cpu]"'
