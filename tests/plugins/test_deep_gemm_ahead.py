"""What compiling DeepGEMM's kernels ahead holds of the device's memory, by a model of torch's
allocator, which keeps what is freed and gives it to later tensors that fit."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch.overrides import TorchFunctionMode

from ds_runtime_cuda import deep_gemm

EDGES = {1, 16, 17, 32, 33, 48, 49}


class Allocator(TorchFunctionMode):
    """Tensors of "cuda" are of "meta". held: bytes that were taken of the device."""

    def __init__(self):
        super().__init__()
        self.free, self.held = [], 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")) != "cuda":
            return func(*args, **kwargs)
        kwargs["device"] = "meta"
        made = func(*args, **kwargs)
        fits = sorted(size for size in self.free if size >= made.nbytes)
        size = fits[0] if fits else made.nbytes
        if fits:
            self.free.remove(size)
        else:
            self.held += size
        weakref.finalize(made, self.free.append, size)
        return made


@pytest.mark.parametrize("rows", [range(1, 16385), range(4096, 8193), range(1, 100)])
@pytest.mark.parametrize("shape", [(36864, 7168), (7168, 9216), (2112, 7168)])
def test_many_sizes_take_the_memory_of_the_largest(monkeypatch, rows, shape):
    n, k = shape
    seen = []

    class Linear:
        def __init__(self, facts):
            pass

        def apply(self, x, packed):
            seen.append(x.shape[0])
            return torch.empty(x.shape[0], n, dtype=torch.bfloat16, device="cuda")

    monkeypatch.setattr(deep_gemm, "LinearFp8", Linear)
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, gc.collect)
    with Allocator() as allocator:
        deep_gemm.compile_linear(SimpleNamespace(shape=shape), rows)
    edges = {count for count in rows if count % 64 < 2} | (EDGES & set(rows))
    assert set(seen) == edges and len(seen) == len(edges)
    weight = n * k + 4 * -(-n // 128) * -(-k // 128)
    largest = 2 * max(seen) * (n + k)
    assert allocator.held <= weight + largest
