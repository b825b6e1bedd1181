"""A checkpoint as a GGUF file of architecture `deepseek2`, for engines that read that format.

The values are those of the checkpoint: 16-bit and 32-bit floats as they are, quantised weights
dequantised to the checkpoint's dtype, norms and routers in float32. Written tensor by tensor, so
that memory holds one stack of experts at most. There is no tokenizer in the file: it is for
measuring with token ids. Needs the package `gguf`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ds_runtime.assemble import find_loader
from ds_runtime.errors import ConfigError, UnsupportedError
from ds_runtime.model.checkpoint import Checkpoint
from ds_runtime.model.config import ModelConfig
from ds_runtime.model.hf import load_config
from ds_runtime.model.manifest import Stored, stored_modules
from ds_runtime.model.quant import PartRequest, Quant
from ds_runtime.ops.reference.formats import torch_dtype
from ds_runtime.ops.spec import DeviceInfo, Facts
from ds_runtime.plugins import load_plugins
from ds_runtime.progress import Progress

_LAYER = {  # a layer's modules under their names in the file; kv_b_proj is cut in two
    "input_layernorm": "attn_norm.weight",
    "post_attention_layernorm": "ffn_norm.weight",
    "self_attn.q_proj": "attn_q.weight",
    "self_attn.q_a_proj": "attn_q_a.weight",
    "self_attn.q_a_layernorm": "attn_q_a_norm.weight",
    "self_attn.q_b_proj": "attn_q_b.weight",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa.weight",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm.weight",
    "self_attn.o_proj": "attn_output.weight",
    "mlp.gate_proj": "ffn_gate.weight",
    "mlp.up_proj": "ffn_up.weight",
    "mlp.down_proj": "ffn_down.weight",
    "mlp.gate": "ffn_gate_inp.weight",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp.weight",
    "mlp.shared_experts.up_proj": "ffn_up_shexp.weight",
    "mlp.shared_experts.down_proj": "ffn_down_shexp.weight",
}
_WHOLE = {
    "model.embed_tokens": "token_embd.weight",
    "model.norm": "output_norm.weight",
    "lm_head": "output.weight",
}
_EXPERTS = {"gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps"}
_FLOAT32 = ("mlp.gate", "mlp.gate.e_score_correction_bias")


@dataclass(frozen=True, slots=True)
class Target:
    """A tensor of the file: its shape, and the checkpoint's modules that it is made of."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    modules: tuple[str, ...]
    heads: slice | None = None  # of kv_b_proj: the rows of each head that belong here
    transpose: bool = False  # each head's matrix

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def make_gguf(model: Path, out: Path, progress: bool = False) -> Path:
    """Write the checkpoint folder `model` to the file `out`; returns `out`.

    Raises ConfigError without the package `gguf`, UnsupportedError for what the format's
    architecture cannot say, CheckpointError for damaged checkpoints.
    """
    try:
        import gguf
    except ImportError as e:
        raise ConfigError("make-gguf needs the package gguf: pip install gguf") from e
    config = load_config(model)
    _check(config)
    source = _Source(config, model)
    targets = list(plan_targets(config, source.stored))
    kinds = {
        torch.float32: gguf.GGMLQuantizationType.F32,
        torch.float16: gguf.GGMLQuantizationType.F16,
        torch.bfloat16: gguf.GGMLQuantizationType.BF16,
    }
    writer = gguf.GGUFWriter(out, gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH.DEEPSEEK2])
    for key, value in metadata(config, model.name).items():
        _add(writer, key, value)
    for t in targets:
        as_bytes = (*t.shape[:-1], t.shape[-1] * t.dtype.itemsize)
        element = torch.empty(0, dtype=torch.uint8).numpy().dtype
        writer.add_tensor_info(t.name, as_bytes, element, t.nbytes, kinds[t.dtype])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    with Progress(f"writing {out.name}", sum(t.nbytes for t in targets), enabled=progress) as bar:
        for t in targets:
            writer.write_tensor_data(source.read(t).contiguous().view(torch.uint8).numpy())
            bar.advance(t.nbytes)
    writer.close()
    source.checkpoint.close()
    return out


