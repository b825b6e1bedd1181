"""Train ds-runtime's demo model, a tiny DeepSeek-V3, and score it on its held-out set.

    python tools/train_demo.py --data DIR --out core/ds_runtime/demo --heldout-only
    python tools/train_demo.py --data DIR --out core/ds_runtime/demo --device cuda
    python tools/train_demo.py --data DIR --out SECOND --device cuda --second FIRST
    python tools/train_demo.py --data DIR --out core/ds_runtime/demo --device cuda --third SECOND
    python tools/train_demo.py --data DIR --out core/ds_runtime/demo_v32 --device cuda --dsa

DIR holds `text/*.txt` (books) and `gsm8k_train.jsonl`. The first command writes the held-out sets,
which later runs check against instead of replacing. The third trains the result of the second, in
the folder FIRST, on rows of up to 4608 tokens, the fourth that one's, in SECOND, to answer under
schemas. docs/demo.md describes the result.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

import demo_dsa
from demo_corpus import (
    LONG,
    SHORT,
    Banned,
    Rows,
    Sources,
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
from demo_keys import XLONG, heldout_keys, reserved, second_rows, write_keys
from demo_model import DemoModel, demo_config
from demo_schemas import heldout_schemas, reserved_names, write_schemas
from demo_scores import evaluate

VOCAB = 2048
MTP_WEIGHT, BIAS_RATE = 0.4, 0.001
FIRST, SECOND = (0, 0, 0, 0, 0, 0, 0, 1), (0, 2, 0, 1, 0, 2, 0, 1)  # kinds of rows, step by step
WINDOW, LITTLE = 1536, 256  # of what the teacher sees of the longest rows; what is little context
LENGTHS = (SHORT, LONG, XLONG)
STAGES = ("first_stage", "second_stage")


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


def drift(
    head: Tensor, hidden: Tensor, old_head: Tensor, old_hidden: Tensor, where: Tensor
) -> Tensor:
    """Mean KL divergence of head on hidden [B, T, H] from the teacher's, at positions `where`."""
    now = F.linear(hidden.flatten(0, 1), head).float().log_softmax(-1)
    old = F.linear(old_hidden.flatten(0, 1), old_head).float().log_softmax(-1)
    each = (old.exp() * (old - now)).sum(-1) * where.flatten()
    return each.sum() / where.sum().clamp(min=1)


def step_losses(
    model: DemoModel, tokens: Tensor, weights: Tensor, loss: Any, teacher: Teacher | None = None
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """(main loss, MTP loss, expert loads) of one batch [B, T]."""
    documents = (tokens == 0).cumsum(1)  # every document begins with BOS, id 0
    mask = None if tokens.shape[1] == XLONG else document_mask(documents)  # one document a row
    loads = list[Tensor]()
    following = F.pad(tokens[:, 1:], (0, 1), value=2)
    head = model.lm_head.weight
    hidden = model(tokens, mask, loads)
    drafted = model.draft(hidden, following, mask, loads)
    losses = []
    for by, found in ((1, hidden), (2, drafted)):
        inside = documents[:, by:] == documents[:, :-by]
        targets = F.pad(tokens[:, by:], (0, by))
        losses.append(loss(head, found, targets, F.pad(weights[:, by:] * inside, (0, by))))
    if teacher is not None and tokens.shape[1] > SHORT:
        old = teacher(tokens, following, mask)
        for i, by in enumerate((1, 2)):
            inside = documents[:, by:] == documents[:, :-by]
            said = (weights[:, by:] >= 0.5) | (tokens[:, by:] == 2)  # an answer, or no text
            where = F.pad(inside & ~said, (0, by)) & teacher.knows(tokens)
            losses[i] = losses[i] + teacher.drift(head, (hidden, drafted)[i], *old[i], where)
    return losses[0], losses[1], loads


class Teacher:
    """The model as the first stage left it. Where no answer is said, the second stage holds to its
    predictions, so that the books are not learned by heart. Of the longest rows it sees windows of
    a length that it was trained on."""

    def __init__(self, folder: Path, device: str, drift: Any) -> None:
        self.model, self.drift = load_checkpoint(folder, device), drift

    @torch.no_grad()
    def __call__(
        self, tokens: Tensor, following: Tensor, mask: Tensor | None
    ) -> list[tuple[Tensor, Tensor]]:
        """(head, hidden [B, T, H]) of the model and of its MTP layer."""
        width = WINDOW if mask is None else tokens.shape[1]
        hidden = self.model(tokens.reshape(-1, width), mask)
        drafted = self.model.draft(hidden, following.reshape(-1, width), mask)
        head = self.model.lm_head.weight
        return [(head, part.reshape(*tokens.shape, -1)) for part in (hidden, drafted)]

    def knows(self, tokens: Tensor) -> Tensor:
        """Positions [T] where it has seen enough before."""
        at = torch.arange(tokens.shape[1], device=tokens.device)
        if len(at) < XLONG:
            return at >= 0
        return (at < WINDOW) | (at % WINDOW >= LITTLE)


def learning_rate(step: int, steps: int, peak: float) -> float:
    warm = min(1.0, (step + 1) / 150)
    return peak * warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / steps)))


