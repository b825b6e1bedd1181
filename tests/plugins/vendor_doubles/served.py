"""A whole engine on a vendor's plugin and its stand-ins: the described device computes here."""

from __future__ import annotations

import random
import statistics
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ds_runtime import LLM, SamplingParams
from ds_runtime.api import DeviceInfo, hookimpl
from ds_runtime.plugins.described_devices import describe
from ds_runtime.plugins.manager import load_plugins
from ds_runtime_cpu.platform import CpuPlatform

LENGTHS = (70, 9, 1)
COMPILERS = ("triton", "tilelang")  # make no code for the host
TRUE: dict[str, Any] = {  # widths that vendors' kernels are made for, in a checkpoint of 10 MB
    "hidden_size": 256,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "q_lora_rank": 128,
}
INDEXED = {**TRUE, "index_head_dim": 128, "index_n_heads": 16}


def on_host(plugin: str, device: str, without: Sequence[str] = COMPILERS) -> DeviceInfo:
    """A device that the plugin describes, of torch's type "cpu"."""
    info = describe(load_plugins([plugin]), device).info()
    return replace(info, type="cpu", features=info.features - set(without))


def platform(info: DeviceInfo) -> types.ModuleType:
    """A plugin whose platform "double" is that device."""
    made = types.ModuleType("double")

    class Double(CpuPlatform):
        name = "double"
        score = -1

        def info(self, rank: int = 0) -> DeviceInfo:
            return info

    def ds_platform() -> CpuPlatform:
        return Double()

    made.ds_platform = hookimpl(ds_platform)
    return made


@dataclass(frozen=True)
class Told:
    """What an engine answered. error: of its log-probabilities of prompts and answers, the mean
    distance from the oracle's. kernels: op → those that computed.
    """

    error: float
    kernels: dict[str, set[str]]


def serve(
    folder: Path | str,
    model: Any,
    plugin: str,
    device: str,
    without: Sequence[str] = (),
    **settings: Any,
) -> Told:
    """An engine on `plugin` against transformers' float32 `model` of the same values.

    A prompt of several chunks and pages, a short one and one of a single token run together.
    """
    info = on_host(plugin, device, (*COMPILERS, *without))
    given: dict[str, Any] = {
        "platform": "double",
        "plugins": (plugin,),
        "context_length": 256,
        "threads": 1,
        "kv_memory": "16MB",
        "dtype": "bfloat16",
        "page_size": 64,
        "chunked_prefill_size": 24,
    }
    draw = random.Random(7)
    prompts = [[draw.randrange(model.config.vocab_size) for _ in range(n)] for n in LENGTHS]
    params = SamplingParams(max_tokens=6, logprobs=1, prompt_logprobs=1, ignore_eos=True)
    with LLM(folder, **given | settings, extra_plugins=[platform(info)]) as llm:
        outputs = llm.generate(prompts, params)
        rows = llm.plan.rows
    kernels: dict[str, set[str]] = {}
    for row in rows:
        kernels.setdefault(row.op, set()).add(row.kernel)
    return Told(statistics.mean(_errors(model, outputs)), kernels)


def answers(
    folder: Path | str, plugin: str, device: str, **settings: Any
) -> tuple[list[tuple[int, ...]], dict[str, set[str]]]:
    """Greedy token ids of an engine there, and its kernels by op."""
    info = on_host(plugin, device)
    given = {"platform": "double", "plugins": (plugin,), "threads": 1, "dtype": "bfloat16"}
    given |= {"context_length": 256, "kv_memory": "16MB"}
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    with LLM(folder, **given | settings, extra_plugins=[platform(info)]) as llm:
        outputs = llm.generate([[5, 9, 2, 7], [11] * 40], params)
        kernels: dict[str, set[str]] = {}
        for row in llm.plan.rows:
            kernels.setdefault(row.op, set()).add(row.kernel)
        return [tuple(o.token_ids) for o in outputs], kernels


def demo(plugin: str, device: str) -> tuple[str, set[str]]:
    """What the embedded demo model answers to a sum there, and the providers that computed."""
    given = {"platform": "double", "plugins": (plugin,), "threads": 1, "dtype": "bfloat16"}
    with LLM("demo", **given, extra_plugins=[platform(on_host(plugin, device))]) as llm:
        messages = [{"role": "user", "content": "What is 123 + 456?"}]
        (output,) = llm.chat(messages, SamplingParams(max_tokens=64, temperature=0))
        return output.text, {row.provider for row in llm.plan.rows}


def _errors(model: Any, outputs: Sequence[Any]) -> Iterator[float]:
    for output in outputs:
        tokens = [*output.prompt_token_ids, *output.token_ids]
        with torch.no_grad():
            want = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
        entries = [*output.prompt_logprobs[1:], *output.logprobs]
        for i, entry in enumerate(entries):
            yield abs(entry.logprob - float(want[i, tokens[i + 1]]))
