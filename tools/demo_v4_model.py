"""The demo's sibling of the DeepSeek-V4 architecture as a module, and how the demo becomes one."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from demo_model import Config, DemoModel, yarn_frequencies
from demo_v4_files import config_of, rounded_experts

STEEP = 1.2  # sqrt(softplus) of so many times a logit has nearly the ratios of its sigmoid
SLOPE = 1.44  # of these scores to the other, at 0
HIGH = 8.0  # the part of a query that makes its length constant, over the rest of it


def rms(x: Tensor, eps: float = 1e-6) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), eps=eps)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The last dims of x [B, T, heads, D], in interleaved pairs; cos, sin [T, 1, rope / 2]."""
    d = 2 * cos.shape[-1]
    a, b = x[..., -d::2], x[..., -d + 1 :: 2]
    both = torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)
    return torch.cat((x[..., :-d], both.to(x.dtype)), -1)


def attend(q: Tensor, kv: Tensor, entries: Tensor | None, window: int, ratio: int) -> Tensor:
    """q [B, T, H, D] over kv [B, T, D], which is keys and values, of the last `window` tokens, and
    over those of entries [B, T // ratio, D] that are whole. In blocks of queries, so that the cost
    of the window grows as T."""
    batch, length, heads, dim = q.shape
    size = min(window, length)
    blocks = -(-length // size)
    extra = blocks * size - length
    at = torch.arange(blocks * size, device=q.device).view(blocks, size)
    mine = F.pad(kv, (0, 0, 0, extra)).view(batch, blocks, size, dim)
    q = F.pad(q, (0, 0, 0, 0, 0, extra)).view(batch, blocks, size, heads, dim)
    behind = at.unsqueeze(2) - at.unsqueeze(1)
    mask = behind >= 0  # [blocks, size, keys]
    if blocks > 1:  # the block before has the rest of the window
        mine = torch.cat((F.pad(mine[:, :-1], (0, 0, 0, 0, 1, 0)), mine), 2)
        earlier = (behind + size < window) & (at[:, :1] > 0).unsqueeze(2)
        mask = torch.cat((earlier, mask), 2)
    flat = q.reshape(batch, blocks, size * heads, dim)
    scores = [flat @ mine.transpose(2, 3)]
    if entries is not None:
        flat_e = flat.reshape(batch, -1, dim) @ entries.transpose(1, 2)
        scores.append(flat_e.view(batch, blocks, size * heads, -1))
        number = torch.arange(entries.shape[1], device=q.device)
        mask = torch.cat((mask, number < ((at + 1) // ratio).unsqueeze(2)), 2)
    hidden = ~mask.repeat_interleave(heads, 1)
    all_scores = torch.cat(scores, -1) * dim**-0.5
    share = all_scores.masked_fill(hidden, float("-inf")).softmax(-1).to(mine.dtype)
    out = share[..., : mine.shape[2]] @ mine
    if entries is not None:
        far = share[..., mine.shape[2] :].reshape(batch, blocks * size * heads, -1)
        out = out + (far @ entries.to(far.dtype)).view_as(out)
    return out.view(batch, blocks * size, heads, dim)[:, :length]


class Compressor(nn.Module):
    """An entry for every `ratio` tokens; where that is 4, of those in front of them, too."""

    def __init__(self, ratio: int, hidden: int, dim: int) -> None:
        super().__init__()
        self.ratio, self.dim, self.overlap = ratio, dim, ratio == 4
        width = dim * (1 + self.overlap)
        self.wkv, self.wgate = (nn.Parameter(torch.empty(width, hidden)) for _ in range(2))
        self.ape = nn.Parameter(torch.zeros(ratio, width))
        self.norm = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[B, T, hidden] → [B, T // ratio, dim]."""
        count = x.shape[1] // self.ratio
        x = x[:, : count * self.ratio].unflatten(1, (count, self.ratio))
        kv, score = x @ self.wkv.T, x @ self.wgate.T + self.ape
        if self.overlap:
            before = [F.pad(t[..., : self.dim], (0, 0, 0, 0, 1, 0))[:, :-1] for t in (kv, score)]
            before[1][:, 0] = float("-inf")
            kv = torch.cat((before[0], kv[..., self.dim :]), 2)
            score = torch.cat((before[1], score[..., self.dim :]), 2)
        made = rms((kv * score.softmax(2)).sum(2)) * self.norm
        at = slice(0, count * self.ratio, self.ratio)
        return turned(made.unsqueeze(2), cos[at], sin[at]).squeeze(2)


class Attention(nn.Module):
    """Over the tokens of a window and, where there is a compressor, its entries."""

    def __init__(self, c: Config, ratio: int) -> None:
        super().__init__()
        hidden, self.heads, self.dim = c["hidden_size"], c["num_attention_heads"], c["head_dim"]
        self.wq_a = nn.Parameter(torch.empty(c["q_lora_rank"], hidden))
        self.wq_b = nn.Parameter(torch.empty(self.heads * self.dim, c["q_lora_rank"]))
        self.wkv = nn.Parameter(torch.empty(self.dim, hidden))
        self.kv_norm = nn.Parameter(torch.ones(self.dim))
        self.wo_a = nn.Parameter(torch.empty(self.heads, c["o_lora_rank"], self.dim))
        self.wo_b = nn.Parameter(torch.empty(hidden, self.heads * c["o_lora_rank"]))
        self.window = c["sliding_window"]
        self.compressor = Compressor(ratio, hidden, self.dim) if ratio else None

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = (rms(x @ self.wq_a.T) @ self.wq_b.T).view(batch, length, self.heads, self.dim)
        q = turned(rms(q).to(q.dtype), cos, sin)
        kv = turned((rms(x @ self.wkv.T) * self.kv_norm).unsqueeze(2), cos, sin).squeeze(2)
        made = self.compressor
        entries = None if made is None else made(x, cos, sin).to(q.dtype)
        ratio = 1 if made is None else made.ratio
        out = turned(attend(q, kv.to(q.dtype), entries, self.window, ratio), cos, -sin)
        inner = torch.einsum("bthd,hrd->bthr", out, self.wo_a).flatten(2)
        return inner @ self.wo_b.T


class Moe(nn.Module):
    """Every expert is computed for every token, as in the demo's own training. table: of each id
    its experts; None: by scores."""

    def __init__(self, c: Config, hashed: bool) -> None:
        super().__init__()
        hidden, width = c["hidden_size"], c["moe_intermediate_size"]
        self.experts, self.top_k = c["n_routed_experts"], c["num_experts_per_tok"]
        self.factor, self.limit = c["routed_scaling_factor"], c["swiglu_limit"]
        self.gate = nn.Parameter(torch.zeros(self.experts, hidden))
        self.register_buffer("bias", torch.zeros(self.experts))
        self.register_buffer("table", torch.zeros(c["vocab_size"], self.top_k, dtype=torch.long))
        self.hashed = hashed
        self.gate_up = nn.Parameter(torch.empty(self.experts, 2 * width, hidden))
        self.down = nn.Parameter(torch.empty(self.experts, hidden, width))
        self.shared_gate_up = nn.Parameter(torch.empty(2 * width, hidden))
        self.shared_down = nn.Parameter(torch.empty(hidden, width))

    def inner(self, both: Tensor) -> Tensor:
        gate, up = both.chunk(2, -1)
        return F.silu(gate.clamp(max=self.limit)) * up.clamp(-self.limit, self.limit)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            scores = F.softplus(x.float() @ self.gate.T).sqrt()
        chosen = self.table[ids] if self.hashed else (scores + self.bias).topk(self.top_k)[1]
        kept = scores * torch.zeros_like(scores).scatter(-1, chosen, 1.0)
        weights = kept / kept.sum(-1, keepdim=True) * self.factor
        gate_up, down = rounded_experts(self.gate_up), rounded_experts(self.down)
        h = self.inner(torch.einsum("bth,eoh->bteo", x, gate_up))
        h = h * weights.to(h.dtype).unsqueeze(-1)
        out = torch.einsum("bteo,eho->bth", h, down)
        return out + self.inner(x @ self.shared_gate_up.T) @ self.shared_down.T


class DemoV4(nn.Module):
    """Its streams stay alike and are one here: what reads them takes their mean, what writes gives
    each the same."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.config, hidden = c, c["hidden_size"]
        self.embed = nn.Parameter(torch.empty(c["vocab_size"], hidden))
        self.head = nn.Parameter(torch.empty(c["vocab_size"], hidden))
        self.norm = nn.Parameter(torch.ones(hidden))
        ratios = c["compress_ratios"]
        self.attns = nn.ModuleList(Attention(c, ratio) for ratio in ratios)
        self.moes = nn.ModuleList(Moe(c, n < c["num_hash_layers"]) for n in range(len(ratios)))
        self.norms = nn.Parameter(torch.ones(len(ratios), 2, hidden))
        half = torch.arange(0, c["qk_rope_head_dim"], 2) / c["qk_rope_head_dim"]
        plain = float(c["rope_theta"]) ** -half
        self.tables: Tensor  # [window alone or not, cos or sin, positions, 1, rope / 2]
        tables = []
        for frequencies in (plain, yarn_frequencies(c)):
            angles = torch.outer(torch.arange(c["max_position_embeddings"]), frequencies)
            tables.append(torch.stack((angles.cos(), angles.sin())).unsqueeze(2))
        self.register_buffer("tables", torch.stack(tables), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        """[B, T] → logits [B, T, vocab]."""
        x = self.embed[ids]
        for attn, moe, norms in zip(self.attns, self.moes, self.norms, strict=True):
            cos, sin = self.tables[int(attn.compressor is not None)][:, : ids.shape[1]]
            x = x + attn(rms(x) * norms[0], cos, sin)
            x = x + moe(rms(x) * norms[1], ids)
        return rms(x) * self.norm @ self.head.T


# --- from the demo ------------------------------------------------------------------------------


@torch.no_grad()
def of_demo(demo: DemoModel, batches: list[Tensor]) -> DemoV4:
    """V4's weights that do nearly what the demo's do. batches: ids [B, T] to measure it by."""
    model = DemoV4(config_of(demo.config))
    model.embed.copy_(demo.model.embed_tokens.weight)
    model.head.copy_(demo.lm_head.weight)
    model.norm.copy_(demo.model.norm.weight)
    layers = demo.model.layers[: len(model.attns)]
    seen: list[list[Tensor]] = [[] for _ in layers]
    first: list[tuple[Tensor, Tensor]] = []
    hooks = [
        layer.self_attn.register_forward_pre_hook(lambda m, args, n=n: seen[n].append(args[0]))
        for n, layer in enumerate(layers)
    ]
    hooks.append(
        layers[0].mlp.register_forward_pre_hook(lambda m, args: first.append((args[0], ids)))
    )
    for ids in batches:
        demo(ids)
    for hook in hooks:
        hook.remove()
    for n, layer in enumerate(layers):
        model.norms[n, 0].copy_(layer.input_layernorm.weight)
        model.norms[n, 1].copy_(layer.post_attention_layernorm.weight)
        _attention(model.attns[n], layer.self_attn, torch.cat([x.flatten(0, 1) for x in seen[n]]))
        if n:
            _experts(model.moes[n], layer.mlp)
    xs = torch.cat([x.flatten(0, 1) for x, _ in first])
    _dense(model.moes[0], layers[0].mlp, xs, torch.cat([t.flatten() for _, t in first]))
    return model


def _attention(new: Attention, old: Any, x: Tensor) -> None:
    """Latents as they are, in a basis of as many dims as there are; a query gets dims that no key
    has, in which it is so long that its length hardly changes."""
    heads, nope, rope = old.heads, old.nope, old.rope
    latent, dims = old.latent, x.shape[-1]
    wide = old.kv_a_proj_with_mqa.weight
    basis, values, back = torch.linalg.svd(wide[:latent], full_matrices=False)
    low = values.unsqueeze(1) * back  # [dims, hidden]
    gained = old.kv_a_layernorm.weight.unsqueeze(1) * basis  # latent = gained · low x, normed
    kv_b = old.kv_b_proj.weight.view(heads, nope + old.value, latent)
    q_b = (old.q_b_proj.weight * old.q_a_layernorm.weight).view(heads, nope + rope, -1)
    absorbed = gained.T @ kv_b[:, :nope].transpose(1, 2) @ q_b[:, :nope]  # [heads, dims, q_lora]
    qr = rms(x @ old.q_a_proj.weight.T)
    useful = torch.cat((absorbed, q_b[:, nope:]), 1)
    high = HIGH * ((qr @ useful.transpose(1, 2)).square().sum(-1).mean() / qr.shape[-1]).sqrt()
    still = high * torch.eye(qr.shape[-1]).expand(heads, -1, -1)
    new.wq_a.copy_(old.q_a_proj.weight)
    new.wq_b.copy_(torch.cat((absorbed, still, q_b[:, nope:]), 1).flatten(0, 1))
    tiny = 0.2  # beside latents that set the length of both
    turning = wide[latent:] * tiny
    new.wkv.copy_(torch.cat((low, torch.zeros(qr.shape[-1], x.shape[-1]), turning)))
    length = (HIGH**2 + 1) ** 0.5 / HIGH * high * qr.shape[-1] ** 0.5  # of a query
    scale, width = length * old.scale, new.dim**0.5
    of_low, of_turning = latent**0.5 / width, (x @ low.T).norm(dim=-1).mean() / tiny / width
    new.kv_norm[:dims] = scale * of_low
    new.kv_norm[dims : dims + qr.shape[-1]] = 1.0
    new.kv_norm[-rope:] = scale * of_turning
    new.wo_a.zero_()
    new.wo_a[..., :dims] = kv_b[:, nope:] @ gained / scale
    new.wo_b.copy_(old.o_proj.weight)
    if new.compressor is None:
        return
    # Entries begin as means of their tokens, which nobody attends much.
    ratio, dim = new.compressor.ratio, new.dim
    new.compressor.wkv.copy_(new.wkv.repeat(new.compressor.wkv.shape[0] // dim, 1))
    new.compressor.wgate.normal_(0, 0.02)
    new.compressor.norm.copy_(new.kv_norm * ratio**-0.5)


def _experts(new: Moe, old: Any) -> None:
    new.gate.copy_(STEEP * old.gate.weight)
    new.bias.copy_(SLOPE * old.gate.e_score_correction_bias)
    new.gate_up.copy_(old.gate_up)
    new.down.copy_(old.down)
    shared = old.shared_experts
    new.shared_gate_up.copy_(torch.cat((shared.gate_proj.weight, shared.up_proj.weight)))
    new.shared_down.copy_(shared.down_proj.weight)


def _dense(new: Moe, old: Any, x: Tensor, ids: Tensor) -> None:
    """A layer without experts: what moves most is shared, and each kind of tokens has a pair of
    experts with what moves most there."""
    width, hidden = new.shared_down.shape[1], old.down_proj.weight
    moved = (F.silu(old.gate_proj(x)) * old.up_proj(x)).abs() * hidden.norm(dim=0)
    order = moved.mean(0).argsort(descending=True)
    shared, others = order[:width], order[width:]
    by_id = torch.zeros(new.table.shape[0], len(others)).index_add_(0, ids, moved[:, others])
    by_id /= torch.bincount(ids, minlength=len(by_id)).clamp(min=1).unsqueeze(1)
    kinds = new.experts // new.top_k
    centres = by_id[torch.bincount(ids, minlength=len(by_id)).topk(kinds)[1]]
    for _ in range(20):
        kind = torch.cdist(by_id, centres).argmin(1)
        sizes = torch.bincount(kind, minlength=kinds).clamp(min=1).unsqueeze(1)
        centres = torch.zeros_like(centres).index_add_(0, kind, by_id) / sizes
    new.table.copy_(kind.unsqueeze(1) * new.top_k + torch.arange(new.top_k))

    def part(at: Tensor) -> tuple[Tensor, Tensor]:
        return torch.cat((old.gate_proj.weight[at], old.up_proj.weight[at])), hidden[:, at]

    both, down = part(shared)
    new.shared_gate_up.copy_(both)
    new.shared_down.copy_(down)
    for k in range(kinds):
        mine = others[centres[k].argsort(descending=True)][: new.top_k * width]
        for n, at in enumerate(mine.chunk(new.top_k)):
            both, down = part(at)
            new.gate_up[k * new.top_k + n].copy_(both)
            new.down[k * new.top_k + n].copy_(down * new.top_k / new.factor)


# --- training -----------------------------------------------------------------------------------
