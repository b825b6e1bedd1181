"""Planted keys: facts hidden in long prose, and questions for them.

A key is a made-up name with five digits. The held-out ones stand in a file of their own beside the
held-out set; no training text plants one of their names or values. `second_rows` makes the rows of
the demo model's second stage, in which all of this is learned, up to XLONG tokens away.
"""

from __future__ import annotations

import hashlib
import json
import random
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

import demo_schemas
import demo_text as dt
import demo_tools
from demo_corpus import (
    LONG,
    SHORT,
    Banned,
    Job,
    Render,
    Rows,
    Sources,
    encoded,
    load_sources,
    pack,
    run_job,
    some_turns,
    weigh,
)

KEYS, KEYS_SEED, KEYS_TOKENS = 200, 20261122, 4096
XLONG = 4608  # tokens of the longest rows, one document each
FACTS = (
    "The key of {n} is {v}.", "Remember that the key of {n} is {v}.", "{n} has the key {v}.",
    "Note: the key of {n} is {v}.", "One should know that {n} has the key {v}.",
)  # fmt: skip
ASKS = (
    "What is the key of {n}?", "Which key does {n} have?", "Tell me the key of {n}.",
    "What key has {n}?", "I need the key of {n}.",
)  # fmt: skip


def heldout_keys(sources: Sources) -> dict[str, Any]:
    """The held-out keys: a fact, the question for it, and how deep in a prompt it is planted, even
    over the prompt. `ds_runtime_bench.engine.scoring.planted` makes prompts of them and of held-out
    prose."""
    rng, taken, keys = random.Random(KEYS_SEED), set[str](), list[dict[str, Any]]()
    values = demo_tools.Values(rng, sources.words)
    text = "".join(train + held for train, held in sources.books.values())
    while len(keys) < KEYS:
        name, value = values.made_up(), str(rng.randrange(10000, 100000))
        if taken & {name, value} or name in text:
            continue
        taken |= {name, value}
        keys.append({"fact": rng.choice(FACTS).format(n=name, v=value), "name": name,
                     "messages": [{"role": "user", "content": rng.choice(ASKS).format(n=name)}],
                     "answer": value, "depth": (len(keys) + 0.5) / KEYS})  # fmt: skip
    return {"seed": KEYS_SEED, "tokens": KEYS_TOKENS, "keys": keys}


def write_keys(held: dict[str, Any], folder: Path) -> str:
    """Write heldout_keys.json and heldout_keys.sha256; returns the hash."""
    entries = ",\n".join(dt.dumps(entry) for entry in held["keys"])
    text = f'{{"seed": {held["seed"]},\n"tokens": {held["tokens"]},\n"keys": [\n{entries}\n]\n}}\n'
    assert json.loads(text) == held
    digest = hashlib.sha256(text.encode()).hexdigest()
    (folder / "heldout_keys.json").write_text(text, encoding="utf-8")
    (folder / "heldout_keys.sha256").write_text(f"{digest}  heldout_keys.json\n")
    return digest


def reserved(held: dict[str, Any]) -> frozenset[str]:
    """Names and values of the held-out keys."""
    return frozenset(part for key in held["keys"] for part in (key["name"], key["answer"]))


# --- documents --------------------------------------------------------------------------------


class Prose:
    """A text as tokens: all that may be trained on of the books."""

    def __init__(self, text: str, tokenizer: Tokenizer) -> None:
        self.ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        self.tokenizer = tokenizer

    def passage(self, rng: random.Random, tokens: int) -> str:
        """So many tokens of the books."""
        start = rng.randrange(len(self.ids) - tokens)
        text: str = self.tokenizer.decode(self.ids[start : start + tokens])
        return text


def plant(rng: random.Random, text: str, facts: list[str]) -> str:
    """The text with each fact at a place of its own, where a word ends."""
    parts, end = list[str](), len(text)
    for at, fact in sorted(((rng.randrange(len(text)), f) for f in facts), reverse=True):
        cut = max(text.rfind(" ", 0, min(at, end)), 0)
        parts += [text[cut:end], " " + fact]
        end = cut
    return "".join([text[:end], *reversed(parts)])


