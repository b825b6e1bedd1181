"""The demo's V3.2 sibling: an indexer per layer that learns what the demo model attends.

Stage one of DeepSeek-V3.2's recipe and no more: the model stays as it is, and each layer's indexer
is trained to rank tokens as the layer's own attention weighs them, by the KL divergence of
softmax(scores) from the weights' mean over heads. An indexer begins as the best approximation of
its layer's attention that its size allows.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor, nn

import demo_text as dt
from demo_corpus import Banned, Job
from demo_files import load_checkpoint, save_tensors, write_json, write_recipe
from demo_keys import KEYS_TOKENS, SecondJob, reserved, run_second
from demo_model import Attention, DemoModel, Layer, rotate
from demo_scores import key_prompts, keys_right

REPO = Path(__file__).resolve().parent.parent
DIM, TOP_K = 128, 128
LENGTH = 2048  # tokens of a book's end that perplexity is measured on
GROUP = 512  # queries whose masks are made at a time
NORM_EPS = 1e-6


def sibling_config(base: dict[str, Any], heads: int, top_k: int) -> dict[str, Any]:
    """config.json of the sibling, made of the base's; without MTP, whose layer has no indexer."""
    return {
        **base,
        "architectures": ["DeepseekV32ForCausalLM"],
        "base_model": "../demo",
        "index_head_dim": DIM,
        "index_n_heads": heads,
        "index_topk": top_k,
        "model_type": "deepseek_v32",
        "num_nextn_predict_layers": 0,
    }


