"""Items of /v1/responses as chat messages: those that clients send, and those of an answer."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from ds_runtime.server.protocols.translate import Json, bad, parts_text, text_in

_TEXTS = ("input_text", "output_text", "text")


def messages_of(items: Iterable[Json]) -> tuple[list[Json], list[str]]:
    """Chat messages and where each was. RequestError for an item that is none.

    What the assistant did in a row is one message: reasoning, then text, then calls. After a call
    all of it is, for the next turn needs the call's result first. An answer may have text between
    its calls and after them, and comes back as it went. A call that was cut is none, unless it has
    a result.
    """
    items = list(items)
    answered = [item.get("call_id") for item in items if item.get("type") == "function_call_output"]
    messages: list[Json] = []
    paths: list[str] = []
    for i, item in enumerate(items):
        path = f"input[{i}]"
        one = _message(item, path, answered)
        last = messages[-1] if messages else {}
        if one["role"] == last.get("role") == "assistant" and _goes_on(last, one):
            _join(last, one)
        else:
            messages.append(one)
            paths.append(path)
    return messages, paths


def _goes_on(last: Json, one: Json) -> bool:
    """Whether two items belong to one turn."""
    if "tool_calls" in last:
        return True
    if "reasoning_content" in one:
        return False
    return "content" not in one or "content" not in last


def _join(last: Json, one: Json) -> None:
    for name, value in one.items():
        if name != "role":
            last[name] = last[name] + value if name in last else value


def _message(item: Json, path: str, answered: Collection[object]) -> Json:
    kind = "message" if item.get("type") is None else item["type"]
    if kind == "message":
        role = item.get("role")
        if role not in ("user", "assistant", "system", "developer"):
            raise bad(f"{path}.role", role, "user, assistant, system or developer is needed")
        return {"role": role, "content": parts_text(item.get("content"), f"{path}.content", _TEXTS)}
    if kind == "function_call":
        function = {
            "name": text_in(item, "name", path),
            "arguments": text_in(item, "arguments", path),
        }
        call_id = text_in(item, "call_id", path)
        if item.get("status") == "incomplete" and call_id not in answered:
            return {"role": "assistant"}
        call = {"id": call_id, "type": "function", "function": function}
        return {"role": "assistant", "tool_calls": [call]}
    if kind == "function_call_output":
        said = parts_text(item.get("output"), f"{path}.output", _TEXTS)
        return {"role": "tool", "tool_call_id": text_in(item, "call_id", path), "content": said}
    if kind == "reasoning":
        content = item.get("content")
        said = parts_text(content, f"{path}.content", ("reasoning_text",)) if content else ""
        return {"role": "assistant", "reasoning_content": said}
    raise bad(
        f"{path}.type", kind, "message, function_call, function_call_output or reasoning is needed"
    )
