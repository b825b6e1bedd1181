"""The calls that a step is taken to make are those that the model makes."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from ds_runtime import LLM, SamplingParams
from ds_runtime.assembly.assemble import assemble
from ds_runtime.assembly.crossing import Crossing
from ds_runtime.config import EngineConfig
from ds_runtime.ops.binding.bound import BoundOps
from ds_runtime.predict.busiest import busiest_rank
from ds_runtime.predict.calls import Step, calls, crossed
from ds_runtime_bench.shapes import config_of

ASKED = ("pack", "state", "prepare", "quantizes", "gives_float32", "hold_second_form", "serves")
PROMPT = 24


class Watched:
    """A kernel whose calls are noted: (kernel, method, rows)."""

    def __init__(self, kernel, made, noted):
        self._kernel, self._made, self._noted = kernel, made, noted

    def __call__(self, *args, **more):
        self._noted.append((self._kernel, "", rows_of(args)))
        return self._made(*args, **more)

    def __getattr__(self, name):
        found = getattr(self._made, name)
        if name in ASKED or name.startswith("_") or not callable(found):
            return found

        def call(*args, **more):
            self._noted.append((self._kernel, name, rows_of(args)))
            return found(*args, **more)

        return call


def rows_of(args):
    return next(a.shape[0] for a in args if hasattr(a, "shape"))


def folder_of(path, shape, dtype, **changes):
    path.mkdir(exist_ok=True)
    config = config_of(shape, dtype) | {"num_nextn_predict_layers": 0} | changes
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


@pytest.fixture
def noted(monkeypatch):
    """Calls of kernels, as an engine that starts from now on makes them."""
    found = []
    load = BoundOps._load

    def watched(self, kernel, key):
        made = load(self, kernel, key)
        seen = Watched(kernel, made, found)
        for state, held in self.stateful.items():
            if held is made:
                self.stateful[state] = seen
        return seen

    monkeypatch.setattr(BoundOps, "_load", watched)
    return found


SETTINGS = {
    "platform": "cpu",
    "load_format": "dummy",
    "threads": 1,
    "kv_memory": 8_000_000,
    "context_length": 256,
    "disable_radix_cache": True,
    "disable_graph": True,
    "disable_prefill_graph": True,
}


def kinds(found):
    """By method; the head's sums may come as they are, and codes go where kernels take them."""
    plain = {"apply_float32": "apply", "apply_quantized": "apply"}
    return Counter((k.op.name, plain.get(method, method)) for k, method, _ in found)


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8"])
@pytest.mark.parametrize(
    ("shape", "length"),
    [("tiny-v3", PROMPT), ("tiny-v2-lite", PROMPT), ("tiny-v32", PROMPT), ("tiny-v32", 9)],
)
def test_a_step_makes_the_calls_that_are_counted(tmp_path, noted, shape, length, dtype):
    """All methods and how often, of a decode step and of one with prompts; where attention is
    sparse, of prompts that see more tokens than they attend, and of others."""
    model = folder_of(tmp_path / "model", shape, dtype)
    params = SamplingParams(max_tokens=3, ignore_eos=True, temperature=0.0)
    prompts = [[1 + i] * length for i in range(2)]
    with LLM(model, **SETTINGS) as llm:
        noted.clear()
        llm.generate(prompts, params)
        made = list(noted)
    steps, step = [], []
    for call in made:
        step.append(call)
        if call[0].op.name == "sample":
            steps.append(step)
            step = []
    settings = {**SETTINGS, "model": model}
    assembly = assemble(EngineConfig(**settings), set(settings))
    first, last = Step("prefill", 2 * length, 2, 0, 2), Step("decode", 2, 2, length)
    for step, seen in ((first, steps[0]), (last, steps[-1])):
        told = Counter()
        for call in calls(assembly, step):
            method = "apply" if call.method == "apply_quantized" else call.method
            told[call.op, method] += call.count
        assert told == kinds(seen), step.phase


