"""How often a checkpoint's MTP layer drafts what its model says next, in plain torch.

One sequence at a time, float32, no cache: made for small V3 checkpoints with plain weights, such
as the demo model. Shares the config and the rotation table with the runtime and nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from ds_runtime.errors import UnsupportedError
from ds_runtime.model.config import ModelConfig
from ds_runtime.model.hf import load_config
from ds_runtime.model.rope import cos_sin_table


def refusal(config: ModelConfig) -> str | None:
    """Why this checkpoint's drafts cannot be measured here; None when they can."""
    if config.mtp_layers < 1:
        return "the checkpoint has no MTP layer"
    if config.quantization:
        return "the weights are quantized"
    if config.routing is None or config.routing.scoring != "sigmoid" or config.q_lora is None:
        return "the model is not of the V3 architecture"
    return None


class DraftCheck:
    """Model and MTP layer of one checkpoint folder."""

    def __init__(self, folder: Path) -> None:
        self.config = load_config(folder)
        reason = refusal(self.config)
        if reason is not None:
            raise UnsupportedError(f"{folder}: {reason}")
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        files = sorted(set(index["weight_map"].values()))
        self._weights = {
            name: tensor.float()
            for file in files
            for name, tensor in load_file(folder / file).items()
        }
        self._rotation = torch.empty(0, 0)

    @torch.inference_mode()
    def pairs(self, ids: Sequence[int], first: int) -> list[tuple[int, int]]:
        """(MTP argmax, model argmax) for the tokens at positions first + 1 … len(ids) - 1.

        The model's argmax is taken where the token before it is known; the draft from one
        position earlier, with that token's embedding. `first` ≥ 1.
        """
        tokens = torch.tensor(list(ids))
        self._rotation = cos_sin_table(self.config, len(ids), "cpu")
        embedded = F.embedding(tokens, self._weights["model.embed_tokens.weight"])
        hidden = embedded
        for layer in range(self.config.layers):
            hidden = self._layer(layer, hidden)
        hidden = self._norm("model.norm", hidden)
        drafted = self._draft(hidden[:-1], embedded[1:])
        head = self._weights.get("lm_head.weight", self._weights["model.embed_tokens.weight"])
        said = F.linear(hidden, head).argmax(-1).tolist()
        drafts = F.linear(drafted, head).argmax(-1).tolist()
        return [(drafts[t - 1], said[t]) for t in range(first, len(ids) - 1)]

    def _draft(self, hidden: Tensor, following: Tensor) -> Tensor:
        """MTP hidden states [T, hidden] from normed hidden states and the next embeddings."""
        layer = self.config.layers
        name = f"model.layers.{layer}"
        both = (self._norm(f"{name}.enorm", following), self._norm(f"{name}.hnorm", hidden))
        x = self._linear(f"{name}.eh_proj", torch.cat(both, -1))
        return self._norm(f"{name}.shared_head.norm", self._layer(layer, x))

    def _layer(self, layer: int, x: Tensor) -> Tensor:
        name = f"model.layers.{layer}"
        x = x + self._attention(f"{name}.self_attn", self._norm(f"{name}.input_layernorm", x))
        y = self._norm(f"{name}.post_attention_layernorm", x)
        routed = self.config.is_moe(layer)
        return x + (self._experts(f"{name}.mlp", y) if routed else self._mlp(f"{name}.mlp", y))

    def _attention(self, name: str, x: Tensor) -> Tensor:
        """MLA over x [T, hidden], from expanded keys and values."""
        c, length = self.config, len(x)
        q = self._linear(f"{name}.q_a_proj", x)
        q = self._linear(f"{name}.q_b_proj", self._norm(f"{name}.q_a_layernorm", q))
        q_nope, q_rope = q.view(length, c.heads, c.qk_head).split_with_sizes(
            (c.qk_nope, c.qk_rope), -1
        )
        both = self._linear(f"{name}.kv_a_proj_with_mqa", x)
        latent, k_rope = both.split_with_sizes((c.kv_lora, c.qk_rope), -1)
        kv = self._linear(f"{name}.kv_b_proj", self._norm(f"{name}.kv_a_layernorm", latent))
        k_nope, v = kv.view(length, c.heads, c.qk_nope + c.v_head).split_with_sizes(
            (c.qk_nope, c.v_head), -1
        )
        k_rope = self._rotate(k_rope.unsqueeze(1)).expand(-1, c.heads, -1)
        query = torch.cat((q_nope, self._rotate(q_rope)), -1).transpose(0, 1)
        key = torch.cat((k_nope, k_rope), -1).transpose(0, 1)
        out = F.scaled_dot_product_attention(
            query, key, v.transpose(0, 1), is_causal=True, scale=c.softmax_scale
        )
        return self._linear(f"{name}.o_proj", out.transpose(0, 1).reshape(length, -1))

    def _rotate(self, x: Tensor) -> Tensor:
        """RoPE on x [T, heads, rope]; interleaved pairs unless the config says halves."""
        cos, sin = self._rotation[: len(x)].unsqueeze(1).chunk(2, -1)
        if self.config.rope_interleave:
            a, b = x[..., 0::2], x[..., 1::2]
        else:
            a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    def _experts(self, name: str, x: Tensor) -> Tensor:
        """Routed experts plus the shared one over x [T, hidden]."""
        routing = self.config.routing
        assert routing is not None
        scores = self._linear(f"{name}.gate", x).sigmoid()
        choice = scores + self._weights[f"{name}.gate.e_score_correction_bias"]
        groups = choice.view(len(x), routing.n_group, -1)
        best = groups.topk(2, -1)[0].sum(-1).topk(routing.topk_group, -1)[1]
        closed = torch.ones_like(groups[..., 0]).scatter(1, best, 0.0).bool()
        choice = groups.masked_fill(closed.unsqueeze(-1), float("-inf")).flatten(1)
        chosen = choice.topk(routing.top_k, -1)[1]
        weights = scores.gather(1, chosen)
        if routing.renormalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        weights = weights * routing.scale
        out = self._mlp(f"{name}.shared_experts", x)
        for expert in sorted(set(chosen.flatten().tolist())):
            rows, slots = (chosen == expert).nonzero(as_tuple=True)
            part = self._mlp(f"{name}.experts.{expert}", x[rows])
            out.index_add_(0, rows, part * weights[rows, slots].unsqueeze(-1))
        return out

    def _mlp(self, name: str, x: Tensor) -> Tensor:
        gated = F.silu(self._linear(f"{name}.gate_proj", x)) * self._linear(f"{name}.up_proj", x)
        return self._linear(f"{name}.down_proj", gated)

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self._weights[f"{name}.weight"])

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self._weights[f"{name}.weight"], self.config.eps)
