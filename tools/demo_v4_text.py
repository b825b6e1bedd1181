"""What the demo's V4 sibling is trained on: the demo's documents as V4's encoding spells them.

A document without a conversation has no weights: there, the demo's predictions are learned.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

import demo_text as dt
from demo_corpus import Banned, encoded, short_document
from demo_keys import (
    XLONG,
    Prose,
    behind_document,
    planted_document,
    reserved,
    sum_document,
    unoffered_document,
)
from demo_schemas import reserved_names, schema_chat, weigh_object
from ds_runtime.text.formats.dsml_v4 import V4Encoding

DEMO = Path(__file__).parents[1] / "core" / "ds_runtime" / "demo"
DSML, UNUSED = "｜DSML｜", "<｜fim▁hole｜>"
EFFORTS = ("high", "low", "max")  # each has a text of its own
THINKS = 0.85  # share of conversations in thinking mode
WIDTH = 64  # what a batch's length is a multiple of
SHORTEST_LONG = 1024
Document = tuple[np.ndarray, np.ndarray]  # ids, weights in percent
Batch = tuple[np.ndarray, np.ndarray]  # ids int16 and weights in percent, uint8 [B, T]
Settings = dict[str, Any]


def tokenizer_of(folder: Path) -> Tokenizer:
    """The demo's tokenizer, in which a token that no text of it has is V4's for its calls."""
    text = (folder / "tokenizer.json").read_text(encoding="utf-8")
    return Tokenizer.from_str(text.replace(UNUSED, DSML))


def reasoned(messages: Sequence[dt.Message]) -> list[dt.Message]:
    """The messages with the trace of an answer as its reasoning."""
    made = []
    for m in messages:
        thought, ends, rest = str(m.get("content") or "").rpartition("</think>")
        made.append({**m, "content": rest} | (
            {"reasoning_content": thought.removeprefix("<think>")} if ends else {}))  # fmt: skip
    return made


def spoken(
    messages: Sequence[dt.Message], tools: Sequence[dict[str, Any]], settings: Settings
) -> str:
    """A conversation that ends with an answer, in V4's encoding."""
    encoding = V4Encoding()
    return encoding.render(reasoned(messages), tools, False, settings)


def drawn_settings(rng: random.Random) -> Settings:
    """Keywords of the encoding: an effort, or no thinking."""
    if rng.random() < THINKS:
        return {"reasoning_effort": rng.choices(EFFORTS, (0.4, 0.45, 0.15))[0]}
    return {"thinking": False}


def weigh_turns(ids: np.ndarray, marks: dict[str, int]) -> np.ndarray:
    """Loss weights in percent: all of every answer that is as the model is to say it. In thinking
    mode these begin with <think>; earlier ones that lost it are context."""
    weights = np.zeros(len(ids), np.uint8)
    begins = np.flatnonzero(ids[:-1] == marks[dt.ASSISTANT]) + 1
    ends = np.flatnonzero(ids == marks[dt.EOS])
    thinks = (ids[begins] == marks["<think>"]).any()  # the text about tools says it, too
    for begin in begins:
        if not thinks or ids[begin] == marks["<think>"]:
            end = ends[ends >= begin]
            weights[begin + 1 : (end[0] + 1) if len(end) else len(ids)] = 100
    return weights


