"""Make the demo's sibling of the DeepSeek-V4 architecture, out of the demo, and train it on.

    PYTHONPATH=core python tools/demo_v4.py --data DIR --out OUT --device cuda --minutes 5

DIR holds `text/`, the books. The sibling begins as the demo's weights in V4's forms. It learns the
demo's documents in V4's encoding, and on prose the demo's predictions. It is written to OUT each
minute, with the states from which --begin goes on. docs/demo.md describes the result.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from demo_files import load_checkpoint, write_json, write_recipe
from demo_model import DemoModel
from demo_v4_files import config_of, write_v4
from demo_v4_model import DemoV4, of_demo
from demo_v4_scores import Heldout
from demo_v4_text import DEMO, DSML, UNUSED, Batch, Batches, on

WARM, LAST = 80, 0.02  # steps to the full learning rate; the share of it at the end
PROBES = 6
STATES = ("state.pt", "state-moes.pt")


def cross_entropy(model: DemoV4, ids: Tensor, weights: Tensor) -> Tensor:
    """Of a batch of conversations, where weights count."""
    logits = model(ids)[:, :-1].float().flatten(0, 1)
    each = F.cross_entropy(logits, ids[:, 1:].flatten(), reduction="none")
    weight = weights[:, 1:].flatten()
    return (each * weight).sum() / weight.sum()


def divergence(model: DemoV4, demo: DemoModel, ids: Tensor) -> Tensor:
    """KL divergence from the demo's predictions, over rows of prose."""
    with torch.no_grad():
        old = F.linear(demo(ids), demo.lm_head.weight).float().log_softmax(-1)
    now = model(ids).float().log_softmax(-1)
    each = (old.exp() * (old - now)).sum(-1)[:, :-1]
    where = ids[:, 1:] != 2
    return (each * where).sum() / where.sum()


def train(
    model: DemoV4, demo: DemoModel, feed: Iterator[Batch], held: Heldout, args: argparse.Namespace
) -> dict[str, Any]:
    """For args.minutes; `save` and scores each minute."""
    device, cuda = args.device, args.device == "cuda"
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.0, fused=cuda
    )
    step, seen, minute, waited = 0, 0, 1, 0.0
    curve: list[list[float]] = []
    facts: dict[str, Any] = {"scores": {}, "curve": curve}
    recent: dict[str, Tensor] = {}
    began = time.monotonic()
    while (spent := (time.monotonic() - began) / 60) < args.minutes:
        rate = LAST + (1 - LAST) * 0.5 * (1 + math.cos(math.pi * spent / args.minutes))
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min(1.0, (step + 1) / WARM) * rate
        asked = time.monotonic()
        batch = next(feed)
        waited += time.monotonic() - asked
        prose = not bool(batch[1].any())
        ids, weights = on(device, batch)
        with torch.autocast(device, torch.bfloat16):
            loss = divergence(model, demo, ids) if prose else cross_entropy(model, ids, weights)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        kind = "prose" if prose else "long" if ids.shape[1] > 1536 else "short"
        loss = loss.detach()
        recent[kind] = 0.9 * recent[kind] + 0.1 * loss if kind in recent else loss
        seen, step = seen + ids.numel(), step + 1
        if step % args.every == 0:
            shown = {k: round(float(v), 4) for k, v in sorted(recent.items())}
            curve.append([step, *(shown.get(k, math.nan) for k in ("short", "long", "prose"))])
            print(f"step {step} {spent:.2f} min {seen} tokens, waited {waited:.1f} s, {shown}",
                  flush=True)  # fmt: skip
        if spent >= minute and args.minutes - spent > 0.3:
            minute += 1
            facts["scores"][f"{spent:.1f}"] = scored(model, held, device)
            save(model, args)
    facts |= {"steps": step, "tokens": seen, "minutes": round(spent, 2)}
    return facts


def scored(model: DemoV4, held: Heldout, device: str) -> dict[str, Any]:
    began = time.monotonic()
    with torch.autocast(device, torch.bfloat16):
        found = held.score(model, device)
    print(found, f"{time.monotonic() - began:.1f} s", flush=True)
    return found


