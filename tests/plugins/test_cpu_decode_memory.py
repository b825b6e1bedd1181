"""A prompt whose every token is a sequence of its own, as with --batch-invariant: `mla_decode`
works by slices, whose memory does not grow with the prompt and whose bits are those of a row alone.
"""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest
import torch

from ds_runtime.ops.batch import Limits
from ds_runtime.ops.contract import Dims, Facts
from ds_runtime.ops.reference.attention.dense import decode_batch
from ds_runtime_cpu.attention import MlaDecodeNative
from ds_runtime_cpu.platform import CpuPlatform

HEADS, LORA, ROPE, PAGE, LENGTH = 16, 512, 64, 64, 640
ROWS = 1500
MORE = 32 << 20  # bytes beside the results; all partial results would take three times as many


def run(dtype: torch.dtype, first: int, last: int) -> torch.Tensor:
    torch.manual_seed(1)
    named = str(dtype)[6:]
    dims = Dims({"heads": HEADS, "kv_lora": LORA, "qk_rope": ROPE})
    facts = Facts(CpuPlatform().info(), dims, named, named, page_size=PAGE, batch_invariant=True)
    lens = tuple(LENGTH - row % 90 for row in range(ROWS))[first:last]
    q = torch.randn(ROWS, HEADS, LORA + ROPE).to(dtype)[first:last]
    cache = torch.randn(LENGTH // PAGE, PAGE, LORA + ROPE).to(dtype)
    table = torch.arange(LENGTH // PAGE, dtype=torch.int32).repeat(len(lens), 1)
    kernel = MlaDecodeNative(facts)
    limits = Limits(len(lens), len(lens), LENGTH // PAGE, PAGE, HEADS, torch.device("cpu"))
    state = kernel.state(limits)
    kernel.prepare(state, decode_batch(lens, table))
    return kernel.run(state, q, cache, 0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_across_slices_have_their_own_bits(dtype: torch.dtype) -> None:
    whole = run(dtype, 0, 200)
    for first, last in ((0, 1), (63, 64), (64, 65), (60, 70), (127, 193), (199, 200)):
        assert torch.equal(run(dtype, first, last), whole[first:last]), (first, last)


def growth() -> int:
    """Bytes by which the most that this process held grows with the whole prompt."""
    run(torch.bfloat16, 0, 64)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run(torch.bfloat16, 0, ROWS)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss has other units elsewhere")
def test_memory_does_not_grow_with_the_prompt() -> None:
    done = subprocess.run(
        [sys.executable, __file__], capture_output=True, text=True, timeout=120, check=True
    )
    assert int(done.stdout) < ROWS * HEADS * LORA * 2 + MORE


if __name__ == "__main__":
    print(growth())
