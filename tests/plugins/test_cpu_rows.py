"""A row of a native matmul has its bits alone and in any company, on one thread and on more.

The kit asks it of samples with a few rows; here are so many that every way of going through them
is taken.
"""

from __future__ import annotations

import pytest
import torch
from narrowing import using

from ds_runtime.ops.contract import Dims, Facts
from ds_runtime.ops.weight import Weight, WeightPart
from ds_runtime_cpu import linear, native
from ds_runtime_cpu.kernels import LINEAR_KERNELS
from ds_runtime_cpu.platform import CpuPlatform

OUT, IN = 96, 256
COUNTS = (1, 2, 3, 5, 8, 15, 16, 17, 32, 33, 64, 100, 129, 300)


def weight(dtype: torch.dtype, fmt: str) -> Weight:
    values = torch.randn(OUT, IN) / 16
    if fmt != "fp8_block":
        part = WeightPart("w", "dense", (OUT, IN), {"weight": values.to(dtype)})
    else:
        tensors = {"weight": values.to(torch.float8_e4m3fn), "scale": torch.rand(1, 2) + 0.5}
        part = WeightPart("w", fmt, (OUT, IN), tensors, (128, 128))
    return Weight((part,))


@pytest.mark.parametrize("fmt", ["dense", "dense 12", "fp8_block"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("isa", native.runnable())
def test_rows_of_a_linear(isa: str, dtype: torch.dtype, fmt: str) -> None:
    torch.manual_seed(3)
    device, named = CpuPlatform().info(), str(dtype)[6:]
    held = fmt.split()[0]
    facts = Facts(device, Dims({}), dtype=named, weight_format=held, shape=(OUT, IN))
    x = torch.randn(max(COUNTS), IN).to(dtype)
    with using(isa, fmt == "dense 12"):
        kernel = linear.linear_native(facts)
        packed = kernel.pack(weight(dtype, fmt), facts)
        whole = kernel.apply(x, packed)
        try:
            for threads in (1, 2):
                torch.set_num_threads(threads)
                for count in COUNTS:
                    alone = kernel.apply(x[-count:].clone(), packed)
                    assert torch.equal(alone, whole[-count:]), (threads, count)
        finally:
            torch.set_num_threads(1)


def test_it_is_what_the_kernel_declares() -> None:
    (declared,) = (k for k in LINEAR_KERNELS if k.name == "cpu.linear_native")
    assert declared.batch_invariant