class Indexer(nn.Module):
    """One layer's lightning indexer in float32, its rotation as halves."""

    def __init__(self, hidden: int, q_lora: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.wq_b = nn.Linear(q_lora, heads * DIM, bias=False)
        self.wk = nn.Linear(hidden, DIM, bias=False)
        self.k_norm = nn.LayerNorm(DIM, eps=NORM_EPS)
        self.weights_proj = nn.Linear(hidden, heads, bias=False)

    def forward(self, x: Tensor, latent: Tensor, cos: Tensor, sin: Tensor, rows: Tensor) -> Tensor:
        """Normed inputs x [T, hidden] and query latents [T, q_lora] to scores [R, T] of `rows`."""
        keys = turn(self.k_norm(self.wk(x)), cos, sin)
        q = self.wq_b(latent[rows]).view(len(rows), self.heads, DIM)
        q = turn(q, cos[rows].unsqueeze(1), sin[rows].unsqueeze(1))
        weights = self.weights_proj(x[rows]) * (self.heads * DIM) ** -0.5
        return (F.relu(q @ keys.T) * weights.unsqueeze(-1)).sum(1)


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The first dims of x rotated as halves; cos and sin [..., r / 2]."""
    half = cos.shape[-1]
    a, b = x[..., :half], x[..., half : 2 * half]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, x[..., 2 * half :]), -1)


@torch.no_grad()
def start_from(indexer: Indexer, layer: Layer, x: Tensor) -> None:
    """Head h of the indexer begins as head h of the layer's attention: the rotated part as it is,
    of the rest the directions of the key that matter most to all queries, which x [T, hidden], the
    layer's normed inputs, show; and the weights as even over heads as x allows. With twice the
    heads the others begin as the negatives of these, so that both halves of a product count."""
    at = layer.self_attn
    latent, norm = at.kv_a_proj_with_mqa.weight.float(), at.kv_a_layernorm.weight.float()
    rope = torch.cat((torch.arange(0, at.rope, 2), torch.arange(1, at.rope, 2))).to(x.device)
    q_b = at.q_b_proj.weight.float().view(at.heads, at.nope + at.rope, -1)
    up = at.kv_b_proj.weight.float().view(at.heads, at.nope + at.value, -1)[:, : at.nope]
    down = x @ latent[: at.latent].T
    down = down * torch.rsqrt(down.square().mean(-1, keepdim=True) + NORM_EPS) * norm
    products = torch.einsum("hdq,hdl->hql", q_b[:, : at.nope], up)  # query latent to key latent
    _, spread, basis = torch.linalg.svd(down - down.mean(0), full_matrices=False)
    white = basis.T * spread / math.sqrt(len(x))  # of keys: what they differ in
    left, sizes, right = torch.linalg.svd((products @ white).flatten(0, 1), full_matrices=False)
    n = DIM - at.rope
    lifted = torch.linalg.pinv(white).T @ right[:n].T  # [latent, n]
    queries = (left[:, :n] * sizes[:n]).view(at.heads, -1, n)
    ratio = 1 / down.pow(2).mean().sqrt()
    keys = (lifted * norm.unsqueeze(1)).T @ latent[: at.latent] * ratio
    balance = queries.norm() / q_b[:, at.nope :].norm()
    indexer.wk.weight.copy_(torch.cat((latent[at.latent :][rope], keys * balance)))
    q = torch.cat((q_b[:, at.nope :][:, rope], queries.transpose(1, 2) / balance), 1)
    signs = torch.tensor([1.0, -1.0], device=x.device)[: indexer.heads // at.heads]
    indexer.wq_b.weight.copy_(torch.cat([q * sign for sign in signs]).flatten(0, 1))
    even = signs.repeat_interleave(at.heads).expand(len(x), -1)
    gram = x.T @ x + 1e-3 * len(x) * torch.eye(x.shape[1], device=x.device)
    indexer.weights_proj.weight.copy_(torch.linalg.solve(gram, x.T @ even).T)


@torch.no_grad()
def attended(at: Attention, x: Tensor, cos: Tensor, sin: Tensor, rows: Tensor) -> Tensor:
    """What queries `rows` of normed inputs x [T, hidden] attend: mean over heads, [R, T]."""
    q = at.q_b_proj(at.q_a_layernorm(at.q_a_proj(x[rows]))).view(1, len(rows), at.heads, -1)
    latent, k_rope = at.kv_a_proj_with_mqa(x).split((at.latent, at.rope), -1)
    k_nope = at.kv_b_proj(at.kv_a_layernorm(latent)).view(len(x), at.heads, -1)[..., : at.nope]
    k_rope = rotate(k_rope.view(1, len(x), 1, -1), cos, sin)[0]
    q_rope = rotate(q[..., at.nope :], cos[rows], sin[rows])
    q = torch.cat((q[..., : at.nope], q_rope), -1)[0].transpose(0, 1)
    k = torch.cat((k_nope, k_rope.expand(-1, at.heads, -1)), -1).permute(1, 2, 0)
    scores = (q @ k).float() * at.scale
    return (scores + unseen(rows, len(x))).softmax(-1).mean(0)


def unseen(rows: Tensor, length: int) -> Tensor:
    """-inf [R, length] where a row does not see a token, else 0."""
    columns = torch.arange(length, device=rows.device)
    return torch.where(columns > rows.unsqueeze(1), -math.inf, 0.0)


@torch.no_grad()
def inputs(model: DemoModel, tokens: Tensor) -> Iterator[tuple[Layer, Tensor]]:
    """Each layer and its normed inputs [T, hidden], for tokens [T]."""
    x = model.model.embed_tokens(tokens).unsqueeze(0)
    cos, sin = model.cos[: len(tokens)], model.sin[: len(tokens)]
    for layer in model.model.layers[:-1]:
        yield layer, layer.input_layernorm(x)[0]
        x, _ = layer(x, cos, sin, None)


@torch.no_grad()
def query_latent(layer: Layer, x: Tensor) -> Tensor:
    return layer.self_attn.q_a_layernorm(layer.self_attn.q_a_proj(x))


def distil(
    model: DemoModel, texts: list[tuple[Tensor, Tensor]], args: argparse.Namespace
) -> tuple[list[Indexer], list[list[float]]]:
    """Train on texts (token ids [T], positions [P] from which an answer is said), one a step.
    Returns the indexers and the loss curve: step, then KL divergence by layer, nats."""
    device, c = model.lm_head.weight.device, model.config
    generator = torch.Generator().manual_seed(args.seed)
    indexers = [Indexer(c["hidden_size"], c["q_lora_rank"], args.heads).to(device)
                for _ in range(c["num_hidden_layers"])]  # fmt: skip
    for indexer, (layer, x) in zip(indexers, inputs(model, texts[0][0].to(device)), strict=True):
        start_from(indexer, layer, x.float())
    optimizer = torch.optim.Adam([p for i in indexers for p in i.parameters()], betas=(0.9, 0.98))
    curve = list[list[float]]()
    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args.steps, args.lr)
        tokens, said = texts[step % len(texts)]
        length = len(tokens)
        some = torch.cat((said[: args.rows // 8], torch.randperm(length, generator=generator)))
        some = some[: args.rows].to(device)
        cos, sin, losses = model.cos[:length], model.sin[:length], []
        for indexer, (layer, x) in zip(indexers, inputs(model, tokens.to(device)), strict=True):
            wanted = attended(layer.self_attn, x, cos, sin, some)
            latent, hidden = query_latent(layer, x).float(), unseen(some, length)
            scores = indexer(x.float(), latent, cos[:, 0], sin[:, 0], some) + hidden
            shares = scores.log_softmax(-1).clamp(min=-1e4)  # no -inf times 0
            losses.append(F.kl_div(shares, wanted, reduction="batchmean"))
        torch.stack(losses).sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 250 == 249:  # what is there if it is stopped
            save_tensors(export(indexers), args.out / "model.safetensors")
        if step % (args.steps // 20 or 1) == 0 or step == args.steps - 1:
            curve.append([step, *(round(x.item(), 4) for x in losses)])
            print(*curve[-1], flush=True)
    return indexers, curve


def learning_rate(step: int, steps: int, peak: float) -> float:
    return (
        peak * min(1.0, (step + 1) / 20) * (0.01 + 0.495 * (1 + math.cos(math.pi * step / steps)))
    )


@torch.no_grad()
def sparse_logits(
    model: DemoModel, indexers: list[Indexer], tokens: Tensor, top_k: int, measure: bool = True
) -> tuple[Tensor, list[float]]:
    """Logits [T, V] of tokens [T] with every row attending its top_k best, and, to `measure`, by
    layer the share of the dense attention's weight that these have, over rows that see more."""
    x = model.model.embed_tokens(tokens).unsqueeze(0)
    length, shares = len(tokens), []
    cos, sin = model.cos[:length], model.sin[:length]
    every = torch.arange(length, device=tokens.device)
    for indexer, layer in zip(indexers, model.model.layers[:-1], strict=True):
        h = layer.input_layernorm(x)[0]
        mask = torch.zeros(1, 1, length, length, dtype=torch.bool, device=tokens.device)
        kept = count = 0.0
        for rows in every.split(GROUP):
            latent = query_latent(layer, h).float()
            scores = indexer(h.float(), latent, cos[:, 0], sin[:, 0], rows)
            scores = scores + unseen(rows, length)
            best = scores.topk(min(top_k, length), -1)[1]
            chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, best, True)
            mask[0, 0, rows] = chosen & (unseen(rows, length) == 0)
            late = rows[rows >= top_k]
            if measure and len(late):
                weight = attended(layer.self_attn, h, cos, sin, late)
                kept += (weight * chosen[rows >= top_k]).sum().item()
                count += len(late)
        shares.append(kept / max(count, 1))
        x, _ = layer(x, cos, sin, mask)
    return model.lm_head(model.model.norm(x))[0], shares


