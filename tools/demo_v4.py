"""Make the demo's sibling of the DeepSeek-V4 architecture, out of the demo, and train it on.

    python tools/demo_v4.py --data DIR --out OUT [--device cuda --minutes N]

The sibling begins as the demo's weights in V4's forms, and learns the demo's predictions. DIR as in
train_demo.py. docs/demo.md describes the result.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn

import demo_text as dt
from demo_corpus import Banned, encoded, load_sources, short_document, weigh
from demo_files import load_checkpoint, write_recipe
from demo_model import Config, DemoModel, yarn_frequencies
from demo_schemas import reserved_names, schema_document, weigh_object
from demo_v4_files import config_of, rounded_experts, write_v4

DEMO = Path(__file__).parents[1] / "core" / "ds_runtime" / "demo"
STEEP = 1.2  # sqrt(softplus) of so many times a logit has nearly the ratios of its sigmoid
SLOPE = 1.44  # of these scores to the other, at 0
HIGH = 8.0  # the part of a query that makes its length constant, over the rest of it


def rms(x: Tensor, eps: float = 1e-6) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The last dims of x [B, T, heads, D], in interleaved pairs; cos, sin [T, 1, rope / 2]."""
    d = 2 * cos.shape[-1]
    a, b = x[..., -d::2], x[..., -d + 1 :: 2]
    both = torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)
    return torch.cat((x[..., :-d], both), -1)


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
        q = turned(rms(q), cos, sin).transpose(1, 2)
        kv = turned((rms(x @ self.wkv.T) * self.kv_norm).unsqueeze(2), cos, sin).squeeze(2)
        at = torch.arange(length, device=x.device)
        behind = at.unsqueeze(1) - at
        mask = (behind >= 0) & (behind < self.window)  # [T, T], and entries behind that
        if self.compressor is not None:
            entries = self.compressor(x, cos, sin)
            seen = (at + 1).unsqueeze(1) // self.compressor.ratio
            number = torch.arange(entries.shape[1], device=x.device)
            mask = torch.cat((mask, number < seen), 1)
            kv = torch.cat((kv, entries), 1)
        keys = kv.unsqueeze(1)
        out = F.scaled_dot_product_attention(q, keys, keys, attn_mask=mask, enable_gqa=True)
        out = turned(out.transpose(1, 2), cos, -sin)
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
        h = self.inner(torch.einsum("bth,eoh->bteo", x, gate_up)) * weights.unsqueeze(-1)
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


