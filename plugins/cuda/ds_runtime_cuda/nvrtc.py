"""CUDA C++ of this plugin, compiled for the device that is here when it is first needed.

Source of the calls: the NVRTC and CUDA driver API references, through cuda-bindings, which torch
for CUDA brings. What was compiled is kept in ~/.cache/ds-runtime/cuda; the folder may be deleted.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import tempfile
import time
from collections.abc import Mapping
from functools import cache, lru_cache
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from ds_runtime.api import PluginError, kept_in
from ds_runtime.api import compiled as told
from ds_runtime_cuda.driver import DriverError

_MAGIC = b"\x7fELF"  # what machine code begins with


@cache
def _library() -> tuple[Any, Any]:
    """(the driver, NVRTC)."""
    return import_module("cuda.bindings.driver"), import_module("cuda.bindings.nvrtc")


def checked(result: tuple[Any, ...]) -> Any:
    """What a call returned after its code. Raises DriverError, naming the code."""
    code, *values = result
    if int(code) != 0:
        raise DriverError(f"a call of {type(code).__name__} failed with {code.name}")
    return values[0] if len(values) == 1 else tuple(values)


def folder() -> Path:
    """Where compiled programs are kept. RuntimeError without a home."""
    return Path.home() / ".cache" / "ds-runtime" / "cuda"


def compiled(
    source: str,
    headers: Mapping[str, str],
    options: tuple[str, ...],
    anew: bool = False,
    name: str = "program",
) -> bytes:
    """Machine code for these options, from the folder if it has been made before. headers: the
    files that the source may include. anew: in any case, and kept in the other's place. name: what
    is told of a compilation."""
    version = "{}.{}".format(*checked(_library()[1].nvrtcVersion()))
    parts = (source, *(part for each in sorted(headers.items()) for part in each), version)
    key = hashlib.sha256("\0".join((*parts, *options)).encode()).hexdigest()
    with contextlib.suppress(OSError, RuntimeError):  # what cannot be read is made again
        kept_in("nvrtc", folder())
        kept = (folder() / f"{key[:32]}.cubin").read_bytes()
        if kept.startswith(_MAGIC) and not anew:
            return kept
    began = time.perf_counter()
    code = _compile(source, headers, options)
    told("nvrtc", name, time.perf_counter() - began, " ".join(options))
    with contextlib.suppress(OSError, RuntimeError):  # it is compiled again next time
        _keep(code, folder() / f"{key[:32]}.cubin")
    return code


def _keep(code: bytes, path: Path) -> None:
    """Others may do so, too, at the same time: a file is whole or not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, made = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(code)
        Path(made).replace(path)
    except OSError:
        Path(made).unlink(missing_ok=True)
        raise


def _compile(source: str, headers: Mapping[str, str], options: tuple[str, ...]) -> bytes:
    _, nvrtc = _library()
    texts, names = ([e.encode() for e in each] for each in (headers.values(), headers))
    made_of = source.encode(), b"kernel.cu", len(names), texts, names
    program = checked(nvrtc.nvrtcCreateProgram(*made_of))
    try:
        given = [option.encode() for option in options]
        (code,) = nvrtc.nvrtcCompileProgram(program, len(given), given)
        if int(code) != 0:
            log = b" " * checked(nvrtc.nvrtcGetProgramLogSize(program))
            checked(nvrtc.nvrtcGetProgramLog(program, log))
            raise DriverError(f"{code.name}: {log.decode(errors='replace').rstrip(chr(0))}")
        made: bytes = b" " * checked(nvrtc.nvrtcGetCUBINSize(program))
        checked(nvrtc.nvrtcGetCUBIN(program, made))
        return made
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def compile_for(arch: str, name: str, defines: Mapping[str, int], anew: bool = False) -> bytes:
    """Machine code of a file of csrc for "sm_90a" or the like."""
    here = files("ds_runtime_cuda") / "csrc"
    source = (here / name).read_text()
    headers = {f.name: f.read_text() for f in here.iterdir() if f.name.endswith(".cuh")}
    given = (f"-D{key}={value}" for key, value in sorted(defines.items()))
    options = (f"--gpu-architecture={arch}", "--std=c++17", *given)
    return compiled(source, headers, options, anew, name)


