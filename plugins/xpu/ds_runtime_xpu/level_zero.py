"""What Intel's Level Zero loader says of the devices, through ctypes. No torch.

The loader comes with the compute runtime. Structures and numbers: ze_api.h of Level Zero 1.x. With
ZE_FLAT_DEVICE_HIERARCHY unset every stack of a GPU is a device of its own, as it is for torch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

LOADER = "libze_loader.so.1"
_GPU_ONLY, _IS_GPU, _INTEGRATED = 1, 1, 1
_DEVICE_PROPERTIES, _MEMORY_PROPERTIES = 0x3, 0x7  # ze_structure_type_t


class LoaderError(RuntimeError):
    """A call of the loader failed; says which and with what code."""


class _Device(ctypes.Structure):  # ze_device_properties_t
    _fields_ = (
        ("stype", ctypes.c_uint32),
        ("next", ctypes.c_void_p),
        ("type", ctypes.c_uint32),
        ("vendor", ctypes.c_uint32),
        ("device", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("subdevice", ctypes.c_uint32),
        ("clock", ctypes.c_uint32),
        ("max_allocation", ctypes.c_uint64),
        ("contexts", ctypes.c_uint32),
        ("priority", ctypes.c_uint32),
        ("threads_per_eu", ctypes.c_uint32),
        ("simd_width", ctypes.c_uint32),
        ("eus_per_subslice", ctypes.c_uint32),
        ("subslices_per_slice", ctypes.c_uint32),
        ("slices", ctypes.c_uint32),
        ("timer", ctypes.c_uint64),
        ("timestamp_bits", ctypes.c_uint32),
        ("kernel_timestamp_bits", ctypes.c_uint32),
        ("uuid", ctypes.c_uint8 * 16),
        ("name", ctypes.c_char * 256),
    )


class _Memory(ctypes.Structure):  # ze_device_memory_properties_t
    _fields_ = (
        ("stype", ctypes.c_uint32),
        ("next", ctypes.c_void_p),
        ("flags", ctypes.c_uint32),
        ("clock", ctypes.c_uint32),
        ("bus_width", ctypes.c_uint32),
        ("size", ctypes.c_uint64),
        ("name", ctypes.c_char * 256),
    )


@dataclass(frozen=True, slots=True)
class Gpu:
    """One visible discrete GPU, or one stack of it. memory in bytes; cores are Xe cores; device is
    its PCI id.
    """

    name: str
    device: int
    memory: int
    cores: int


def _call(library: Any, name: str, *arguments: Any) -> None:
    """Call a function that returns 0 for success."""
    code = getattr(library, name)(*arguments)
    if code != 0:
        raise LoaderError(f"{name} failed with code {code:#x}")


def _handles(library: Any, name: str, *before: Any) -> list[ctypes.c_void_p]:
    """What a function enumerates: it is asked for the count first."""
    count = ctypes.c_uint32()
    _call(library, name, *before, ctypes.byref(count), None)
    found = (ctypes.c_void_p * count.value)()
    _call(library, name, *before, ctypes.byref(count), found)
    return [ctypes.c_void_p(found[i]) for i in range(count.value)]


def gpus(load: Callable[[str], Any] = ctypes.CDLL) -> list[Gpu]:
    """All visible discrete GPUs, in the loader's order; `load` opens a library. LoaderError."""
    try:
        library = load(LOADER)
    except OSError as e:
        raise LoaderError(f"{LOADER} cannot be opened: {e}") from e
    _call(library, "zeInit", _GPU_ONLY)
    found = []
    for driver in _handles(library, "zeDriverGet"):
        for handle in _handles(library, "zeDeviceGet", driver):
            about = _Device(stype=_DEVICE_PROPERTIES)
            _call(library, "zeDeviceGetProperties", handle, ctypes.byref(about))
            if about.type == _IS_GPU and not about.flags & _INTEGRATED:
                found.append(_described(library, handle, about))
    return found


def _described(library: Any, handle: ctypes.c_void_p, about: _Device) -> Gpu:
    count = ctypes.c_uint32()
    _call(library, "zeDeviceGetMemoryProperties", handle, ctypes.byref(count), None)
    memories = (_Memory * count.value)()
    for memory in memories:
        memory.stype = _MEMORY_PROPERTIES
    _call(library, "zeDeviceGetMemoryProperties", handle, ctypes.byref(count), memories)
    return Gpu(
        name=about.name.decode(),
        device=about.device,
        memory=sum(memory.size for memory in memories),
        cores=about.slices * about.subslices_per_slice,
    )


def gpu(index: int, load: Callable[[str], Any] = ctypes.CDLL) -> Gpu:
    """The `index`-th of them. Raises LoaderError."""
    found = gpus(load)
    if index >= len(found):
        raise LoaderError(
            f"GPU {index} is asked for, and {len(found)} are visible (ZE_AFFINITY_MASK hides "
            "others): give --tp as many"
        )
    return found[index]