def train(
    model: DemoModel, rows: list[Rows], order: tuple[int, ...], args: argparse.Namespace
) -> dict[str, Any]:
    """Train on rows of each length, in batches of `order`'s kinds over and over; what was seen."""
    loss: Any = weighted_loss
    away: Any = drift
    if args.compile:
        torch._dynamo.config.cache_size_limit = 64  # three lengths of three kinds of layers
        for layer in model.model.layers:
            layer.compile(dynamic=False)
        loss = torch.compile(weighted_loss, dynamic=False)
        away = torch.compile(drift, dynamic=False)
    before = args.second or args.third
    teacher = Teacher(before, args.device, away) if before else None
    matrices = [p for n, p in model.named_parameters() if p.dim() > 1 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.dim() == 1 or "embed" in n]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}],
        lr=args.lr, betas=(0.9, 0.95), fused=args.device != "cpu",
    )  # fmt: skip
    feeds = [Feed(part, args.batch_tokens // part[0].shape[1], args.device, args.seed + i)
             for i, part in enumerate(rows)]  # fmt: skip
    shown = [order.index(kind) for kind in range(len(rows))]
    gates = [m for m in model.modules() if hasattr(m, "e_score_correction_bias")]
    record: list[list[float]] = []
    usage, began, tokens_seen, steps = None, time.monotonic(), 0, args.steps
    for step in range(args.steps):
        rate = learning_rate(step, steps, args.lr)
        for group in optimizer.param_groups:
            group["lr"] = rate
        kind = order[step % len(order)]
        tokens, weights = feeds[kind].next()
        tokens_seen += tokens.numel()
        with torch.autocast(args.device, torch.bfloat16):
            main, mtp, loads = step_losses(model, tokens, weights, loss, teacher)
        (main + MTP_WEIGHT * mtp).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        load = torch.stack([x.detach() for x in loads])
        usage = load if usage is None else 0.98 * usage + 0.02 * load
        bias_rate = BIAS_RATE if step < 0.9 * steps else BIAS_RATE / 10
        for gate, share in zip(gates, load, strict=True):
            gate.e_score_correction_bias += bias_rate * (share.mean() - share).sign()
        if step % 25 < 2 * len(order) and step % len(order) in shown:
            record.append([step, kind, round(main.item(), 4), round(mtp.item(), 4)])
        if (step % 125 < 8 and step % len(order) in shown) or step == steps - 1:
            seconds = time.monotonic() - began
            print(f"step {step} rows of {LENGTHS[kind]} main {main.item():.4f} "
                  f"mtp {mtp.item():.4f} {tokens_seen / seconds:,.0f} tok/s {seconds:.0f} s",
                  flush=True)  # fmt: skip
    assert usage is not None
    facts = {
        "tokens": tokens_seen, "seconds": round(time.monotonic() - began, 1),
        "passes": [feed.passes for feed in feeds], "rows": [len(part[0]) for part in rows],
        "expert_load_min": round(usage.min().item(), 4),
        "expert_load_max": round(usage.max().item(), 4), "curve": record,
    }  # fmt: skip
    return facts


def plot(stages: list[dict[str, Any]], path: Path) -> None:
    """The loss curves of the stages, one after the other."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), dpi=100)
    curve, before = list[list[float]](), 0
    for stage in stages:
        curve += [[before + step, *rest] for step, *rest in stage["training"]["curve"]]
        before += stage["steps"]
    for kind, length in enumerate(LENGTHS):
        part = np.array([point for point in curve if point[1] == kind])
        if len(part):
            name = f"rows of {length} tokens"
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
    p.add_argument("--evaluate", action=argparse.BooleanOptionalAction, default=True)
    p.add_argument("--second", type=Path, metavar="FIRST", help="train this checkpoint further")
    p.add_argument("--third", type=Path, metavar="SECOND", help="train this one still further")
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
    held = heldout_sets(args.out, sources)
    if args.heldout_only:
        return
    torch.set_float32_matmul_precision("high")
    began, before = time.monotonic(), args.second or args.third
    earlier: list[dict[str, Any]] = []  # recipes of the stages before this one
    banned, made = (
        Banned.of(held[0]),
        {"jobs": args.jobs, "scale": args.scale, "workers": args.workers},
    )
    if before:
        last = json.loads((before / "RECIPE.json").read_text(encoding="utf-8"))
        earlier = [last.pop(stage) for stage in STAGES if stage in last] + [last]
        assert len(earlier) == (1 if args.second else 2), f"{before}: {len(earlier)} stages"
        for name in ("tokenizer.json", "tokenizer_config.json"):
            if args.out.resolve() != before.resolve():
                shutil.copy(before / name, args.out / name)
        tokenizer = Tokenizer.from_file(str(args.out / "tokenizer.json"))
        model = load_checkpoint(before, args.device).float().train()
        names = reserved_names(held[2]) if args.third else None
        rows = second_rows(
            args.data, tokenizer, banned, reserved(held[1]), args.seed, names=names, **made
        )
    else:
        tokenizer = train_tokenizer(sources, banned, VOCAB)
        config = demo_config(tokenizer.get_vocab_size())
        assert config["vocab_size"] == VOCAB
        write_tokenizer(tokenizer, config, args.out)
        rows = [*build_rows(args.data, tokenizer, banned, args.seed, **made)]
        model = DemoModel(config)
        model.initialise(args.seed)
        model.to(args.device)
    print(f"{sum(part[0].size for part in rows):,} training tokens in "
          f"{time.monotonic() - began:.0f} s", flush=True)  # fmt: skip
    facts = train(model, rows, SECOND if before else FIRST, args)
    size = write_checkpoint(model, args.out)
    recipe = {
        "command": "python tools/train_demo.py --data DIR --out DIR "
                   f"{('', '--second FIRST ', '--third SECOND ')[len(earlier)]}"
                   f"--steps {args.steps} --seed {args.seed} --lr {args.lr} --jobs {args.jobs} "
                   f"--scale {args.scale}",
        "seed": args.seed, "steps": args.steps, "batch_tokens": args.batch_tokens,
        "learning_rate": args.lr, "mtp_loss_weight": MTP_WEIGHT, "data_sha256": sources.hashes,
        "heldout_sha256": (args.out / "heldout.sha256").read_text().split()[0],
        "heldout_keys_sha256": (args.out / "heldout_keys.sha256").read_text().split()[0],
        "heldout_schemas_sha256": (args.out / "heldout_schemas.sha256").read_text().split()[0],
        "weights_bytes": size,
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "device": torch.cuda.get_device_name() if args.device == "cuda" else args.device,
        "training": facts,
    }  # fmt: skip
    kept = ("command", "seed", "steps", "batch_tokens", "learning_rate", "scores", "versions",
            "device", "training")  # fmt: skip
    for stage, known in zip(STAGES, earlier, strict=False):
        recipe[stage] = {key: known[key] for key in kept}
    # points of a curve: step, kind of row (512, 2048, 4608 tokens), losses of model and MTP
    write_recipe(args.out / "RECIPE.json", recipe)
    if args.plot:
        plot([*earlier, recipe], args.plot)
    if args.evaluate:
        recipe["scores"] = evaluate(args.out, held[0], args.device, show=8)
        write_recipe(args.out / "RECIPE.json", recipe)
        print(json.dumps(recipe["scores"], indent=1))


def heldout_sets(out: Path, sources: Sources) -> list[dict[str, Any]]:
    """The held-out sets, written to `out`; an error if others were recorded there."""
    first = build_heldout(sources)
    sets = [first, heldout_keys(sources), heldout_schemas(first, sources.words)]
    stamps = ("heldout", "heldout_keys", "heldout_schemas")
    for made, name, write in zip(sets, stamps, (write_heldout, write_keys, write_schemas),
                                 strict=True):  # fmt: skip
        stamp = out / f"{name}.sha256"
        before = stamp.read_text() if stamp.exists() else None
        print(name, write(made, out))
        assert before in (None, stamp.read_text()), f"{name} differs from the recorded set"
    return sets


if __name__ == "__main__":
    main()
