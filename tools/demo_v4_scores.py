"""Scores of the demo's V4 sibling while it is trained, on the demo's held-out sets.

An answer is right if greedy decoding gives the reference, token by token: each of its tokens is the
likeliest one after those before it. That takes one pass over all answers. It is stricter than the
runtime's scores, which take any right answer. Under a schema the names of fields do not count.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

import demo_text as dt
from demo_schemas import weigh_object
from demo_scores import load_scoring
from demo_v4_text import DEMO, Document, batch_of, on, spoken, tokenizer_of, weigh_turns

KEYS_TOKENS = (1024, 4096)
TOKENS = 32768  # of a batch


def answered(messages: Sequence[dt.Message], **answer: Any) -> list[dt.Message]:
    return [*messages, {"role": "assistant", **answer}]


def trace_of(entry: dict[str, Any], said: object) -> str:
    return f"<think>{dt.trace(entry['a'], entry['b'], entry['op'])}</think>{said}"


class Heldout:
    """The held-out sets with their answers as V4's encoding spells them, of thinking mode and the
    effort that a request without one has."""

    def __init__(self, limit: int | None = None) -> None:
        self.tokenizer: Tokenizer = tokenizer_of(DEMO)
        self.marks = {t: self.tokenizer.token_to_id(t) for t in (dt.ASSISTANT, dt.EOS, "<think>")}
        texts = (DEMO / f"{name}.json" for name in ("heldout", "heldout_keys", "heldout_schemas"))
        held, keys, schemas = (json.loads(t.read_text(encoding="utf-8")) for t in texts)
        self.sets: dict[str, list[Document]] = {}
        self.sets["sums"] = [
            self.turns(answered(e["messages"], content=trace_of(e, e["answer"])))
            for e in held["sums"][:limit]
        ]
        self.sets["tools"] = [
            self.turns(answered(e["messages"], content="",
                                tool_calls=[{"function": c} for c in e["calls"]]), e["tools"])
            for e in held["tools"][:limit]
        ]  # fmt: skip
        self.sets["schemas"] = [
            weigh_object(self.tokenizer, spoken(
                answered(e["messages"], content=trace_of(e, dt.dumps(e["answer"]))), (), {}), False)
            for e in schemas["schemas"][:limit]
        ]  # fmt: skip
        prose = [p["text"] for p in held["prose"]]
        for tokens in KEYS_TOKENS:
            self.sets[f"keys of {tokens}"] = [
                self.turns(answered(messages, content=entry["answer"]))
                for messages, entry in self.planted(keys["keys"][::5][:limit], prose, tokens)
            ]
        self.prose = [np.array([0, *self.encode(text)], np.uint16) for text in prose[:limit]]

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def turns(
        self, messages: Sequence[dt.Message], tools: Sequence[dict[str, Any]] = ()
    ) -> Document:
        ids = np.array(self.encode(spoken(messages, tools, {})), np.uint16)
        return ids, weigh_turns(ids, self.marks)

    def planted(
        self, keys: Sequence[dict[str, Any]], prose: Sequence[str], tokens: int
    ) -> Iterator[tuple[list[dt.Message], dict[str, Any]]]:
        scoring, decode = load_scoring(), self.tokenizer.decode
        for i, entry in enumerate(keys):
            yield scoring.planted(entry, prose, i, tokens, self.encode, decode), entry

    @torch.no_grad()
    def score(self, logits: Callable[[Tensor], Tensor], device: str) -> dict[str, Any]:
        """logits: ids [B, T] → [B, T, vocab]."""
        found: dict[str, Any] = {}
        for kind, documents in self.sets.items():
            right = 0
            for part in parts(documents):
                ids, weights = on(device, batch_of(part))
                best = logits(ids).argmax(-1)
                wrong = (best[:, :-1] != ids[:, 1:]) & (weights[:, 1:] >= 1)
                right += int((~wrong.any(1)).sum())
            found[kind] = f"{right} of {len(documents)}"
        lost = count = 0.0
        for part in parts([(ids, np.full(len(ids), 100, np.uint8)) for ids in self.prose]):
            ids, weights = on(device, batch_of(part))
            each = F.cross_entropy(
                logits(ids)[:, :-1].float().transpose(1, 2), ids[:, 1:], reduction="none"
            )
            lost += float((each * weights[:, 1:]).sum())
            count += float(weights[:, 1:].sum())
        found["perplexity of prose"] = round(math.exp(lost / count), 2)
        return found


def parts(documents: Sequence[Document]) -> Iterator[list[Document]]:
    """The documents by length, in batches of about TOKENS tokens."""
    mine: list[Document] = []
    for document in sorted(documents, key=lambda d: len(d[0])):
        if mine and (len(mine) + 1) * len(document[0]) > TOKENS:
            yield mine
            mine = []
        mine.append(document)
    if mine:
        yield mine