def export(indexers: list[Indexer]) -> dict[str, Tensor]:
    """The checkpoint's tensors in BF16."""
    return {
        f"model.layers.{i}.self_attn.indexer.{name}": value.detach().cpu().to(torch.bfloat16)
        for i, indexer in enumerate(indexers)
        for name, value in indexer.state_dict().items()
    }


@torch.no_grad()
def losses(
    model: DemoModel, indexers: list[Indexer], texts: list[list[int]], top_k: int
) -> dict[str, Any]:
    """Mean cross entropy of texts, nats per token, dense and sparse; the ratio of perplexities; and
    by layer, which share of the attention's weight the chosen tokens have in the longest text."""
    device = model.lm_head.weight.device
    dense, sparse, count, shares = 0.0, 0.0, 0, list[float]()
    for ids in sorted(texts, key=len):
        tokens = torch.tensor(ids, device=device)
        whole = model.lm_head(model(tokens.unsqueeze(0)))[0]
        some, shares = sparse_logits(model, indexers, tokens, top_k)
        for logits, add in ((whole, True), (some, False)):
            loss = F.cross_entropy(logits[:-1].float(), tokens[1:], reduction="sum").item()
            dense, sparse = (dense + loss, sparse) if add else (dense, sparse + loss)
        count += len(ids) - 1
    return {
        "tokens": count,
        "dense": round(dense / count, 4),
        "sparse": round(sparse / count, 4),
        "perplexity_ratio": round(math.exp((sparse - dense) / count), 4),
        "shares": [round(x, 3) for x in shares],
    }


