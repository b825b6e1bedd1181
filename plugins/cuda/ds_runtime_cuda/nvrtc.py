"""CUDA C++ of this plugin, compiled for the device that is here when it is first needed.

Source of the calls: the NVRTC and CUDA driver API references, through cuda-bindings, which torch
for CUDA brings. What was compiled is kept in ~/.cache/ds-runtime/cuda; the folder may be deleted.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import tempfile
from collections.abc import Mapping
from functools import cache, lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from cuda.bindings import driver, nvrtc

from ds_runtime_cuda.driver import DriverError


def checked(result: tuple[Any, ...]) -> Any:
    """What a call returned behind its code. Raises DriverError, naming the code."""
    code, *values = result
    if int(code) != 0:
        raise DriverError(f"a call of {type(code).__name__} failed with {code.name}")
    return values[0] if len(values) == 1 else tuple(values)


def folder() -> Path:
    """Where compiled programs are kept."""
    return Path.home() / ".cache" / "ds-runtime" / "cuda"


def compiled(source: str, options: tuple[str, ...]) -> bytes:
    """Machine code for these options, from the folder if it has been made before."""
    version = "{}.{}".format(*checked(nvrtc.nvrtcVersion()))
    key = hashlib.sha256("\0".join((source, version, *options)).encode()).hexdigest()
    kept = folder() / f"{key[:32]}.cubin"
    if kept.is_file():
        return kept.read_bytes()
    code = _compile(source, options)
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        handle, made = tempfile.mkstemp(dir=kept.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(code)
        Path(made).replace(kept)
    except OSError:  # it is compiled again next time
        pass
    return code


def _compile(source: str, options: tuple[str, ...]) -> bytes:
    program = checked(nvrtc.nvrtcCreateProgram(source.encode(), b"kernel.cu", 0, [], []))
    try:
        given = [option.encode() for option in options]
        (code,) = nvrtc.nvrtcCompileProgram(program, len(given), given)
        if int(code) != 0:
            log = b" " * checked(nvrtc.nvrtcGetProgramLogSize(program))
            checked(nvrtc.nvrtcGetProgramLog(program, log))
            raise DriverError(f"{code.name}: {log.decode(errors='replace')}")
        made: bytes = b" " * checked(nvrtc.nvrtcGetCUBINSize(program))
        checked(nvrtc.nvrtcGetCUBIN(program, made))
        return made
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def compile_for(arch: str, name: str, defines: Mapping[str, int]) -> bytes:
    """Machine code of a file of csrc for "sm_90a" or the like."""
    source = (files("ds_runtime_cuda") / "csrc" / name).read_text()
    given = (f"-D{key}={value}" for key, value in sorted(defines.items()))
    return compiled(source, (f"--gpu-architecture={arch}", "--std=c++17", *given))


def compile_for_device(name: str, defines: Mapping[str, int]) -> bytes:
    """The same for the current device, with the instructions that it alone has."""
    major, minor = torch.cuda.get_device_capability()
    return compile_for(f"sm_{major}{minor}{'a' if major >= 9 else ''}", name, defines)


class Module:
    """The kernels of a file of csrc, compiled with `defines` and loaded into the current context,
    which torch has made when there is a tensor on the device."""

    def __init__(self, name: str, defines: Mapping[str, int]) -> None:
        self._module = checked(driver.cuModuleLoadData(compile_for_device(name, defines)))
        self._functions: dict[str, Any] = {}

    def function(self, name: str, shared: int = 0) -> Any:
        """A kernel that may use so many bytes of on-chip memory."""
        if name not in self._functions:
            found = checked(driver.cuModuleGetFunction(self._module, name.encode()))
            if shared:
                limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                checked(driver.cuFuncSetAttribute(found, limit, shared))
            self._functions[name] = found
        return self._functions[name]


@cache
def _overlapping() -> Any:
    """The launch may begin while the one before it ends; kernels wait where they must."""
    attribute = driver.CUlaunchAttribute()
    kind = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.id = kind
    attribute.value.programmaticStreamSerializationAllowed = 1
    return attribute


def launch(
    function: Any, grid: tuple[int, int], threads: int, shared: int, arguments: ctypes.Structure
) -> None:
    """Launch on torch's current stream; the kernel takes one struct."""
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = *grid, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes = shared
    config.hStream = torch.cuda.current_stream().cuda_stream
    config.attrs, config.numAttrs = [_overlapping()], 1
    each = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
    checked(driver.cuLaunchKernelEx(config, function, ctypes.addressof(each), 0))


@lru_cache(maxsize=65536)
def box_map(
    address: int, dtype: torch.dtype, rows: int, columns: int, box_rows: int
) -> tuple[int, ...]:
    """How the copy engine finds 128 bytes of `box_rows` rows of a matrix [rows, columns], to lay
    them down in lines of 128 bytes that are swizzled: the words of a CUtensorMap."""
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
            [driver.cuuint64_t(columns * size)],
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
