"""AMD GPUs as a platform: what the kernel driver says of them, without torch where possible."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ds_runtime.api import (
    DeviceError,
    DeviceInfo,
    MemoryInfo,
    Refusal,
    TorchPlatform,
    installed,
    package_folder,
    pci_devices,
    read_file,
    torch_built_for,
)
from ds_runtime.api import visible as numbered
from ds_runtime_rocm import software

VENDOR = "0x1002"
CLASSES = ("0x03", "0x12")
INSTALL = "install a ROCm build of torch (docs/install.md)"
# Of ROCm, by architecture: what AITER's kernels are built with. Before 7.2 CK's block-scaled matmul
# gives NaN on gfx950, and the compiler of 7.0 gets the shuffled one wrong.
OLDEST = {"gfx942": (7, 0), "gfx950": (7, 2)}
ARCHS = {  # gfx name → what the library's kernels multiply beside 32- and 16-bit floats
    "gfx942": frozenset({"float8_e4m3fnuz"}),
    "gfx950": frozenset({"float8_e4m3fn", "float4_e2m1fn"}),
}


@dataclass(frozen=True, slots=True)
class Gpu:
    """A compute device that the kernel driver lists. Memory in bytes."""

    arch: str
    units: int
    memory: int
    node: Path


def _properties(path: Path) -> dict[str, int]:
    pairs = (line.split() for line in read_file(path).splitlines())
    return {p[0]: int(p[1]) for p in pairs if len(p) == 2 and p[1].isdigit()}


def gpus(root: Path) -> list[Gpu]:
    """The driver's GPUs in its own order, which HIP keeps."""
    nodes = root / "sys/class/kfd/kfd/topology/nodes"
    if not nodes.is_dir():
        return []
    return [g for node in sorted(nodes.iterdir(), key=_number) for g in _gpu(node)]


def _number(node: Path) -> int:
    return int(node.name) if node.name.isdigit() else -1


def _gpu(node: Path) -> Iterator[Gpu]:
    found = _properties(node / "properties")
    version = found.get("gfx_target_version", 0)
    if not version:  # a processor
        return
    # 90402 → gfx942: major, minor, stepping in hexadecimal
    arch = f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"
    units = found.get("simd_count", 0) // max(1, found.get("simd_per_cu", 4))
    banks = (_properties(bank / "properties") for bank in sorted(node.glob("mem_banks/*")))
    yield Gpu(arch, units, sum(b.get("size_in_bytes", 0) for b in banks), node)


def rocm_version(torch: str) -> tuple[int, ...]:
    """(7, 1) of "2.10.0+rocm7.1", (7, 0) of "+rocm7"; empty for another build."""
    local = torch.partition("+")[2]
    if not local.startswith("rocm"):
        return ()
    found = [int(n) for n in local.removeprefix("rocm").split(".")[:2] if n.isdigit()]
    return (*found, 0)[:2] if found else ()


def probe(
    root: Path = Path("/"),
    package: Callable[[str], str | None] = installed,
    environ: Mapping[str, str] = os.environ,
    folder: Callable[[str], Path | None] = package_folder,
) -> Refusal | None:
    """Why no platform is offered; arguments stand for the machine in tests."""
    found, pci = gpus(root), pci_devices(root, VENDOR, CLASSES)
    if not found and not pci:
        return Refusal("absent", "no AMD GPU: none on the PCI bus, none known to the kernel driver")
    if not found:
        what = f"{len(pci)} AMD GPU{'s' if len(pci) > 1 else ''} on the PCI bus"
        return Refusal(
            "not installed", f"{what}, but the kernel driver amdgpu lists none for compute"
        )
    archs = sorted({g.arch for g in found})
    what = f"{len(found)} AMD GPU{'s' if len(found) > 1 else ''} ({', '.join(archs)})"
    for name in _variables(environ):
        found = _shown(found, environ[name])
        if not found:
            said = f"{what}, but {name}={environ[name]!r} hides every one"
            return Refusal("absent", said)
    if not (root / "dev/kfd").exists():
        return Refusal("broken", f"{what}, but there is no /dev/kfd in this container")
    torch = package("torch")
    if torch is not None and "rocm" not in torch and (hip := torch_built_for("hip", folder)):
        torch = f"{torch.partition('+')[0]}+rocm{hip}"
    if torch is None or "rocm" not in torch:
        have = "torch is not installed" if torch is None else f"torch {torch} is another build"
        return Refusal("not installed", f"{what}, but {have}: {INSTALL}")
    wanted = max((OLDEST.get(g.arch, (0, 0)), g.arch) for g in found)
    if rocm_version(torch) and rocm_version(torch) < wanted[0]:
        oldest = f"{'.'.join(map(str, wanted[0]))}, which {wanted[1]} needs"
        said = f"{what}, but torch {torch} is for a ROCm before {oldest}: {INSTALL}"
        return Refusal("unsupported", said)
    if not any(g.arch in ARCHS for g in found):
        known = " and ".join(ARCHS)
        return Refusal("unsupported", f"{what}: this release serves {known}; use --platform cpu")
    return None


