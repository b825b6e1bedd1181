"""Log-probabilities as the routes word them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ds_runtime.engine.messages import TokenLogprob
from ds_runtime.text.detokenizer import TextDecoder
from ds_runtime.text.tokenizer import Tokenizer

Json = dict[str, Any]
_FLOOR = -9999.0  # JSON has no -inf


def chat_logprobs(entries: Sequence[TokenLogprob], tokenizer: Tokenizer) -> list[Json]:
    """`logprobs.content` of a chat choice."""

    def one(token: int, logprob: float) -> Json:
        return {
            "token": tokenizer.token_text(token),
            "logprob": max(logprob, _FLOOR),
            "bytes": list(tokenizer.token_bytes(token)),
        }

    return [
        one(e.token, e.logprob) | {"top_logprobs": [one(t, p) for t, p in e.top]} for e in entries
    ]


def native_logprobs(
    entries: Sequence[TokenLogprob | None], ids: Sequence[int], tokenizer: Tokenizer | None
) -> list[list[Any]]:
    """[log-probability or null, id, text or null] for each token, as /generate words them.
    tokenizer: None leaves texts out."""
    return [
        _native(None if e is None else e.logprob, token, tokenizer)
        for token, e in zip(ids, entries, strict=True)
    ]


def native_top(
    entries: Sequence[TokenLogprob | None], tokenizer: Tokenizer | None
) -> list[list[Any] | None]:
    """The same for the best tokens of each position; None where nothing is before it."""
    return [
        None if e is None else [_native(p, token, tokenizer) for token, p in e.top] for e in entries
    ]


def _native(logprob: float | None, token: int, tokenizer: Tokenizer | None) -> Any:
    text = None if tokenizer is None else tokenizer.token_text(token)
    return [None if logprob is None else max(logprob, _FLOOR), token, text]


def prompt_logprobs(
    entries: Sequence[TokenLogprob | None] | None, tokenizer: Tokenizer
) -> list[Json | None] | None:
    """Per prompt position, by token id; None where there is nothing before the position."""
    if entries is None:
        return None
    out: list[Json | None] = []
    for entry in entries:
        if entry is None:
            out.append(None)
            continue
        found = dict(entry.top) | {entry.token: entry.logprob}
        out.append(
            {
                str(t): {"logprob": max(p, _FLOOR), "decoded_token": tokenizer.token_text(t)}
                for t, p in found.items()
            }
        )
    return out


class CompletionLogprobs:
    """The four parallel lists of /v1/completions. Offsets count characters of the choice's text."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._decoder = TextDecoder(tokenizer, skip_special)
        self._offset = 0
        self._clear()

    def _clear(self) -> None:
        self._tokens: list[str] = []
        self._logprobs: list[float | None] = []
        self._top: list[dict[str, float] | None] = []
        self._offsets: list[int] = []

    def add_prompt(self, ids: Sequence[int], entries: Sequence[TokenLogprob | None] | None) -> None:
        """The echoed prompt's tokens; the first has no log-probability."""
        known = entries if entries is not None else [None] * len(ids)
        for token, entry in zip(ids, known, strict=True):
            self._one(token, entry)

    def add(self, entries: Sequence[TokenLogprob]) -> None:
        """Generated tokens."""
        for entry in entries:
            self._one(entry.token, entry)

    def take(self) -> Json | None:
        """What was added since the last call."""
        if not self._tokens:
            return None
        out = {
            "tokens": self._tokens,
            "token_logprobs": self._logprobs,
            "top_logprobs": self._top,
            "text_offset": self._offsets,
        }
        self._clear()
        return out

    def _one(self, token: int, entry: TokenLogprob | None) -> None:
        name = self._tokenizer.token_text
        self._tokens.append(name(token))
        self._offsets.append(self._offset)
        self._offset += len(self._decoder.push(token))
        if entry is None:
            self._logprobs.append(None)
            self._top.append(None)
            return
        self._logprobs.append(max(entry.logprob, _FLOOR))
        top = {name(t): max(p, _FLOOR) for t, p in entry.top}
        self._top.append(top | {name(token): max(entry.logprob, _FLOOR)})
