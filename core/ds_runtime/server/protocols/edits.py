"""`context_management` of Anthropic's protocol: no context is edited, but often none is to be."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ds_runtime.server.protocols.fields import EMPTY, is_neutral
from ds_runtime.server.protocols.translate import bad, only

Json = Mapping[str, Any]
# What the protocol takes where a request leaves it out: of tool uses three are kept, and so on.
_KEEP_USES, _KEEP_TURNS = 3, 1
_CLEAR_ABOVE, _COMPACT_ABOVE = 100_000, 150_000  # tokens of a prompt


def check_edits(wished: Json | None, messages: Sequence[Json], tokens: int) -> None:
    """RequestError for the first edit that would change a prompt of this many tokens."""
    name = "context_management"
    only(wished or {}, name, ("edits",))
    edits = (wished or {}).get("edits")
    if is_neutral(edits, EMPTY):
        return
    if not isinstance(edits, list):
        raise bad(f"{name}.edits", edits, "a list is needed")
    for i, edit in enumerate(edits):
        path = f"{name}.edits[{i}]"
        kind = edit.get("type") if isinstance(edit, Mapping) else edit
        if not isinstance(kind, str):
            raise bad(f"{path}.type", kind, "the name of an edit is needed")
        if _has_work(kind, edit, path, messages, tokens):
            raise bad(
                path,
                kind,
                "it has something to do here, and no context is edited: send a shorter one, or "
                "leave the edit out",
            )


def _has_work(kind: str, edit: Json, path: str, messages: Sequence[Json], tokens: int) -> bool:
    if kind.startswith("clear_thinking"):
        keep = edit.get("keep")
        if keep == "all" or (isinstance(keep, Mapping) and keep.get("type") == "all"):
            return False
        return _count(messages, "thinking", turns=True) > _value(edit, "keep", path, _KEEP_TURNS)
    if kind.startswith("clear_tool_uses"):
        uses = [b for one in messages for b in _blocks(one) if b.get("type") == "tool_use"]
        kept, spared = _value(edit, "keep", path, _KEEP_USES), _names(edit, "exclude_tools", path)
        if all(use.get("name") in spared for use in uses[: max(len(uses) - kept, 0)]):
            return False
        return _reached(edit, path, _CLEAR_ABOVE, tokens, len(uses))
    if kind.startswith("compact"):
        return _reached(edit, path, _COMPACT_ABOVE, tokens, _count(messages, "tool_use"))
    raise bad(f"{path}.type", kind, "only clear_thinking, clear_tool_uses and compact are known")


def _reached(edit: Json, path: str, default: int, tokens: int, uses: int) -> bool:
    """Whether a prompt is beyond what triggers the edit."""
    trigger = edit.get("trigger")
    counts_uses = isinstance(trigger, Mapping) and trigger.get("type") == "tool_uses"
    return (uses if counts_uses else tokens) > _value(edit, "trigger", path, default)


def _value(edit: Json, name: str, path: str, default: int) -> int:
    """The number of `{"type": …, "value": 3}`."""
    given = edit.get(name)
    if given is None:
        return default
    value = given.get("value") if isinstance(given, Mapping) else given
    if type(value) is not int:
        raise bad(f"{path}.{name}.value", value, "an integer is needed")
    return value


def _names(edit: Json, name: str, path: str) -> Sequence[str]:
    """A list of names, which may be left out."""
    given = edit.get(name) or []
    if not isinstance(given, list) or not all(isinstance(one, str) for one in given):
        raise bad(f"{path}.{name}", given, "a list of names is needed")
    return given


def _count(messages: Sequence[Json], kind: str, turns: bool = False) -> int:
    """Blocks of a kind, or the messages that have some."""
    found = [sum(kind == block.get("type") for block in _blocks(one)) for one in messages]
    return sum(map(bool, found)) if turns else sum(found)


def _blocks(message: Json) -> Iterable[Json]:
    content = message.get("content")
    return [b for b in content if isinstance(b, Mapping)] if isinstance(content, list) else ()
