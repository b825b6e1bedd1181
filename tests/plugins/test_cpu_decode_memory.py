"""A prompt whose every token is a sequence of its own, as with --batch-invariant: `mla_decode`
works by slices, whose memory does not grow with the prompt and whose bits are those of a row alone.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ds_runtime.ops.batch import Limits
from ds_runtime.ops.contract import Dims, Facts
from ds_runtime.ops.reference.attention.dense import decode_batch
from ds_runtime_cpu import native
from ds_runtime_cpu.attention import MlaDecodeNative
from ds_runtime_cpu.platform import CpuPlatform
from ds_runtime_cpu.workspace import mla_decode

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


def held_most() -> int:
    """Bytes that this process held at most. getrusage counts what its parent held, too."""
    (line,) = (n for n in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in n)
    return int(line.split()[1]) * 1024


def growth() -> int:
    """Bytes by which the most that this process held grows with the whole prompt."""
    run(torch.bfloat16, 0, 64)
    before = held_most()
    run(torch.bfloat16, 0, ROWS)
    return held_most() - before


@pytest.mark.skipif(sys.platform != "linux", reason="procfs")
def test_memory_does_not_grow_with_the_prompt() -> None:
    done = subprocess.run(
        [sys.executable, __file__], capture_output=True, text=True, timeout=120, check=True
    )
    assert int(done.stdout) < ROWS * HEADS * LORA * 2 + MORE


LONG = [  # rows, heads, keys of each, threads, dtype
    (1, 16, 50_000, None, "bfloat16"),
    (64, 16, 50_000, 1, "bfloat16"),
    (64, 16, 65_537, None, "float32"),  # ranges are halved there
    (8, 128, 20_000, 3, "bfloat16"),
    (300, 16, 9_000, 1, "float32"),
    (256, 128, 500, 24, "float32"),  # mostly what threads need, of which few have a core
]


def decoding(rows: int, heads: int, keys: int, threads: int | None, dtype: str) -> tuple[int, int]:
    """(bytes by which the most that this process held grows with one call, bytes that the kernel
    says it holds), on a rank of two with so many threads. None: its share of the cores."""
    named = getattr(torch, dtype)
    dims = Dims({"heads": heads, "kv_lora": LORA, "qk_rope": ROPE})
    platform = CpuPlatform()
    platform.init_worker(0, 2, threads)
    used = platform.threads(2, threads)
    assert used == native.threads()
    facts = Facts(
        *(platform.info(), dims, dtype, dtype), page_size=PAGE, context=keys, threads=used
    )
    pages = -(-keys // PAGE)
    q = torch.zeros(rows, heads, LORA + ROPE, dtype=named)
    cache = torch.zeros(1, PAGE, LORA + ROPE, dtype=named)
    table = torch.zeros(rows, pages, dtype=torch.int32)  # every page of all is the same one
    kernel = MlaDecodeNative(facts)
    state = kernel.state(Limits(rows, rows, pages, PAGE, heads, torch.device("cpu")))
    kernel.prepare(state, decode_batch((1,) * rows, table))
    first = kernel.run(state, q, cache, 0.1)  # what is allocated once; another result is new
    kernel.prepare(state, decode_batch((keys,) * rows, table))
    before = held_most()
    out = kernel.run(state, q, cache, 0.1)
    assert first.shape == out.shape
    return held_most() - before - out.nbytes, mla_decode(facts, rows)


@pytest.mark.skipif(sys.platform != "linux", reason="procfs")
@pytest.mark.parametrize("case", LONG, ids=str)
def test_a_long_decode_holds_what_it_says(case: tuple[object, ...]) -> None:
    """At most, as the system counts; and most of that where it is much."""
    done = subprocess.run(
        [sys.executable, __file__, *map(str, case)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    grown, said = map(int, done.stdout.split())
    assert grown < said + (4 << 20), "beside that, what threads and allocators round up"
    assert said < 10**8 or grown > said / 2


if __name__ == "__main__":
    if sys.argv[1:]:
        rows, heads, keys, threads, name = sys.argv[1:]
        given = None if threads == "None" else int(threads)
        print(*decoding(int(rows), int(heads), int(keys), given, name))
    else:
        print(growth())
