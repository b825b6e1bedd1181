"""The demo model in plain torch: DeepSeek-V3 with one MTP layer, written for training.

Parameter names are the checkpoint's, except that routed experts are stacked. Every expert is
computed for every token and the ones that were not routed to are multiplied by zero: the same
maths as top-k routing, and quick for eight small experts.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Config = dict[str, Any]


def demo_config(vocab_size: int) -> Config:
    """The published config.json of the demo model."""
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "hidden_size": 256,
        "initializer_range": 0.02,
        "intermediate_size": 512,
        "kv_lora_rank": 512,
        "max_position_embeddings": 8192,
        "model_type": "deepseek_v3",
        "moe_intermediate_size": 128,
        "moe_layer_freq": 1,
        "n_group": 4,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 4,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 5,
        "num_key_value_heads": 4,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": 128,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-6,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 4,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 2048,
            "type": "yarn",
        },
        "rope_theta": 10000,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_group": 2,
        "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "v_head_dim": 128,
        "vocab_size": vocab_size,
    }


def yarn_frequencies(c: Config) -> Tensor:
    """YaRN inverse frequencies, [qk_rope_head_dim / 2] float32, radians per position."""
    dim, base, s = c["qk_rope_head_dim"], float(c["rope_theta"]), c["rope_scaling"]

    def corner(rotations: float) -> float:
        length = s["original_max_position_embeddings"] / (rotations * 2 * math.pi)
        return dim * math.log(length) / (2 * math.log(base))

    low = max(math.floor(corner(s["beta_fast"])), 0)
    high = min(math.ceil(corner(s["beta_slow"])), dim - 1)
    plain = base ** (-torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    ramp = (torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    ramp = ramp.clamp(0, 1)
    return plain * (1 - ramp) + plain / s["factor"] * ramp


def softmax_scale(c: Config) -> float:
    s = c["rope_scaling"]
    m = 0.1 * s["mscale_all_dim"] * math.log(s["factor"]) + 1
    return (c["qk_nope_head_dim"] + c["qk_rope_head_dim"]) ** -0.5 * m * m


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate interleaved pairs of x [B, T, heads, 64] by cos, sin [T, 1, 32]."""
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


def linear(rows: int, columns: int) -> nn.Linear:
    return nn.Linear(rows, columns, bias=False)


class Attention(nn.Module):
    """Multi-head latent attention, computed from the expanded keys and values."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.heads, self.latent = c["num_attention_heads"], c["kv_lora_rank"]
        self.nope, self.rope = c["qk_nope_head_dim"], c["qk_rope_head_dim"]
        self.value, self.scale = c["v_head_dim"], softmax_scale(c)
        hidden, heads = c["hidden_size"], self.heads
        self.q_a_proj = linear(hidden, c["q_lora_rank"])
        self.q_a_layernorm = RMSNorm(c["q_lora_rank"])
        self.q_b_proj = linear(c["q_lora_rank"], heads * (self.nope + self.rope))
        self.kv_a_proj_with_mqa = linear(hidden, self.latent + self.rope)
        self.kv_a_layernorm = RMSNorm(self.latent)
        self.kv_b_proj = linear(self.latent, heads * (self.nope + self.value))
        self.o_proj = linear(heads * self.value, hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        batch, length, _ = x.shape
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).view(batch, length, self.heads, -1)
        q_nope, q_rope = q.split((self.nope, self.rope), -1)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split((self.latent, self.rope), -1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).view(batch, length, self.heads, -1)
        k_nope, v = kv.split((self.nope, self.value), -1)
        k_rope = rotate(k_rope.unsqueeze(2), cos, sin).expand(-1, -1, self.heads, -1)
        q = torch.cat((q_nope, rotate(q_rope, cos, sin)), -1).transpose(1, 2)
        k = torch.cat((k_nope, k_rope), -1).transpose(1, 2)
        out = F.scaled_dot_product_attention(
            q, k, v.transpose(1, 2), attn_mask=mask, is_causal=mask is None, scale=self.scale
        )
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))


class MLP(nn.Module):
    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = linear(hidden, width), linear(hidden, width)
        self.down_proj = linear(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Gate(nn.Module):
    """Sigmoid router with groups and a correction bias that only steers the choice."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.experts, self.top_k = c["n_routed_experts"], c["num_experts_per_tok"]
        self.groups, self.top_groups = c["n_group"], c["topk_group"]
        self.factor = c["routed_scaling_factor"]
        self.weight = nn.Parameter(torch.empty(self.experts, c["hidden_size"]))
        self.e_score_correction_bias: Tensor
        self.register_buffer("e_score_correction_bias", torch.zeros(self.experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [N, hidden] to the weight of every expert [N, E] (zero if not chosen) and the load:
        the share of routing slots each expert got [E]."""
        with torch.autocast(x.device.type, enabled=False):
            scores = (x.float() @ self.weight.float().T).sigmoid()
        choice = scores.detach() + self.e_score_correction_bias
        grouped = choice.view(-1, self.groups, self.experts // self.groups)
        best = grouped.topk(2, -1)[0].sum(-1).topk(self.top_groups, -1)[1]
        allowed = torch.zeros_like(grouped[..., 0]).scatter(1, best, 1.0).unsqueeze(-1)
        choice = torch.where(allowed > 0, grouped, float("-inf")).flatten(1)
        chosen = torch.zeros_like(scores).scatter(1, choice.topk(self.top_k, -1)[1], 1.0)
        weights = scores * chosen
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * self.factor
        return weights, chosen.mean(0) / self.top_k


class MoE(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        experts, hidden, width = c["n_routed_experts"], c["hidden_size"], c["moe_intermediate_size"]
        self.gate = Gate(c)
        self.gate_up = nn.Parameter(torch.empty(experts, 2 * width, hidden))
        self.down = nn.Parameter(torch.empty(experts, hidden, width))
        self.shared_experts = MLP(hidden, width * c["n_shared_experts"])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        flat = x.flatten(0, 1)
        experts, double, hidden = self.gate_up.shape
        weights, load = self.gate(flat)
        h = F.linear(flat, self.gate_up.view(experts * double, hidden)).view(-1, experts, double)
        gate, up = h.chunk(2, -1)
        h = F.silu(gate) * up * weights.unsqueeze(-1).to(up.dtype)
        down = self.down.transpose(1, 2).reshape(experts * double // 2, hidden)
        out = h.flatten(1) @ down.to(h.dtype)
        return out.view_as(x) + self.shared_experts(x), load


class Layer(nn.Module):
    """Pre-norm attention and feed-forward; returns the new hidden state and the expert load."""

    def __init__(self, c: Config, index: int) -> None:
        super().__init__()
        hidden = c["hidden_size"]
        self.self_attn = Attention(c)
        self.mlp: nn.Module = (
            MLP(hidden, c["intermediate_size"]) if index < c["first_k_dense_replace"] else MoE(c)
        )
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(hidden), RMSNorm(hidden)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask)
        out = self.mlp(self.post_attention_layernorm(x))
        return (x + out[0], out[1]) if isinstance(out, tuple) else (x + out, None)


class MTPLayer(Layer):
    """The extra layer that sees the next token's embedding and drafts the one after it."""

    def __init__(self, c: Config, index: int) -> None:
        super().__init__(c, index)
        hidden = c["hidden_size"]
        self.enorm, self.hnorm = RMSNorm(hidden), RMSNorm(hidden)
        self.eh_proj = linear(2 * hidden, hidden)
        self.shared_head = nn.Module()
        self.shared_head.norm = RMSNorm(hidden)

    def join(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        return self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(hidden)), -1))


