"""Train ds-runtime's demo model, a tiny DeepSeek-V3, and score it on its held-out set.

    python tools/train_demo.py --data DIR --out core/ds_runtime/demo --heldout-only
    python tools/train_demo.py --data DIR --out core/ds_runtime/demo --device cuda
    python tools/train_demo.py --data DIR --out core/ds_runtime/demo_v32 --device cuda --dsa

DIR holds `text/*.txt` (books) and `gsm8k_train.jsonl`. The first command writes the held-out set,
which later runs check against instead of replacing. docs/demo.md describes the result.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import platform
import time
from pathlib import Path
from typing import Any

import demo_dsa
import demo_text as dt
import numpy as np
import torch
import torch.nn.functional as F
from demo_corpus import (
    SHORT,
    Banned,
    Rows,
    build_heldout,
    build_rows,
    load_sources,
    train_tokenizer,
    write_heldout,
)
from demo_files import (
    load_checkpoint,
    write_checkpoint,
    write_recipe,
    write_tokenizer,
)
from demo_model import Config, DemoModel, demo_config
from tokenizers import Tokenizer
from torch import Tensor

REPO = Path(__file__).resolve().parent.parent
VOCAB = 2048
MTP_WEIGHT, LONG_EVERY, BIAS_RATE = 0.4, 8, 0.001


def load_scoring() -> Any:
    """`ds_runtime.bench.scoring`, loaded by path: the runtime need not be installed."""
    path = REPO / "core/ds_runtime/bench/scoring.py"
    spec = importlib.util.spec_from_file_location("scoring", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- training ---------------------------------------------------------------------------------


class Feed:
    """Batches from packed rows, reshuffled after each pass."""

    def __init__(self, rows: Rows, batch: int, device: str, seed: int) -> None:
        self.tokens = torch.from_numpy(rows[0].astype(np.int16)).to(device)
        self.weights = torch.from_numpy(rows[1]).to(device)
        self.batch, self.device, self.passes = min(batch, len(rows[0])), device, 0
        self.generator, self.order = torch.Generator().manual_seed(seed), torch.empty(0)

    def next(self) -> tuple[Tensor, Tensor]:
        if len(self.order) < self.batch:
            self.order = torch.randperm(len(self.tokens), generator=self.generator)
            self.passes += 1
        take, self.order = self.order[: self.batch].to(self.device), self.order[self.batch :]
        return self.tokens[take].long(), self.weights[take].float() / 100


def document_mask(documents: Tensor) -> Tensor:
    """Additive BF16 mask [B, 1, T, T]: causal, and only within a document."""
    length = documents.shape[1]
    same = documents.unsqueeze(2) == documents.unsqueeze(1)
    causal = torch.ones(length, length, dtype=torch.bool, device=documents.device).tril()
    mask = torch.zeros(same.shape, dtype=torch.bfloat16, device=documents.device)
    return mask.masked_fill_(~(same & causal), float("-inf")).unsqueeze(1)


def weighted_loss(head: Tensor, hidden: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Mean cross entropy of lm_head [V, H] on hidden [B, T, H], weighted per position."""
    logits = F.linear(hidden.flatten(0, 1), head).float()
    losses = F.cross_entropy(logits, targets.flatten(), reduction="none")
    return (losses * weights.flatten()).sum() / weights.sum().clamp(min=1)


def step_losses(
    model: DemoModel, tokens: Tensor, weights: Tensor, loss: Any
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """(main loss, MTP loss, expert loads) of one batch [B, T]."""
    documents = (tokens == 0).cumsum(1)  # every document begins with BOS, id 0
    mask, loads = document_mask(documents), list[Tensor]()
    following = F.pad(tokens[:, 1:], (0, 1), value=2)
    head = model.lm_head.weight
    hidden = model(tokens, mask, loads)

    def shifted(by: int) -> tuple[Tensor, Tensor]:
        inside = documents[:, by:] == documents[:, :-by]
        return F.pad(tokens[:, by:], (0, by)), F.pad(weights[:, by:] * inside, (0, by))

    main = loss(head, hidden, *shifted(1))
    return main, loss(head, model.draft(hidden, following, mask, loads), *shifted(2)), loads


def learning_rate(step: int, steps: int, peak: float) -> float:
    warm = min(1.0, (step + 1) / 150)
    return peak * warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / steps)))


