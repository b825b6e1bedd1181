"""What an engine would compile for random requests once it has warmed up; a program of its own, in
which Triton's launches are recorded (tests/plugins/launches.py), or with --real on the accelerator
that is here, where compilations are counted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "plugins"))
import launches

from conftest import write_tokenizer
from ds_runtime import LLM, SamplingParams
from ds_runtime.description.hf import load_config
from ds_runtime.output_rules import OutputRules
from ds_runtime.platform import compilations
from ds_runtime_kit.models.adapters import write_adapter
from ds_runtime_kit.models.tiny import config_dict

VOCAB, CONTEXT = 512, 8192
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 2,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "max_position_embeddings": CONTEXT,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}


FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
    "activation_scheme": "dynamic",
}
NEXTN = {"speculative_algorithm": "NEXTN"}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # shape, config, settings
    "dense": ("v2-lite", {}, {}),
    "lora": ("v2-lite", {}, {"max_loras": 2, "max_lora_rank": 8}),
    "expanded": ("v2-lite", {}, {"disable_mla": True}),
    "op by op": ("v2-lite", {}, {"disable_graph": True}),
    "fp8": ("v3", {"quantization_config": FP8}, {"kv_cache_dtype": "fp8"}),
    "chain": ("v3", {"num_nextn_predict_layers": 1}, {**NEXTN, "speculative_num_steps": 3}),
    "tree": (
        "v3",
        {"num_nextn_predict_layers": 1},
        {**NEXTN, "speculative_num_steps": 3, "speculative_eagle_topk": 2},
    ),
    "sparse": ("v32", {"index_topk": 512, "index_head_dim": 128, "quantization_config": FP8}, {}),
}
RULES = (
    OutputRules(json_schema={"type": "object"}),
    OutputRules(regex="[ab]{4,}"),
    OutputRules(choice=("ab", "abc")),
)


def write(folder: Path, shape: str, **overrides) -> None:
    family, values = config_dict(shape, **{**SIZES, **overrides})
    kinds = {"DeepseekV2": "deepseek_v2", "DeepseekV3": "deepseek_v3"}
    kinds |= {"DeepseekV32": "deepseek_v32", "GlmMoeDsa": "glm_moe_dsa"}
    values |= {"architectures": [f"{family}ForCausalLM"], "model_type": kinds[family]}
    (folder / "config.json").write_text(json.dumps(values | {"torch_dtype": "bfloat16"}))
    write_tokenizer(folder)


def request(draw: random.Random, longest: int, known: list[list[int]], loras: list[str]):
    """(prompt, params, adapter), of which every kind of sampling is one."""
    length = draw.randint(1, longest)
    prompt = [draw.randrange(2, VOCAB)] * length
    if known and draw.random() < 0.3:
        prompt = (draw.choice(known) + prompt)[:longest]
    if draw.random() < 0.1:
        known.append(prompt)
    kind: dict[str, Any] = {"max_tokens": draw.choice((1, 2, 3, 8, 24)), "ignore_eos": True}
    if draw.random() < 0.5:
        kind |= {"temperature": 0.7, "top_k": draw.choice((0, 20)), "top_p": draw.choice((1, 0.9))}
        kind["min_p"] = draw.choice((0.0, 0.05))
    if draw.random() < 0.3:
        kind["logprobs"] = draw.choice((0, 1, 2, 5, 16, 20))
    if draw.random() < 0.1:
        kind["prompt_logprobs"] = draw.choice((0, 1, 3))
    if draw.random() < 0.2:
        kind |= {"presence_penalty": 0.5, "repetition_penalty": 1.1, "frequency_penalty": 0.1}
    if draw.random() < 0.2:
        kind["logit_bias"] = {7: 1.0}
    if draw.random() < 0.2:
        kind["min_tokens"] = 1
    if draw.random() < 0.1:
        kind |= {"rules": draw.choice(RULES), "ignore_eos": False, "max_tokens": 4}
    return prompt, SamplingParams(**kind), draw.choice([None, *loras]) if loras else None


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("folder", type=Path)
    options.add_argument("--case", default="dense", choices=CASES)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--requests", type=int, default=10_000)
    options.add_argument("--real", action="store_true")
    options.add_argument("--running", type=int, default=256)
    options.add_argument("--longest", type=int, default=4096)
    given = options.parse_args()
    shape, config, extra = CASES[given.case]
    write(given.folder, shape, **config)
    loras = list[str]()
    if "max_loras" in extra:
        model = load_config(given.folder)
        loras = ["a", "b"]
        for seed, name in enumerate(loras):
            write_adapter(given.folder / name, model, lambda m: "experts" not in m, seed=seed)
        extra = {**extra, "lora": tuple(f"{name}={given.folder / name}" for name in loras)}
    settings: dict[str, Any] = {
        "load_format": "dummy",
        "max_running_requests": given.running,
        **extra,
    }
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        made: Callable[[], Mapping[Any, Any]] = compilations.counted
        if not given.real:
            made = launches.COMPILED.copy
            stack.enter_context(launches.recording())
            settings |= {"plugins": ("triton", "checkpoints"), "platform": "described"}
            settings["extra_plugins"] = [launches]
        llm = stack.enter_context(LLM(given.folder, **settings))
        warm = made()
        print(f"{len(warm)} compilations after {time.monotonic() - began:.1f} s", flush=True)
        run(llm, random.Random(given.seed), given.requests, given.longest, loras)
        new = sorted(str(told) for key, told in made().items() if warm.get(key) != told)
    print(f"{given.requests} requests, {time.monotonic() - began:.1f} s, new: {len(new)}")
    print("\n".join(new))
    raise SystemExit(bool(new))


def run(llm: LLM, draw: random.Random, requests: int, longest: int, loras: list[str]) -> None:
    """So many requests, up to 256 at once."""
    known: list[list[int]] = []
    done = 0
    while done < requests:
        count = min(draw.choice((1, 2, 7, 40, 100, 256)), requests - done)
        most = draw.choice((16, 100, 700, longest))
        asked = [request(draw, most, known, loras) for _ in range(count)]
        llm.generate(*map(list, zip(*asked, strict=True)))
        done += count


if __name__ == "__main__":
    main()