# --- the sibling ------------------------------------------------------------------------------


def add_options(p: argparse.ArgumentParser) -> None:
    p.add_argument("--dsa", action="store_true", help="train the V3.2 sibling's indexers instead")
    p.add_argument(
        "--base", type=Path, default=REPO / "core/ds_runtime/demo", help="--dsa: of what"
    )
    p.add_argument("--heads", type=int, default=8, help="--dsa: index heads, 4 or 8")
    p.add_argument("--rows", type=int, default=1024, help="--dsa: queries of a text, a step")
    p.add_argument("--top-k", type=int, default=TOP_K, help="--dsa: index_topk")
    p.add_argument("--every", type=int, default=1, metavar="N", help="--dsa: score every Nth key")


def heldout_texts(data: Path, tokenizer: Tokenizer, heldout: dict[str, Any]) -> list[list[int]]:
    """The held-out passages, and LENGTH tokens of each book's end, from where they are not trained
    on."""
    texts = [passage["text"] for passage in heldout["prose"]]
    texts += [end for _, end in dt.load_books(data).values()]
    return [[0, *ids.ids[: LENGTH - 1]] for ids in tokenizer.encode_batch(texts)]


def training_texts(
    args: argparse.Namespace, tokenizer: Tokenizer, heldout: dict[str, Any]
) -> list[tuple[Tensor, Tensor]]:
    """Rows of the kinds and lengths of the base's long ones, shuffled: token ids without what
    fills a row up, and the positions that an answer is said from."""
    keys = json.loads((args.base / "heldout_keys.json").read_text(encoding="utf-8"))
    scale = args.scale
    first = Job(f"dsa-{args.seed}", args.data, tokenizer.to_str(), Banned.of(heldout), 0,
                int(1500 * scale), int(500 * scale), int(200 * scale))  # fmt: skip
    rows = run_second(SecondJob(first, reserved(keys), 0, 0, int(800 * scale), 0,
                                int(800 * scale), int(400 * scale), int(500 * scale)))  # fmt: skip
    texts = []
    for part in rows[1:]:
        for ids, weights in zip(*part, strict=True):
            used = int(np.flatnonzero(ids != 2)[-1]) + 1  # 2 fills rows up
            said = np.flatnonzero(weights[1:used] == 100)
            few = len(said) < used // 2  # of a book all weighs fully
            texts.append((torch.from_numpy(ids[:used].astype(np.int64)),
                          torch.from_numpy(said if few else said[:0])))  # fmt: skip
    np.random.default_rng(args.seed).shuffle(texts)  # type: ignore[arg-type]
    return texts


