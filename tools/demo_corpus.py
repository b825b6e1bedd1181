"""The demo model's held-out set, tokenizer and packed training rows."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

import demo_text as dt
import demo_tools

HELDOUT_SEED = 20261120
SUMS, TOOL_CALLS, PROSE = 500, 200, 40
PROSE_CHARACTERS = 1200
WORD_SPLIT = r" ?\p{Ll}+|\p{Lu}\p{Ll}*|\p{N}| ?[^\s\p{L}\p{N}]+|\p{L}+|\s+(?!\S)|\s+"
SHORT, LONG = 512, 2048
Render = Callable[..., str]  # of messages, tools and keep_last, as dt.render
Rows = tuple[np.ndarray, np.ndarray]  # token ids uint16 [rows, length], weight percent uint8


@dataclass(frozen=True)
class Sources:
    """The corpora on disk and what of them may not be trained on."""

    books: dict[str, tuple[str, str]]
    problems: list[list[dt.Message]]
    words: list[str]
    hashes: dict[str, str]


def load_sources(data: Path) -> Sources:
    books = dt.load_books(data)
    files = [*sorted((data / "text").glob("*.txt")), data / "gsm8k_train.jsonl"]
    hashes = {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in files}
    words = dt.common_words(text for text, _ in books.values())
    return Sources(books, dt.load_gsm8k(data / "gsm8k_train.jsonl"), words, hashes)


def build_heldout(sources: Sources) -> dict[str, Any]:
    """The held-out set: sums, tool calls and prose, from a seed of its own.

    A pair of operands is eligible if one of them is at least 30 (smaller pairs occur as column
    digits of traces) and no corpus text mentions the pair.
    """
    rng = random.Random(HELDOUT_SEED)
    seen: set[tuple[int, int]] = set()
    for train, _ in sources.books.values():
        seen |= dt.pairs_in(train)
    for chat in sources.problems:
        seen |= dt.pairs_in(chat[0]["content"] + " " + chat[1]["content"])
    sums: list[dict[str, Any]] = []
    while len(sums) < SUMS:
        a, b, op = dt.operand(rng), dt.operand(rng), "+-"[len(sums) % 2]
        if max(a, b) >= 30 and dt.pair_key(a, b) not in seen:
            seen.add(dt.pair_key(a, b))
            ask = dt.sum_question(rng, a, b, op)
            sums.append({"messages": [{"role": "user", "content": ask}], "a": a, "b": b,
                         "op": op, "answer": dt.sum_result(a, b, op)})  # fmt: skip
    values, tools, keys = demo_tools.Values(rng, sources.words), [], set()
    while len(tools) < TOOL_CALLS:
        offered = demo_tools.pick_tools(rng)
        asked = [offered[0]] + ([rng.choice(offered)] if len(tools) % 10 == 9 else [])
        drawn = [demo_tools.request(rng, values, tool) for tool in asked]
        fresh = {demo_tools.values_key(call["arguments"]) for _, call, _ in drawn}
        if fresh & keys or len(fresh) < len(drawn):
            continue
        keys |= fresh
        ask = " ".join(text for text, _, _ in drawn)
        tools.append({"tools": demo_tools.specs(rng, offered),
                      "messages": [{"role": "user", "content": ask}],
                      "calls": [call for _, call, _ in drawn]})  # fmt: skip
    prose = []
    titles = sorted(sources.books)
    for i in range(PROSE):
        title = titles[i % len(titles)]
        part = sources.books[title][1]
        start = part.index(" ", rng.randrange(len(part) - PROSE_CHARACTERS - 100)) + 1
        prose.append({"source": title, "text": part[start : start + PROSE_CHARACTERS]})
    return {"seed": HELDOUT_SEED, "sums": sums, "tools": tools, "prose": prose}


def write_heldout(heldout: dict[str, Any], folder: Path) -> str:
    """Write heldout.json and heldout.sha256; returns the hash."""
    lines = []
    for key in ("sums", "tools", "prose"):
        entries = ",\n".join(dt.dumps(entry) for entry in heldout[key])
        lines.append(f'"{key}": [\n{entries}\n]')
    text = f'{{"seed": {heldout["seed"]},\n' + ",\n".join(lines) + "\n}\n"
    assert json.loads(text) == heldout
    digest = hashlib.sha256(text.encode()).hexdigest()
    (folder / "heldout.json").write_text(text, encoding="utf-8")
    (folder / "heldout.sha256").write_text(f"{digest}  heldout.json\n")
    return digest


@dataclass(frozen=True)
class Banned:
    """What the held-out set reserves: operand pairs and argument values."""

    pairs: frozenset[tuple[int, int]]
    values: frozenset[str]

    @classmethod
    def of(cls, heldout: dict[str, Any]) -> Banned:
        pairs = frozenset(dt.pair_key(s["a"], s["b"]) for s in heldout["sums"])
        keys = (demo_tools.values_key(c["arguments"]) for t in heldout["tools"] for c in t["calls"])
        return cls(pairs, frozenset(keys))


# --- documents --------------------------------------------------------------------------------


def short_document(
    rng: random.Random, words: list[str], banned: Banned, render: Render = dt.render
) -> str:
    """One generated conversation of up to a few hundred tokens."""
    kind = rng.random()
    if kind < 0.5:
        offered = rng.random() < 0.95
        messages, tools = demo_tools.tool_chat(rng, words, banned.values, banned.pairs)
        if not offered:
            messages, tools = dt.talk_turns(rng, words), []
        return render(messages, tools, keep_last=True)
    messages = []
    if rng.random() < 0.1:
        messages.append({"role": "system", "content": rng.choice(dt.SYSTEMS)})
    if kind < 0.56:
        return render(messages + dt.talk_turns(rng, words), keep_last=True)
    if kind < 0.6:
        for _ in range(rng.randint(1, 3)):
            messages += some_turns(rng, words, banned)
    return render(messages + dt.sum_turns(rng, banned.pairs), keep_last=True)


def some_turns(rng: random.Random, words: list[str], banned: Banned) -> list[dt.Message]:
    return dt.talk_turns(rng, words) if rng.random() < 0.4 else dt.sum_turns(rng, banned.pairs)


def long_document(rng: random.Random, words: list[str], banned: Banned, prose: str) -> str:
    """A conversation behind a long system text, or one of many turns."""
    if rng.random() < 0.3:
        turns: list[dt.Message] = []
        for _ in range(rng.randint(8, 40)):
            turns += some_turns(rng, words, banned)
        return dt.render(turns + dt.sum_turns(rng, banned.pairs), keep_last=True)
    start, size = rng.randrange(len(prose) - 4000), rng.randint(300, 3600)
    system: list[dt.Message] = [{"role": "system", "content": prose[start : start + size]}]
    if rng.random() < 0.5:
        messages, tools = demo_tools.tool_chat(rng, words, banned.values, banned.pairs)
        messages = [m for m in messages if m["role"] != "system"]
        return dt.render(system + messages, tools, keep_last=True)
    return dt.render(system + some_turns(rng, words, banned), keep_last=True)


def train_tokenizer(sources: Sources, banned: Banned, vocab_size: int) -> Tokenizer:
    """A byte-level BPE with single digits; a capitalised word never takes its space along, so
    that a name is the same tokens in a sentence and in JSON."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(WORD_SPLIT), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[text for text, _ in dt.SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False,
    )  # fmt: skip
    rng = random.Random(HELDOUT_SEED + 1)
    texts = [train for train, _ in sources.books.values()]
    texts += [m["content"] for chat in sources.problems for m in chat]
    texts += [short_document(rng, sources.words, banned) for _ in range(3000)]
    tokenizer.train_from_iterator(texts, trainer)
    # Mark the role and tool tokens as not special, as DeepSeek-V3's tokenizer does.
    table = json.loads(tokenizer.to_str())
    flags = dict(dt.SPECIAL_TOKENS)
    for token in table["added_tokens"]:
        token["special"] = flags[token["content"]]
    return Tokenizer.from_str(json.dumps(table, ensure_ascii=False))


