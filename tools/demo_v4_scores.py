"""Scores of the demo's V4 sibling while it is trained, on the demo's held-out sets.

An answer is right if greedy decoding gives the reference, token by token: each of its tokens is the
likeliest one after those before it. That takes one pass over all answers. It is stricter than the
runtime's scores, which take any right answer.

No prompt of the held-out schemas shows its schema, so no model could say which kind of value comes,
or how an operator is spelled. There, as in the runtime, the schema's rules choose what may come.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

import demo_text as dt
from demo_scores import load_scoring
from demo_v4_text import DEMO, Document, batch_of, on, spoken, tokenizer_of, weigh_turns
from ds_runtime.grammar.compile import Compiler
from ds_runtime.grammar.guide import Start, words
from ds_runtime.output_rules import OutputRules

KEYS_TOKENS = (1024, 4096)
TOKENS = 32768  # of a batch
OBJECT_TOKENS = 96  # twice what the longest object of the held-out set has
EOS = 1
Logits = Callable[[Tensor], Tensor]  # of ids [B, T]: [B, T, vocab]


def answered(messages: Sequence[dt.Message], **answer: Any) -> list[dt.Message]:
    return [*messages, {"role": "assistant", **answer}]


def trace_of(entry: dict[str, Any], said: object) -> str:
    return f"<think>{dt.trace(entry['a'], entry['b'], entry['op'])}</think>{said}"


@dataclass(frozen=True)
class Object:
    """A sum under a schema: its prompt with the trace, the rules' beginning and what is right."""

    said: Document
    rules: Start
    answer: dict[str, Any]


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
        compiler = Compiler(DEMO, self.tokenizer.get_vocab_size(), (EOS,))
        self.guided = Guided(compiler, self.tokenizer)
        self.objects = [
            Object(self.begun(e), compiler.compile(OutputRules(json_schema=e["schema"])),
                   e["answer"])
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

    def begun(self, entry: dict[str, Any]) -> Document:
        """A sum's prompt and its trace, behind which the answer comes."""
        ids, weights = self.turns(answered(entry["messages"], content=trace_of(entry, "")))
        return ids[:-1], weights[:-1]  # without the end

    def planted(
        self, keys: Sequence[dict[str, Any]], prose: Sequence[str], tokens: int
    ) -> Iterator[tuple[list[dt.Message], dict[str, Any]]]:
        scoring, decode = load_scoring(), self.tokenizer.decode
        for i, entry in enumerate(keys):
            yield scoring.planted(entry, prose, i, tokens, self.encode, decode), entry

    @torch.no_grad()
    def score(self, logits: Logits, device: str) -> dict[str, Any]:
        """Of each set how many are right; of prose the perplexity."""
        found: dict[str, Any] = {}
        for kind, documents in self.sets.items():
            right = sum(map(sum, (told(logits, part, device) for part in parts(documents))))
            found[kind] = f"{right} of {len(documents)}"
        filled = self.guided.right(logits, self.objects, device)
        found["schemas"] = f"{filled} of {len(self.objects)}"
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


def told(logits: Logits, documents: Sequence[Document], device: str) -> list[bool]:
    """Whether each token that counts is the likeliest one, for each of the documents."""
    ids, weights = on(device, batch_of(documents))
    wrong = (logits(ids).argmax(-1)[:, :-1] != ids[:, 1:]) & (weights[:, 1:] >= 1)
    right: list[bool] = (~wrong.any(1)).tolist()
    return right


class Guided:
    """Greedy decoding within rules, without a cache."""

    def __init__(self, compiler: Compiler, tokenizer: Tokenizer) -> None:
        self.allowed, self.tokenizer = compiler.allowed, tokenizer
        self.not_end = compiler.allowed.copy()
        self.not_end[EOS // 32] &= ~np.uint32(1 << EOS % 32)

    def right(self, logits: Logits, objects: Sequence[Object], device: str) -> int:
        """How many have their trace as it is, token by token, and the right object behind it."""
        by_length = sorted(objects, key=lambda o: len(o.said[0]))
        done = count = 0
        right = load_scoring().same_value
        for part in parts([o.said for o in objects]):
            mine = by_length[count : (count := count + len(part))]
            traced = told(logits, part, device)
            live = [o for o, ok in zip(mine, traced, strict=True) if ok]
            for asked, text in zip(live, self.said(logits, live, device), strict=True):
                try:
                    done += right(json.loads(text), asked.answer)
                except ValueError:  # it did not come to its end
                    continue
        return done

    def said(self, logits: Logits, objects: Sequence[Object], device: str) -> list[str]:
        """The text behind each trace, of OBJECT_TOKENS at most."""
        matchers = [o.rules.matcher.deep_copy() for o in objects]
        rows = [o.said[0].tolist() for o in objects]
        begins = [len(row) for row in rows]
        live = list(range(len(rows)))
        for _ in range(OBJECT_TOKENS):
            masks = [words(matchers[i], self.allowed) for i in live]
            bits = np.frombuffer(b"".join(masks), np.uint32).reshape(len(live), self.allowed.size)
            goes_on = (bits & self.not_end).any(1)
            live = [i for i, on_ in zip(live, goes_on, strict=True) if on_]
            if not live:
                break
            best = self.likeliest(logits, [rows[i] for i in live], bits[goes_on], device)
            for i, token in zip(live, best, strict=True):
                matchers[i].consume_token(token)
                if token != EOS:
                    rows[i].append(token)
            live = [i for i in live if not matchers[i].is_stopped()]
        return [self.tokenizer.decode(row[b:]) for row, b in zip(rows, begins, strict=True)]

    def likeliest(
        self, logits: Logits, rows: Sequence[list[int]], masks: np.ndarray, device: str
    ) -> list[int]:
        """The likeliest token behind each row that its mask allows."""
        documents = [(np.array(row, np.uint16), np.zeros(len(row), np.uint8)) for row in rows]
        ids, _ = on(device, batch_of(documents))
        each = torch.arange(len(rows), device=device)
        last = torch.tensor([len(row) - 1 for row in rows], device=device)
        next_ = logits(ids)[each, last].float()
        bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")
        hidden = torch.from_numpy(bits[:, : next_.shape[1]] == 0).to(device)
        best: list[int] = next_.masked_fill(hidden, -math.inf).argmax(-1).tolist()
        return best


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
