"""One choice while it is generated: tokens of the engine in, pieces of the answer out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from ds_runtime.engine.messages import TokenLogprob, Tokens
from ds_runtime.sampling_params import SamplingParams
from ds_runtime.server.generate.chat import Prompt
from ds_runtime.text.detokenizer import OutputState
from ds_runtime.text.parsers.events import Answer, Content, Event
from ds_runtime.text.parsers.registry import OutputParser
from ds_runtime.text.tokenizer import Tokenizer

PromptLogprobs = list[TokenLogprob | None]
StartParser = Callable[[Prompt], OutputParser | None]


class Piece(NamedTuple):
    """What one message added to a choice. `finish_reason` is set on the last one.

    `text` is what the model wrote, `events` what the choice's parser made of it.
    """

    text: str
    events: list[Event]
    tokens: list[int]
    logprobs: list[TokenLogprob]
    finish_reason: str | None
    stop_reason: str | int | None
    first: bool


@dataclass(slots=True)
class Choice:
    """One choice of one prompt. `index` counts over all choices of the client's request."""

    index: int
    rid: str
    prompt: Prompt
    params: SamplingParams
    output: OutputState
    parser: OutputParser | None = None
    answer: Answer = field(default_factory=Answer)
    texts: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: PromptLogprobs | None = None
    cached_tokens: int = 0
    cached_by_tier: dict[str, int] | None = None
    started: bool = False
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    @property
    def cut(self) -> bool:
        """Whether something else than the model has ended the text: a limit, a stop, an abort."""
        return self.finish_reason in ("length", "abort") or self.stop_reason is not None

    def num_logprobs(self, piece: Piece | None = None, cumulative: bool = False) -> int:
        """How many log-probabilities an answer has of this choice, or a stream of a piece of it.
        cumulative: the stream tells all that there is so far with each piece.
        """
        piece = None if cumulative else piece
        out, told = self.logprobs if piece is None else piece.logprobs, 0
        if piece is None or piece.first or piece.finish_reason is not None:
            told = len(self.prompt_logprobs or ()) * (1 + (self.params.prompt_logprobs or 0))
        return told + len(out) * (1 + (self.params.logprobs or 0))

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self.texts)

    def take(self, message: Tokens) -> Piece:
        """Add the engine's tokens, up to where a stop string ends the text."""
        first, self.started = not self.started, True
        delta = self.output.push(message.tokens, message.finish, message.stop_token)
        tokens = message.tokens[: delta.used]
        logprobs = (message.logprobs or [])[: delta.used]
        self.texts.append(delta.text)
        self.tokens += tokens
        self.logprobs += logprobs
        self.cached_tokens = max(self.cached_tokens, message.cached_tokens)
        self.cached_by_tier = self.cached_by_tier or message.cached_by_tier
        events = self._parse(delta.text, len(tokens))
        if delta.finished:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
            events += self._end()
        self.answer.add(events)
        return Piece(
            delta.text, events, tokens, logprobs, self.finish_reason, self.stop_reason, first
        )

    def _parse(self, text: str, num_tokens: int) -> list[Event]:
        if self.parser is not None:
            return self.parser.feed(text, num_tokens)
        return [Content(text)] if text else []

    def _end(self) -> list[Event]:
        """The parser's last events; a model that ended with calls waits for their results."""
        if self.parser is None:
            return []
        natural = self.finish_reason == "stop" and self.stop_reason is None
        events = self.parser.finish(natural)
        if natural and self.parser.num_calls:
            self.finish_reason = "tool_calls"
        return events


def make_choices(
    job_id: str,
    prompts: list[tuple[Prompt, SamplingParams]],
    tokenizer: Tokenizer,
    start_parser: StartParser | None,
) -> list[Choice]:
    """Every choice of every prompt, prompts first. Each gets a parser of its own."""
    out: list[Choice] = []
    for prompt, params in prompts:
        for _ in range(params.n):
            index = len(out)
            output = OutputState(tokenizer, params)
            parser = None if start_parser is None else start_parser(prompt)
            out.append(Choice(index, f"{job_id}-{index}", prompt, params, output, parser))
    return out
