"""The files of the demo's sibling of the DeepSeek-V4 architecture: config, formats, tensors."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from demo_files import save_tensors, write_json

if TYPE_CHECKING:
    from demo_model import Config
    from demo_v4_model import DemoV4

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MIDDLES = tuple((a + b) / 2 for a, b in pairwise(E2M1))
STREAMS, ROUNDS, EPS = 2, 20, 1e-6


def config_of(demo: Config) -> Config:
    """config.json of the sibling."""
    same = (
        "bos_token_id", "eos_token_id", "pad_token_id", "hidden_act", "hidden_size", "vocab_size",
        "max_position_embeddings", "moe_intermediate_size", "n_routed_experts",
        "num_experts_per_tok", "n_shared_experts", "num_attention_heads", "num_hidden_layers",
        "norm_topk_prob", "q_lora_rank", "qk_rope_head_dim", "rms_norm_eps", "rope_theta",
        "routed_scaling_factor", "tie_word_embeddings", "torch_dtype", "use_cache",
    )  # fmt: skip
    kept = ("type", "factor", "original_max_position_embeddings", "beta_fast", "beta_slow")
    yarn = {key: demo["rope_scaling"][key] for key in kept}
    return {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        **{key: demo[key] for key in same},
        "num_key_value_heads": 1,
        # latents, dims of queries alone, and turned ones
        "head_dim": demo["hidden_size"] + demo["q_lora_rank"] + demo["qk_rope_head_dim"],
        "o_groups": demo["num_attention_heads"],
        "o_lora_rank": demo["v_head_dim"],
        "num_hash_layers": 1,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "swiglu_limit": 10.0,
        "compress_ratios": [0, 0, 4, 128, 4],
        "sliding_window": 512,
        "index_n_heads": 4,
        "index_head_dim": 64,
        "index_topk": 2048,
        "hc_mult": STREAMS,
        "hc_sinkhorn_iters": ROUNDS,
        "hc_eps": EPS,
        "compress_rope_theta": demo["rope_theta"],
        "rope_scaling": yarn,
        "num_nextn_predict_layers": 0,
        "expert_dtype": "fp4",
        "quantization_config": {
            "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
            "weight_block_size": [128, 128], "scale_fmt": "ue8m0",
        },
    }  # fmt: skip


@cache
def _table(values: tuple[float, ...], device: torch.device) -> Tensor:
    """On the device once: a copy at each step would wait for all that is under way there."""
    return torch.tensor(values, device=device)


def _fp4(x: Tensor) -> tuple[Tensor, Tensor]:
    """(codes of two's values, exponents of each 32 columns) of x [..., columns]."""
    parts = x.detach().unflatten(-1, (-1, 32))
    exponents = (parts.abs().amax(-1, keepdim=True).clamp(min=2.0**-100) / 6).log2().ceil()
    scaled = parts / exponents.exp2()
    codes = torch.bucketize(scaled.abs(), _table(MIDDLES, x.device)) + 8 * (scaled < 0)
    return codes.flatten(-2), exponents.squeeze(-1)


def rounded_experts(x: Tensor) -> Tensor:
    """x as e2m1 with an exponent for each 32 columns holds it; the gradient is that of x."""
    codes, exponents = _fp4(x)
    values = _table(E2M1, x.device)[codes % 8] * (1 - 2 * (codes // 8))
    values = values * exponents.exp2().repeat_interleave(32, -1)
    return x + (values - x).detach()


def _fp4_tensors(name: str, x: Tensor) -> dict[str, Tensor]:
    codes, exponents = _fp4(x)
    pairs = codes.to(torch.uint8)
    scale = (exponents + 127).to(torch.uint8).view(torch.float8_e8m0fnu)
    packed = (pairs[:, ::2] | pairs[:, 1::2] << 4).view(torch.int8)
    return {f"{name}.weight": packed.contiguous(), f"{name}.scale": scale.contiguous()}


def _fp8_tensors(name: str, x: Tensor) -> dict[str, Tensor]:
    rows, columns = (-(-n // 128) for n in x.shape)
    wide = torch.zeros(rows * 128, columns * 128)
    wide[: x.shape[0], : x.shape[1]] = x.detach()
    blocks = wide.view(rows, 128, columns, 128)
    exponents = (blocks.abs().amax((1, 3)).clamp(min=2.0**-100) / 448).log2().ceil()
    held = (blocks / exponents.exp2().view(rows, 1, columns, 1)).view_as(wide)
    held = held[: x.shape[0], : x.shape[1]].to(torch.float8_e4m3fn)
    scale = (exponents + 127).to(torch.uint8).view(torch.float8_e8m0fnu)
    return {f"{name}.weight": held.contiguous(), f"{name}.scale": scale.contiguous()}


def _streams(at: str, hidden: int, rows: int, scales: int) -> dict[str, Tensor]:
    """Of streams that are alike: their mean is read, and each gets what is written."""
    base = torch.zeros(rows)
    base[:STREAMS] = -torch.tensor(STREAMS - 1.0).log()  # the sigmoid of which is 1 / streams
    return {
        f"{at}_fn": torch.zeros(rows, STREAMS * hidden),
        f"{at}_base": base,
        f"{at}_scale": torch.ones(scales),
    }


def _compressor(at: str, c: Any) -> dict[str, Tensor]:
    return {
        f"{at}.ape": c.ape.detach(),
        f"{at}.wkv.weight": c.wkv.detach().bfloat16(),
        f"{at}.wgate.weight": c.wgate.detach().bfloat16(),
        f"{at}.norm.weight": c.norm.detach().bfloat16(),
    }


def write_v4(model: DemoV4, folder: Path) -> int:
    """The checkpoint with native names and formats; returns the size of its weights in bytes."""
    from demo_v4_model import Compressor

    c = model.config
    hidden, streams = c["hidden_size"], 2 + STREAMS
    made = {
        "embed.weight": model.embed.detach().bfloat16(),
        "head.weight": model.head.detach().bfloat16(),
        "norm.weight": model.norm.detach().bfloat16(),
        **_streams("hc_head", hidden, STREAMS, 1),
    }
    for n, (attn, moe) in enumerate(zip(model.attns, model.moes, strict=True)):
        at = f"layers.{n}"
        for k, site in enumerate(("attn", "ffn")):
            made |= _streams(f"{at}.hc_{site}", hidden, STREAMS * streams, 3)
            made[f"{at}.{site}_norm.weight"] = model.norms[n, k].detach().bfloat16()
        made[f"{at}.attn.attn_sink"] = torch.full((attn.heads,), -1e4)
        made[f"{at}.attn.q_norm.weight"] = torch.ones(c["q_lora_rank"]).bfloat16()
        made[f"{at}.attn.kv_norm.weight"] = attn.kv_norm.detach().bfloat16()
        for name in ("wq_a", "wq_b", "wkv", "wo_b"):
            made |= _fp8_tensors(f"{at}.attn.{name}", getattr(attn, name))
        made |= _fp8_tensors(f"{at}.attn.wo_a", attn.wo_a.flatten(0, 1))
        if attn.compressor is not None:
            made |= _compressor(f"{at}.attn.compressor", attn.compressor)
        if attn.compressor is not None and attn.compressor.overlap:
            heads, dim = c["index_n_heads"], c["index_head_dim"]
            generator = torch.Generator().manual_seed(1)
            keys = Compressor(4, hidden, dim)
            for p in (keys.wkv, keys.wgate):
                p.data.normal_(0, 0.02, generator=generator)
            at_i = f"{at}.attn.indexer"
            made |= _compressor(f"{at_i}.compressor", keys)
            query = torch.randn(heads * dim, c["q_lora_rank"], generator=generator) * 0.02
            made |= _fp8_tensors(f"{at_i}.wq_b", query)
            made[f"{at_i}.weights_proj.weight"] = torch.ones(heads, hidden).bfloat16() * 0.02
        made[f"{at}.ffn.gate.weight"] = moe.gate.detach().bfloat16()
        if moe.hashed:
            made[f"{at}.ffn.gate.tid2eid"] = moe.table
        else:
            made[f"{at}.ffn.gate.bias"] = moe.bias
        pairs = [(f"experts.{e}", moe.gate_up[e], moe.down[e], _fp4_tensors)
                 for e in range(moe.experts)]  # fmt: skip
        pairs.append(("shared_experts", moe.shared_gate_up, moe.shared_down, _fp8_tensors))
        for name, gate_up, down, held in pairs:
            gate, up = gate_up.detach().chunk(2)
            for part, x in (("w1", gate), ("w3", up), ("w2", down)):
                made |= held(f"{at}.ffn.{name}.{part}", x)
    write_json(folder / "config.json", c)
    save_tensors({k: v.contiguous() for k, v in made.items()}, folder / "model.safetensors")
    return sum(v.nbytes for v in made.values())
