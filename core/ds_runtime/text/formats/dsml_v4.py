"""V4's prompt encoding, which its checkpoint has no template for: efforts, DSML calls, two modes.

Follows `deepseek-recipe`, DeepSeek's own encoder, token by token. System messages are first,
wherever they were sent. Results of tools are part of the user's turn. In thinking mode, which is
the default, earlier turns keep their reasoning where there are tools and lose it where there are
none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

from ds_runtime.errors import RequestError, shown
from ds_runtime.text.formats.dsml import (
    BOS,
    EOS,
    RESPONSE_FORMAT,
    Message,
    as_json,
    content_of,
    object_of,
    parameter,
)

_HIGH = """Reasoning Effort: Absolute maximum with no shortcuts permitted.
You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve \
the root cause, rigorously stress-testing your logic against all potential paths, edge cases, and \
adversarial scenarios.
Explicitly write out your entire deliberation process, documenting every intermediate step, \
considered alternative, and rejected hypothesis to ensure absolutely no assumption is left \
unchecked.

"""
_MAX = """Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.
You MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance: \
exhaustively decompose the problem into its most fundamental components, trace every causal chain \
to its root, and resolve the underlying cause rather than any surface symptom.
Do not stop reasoning until you have independently verified the solution from multiple angles and \
are certain that no assumption remains unchecked and no error remains undiscovered.

"""
_TOOLS = """## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by \
writing a "<｜DSML｜tool_calls>" block like the following:

<｜DSML｜tool_calls>
<｜DSML｜invoke name="$TOOL_NAME">
<｜DSML｜parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</｜DSML｜parameter>
...
</｜DSML｜invoke>
<｜DSML｜invoke name="$TOOL_NAME2">
...
</｜DSML｜invoke>
</｜DSML｜tool_calls>

String parameters should be specified as is and set `string="true"`. For all other types \
(numbers, booleans, arrays, objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by <think>), you MUST output your complete reasoning \
inside <think>...</think> BEFORE any tool calls or final response.

Otherwise, output directly after </think> with tool calls or final response.

### Available Tool Schemas

{schemas}

You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.
"""
_ONLY_JSON = (
    "You are a helpful assistant designed to output JSON.\n## Response Format:\n\n"
    "Reply with JSON object ONLY."
)
_EFFORTS = {
    "none": _HIGH,  # of who thinks all the same
    "minimal": "",
    "low": "",
    "medium": _HIGH,
    "high": _HIGH,
    "xhigh": _HIGH,
    "ultra": _MAX,
    "max": _MAX,
}


def check_effort(effort: Any) -> None:
    """RequestError unless it is None, or an effort that is known to any model."""
    if effort is not None and (not isinstance(effort, str) or effort not in _EFFORTS):
        raise RequestError.of(
            "reasoning_effort", f" is {shown(effort)}: must be one of {', '.join(_EFFORTS)}"
        )


class V4Encoding:
    """Renders like a `ChatTemplate`. Template keywords: `thinking` (default true),
    `reasoning_effort` (default "high"; "none" is no thinking), `drop_thinking`, `response_format`
    (a JSON schema), `json_object` (any object)."""

    knows_developer = False
    takes_response_format = True
    tool_calls: str | None = "deepseekv4"
    source: str | None = None

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message] | None = None,
        add_generation_prompt: bool = True,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text. RequestError names the keyword that cannot be encoded."""
        settings = kwargs or {}
        effort, thinks = settings.get("reasoning_effort"), settings.get("thinking")
        check_effort(effort)
        thinks = effort != "none" if thinks is None else thinks
        keeps = bool(tools) or not settings.get("drop_thinking", True)
        turns = list(_turns(messages))
        out = [
            BOS,
            _EFFORTS[effort or "high"] if thinks else "",
            _system(messages, tools, settings),
        ]
        for i, turn in enumerate(turns):
            if isinstance(turn, str):
                out += ("<｜User｜>", turn)
                continue
            last = i + 1 == len(turns)
            goes_on = last and bool(turn.get("prefix")) and not turn.get("tool_calls")
            ends = last and not add_generation_prompt
            out += ("<｜Assistant｜>", *_assistant(turn, thinks and (keeps or goes_on or ends)))
            if goes_on:
                return "".join(out[:-1])
        if add_generation_prompt:
            out += ("<｜Assistant｜>", "<think>" if thinks else "</think>")
        return "".join(out)


def _system(
    messages: Sequence[Message], tools: Sequence[Message] | None, settings: Mapping[str, Any]
) -> str:
    """All system messages, the tools, and what the answer must look like."""
    text = _joined(m for m in messages if m["role"] == "system")
    if tools:
        schemas = "\n".join(as_json(_tool(t.get("function", t))) for t in tools)
        text += "\n\n" + _TOOLS.replace("{schemas}", schemas)
    if (schema := settings.get("response_format")) is not None:
        text += "\n\n" + RESPONSE_FORMAT.replace("{schema}", as_json(schema))
    elif settings.get("json_object"):
        text += "\n\n" + _ONLY_JSON
    return text


def _tool(function: Message) -> dict[str, Any]:
    return {
        "name": function["name"],
        "description": function.get("description") or "",
        "parameters": function.get("parameters") or {},
    }


def _turns(messages: Sequence[Message]) -> Iterator[str | Message]:
    """The text of each user's turn, with results of tools, and each message of the assistant."""
    said: list[str] = []
    kinds = groupby((m for m in messages if m["role"] != "system"), key=itemgetter("role"))
    for role, group in kinds:
        if role == "assistant":
            if said:
                yield "\n\n".join(said)
            said = []
            yield from group
        elif role == "tool":
            said += (f"<tool_result>{content_of(m)}</tool_result>" for m in group)
        else:
            said.append(_joined(group))
    if said:
        yield "\n\n".join(said)


def _joined(messages: Iterable[Message]) -> str:
    return "\n\n".join(filter(None, map(content_of, messages)))


def _assistant(turn: Message, reasons: bool) -> Iterator[str]:
    """The parts of an assistant's message; the last one ends it."""
    content, calls = content_of(turn), turn.get("tool_calls") or []
    if reasons:
        yield f"<think>{turn.get('reasoning_content') or ''}"
    if not (reasons and turn.get("prefix") and not content and not calls):
        yield "</think>"
    yield content
    if calls:
        invokes = "\n".join(_invoke(c["function"]) for c in calls)
        yield f"\n\n<｜DSML｜tool_calls>\n{invokes}\n</｜DSML｜tool_calls>"
    yield EOS


def _invoke(function: Message) -> str:
    arguments = function.get("arguments")
    values = {} if arguments is None else object_of(arguments)
    if values is None:  # as it was written: the model has said so
        values = {"arguments": arguments}
    lines = "".join(f"{parameter(k, v)}\n" for k, v in values.items())
    return f'<｜DSML｜invoke name="{function["name"]}">\n{lines}</｜DSML｜invoke>'
