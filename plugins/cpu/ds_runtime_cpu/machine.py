"""What this machine's processor and memory are, read from the operating system. Torch-free.

Every function takes the root of the file system, so that tests can hand in a copy of another
machine's /proc and /sys. Where a file is missing (another operating system) plain fallbacks
answer.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from dataclasses import dataclass
from pathlib import Path

from ds_runtime_cpu.isa import GENERIC, SLOW_BF16_DOTS

# x86 flags of /proc/cpuinfo, and aarch64's "Features", under the names that kernels ask for.
FEATURES = frozenset(
    {"avx", "avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512bw", "avx512dq", "avx512vl"}
    | {"avx512_vnni", "avx512vbmi", "avx512_bf16", "avx512_fp16"}
    | {"amx_tile", "amx_bf16", "amx_int8", "amx_fp16"}
    | {"asimd", "asimddp", "asimdhp", "bf16", "i8mm", "sve", "sve2"}
)
DESCRIBED, NATIVE = "described", "native"  # features of devices.json: not here; with the library
_SYS_ARCH_PRCTL, _ARCH_GET_XCOMP_SUPP, _XFEATURE_TILES = 158, 0x1021, 18  # Linux, x86-64
_INTEL = "GenuineIntel"  # starts a VDPBF16PS every other cycle, and two VFMADD in each
_NO_LIMIT = 1 << 60  # cgroup v1 says "unlimited" with a number near 2^63


@dataclass(frozen=True, slots=True)
class Processor:
    """Model name, and the features that kernels look at."""

    name: str
    features: frozenset[str]


def _read(path: Path) -> str:
    """The text of a file, or "" where it does not exist or may not be read."""
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""


def processor(root: Path = Path("/")) -> Processor:
    """The first processor of /proc/cpuinfo; elsewhere only what Python knows."""
    name, vendor, flags = "", "", set()
    for line in _read(root / "proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        key = key.strip().lower()
        if key == "model name" and not name:
            name = value.strip()
        elif key == "vendor_id":
            vendor = value.strip()
        elif key in ("flags", "features"):
            flags = set(value.split())
            break
    features = frozenset(flags & FEATURES)
    if "amx_tile" in features and not _tiles_permitted():
        features -= {f for f in features if f.startswith("amx")}
    if "avx512_bf16" in features and vendor == _INTEL:
        features |= {SLOW_BF16_DOTS}
    return Processor(name or platform.processor() or platform.machine(), features)


def _tiles_permitted() -> bool:
    """Whether the kernel hands out AMX's tile registers: the processor's flag does not say so."""
    permitted = ctypes.c_uint64(0)
    syscall = ctypes.CDLL(None).syscall
    failed = syscall(_SYS_ARCH_PRCTL, _ARCH_GET_XCOMP_SUPP, ctypes.byref(permitted))
    return not failed and bool(permitted.value >> _XFEATURE_TILES & 1)


def arch(isa: str, features: frozenset[str], machine: str | None = None) -> str:
    """The plan's name for variant `isa` of a machine's instructions (default: this machine's)."""
    machine = (machine or platform.machine()).lower()
    if machine in ("arm64", "aarch64"):
        return "aarch64-bf16" if "bf16" in features else "aarch64"
    if machine not in ("x86_64", "amd64"):
        return machine or "unknown"
    return "x86-64" if isa == GENERIC else f"x86-64-{isa}"


def fast_dtypes(features: frozenset[str]) -> frozenset[str]:
    """Dtypes that kernels of this plugin compute in at the processor's full speed.

    float32 always, bfloat16 with hardware for it, even where widening is faster (SLOW_BF16_DOTS).
    float16 never, whatever the processor says: no kernel here takes it, so `--dtype auto` must not
    choose it.
    """
    fast = {"float32"}
    if features & {"avx512_bf16", "amx_bf16", "bf16"}:
        fast.add("bfloat16")
    return frozenset(fast)


def _cgroup_dirs(root: Path, controller: str) -> list[Path]:
    """This process's folder of `controller` and all its parents: any of them may set a limit."""
    base = root / "sys/fs/cgroup"
    dirs: list[Path] = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if number == "0" and not names:
            top = base
        elif controller in names.split(","):
            top = base / names if (base / names).is_dir() else base / controller
        else:
            continue
        parts = [p for p in path.split("/") if p and p != ".."]
        dirs += [top.joinpath(*parts[:n]) for n in range(len(parts), -1, -1)]
    # Inside a container the path is the host's, but the container's own folder is mounted at top.
    return dirs or [base, base / controller]


def _number(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdigit() else None


def _reclaimable(folder: Path) -> int:
    """Page cache that the kernel would drop before it fails an allocation."""
    for line in _read(folder / "memory.stat").splitlines():
        key, _, value = line.partition(" ")
        if key in ("inactive_file", "total_inactive_file"):
            return int(value)
    return 0


def memory(root: Path = Path("/")) -> tuple[int, int]:
    """(total, free) bytes that this process may use: the smallest of machine, cgroups and what
    `ulimit -v` leaves of the address space.
    """
    total, free = _machine_memory(root)
    if (limit := address_space()) is not None:
        used = _status_bytes(root, "VmSize")
        total, free = min(total, limit), min(free, max(0, limit - used))
    for folder in _cgroup_dirs(root, "memory"):
        for limit_file, used_file in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit = _number(folder / limit_file)
            if limit is None or limit >= _NO_LIMIT:
                continue
            used = (_number(folder / used_file) or 0) - _reclaimable(folder)
            total = min(total, limit)
            free = min(free, max(0, limit - max(0, used)))
    return total, min(free, total)


def address_space() -> int | None:
    """Bytes of the process's limit of address space, or None without one."""
    if sys.platform == "win32":
        return None
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if limit == resource.RLIM_INFINITY else limit


def _status_bytes(root: Path, name: str) -> int:
    for line in _read(root / "proc/self/status").splitlines():
        key, _, rest = line.partition(":")
        if key == name and (number := rest.split()) and number[0].isdigit():
            return int(number[0]) * 1024
    return 0


def _machine_memory(root: Path) -> tuple[int, int]:
    values: dict[str, int] = {}
    for line in _read(root / "proc/meminfo").splitlines():
        key, _, rest = line.partition(":")
        number = rest.split()
        if number and number[0].isdigit():
            values[key] = int(number[0]) * 1024
    if "MemTotal" in values:
        total = values["MemTotal"]
        return total, values.get("MemAvailable", values.get("MemFree", total))
    return _sysconf_memory()


def _sysconf_memory() -> tuple[int, int]:
    """Without /proc: the physical size, half of which is taken to be free; else 8 GiB."""
    sysconf = getattr(os, "sysconf", None)
    if sysconf is not None and sys.platform != "win32":
        try:
            total = int(sysconf("SC_PHYS_PAGES")) * int(sysconf("SC_PAGE_SIZE"))
        except (ValueError, OSError):
            total = 0
        if total > 0:
            return total, total // 2
    return 8 << 30, 4 << 30


def last_level_cache(root: Path = Path("/")) -> int:
    """Bytes of the largest cache of the first processor; 0 where the system does not tell."""
    sizes = [0]
    for folder in sorted((root / "sys/devices/system/cpu/cpu0/cache").glob("index*")):
        text = _read(folder / "size").strip()
        number, unit = text.rstrip("KMG"), text[-1:]
        if number.isdigit():
            sizes.append(int(number) << {"K": 10, "M": 20, "G": 30}.get(unit, 0))
    return max(sizes)


def cores(root: Path = Path("/")) -> int:
    """Cores that this process may keep busy: affinity, physical cores and cgroup quota."""
    affinity = getattr(os, "sched_getaffinity", None)
    allowed = sorted(affinity(0)) if affinity is not None else list(range(os.cpu_count() or 1))
    count = _physical(root, allowed)
    quota = _quota(root)
    return max(1, min(count, quota) if quota else count)


def _physical(root: Path, allowed: list[int]) -> int:
    """Distinct cores under `allowed` hardware threads: two threads of one core count once."""
    seen = set()
    for cpu in allowed:
        folder = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        siblings = _read(folder / "thread_siblings_list").strip()
        seen.add(siblings or f"cpu{cpu}")
    return len(seen)


def _quota(root: Path) -> int | None:
    """Whole cores of the tightest CPU bandwidth limit, at least 1, or None without one."""
    found: list[float] = []
    for folder in _cgroup_dirs(root, "cpu"):
        quota, _, period = _read(folder / "cpu.max").strip().partition(" ")
        if not quota:
            quota = _read(folder / "cpu.cfs_quota_us").strip()
            period = _read(folder / "cpu.cfs_period_us").strip()
        if quota.isdigit() and period.isdigit() and int(period) > 0:
            found.append(int(quota) / int(period))
    return max(1, int(min(found))) if found else None
