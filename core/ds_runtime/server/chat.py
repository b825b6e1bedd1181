"""Messages and prompts become token ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ds_runtime.engine.messages import Ready
from ds_runtime.errors import RequestError
from ds_runtime.sampling_params import SamplingParams
from ds_runtime.server.protocol import ChatMessage, ChatRequest, TokenizeRequest
from ds_runtime.server.sampling import check_ids, fit
from ds_runtime.text.template import ChatTemplate
from ds_runtime.text.tokenizer import Tokenizer

MAX_PROMPTS = 1024


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids, and the text that they come from where the client sent text."""

    ids: list[int]
    text: str | None = None


def chat_prompt(
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
    text = template.render(messages, tools, request.add_generation_prompt, kwargs)
    return Prompt(tokenizer.encode(text), text)


def completion_prompts(
    prompt: Any, params: SamplingParams, tokenizer: Tokenizer, ready: Ready
) -> list[tuple[Prompt, SamplingParams]]:
    """The prompts of /v1/completions: text, ids, or a list of either; with fitted parameters."""
    many = prompt if isinstance(prompt, list) and not _begins_with_id(prompt) else [prompt]
    if not many:
        raise RequestError("prompt is an empty list: send at least one prompt", "prompt")
    if len(many) > MAX_PROMPTS:
        raise RequestError(
            f"prompt holds {len(many)} prompts: at most {MAX_PROMPTS} fit one request", "prompt"
        )
    out: list[tuple[Prompt, SamplingParams]] = []
    for one in many:
        if isinstance(one, str):
            ids = tokenizer.encode(one, add_special=bool(one))
            out.append((Prompt(ids, one), fit(params, len(ids), ready, "prompt")))
        elif _begins_with_id(one):
            fitted = fit(params, len(one), ready, "prompt")  # before a look at millions of ids
            if not all(type(x) is int for x in one):
                raise _not_a_prompt()
            check_ids(one, ready.vocab_size, "prompt")
            out.append((Prompt(one), fitted))
        else:
            raise _not_a_prompt()
    return out


def _begins_with_id(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and type(value[0]) is int


def _not_a_prompt() -> RequestError:
    return RequestError(
        "prompt must be a string, a list of token ids, or a list of these", "prompt"
    )


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
