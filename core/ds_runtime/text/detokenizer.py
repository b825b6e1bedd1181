"""Tokens of one choice become text: whole characters only, ended by stop strings."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import NamedTuple

from ds_runtime.sampling_params import SamplingParams
from ds_runtime.text.stops import StopMatcher
from ds_runtime.text.tokenizer import Tokenizer


class TextDecoder:
    """Incremental `Tokenizer.decode`: the pieces joined equal decoding everything at once.

    A token is a run of bytes, so the only state is the unfinished character (at most 3 bytes). The
    work per token is constant, and a piece never holds half a character.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """Text that became complete with `token`; often empty."""
        if token in self._skipped:
            return ""
        if not self._utf8.buffer and (whole := self._tokenizer.whole_text(token)) is not None:
            return whole
        return self._utf8.decode(self._tokenizer.token_bytes(token))

    def flush(self) -> str:
        """U+FFFD if the stream ended inside a character, else nothing."""
        return self._utf8.decode(b"", final=True)


class TextDelta(NamedTuple):
    """What one push added. `used` counts the tokens that belong to the output.

    finish_reason: None while going on, "stop" or "length". stop_reason: the stop string or the
    stop token id that ended the text; None for EOS and for length.
    """

    text: str
    finished: bool
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    used: int = 0


class OutputState:
    """The text of one choice, from the engine's tokens.

    When a push returns `finished` with a stop string as `stop_reason`, the engine does not know
    yet: the caller aborts the request there. Pushes after the end are ignored.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._params = params
        self._eos_ids = tokenizer.eos_ids
        self._decoder = TextDecoder(tokenizer, params.skip_special_tokens)
        self._matcher = StopMatcher(params.stop)
        self.count = 0
        self.finished = False

    def push(
        self, tokens: Sequence[int], finish: str | None = None, stop_token: int | None = None
    ) -> TextDelta:
        """Take new tokens; `finish` and `stop_token` as in `messages.Tokens`."""
        if self.finished:
            return TextDelta("", True)
        params = self._params
        if finish is None and not params.stop:  # nearly always
            self.count += len(tokens)
            push = self._decoder.push
            return TextDelta("".join([push(token) for token in tokens]), False, used=len(tokens))
        out: list[str] = []
        for used, token in enumerate(tokens, start=1):
            self.count += 1
            last = used == len(tokens)
            if last and stop_token is not None and not params.include_stop:
                break
            text, matched = self._scan(self._decoder.push(token))
            out.append(text)
            if matched is not None:
                return self._end("".join(out), "stop", matched, used)
        if finish is None:
            return TextDelta("".join(out), False, used=len(tokens))
        text, matched = self._scan(self._decoder.flush())
        out.append(text)
        if matched is not None:
            return self._end("".join(out), "stop", matched, len(tokens))
        out.append(self._matcher.flush())
        reason = None
        if stop_token is not None and (
            stop_token in params.stop_token_ids or stop_token not in self._eos_ids
        ):
            reason = stop_token
        return self._end("".join(out), finish, reason, len(tokens))

    def _scan(self, piece: str) -> tuple[str, str | None]:
        # Below min_tokens nothing may end the text, so stop strings are not looked for.
        if self.count <= self._params.min_tokens:
            return piece, None
        text, matched = self._matcher.push(piece)
        if matched is not None and self._params.include_stop:
            text += matched
        return text, matched

    def _end(self, text: str, finish: str, reason: str | int | None, used: int) -> TextDelta:
        self.finished = True
        return TextDelta(text, True, finish, reason, used)
