"""Tiny V3 checkpoints of every kind that is published: config, tensors, and what they mean."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from checkpoint_writers import (
    COMPRESSED,
    Tensors,
    Writer,
    awq,
    compressed,
    compressed_config,
    fp8,
    fp8_tensor,
    gptq,
    int8,
    mxfp4,
    nvfp4,
    w4afp8,
)
from safetensors.torch import load_file, save_file
from torch import Tensor

from ds_runtime_kit.models.tiny import write_tiny

# Widths that groups of 32 and words of eight divide.
WIDTHS = {"q_lora_rank": 64, "v_head_dim": 24, "num_hidden_layers": 2, "n_routed_experts": 8}
_LINEAR = re.compile(r"(_proj|kv_a_proj_with_mqa)\.weight$")
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
FP8 |= {"weight_block_size": [128, 128]}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False}
_FP4 = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}
_E4M3 = {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}


def _mixed(module: str, values: np.ndarray) -> tuple[Tensors, np.ndarray]:
    return (compressed("int4") if ".experts." in module else compressed("fp8-channel"))(
        module, values
    )


def _w4afp8(module: str, values: np.ndarray) -> tuple[Tensors, np.ndarray]:
    return (w4afp8 if ".experts." in module else fp8())(module, values)


def _quark(module: str, values: np.ndarray) -> tuple[Tensors, np.ndarray]:
    return (fp8_tensor if "o_proj" in module else mxfp4)(module, values)


# name → writer, quantization_config (None: hf_quant_config.json below), modules left dense
KINDS: dict[str, tuple[Writer, dict[str, Any], tuple[str, ...]]] = {
    "fp8": (fp8(), FP8, ()),
    "fp8 powers": (fp8("powers"), {**FP8, "scale_fmt": "ue8m0"}, ()),
    "fp8 e8m0": (fp8("e8m0"), {**FP8, "scale_fmt": "ue8m0"}, ()),
    "fp8 bytes": (fp8("byte"), {**FP8, "modules_to_not_convert": ["o_proj"]}, ("o_proj",)),
    "fp8 64x32": (fp8(block=(64, 32)), {**FP8, "weight_block_size": [64, 32]}, ()),
    "int8 blocks": (
        int8(128, "weight_scale_inv"),
        {"quant_method": "blockwise_int8", "weight_block_size": [128, 128]},
        (),
    ),
    "int8 rows": (int8(1, "weight_scale"), {"quant_method": "w8a8_int8"}, ()),
    "mxfp8": (
        fp8("byte", block=(1, 32)),
        {"quant_method": "mxfp8", "weight_block_size": [1, 32]},
        (),
    ),
    "awq": (awq, {**AWQ, "modules_to_not_convert": ["kv_b_proj"]}, ("kv_b_proj",)),
    "awq all": (awq, AWQ, ()),
    "gptq": (gptq(False), {**GPTQ, "desc_act": False}, ()),
    "gptq act-order": (gptq(True), {**GPTQ, "desc_act": True}, ()),
    "gptq v2": (gptq(False, 2), {**GPTQ, "checkpoint_format": "gptq_v2"}, ()),
    **{f"ct {kind}": (compressed(kind), compressed_config(kind), ()) for kind in COMPRESSED},
    "ct int4 head": (
        compressed("int4"),
        {**compressed_config("int4"), "ignore": ["re:.*self_attn.*"]},
        ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"),
    ),
    "ct mixed": (
        _mixed,
        {
            "quant_method": "compressed-tensors",
            "format": "mixed-precision",
            "ignore": ["lm_head", "re:.*self_attn\\.kv_b_proj"],
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "format": "float-quantized",
                    "weights": COMPRESSED["fp8-channel"][1],
                },
                "group_1": {
                    "targets": ["re:.*experts\\.\\d+\\..*"],
                    "format": "pack-quantized",
                    "weights": COMPRESSED["int4"][1],
                },
            },
        },
        ("kv_b_proj",),
    ),
    "w4afp8": (_w4afp8, {}, ()),
    "modelopt nvfp4": (nvfp4, {}, ("q_a_proj", "kv_a_proj_with_mqa", "kv_b_proj", "q_b_proj")),
    "modelopt fp8": (fp8_tensor, {}, ()),
    "quark": (
        _quark,
        {
            "quant_method": "quark",
            "global_quant_config": {"weight": _FP4, "input_tensors": {**_FP4, "is_dynamic": True}},
            "exclude": ["lm_head", "*self_attn.q_a_proj"],
            "layer_quant_config": {"*o_proj": {"weight": _E4M3}},
        },
        ("q_a_proj",),
    ),
}
_PRODUCER = {"name": "modelopt"}
BESIDE: dict[str, dict[str, Any]] = {
    "w4afp8": {"quantization": {"quant_algo": "MIXED_PRECISION"}},
    "modelopt nvfp4": {
        "producer": _PRODUCER,
        "quantization": {
            "quant_algo": "NVFP4",
            "kv_cache_quant_algo": "FP8",
            "group_size": 16,
            "exclude_modules": [
                "lm_head",
                *("*q_a_proj", "*self_attn.kv_a_proj_with_mqa*", "*kv_b_proj"),
                *(f"model.layers.{i}.self_attn.q_b_proj" for i in range(2)),
            ],
        },
    },
    "modelopt fp8": {"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}},
}


def write_kind(folder: Path, kind: str, seed: int = 0) -> Any:
    """A tiny V3 checkpoint of that kind; returns the transformers model that holds its values."""
    writer, config, dense = KINDS[kind]
    model = write_tiny(folder, "v3", seed, **WIDTHS)
    tensors = load_file(folder / "model.safetensors")
    meant = {}
    head = "lm_head" not in config.get("ignore", "lm_head")
    for name in [n for n in tensors if _LINEAR.search(n) or (head and n == "lm_head.weight")]:
        module = name.removesuffix(".weight")
        if any(module.endswith(d) for d in dense):
            continue
        made, values = writer(module, tensors.pop(name).double().numpy())
        above = module.rpartition(".")[0]
        for suffix, tensor in made.items():
            full = f"{above}.{suffix[3:]}" if suffix.startswith("../") else f"{module}.{suffix}"
            tensors[full] = tensor.contiguous()
        meant[name] = torch.from_numpy(np.ascontiguousarray(values)).float()
    if kind == "modelopt nvfp4":  # calibrated scales of a cache of keys and values
        tensors["model.layers.0.self_attn.k_proj.k_scale"] = torch.ones(())
        tensors["model.layers.0.self_attn.v_proj.v_scale"] = torch.ones(())
    save_file(tensors, folder / "model.safetensors")
    raw = json.loads((folder / "config.json").read_text())
    if config:
        raw["quantization_config"] = config
    (folder / "config.json").write_text(json.dumps(raw))
    if kind in BESIDE:
        (folder / "hf_quant_config.json").write_text(json.dumps(BESIDE[kind]))
    hold(model, meant)
    return model


def hold(model: Any, meant: dict[str, Tensor]) -> None:
    """Put values under checkpoint names into the transformers model, experts into their stacks."""
    own = dict(model.named_parameters())
    expert = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
    with torch.no_grad():
        for name, values in meant.items():
            if name in own:
                own[name].copy_(values)
                continue
            at, index, which = expert.fullmatch(name).groups()
            stack = own[f"{at}.{'down_proj' if which == 'down' else 'gate_up_proj'}"][int(index)]
            rows = values.shape[0]
            {"gate": stack[:rows], "up": stack[rows:], "down": stack}[which].copy_(values)
