"""The CUDA plugin's offers of linears for capability 9.0, and of cuBLAS for all. Torch-free.

Their ranks are as kernels.py says.
"""

from __future__ import annotations

from ds_runtime.api import (
    DENSE_ROWS,
    FP8_ROWS,
    RANK_PLATFORM,
    RANK_SPECIALISED,
    Compiles,
    Footprint,
    Gate,
    Kernel,
    RowRange,
    checks,
)
from ds_runtime_cuda.gates import (
    BF16,
    BLOCK,
    CODED,
    DENSE,
    FP8,
    RANK_BEHIND,
    RANK_BESIDE,
    arch,
    columns_on_chip,
    cuda,
    deep_gemm,
    flashinfer,
    has,
    large,
    not_large,
    odd_columns,
    quantises,
    scaled_columns,
)
from ds_runtime_cuda.software import BINDINGS, DEEP_GEMM, FLASHINFER


def _dense12(name: str, ahead: str, below: int, size: Gate) -> Kernel:
    return cuda.offer(
        "linear",
        f"packed12.linear:{name}",
        RANK_BESIDE,
        arch("sm90"),
        BINDINGS.has(),
        BF16,
        size,
        formats=DENSE,
        note="compiled by NVRTC when it is first needed",
        rows=RowRange(DENSE_ROWS, 1, below),
        footprint=Footprint(second_form=CODED),
        compiles=Compiles(f"packed12.linear:{ahead}"),
    )


def _scaled_mm(name: str, rows: RowRange, columns: Gate) -> Kernel:
    return cuda.offer(
        "linear",
        f"torch_ops:{name}",
        RANK_PLATFORM,
        arch("sm90"),
        quantises,
        checks.multiplies("float8_e4m3fn"),
        BF16,
        checks.linear_groups(BLOCK, 16),
        columns,
        formats=FP8,
        rows=rows,
    )


LINEAR: tuple[Kernel, ...] = (
    _dense12("LinearDense12", "compile_linear", 129, large),
    _dense12("LinearFew12", "compile_few", 9, not_large),
    deep_gemm.offer(
        "linear",
        "deep_gemm:LinearFp8",
        RANK_SPECIALISED,
        arch("sm90"),
        has(DEEP_GEMM, "fp8_gemm_nt"),
        quantises,
        BF16,
        checks.linear_groups(BLOCK, 8),
        formats=FP8,
        # One row needs no matrix unit, and no launch that quantises it.
        rows=RowRange(FP8_ROWS, 2),
        compiles=Compiles("deep_gemm:compile_linear"),
    ),
    flashinfer.offer(
        "linear",
        "flashinfer:LinearGroupwise",
        RANK_SPECIALISED,
        arch("sm100", "sm103"),
        has(FLASHINFER, "gemm.gemm_fp8_nt_groupwise"),
        quantises,
        BF16,
        checks.linear_groups(BLOCK, 128),
        formats=FP8,
    ),
    _scaled_mm("LinearScaledMm", RowRange(FP8_ROWS), scaled_columns),
    _scaled_mm("LinearScaledMmPadded", RowRange(), odd_columns),
    # It was not timed against DeepGEMM, which keeps calls of several rows where it is installed.
    cuda.offer(
        "linear",
        "fp8_few:LinearFewFp8",
        RANK_BESIDE,
        arch("sm90"),
        BINDINGS.has(),
        BF16,
        scaled_columns,
        columns_on_chip,
        formats=FP8,
        numerics="",  # activations are not rounded
        note="compiled by NVRTC when it is first needed; calls of more than 8 rows read weights "
        "once for each 8",
        rows=RowRange(FP8_ROWS, 1, 9),
        compiles=Compiles("fp8_few:compile_few"),
    ),
    cuda.offer("linear", "torch_ops:LinearCublas", RANK_BEHIND, formats=DENSE),
)
