"""What the offline API returns, and how the engine's messages become it."""

from __future__ import annotations

from dataclasses import dataclass, field

from ds_runtime.engine.messages import Submit, TokenLogprob, Tokens
from ds_runtime.text.detokenizer import OutputState
from ds_runtime.text.parsers.events import Answer
from ds_runtime.text.parsers.registry import OutputParser
from ds_runtime.text.tokenizer import Tokenizer


@dataclass(slots=True)
class Completion:
    """One choice. `token_ids` include the EOS or stop id that ended it, `text` does not.

    finish_reason: "stop", "length" or "tool_calls"; stop_reason: the stop string or stop id, None
    for EOS. `logprobs` has one entry per token where asked for. Without a tokenizer there is no
    `text`.
    `answer`: what a chat's `text` is made of, its reasoning, content and complete tool calls.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    answer: Answer | None = None

    def parse(self, parser: OutputParser) -> None:
        """Read `answer` from the whole text. An end of the model's own after calls means them."""
        natural = self.finish_reason == "stop" and self.stop_reason is None
        self.answer = Answer()
        self.answer.add([*parser.feed(self.text, len(self.token_ids)), *parser.finish(natural)])
        if natural and parser.num_calls:
            self.finish_reason = "tool_calls"


@dataclass(slots=True)
class Usage:
    """Counts of tokens; `cached_tokens` of the prompt came from the prefix cache. `cached_by_tier`:
    where these were, "device" or "host", with --enable-hierarchical-cache.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    cached_by_tier: dict[str, int] | None = None


@dataclass(slots=True)
class RequestOutput:
    """The result of one prompt. `prompt` is None where token ids were given.

    `prompt_logprobs`: one entry per prompt token where asked for; the first is None.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[Completion]
    prompt_logprobs: list[TokenLogprob | None] | None = None
    usage: Usage = field(default_factory=Usage)

    @property
    def text(self) -> str:
        """Text of the first choice."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        """Tokens of the first choice."""
        return self.outputs[0].token_ids

    @property
    def logprobs(self) -> list[TokenLogprob] | None:
        """Log-probabilities of the first choice, one per token."""
        return self.outputs[0].logprobs

    @property
    def finish_reason(self) -> str | None:
        """Why the first choice ended."""
        return self.outputs[0].finish_reason


class PendingChoice:
    """One choice on its way through the engine."""

    def __init__(
        self, submit: Submit, output: RequestOutput, choice: int, tokenizer: Tokenizer | None
    ) -> None:
        self.submit = submit
        self.output = output
        self.completion = output.outputs[choice]
        self._state = None if tokenizer is None else OutputState(tokenizer, submit.params)

    def take(self, message: Tokens) -> bool:
        """Add new tokens; True when a stop string ended the text, which the engine cannot see."""
        done, used, ended = self.completion, len(message.tokens), False
        done.finish_reason = message.finish
        if self._state is None:
            if message.stop_token in self.submit.params.stop_token_ids:
                done.stop_reason = message.stop_token
        else:
            delta = self._state.push(message.tokens, message.finish, message.stop_token)
            used, done.text = delta.used, done.text + delta.text
            if delta.finished:
                done.finish_reason, done.stop_reason = delta.finish_reason, delta.stop_reason
                ended = message.finish is None
        done.token_ids += message.tokens[:used]
        if done.logprobs is not None and message.logprobs is not None:
            done.logprobs += message.logprobs[:used]
        usage = self.output.usage
        usage.completion_tokens += used
        if message.prompt_logprobs is not None:
            self.output.prompt_logprobs = message.prompt_logprobs
        if done.index == 0:
            usage.cached_tokens = message.cached_tokens
            usage.cached_by_tier = message.cached_by_tier
        return ended