class DemoModel(nn.Module):
    """Main model (`model.*`, `lm_head`) with the MTP layer as the last entry of its layers."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.config, count = c, c["num_hidden_layers"]
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(c["vocab_size"], c["hidden_size"])
        layers: list[Layer] = [Layer(c, i) for i in range(count)]
        self.model.layers = nn.ModuleList([*layers, MTPLayer(c, count)])
        self.model.norm = RMSNorm(c["hidden_size"])
        self.lm_head = linear(c["hidden_size"], c["vocab_size"])
        angles = torch.outer(torch.arange(c["max_position_embeddings"]), yarn_frequencies(c))
        self.register_buffer("cos", angles.cos().unsqueeze(1), persistent=False)
        self.register_buffer("sin", angles.sin().unsqueeze(1), persistent=False)

    def initialise(self, seed: int) -> None:
        """Normal weights of 0.02; what writes into the residual stream is scaled down by depth."""
        generator = torch.Generator().manual_seed(seed)
        depth = (2 * self.config["num_hidden_layers"]) ** -0.5
        for name, p in self.named_parameters():
            if p.dim() > 1:
                last = name.endswith(("o_proj.weight", "down_proj.weight", ".down"))
                std = self.config["initializer_range"] * (depth if last else 1.0)
                p.data.copy_(torch.randn(p.shape, generator=generator) * std)

    def forward(
        self, tokens: Tensor, mask: Tensor | None = None, loads: list[Tensor] | None = None
    ) -> Tensor:
        """Token ids [B, T] to hidden states after the final norm [B, T, hidden]. `mask` is an
        additive or boolean attention mask [B, 1, T, T]; loads collects each MoE layer's load."""
        x = self.model.embed_tokens(tokens)
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        for layer in self.model.layers[:-1]:
            x, load = layer(x, cos, sin, mask)
            if loads is not None and load is not None:
                loads.append(load)
        return self.model.norm(x)

    def draft(
        self,
        hidden: Tensor,
        following: Tensor,
        mask: Tensor | None = None,
        loads: list[Tensor] | None = None,
    ) -> Tensor:
        """MTP hidden states [B, T, hidden] from the main ones and the tokens at t + 1 [B, T];
        `lm_head` of position t predicts the token at t + 2."""
        layer = self.model.layers[-1]
        x = layer.join(self.model.embed_tokens(following), hidden)
        cos, sin = self.cos[: following.shape[1]], self.sin[: following.shape[1]]
        x, load = layer(x, cos, sin, mask)
        if loads is not None and load is not None:
            loads.append(load)
        return layer.shared_head.norm(x)

    def export(self) -> dict[str, Tensor]:
        """The checkpoint's tensors: HF names, experts apart, BF16 (router bias FP32)."""
        tensors: dict[str, Tensor] = {}
        for name, value in self.state_dict().items():
            value = value.detach().cpu()
            if name.endswith(("mlp.gate_up", "mlp.down")):
                stem, kind = name.rsplit(".", 1)
                for e, block in enumerate(value.to(torch.bfloat16)):
                    parts = zip(("gate_proj", "up_proj"), block.chunk(2), strict=True)
                    named = parts if kind == "gate_up" else [("down_proj", block)]
                    for part, tensor in named:
                        tensors[f"{stem}.experts.{e}.{part}.weight"] = tensor.contiguous()
            elif name.endswith("e_score_correction_bias"):
                tensors[name] = value.float()
            else:
                tensors[name] = value.to(torch.bfloat16).contiguous()
        return tensors