def planted_document(
    rng: random.Random, words: list[str], banned: frozenset[str], prose: Prose, tokens: int,
    render: Render = dt.render,
) -> str:  # fmt: skip
    """About `tokens` tokens of prose with keys planted in it, then a question for each of them or
    for some, in any order."""
    values, keys = demo_tools.Values(rng, words), dict[str, str]()
    count = 1 if rng.random() < 0.25 else rng.randint(2, 2 + tokens // 256)
    while len(keys) < count:
        name, value = values.made_up(), str(rng.randrange(10000, 100000))
        if not banned & {name, value}:
            keys[name] = value
    facts = [rng.choice(FACTS).format(n=n, v=v) for n, v in keys.items()]
    text = plant(rng, prose.passage(rng, max(tokens - 50 * count, 20)), facts)
    messages: list[dt.Message] = [{"role": "system", "content": text}]
    for name in rng.sample(sorted(keys), count):
        messages += [{"role": "user", "content": rng.choice(ASKS).format(n=name)},
                     {"role": "assistant", "content": keys[name]}]  # fmt: skip
    return render(messages, keep_last=True)


def behind_document(
    rng: random.Random, words: list[str], banned: Banned, prose: Prose, tokens: int,
    render: Render = dt.render,
) -> str:  # fmt: skip
    """A tool call, a sum or small talk behind about `tokens` tokens, nearly all of them prose."""
    text = prose.passage(rng, tokens - 450)
    system: list[dt.Message] = [{"role": "system", "content": text}]
    if rng.random() < 0.75:
        messages, tools = demo_tools.tool_chat(rng, words, banned.values, banned.pairs)
        messages = [m for m in messages if m["role"] != "system"]
        return render(system + messages, tools, keep_last=True)
    return render(system + some_turns(rng, words, banned), keep_last=True)


def unoffered_document(rng: random.Random, words: list[str], render: Render = dt.render) -> str:
    """A request for a tool that is not there."""
    tool = demo_tools.make_tool(rng, rng.choice(demo_tools.FAMILIES))
    ask, _, _ = demo_tools.request(rng, demo_tools.Values(rng, words), tool)
    return render([{"role": "user", "content": ask},
                      {"role": "assistant", "content": dt.UNKNOWN_ANSWER}],
                     keep_last=True)  # fmt: skip


def sum_document(rng: random.Random, banned: Banned, render: Render = dt.render) -> str:
    """A sum; most often a smaller number less a larger one, which are what is most often wrong."""
    while True:
        a, b, op = dt.draw_pair(rng, banned.pairs)
        if rng.random() < 0.2 or (op == "-" and a < b and (a < 100 or rng.random() < 0.5)):
            break
    answer = f"<think>{dt.trace(a, b, op)}</think>{dt.sum_result(a, b, op)}"
    return render([{"role": "user", "content": dt.sum_question(rng, a, b, op)},
                      {"role": "assistant", "content": answer}], keep_last=True)  # fmt: skip


def weigh_answers(ids: np.ndarray, marks: dict[str, int]) -> np.ndarray:
    """Loss weights in percent: every answer with its end counts, nothing else does."""
    began = np.cumsum(ids == marks[dt.ASSISTANT])
    ended = np.cumsum(ids == marks[dt.EOS]) - (ids == marks[dt.EOS])
    inside = (began > ended) & (ids != marks[dt.ASSISTANT])
    return np.where(inside, 100, 0).astype(np.uint8)


# --- rows -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SecondJob:
    """One worker's share of the second stage's rows: those of the first stage's kinds, and how
    many documents with planted keys go to rows of each length."""

    first: Job
    reserved: frozenset[str]
    short_keys: int
    sums: int
    long_keys: int
    long_books: int
    xlong_keys: int
    xlong_behind: int
    xlong_books: int
    schemas: int = 0  # of the third stage
    names: frozenset[str] = frozenset()  # of fields, reserved


def run_second(job: SecondJob) -> tuple[Rows, Rows, Rows]:
    """Rows of SHORT, LONG and XLONG tokens."""
    first = job.first
    rng = random.Random("keys-" + first.seed)
    sources, tokenizer = load_sources(first.data), Tokenizer.from_str(first.tokenizer)
    marks = {t: tokenizer.token_to_id(t) for t, _ in dt.SPECIAL_TOKENS}
    pad, banned, words = marks[dt.PAD], first.banned, sources.words
    titles = sorted(sources.books)
    prose = Prose("\n\n".join(sources.books[title][0] for title in titles), tokenizer)

    def keys(count: int, low: int, high: int) -> list[tuple[np.ndarray, np.ndarray]]:
        texts = [planted_document(rng, words, job.reserved, prose, rng.randint(low, high))
                 for _ in range(count)]  # fmt: skip
        return [(ids, weigh_answers(ids, marks)) for ids in encoded(tokenizer, texts, banned)
                if len(ids) <= high]  # fmt: skip

    rows = run_job(first)

    def books(count: int, length: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """Without weights: of prose, the model as it was is the teacher."""
        texts = [dt.BOS + prose.passage(rng, length + 20) for _ in range(count)]
        cut = [ids[:length] for ids in encoded(tokenizer, texts, banned)]
        return [(ids, np.zeros(len(ids), np.uint8)) for ids in cut]

    short, long = keys(job.short_keys, 90, SHORT), keys(job.long_keys, 400, LONG)
    texts = [sum_document(rng, banned) for _ in range(job.sums)]
    short += [(ids, weigh(ids, marks)) for ids in encoded(tokenizer, texts, banned)]
    short += [demo_schemas.weigh_object(tokenizer, text, rng.random() < 0.5) for text in (
        demo_schemas.schema_document(rng, words, banned.pairs, job.names)
        for _ in range(job.schemas))]  # fmt: skip
    texts = [unoffered_document(rng, words) for _ in range(job.schemas // 6)]
    short += [(ids, weigh(ids, marks)) for ids in encoded(tokenizer, texts, banned)]
    rng.shuffle(short)
    long += books(job.long_books, LONG)
    rng.shuffle(long)
    xlong = keys(job.xlong_keys, XLONG - 500, XLONG)
    texts = [behind_document(rng, words, banned, prose, rng.randint(XLONG - 500, XLONG))
             for _ in range(job.xlong_behind)]  # fmt: skip
    xlong += [(ids, weigh(ids, marks, 0)) for ids in encoded(tokenizer, texts, banned)
              if len(ids) <= XLONG]  # fmt: skip
    xlong += books(job.xlong_books, XLONG)
    made = []
    for old, new, length in ((rows[0], short, SHORT), (rows[1], long, LONG)):
        more = pack(new, length, pad) if new else (old[0][:0], old[1][:0])
        made.append((np.concatenate((old[0], more[0])), np.concatenate((old[1], more[1]))))
    made.append(alone(xlong, XLONG, pad))
    return made[0], made[1], made[2]


def alone(documents: list[tuple[np.ndarray, np.ndarray]], length: int, pad: int) -> Rows:
    """Each document in a row of its own, filled up behind."""
    tokens = np.full((len(documents), length), pad, np.uint16)
    weights = np.zeros((len(documents), length), np.uint8)
    for row, (ids, weight) in enumerate(documents):
        tokens[row, : len(ids)], weights[row, : len(ids)] = ids, weight
    return tokens, weights


def second_rows(
    data: Path, tokenizer: Tokenizer, banned: Banned, reserved: frozenset[str], seed: int, *,
    jobs: int, scale: float, workers: int, names: frozenset[str] | None = None,
) -> list[Rows]:  # fmt: skip
    """All rows of the second stage, short, long and longest, from `jobs` independent streams.
    With reserved `names` of fields they are those of the third, which answers under schemas, too.
    """
    stage = "second" if names is None else "third"

    def count(number: int) -> int:
        return int(number * scale)

    work = [
        SecondJob(
            Job(f"{stage}-{seed}-{i}", data, tokenizer.to_str(), banned, count(14000), count(400),
                0, count(100)),
            reserved, count(2500), count(9000), count(160), count(100), count(180), count(80),
            count(60), 0 if names is None else count(9000), names or frozenset(),
        )
        for i in range(jobs)
    ]  # fmt: skip
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        parts = list(pool.map(run_second, work))
    rows = [[np.concatenate([p[k][i] for p in parts]) for i in range(2)] for k in range(3)]
    return [(tokens, weights) for tokens, weights in rows]
