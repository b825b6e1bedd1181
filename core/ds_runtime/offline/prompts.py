"""From what a caller of the offline API gives to requests: the checkpoint's text side."""

from __future__ import annotations

import contextlib
import operator
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import msgspec

from ds_runtime.assembly.result import Assembly
from ds_runtime.checkpoint.base import part_of
from ds_runtime.checkpoint.hub import text_folder
from ds_runtime.engine.messages import SubmitGroup
from ds_runtime.errors import ConfigError, RequestError
from ds_runtime.offline.outputs import Completion, PendingChoice, RequestOutput
from ds_runtime.sampling_params import SamplingParams
from ds_runtime.text.apart import Text
from ds_runtime.text.formats.families import find_family
from ds_runtime.text.formats.template import Message, Template
from ds_runtime.text.parsers.registry import OutputParser, Parsers
from ds_runtime.text.spelled import marked
from ds_runtime.text.tokenizer import Tokenizer

ROLES = ("system", "developer", "user", "assistant", "tool")

Prompts: TypeAlias = str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]


class JobMaker:
    """Numbers requests and encodes their prompts. A checkpoint without tokenizer takes ids."""

    def __init__(self, assembly: Assembly) -> None:
        config = assembly.config
        self._folder = text_folder(assembly.folder, config.load_format)
        self._family = find_family(assembly.folder, config.model)
        self._text: Text | None = None
        if part_of(self._folder, "tokenizer.json").exists():
            self._text = Text(self._folder, assembly.folder, config.model, config.chat_template)
        self._served = 0

    @property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer; CheckpointError if it has none."""
        if self._text is None:
            return Tokenizer.load(self._folder)  # raises, naming what is missing
        return self._text.tokenizer

    def close(self) -> None:
        """End the process that renders and tokenises. May be called twice."""
        if self._text is not None:
            self._text.close()

    @property
    def _template(self) -> Template | None:
        return None if self._text is None else self._text.template

    def chat(
        self,
        conversation: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> tuple[str, list[int]]:
        """A conversation through the chat template, and its ids; ConfigError if there is none."""
        template = self._template
        if self._text is None or template is None:
            raise ConfigError(f"{self._folder}: has no chat template; pass chat_template=")
        given = marked(conversation, tools, kwargs or {}, self.tokenizer.added_texts)
        text = template.render(given.messages, given.tools, kwargs=given.kwargs)
        return given.plain(text), self.tokenizer.encode(text, mark=given.mark)

    def parser(self, prompt: str, tools: Sequence[Mapping[str, Any]] | None) -> OutputParser:
        """A reader of one answer to a rendered `prompt`, by the model's own formats."""
        calls = None if self._template is None else self._template.tool_calls
        parsers = Parsers(None if self._family is None else self._family.reasoning, calls)
        return parsers.start(prompt, tools) or OutputParser(None, None)

    def output(self, prompt: str | list[int], params: SamplingParams) -> RequestOutput:
        """An empty result with a choice for each of `params.n`."""
        text, ids = self._encode(prompt)
        logprobs = params.logprobs is not None
        choices = [Completion(c, logprobs=[] if logprobs else None) for c in range(params.n)]
        return RequestOutput(text, ids, choices)

    def _encode(self, prompt: str | list[int]) -> tuple[str | None, list[int]]:
        if isinstance(prompt, str):
            if self._text is None:
                raise RequestError(
                    f"the prompt is text, but {self._folder} has no tokenizer.json: "
                    "give token ids, or add the model's tokenizer files",
                    "prompt",
                )
            return prompt, self.tokenizer.encode(prompt, add_special=True)
        return None, prompt

    def jobs(
        self, output: RequestOutput, params: SamplingParams, adapter: str = ""
    ) -> list[PendingChoice]:
        """The choices of one prompt."""
        if params.stop and self._text is None:
            raise RequestError.of(
                "stop",
                " strings need a tokenizer, and this checkpoint has none: use stop_token_ids",
            )
        seed = secrets.randbits(63) if params.seed is None else params.seed
        output.usage.prompt_tokens = len(output.prompt_token_ids)
        self._served += 1
        group = SubmitGroup(
            rids=[f"{self._served}.{choice}" for choice in range(params.n)],
            prompt=output.prompt_token_ids,
            params=params,
            seed=seed,
            adapter=adapter,
        )
        tokenizer = None if self._text is None else self.tokenizer
        return [
            PendingChoice(submit, output, submit.choice, tokenizer) for submit in group.choices()
        ]


def listed(prompts: Any) -> list[str | list[int]]:
    """Prompts in a list: text or ids alone are one prompt. RequestError for anything else.

    Arrays and tensors of whole numbers count as lists of ids.
    """
    prompts = _plain(prompts)
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, list):
        raise _not_a_prompt(prompts)
    if prompts and not isinstance(_plain(prompts[0]), str | list):
        return [_ids(prompts)]
    out: list[str | list[int]] = []
    for prompt in map(_plain, prompts):
        if not isinstance(prompt, str | list):
            raise _not_a_prompt(prompt)
        out.append(prompt if isinstance(prompt, str) else _ids(prompt))
    return out


def conversations(messages: Any) -> list[Sequence[Message]]:
    """One conversation, or a list of them, in a list. RequestError for what is none."""
    if not isinstance(messages, list | tuple):
        raise RequestError.of("messages", f" is {messages!r:.80}: give a list of messages")
    several = messages if messages and isinstance(messages[0], list | tuple) else [messages]
    for conversation in several:
        if not isinstance(conversation, list | tuple) or not conversation:
            raise RequestError(
                f"a conversation is {conversation!r:.80}: give at least one message", "messages"
            )
        for message in conversation:
            _check_message(message)
    return list(several)


def _check_message(message: Any) -> None:
    if not isinstance(message, Mapping) or message.get("role") not in ROLES:
        raise RequestError(
            f"a message is {message!r:.80}: give a dict with content and a role of "
            f"{', '.join(ROLES)}",
            "messages",
        )
    content = message.get("content")
    if content is not None and not isinstance(content, str | list):
        raise RequestError(
            f"the content of a message is {content!r:.80}: give text or text parts", "messages"
        )


def _plain(value: Any) -> Any:
    """Tuples, ranges, arrays and tensors as lists; the rest as it is."""
    if isinstance(value, tuple | range):
        return list(value)
    if hasattr(value, "tolist") and len(value.shape) > 0:
        return value.tolist()
    return value


def _ids(prompt: list[Any]) -> list[int]:
    with contextlib.suppress(msgspec.ValidationError):  # other kinds of numbers are looked at below
        return msgspec.convert(prompt, list[int])
    ids = []
    for value in prompt:
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise RequestError(
                f"the prompt holds {value!r:.80}: token ids are whole numbers", "prompt"
            )
        ids.append(operator.index(value))
    return ids


def _not_a_prompt(value: Any) -> RequestError:
    kind = type(value).__name__
    return RequestError(f"the prompt is {kind}: give text, token ids or a list of them", "prompt")
