"""How many KV pages a rank gets, and what the error says when one context does not fit."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ds_runtime.assembly.estimate import activation_bytes
from ds_runtime.config import EngineConfig
from ds_runtime.errors import ConfigError
from ds_runtime.kv.budget import Room, context_length
from ds_runtime.kv.budget import kv_memory as of_room
from ds_runtime.ops.contracts.caches import CacheSizes
from ds_runtime.parallel.mesh import Mesh
from ds_runtime.parallel.sums.kinds import LIBRARY_SUMS

PER_TOKEN = 100 * 3  # bytes over three layers
PAGE = 16 * PER_TOKEN


WIDTHS = ("hidden", "heads", "qk_nope", "qk_rope", "v", "intermediate", "moe_intermediate", "top_k")


def assembly(max_positions=1000, dims=None, **settings):
    return SimpleNamespace(
        config=EngineConfig(page_size=16, dtype="float32", **settings),
        facts=SimpleNamespace(dims=dict.fromkeys(WIDTHS, 0) | (dims or {}), graph_capture=False),
        model=SimpleNamespace(layers=3, max_positions=max_positions, indexing=None, vocab_size=0),
        cached_layers=3,
        mesh=Mesh(),
        cache_sizes=CacheSizes(PAGE, 0),
        binding=SimpleNamespace(base=None, choices=()),
        platform=SimpleNamespace(own_memory=False, kv_share=0.25),
        sums=LIBRARY_SUMS,
    )


def kv_memory(assembly, free, total, context, before=0):
    return of_room(assembly, Room(total, before, free), context)


def test_eight_full_contexts_when_memory_is_plenty():
    got = kv_memory(assembly(), free=10**12, total=4 * 10**12, context=1000)
    assert (got.pages, got.sizes.page, got.total) == (8 * 63, PAGE, 8 * 63 * PAGE)


def test_a_quarter_of_free_memory_when_that_is_less():
    got = kv_memory(assembly(), free=4 * 100 * PAGE + 5, total=4 * 10**12, context=1000)
    assert got.pages == 100


def test_activations_of_the_longest_step_stay_free():
    """Four hidden states of 100 float32 for each of 1,000 tokens."""
    wide = assembly(dims={"hidden": 100}, max_step_tokens=1000)
    held = 4 * 100 * 4 * 1000
    assert activation_bytes(wide) == held
    assert kv_memory(wide, free=100 * PAGE + held, total=10**12, context=1000).pages == 100
    assert kv_memory(wide, free=held - 1, total=10**12, context=1000).pages == 0
    short = kv_memory(wide, free=10 * PAGE + held, total=10**12, context=1000)
    said = str(short.too_small(short.pages, 1000))
    assert "but 3% of free memory is 48.0 kB" in said and "--max-step-tokens (now 1000)" in said
    plenty = kv_memory(wide, free=10**9, total=10**12, context=1000).pages
    assert plenty == kv_memory(assembly(), free=10**9, total=10**12, context=1000).pages


def test_an_explicit_size_is_taken_as_it_is():
    assert (
        kv_memory(
            assembly(kv_memory=70 * PAGE + 1), free=10**9, total=4 * 10**12, context=1000
        ).pages
        == 70
    )


def test_an_explicit_size_that_leaves_steps_too_little_is_warned_of():
    """Where the device's memory is its own: steps of 1,000 tokens hold 1.6 MB, 1 GB is others'."""
    wide = {"dims": {"hidden": 100}, "max_step_tokens": 1000, "kv_memory": 10**9}
    for own, free, warned in (
        (True, 2 * 10**9, "--kv-memory 1.0 GB leaves 1.0 GB of the device"),
        (True, 2 * 10**9 + 10**7, ""),
        (False, 10**9, ""),
    ):
        made = assembly(**wide)
        made.platform.own_memory = own
        got = kv_memory(made, free=free, total=4 * 10**12, context=1000)
        assert got.pages == 10**9 // PAGE
        assert got.warning.startswith(warned) and bool(got.warning) == bool(warned)


def test_a_fraction_that_leaves_steps_too_little_is_warned_of():
    wide = assembly(dims={"hidden": 100}, max_step_tokens=1000, mem_fraction_static=1.0)
    wide.platform.own_memory = True
    got = kv_memory(wide, free=10**9, before=2 * 10**9, total=2 * 10**9, context=1000)
    assert got.warning.startswith("--mem-fraction-static 1 leaves 0 B of the device")


def test_a_fraction_is_of_what_was_free_before_the_weights():
    """As SGLang means it: of 8 GB that were free, 7.2 may be used, and the weights took 2."""
    sizes = {"free": 6 * 10**9, "before": 8 * 10**9, "total": 10**10, "context": 1000}
    got = kv_memory(assembly(mem_fraction_static=0.9), **sizes)
    assert got.pages == (6 * 10**9 - int(8 * 10**9 * (1.0 - 0.9))) // PAGE
    said = r"0\.2: of 8\.0 GB that were free, the weights leave 6\.0 GB, and 6\.4"
    with pytest.raises(ConfigError, match=said):
        kv_memory(assembly(mem_fraction_static=0.2), **sizes)


def test_more_than_is_free_is_refused():
    with pytest.raises(ConfigError, match=r"--kv-memory 2\.0 GB: only 1\.0 GB are free"):
        kv_memory(assembly(kv_memory=2 * 10**9), free=10**9, total=4 * 10**12, context=1000)


def test_too_small_says_needed_available_and_both_flags():
    got = kv_memory(assembly(), free=4 * 10 * PAGE, total=4 * 10**12, context=1000)
    said = str(got.too_small(got.pages, 1000))
    for part in ("302.4 kB", "48.0 kB", "192.0 kB", "--context-length, e.g. to 160", "--kv-memory"):
        assert part in said


def test_context_length_is_the_models_or_less():
    assert context_length(assembly(max_positions=77)) == 77
    assert context_length(assembly(max_positions=77, context_length=50)) == 50
    with pytest.raises(ConfigError, match="--context-length 78: the model's positions end at 77"):
        context_length(assembly(max_positions=77, context_length=78))
