"""The demo model's files: checkpoint, tokenizer and recipe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

import demo_text as dt
from demo_model import Config, DemoModel

SHARD_BYTES = 11_500_000


def write_tokenizer(tokenizer: Tokenizer, config: Config, folder: Path) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    flags = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
    table = {
        "add_bos_token": False,
        "add_eos_token": False,
        "added_tokens_decoder": {
            str(i): {"content": text, **flags, "special": special}
            for i, (text, special) in enumerate(dt.SPECIAL_TOKENS)
        },
        "bos_token": dt.BOS,
        "chat_template": dt.CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": dt.EOS,
        "model_max_length": config["max_position_embeddings"],
        "pad_token": dt.PAD,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }
    write_json(folder / "tokenizer_config.json", table)


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_recipe(path: Path, recipe: dict[str, Any]) -> None:
    """Write RECIPE.json with one line per point of a loss curve."""

    def laid(value: Any, at: str) -> str:
        inner = at + "  "
        if isinstance(value, dict):
            parts = (f"{inner}{json.dumps(str(k))}: {laid(v, inner)}" for k, v in value.items())
            return "{" + ",".join(parts) + at + "}"
        if isinstance(value, list) and any(isinstance(v, list) for v in value):
            return "[" + ",".join(inner + json.dumps(v) for v in value) + at + "]"
        return json.dumps(value)

    path.write_text(laid(recipe, "\n") + "\n")


def write_checkpoint(model: DemoModel, folder: Path) -> int:
    """Write the shards, their index and the configs; returns the weights' size in bytes."""
    write_json(folder / "config.json", model.config)
    write_json(folder / "generation_config.json", {
        "_from_model_config": True, "bos_token_id": 0, "eos_token_id": 1, "do_sample": True,
        "temperature": 0.6, "top_p": 0.95})  # fmt: skip
    shards: list[dict[str, Tensor]] = [{}]
    filled = total = 0
    for name, tensor in model.export().items():
        size = tensor.numel() * tensor.element_size()
        if filled + size > SHARD_BYTES:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor
        filled, total = filled + size, total + size
    weight_map = {}
    for i, shard in enumerate(shards, 1):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        save_tensors(shard, folder / file)
        weight_map.update(dict.fromkeys(shard, file))
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_json(folder / "model.safetensors.index.json", index)
    return total


def save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)


def load_checkpoint(folder: Path, device: str) -> DemoModel:
    """The checkpoint as a BF16 `DemoModel` (router bias and rotation tables in FP32)."""
    model = DemoModel(json.loads((folder / "config.json").read_text()))
    tensors = {k: v for f in sorted(folder.glob("*.safetensors")) for k, v in load_file(f).items()}
    for p in model.parameters():
        p.data = p.data.to(torch.bfloat16)
    state = model.state_dict()
    for name in list(state):
        if name.endswith(("mlp.gate_up", "mlp.down")):
            stem, kind = name.rsplit(".", 1)
            parts = ("gate_proj", "up_proj") if kind == "gate_up" else ("down_proj",)
            tensors[name] = torch.stack([
                torch.cat([tensors.pop(f"{stem}.experts.{e}.{p}.weight") for p in parts])
                for e in range(len(state[name]))])  # fmt: skip
    model.load_state_dict(tensors)
    return model.to(device).eval()
