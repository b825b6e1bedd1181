"""`--batch-invariant` on the accelerator that is here, and on two of them."""

from __future__ import annotations

from statistics import fmean
from typing import Any

import pytest
import torch
from test_batch_invariant import DRAFTS, REQUESTS, answers, bits_of, check_mixes, drawn
from test_parity_llm import PARAMS, errors, errors_in_bfloat16, prompts_of
from test_parity_on_device import LIMIT, V3

from ds_runtime import LLM, SamplingParams
from ds_runtime.plugins.manager import load_plugins
from ds_runtime.plugins.select_platform import select_platform
from ds_runtime_kit.models.answers import bits, forced
from ds_runtime_kit.models.oracle import Oracle
from ds_runtime_kit.models.tiny import write_tiny_fp8

pytestmark = pytest.mark.gpu
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks": {"chunked_prefill_size": 13, "max_step_tokens": 29},
    "drafts": DRAFTS,
    "op by op": {"disable_graph": True, "disable_prefill_graph": True},
}


@pytest.fixture(scope="module")
def settings():
    best, _ = select_platform(load_plugins())
    if not best.asynchronous:
        pytest.skip(f"the best platform here is {best.name}")
    given = {"context_length": 512, "kv_memory": "200MB", "max_running_requests": 12}
    return {"platform": best.name, "batch_invariant": True, **given}


@pytest.fixture(scope="module")
def own(settings):
    """Bits and outputs of each request alone, by dtype and number of ranks."""
    found = {}

    def of(dtype, tp=1):
        if (dtype, tp) not in found:
            with LLM("demo", **settings, dtype=dtype, tp=tp, disable_radix_cache=True) as llm:
                found[dtype, tp] = [answers(llm, [number])[0][0] for number in range(REQUESTS)]
        return found[dtype, tp]

    return of


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.replace(" ", "-"))
def test_mixes(settings, own, way, dtype):
    alone = own(dtype)
    with LLM("demo", **{**settings, **WAYS[way]}, dtype=dtype) as llm:
        check_mixes(llm, dtype, 50, own=alone)
        found, outputs = answers(llm, range(REQUESTS))
        assert [bits(scores) for scores in forced(llm, outputs, 2)] == found == alone


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tp", [2, 4])
def test_ranks(settings, own, tp, dtype):
    if torch.accelerator.device_count() < tp:
        pytest.skip(f"there are fewer than {tp} devices")
    alone = own(dtype, tp)  # a process has one group of ranks at a time
    with LLM("demo", **settings, dtype=dtype, tp=tp) as llm:
        check_mixes(llm, dtype, 200, own=alone)


def test_fp8_with_the_heads_of_v3(settings, tmp_path):
    """Block scales, and the sizes that kernels are made for. With the mode and without it answers
    are as near transformers', in float32 of the same weights, as FP8 is held to be (docs/numerics).
    """
    oracle = Oracle(write_tiny_fp8(tmp_path, "v3", 3, **V3))
    greedy = SamplingParams(max_tokens=12, logprobs=2, ignore_eos=True)
    prompts = [[token % 131 for token in drawn(number)[0]] for number in range(REQUESTS)]
    judged, outputs = prompts_of(oracle), {}
    with LLM(tmp_path, **settings, dtype="bfloat16", chunked_prefill_size=96) as llm:
        single = [llm.generate(prompt, greedy)[0] for prompt in prompts]
        own = [bits_of(output) for output in single]
        for _ in range(2):
            together = llm.generate(prompts * 3, [greedy] * 3 * REQUESTS)
            assert [bits_of(output) for output in together] == own * 3
        assert [bits(scores) for scores in forced(llm, single, 2)] == own
        outputs["with --batch-invariant"] = llm.generate(judged, PARAMS)
    with LLM(tmp_path, **{**settings, "batch_invariant": False}, dtype="bfloat16") as plain:
        outputs["without it"] = plain.generate(judged, PARAMS)
    unit = fmean(errors_in_bfloat16(oracle, judged))
    means = {side: fmean(errors(oracle, made, made=True)) for side, made in outputs.items()}
    print(f"mean errors {means}, of transformers' bfloat16 {unit}")
    assert not {side: mean for side, mean in means.items() if mean > LIMIT * unit}, (means, unit)
