"""V3.2's prompt encoding, which its checkpoint has no template for: DSML tool calls, two modes.

Follows the fixture that DeepSeek publishes with the model, byte for byte. In chat mode a turn of
the assistant begins with `</think>`. In thinking mode the turns after the last user message begin
with `<think>` and keep their reasoning, earlier ones lose it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ds_runtime.errors import RequestError

Message = Mapping[str, Any]
BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
_TOOLS = """## Tools

You have access to a set of tools you can use to answer the user's question.
You can invoke functions by writing a "<｜DSML｜function_calls>" block like the following as part \
of your reply to the user:
<｜DSML｜function_calls>
<｜DSML｜invoke name="$FUNCTION_NAME">
<｜DSML｜parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</｜DSML｜parameter>
...
</｜DSML｜invoke>
<｜DSML｜invoke name="$FUNCTION_NAME2">
...
</｜DSML｜invoke>
</｜DSML｜function_calls>

String and scalar parameters should be specified as is without any escaping or quotes, while lists \
and objects should use JSON format. The "string" attribute should be set to "true" for string type \
parameters and "false" for other types (numbers, booleans, arrays, objects).

If the thinking_mode is enabled, then after function results you should strongly consider \
outputting a thinking block. Here is an example:

<｜DSML｜function_calls>
...
</｜DSML｜function_calls>

<function_results>
...
</function_results>

<think>...thinking about results</think>

Here are the functions available in JSONSchema format:
<functions>
{schemas}
</functions>
"""
RESPONSE_FORMAT = (
    "## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n{schema}"
)


class DsmlEncoding:
    """Renders like a `ChatTemplate`. Template keywords: `thinking`, `drop_thinking`,
    `response_format` (a JSON schema); messages may carry `tools` and `response_format` too."""

    knows_developer = True
    takes_response_format = True
    tool_calls: str | None = "deepseekv32"
    source: str | None = None

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message] | None = None,
        add_generation_prompt: bool = True,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text. RequestError names the message that cannot be encoded."""
        settings = kwargs or {}
        thinking = bool(settings.get("thinking"))
        turns = _with_system(messages, tools, settings.get("response_format"))
        if thinking and settings.get("drop_thinking", True):
            last = _last_user(turns)
            turns = [t for i, t in enumerate(turns) if i >= last or t["role"] != "developer"]
        last = _last_user(turns)
        out = [BOS]
        for i, turn in enumerate(turns):
            role = turn["role"]
            open_think = thinking and i >= last
            if role == "system":
                out.append(_instructed(turn, content_of(turn)))
            elif role in ("user", "developer"):
                out += ("<｜User｜>", _user(turn))
                if add_generation_prompt or i + 1 < len(turns):
                    out += ("<｜Assistant｜>", "<think>" if open_think else "</think>")
            elif role == "assistant":
                out.append(_assistant(turn, open_think))
            else:
                first = i == 0 or turns[i - 1]["role"] != "tool"
                final = i + 1 == len(turns) or turns[i + 1]["role"] != "tool"
                out.append("\n\n<function_results>" if first else "")
                out.append(f"\n<result>{content_of(turn)}</result>")
                if final:
                    out += ("\n</function_results>\n\n", "<think>" if open_think else "</think>")
        return "".join(out)


def _with_system(
    messages: Sequence[Message], tools: Sequence[Message] | None, schema: Any
) -> list[dict[str, Any]]:
    """The turns, with the request's tools and format in the first system message."""
    turns = [dict(m) for m in messages]
    if tools or schema is not None:
        own = next((t for t in turns if t["role"] == "system"), None)
        if own is None:
            own = {"role": "system", "content": ""}
            turns.insert(0, own)
        if tools:
            own["tools"] = tools
        if schema is not None:
            own["response_format"] = schema
    return turns


def _last_user(turns: Sequence[Message]) -> int:
    return max((i for i, t in enumerate(turns) if t["role"] in ("user", "developer")), default=-1)


def _instructed(turn: Message, text: str) -> str:
    """`text` with the tools and the response format that the message carries."""
    if tools := turn.get("tools"):
        schemas = "\n".join(as_json(t.get("function", t)) for t in tools)
        text += "\n\n" + _TOOLS.replace("{schemas}", schemas)
    if (schema := turn.get("response_format")) is not None:
        text += "\n\n" + RESPONSE_FORMAT.replace("{schema}", as_json(schema))
    return text


def content_of(turn: Message) -> str:
    """A message's text."""
    return str(turn.get("content") or "")


def _user(turn: Message) -> str:
    content = content_of(turn)
    if turn["role"] == "user":
        return content
    return _instructed(turn, "") + "\n\n# The user's message is: " + content


def _assistant(turn: Message, reasons: bool) -> str:
    content, calls = content_of(turn), turn.get("tool_calls") or []
    if turn.get("prefix") and not calls:
        return content
    thought = ""
    if reasons:
        reasoning = turn.get("reasoning_content") or ""
        if not reasoning and not calls:
            raise RequestError(
                "an assistant message after the last user message has neither reasoning_content "
                "nor tool_calls: in thinking mode it needs one of them",
                "messages",
            )
        thought = f"{reasoning}</think>"
    text = f"{thought}{content}"
    if calls:
        invokes = "\n".join(_invoke(c["function"]) for c in calls)
        text += f"\n\n<｜DSML｜function_calls>\n{invokes}\n</｜DSML｜function_calls>"
    return text + EOS


def _invoke(function: Message) -> str:
    arguments = function["arguments"]
    values = object_of(arguments)
    if values is None:
        raise RequestError(
            f"the arguments of a call of {function['name']!r:.80} are {arguments!r:.80}: "
            "a JSON object is needed",
            "messages",
        )
    lines = "\n".join(parameter(k, v) for k, v in values.items())
    return f'<｜DSML｜invoke name="{function["name"]}">\n{lines}\n</｜DSML｜invoke>'


def object_of(arguments: Any) -> Message | None:
    """The arguments of a call, as JSON text or already an object; None where they are no object."""
    try:
        values = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return None
    return values if isinstance(values, Mapping) else None


def parameter(name: str, value: Any) -> str:
    """One argument of a call in its tags: text as it is, others as JSON."""
    is_text = isinstance(value, str)
    text = value if is_text else as_json(value)
    kind = "true" if is_text else "false"
    return f'<｜DSML｜parameter name="{name}" string="{kind}">{text}</｜DSML｜parameter>'


def as_json(value: Any) -> str:
    """JSON as the models were trained on it."""
    return json.dumps(value, ensure_ascii=False)
