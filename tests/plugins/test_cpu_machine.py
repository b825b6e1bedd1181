"""Processor, memory and core counts, from copies of other machines' files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ds_runtime_cpu import machine
from ds_runtime_cpu.isa import ISAS, limited, usable
from ds_runtime_cpu.platform import CpuPlatform

GIB = 1 << 30
MEMINFO = (
    f"MemTotal: {64 * GIB // 1024} kB\nMemFree: 1024 kB\nMemAvailable: {48 * GIB // 1024} kB\n"
)


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


AVX2 = "avx2 fma f16c"
AVX512 = f"{AVX2} avx512f avx512bw avx512dq avx512vl avx512_vnni"
BF16 = f"{AVX512} avx512_bf16 avx512vbmi"


@pytest.mark.parametrize(
    ("flags", "best", "fast"),
    [
        ("fpu sse2", "generic", {"float32"}),
        ("sse2 avx2 fma", "generic", {"float32"}),  # without f16c: no such processor was made
        (AVX2, "avx2", {"float32"}),
        (AVX512, "avx512", {"float32"}),
        (f"{AVX512} avx512_bf16", "avx512", {"float32", "bfloat16"}),  # Cooper Lake: no vbmi
        (BF16, "avx512bf16", {"float32", "bfloat16"}),
        (
            f"{BF16} avx512_fp16 amx_tile amx_bf16 amx_int8",
            "amx",
            {"float32", "bfloat16"},  # no kernel takes float16, whatever the processor has
        ),
    ],
)
def test_x86(tmp_path, monkeypatch, flags, best, fast):
    monkeypatch.setattr(machine, "_tiles_permitted", lambda: True)
    text = f"processor : 0\nmodel name : Some CPU @ 2 GHz\nflags : {flags}\n\nprocessor : 1\n"
    found = machine.processor(write(tmp_path, {"proc/cpuinfo": text}))
    assert found.name == "Some CPU @ 2 GHz"
    assert usable(list(ISAS), found.features)[0] == best
    assert machine.fast_dtypes(found.features) == fast
    assert "sse2" not in found.features
    for isa in ISAS:
        assert usable(list(ISAS), limited(isa, frozenset(machine.FEATURES)))[0] == isa


@pytest.mark.parametrize(
    ("vendor", "flags", "best"),
    [
        ("GenuineIntel", BF16, ["avx512", "avx512bf16", "avx2", "generic"]),
        ("AuthenticAMD", BF16, ["avx512bf16", "avx512", "avx2", "generic"]),
        (
            "GenuineIntel",
            f"{BF16} amx_tile amx_bf16 amx_int8",
            ["amx", "avx512", "avx512bf16", "avx2", "generic"],
        ),
        ("GenuineIntel", AVX512, ["avx512", "avx2", "generic"]),
    ],
)
def test_slow_dots_of_bfloat16_are_not_preferred(tmp_path, monkeypatch, vendor, flags, best):
    monkeypatch.setattr(machine, "_tiles_permitted", lambda: True)
    root = write(tmp_path, {"proc/cpuinfo": f"vendor_id : {vendor}\nflags : {flags}\n"})
    features = machine.processor(root).features
    assert usable(list(ISAS), features) == best
    assert usable(["avx512bf16", "generic"], features)[0] == (
        "avx512bf16" if "avx512bf16" in best else "generic"
    )
    assert ("bfloat16" in machine.fast_dtypes(features)) is ("avx512_bf16" in flags)
    for isa in best:
        assert usable(list(ISAS), limited(isa, features))[0] == isa
    named = limited(best[0], features)  # by name it is what it is by itself
    assert machine.fast_dtypes(named) == machine.fast_dtypes(features)


def test_amx_needs_the_kernels_permission(tmp_path, monkeypatch):
    root = write(tmp_path, {"proc/cpuinfo": f"flags : {BF16} amx_tile amx_bf16 amx_int8\n"})
    monkeypatch.setattr(machine, "_tiles_permitted", lambda: False)
    assert usable(list(ISAS), machine.processor(root).features)[0] == "avx512bf16"


def test_names_of_architectures():
    names = {isa: machine.arch(isa, frozenset(), "x86_64") for isa in ("generic", "avx2", "amx")}
    assert names == {"generic": "x86-64", "avx2": "x86-64-avx2", "amx": "x86-64-amx"}
    assert machine.arch("generic", frozenset({"bf16"}), "aarch64") == "aarch64-bf16"
    assert machine.arch("generic", frozenset(), "arm64") == "aarch64"
    assert machine.arch("generic", frozenset(), "riscv64") == "riscv64"


def test_arm_and_unknown(tmp_path):
    root = write(
        tmp_path, {"proc/cpuinfo": "processor : 0\nFeatures : fp asimd asimdhp bf16 sve\n"}
    )
    found = machine.processor(root)
    assert "sve" in found.features
    assert machine.fast_dtypes(found.features) == {"float32", "bfloat16"}
    bare = machine.processor(tmp_path / "nothing")
    assert bare.name and machine.fast_dtypes(bare.features) == {"float32"}


def test_memory_without_limits(tmp_path):
    root = write(tmp_path, {"proc/meminfo": MEMINFO})
    assert machine.memory(root) == (64 * GIB, 48 * GIB)


def test_memory_cgroup_v2_counts_every_ancestor_and_page_cache(tmp_path):
    root = write(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "0::/pod/app\n",
            "sys/fs/cgroup/pod/app/memory.max": "max\n",
            "sys/fs/cgroup/pod/memory.max": f"{8 * GIB}\n",
            "sys/fs/cgroup/pod/memory.current": f"{6 * GIB}\n",
            "sys/fs/cgroup/pod/memory.stat": f"anon 5\ninactive_file {2 * GIB}\n",
        },
    )
    assert machine.memory(root) == (8 * GIB, 4 * GIB)


def test_memory_cgroup_v2_inside_a_container(tmp_path):
    """The path is the host's; the container's own folder is what is mounted."""
    root = write(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "0::/system.slice/docker-abc.scope\n",
            "sys/fs/cgroup/memory.max": f"{2 * GIB}\n",
            "sys/fs/cgroup/memory.current": f"{3 * GIB}\n",
        },
    )
    assert machine.memory(root) == (2 * GIB, 0)


def test_memory_under_a_limit_of_address_space(tmp_path, monkeypatch):
    root = write(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/status": "Name:\tpython\nVmSize:\t 1048576 kB\nVmRSS:\t 9 kB\n",
        },
    )
    assert machine.memory(root) == (64 * GIB, 48 * GIB)
    monkeypatch.setattr(machine, "address_space", lambda: 3 * GIB)
    assert machine.memory(root) == (3 * GIB, 2 * GIB)
    monkeypatch.setattr(machine, "address_space", lambda: GIB // 2)
    assert machine.memory(root) == (GIB // 2, 0)


@pytest.mark.skipif(sys.platform == "win32", reason="no such limit there")
def test_the_limit_of_a_process_is_seen():
    code = "from ds_runtime_cpu import machine; print(machine.address_space())"
    for limit, said in (("4000000", str(4000000 * 1024)), ("unlimited", "None")):
        command = ["sh", "-c", f"ulimit -v {limit} && exec {sys.executable} -c '{code}'"]
        assert subprocess.check_output(command, text=True).strip() == said


def test_memory_cgroup_v1(tmp_path):
    folder = "sys/fs/cgroup/memory/docker/abc"
    root = write(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "5:cpuset:/\n4:memory:/docker/abc\n",
            f"{folder}/memory.limit_in_bytes": f"{16 * GIB}\n",
            f"{folder}/memory.usage_in_bytes": f"{4 * GIB}\n",
            f"{folder}/memory.stat": f"total_inactive_file {GIB}\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        },
    )
    assert machine.memory(root) == (16 * GIB, 13 * GIB)


def test_memory_without_proc(tmp_path):
    total, free = machine.memory(tmp_path)
    assert total >= free > 0


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, None),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "350000 100000\n"}, 3),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"}, 1),
        (
            {
                "proc/self/cgroup": "2:cpu,cpuacct:/a\n",
                "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us": "200000\n",
                "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us": "100000\n",
            },
            2,
        ),
        (
            {
                "proc/self/cgroup": "2:cpu:/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            None,
        ),
    ],
)
def test_cpu_quota(tmp_path, files, quota):
    assert machine._quota(write(tmp_path, files)) == quota


def test_hardware_threads_of_one_core_count_once(tmp_path):
    names = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    root = write(tmp_path, {names.format(i): f"{i % 2},{i % 2 + 2}\n" for i in range(4)})
    assert machine._physical(root, [0, 1, 2, 3]) == 2
    assert machine._physical(root, [1, 3]) == 1
    assert machine._physical(tmp_path / "nothing", [0, 1, 2]) == 3


def test_platform_agrees_with_psutil():
    import psutil

    platform = CpuPlatform()
    info, memory = platform.info(), platform.memory()
    assert 0 < memory.free <= memory.total <= psutil.virtual_memory().total
    assert 1 <= info.cores <= psutil.cpu_count()
    assert info.type == "cpu" and "float32" in info.fast_dtypes


def test_spinning_is_bounded_unless_the_user_chose_how_to_wait(monkeypatch):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert CpuPlatform().process_env()["GOMP_SPINCOUNT"] == "2000"
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    assert "GOMP_SPINCOUNT" not in CpuPlatform().process_env()