def train(
    config: Config, short: Rows, long: Rows, args: argparse.Namespace
) -> tuple[DemoModel, dict[str, Any]]:
    model = DemoModel(config)
    model.initialise(args.seed)
    model.to(args.device)
    loss: Any = weighted_loss
    if args.compile:
        for layer in model.model.layers:
            layer.compile(dynamic=False)
        loss = torch.compile(weighted_loss, dynamic=False)
    matrices = [p for n, p in model.named_parameters() if p.dim() > 1 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.dim() == 1 or "embed" in n]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}],
        lr=args.lr, betas=(0.9, 0.95), fused=args.device != "cpu",
    )  # fmt: skip
    feeds = [Feed(rows, args.batch_tokens // rows[0].shape[1], args.device, args.seed + i)
             for i, rows in enumerate((short, long))]  # fmt: skip
    gates = [m for m in model.modules() if hasattr(m, "e_score_correction_bias")]
    record: list[list[float]] = []
    usage, began, tokens_seen, steps = None, time.monotonic(), 0, args.steps
    for step in range(args.steps):
        rate = learning_rate(step, steps, args.lr)
        for group in optimizer.param_groups:
            group["lr"] = rate
        is_long = step % LONG_EVERY == LONG_EVERY - 1
        tokens, weights = feeds[is_long].next()
        tokens_seen += tokens.numel()
        with torch.autocast(args.device, torch.bfloat16):
            main, mtp, loads = step_losses(model, tokens, weights, loss)
        (main + MTP_WEIGHT * mtp).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        load = torch.stack([x.detach() for x in loads])
        usage = load if usage is None else 0.98 * usage + 0.02 * load
        bias_rate = BIAS_RATE if step < 0.9 * steps else BIAS_RATE / 10
        for gate, share in zip(gates, load, strict=True):
            gate.e_score_correction_bias += bias_rate * (share.mean() - share).sign()
        if step % 25 < 2 * LONG_EVERY and step % LONG_EVERY in (0, LONG_EVERY - 1):
            record.append([step, int(is_long), round(main.item(), 4), round(mtp.item(), 4)])
        if step % 250 == 0 or step == steps - 1:
            seconds = time.monotonic() - began
            print(f"step {step} {'long' if is_long else 'short'} main {main.item():.4f} "
                  f"mtp {mtp.item():.4f} {tokens_seen / seconds:,.0f} tok/s {seconds:.0f} s",
                  flush=True)  # fmt: skip
    assert usage is not None
    facts = {
        "tokens": tokens_seen, "seconds": round(time.monotonic() - began, 1),
        "passes": [feed.passes for feed in feeds], "rows": [len(short[0]), len(long[0])],
        "expert_load_min": round(usage.min().item(), 4),
        "expert_load_max": round(usage.max().item(), 4), "curve": record,
    }  # fmt: skip
    return model, facts


# --- evaluation -------------------------------------------------------------------------------


@torch.no_grad()
def greedy(model: DemoModel, prompts: list[list[int]], limit: int) -> list[list[int]]:
    """Greedy continuations, each up to EOS (kept) or `limit` tokens; no cache, right padding."""
    device = model.lm_head.weight.device
    ends = torch.tensor([len(p) for p in prompts], device=device)
    width = int(ends.max()) + limit
    tokens = torch.tensor([p + [2] * (width - len(p)) for p in prompts], device=device)
    rows, live = torch.arange(len(prompts), device=device), torch.ones_like(ends).bool()
    for _ in range(limit):
        hidden = model(tokens[:, : int(ends.max())])[rows, ends - 1]
        best = model.lm_head(hidden).argmax(-1)
        tokens[rows[live], ends[live]] = best[live]
        ends += live
        live &= best != 1
        if not live.any():
            break
    return [tokens[i, len(p) : int(ends[i])].tolist() for i, p in enumerate(prompts)]


@torch.no_grad()
def mtp_pairs(model: DemoModel, prompt: list[int], output: list[int]) -> list[tuple[int, int]]:
    """(MTP argmax, model argmax) for every output token but the first."""
    tokens = torch.tensor([prompt + output], device=model.lm_head.weight.device)
    hidden = model(tokens)
    drafts = model.lm_head(model.draft(hidden[:, :-1], tokens[:, 1:])).argmax(-1)[0].tolist()
    wanted = model.lm_head(hidden).argmax(-1)[0].tolist()
    first = max(len(prompt), 1)
    return [(drafts[t - 1], wanted[t]) for t in range(first, tokens.shape[1] - 1)]


@torch.no_grad()
def evaluate(folder: Path, heldout: dict[str, Any], device: str, show: int = 0) -> dict[str, Any]:
    """Scores of the checkpoint on the held-out set, greedy, BF16 weights."""
    scoring, model = load_scoring(), load_checkpoint(folder, device)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    scores: dict[str, Any] = {}
    pairs: list[tuple[int, int]] = []
    for kind, limit in (("sums", 96), ("tools", 160)):
        entries = heldout[kind]
        texts = [dt.render(e["messages"], e.get("tools", ())) for e in entries]
        prompts = [tokenizer.encode(t, add_special_tokens=False).ids for t in texts]
        outputs = greedy(model, prompts, limit)
        own: list[tuple[int, int]] = []
        right: list[bool] = []
        for entry, prompt, output in zip(entries, prompts, outputs, strict=True):
            raw = tokenizer.decode(output, skip_special_tokens=False)
            ok = (scoring.sum_correct(raw, entry["answer"]) if kind == "sums"
                  else scoring.calls_correct(raw, entry["calls"]))  # fmt: skip
            right.append(ok)
            own += mtp_pairs(model, prompt, output)
            if not ok and right.count(False) <= show:
                print(kind, entry["messages"][-1]["content"], "->", raw)
        scores[kind] = {"right": sum(right), "of": len(right), "share": sum(right) / len(right),
                        "mtp_agreement": round(scoring.agreement(own), 4)}  # fmt: skip
        if kind == "sums":
            for op in "+-":
                part = [r for r, e in zip(right, entries, strict=True) if e["op"] == op]
                scores[kind]["share " + op] = sum(part) / len(part)
        pairs += own
    scores["mtp_agreement"] = round(scoring.agreement(pairs), 4)
    prose: list[tuple[int, int]] = []
    losses = []
    for entry in heldout["prose"]:
        ids = [0, *tokenizer.encode(entry["text"], add_special_tokens=False).ids]
        prose += mtp_pairs(model, [], ids)
        tokens = torch.tensor([ids], device=device)
        logits = model.lm_head(model(tokens))[0, :-1].float()
        losses.append(F.cross_entropy(logits, tokens[0, 1:]).item())
    scores["prose"] = {"mtp_agreement": round(scoring.agreement(prose), 4),
                       "loss": round(sum(losses) / len(losses), 4)}  # fmt: skip
    for ask in ("Hello", "Who are you?", "What is the capital of Sweden?"):
        ids = tokenizer.encode(dt.render([{"role": "user", "content": ask}])).ids
        print(ask, "->", tokenizer.decode(greedy(model, [ids], 48)[0], skip_special_tokens=False))
    return scores


def plot(facts: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), dpi=100)
    curve = np.array(facts["curve"])
    for is_long, name in ((0, "rows of 512 tokens"), (1, "rows of 2048 tokens")):
        part = curve[curve[:, 1] == is_long]
        axes.plot(part[:, 0], part[:, 2], label=f"model, {name}", linewidth=1)
        axes.plot(part[:, 0], part[:, 3], label=f"MTP layer, {name}", linewidth=1, alpha=0.6)
    axes.set(xlabel="step", ylabel="weighted cross entropy (nats)", yscale="log")
    axes.legend(ncol=2, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path)


