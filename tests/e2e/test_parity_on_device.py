"""The whole engine on the accelerator that is here against transformers in float32: prompts whole
and in chunks, prefixes from the cache, decode steps captured and not."""

from __future__ import annotations

import pytest
from test_parity_llm import (
    CACHED,
    LENGTHS,
    PARAMS,
    check,
    errors,
    errors_in_bfloat16,
    prompts_of,
)

from ds_runtime import LLM
from ds_runtime.plugins.manager import load_plugins
from ds_runtime.plugins.select_platform import select_platform
from ds_runtime_kit.models.oracle import Oracle
from ds_runtime_kit.models.tiny import V3_HEADS, write_tiny_fp8

pytestmark = pytest.mark.gpu
TOLERANCE = 5e-4  # float32 in other orders of summation, in two places
LIMIT = 5.0  # docs/numerics.md
V3 = {
    **V3_HEADS,
    "hidden_size": 512,
    "intermediate_size": 512,
    "moe_intermediate_size": 256,
    "q_lora_rank": 256,
}  # and whole blocks, which FP8 kernels are made for


@pytest.fixture(scope="module")
def settings():
    best, _ = select_platform(load_plugins())
    if not best.asynchronous:
        pytest.skip(f"the best platform here is {best.name}")
    return {"platform": best.name, "context_length": 256, "kv_memory": "64MB"}


def ways(folder, settings, prompts, **more):
    """Results of each way through the engine, by its name."""
    for graphs in (True, False):
        given = {**settings, "disable_graph": not graphs, **more}
        with LLM(folder, **given, page_size=64, chunked_prefill_size=256) as llm:
            yield f"whole, {graphs=}", llm.generate(prompts, PARAMS)
            again = llm.generate(prompts, CACHED)
            assert max(o.usage.cached_tokens for o in again) >= 128
            yield f"cached, {graphs=}", again
    with LLM(folder, **settings, **more, page_size=64, chunked_prefill_size=24) as llm:
        yield "chunked", llm.generate(prompts, PARAMS)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("shape", ["v2-lite", "v3"])
def test_float32_gives_the_tokens_of_transformers(checkpoints, settings, shape, fp8):
    folder, oracle = checkpoints(shape, fp8)
    for _, outputs in ways(folder, settings, prompts_of(oracle), dtype="float32"):
        assert check(oracle, outputs, TOLERANCE) >= 20 * len(LENGTHS)


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A random model with V3's heads in native FP8; transformers' mean error in bfloat16."""
    folder = tmp_path_factory.mktemp("wide")
    oracle = Oracle(write_tiny_fp8(folder, "v3", 3, **V3))
    theirs = list(errors_in_bfloat16(oracle, prompts_of(oracle)))
    return folder, oracle, sum(theirs) / len(theirs)


@pytest.mark.parametrize("kv", ["auto", "fp8"])
def test_fp8_stays_within_its_tolerance(wide, settings, kv):
    """The stated tolerance where activations are rounded to FP8 as well: a mean error of at most
    LIMIT times that of transformers' bfloat16, on every way."""
    folder, oracle, unit = wide
    for name, outputs in ways(
        folder, settings, prompts_of(oracle), dtype="bfloat16", kv_cache_dtype=kv
    ):
        found = list(errors(oracle, outputs, made=True))
        assert len(found) >= 20 * len(LENGTHS)
        mean = sum(found) / len(found)
        print(f"{name}, kv {kv}: mean error {mean:.4f}, {mean / unit:.2f} of bfloat16's")
        assert mean <= LIMIT * unit, (name, mean, unit)