def save(model: DemoV4, args: argparse.Namespace) -> int:
    """Everything but the recipe; returns the size of the weights in bytes."""
    still = copy.deepcopy(model).cpu()
    size = write_v4(still, args.out)
    state = {k: v.bfloat16() if v.is_floating_point() else v for k, v in still.state_dict().items()}
    for part in STATES:
        mine = {k: v for k, v in state.items() if k.startswith("moes.") == ("moes" in part)}
        torch.save(mine, args.out / part)
    text = (DEMO / "tokenizer.json").read_text(encoding="utf-8")
    (args.out / "tokenizer.json").write_text(text.replace(UNUSED, DSML), encoding="utf-8")
    settings = (DEMO / "tokenizer_config.json").read_text(encoding="utf-8")
    write_tokenizer_config(args.out, settings)
    shutil.copy(DEMO / "generation_config.json", args.out)
    return size


def write_tokenizer_config(folder: Path, settings: str) -> None:
    """The demo's without its template: V4's encoding is the runtime's."""
    kept = json.loads(settings.replace(UNUSED, DSML))
    del kept["chat_template"]
    write_json(folder / "tokenizer_config.json", kept)


def begun(demo: DemoModel, probes: Any, args: argparse.Namespace) -> DemoV4:
    """The demo as a V4, or the state that an earlier run left."""
    if args.begin is None:
        model = of_demo(demo, [on("cpu", next(probes))[0] for _ in range(PROBES)])
        marks = model.embed.std(0)
        model.embed.data[5] = 0.5 * marks * torch.randn(len(marks))  # V4's token for calls
        return model
    model = DemoV4(config_of(demo.config))
    parts = (torch.load(args.begin / part, weights_only=True) for part in STATES)
    model.load_state_dict({k: v for part in parts for k, v in part.items()})
    return model


def as_it_is(batch: Batch) -> Batch:
    return batch


def parse() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("--data", type=Path, required=True)
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--minutes", type=float, default=5)
    p.add_argument("--lr", type=float, default=1e-3)
    p.add_argument("--seed", type=int, default=11)
    p.add_argument("--batch-tokens", type=int, default=32768)
    p.add_argument("--longest", type=int, default=4608, help="tokens of a document")
    p.add_argument("--device", default="cpu")
    p.add_argument("--threads", type=int, default=1, help="of a CPU that trains")
    p.add_argument("--workers", type=int, default=12, help="processes that write documents")
    p.add_argument("--every", type=int, default=50, help="steps between losses shown")
    p.add_argument("--limit", type=int, help="entries of each held-out set")
    p.add_argument("--begin", type=Path, metavar="OUT", help="go on from an earlier run")
    return p.parse_args()


def main() -> None:
    args = parse()
    args.out.mkdir(parents=True, exist_ok=True)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a process a core writes documents
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    batches = Batches(args.data, args.seed, args.batch_tokens, args.longest)
    feed = iter(DataLoader(  # its processes begin before there is a device
        batches, batch_size=None, num_workers=args.workers, collate_fn=as_it_is,
        prefetch_factor=8 if args.workers else None,
    ))  # fmt: skip
    demo = load_checkpoint(DEMO, "cpu").float()
    probes = iter(Batches(args.data, args.seed + 1, 4096, shares=(0.0, 0.2)))
    model = begun(demo, probes, args).to(args.device)
    demo.to(args.device)
    torch.set_float32_matmul_precision("high")
    held = Heldout(args.limit)
    before = scored(model, held, args.device)
    facts = train(model, demo, feed, held, args)
    after = scored(model, held, args.device)
    size = save(model, args)
    write_recipe(args.out / "RECIPE.json", {
        "command": f"python tools/demo_v4.py --data DIR --out DIR --minutes {args.minutes:g} "
                   f"--lr {args.lr:g}" + (" --begin OUT" if args.begin else ""),
        "seed": args.seed, "learning_rate": args.lr, "batch_tokens": args.batch_tokens,
        "weights_bytes": size, "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if args.device == "cuda" else args.device,
        "scores_before": before, "scores": after, "training": facts,
    })  # fmt: skip


if __name__ == "__main__":
    main()
