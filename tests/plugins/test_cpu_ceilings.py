"""What the CPU reaches: the native read, the cache's size, and what is made of both."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ds_runtime.platform import ceilings as by_torch
from ds_runtime_cpu import ceilings, machine, native
from ds_runtime_cpu.platform import CpuPlatform


@pytest.mark.parametrize("isa", native.runnable())
@pytest.mark.parametrize("words", [0, 1, 31, 128, 129, 4096, 100_003])
@pytest.mark.parametrize("streams", [1, 4])
def test_every_word_is_read(isa, words, streams):
    data = np.random.default_rng(words).integers(0, 1 << 62, words, dtype=np.int64)
    total = torch.full((1,), -1, dtype=torch.int64)
    with native.using(isa):
        native.calls().read(data.ctypes.data, data.nbytes, streams, total.data_ptr())
    assert int(total) == int(np.bitwise_xor.reduce(data)) if words else int(total) == 0


@pytest.mark.parametrize(
    ("sizes", "want"),
    [({"index0": "48K\n", "index3": "32M\n"}, 32 << 20), ({"index0": "odd"}, 0), ({}, 0)],
)
def test_the_last_level_cache(tmp_path, sizes, want):
    for name, text in sizes.items():
        folder = tmp_path / "sys/devices/system/cpu/cpu0/cache" / name
        folder.mkdir(parents=True)
        (folder / "size").write_text(text)
    assert machine.last_level_cache(tmp_path) == want


def test_ceilings(monkeypatch):
    monkeypatch.setattr(by_torch, "_SECONDS", 0.01)
    monkeypatch.setattr(ceilings, "_SECONDS", 0.01)
    monkeypatch.setattr(by_torch, "_SIZES", (256,))
    monkeypatch.setattr(by_torch, "buffer_bytes", lambda cache, free: 64 << 20)
    found = CpuPlatform().ceilings()
    assert found.cache == machine.last_level_cache()
    assert set(found.compute) >= CpuPlatform().info().fast_dtypes
    assert 1e8 < CpuPlatform().read_rate() < 10 * found.bandwidth
    by = "the native library" if native.runnable() else "torch's sums"
    assert by in found.note


def test_ceilings_without_a_library(monkeypatch):
    monkeypatch.setattr(by_torch, "_SECONDS", 0.01)
    monkeypatch.setattr(ceilings, "_SECONDS", 0.01)
    monkeypatch.setattr(by_torch, "_SIZES", (64,))
    monkeypatch.setattr(by_torch, "buffer_bytes", lambda cache, free: 1 << 20)
    monkeypatch.setattr(ceilings.native, "isa_in_use", lambda: None)
    assert "torch's sums" in ceilings.measure(CpuPlatform().info().fast_dtypes).note