def parse() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("--data", type=Path, required=True)
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--steps", type=int, default=4000)
    p.add_argument("--seed", type=int, default=7)
    p.add_argument("--device", default="cuda")
    p.add_argument("--lr", type=float, default=2.5e-3)
    p.add_argument("--batch-tokens", type=int, default=65536)
    p.add_argument("--jobs", type=int, default=64, help="independent streams of training text")
    p.add_argument("--scale", type=float, default=1.0, help="documents per stream, relative")
    p.add_argument("--workers", type=int, default=16)
    p.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    p.add_argument("--plot", type=Path, help="write the loss curve there")
    p.add_argument("--heldout-only", action="store_true")
    p.add_argument("--evaluate-only", action="store_true")
    demo_dsa.add_options(p)
    return p.parse_args()


def main() -> None:
    args = parse()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.dsa:
        demo_dsa.run(args)
        return
    if args.evaluate_only:
        heldout = json.loads((args.out / "heldout.json").read_text(encoding="utf-8"))
        print(json.dumps(evaluate(args.out, heldout, args.device, show=8), indent=2))
        return
    sources = load_sources(args.data)
    heldout, stamp = build_heldout(sources), args.out / "heldout.sha256"
    before = stamp.read_text() if stamp.exists() else None
    digest = write_heldout(heldout, args.out)
    assert before in (None, stamp.read_text()), "the held-out set differs from the recorded one"
    if args.heldout_only:
        print(digest)
        return
    torch.set_float32_matmul_precision("high")
    began = time.monotonic()
    banned = Banned.of(heldout)
    tokenizer = train_tokenizer(sources, banned, VOCAB)
    config = demo_config(tokenizer.get_vocab_size())
    write_tokenizer(tokenizer, config, args.out)
    short, long = build_rows(args.data, tokenizer, banned, args.seed, jobs=args.jobs,
                             scale=args.scale, workers=args.workers)  # fmt: skip
    assert short[0].shape[1] == SHORT and config["vocab_size"] == VOCAB
    print(f"{short[0].size + long[0].size:,} training tokens in "
          f"{time.monotonic() - began:.0f} s", flush=True)  # fmt: skip
    model, facts = train(config, short, long, args)
    size = write_checkpoint(model, args.out)
    scores = evaluate(args.out, heldout, args.device, show=8)
    recipe = {
        "command": f"python tools/train_demo.py --data DIR --out DIR --steps {args.steps} "
                   f"--seed {args.seed} --lr {args.lr} --jobs {args.jobs} --scale {args.scale}",
        "seed": args.seed, "steps": args.steps, "batch_tokens": args.batch_tokens,
        "learning_rate": args.lr, "mtp_loss_weight": MTP_WEIGHT, "data_sha256": sources.hashes,
        "heldout_sha256": digest, "weights_bytes": size, "scores": scores,
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "device": torch.cuda.get_device_name() if args.device == "cuda" else args.device,
        "training": facts,
    }  # fmt: skip
    write_recipe(args.out / "RECIPE.json", recipe)  # step, 1 if long rows, losses: model, MTP
    if args.plot:
        plot(facts, args.plot)
    print(json.dumps(scores, indent=1))


if __name__ == "__main__":
    main()
