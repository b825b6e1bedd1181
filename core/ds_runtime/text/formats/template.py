"""Chat templates: the checkpoint's jinja, in a sandbox, as transformers renders them.

Where a checkpoint has none, its family's (`families.py`).
"""

from __future__ import annotations

import contextlib
import datetime
import json
import re
from collections.abc import Mapping, Sequence, Sized
from pathlib import Path
from typing import Any, Protocol

import jinja2
import jinja2.meta
import jinja2.sandbox

from ds_runtime.checkpoint.base import part_of
from ds_runtime.checkpoint.files import read_text
from ds_runtime.errors import CheckpointError, ConfigError, RequestError, named, shown
from ds_runtime.text.formats.families import Family, tool_format
from ds_runtime.text.tokenizer import Tokenizer

Message = Mapping[str, Any]
LONGEST = 1 << 20  # bytes of a template; published ones take 20 KB at most
_LARGEST = 1 << 24
_RESERVED = ("messages", "tools", "add_generation_prompt")
_BUILT_IN = Path(__file__).with_name("templates")
_WANTS_OBJECT = re.compile(r"arguments['\"\]]*\s*\|\s*tojson")


class Template(Protocol):
    """What turns messages into the text of a prompt. source: jinja's, of the template for plain
    chats; None where the prompt is no template's."""

    knows_developer: bool
    takes_response_format: bool
    tool_calls: str | None
    source: str | None

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text. RequestError when the messages cannot be rendered."""
        ...


class ChatTemplate:
    """The templates of one checkpoint, by name ("default", perhaps "tool_use").

    `constants` (bos_token, …) are visible to the template under their names. `tools_text` words
    the tools for templates that do not: it becomes part of the system message. `tool_calls` is the
    parser for the calls that the template writes.
    """

    takes_response_format = False
    source: str | None

    def __init__(
        self,
        sources: Mapping[str, str],
        constants: Mapping[str, Any],
        origin: str,
        family: Family | None = None,
    ) -> None:
        env = _environment()
        self._constants = dict(constants)
        self._tools_text = None if family is None else family.tools_text
        text, names = "".join(sources.values()), set[str]()
        as_json = bool(_WANTS_OBJECT.search(text)) and "is string" not in text
        self._wants_object = as_json or "<arg_key>" in text  # GLM's goes through the arguments
        self.tool_calls = tool_format(list(sources.values()), family)
        self._templates: dict[str, jinja2.Template] = {}
        for name, source in sources.items():
            if len(source) > LONGEST:
                raise _bad(origin, name, f": has {len(source)} characters, at most {LONGEST} serve")
            try:
                self._templates[name] = env.from_string(source)
                names |= jinja2.meta.find_undeclared_variables(env.parse(source))
            except jinja2.TemplateSyntaxError as e:
                raise _bad(origin, name, f", line {e.lineno}: {e.message}") from e
            except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError) as e:
                raise _bad(origin, name, f" cannot be compiled: {named(e)}") from e
        if "default" not in sources and "tool_use" not in sources:
            raise CheckpointError(
                f"{origin}: chat templates named {', '.join(sources) or 'nothing'}, none of them "
                "'default'. Pass one with --chat-template FILE"
            )
        self.source = sources.get("default", sources.get("tool_use"))
        self._uses_tools = "tool_use" in sources or "tools" in names
        # Templates that do not know the role would drop such a message without a word.
        self.knows_developer = any("developer" in s for s in sources.values())

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text. RequestError when the template refuses the messages."""
        extra = dict(kwargs or {})
        for name in _RESERVED:
            if name in extra:
                raise RequestError.of(
                    "chat_template_kwargs", f" may not set {name!r}: it is a field of the request"
                )
        template = self._pick("tool_use" if tools else "default")
        messages = [self._with_arguments(m) for m in messages]
        if tools and not self._uses_tools:
            messages, tools = self._with_tools(messages, tools), None
        try:
            return template.render(  # one mapping: as keywords, a name like "self" would clash
                {
                    **self._constants,
                    **extra,
                    "messages": messages,
                    "tools": tools or None,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            LookupError,
            AttributeError,
            ArithmeticError,
            RecursionError,
            MemoryError,
        ) as e:
            said = f"the chat template refuses these messages: {e}"
            raise RequestError(said[:600], "messages") from e

    def _with_tools(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
    ) -> list[Message]:
        """The tools in words, at the end of the system message."""
        if self._tools_text is None:
            raise RequestError(
                "this model's chat template has no place for tools: leave them out, or start the "
                "server with --chat-template FILE",
                "tools",
            )
        text, out = self._tools_text(tools), list(messages)
        at = max((i for i, m in enumerate(out) if m.get("role") == "system"), default=None)
        if at is None:
            return [{"role": "system", "content": text}, *out]
        own = str(out[at].get("content") or "")
        out[at] = {**out[at], "content": f"{own}\n\n{text}" if own else text}
        return out

    def _with_arguments(self, message: Message) -> Message:
        """Arguments of earlier calls as the template expects them: JSON text, or an object."""
        calls = message.get("tool_calls")
        if not isinstance(calls, list | tuple) or not calls:
            return message
        return {**message, "tool_calls": [self._with_call(c) for c in calls]}

    def _with_call(self, call: Any) -> Any:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            return call
        arguments = function.get("arguments")
        if arguments is None:
            arguments = "{}"
        if self._wants_object and isinstance(arguments, str):
            with contextlib.suppress(ValueError, RecursionError):  # then as the client sent them
                arguments = json.loads(arguments)
        elif not self._wants_object and not isinstance(arguments, str):
            arguments = _tojson(arguments)
        return {**call, "function": {**function, "arguments": arguments}}

    def _pick(self, name: str) -> jinja2.Template:
        found = self._templates.get(name) or self._templates.get("default")
        return found or self._templates["tool_use"]


def _bad(origin: str, name: str, said: str) -> CheckpointError:
    remedy = "Mend it, or pass another with --chat-template FILE"
    return CheckpointError(f"{origin}: chat template {name!r:.80}{said}. {remedy}")


def load_template(
    folder: str | Path,
    tokenizer: Tokenizer,
    override: str | None = None,
    family: Family | None = None,
) -> Template | None:
    """The template of `--chat-template`, chat_template.jinja, tokenizer_config.json or `family`."""
    special = tokenizer.special_tokens
    if override is not None:
        path = Path(override)
        if not path.exists():
            raise ConfigError(
                f"--chat-template {override}: no such file; give a Jinja template, or leave the "
                "flag out for the checkpoint's own"
            )
        return _single(path, special, family)
    path = part_of(Path(folder), "chat_template.jinja")
    if path.exists():
        return _single(path, special, family)
    found = tokenizer.settings.get("chat_template")
    origin = str(part_of(Path(folder), "tokenizer_config.json"))
    if isinstance(found, str):
        return ChatTemplate({"default": found}, special, origin, family)
    if isinstance(found, list):
        try:
            sources = {str(t["name"]): str(t["template"]) for t in found}
        except (TypeError, KeyError) as e:
            raise CheckpointError(
                f"{origin}: chat_template is a list whose entries lack name or template. "
                "Pass a template with --chat-template FILE"
            ) from e
        return ChatTemplate(sources, special, origin, family)
    return None if family is None or family.template == "" else built_in(family)


def built_in(family: Family) -> Template:
    """The template that a family's models were trained with."""
    if not isinstance(family.template, str):
        return family.template()
    return _single(_BUILT_IN / family.template, family.constants, family)


def _single(path: Path, constants: Mapping[str, Any], family: Family | None) -> ChatTemplate:
    source = read_text(path, LONGEST)
    return ChatTemplate({"default": source}, constants, str(path), family)


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Operators by which a few characters make gigabytes are not folded, and refuse to."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(
        self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any
    ) -> Any:
        """The value of an intercepted operator. TemplateError where it is too large."""
        if _size(operator, left, right) > _LARGEST:
            raise jinja2.TemplateError(
                f"{shown(left)} {operator} {shown(right)} is too large: at most {_LARGEST} "
                "characters, items or bits may come of it"
            )
        return super().call_binop(context, operator, left, right)


def _size(operator: str, left: Any, right: Any) -> int:
    """Characters, items or bits of the result, or a few more."""
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length()
        return bits * right if operator == "**" and bits > 1 else bits + right.bit_length()
    some, times = (right, left) if isinstance(left, int) else (left, right)
    return len(some) * times if isinstance(some, Sized) and isinstance(times, int) else 0


def _environment() -> jinja2.Environment:
    env = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = _raise
    env.globals["strftime_now"] = _strftime_now
    return env


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja's own filter escapes HTML, which would change what the model reads.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)
