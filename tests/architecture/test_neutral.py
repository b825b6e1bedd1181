"""Core and kit name no vendor, vendor language or vendor library: not in code, not in comments."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import ds_runtime

ROOT = Path(ds_runtime.__file__).parents[2]
NAMES = """
    cuda cudnn cublas cutlass nvidia nccl nvlink nvshmem ptx hopper blackwell ampere
    rocm hip amd rccl mori
    npu ascend huawei hccl cann
    xpu oneapi sycl intel xccl amx
    aiter flashinfer flashmla deepgemm tilelang triton deepep marlin vllm sglang
    tpu mps musa hygon
"""
PATTERNS = [*NAMES.split(), r"flash_mla", r"deep_gemm", r"deep_ep", r"torch_npu", r"sm_?\d{2,3}a?"]
PATTERNS += [r"gfx\d\w*", r"mi\d{3}x?", r"[abh]\d00", r"avx\w*", r"tensor_?cores?"]
VENDOR = re.compile(rf"(?<![a-z0-9])(?:{'|'.join(PATTERNS)})(?![a-z0-9])")


def vendor_words(text: str) -> list[str]:
    """Vendor words in a text; words end at underscores and where camel case changes."""
    split = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", text)
    return VENDOR.findall(text.lower()) + VENDOR.findall(split.lower())


@pytest.mark.parametrize("part", ["core", "kit"])
def test_the_core_names_no_vendor(part: str) -> None:
    found = []
    files = sorted((ROOT / part).rglob("*.py"))
    assert len(files) > 40
    for path in files:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            for word in vendor_words(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {word!r} in {line.strip()}")
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "text",
    [
        "x.is_cuda",
        "torch.cuda.Stream()",
        "if platform == 'rocm':",
        "# like FlashInfer",
        "def run_sm90(): ...",
        "arch = 'sm_100a'",
        "gfx942",
        "NPUGraph or npuGraph or npu_graph",
        "a Triton kernel",
        "from flash_mla import x",
        "deep_gemm.fp8",
        "hipMalloc",
        "needs AVX512",
        "libnccl and NCCL",
        "H100",
    ],
)
def test_a_vendor_word_is_seen(text: str) -> None:
    assert vendor_words(text)


@pytest.mark.parametrize(
    "text",
    ["a relationship", "ship chips", "input, output", "small 90", "xput", "execute", "check", "SM"],
)
def test_other_words_are_not(text: str) -> None:
    assert not vendor_words(text)
