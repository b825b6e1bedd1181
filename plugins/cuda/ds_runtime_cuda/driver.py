"""What the CUDA driver and its management library say of the devices, through ctypes. No torch.

Both libraries come with the kernel driver. The driver API honours CUDA_VISIBLE_DEVICES; the
management library does not, so that devices are matched by their bus address.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

DRIVER = "libcuda.so.1"
MANAGEMENT = "libnvidia-ml.so.1"
_MULTIPROCESSORS, _MAJOR, _MINOR = 16, 75, 76  # CUdevice_attribute
_MEMORY_CLOCK, _BUS_WIDTH = 36, 37  # in kHz, in bits; two transfers per clock
_TEXT = 128
_LINKS, _LINK_RATE = 18, 25 * 10**9  # at most of a GPU; bytes per second of one, each way


class DriverError(RuntimeError):
    """A call of the driver failed; says which and with what code."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One visible GPU. memory in bytes; cores are multiprocessors; bus is its PCI address;
    bandwidth of the memory in bytes per second, 0 where the driver does not say; links: bytes per
    second that it receives from others over NVLink, 0 without."""

    name: str
    capability: tuple[int, int]
    memory: int
    cores: int
    bus: str
    bandwidth: int = 0
    links: int = 0

    @property
    def arch(self) -> str:
        """As compilers name it: sm90, sm100."""
        return f"sm{self.capability[0]}{self.capability[1]}"


def _call(library: Any, name: str, *arguments: Any) -> None:
    """Call a function that returns 0 for success."""
    code = getattr(library, name)(*arguments)
    if code != 0:
        raise DriverError(f"{name} failed with code {code}")


def gpu(index: int, load: Callable[[str], Any] = ctypes.CDLL) -> Gpu:
    """The `index`-th visible GPU. Raises DriverError. `load` opens a library."""
    cuda = load(DRIVER)
    _call(cuda, "cuInit", 0)
    count, device = ctypes.c_int(), ctypes.c_int()
    _call(cuda, "cuDeviceGetCount", ctypes.byref(count))
    if index >= count.value:
        raise DriverError(
            f"GPU {index} is asked for, and {count.value} are visible (CUDA_VISIBLE_DEVICES hides "
            "others): give --tp as many"
        )
    _call(cuda, "cuDeviceGet", ctypes.byref(device), index)
    memory = ctypes.c_size_t()
    _call(cuda, "cuDeviceTotalMem_v2", ctypes.byref(memory), device)
    return Gpu(
        name=_text(cuda, "cuDeviceGetName", device),
        capability=(_attribute(cuda, _MAJOR, device), _attribute(cuda, _MINOR, device)),
        memory=memory.value,
        cores=_attribute(cuda, _MULTIPROCESSORS, device),
        bus=_text(cuda, "cuDeviceGetPCIBusId", device),
        bandwidth=_bandwidth(cuda, device),
    )


def _attribute(cuda: Any, attribute: int, device: ctypes.c_int) -> int:
    value = ctypes.c_int()
    _call(cuda, "cuDeviceGetAttribute", ctypes.byref(value), attribute, device)
    return value.value


def _bandwidth(cuda: Any, device: ctypes.c_int) -> int:
    """Bytes per second; 0 from a driver that does not say, since nothing fails without it."""
    try:
        clock, width = (_attribute(cuda, name, device) for name in (_MEMORY_CLOCK, _BUS_WIDTH))
    except DriverError:
        return 0
    return clock * 1000 * 2 * width // 8


def _text(cuda: Any, function: str, device: ctypes.c_int) -> str:
    buffer = ctypes.create_string_buffer(_TEXT)
    _call(cuda, function, buffer, _TEXT, device)
    return buffer.value.decode()


class _Memory(ctypes.Structure):
    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


def links(bus: str, load: Callable[[str], Any] = ctypes.CDLL) -> int:
    """Bytes per second that the GPU at a PCI address receives over NVLink; 0 where it has none, or
    the driver does not say, since nothing fails without it."""
    try:
        nvml = load(MANAGEMENT)
        _call(nvml, "nvmlInit_v2")
        try:
            handle = ctypes.c_void_p()
            _call(nvml, "nvmlDeviceGetHandleByPciBusId_v2", bus.encode(), ctypes.byref(handle))
            return sum(_link(nvml, handle, number) for number in range(_LINKS))
        finally:
            nvml.nvmlShutdown()
    except (DriverError, OSError, AttributeError):
        return 0


def _link(nvml: Any, handle: ctypes.c_void_p, number: int) -> int:
    active, version = ctypes.c_int(), ctypes.c_uint()
    try:
        _call(nvml, "nvmlDeviceGetNvLinkState", handle, number, ctypes.byref(active))
        _call(nvml, "nvmlDeviceGetNvLinkVersion", handle, number, ctypes.byref(version))
    except DriverError:  # no such link
        return 0
    return active.value * (_LINK_RATE if version.value < 5 else 2 * _LINK_RATE)


def memory(bus: str, load: Callable[[str], Any] = ctypes.CDLL) -> tuple[int, int]:
    """(total, free) bytes of the GPU at a PCI address, whoever uses it. Raises DriverError."""
    nvml = load(MANAGEMENT)
    _call(nvml, "nvmlInit_v2")
    try:
        handle, found = ctypes.c_void_p(), _Memory()
        _call(nvml, "nvmlDeviceGetHandleByPciBusId_v2", bus.encode(), ctypes.byref(handle))
        _call(nvml, "nvmlDeviceGetMemoryInfo", handle, ctypes.byref(found))
        return found.total, found.free
    finally:
        nvml.nvmlShutdown()