def documents(data: Path, seed: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(ids, weights in percent) of what the demo's stages are trained on, one after the other."""
    rng, sources = random.Random(seed), load_sources(data)
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    marks = {text: tokenizer.token_to_id(text) for text, _ in dt.SPECIAL_TOKENS}
    banned = Banned.of(json.loads((DEMO / "heldout.json").read_text()))
    names = reserved_names(json.loads((DEMO / "heldout_schemas.json").read_text()))
    prose = "\n\n".join(sources.books[title][0] for title in sorted(sources.books))
    while True:
        kind = rng.random()
        if kind < 0.35:
            text = schema_document(rng, sources.words, banned.pairs, names)
            if not dt.pairs_in(text) & banned.pairs:
                yield weigh_object(tokenizer, text, rng.random() < 0.5)
            continue
        if kind < 0.42:
            start = rng.randrange(len(prose) - 1200)
            text = dt.BOS + prose[start : start + 1200]
        else:
            text = short_document(rng, sources.words, banned)
        for ids in encoded(tokenizer, [text], banned):
            yield ids, weigh(ids, marks)


def batches(
    data: Path, seed: int, tokens: int, longest: int = 512
) -> Iterator[tuple[Tensor, Tensor]]:
    """(ids, weights) [B, T] of documents of about one length, filled up behind."""
    feed, pad = documents(data, seed), 2
    held: list[tuple[np.ndarray, np.ndarray]] = []
    rng = random.Random(seed)
    while True:
        while len(held) < 160:
            ids, weights = next(feed)
            if len(ids) <= longest:
                held.append((ids, weights))
        held.sort(key=lambda d: len(d[0]))
        at = rng.randrange(len(held))
        last = at
        while last < len(held) and (last - at + 1) * len(held[last][0]) <= tokens:
            last += 1
        last = max(last, at + 1)
        mine, held = held[at:last], held[:at] + held[last:]
        width = max(len(ids) for ids, _ in mine)
        ids = np.full((len(mine), width), pad, np.int64)
        weights = np.zeros((len(mine), width), np.float32)
        for row, (i, w) in enumerate(mine):
            ids[row, : len(i)], weights[row, : len(w)] = i, w / 100
        yield torch.from_numpy(ids), torch.from_numpy(weights)


def losses(model: DemoV4, demo: DemoModel, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """(KL divergence from the demo's predictions, its weighted mean; share of its choices)."""
    with torch.no_grad():
        old = F.linear(demo(ids), demo.lm_head.weight).float().log_softmax(-1)
    now = model(ids).float().log_softmax(-1)
    each = (old.exp() * (old - now)).sum(-1)[:, :-1]
    weight = weights[:, 1:].clamp(min=0.1) * (ids[:, 1:] != 2)
    same = (now.argmax(-1) == old.argmax(-1))[:, :-1].float()
    said = weights[:, 1:] >= 0.5
    return (each * weight).sum() / weight.sum(), (same * said).sum() / said.sum().clamp(min=1)


def train(model: DemoV4, demo: DemoModel, args: argparse.Namespace) -> dict[str, Any]:
    matrices = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(matrices, lr=args.lr, betas=(0.9, 0.98), weight_decay=0.0)
    began, step, seen = time.monotonic(), 0, 0
    curve: list[list[float]] = []
    feed = batches(args.data, args.seed, args.batch_tokens, args.longest)
    while (spent := (time.monotonic() - began) / 60) < args.minutes:
        done = spent / args.minutes
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min(1.0, (step + 1) / 20) * max(0.03, 1 - done)
        ids, weights = (t.to(args.device) for t in next(feed))
        with torch.autocast(args.device, torch.bfloat16):
            loss, same = losses(model, demo, ids, weights)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(matrices, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seen, step = seen + ids.numel(), step + 1
        if step % 10 == 1:
            curve.append([step, round(loss.item(), 4), round(same.item(), 4)])
            print(f"step {step} {spent:.1f} min {seen} tokens KL {loss.item():.4f} "
                  f"same {same.item():.4f}", flush=True)  # fmt: skip
    return {"steps": step, "tokens": seen, "minutes": round(spent, 1), "curve": curve}


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("--data", type=Path, required=True)
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--minutes", type=float, default=30)
    p.add_argument("--lr", type=float, default=1.5e-4)
    p.add_argument("--seed", type=int, default=11)
    p.add_argument("--batch-tokens", type=int, default=2048)
    p.add_argument("--longest", type=int, default=512, help="tokens of a document")
    p.add_argument("--device", default="cpu")
    p.add_argument("--threads", type=int, default=1)
    args = p.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    demo = load_checkpoint(DEMO, "cpu").float()
    probes = batches(args.data, args.seed + 1, 4096)
    model = of_demo(demo, [next(probes)[0] for _ in range(4)]).to(args.device)
    demo.to(args.device)
    held = [next(probes) for _ in range(4)]

    def score() -> list[float]:
        with torch.no_grad():
            found = [losses(model, demo, *(t.to(args.device) for t in b)) for b in held]
        return [round(float(torch.stack(x).mean()), 4) for x in zip(*found, strict=True)]

    before = score()
    print("before: KL, same", before, flush=True)
    facts = train(model, demo, args)
    facts |= {"before": before, "after": score()}
    print("after", facts["after"], flush=True)
    size = write_v4(model.cpu(), args.out)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(DEMO / name, args.out / name)
    write_recipe(args.out / "RECIPE.json", {
        "command": f"python tools/demo_v4.py --data DIR --out DIR --minutes {args.minutes:g}",
        "seed": args.seed, "learning_rate": args.lr, "batch_tokens": args.batch_tokens,
        "weights_bytes": size, "torch": torch.__version__, "training": facts,
    })  # fmt: skip


if __name__ == "__main__":
    main()
