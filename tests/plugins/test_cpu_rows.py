"""A row of a native matmul has its bits alone and in any company, on one thread and on more.

The kit asks it of samples with a few rows; here are so many that every way of going through them
is taken.
"""

from __future__ import annotations

import pytest
import torch
from narrowing import using

from ds_runtime.ops.contract import Dims, Facts
from ds_runtime.ops.reference.cases import Maker, SampleExperts
from ds_runtime.ops.weight import Weight, WeightPart
from ds_runtime_cpu import experts, linear, native
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


@pytest.mark.parametrize("fmt", ["dense", "fp8_block", "int8_channel", "int4_group"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_rows_of_experts(dtype: str, fmt: str) -> None:
    """Results kept by pair, and summed by column from 1,024 tokens on."""
    dims = Dims({"top_k": 2, "experts": 8})
    facts = Facts(CpuPlatform().info(), dims, dtype=dtype, weight_format=fmt, shape=(8, 64, 256))
    kernel = {"int8_channel": experts.experts_int8, "int4_group": experts.experts_int4}.get(
        fmt, experts.experts_native
    )(facts)
    make = Maker(facts, fmt)
    up, down = ((64, 256), (256, 64))
    triples = [tuple(make.weight(*shape, fmt) for shape in (up, up, down)) for _ in range(8)]
    packed = kernel.pack(SampleExperts(triples), facts)
    x, count = make.normal(1100, 256), 1100
    weights, ids = torch.rand(count, 2), torch.randint(0, 8, (count, 2), dtype=torch.int32)
    whole = kernel.apply(x, weights, ids, packed)
    for rows in (1, 2, 3, 7, 33, 300, 1023, 1025):
        alone = kernel.apply(x[-rows:].clone(), weights[-rows:], ids[-rows:], packed)
        assert torch.equal(alone, whole[-rows:]), rows


@pytest.mark.parametrize("fmt", ["int8_channel", "int4_group"])
def test_rows_of_a_linear_of_few_bits(fmt: str) -> None:
    facts = Facts(CpuPlatform().info(), Dims({}), "bfloat16", weight_format=fmt, shape=(OUT, IN))
    kernel = {"int8_channel": linear.linear_int8, "int4_group": linear.linear_int4}[fmt](facts)
    make = Maker(facts, fmt)
    packed, x = kernel.pack(make.weight(OUT, IN, fmt), facts), make.normal(max(COUNTS), IN)
    whole = kernel.apply(x, packed)
    for count in COUNTS:
        assert torch.equal(kernel.apply(x[-count:].clone(), packed), whole[-count:]), count


def test_it_is_what_the_kernel_declares() -> None:
    (declared,) = (k for k in LINEAR_KERNELS if k.name == "cpu.linear_native")
    assert declared.promises.batch_invariant