def metadata(c: ModelConfig, name: str) -> dict[str, str | int | float | bool]:
    """Keys and values that the architecture needs, without those that the writer adds itself."""
    arch, routing = "deepseek2", c.routing
    values: dict[str, str | int | float | bool] = {
        "general.name": name,
        f"{arch}.vocab_size": c.vocab_size,
        f"{arch}.block_count": c.layers,
        f"{arch}.context_length": c.max_positions,
        f"{arch}.embedding_length": c.hidden,
        f"{arch}.feed_forward_length": c.intermediate,
        f"{arch}.attention.head_count": c.heads,
        f"{arch}.attention.head_count_kv": 1,  # absorbed: one shared latent head
        f"{arch}.attention.layer_norm_rms_epsilon": float(c.eps),
        f"{arch}.attention.q_lora_rank": c.q_lora or 0,
        f"{arch}.attention.kv_lora_rank": c.kv_lora,
        f"{arch}.attention.key_length": c.latent,
        f"{arch}.attention.value_length": c.kv_lora,
        f"{arch}.attention.key_length_mla": c.qk_head,
        f"{arch}.attention.value_length_mla": c.v_head,
        f"{arch}.rope.dimension_count": c.qk_rope,
        f"{arch}.rope.freq_base": float(c.rope_theta),
        f"{arch}.leading_dense_block_count": c.first_dense if c.experts else c.layers,
        f"{arch}.expert_feed_forward_length": c.moe_intermediate or c.intermediate,
        f"{arch}.expert_shared_count": c.shared_experts,
        "tokenizer.ggml.model": "none",
    }
    if routing is not None:
        values |= {
            f"{arch}.expert_count": c.experts,
            f"{arch}.expert_used_count": routing.top_k,
            f"{arch}.expert_group_count": routing.n_group,
            f"{arch}.expert_group_used_count": routing.topk_group,
            f"{arch}.expert_gating_func": {"softmax": 1, "sigmoid": 2}[routing.scoring],
            f"{arch}.expert_weights_scale": float(routing.scale),
            f"{arch}.expert_weights_norm": routing.renormalize,
        }
    if (yarn := c.yarn) is not None:
        values |= {
            f"{arch}.rope.scaling.type": "yarn",
            f"{arch}.rope.scaling.factor": float(yarn.factor),
            f"{arch}.rope.scaling.original_context_length": yarn.original,
            f"{arch}.rope.scaling.yarn_beta_fast": float(yarn.beta_fast),
            f"{arch}.rope.scaling.yarn_beta_slow": float(yarn.beta_slow),
            # A tenth of it, which readers of this architecture multiply by ten.
            f"{arch}.rope.scaling.yarn_log_multiplier": 0.1 * yarn.mscale_all_dim,
        }
    return values


def plan_targets(config: ModelConfig, stored: dict[str, Stored]) -> Iterator[Target]:
    """Every tensor of the file, in the order in which it is written."""
    dtype = torch_dtype(config.dtype)
    for module, found in stored.items():
        if module in _WHOLE:
            plain = len(found.shape) == 1
            yield Target(_WHOLE[module], found.shape, torch.float32 if plain else dtype, (module,))
            continue
        layer, name = module.removeprefix("model.layers.").split(".", 1)
        block = f"blk.{layer}"
        if found.expert is not None:
            short = name.rpartition(".")[2]
            if found.expert[1] == 0:
                prefix, suffix = module.removesuffix(f"0.{short}"), f".{short}"
                each = tuple(f"{prefix}{e}{suffix}" for e in range(config.experts))
                shape = (config.experts, *found.shape)
                yield Target(f"{block}.{_EXPERTS[short]}.weight", shape, dtype, each)
        elif name == "self_attn.kv_b_proj":
            nope, v = config.qk_nope, config.v_head
            shape = (config.heads, config.kv_lora, nope)
            yield Target(f"{block}.attn_k_b.weight", shape, dtype, (module,), slice(0, nope), True)
            shape = (config.heads, v, config.kv_lora)
            rows = slice(nope, nope + v)
            yield Target(f"{block}.attn_v_b.weight", shape, dtype, (module,), rows)
        else:
            small = len(found.shape) == 1 or name in _FLOAT32
            kind = torch.float32 if small else dtype
            yield Target(f"{block}.{_LAYER[name]}", found.shape, kind, (module,))


class _Source:
    """Values of a checkpoint's modules, whatever its format."""

    def __init__(self, config: ModelConfig, folder: Path) -> None:
        facts = Facts(DeviceInfo("cpu", "", ""), config.dims())
        loader = find_loader(load_plugins(()).offers(facts), config, str(folder / "config.json"))
        self._quant = Quant.open(loader, config.quantization)
        self.stored = stored_modules(config, self._quant.format_of)
        self.checkpoint = Checkpoint(folder)

    def read(self, target: Target) -> Tensor:
        """The tensor's values in its shape and dtype."""
        if len(target.modules) > 1:
            out = torch.empty(target.shape, dtype=target.dtype)
            for i, module in enumerate(target.modules):
                out[i] = self._module(module, target.dtype)
            return out
        values = self._module(target.modules[0], target.dtype)
        if target.heads is None:
            return values.view(target.shape)
        heads = target.shape[0]
        part = values.view(heads, -1, values.shape[-1])[:, target.heads]
        return part.transpose(1, 2) if target.transpose else part

    def _module(self, module: str, dtype: torch.dtype) -> Tensor:
        stored = self.stored[module]
        place = self._quant.place(self.checkpoint, stored)
        if len(stored.shape) == 1 or not stored.format:
            return self.checkpoint.read(place.names[0]).to(dtype)
        rows, cols = stored.shape
        request = PartRequest(
            self.checkpoint,
            self._quant.quantization,
            module,
            self._quant.encoding(module),
            place,
            slice(0, rows),
            slice(0, cols),
        )
        return self._quant.read(request).dequantise(dtype)


def _check(c: ModelConfig) -> None:
    """Refuse what the architecture's metadata cannot say."""
    if c.moe_every != 1:
        raise UnsupportedError(f"moe_layer_freq {c.moe_every}: the GGUF architecture knows only 1")
    if not c.rope_interleave:
        raise UnsupportedError("rope_interleave false: the GGUF architecture rotates pairs")
    if c.routing is not None and c.routing.method == "group_limited_greedy":
        raise UnsupportedError("topk_method group_limited_greedy has no GGUF counterpart")
    if (y := c.yarn) is not None and y.mscale != y.mscale_all_dim:
        raise UnsupportedError(
            f"mscale {y.mscale} beside mscale_all_dim {y.mscale_all_dim}: GGUF knows one of both"
        )


def _add(writer: Any, key: str, value: str | int | float | bool) -> None:
    """One key with the type that readers expect: whole numbers are uint32."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_string(key, value)
