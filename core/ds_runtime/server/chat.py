"""Messages and prompts become token ids."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from ds_runtime.errors import RequestError
from ds_runtime.server.protocol import ChatMessage, ChatRequest, TokenizeRequest
from ds_runtime.server.sampling import check_ids
from ds_runtime.text.template import ChatTemplate
from ds_runtime.text.tokenizer import Tokenizer

P = ParamSpec("P")
T = TypeVar("T")
_INLINE = 4096  # characters that are tokenised on the event loop; more goes to a thread
MAX_PROMPTS = 1024


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids, and the text that they come from where the client sent text."""

    ids: list[int]
    text: str | None = None


async def chat_prompt(
    request: ChatRequest | TokenizeRequest, template: ChatTemplate | None, tokenizer: Tokenizer
) -> Prompt:
    """Render the messages and tokenise the result as it is: the template writes BOS itself."""
    if template is None:
        raise RequestError(
            "this model has no chat template: use /v1/completions, or start the server with "
            "--chat-template FILE",
            "messages",
        )
    messages = [_plain(m, template.knows_developer) for m in request.messages or ()]
    kwargs = dict(request.chat_template_kwargs or {})
    tools = request.tools
    if isinstance(request, ChatRequest):
        if request.reasoning_effort is not None:
            kwargs.setdefault("reasoning_effort", request.reasoning_effort)
        if request.tool_choice == "none":
            tools = None
    size = sum(len(m.get("content") or "") for m in messages)
    text = await _maybe_thread(
        size, template.render, messages, tools, request.add_generation_prompt, kwargs
    )
    return Prompt(await encode(tokenizer, text, add_special=False), text)


async def completion_prompts(prompt: Any, tokenizer: Tokenizer, vocab_size: int) -> list[Prompt]:
    """The prompts of /v1/completions: text, ids, or a list of either."""
    many = prompt if isinstance(prompt, list) and not _is_ids(prompt) else [prompt]
    if len(many) > MAX_PROMPTS:
        raise RequestError(
            f"prompt holds {len(many)} prompts: at most {MAX_PROMPTS} fit one request", "prompt"
        )
    out: list[Prompt] = []
    for one in many:
        if isinstance(one, str):
            out.append(Prompt(await encode(tokenizer, one, add_special=bool(one)), one))
        elif _is_ids(one):
            check_ids(one, vocab_size, "prompt")
            out.append(Prompt(one))
        else:
            raise RequestError(
                "prompt must be a string, a list of token ids, or a list of these", "prompt"
            )
    if not out:
        raise RequestError("prompt is an empty list: send at least one prompt", "prompt")
    return out


async def encode(tokenizer: Tokenizer, text: str, add_special: bool) -> list[int]:
    """Tokenise; long text does not hold up the other streams."""
    return await _maybe_thread(len(text), tokenizer.encode, text, add_special)


async def _maybe_thread(size: int, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    if size > _INLINE:
        return await asyncio.to_thread(call, *args, **kwargs)
    return call(*args, **kwargs)


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(x) is int for x in value)


def _plain(message: ChatMessage, knows_developer: bool) -> dict[str, Any]:
    """What the template sees: parts of the content joined, absent fields absent."""
    out: dict[str, Any] = dict(message.model_extra or {})
    out["role"] = message.role
    if message.role == "developer" and not knows_developer:
        out["role"] = "system"
    content = message.content
    if isinstance(content, list):
        content = "\n".join(part.text for part in content)
    if content is None and not out.get("tool_calls"):
        if message.role != "assistant":
            raise RequestError(f"a {message.role} message needs content", "messages")
        content = ""
    out["content"] = content
    return out
