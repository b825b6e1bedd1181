"""From a request's body to prompts and parameters that are ready to run.

Everything here is plain computing: it runs in a thread when the body is not small.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from ds_runtime.config import ServerConfig
from ds_runtime.errors import RequestError, shown
from ds_runtime.sampling_params import SamplingParams, check_number
from ds_runtime.server.chat import Prompt, chat_prompt, completion_prompts
from ds_runtime.server.client import EngineClient
from ds_runtime.server.errors import ApiError
from ds_runtime.server.formats import ChatFormat, CompletionFormat, Format, GenerateFormat
from ds_runtime.server.metrics import Metrics
from ds_runtime.server.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerateRequest,
    OpenAIRequest,
    TokenizeRequest,
)
from ds_runtime.server.sampling import GenerationDefaults, build_params, check_ids, fit
from ds_runtime.text.template import ChatTemplate
from ds_runtime.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the front end knows of the model: its name in the API, template and defaults."""

    name: str
    template: ChatTemplate | None = None
    defaults: GenerationDefaults = field(default_factory=GenerationDefaults)
    created: int = field(default_factory=lambda: int(time.time()))


@dataclass(frozen=True, slots=True)
class Job:
    """A request that is ready to run."""

    prompts: list[tuple[Prompt, SamplingParams]]
    form: Format
    stream: bool | None
    priority: int | None


@dataclass(frozen=True, slots=True)
class Service:
    """What every route needs."""

    client: EngineClient
    tokenizer: Tokenizer
    config: ServerConfig
    model: ModelInfo
    metrics: Metrics

    def check_model(self, name: str | None) -> None:
        """ApiError 404 unless `name` is the served one (or left out)."""
        if name is not None and name != self.model.name:
            raise ApiError(
                404,
                f"model {shown(name)} is not served here: use {self.model.name!r}",
                param="model",
                code="model_not_found",
            )


def chat_job(service: Service, body: ChatRequest) -> Job:
    """A chat: rendered, tokenised and checked."""
    service.check_model(body.model)
    model, tokenizer, ready = service.model, service.tokenizer, service.client.require()
    params = build_params(
        body,
        model.defaults,
        ready.vocab_size,
        max_tokens=_max_tokens(body),
        logprobs=_chat_logprobs(body),
        prompt_logprobs=body.prompt_logprobs,
    )
    form = ChatFormat(model.name, tokenizer, bool(body.logprobs), _include_usage(body))
    prompt = chat_prompt(body, model.template, tokenizer)
    prompts = [(prompt, fit(params, len(prompt.ids), ready, "messages"))]
    return Job(prompts, form, body.stream, body.priority)


def completion_job(service: Service, body: CompletionRequest) -> Job:
    """One or more prompts of /v1/completions."""
    service.check_model(body.model)
    model, tokenizer, ready = service.model, service.tokenizer, service.client.require()
    echoed = body.logprobs if body.echo else None
    params = build_params(
        body,
        model.defaults,
        ready.vocab_size,
        max_tokens=body.max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=echoed if body.prompt_logprobs is None else body.prompt_logprobs,
    )
    usage, wished = _include_usage(body), body.logprobs is not None
    form = CompletionFormat(model.name, tokenizer, wished, usage, bool(body.echo))
    prompts = completion_prompts(body.prompt, params, tokenizer, ready)
    return Job(prompts, form, body.stream, body.priority)


def generate_job(service: Service, body: GenerateRequest) -> Job:
    """The prompt of /generate."""
    ready = service.client.require()
    if (body.text is None) == (body.input_ids is None):
        raise RequestError("send exactly one of text and input_ids", "text")
    fields = body.sampling_params
    wished = fields.max_new_tokens
    check_number("max_tokens", wished, "max_new_tokens")
    params = build_params(
        fields,
        service.model.defaults,
        ready.vocab_size,
        max_tokens=fields.max_tokens if wished is None else wished,
        logprobs=fields.logprobs,
        prompt_logprobs=fields.prompt_logprobs,
        include_stop=fields.include_stop,
    )
    if body.text is not None:
        ids = service.tokenizer.encode(body.text, add_special=bool(body.text))
        params = fit(params, len(ids), ready, "text")
    else:
        ids = body.input_ids or []
        params = fit(params, len(ids), ready, "input_ids")  # before a look at millions of ids
        check_ids(ids, ready.vocab_size, "input_ids")
    form = GenerateFormat(service.tokenizer)
    return Job([(Prompt(ids, body.text), params)], form, body.stream, body.priority)


def token_ids(service: Service, body: TokenizeRequest) -> list[int]:
    """What /tokenize answers."""
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("send exactly one of prompt and messages", "prompt")
    if body.prompt is not None:
        return service.tokenizer.encode(body.prompt, body.add_special_tokens is not False)
    return chat_prompt(body, service.model.template, service.tokenizer).ids


def text_of(service: Service, body: DetokenizeRequest) -> str:
    """What /detokenize answers."""
    service.check_model(body.model)
    ready = service.client.ready
    size = service.tokenizer.vocab_size if ready is None else ready.vocab_size
    check_ids(body.tokens, size, "tokens")
    return service.tokenizer.decode(body.tokens, body.skip_special_tokens)


def _max_tokens(body: ChatRequest) -> int | None:
    new, old = body.max_completion_tokens, body.max_tokens
    if new is not None and old is not None and new != old:
        raise RequestError(
            f"max_completion_tokens is {new} and max_tokens {old}: send one of them",
            "max_completion_tokens",
        )
    check_number("max_tokens", new, "max_completion_tokens")
    return old if new is None else new


def _chat_logprobs(body: ChatRequest) -> int | None:
    if body.logprobs:
        check_number("logprobs", body.top_logprobs, "top_logprobs")
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise RequestError("top_logprobs needs logprobs: true", "top_logprobs")
    return None


def _include_usage(body: OpenAIRequest) -> bool:
    if body.stream_options is None:
        return False
    if not body.stream:
        raise RequestError("stream_options needs stream: true", "stream_options")
    return bool(body.stream_options.include_usage)