# --- packing ----------------------------------------------------------------------------------


def weigh(ids: np.ndarray, marks: dict[str, int], prompt: int = 10) -> np.ndarray:
    """Loss weight of each token in percent. A text without roles counts fully; of a chat, only
    the assistant's last turn does (earlier ones lost their traces), the rest one tenth of it.
    A tool call and the sentence after its result both count. `prompt` replaces that tenth."""
    asked = np.flatnonzero(ids == marks[dt.USER])
    if not len(asked):
        return np.full(len(ids), 100, np.uint8)
    weights = np.full(len(ids), prompt, np.uint8)
    on = False
    last_user = asked[-1]
    for i in range(last_user, len(ids)):
        if on:
            weights[i] = 100
        if ids[i] in (marks[dt.ASSISTANT], marks[dt.OUTS_END]):
            on = True
        elif ids[i] == marks[dt.EOS]:
            on = False
    earlier = np.flatnonzero(ids[:last_user] == marks[dt.ASSISTANT])
    if len(earlier):  # history turns, without their traces: not to be imitated
        weights[earlier[0] + 1 : last_user] = 0
    return weights


def pack(documents: list[tuple[np.ndarray, np.ndarray]], length: int, pad: int) -> Rows:
    """Documents into rows of `length` tokens, first fit among the rows still open, no splits."""
    rows: list[list[tuple[np.ndarray, np.ndarray]]] = []
    still: list[tuple[int, int]] = []  # (free tokens, row)
    for ids, weights in documents:
        ids, weights = ids[:length], weights[:length]
        k = next((k for k, (free, _) in enumerate(still) if len(ids) <= free), len(still))
        if k == len(still):
            rows.append([])
            still.append((length, len(rows) - 1))
        free, row = still[k]
        rows[row].append((ids, weights))
        still[k] = (free - len(ids), row)
        if len(still) > 24 or still[k][0] < 24:
            still.remove(min(still))
    tokens = np.full((len(rows), length), pad, np.uint16)
    weight = np.zeros((len(rows), length), np.uint8)
    for r, parts in enumerate(rows):
        at = 0
        for ids, weights in parts:
            tokens[r, at : at + len(ids)], weight[r, at : at + len(ids)] = ids, weights
            at += len(ids)
    return tokens, weight


