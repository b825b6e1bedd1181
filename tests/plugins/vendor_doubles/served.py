"""A whole engine on a vendor's plugin and its stand-ins: the described device computes here."""

from __future__ import annotations

import types
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ds_runtime import LLM, SamplingParams
from ds_runtime.api import DeviceInfo, hookimpl
from ds_runtime.platform.described import describe
from ds_runtime.plugins import load_plugins
from ds_runtime_cpu.platform import CpuPlatform


def on_host(plugin: str, device: str, without: Sequence[str] = ("triton",)) -> DeviceInfo:
    """A device that the plugin describes, of torch's type "cpu"."""
    info = describe(load_plugins([plugin]), device).info()
    return replace(info, type="cpu", features=info.features - set(without))


def _platform(info: DeviceInfo) -> types.ModuleType:
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


def prompt_logprobs(
    folder: Path | str, prompts: Sequence[list[int]], plugin: str, device: str, **settings: Any
) -> tuple[list[torch.Tensor], dict[str, set[str]]]:
    """Per prompt, the log-probabilities of its tokens after the first and of four that follow
    greedily; and op → kernels that computed. `plugin`: "" for the references alone.
    """
    info = on_host(plugin, device) if plugin else DeviceInfo("cpu", "host", "host")
    given: dict[str, Any] = {
        "platform": "double",
        "plugins": (plugin or "triton",),  # portable kernels refuse a host without a compiler
        "context_length": 256,
        "threads": 1,
        "kv_memory": "16MB",
        "dtype": "bfloat16",
    }
    params = SamplingParams(max_tokens=4, logprobs=1, prompt_logprobs=1, ignore_eos=True)
    with LLM(folder, **given | settings, extra_plugins=[_platform(info)]) as llm:
        outputs = llm.generate(list(prompts), params)
        rows = llm.plan.rows
    found: dict[str, set[str]] = {}
    for row in rows:
        found.setdefault(row.op, set()).add(row.kernel)
    told = []
    for output in outputs:
        entries = [*output.prompt_logprobs[1:], *output.logprobs]
        told.append(torch.tensor([e.logprob for e in entries]))
    return told, found
