"""Prompts for a load: random, with shared beginnings, or from a JSONL file."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_runtime.errors import ConfigError, unreadable

if TYPE_CHECKING:
    from ds_runtime.text.tokenizer import Tokenizer

_WORDS = (
    "the of and to in is that it was for on are as with his they at be this from have or by one "
    "had not but what all were when we there can an your which their said if do will each about "
    "how up out them then she many some so these would other into has more two like him see time "
    "could no make than first been its who now people my made over did down only way find use may "
    "water long little very after words called just where most know"
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """What one request sends: `text`, `ids` or `messages` with `tools`, and how much is to come
    back."""

    max_tokens: int
    text: str = ""
    ids: tuple[int, ...] = ()
    messages: tuple[dict[str, Any], ...] = ()
    tools: tuple[dict[str, Any], ...] = ()

    def body(self, chat: bool) -> dict[str, Any]:
        """The fields of a request for chat, or for completions."""
        if not chat:
            return {"prompt": list(self.ids) or self.text, "max_tokens": self.max_tokens}
        messages = list(self.messages) or [{"role": "user", "content": self.text}]
        tools = {"tools": list(self.tools)} if self.tools else {}
        return {"messages": messages, "max_tokens": self.max_tokens, **tools}


class Words:
    """Draws texts of this many tokens. Without a tokenizer a token is a short English word."""

    def __init__(self, seed: int, tokenizer: Tokenizer | None, chat: bool) -> None:
        self._draw = random.Random(seed)
        self._tokenizer, self._chat = tokenizer, chat
        self._words = _WORDS.split()
        if tokenizer is not None:
            special = tokenizer.special_ids | set(tokenizer.eos_ids)
            self._ids = [i for i in range(tokenizer.vocab_size) if i not in special]

    def length(self, most: int, ratio: float) -> int:
        """Uniform from `ratio` of `most` to all of it, at least 1."""
        return self._draw.randint(max(1, round(most * ratio)), most)

    def draw(self, length: int) -> Sequence[int] | Sequence[str]:
        """`length` tokens."""
        if self._tokenizer is None:
            return self._draw.choices(self._words, k=length)
        return self._draw.choices(self._ids, k=length)

    def name(self) -> str:
        """Of a function or an argument."""
        return "_".join(self._draw.choices(self._words, k=2))

    def between(self, low: int, high: int) -> int:
        """Uniform, both included."""
        return self._draw.randint(low, high)

    def pause(self, mean: float) -> float:
        """Exponentially distributed; 0 for a mean of 0."""
        return self._draw.expovariate(1 / mean) if mean else 0.0

    def count(self, text: str) -> int:
        """Tokens of a text; without a tokenizer four characters are one."""
        return len(text) // 4 if self._tokenizer is None else len(self._tokenizer.encode(text))

    def text(self, tokens: Sequence[int] | Sequence[str]) -> str:
        """What was drawn, as text."""
        if self._tokenizer is None:
            return " ".join(str(t) for t in tokens)
        return self._tokenizer.decode([int(t) for t in tokens])

    def prompt(self, tokens: Sequence[int] | Sequence[str], max_tokens: int) -> Prompt:
        """Completions take ids as they are; chat takes text, whose length a template changes."""
        if self._tokenizer is None or self._chat:
            return Prompt(max_tokens, text=self.text(tokens))
        return Prompt(max_tokens, ids=tuple(int(t) for t in tokens))

    def shuffle(self, prompts: list[Prompt]) -> None:
        """In place."""
        self._draw.shuffle(prompts)


def random_prompts(
    words: Words, count: int, input_len: int, output_len: int, ratio: float
) -> list[Prompt]:
    """Nothing in common; lengths from `ratio` of those asked for to all of them."""
    return [
        words.prompt(words.draw(words.length(input_len, ratio)), words.length(output_len, ratio))
        for _ in range(count)
    ]


def shared_prefix(
    words: Words, count: int, prefix_len: int, prefixes: int, input_len: int, output_len: int
) -> list[Prompt]:
    """`prefixes` beginnings of `prefix_len` tokens, each with many ends, in mixed order."""
    begins = [list(words.draw(prefix_len)) for _ in range(prefixes)]
    out = [
        words.prompt([*begin, *words.draw(input_len)], output_len)
        for begin in islice(cycle(begins), count)
    ]
    words.shuffle(out)
    return out


def from_file(path: Path, count: int | None, output_len: int, chat: bool) -> list[Prompt]:
    """One prompt per line: {"prompt": text} or {"messages": [...]}, and "max_tokens" if needed.

    The file is gone through again where `count` is larger. ConfigError names a line at fault.
    """
    try:
        with path.open(encoding="utf-8") as lines:
            found = list(_read(path, lines, output_len, chat))
    except (OSError, UnicodeDecodeError) as e:
        made = 'a file with {"prompt": TEXT} or {"messages": […]} on each line'
        raise unreadable(f"--dataset-path {path}", e, made) from e
    if not found:
        raise ConfigError(f"--dataset-path {path}: holds no prompt")
    return list(islice(cycle(found), count or len(found)))


def _read(path: Path, lines: Any, output_len: int, chat: bool) -> Iterator[Prompt]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"--dataset-path {path}, line {number}"
        try:
            row = json.loads(line)
        except ValueError as e:
            raise ConfigError(f"{where}: no JSON: {e}") from e
        if not isinstance(row, dict):
            raise ConfigError(f"{where}: write an object with prompt or messages")
        tokens = row.get("max_tokens", output_len)
        if type(tokens) is not int or tokens < 1:
            raise ConfigError(f"{where}: max_tokens {tokens!r}: must be a whole number above 0")
        text, messages = row.get("prompt"), row.get("messages")
        if isinstance(text, str) and text and messages is None:
            yield Prompt(tokens, text=text)
        elif isinstance(messages, list) and messages and text is None:
            if not chat:
                raise ConfigError(f"{where}: messages need --endpoint /v1/chat/completions")
            yield Prompt(tokens, messages=tuple(messages))
        else:
            raise ConfigError(f"{where}: needs prompt (a text) or messages (a list), one of them")