@dataclass(frozen=True)
class Job:
    """One worker's share of the rows."""

    seed: str
    data: Path
    tokenizer: str
    banned: Banned
    short_documents: int
    long_documents: int
    book_rows: int
    problems: int


def encoded(tokenizer: Tokenizer, texts: list[str], banned: Banned) -> list[np.ndarray]:
    """Token ids of the texts, without those in which a reserved pair can be read."""
    texts = [t for t in texts if not dt.pairs_in(t) & banned.pairs]  # an excerpt may cut
    done = tokenizer.encode_batch(texts, add_special_tokens=False)
    return [np.array(e.ids, np.uint16) for e in done]


def run_job(job: Job) -> tuple[Rows, Rows]:
    """Generate, check, tokenise and pack: rows of 512 and rows of 2048 tokens."""
    rng = random.Random(job.seed)
    sources, tokenizer = load_sources(job.data), Tokenizer.from_str(job.tokenizer)
    marks = {t: tokenizer.token_to_id(t) for t, _ in dt.SPECIAL_TOKENS}
    prose = "\n\n".join(sources.books[title][0] for title in sorted(sources.books))

    def encode(texts: list[str], prompt: int = 10) -> list[tuple[np.ndarray, np.ndarray]]:
        return [(ids, weigh(ids, marks, prompt)) for ids in encoded(tokenizer, texts, job.banned)]

    short = encode([short_document(rng, sources.words, job.banned)
                    for _ in range(job.short_documents)])  # fmt: skip
    texts = [long_document(rng, sources.words, job.banned, prose)
             for _ in range(job.long_documents)]  # fmt: skip
    long = encode(texts, prompt=0)  # their system texts are book excerpts: context alone
    texts = []
    for _ in range(job.book_rows):
        start = rng.randrange(len(prose) - 12000)
        texts.append(dt.BOS + prose[start : start + 12000])
    problems = rng.sample(sources.problems, job.problems)
    texts += [dt.render(chat, keep_last=True) for chat in problems]
    long += encode(texts)
    long += [d for d in short if len(d[0]) > SHORT]
    rng.shuffle(long)
    pad = marks[dt.PAD]
    return pack([d for d in short if len(d[0]) <= SHORT], SHORT, pad), pack(long, LONG, pad)


def build_rows(
    data: Path, tokenizer: Tokenizer, banned: Banned, seed: int, *, jobs: int, scale: float,
    workers: int,
) -> tuple[Rows, Rows]:  # fmt: skip
    """All training rows, (short, long), from `jobs` independent random streams."""
    work = [
        Job(f"{seed}-{i}", data, tokenizer.to_str(), banned, int(14000 * scale), int(400 * scale),
            int(30 * scale), int(250 * scale))
        for i in range(jobs)
    ]  # fmt: skip
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        parts = list(pool.map(run_job, work))
    short = tuple(np.concatenate([p[0][k] for p in parts]) for k in range(2))
    long = tuple(np.concatenate([p[1][k] for p in parts]) for k in range(2))
    return (short[0], short[1]), (long[0], long[1])