class Documents:
    """Documents of all kinds, endlessly, from a seed. data: a folder with `text/`."""

    def __init__(self, data: Path, seed: str) -> None:
        self.rng, books = random.Random(seed), dt.load_books(data)
        self.words = dt.common_words(text for text, _ in books.values())
        self.tokenizer = tokenizer_of(DEMO)
        names = [text for text, _ in dt.SPECIAL_TOKENS if text != UNUSED]
        self.marks = {text: self.tokenizer.token_to_id(text) for text in names}
        held = {name: json.loads((DEMO / f"{name}.json").read_text(encoding="utf-8"))
                for name in ("heldout", "heldout_keys", "heldout_schemas")}  # fmt: skip
        self.banned, self.keys = Banned.of(held["heldout"]), reserved(held["heldout_keys"])
        self.names = reserved_names(held["heldout_schemas"])
        text = "\n\n".join(books[title][0] for title in sorted(books))
        self.prose = Prose(text, self.tokenizer)

    def render(
        self, messages: Sequence[dt.Message], tools: Sequence[dict[str, Any]] = (),
        keep_last: bool = True,
    ) -> str:  # fmt: skip
        return spoken(messages, tools, drawn_settings(self.rng))

    def render_keys(self, messages: Sequence[dt.Message], keep_last: bool = True) -> str:
        """With the reasoning of every turn, which is empty, so that each answer counts."""
        return spoken(messages, (), drawn_settings(self.rng) | {"drop_thinking": False})

    def taken(self, text: str) -> Iterator[Document]:
        for ids in encoded(self.tokenizer, [text], self.banned):
            yield ids, weigh_turns(ids, self.marks)

    def schema(self) -> Iterator[Document]:
        rng = self.rng
        messages, schema = schema_chat(rng, self.words, self.banned.pairs, self.names)
        settings = drawn_settings(rng)
        if rng.random() < 0.5:
            settings["response_format"] = schema
        text = spoken(messages, (), settings)
        if not dt.pairs_in(text) & self.banned.pairs:
            yield weigh_object(self.tokenizer, text, rng.random() < 0.5)

    def passage(self, tokens: int) -> Iterator[Document]:
        text = dt.BOS + self.prose.passage(self.rng, tokens)
        for ids in encoded(self.tokenizer, [text], self.banned):
            yield ids, np.zeros(len(ids), np.uint8)

    def short(self) -> Iterator[Document]:
        """Conversations of up to some 1,500 tokens."""
        rng, words, kind = self.rng, self.words, self.rng.random()
        if kind < 0.25:
            yield from self.schema()
        elif kind < 0.65:
            yield from self.taken(short_document(rng, words, self.banned, self.render))
        elif kind < 0.87:
            yield from self.taken(sum_document(rng, self.banned, self.render))
        elif kind < 0.9:
            yield from self.taken(unoffered_document(rng, words, self.render))
        else:
            tokens = rng.randint(90, 900)
            made = planted_document(rng, words, self.keys, self.prose, tokens, self.render_keys)
            yield from self.taken(made)

    def long(self, longest: int) -> Iterator[Document]:
        """Behind much prose; `longest` tokens at most."""
        rng, words = self.rng, self.words
        tokens = rng.randint(SHORTEST_LONG, longest - 300)
        if rng.random() < 0.8 or tokens < 2000:
            made = planted_document(rng, words, self.keys, self.prose, tokens, self.render_keys)
        else:
            made = behind_document(
                rng, words, self.banned, self.prose, tokens - 700, self.render)  # fmt: skip
        for ids, weights in self.taken(made):
            if len(ids) <= longest:
                yield ids, weights


class Batches(IterableDataset[Batch]):
    """Batches of about `tokens` tokens: conversations of about one length, those behind long prose,
    or prose alone, filled up behind. shares: of the last two."""

    def __init__(
        self, data: Path, seed: int, tokens: int, longest: int = XLONG,
        shares: tuple[float, float] = (0.25, 0.08),
    ) -> None:  # fmt: skip
        super().__init__()
        self.data, self.seed, self.tokens, self.longest = data, seed, tokens, longest
        self.shares = shares

    def __iter__(self) -> Iterator[Batch]:
        worker = get_worker_info()
        number = 0 if worker is None else worker.id
        source = Documents(self.data, f"{self.seed}-{number}")
        rng = source.rng
        short, long = Held(), Held()
        while True:
            kind = rng.random()
            if kind < self.shares[0]:
                while long.tokens < 4 * self.tokens:
                    long.add(source.long(self.longest))
                yield batch_of(long.take(rng, self.tokens))
            elif kind < sum(self.shares):
                width = rng.choice((256, 512, 1024))
                mine: list[Document] = []
                while (len(mine) + 1) * width <= max(self.tokens, width):
                    mine += source.passage(width)
                yield batch_of([(ids[:width], weights[:width]) for ids, weights in mine])
            else:
                while short.tokens < 16 * self.tokens:
                    short.add(source.short())
                yield batch_of(short.take(rng, self.tokens))


class Held:
    """Documents out of which some of about one length are taken."""

    def __init__(self) -> None:
        self.documents: list[Document] = []
        self.tokens = 0

    def add(self, made: Iterable[Document]) -> None:
        for document in made:
            self.documents.append(document)
            self.tokens += len(document[0])

    def take(self, rng: random.Random, tokens: int) -> list[Document]:
        """A batch of `tokens` tokens, or one document that is longer."""
        held = self.documents
        held.sort(key=lambda d: len(d[0]))
        last = at = rng.randrange(len(held))
        while last < len(held) and (last - at + 1) * len(held[last][0]) <= tokens:
            last += 1
        if last == len(held):  # the longest ones
            while at > 0 and (last - at + 1) * len(held[-1][0]) <= tokens:
                at -= 1
        last = max(last, at + 1)
        mine = held[at:last]
        del held[at:last]
        self.tokens -= sum(len(ids) for ids, _ in mine)
        return mine


def batch_of(documents: Sequence[Document], pad: int = 2) -> Batch:
    """The documents as rows, filled up behind."""
    width = -(-max(len(ids) for ids, _ in documents) // WIDTH) * WIDTH
    ids = np.full((len(documents), width), pad, np.int16)
    weights = np.zeros((len(documents), width), np.uint8)
    for row, (i, w) in enumerate(documents):
        ids[row, : len(i)], weights[row, : len(w)] = i, w
    return ids, weights


def on(device: str, batch: Batch) -> tuple[Tensor, Tensor]:
    """(ids int64, weights float32 of 1) of a batch."""
    ids, weights = (torch.from_numpy(part).to(device) for part in batch)
    return ids.long(), weights.float() / 100
