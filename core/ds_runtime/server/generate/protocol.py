"""What clients may send. Strict: no coercion, and a field that nobody knows is an error.

Of fields that others' servers know, `KNOWN` says which values are accepted here (fields.py).
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidatorFunctionWrapHandler, WrapValidator

from ds_runtime.server.protocols.fields import REQUESTS, STREAM_OPTIONS, Fields

TokenIds = list[Any]  # millions at worst: `check_ids` looks at them once the length is right
MAX_ITEMS = 1 << 14  # of a list whose items take time to check
Tools = Annotated[list[dict[str, Any]], Field(max_length=MAX_ITEMS, fail_fast=True)]
Priority = Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)]


def _first_fault(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    """Of thousands of wrong values one is told: each costs time in which nobody else runs."""
    if isinstance(value, dict):
        for name, bias in value.items():
            if type(bias) not in (int, float):
                return check({name: bias})
    return check(value)


LogitBias = Annotated[dict[str, float], WrapValidator(_first_fault)]
CacheSalt = Annotated[str, Field(min_length=1, max_length=1024)]
Rid = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[\x21-\x7e]+$")]


class Body(BaseModel):
    """Base of every request body. PER_PROMPT: a list of neutral values, one for each prompt, is
    neutral as well."""

    model_config = ConfigDict(strict=True, extra="forbid")
    KNOWN: ClassVar[Fields] = REQUESTS
    PER_PROMPT: ClassVar[bool] = False


class Drawing(Body):
    """Sampling fields that have one name on all routes. None means the model's default."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: LogitBias | None = None
    stop: str | Annotated[list[str], Field(fail_fast=True)] | None = None
    stop_token_ids: Annotated[list[int], Field(fail_fast=True)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    n: int | None = None
    json_schema: dict[str, Any] | str | None = None
    regex: str | None = None
    ebnf: str | None = None


class Sampling(Drawing):
    """Sampling fields, shared by all routes but /generate."""

    max_tokens: int | None = None
    min_tokens: int | None = None
    include_stop_str_in_output: bool | None = None
    prompt_logprobs: int | None = None
    seed: int | None = None
    structured_outputs: dict[str, Any] | None = None


class StreamOptions(Body):
    """`include_usage` adds a last chunk with the token counts; with `continuous_usage_stats` every
    chunk has those of its choice so far."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    KNOWN: ClassVar[Fields] = STREAM_OPTIONS


class OpenAIRequest(Sampling):
    """Fields that chat and completions share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: dict[str, Any] | None = None
    priority: Priority | None = None
    rid: Rid | None = None
    cache_salt: CacheSalt | None = None
    return_token_ids: bool | None = None


class TextPart(BaseModel):
    """One part of a message's content."""

    model_config = ConfigDict(strict=True, extra="ignore")
    type: Literal["text"]
    text: str


TextParts = Annotated[list[TextPart], Field(max_length=MAX_ITEMS, fail_fast=True)]


class ChatMessage(BaseModel):
    """One message. Other fields (tool_calls, name, …) go to the template as they are."""

    model_config = ConfigDict(strict=True, extra="allow")
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | TextParts | None = None


Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True)]


class Thinking(Body):
    """DeepSeek's own switch for the template's `thinking`."""

    type: Literal["enabled", "disabled"]
    KNOWN: ClassVar[Fields] = {}


class ChatRequest(OpenAIRequest):
    """POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Tools | None = None
    tool_choice: Any = None
    reasoning_effort: str | None = None
    thinking: Thinking | None = None
    thinking_token_budget: int | None = None
    separate_reasoning: bool | None = None
    stream_reasoning: bool | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    include_reasoning: bool | None = None


class CompletionRequest(OpenAIRequest):
    """POST /v1/completions. `prompt`: text, token ids, or a list of either."""

    prompt: Any
    max_tokens: int | None = 16
    logprobs: int | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None


class LoadAdapterRequest(Body):
    """POST /v1/load_lora_adapter. `lora_path`: a PEFT folder on the server's machine."""

    lora_name: str
    lora_path: str


class UnloadAdapterRequest(Body):
    """POST /v1/unload_lora_adapter."""

    lora_name: str


class AbortRequest(Body):
    """POST /abort_request: the rid that a request was sent with, or the id in its answer."""

    rid: str | None = None
    abort_all: bool | None = None


class TokenizeRequest(Body):
    """POST /tokenize: exactly one of `prompt` and `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: CacheSalt | None = None  # changes nothing: no token is computed


class DetokenizeRequest(Body):
    """The body of POST /detokenize."""

    model: str | None = None
    tokens: TokenIds
    skip_special_tokens: bool = False
