"""PEFT folders for tests: random adapters, and their weights merged by hand in float64."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ds_runtime.description.adapter import adaptable_modules
from ds_runtime.description.config import ModelConfig

Wanted = Callable[[str], bool]


def write_adapter(
    folder: Path,
    config: ModelConfig,
    wanted: Wanted = lambda module: True,
    *,
    rank: int = 4,
    alpha: float = 8.0,
    rslora: bool = False,
    seed: int = 0,
    **settings: Any,
) -> dict[str, Tensor]:
    """A random adapter of the modules that are wanted, as PEFT writes it; B·A · scaling of each.

    Deltas are about a third as large as the tiny models' weights: nobody can mistake them.
    """
    draw = torch.Generator().manual_seed(seed)
    scaling = alpha / (math.sqrt(rank) if rslora else rank)
    tensors, deltas = dict[str, Tensor](), dict[str, Tensor]()
    for module, stored in adaptable_modules(config).items():
        if wanted(module):
            out, width = stored.shape
            a = torch.randn(rank, width, generator=draw) * width**-0.5
            b = torch.randn(out, rank, generator=draw) * 0.3 / scaling
            tensors[f"base_model.model.{module}.lora_A.weight"] = a
            tensors[f"base_model.model.{module}.lora_B.weight"] = b
            deltas[module] = b.double() @ a.double() * scaling
    folder.mkdir(parents=True, exist_ok=True)
    said = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha,
        "use_rslora": rslora,
        "target_modules": sorted({m.rpartition(".")[2] for m in deltas}),
        "bias": "none",
        **settings,
    }
    (folder / "adapter_config.json").write_text(json.dumps(said), encoding="utf-8")
    save_file(tensors, folder / "adapter_model.safetensors")
    return deltas


def change_adapter(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    """Rewrite an adapter's tensors."""
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def change_config(folder: Path, **values: Any) -> None:
    """Rewrite keys of an adapter_config.json."""
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}), encoding="utf-8")


def merge(model: Any, deltas: Mapping[str, Tensor]) -> None:
    """Add deltas to a transformers model in place, each summed in float64."""
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for module, delta in deltas.items():
            at, dot, rest = module.partition(".experts.")
            if not dot:
                if module == "lm_head" and model.config.tie_word_embeddings:
                    model.config.tie_word_embeddings = False
                    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
                    parameters["lm_head.weight"] = model.lm_head.weight
                target = parameters[f"{module}.weight"]
            else:
                index, _, name = rest.partition(".")
                stack = "down_proj" if name == "down_proj" else "gate_up_proj"
                target = parameters[f"{at}.experts.{stack}"][int(index)]
                if name != "down_proj":
                    half = target.shape[0] // 2
                    target = target[half:] if name == "up_proj" else target[:half]
            target.copy_((target.double() + delta).to(target.dtype))


def some_modules(config: ModelConfig, share: float, seed: int) -> Iterable[str]:
    """A random part of the modules that an adapter may change."""
    draw = random.Random(seed)
    return [m for m in adaptable_modules(config) if draw.random() < share]