@torch.no_grad()
def keys_found(
    model: DemoModel,
    indexers: list[Indexer],
    prompts: list[tuple[list[int], list[int]]],
    top_k: int,
) -> dict[str, int]:
    """How many planted keys greedy decoding finds."""

    def best(ids: list[int]) -> list[int]:
        tokens = torch.tensor(ids, device=model.lm_head.weight.device)
        found: list[int] = (
            sparse_logits(model, indexers, tokens, top_k, False)[0].argmax(-1).tolist()
        )
        return found

    found = {"right": keys_right(best, prompts), "of": len(prompts)}
    print("keys", top_k, found, flush=True)
    return found


def load_indexers(model: DemoModel, folder: Path, heads: int) -> list[Indexer]:
    """Those of a checkpoint, in float32."""
    c, device = model.config, model.lm_head.weight.device
    tensors, made = load_file(folder / "model.safetensors"), list[Indexer]()
    for i in range(c["num_hidden_layers"]):
        own = f"model.layers.{i}.self_attn.indexer."
        indexer = Indexer(c["hidden_size"], c["q_lora_rank"], heads)
        indexer.load_state_dict({k[len(own) :]: v.float() for k, v in tensors.items() if own in k})
        made.append(indexer.to(device))
    return made


def evaluate(args: argparse.Namespace, model: DemoModel) -> dict[str, Any]:
    """What the sibling in args.out costs on held-out prose, by how many tokens a row attends, and
    how many planted keys it finds."""
    indexers = load_indexers(model, args.out, args.heads)
    tokenizer = Tokenizer.from_file(str(args.base / "tokenizer.json"))
    heldout = json.loads((args.base / "heldout.json").read_text(encoding="utf-8"))
    texts = heldout_texts(args.data, tokenizer, heldout)
    scores = {k: losses(model, indexers, texts, k) for k in (64, 128, 256)}
    print(json.dumps(scores, indent=1), flush=True)
    prompts = key_prompts(tokenizer, args.base, KEYS_TOKENS)[:: args.every]
    keys = keys_found(model, indexers, prompts, args.top_k)
    return {"heldout_prose_by_top_k": scores, f"heldout_keys_at_{KEYS_TOKENS}": keys}


def run(args: argparse.Namespace) -> None:
    """Train, measure and write the sibling; or measure what is there."""
    torch.set_float32_matmul_precision("high")
    model, recipe = load_checkpoint(args.base, args.device), args.out / "RECIPE.json"
    if args.evaluate_only:
        known = json.loads(recipe.read_text(encoding="utf-8"))
        write_recipe(recipe, {**known, "scores": evaluate(args, model)})
        return
    tokenizer = Tokenizer.from_file(str(args.base / "tokenizer.json"))
    heldout = json.loads((args.base / "heldout.json").read_text(encoding="utf-8"))
    rows = training_texts(args, tokenizer, heldout)
    began = time.monotonic()
    write_json(args.out / "config.json", sibling_config(model.config, args.heads, args.top_k))
    indexers, curve = distil(model, rows, args)
    tensors = export(indexers)
    save_tensors(tensors, args.out / "model.safetensors")
    made = {
        "command": f"python tools/train_demo.py --data DIR --out DIR --dsa --heads {args.heads} "
                   f"--top-k {args.top_k} --steps {args.steps} --rows {args.rows} --lr {args.lr} "
                   f"--seed {args.seed} --scale {args.scale}",
        "loss": "KL divergence of softmax(index scores) from the mean over heads of the dense "
                "model's attention, nats; the model is not changed",
        "weights_bytes": sum(t.nbytes for t in tensors.values()),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "device": torch.cuda.get_device_name() if args.device == "cuda" else args.device,
        "training": {"rows": len(rows), "queries": args.steps * args.rows,
                     "seconds": round(time.monotonic() - began, 1), "curve": curve},
    }  # fmt: skip
    write_recipe(recipe, made)
    if args.evaluate:
        write_recipe(recipe, {**made, "scores": evaluate(args, model)})