MESHES = (
    {"tp": 2},
    {"tp": 4},
    {"tp": 4, "dp": 2, "enable_dp_attention": True},
    {"tp": 2, "dp": 2, "enable_dp_attention": True},
    {"tp": 2, "dp": 2, "enable_dp_attention": True, "ep": 2},
    {"tp": 4, "dp": 2, "enable_dp_attention": True, "ep": 4},
    {"tp": 4, "ep": 2},
)
RECEIVED = {  # shares of the whole that a rank of n receives
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "gather_rows": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
}


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("requests", [1, 8, 33])
def test_collectives_are_as_many_and_as_large_as_the_wire_says(tmp_path, mesh, requests):
    model = folder_of(tmp_path / "model", "tiny-v3", "bfloat16")
    settings = {**SETTINGS, **mesh, "model": model}
    assembly = assemble(EngineConfig(**settings), set(settings))
    own = -(-requests // assembly.mesh.attn_dp)
    rows = own * assembly.mesh.attn_dp
    found = list(crossed(assembly, Step("decode", rows, rows)))
    wire = Crossing.of(assembly).wire(assembly.model.layers, own)
    assert sum(one.count for one in found) == wire.collectives
    told = sum(one.count * one.nbytes * RECEIVED[one.kind](one.ranks) for one in found)
    groups = assembly.mesh.attn_dp
    tokens = 8 * rows * (groups - 1) / groups  # ids, which the wire leaves out
    assert told == pytest.approx(wire.row * rows + tokens, rel=1e-9)


@pytest.mark.parametrize("mesh", [MESHES[0], *MESHES[3:5]], ids=str)
def test_a_rank_computes_its_own_rows_or_those_of_all_groups(tmp_path, mesh):
    """As many FLOPs in all ranks together as one has without them, where nothing is twice. Of
    experts by number a rank has more than its part: it is the busiest."""
    folder = tmp_path / "model"
    model = folder_of(folder, "tiny-v3", "bfloat16", n_shared_experts=0, num_hidden_layers=2)
    step = Step("decode", 16, 16, 64)

    def flops(**more):
        settings = {**SETTINGS, **more, "model": model}
        assembly = assemble(EngineConfig(**settings), set(settings))
        found = Counter()
        for call in calls(assembly, step):
            if call.op in ("experts", "mla_decode") or (
                call.op == "linear" and call.method.startswith("apply")
            ):
                found[call.op] += call.count * call.work(call.rows).flops
        return assembly, found

    (_, alone), (ranks, each) = flops(), flops(**mesh)
    routing, ranks = ranks.model.routing, ranks.mesh
    most = busiest_rank(routing, ranks.ep, step.rows).choices / (step.rows * routing.top_k)
    assert (most > 1 / ranks.ep) == (ranks.ep > 1)
    share = most * ranks.ep / ranks.tp
    assert each["experts"] == pytest.approx(share * alone["experts"])
    assert ranks.tp * each["mla_decode"] == pytest.approx(alone["mla_decode"])
    assert each["linear"] <= alone["linear"] <= ranks.tp * each["linear"] * (1 + 1e-9)


def test_flops_of_a_prompt_are_those_that_transformers_computes(tmp_path):
    """As torch counts them. Its attention computes whole squares, and its angles are a matmul."""
    import transformers

    model, tokens = folder_of(tmp_path / "model", "tiny-v2-lite", "bfloat16"), 40
    assembly = assemble(EngineConfig(**SETTINGS, model=model), {*SETTINGS, "model"})
    products = {"linear", "mla_absorb", "router_logits", "experts", "mha_prefill"}
    found = sum(
        call.count * call.work(call.rows).flops
        for call in calls(assembly, Step("prefill", tokens, tokens))
        if call.op in products
    )
    raw = config_of("tiny-v2-lite", "bfloat16") | {"_attn_implementation": "eager"}
    config = transformers.DeepseekV2Config(**raw)
    config._experts_implementation = "eager"
    theirs = transformers.DeepseekV2ForCausalLM(config).eval()
    with torch.inference_mode(), FlopCounterMode(display=False) as counter:
        theirs(torch.randint(512, (1, tokens)))
    own = assembly.model
    masked = tokens * (tokens - 1) * own.heads * (own.qk_head + own.v_head) * own.layers
    want = counter.get_total_flops() - masked - own.qk_rope * tokens
    assert found == pytest.approx(want, rel=1e-4)


@given(st.integers(1, 8), st.integers(1, 9), st.integers(1, 300))
def test_groups_are_filled_up_to_the_one_with_the_most_prompts(groups, count, each):
    """A prompt is of one group, however long it is."""
    step = Step("prefill", count * each, count, 0, count)
    shares = [sum(each for i in range(count) if i % groups == group) for group in range(groups)]
    assert step.most(groups) == max(shares)
    assert Step("decode", count, count, each).most(groups) == -(-count // groups)


def test_behind_the_last_attention_few_rows_are_wanted(tmp_path):
    """Those whose logits are, of the FFN of the last layer alone."""
    model = folder_of(tmp_path / "model", "tiny-v3", "bfloat16")
    settings = {**SETTINGS, "model": model}
    assembly = assemble(EngineConfig(**settings), set(settings))
    routed = [c.rows for c in calls(assembly, Step("prefill", 96, 2, 0, 2)) if c.op == "experts"]
    assert assembly.model.layers == 3 and routed == [96, 2]
    every = [c.rows for c in calls(assembly, Step("prefill", 3, 3, 0, 3)) if c.op == "experts"]
    assert every == [3, 3]


@pytest.mark.parametrize("rows", [1, 2, 8, 9, 64])
def test_no_norm_makes_codes_for_a_weight_that_takes_rows_as_they_are(tmp_path, rows):
    """Linears of few rows: cuda.LinearFewFp8 says that it rounds none."""
    model = folder_of(tmp_path / "model", "v3-slice", "fp8")
    settings = {"model": model, "load_format": "dummy", "plugins": ("cuda", "triton")}
    assembly = assemble(
        EngineConfig(**settings), set(settings), device="h200", without=("deep_gemm", "flash_mla")
    )
    found = list(calls(assembly, Step("decode", rows, rows, 64)))
    few = [c for c in found if c.kernel.name == "cuda.LinearFewFp8"]
    made = Counter()
    for call in found:
        made[call.op] += call.count
    coding = {op: count for op, count in made.items() if op.endswith("_quantize")}
    assert bool(few) == (rows <= 8) and all(c.method == "apply" for c in few)
    layers = assembly.model.layers
    if rows <= 8:
        assert not coding
        assert made["add_rms_norm"] == 2 * layers  # the final one is one of them
        assert made["silu_mul"] == layers
    else:
        assert coding["add_rms_norm_quantize"] == layers - 1
        assert coding["silu_mul_quantize"] == layers
