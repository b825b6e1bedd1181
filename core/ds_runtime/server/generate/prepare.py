"""From a request's body to prompts and parameters that are ready to run.

Everything here is plain computing: it runs in a thread when the body is not small.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from ds_runtime.config import ServerConfig
from ds_runtime.errors import FieldPath, RequestError
from ds_runtime.sampling_params import SamplingParams, check_number
from ds_runtime.server.errors import ApiError, shown
from ds_runtime.server.generate.chat import Prompt, chat_prompt, plain_prompts
from ds_runtime.server.generate.choice import StartParser
from ds_runtime.server.generate.formats import (
    ChatFormat,
    CompletionFormat,
    Format,
    UsageChunks,
)
from ds_runtime.server.generate.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    OpenAIRequest,
    TokenizeRequest,
)
from ds_runtime.server.generate.rules import chat_rules
from ds_runtime.server.generate.run import Engines, Submission
from ds_runtime.server.generate.sampling import (
    GenerationDefaults,
    build_params,
    check_ids,
    check_room,
    fit,
)
from ds_runtime.server.protocols.translate import ClientNames
from ds_runtime.text.formats.template import Template
from ds_runtime.text.parsers.registry import OutputParser, Parsers

_COUNTED = 4  # contexts that a text may have which is only counted


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the front end knows of the model: its name in the API, folder, template and defaults.

    text_ended: how often work on a request's text was ended at its bounds.
    """

    name: str
    path: str = ""
    template: Template | None = None
    defaults: GenerationDefaults = field(default_factory=GenerationDefaults)
    parsers: Parsers = field(default_factory=Parsers)
    text_ended: Callable[[], int] = lambda: 0
    created: int = field(default_factory=lambda: int(time.time()))


@dataclass(frozen=True, slots=True)
class Job:
    """A request that is ready to run. names: of its fields, for errors that come while it runs."""

    submission: Submission
    form: Format
    stream: bool | None
    names: ClientNames = field(default_factory=ClientNames)


@dataclass(frozen=True, slots=True)
class Service(Engines):
    """What every route needs. `leaving`: adapters that take no more requests."""

    config: ServerConfig
    model: ModelInfo
    leaving: set[str] = field(default_factory=set)

    def has_adapter(self, name: str | None) -> bool:
        """Whether requests may name this adapter."""
        return name in self.client.adapters and name not in self.leaving

    @property
    def names(self) -> list[str]:
        """The model's and those of its adapters."""
        return [self.model.name, *(n for n in self.client.adapters if self.has_adapter(n))]

    def check_model(self, name: str | None) -> str:
        """The adapter that `name` means, "" for the model itself (also if it is left out).

        ApiError 404 if neither is called so; while the engine starts nobody knows its adapters.
        """
        if name is None or name == self.model.name:
            return ""
        if self.has_adapter(name):
            return name
        self.client.require()
        raise ApiError(
            404,
            f"model {shown(name)} is not served here: use {' or '.join(map(repr, self.names))}",
            param="model",
            code="model_not_found",
        )


def chat_job(
    service: Service, body: ChatRequest, form: Format | None = None, clamp: bool = False
) -> Job:
    """A chat: rendered, tokenised and checked. `form`: another protocol's wording. `clamp`: a limit
    of tokens above what the context has left means that."""
    adapter = service.check_model(body.model)
    model, tokenizer, ready = service.model, service.tokenizer, service.client.require()
    params = build_params(
        body,
        model.defaults,
        ready.vocab_size,
        max_tokens=_max_tokens(body),
        logprobs=_chat_logprobs(body),
        prompt_logprobs=body.prompt_logprobs,
    )
    if form is None:
        name, usage = adapter or model.name, _streamed_usage(body, service.config)
        form = ChatFormat(name, tokenizer, bool(body.logprobs), usage, bool(body.return_token_ids))
    prompt = chat_prompt(body, model.template, tokenizer, ready)
    params = replace(params, rules=chat_rules(body, model.parsers, prompt.text or ""))
    prompts = [(prompt, fitted(service, params, prompt, "messages", clamp))]
    start = _start_parser(model.parsers, body)
    submission = Submission(prompts, body.priority, body.rid, start, adapter, body.cache_salt)
    return Job(submission, form, body.stream)


def fitted(
    service: Service, params: SamplingParams, prompt: Prompt, param: str, clamp: bool = False
) -> SamplingParams:
    """`params` for a prompt that came in field `param`, as `fit` says. clamp: whatever the server's
    flag says."""
    clamp = clamp or service.config.clamp_max_tokens
    out = fit(params, len(prompt.ids), service.client.require(), param, clamp)
    if params.max_tokens not in (None, out.max_tokens):
        service.metrics.clamped.inc()
    return out