def visible(found: list[Gpu], environ: Mapping[str, str] = os.environ) -> list[Gpu]:
    """Those that HIP shows, in its order. Names such as "GPU-1f…" are not followed."""
    for name in _variables(environ):
        found = _shown(found, environ[name])
    return found


def _variables(environ: Mapping[str, str]) -> list[str]:
    """Those that are set and hide devices: of HIP its own, else CUDA's, which it reads, too."""
    hip = "HIP_VISIBLE_DEVICES" if "HIP_VISIBLE_DEVICES" in environ else "CUDA_VISIBLE_DEVICES"
    return [name for name in ("ROCR_VISIBLE_DEVICES", hip) if name in environ]


def _shown(found: list[Gpu], value: str) -> list[Gpu]:
    """What is left of them: numbers up to the first that no device has."""
    given = (n.strip().removeprefix("-") for n in value.split(","))
    if not all(n.isdigit() or not n for n in given):  # names
        return found
    return [found[n] for n in numbered(value, len(found))]


def gpu(rank: int, found: list[Gpu] | None = None) -> Gpu:
    """The rank-th visible one. Raises DeviceError where there is none, or this release has no
    kernels for it.
    """
    found = visible(gpus(Path("/"))) if found is None else found
    if rank >= len(found):
        raise DeviceError(
            f"GPU {rank} is asked for, and {len(found)} are visible (ROCR_VISIBLE_DEVICES and "
            "HIP_VISIBLE_DEVICES hide others): give --tp as many"
        )
    if found[rank].arch not in ARCHS:
        raise DeviceError(
            f"GPU {rank} is {found[rank].arch}, and this release serves {' and '.join(ARCHS)}: "
            "hide it with HIP_VISIBLE_DEVICES, or use --platform cpu"
        )
    return found[rank]


def describe(gpu: Gpu, libraries: frozenset[str]) -> DeviceInfo:
    """A GPU as kernels may look at it."""
    formats = ARCHS.get(gpu.arch, frozenset())
    fp8 = {"fp8"} if "float8_e4m3fn" in formats else set()
    return DeviceInfo(
        type="cuda",
        name=f"AMD {gpu.arch}",
        arch=gpu.arch,
        features=libraries | {"bf16"} | fp8,
        fast_dtypes=formats | {"float32", "bfloat16", "float16"},
        memory=gpu.memory,
        cores=gpu.units,
    )


class RocmPlatform(TorchPlatform):
    """Local rank r computes on the r-th GPU."""

    name = "rocm"
    family = "AMD Instinct"
    score = 100
    torch_type = "cuda"  # torch's name for it
    collectives = "nccl"  # RCCL, under the name that torch has for both
    graph = "CUDAGraph"

    def info(self, rank: int = 0) -> DeviceInfo:
        return describe(gpu(rank), software.features())

    def idle_memory(self, rank: int) -> MemoryInfo:
        """All of it: what other processes hold is known once torch has the device."""
        total = gpu(rank).memory
        return MemoryInfo(total=total, free=total)

    def init_worker(self, rank: int, size: int, threads: int | None = None) -> None:
        super().init_worker(rank, size, threads)
        import torch

        # Contracts accumulate in fp32, also across the parts of a split reduction.
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
