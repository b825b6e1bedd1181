"""Scores of a checkpoint of the demo model on its held-out sets, in plain torch."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

import demo_text as dt
from demo_files import load_checkpoint
from demo_model import DemoModel

REPO = Path(__file__).resolve().parent.parent


def load_scoring() -> Any:
    """`ds_runtime_bench.engine.scoring`, loaded by path: the runtime need not be installed."""
    path = REPO / "kit/bench/ds_runtime_bench/engine/scoring.py"
    spec = importlib.util.spec_from_file_location("scoring", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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


def key_prompts(
    tokenizer: Tokenizer, folder: Path, tokens: int
) -> list[tuple[list[int], list[int]]]:
    """(prompt, answer with its end) as token ids for each held-out key, planted in held-out prose
    as the runtime's `bench accuracy --planted` does."""
    scoring, prompts = load_scoring(), []
    held = json.loads((folder / "heldout.json").read_text(encoding="utf-8"))
    keys = json.loads((folder / "heldout_keys.json").read_text(encoding="utf-8"))["keys"]
    prose = [p["text"] for p in held["prose"]]

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    for i, entry in enumerate(keys):
        messages = scoring.planted(entry, prose, i, tokens, encode, tokenizer.decode)
        prompts.append((encode(dt.render(messages)), encode(entry["answer"] + dt.EOS)))
    return prompts


def keys_right(
    best: Callable[[list[int]], list[int]], prompts: Sequence[tuple[list[int], list[int]]]
) -> int:
    """How many answers greedy decoding gets right: those whose every token is the one that `best`
    (token ids to the likeliest next token of each position) says, given the ones before it."""
    right = 0
    for prompt, answer in prompts:
        ids = prompt + answer
        right += best(ids)[len(prompt) - 1 : -1] == answer
    return right


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

    def best(ids: list[int]) -> list[int]:
        found: list[int] = (
            model.lm_head(model(torch.tensor([ids], device=device)))[0].argmax(-1).tolist()
        )
        return found

    if (folder / "heldout_keys.json").exists():
        for tokens in (2048, 4096):
            prompts = key_prompts(tokenizer, folder, tokens)
            scores[f"keys_{tokens}"] = {"right": keys_right(best, prompts), "of": len(prompts)}
            print(f"planted keys, {tokens} tokens:", scores[f"keys_{tokens}"], flush=True)
    for ask in ("Hello", "Who are you?", "What is the capital of Sweden?"):
        ids = tokenizer.encode(dt.render([{"role": "user", "content": ask}])).ids
        print(ask, "->", tokenizer.decode(greedy(model, [ids], 48)[0], skip_special_tokens=False))
    return scores