def compile_for_device(name: str, defines: Mapping[str, int], anew: bool = False) -> bytes:
    """The same for the current device, with the instructions that it alone has."""
    major, minor = torch.cuda.get_device_capability()
    arch = f"sm_{major}{minor}{'a' if major >= 9 else ''}"
    return compile_for(arch, name, defines, anew)


class Module:
    """The kernels of a file of csrc, compiled with `defines` and loaded into the current context,
    which torch has made when there is a tensor on the device. Raises DriverError."""

    def __init__(self, name: str, defines: Mapping[str, int]) -> None:
        load = _library()[0].cuModuleLoadData
        try:
            self._module = checked(load(compile_for_device(name, defines)))
        except DriverError:  # what was kept may be damaged
            self._module = checked(load(compile_for_device(name, defines, anew=True)))
        self._functions: dict[str, Any] = {}

    def function(self, name: str, shared: int = 0) -> Any:
        """A kernel that may use this many bytes of on-chip memory."""
        driver, _ = _library()
        if name not in self._functions:
            found = checked(driver.cuModuleGetFunction(self._module, name.encode()))
            if shared:
                limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                checked(driver.cuFuncSetAttribute(found, limit, shared))
            self._functions[name] = found
        return self._functions[name]


def module(source: str, defines: Mapping[str, int], pin: str) -> Module:
    """A Module for a kernel. Raises PluginError, which says what to pin to run without it."""
    try:
        return Module(source, defines)
    except DriverError as e:
        raise PluginError(f"{source} cannot be used: {e}; --pin {pin} runs without") from e


@cache
def cores(device: torch.device) -> int:
    """Multiprocessors."""
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def _overlapping() -> Any:
    """The launch may begin while the one before it ends; kernels wait where they must."""
    driver, _ = _library()
    attribute = driver.CUlaunchAttribute()
    kind = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.id = kind
    attribute.value.programmaticStreamSerializationAllowed = 1
    return attribute


def launch(
    function: Any, grid: tuple[int, int], threads: int, shared: int, arguments: ctypes.Structure
) -> None:
    """Launch on torch's current stream; the kernel takes one struct."""
    driver, _ = _library()
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = *grid, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes = shared
    config.hStream = torch.cuda.current_stream().cuda_stream
    config.attrs, config.numAttrs = [_overlapping()], 1
    each = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
    checked(driver.cuLaunchKernelEx(config, function, ctypes.addressof(each), 0))


@lru_cache(maxsize=4096)
def box_map(
    address: int, dtype: torch.dtype, rows: int, columns: int, box_rows: int, pitch: int = 0
) -> tuple[int, ...]:
    """How the copy engine finds 128 bytes of `box_rows` rows of a matrix [rows, columns], to lay
    them down in lines of 128 bytes that are swizzled. Returns the words of a CUtensorMap. pitch:
    from one row to the next, where that is not `columns`."""
    driver, _ = _library()
    kinds = driver.CUtensorMapDataType
    kind = {
        torch.bfloat16: kinds.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        torch.float8_e4m3fn: kinds.CU_TENSOR_MAP_DATA_TYPE_UINT8,
    }[dtype]
    size = dtype.itemsize
    made = checked(
        driver.cuTensorMapEncodeTiled(
            kind,
            2,
            address,
            [driver.cuuint64_t(columns), driver.cuuint64_t(rows)],
            [driver.cuuint64_t((pitch or columns) * size)],
            [driver.cuuint32_t(128 // size), driver.cuuint32_t(box_rows)],
            [driver.cuuint32_t(1), driver.cuuint32_t(1)],
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )
    words = (ctypes.c_uint64 * 16).from_address(int(made.getPtr()))
    return tuple(words)