def chat_tokens(service: Service, body: ChatRequest) -> list[int]:
    """A chat's prompt, of any length that can be told in time."""
    service.check_model(body.model)
    return _counted(service, body)


def _counted(service: Service, body: ChatRequest | TokenizeRequest) -> list[int]:
    ready, template = service.client.ready, service.model.template
    return chat_prompt(body, template, service.tokenizer, ready, _COUNTED).ids


def _start_parser(parsers: Parsers, body: ChatRequest) -> StartParser:
    def start(prompt: Prompt) -> OutputParser | None:
        return parsers.start(
            prompt.text or "",
            body.tools,
            separate_reasoning=body.separate_reasoning is not False,
            stream_reasoning=body.stream_reasoning is not False,
            include_reasoning=body.include_reasoning is not False,
            parallel=body.parallel_tool_calls is not False,
            forbidden=body.tool_choice == "none",
        )

    return start


def completion_job(service: Service, body: CompletionRequest) -> Job:
    """One or more prompts of /v1/completions."""
    adapter = service.check_model(body.model)
    model, tokenizer, ready = service.model, service.tokenizer, service.client.require()
    echoed = body.logprobs if body.echo else None
    alone = bool(body.echo) and body.max_tokens == 0  # the prompt's own log-probabilities
    if alone and body.min_tokens:
        raise RequestError.of(
            "min_tokens", f" {body.min_tokens} is above ", FieldPath.of("max_tokens"), " 0"
        )
    params = build_params(
        body,
        model.defaults,
        ready.vocab_size,
        max_tokens=1 if alone else body.max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=echoed if body.prompt_logprobs is None else body.prompt_logprobs,
    )
    usage, wished = _streamed_usage(body, service.config), body.logprobs is not None
    form = CompletionFormat(
        adapter or model.name,
        tokenizer,
        wished,
        usage,
        bool(body.echo),
        alone,
        bool(body.return_token_ids),
    )
    special = body.add_special_tokens is not False
    prompts = [
        (prompt, fitted(service, params, prompt, "prompt"))
        for prompt in plain_prompts(body.prompt, "prompt", tokenizer, ready, special)
    ]
    submission = Submission(prompts, body.priority, body.rid, None, adapter, body.cache_salt)
    return Job(submission, form, body.stream)


def token_ids(service: Service, body: TokenizeRequest) -> list[int]:
    """What /tokenize answers."""
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("send exactly one of prompt and messages", "prompt")
    if body.prompt is not None:
        if (ready := service.client.ready) is not None:
            check_room(service.tokenizer, body.prompt, ready, "prompt", _COUNTED)
        return service.tokenizer.encode(body.prompt, body.add_special_tokens is not False)
    return _counted(service, body)


def text_of(service: Service, body: DetokenizeRequest) -> str:
    """What /detokenize answers."""
    service.check_model(body.model)
    ready = service.client.ready
    size = service.tokenizer.vocab_size if ready is None else ready.vocab_size
    check_ids(body.tokens, size, "tokens")
    return service.tokenizer.decode(body.tokens, body.skip_special_tokens)


def tokenizer_info(service: Service) -> dict[str, Any]:
    """What /tokenizer_info answers: tokenizer_config.json. Every special token is a text or null,
    and `chat_template` that of plain chats, from wherever it came. Null where the model has none or
    its prompts are not a template's."""
    tokenizer, template = service.tokenizer, service.model.template
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **tokenizer.settings,
        **tokenizer.named_tokens(),
        "chat_template": None if template is None else template.source,
    }


def _max_tokens(body: ChatRequest) -> int | None:
    new, old = body.max_completion_tokens, body.max_tokens
    if new is not None and old is not None and new != old:
        raise RequestError.of(
            "max_completion_tokens",
            f" is {new} and ",
            FieldPath.of("max_tokens"),
            f" {old}: send one of them",
        )
    check_number("max_tokens", new, "max_completion_tokens")
    return old if new is None else new


def _chat_logprobs(body: ChatRequest) -> int | None:
    if body.logprobs:
        check_number("logprobs", body.top_logprobs, "top_logprobs")
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise RequestError.of("top_logprobs", " needs logprobs: true")
    return None


def _streamed_usage(body: OpenAIRequest, config: ServerConfig) -> UsageChunks:
    options = body.stream_options
    wanted = None if options is None else options.include_usage
    if wanted is None and body.stream:
        wanted = config.stream_response_default_include_usage
    if not wanted:
        return UsageChunks.NONE
    if not body.stream:
        raise RequestError.of("stream_options", " needs stream: true")
    each = options is not None and options.continuous_usage_stats
    return UsageChunks.EACH if each else UsageChunks.LAST
