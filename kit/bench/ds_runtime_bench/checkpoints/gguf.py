"""A checkpoint as a GGUF file of architecture `deepseek2`, for engines that read that format.

The values are those of the checkpoint: 16-bit and 32-bit floats as they are, quantised weights
dequantised to the checkpoint's dtype, norms and routers in float32. Written tensor by tensor, so
that memory holds one stack of experts at most. The package `gguf` names the tensors and writes the
file. There is no tokenizer in it: it is for measuring with token ids.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ds_runtime.assembly.assemble import find_loader
from ds_runtime.checkpoint.shards import Checkpoint
from ds_runtime.common.progress import Progress
from ds_runtime.description.config import ModelConfig
from ds_runtime.description.hf import load_config
from ds_runtime.description.structure import stored_modules
from ds_runtime.description.tree import Stored
from ds_runtime.errors import ConfigError, UnsupportedError
from ds_runtime.ops.contract import DeviceInfo, Facts
from ds_runtime.ops.dtypes import torch_dtype
from ds_runtime.plugins.manager import load_plugins
from ds_runtime.weights.quant import PartRequest, Quant

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
    import gguf

    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.DEEPSEEK2, config.layers)

    def named(module: str) -> str:
        """In the file, which says bias only where a weight has one beside it."""
        base = module.removesuffix("_bias")
        found = names.get_name(base)
        assert found is not None, f"the GGUF architecture has no {module}"
        return f"{found}.{'weight' if base == module else 'bias'}"

    dtype = torch_dtype(config.dtype)
    for module, found in stored.items():
        if found.stack is not None:
            before, _, short = module.rpartition(".")
            if found.stack.number == 0:
                experts = before.removesuffix(".0")
                each = tuple(f"{experts}.{e}.{short}" for e in range(config.experts))
                shape = (config.experts, *found.shape)
                yield Target(named(f"{experts}.{short}"), shape, dtype, each)
        elif module.endswith(".kv_b_proj"):
            attention = module.removesuffix(".kv_b_proj")
            nope, v = config.qk_nope, config.v_head
            for half, shape, rows, transpose in (
                ("k_b_proj", (config.heads, config.kv_lora, nope), slice(0, nope), True),
                ("v_b_proj", (config.heads, v, config.kv_lora), slice(nope, nope + v), False),
            ):
                yield Target(named(f"{attention}.{half}"), shape, dtype, (module,), rows, transpose)
        else:
            small = len(found.shape) == 1 or module.endswith(_FLOAT32)
            kind = torch.float32 if small else dtype
            yield Target(named(module), found.shape, kind, (module,))


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
            f"mscale {y.mscale} and mscale_all_dim {y.mscale_all_dim}: GGUF knows one of both"
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
