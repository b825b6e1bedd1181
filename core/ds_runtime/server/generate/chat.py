"""Messages and prompts become token ids."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ds_runtime.engine.messages import Ready
from ds_runtime.errors import FieldPath, RequestError
from ds_runtime.server.errors import shown
from ds_runtime.server.generate.messages import check_tools, plain_messages
from ds_runtime.server.generate.protocol import ChatRequest, TokenizeRequest
from ds_runtime.server.generate.rules import asked_format
from ds_runtime.server.generate.sampling import check_ids, check_length, check_room
from ds_runtime.text.formats.dsml_v4 import check_effort
from ds_runtime.text.formats.template import Template
from ds_runtime.text.parsers.reasoning import CLOSE, OPEN
from ds_runtime.text.spelled import Marked, marked
from ds_runtime.text.tokenizer import Tokenizer

MAX_PROMPTS = 1024
_MARK = "\ue000begun\ue001"  # stands for a message whose end is looked for


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids, and the text that they come from where the client sent text."""

    ids: list[int]
    text: str | None = None


def chat_prompt(
    request: ChatRequest | TokenizeRequest,
    template: Template | None,
    tokenizer: Tokenizer,
    ready: Ready | None = None,
    contexts: int = 1,
) -> Prompt:
    """Render the messages and tokenise the result as it is: the template writes BOS itself.

    ready: refuse what cannot fit into this many contexts before it is tokenised.
    """
    if template is None:
        raise RequestError(
            "this model has no chat template: use /v1/completions, or start the server with "
            "--chat-template FILE",
            "messages",
        )
    messages = plain_messages(request.messages or (), template.knows_developer)
    kwargs = dict(request.chat_template_kwargs or {})
    tools = request.tools
    if isinstance(request, ChatRequest):
        check_effort(request.reasoning_effort)
        if request.reasoning_effort is not None:
            kwargs.setdefault("reasoning_effort", request.reasoning_effort)
        if request.thinking is not None:
            kwargs.setdefault("thinking", request.thinking.type == "enabled")
        if request.tool_choice == "none":
            tools = None
        if template.takes_response_format:
            kwargs = asked_format(request) | kwargs
    for name, other in (("thinking", "enable_thinking"), ("enable_thinking", "thinking")):
        if not isinstance(kwargs.get(name), bool | None):
            field = f"chat_template_kwargs.{name}"
            raise RequestError.of(field, f" is {shown(kwargs[name])}: must be true or false")
        if name in kwargs:  # templates read the one or the other
            kwargs.setdefault(other, kwargs[name])
    if (effort := kwargs.get("reasoning_effort")) is not None:
        for name in ("thinking", "enable_thinking"):
            kwargs.setdefault(name, effort != "none")
    check_tools(tools or ())
    given = marked(messages, tools, kwargs, tokenizer.added_texts)
    if isinstance(request, ChatRequest) and request.continue_final_message:
        text = _continued(request, template, given)
    else:
        opens = request.add_generation_prompt is not False
        text = template.render(given.messages, given.tools, opens, given.kwargs)
    said = given.plain(text)
    if ready is not None:
        check_room(tokenizer, said, ready, "messages", contexts)
    return Prompt(tokenizer.encode(text, mark=given.mark), said)


def _continued(request: ChatRequest, template: Template, given: Marked) -> str:
    """A prompt that ends inside the last message: in its text, or in its reasoning."""
    messages, tools, kwargs = given.messages, given.tools, given.kwargs
    if request.add_generation_prompt:
        raise RequestError.of(
            "continue_final_message",
            " and ",
            FieldPath.of("add_generation_prompt"),
            " are both true: send one of them",
        )
    last, where = messages[-1], f"messages[{len(messages) - 1}]"
    content, reasoning = str(last["content"] or ""), last.get("reasoning_content")
    if last["role"] != "assistant" or not (content or reasoning) or "tool_calls" in last:
        said = (
            ": the last message must be the assistant's, with text or reasoning and without calls"
        )
        raise RequestError((FieldPath.of("continue_final_message"), said), where)
    if not reasoning:
        text, marked = (
            template.render([*messages[:-1], {**last, "content": said}], tools, False, kwargs)
            for said in (content, _MARK)
        )
        return _cut(text, marked.rpartition(_MARK)[2], content)
    thinking = {**kwargs, "thinking": True, "enable_thinking": True}
    text = template.render(messages[:-1], tools, True, thinking)
    if not text.rstrip().endswith(OPEN):
        said = (
            ": this chat template opens no reasoning here, so that of the last message cannot be "
            "gone on from; send its content alone"
        )
        where = f"{where}.reasoning_content"
        raise RequestError((FieldPath.of("continue_final_message"), said), where)
    if not content:
        return f"{text}{reasoning}"
    # As the template breaks the line behind the opening tag, so its model does around the other.
    before, after = ("\n", "\n\n") if text.endswith("\n") else ("", "")
    return f"{text}{reasoning}{before}{CLOSE}{after}{content}"


def _cut(text: str, closing: str, last: str) -> str:
    """`text` up to the end of the last message, without what the template closes it with."""
    begun = text.removesuffix(closing)
    said = last.strip()
    if begun.endswith(last) or (said and begun.rstrip().endswith(said)):
        return begun
    raise RequestError.of(
        "continue_final_message",
        ": this chat template changes the text of messages, so it cannot be continued",
    )


def plain_prompts(
    prompt: Any, param: str, tokenizer: Tokenizer, ready: Ready, special: bool = True
) -> Iterator[Prompt]:
    """The prompts in field `param`: text, ids, or a list of either. special: texts begin with the
    model's BOS."""
    many = prompt if isinstance(prompt, list) and not _begins_with_id(prompt) else [prompt]
    if not many:
        raise RequestError.of(param, " is an empty list: send at least one prompt")
    if len(many) > MAX_PROMPTS:
        raise RequestError.of(
            param, f" holds {len(many)} prompts: at most {MAX_PROMPTS} fit one request"
        )
    for one in many:
        if isinstance(one, str):
            check_room(tokenizer, one, ready, param)
            yield Prompt(tokenizer.encode(one, add_special=special and bool(one)), one)
        elif _begins_with_id(one):
            check_length(len(one), ready, param)  # before a look at millions of ids
            if not all(type(x) is int for x in one):
                raise _not_a_prompt(param, one)
            check_ids(one, ready.vocab_size, param)
            yield Prompt(one)
        else:
            raise _not_a_prompt(param, one)


def _begins_with_id(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and type(value[0]) is int


def _not_a_prompt(param: str, given: object) -> RequestError:
    said = f" is {shown(given)}: must be a string, a list of token ids, or a list of these"
    return RequestError.of(param, said)
