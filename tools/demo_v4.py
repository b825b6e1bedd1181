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
from torch import Tensor

import demo_text as dt
from demo_corpus import Banned, encoded, load_sources, short_document, weigh
from demo_files import load_checkpoint, write_recipe
from demo_model import DemoModel
from demo_schemas import reserved_names, schema_document, weigh_object
from demo_v4_files import write_v4
from demo_v4_model import DemoV4, of_demo

DEMO = Path(__file__).parents[1] / "core" / "ds_runtime" / "demo"


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
