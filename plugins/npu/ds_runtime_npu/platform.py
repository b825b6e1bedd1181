"""Ascend NPUs as a platform: what the operating system says of devices, toolkit and packages."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ds_runtime.api import (
    DeviceError,
    DeviceInfo,
    GraphBackend,
    Library,
    MemoryInfo,
    Refusal,
    TorchPlatform,
    device_nodes,
    has_library,
    install_command,
    installed,
    pci_devices,
    read_file,
    visible,
)

VENDOR = "0x19e5"
CLASSES = ("0x12",)
EXTRA = "npu"  # that `install_command` names
TOOLKITS = ("usr/local/Ascend/ascend-toolkit/latest", "usr/local/Ascend/cann")
HOMES = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")  # of a toolkit elsewhere: its set_env.sh
LIBRARY = "libascendcl.so"  # of the toolkit, which torch-npu is linked against
OLDEST_CANN = (8, 5)  # of the first torch-npu with these schemas
# The first releases (…, post) of torch-npu that are made for a newer CANN, latest first.
CANN_OF = (
    ((2, 11, 0, 0), (9, 1)),
    ((2, 10, 0, 4), (9, 1)),
    ((2, 10, 0, 0), OLDEST_CANN),
    ((2, 9, 0, 6), (9, 1)),
    ((2, 9, 0, 2), (9, 0)),
)
OLDEST = (2, 9)  # of torch-npu: the first release with these schemas
CHIPS: Mapping[str, tuple[str, str, int]] = {  # PCI device → arch, name, AI cores of a die
    "0xd802": ("ascend910b", "Ascend 910B", 20),
    "0xd803": ("ascend910_93", "Ascend 910C, one of two dies", 24),
}
VISIBLE = "ASCEND_RT_VISIBLE_DEVICES"
_MEMORY = 64 << 30  # bytes of a die, until torch-npu is there to ask
TORCH_NPU = Library("torch_npu", ("torch-npu",), install=partial(install_command, EXTRA))
TRITON = Library("triton")  # of Ascend's own distribution


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(n) for n in version.split(".")[:2] if n.isdigit())


def _pinned(version: str) -> str:
    """ "2.14.0" of "2.14.0.post3" or "2.14.0a0+git1c57": releases of both packages agree so far."""
    found = re.match(r"\d+\.\d+(\.\d+)?", version)
    return found[0] if found else version


def _cann_of(version: str) -> tuple[int, ...]:
    """The oldest CANN that a torch-npu is made for."""
    found = re.match(r"(\d+)\.(\d+)\.(\d+)(?:\.post(\d+))?", version)
    release = tuple(int(n or 0) for n in found.groups()) if found else ()
    return next((cann for first, cann in CANN_OF if release >= first), OLDEST_CANN)


def shown(count: int, environ: Mapping[str, str] = os.environ) -> list[int]:
    """Which of this many dies the runtime shows, in its order."""
    return visible(environ[VISIBLE], count) if VISIBLE in environ else list(range(count))


def _toolkits(root: Path, environ: Mapping[str, str]) -> list[Path]:
    """Folders of the toolkit, that of the environment first."""
    named = [Path(environ[name]) for name in HOMES if environ.get(name)]
    return [f for f in (*named, *(root / folder for folder in TOOLKITS)) if f.exists()]


def _cann(folders: list[Path]) -> Iterator[str]:
    """Versions of the toolkit that is used, as its installer left them."""
    for folder in folders[:1]:
        for file in sorted(folder.glob("*-linux/ascend_toolkit_install.info")):
            for line in read_file(file).splitlines():
                name, _, value = line.partition("=")
                if name.strip() == "version":
                    yield value.strip()


def _configured(root: Path) -> bool:
    """Whether the linker's own configuration has the toolkit's library."""
    files = sorted((root / "etc/ld.so.conf.d").glob("*.conf"))
    lines = (line.strip().lstrip("/") for file in files for line in read_file(file).splitlines())
    return any((root / line / LIBRARY).exists() for line in lines if line)


def probe(
    root: Path = Path("/"),
    package: Callable[[str], str | None] = installed,
    search: tuple[str, ...] | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Refusal | None:
    """Why no platform is offered; arguments stand for the machine in tests."""
    # davinci_manager is not a device
    nodes, pci = device_nodes(root, "davinci[0-9]*"), pci_devices(root, VENDOR, CLASSES)
    if not nodes and not pci:
        return Refusal("absent", "no Ascend NPU: none on the PCI bus, no /dev/davinci0")
    count = len(nodes) or len(pci)
    what = f"{count} Ascend NPU{'s' if count > 1 else ''}"
    if not nodes:
        return Refusal(
            "not installed", f"{what} on the PCI bus, but the driver made no /dev/davinci0"
        )
    if not shown(count, environ):
        return Refusal("absent", f"{what}, but {VISIBLE}={environ[VISIBLE]!r} hides every one")
    if not (root / "dev/davinci_manager").exists():
        return Refusal("broken", f"{what}, but /dev/davinci_manager is not in this container")
    toolkits = _toolkits(root, environ)
    if not toolkits:
        where = f"in /usr/local/Ascend, and {HOMES[0]} names none"
        return Refusal("not installed", f"{what}, without the CANN toolkit {where}")
    old = next((v for v in _cann(toolkits) if _release(v) and _release(v) < OLDEST_CANN), None)
    if old is not None:
        oldest = ".".join(map(str, OLDEST_CANN))
        said = f"{what}, but CANN {old} is older than {oldest}, which torch-npu is built with"
        return Refusal("unsupported", f"{said}: install it from hiascend.com")
    chips = {read_file(device / "device") for device in pci}
    if chips and not chips & CHIPS.keys():
        known = " and ".join(name for _, name, _ in CHIPS.values())
        said = f"{what} with PCI device {min(chips)}: this release serves {known}"
        return Refusal("unsupported", f"{said}; use --platform cpu")
    version = package("torch-npu")
    if version is None:
        return Refusal("not installed", f"{what}, without torch-npu: {install_command(EXTRA)}")
    if _release(version) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        said = f"{what}, but torch-npu {version} is older than {oldest}: {install_command(EXTRA)}"
        return Refusal("unsupported", said)
    wanted = _cann_of(version)
    old = next((v for v in _cann(toolkits) if _release(v) and _release(v) < wanted), None)
    if old is not None:
        said = f"{what}, but CANN {old} is older than {'.'.join(map(str, wanted))}"
        said = f"{said}, which torch-npu {version} is made for: install it from hiascend.com"
        return Refusal("unsupported", said)
    torch = package("torch")
    if torch is not None and _pinned(torch) != _pinned(version):
        said = f"{what}, but torch-npu {version} is made for torch {_pinned(version)}, not {torch}"
        return Refusal("unsupported", f"{said}: {install_command(EXTRA)}")
    if not has_library(root, LIBRARY, search) and not _configured(root):
        said = f"{what}, but {LIBRARY} of the toolkit is in no library folder"
        return Refusal("broken", f"{said}: source {toolkits[0]}/set_env.sh before starting")
    return None


def describe(chip: str, libraries: frozenset[str]) -> DeviceInfo:
    """A die as kernels may look at it, by its PCI device."""
    arch, name, cores = CHIPS.get(chip, next(iter(CHIPS.values())))
    return DeviceInfo(
        type="npu",
        name=name,
        arch=arch,
        features=libraries | {"bf16"},
        fast_dtypes=frozenset({"float32", "bfloat16", "float16", "int8"}),
        memory=_MEMORY,
        cores=cores,
    )


def chip(rank: int, root: Path = Path("/"), environ: Mapping[str, str] = os.environ) -> str:
    """PCI device of the rank-th visible die, "" where the bus lists none. Raises DeviceError where
    there is no such die.
    """
    found = pci_devices(root, VENDOR, CLASSES)
    here = shown(len(device_nodes(root, "davinci[0-9]*")) or len(found), environ)
    if rank >= len(here):
        raise DeviceError(
            f"NPU {rank} is asked for, and {len(here)} are visible ({VISIBLE} hides others): give "
            "--tp as many"
        )
    return read_file(found[min(here[rank], len(found) - 1)] / "device") if found else ""


class NpuPlatform(TorchPlatform):
    """Local rank r computes on the r-th die."""

    name = "npu"
    family = "Ascend NPUs"
    score = 100
    torch_type = "npu"
    collectives = "hccl"
    graph = "NPUGraph"

    def info(self, rank: int = 0) -> DeviceInfo:
        return describe(chip(rank), TORCH_NPU.features() | TRITON.features())

    def runtime(self) -> Any:
        """torch-npu registers itself with torch."""
        import torch_npu

        return torch_npu.npu

    def graph_backend(self, rank: int = 0) -> GraphBackend:
        from ds_runtime_npu.tasks import TaskGraphs

        return TaskGraphs(super().graph_backend(rank), self.runtime())

    def idle_memory(self, rank: int) -> MemoryInfo:
        """All of it: what other processes hold is known once torch has the device."""
        return MemoryInfo(total=_MEMORY, free=_MEMORY)

    def init_worker(self, rank: int, size: int, threads: int | None = None) -> None:
        super().init_worker(rank, size, threads)
        self.runtime().config.allow_internal_format = True  # of weights in fractal format
