"""Chat templates: the checkpoint's jinja, in a sandbox, as transformers renders them."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.sandbox

from ds_runtime.errors import CheckpointError, ConfigError, RequestError
from ds_runtime.text.tokenizer import Tokenizer

Message = Mapping[str, Any]
_RESERVED = ("messages", "tools", "add_generation_prompt")


class ChatTemplate:
    """The templates of one checkpoint, by name ("default", perhaps "tool_use").

    `special_tokens` (bos_token, …) are visible to the template under their names.
    """

    def __init__(
        self, sources: Mapping[str, str], special_tokens: Mapping[str, str], origin: str
    ) -> None:
        env = _environment()
        self._special = dict(special_tokens)
        self._templates: dict[str, jinja2.Template] = {}
        for name, source in sources.items():
            try:
                self._templates[name] = env.from_string(source)
            except jinja2.TemplateSyntaxError as e:
                raise CheckpointError(
                    f"{origin}: chat template {name!r}, line {e.lineno}: {e.message}. "
                    "Mend it, or pass another with --chat-template FILE"
                ) from e
        if "default" not in sources and "tool_use" not in sources:
            raise CheckpointError(
                f"{origin}: chat templates named {', '.join(sources) or 'nothing'}, none of them "
                "'default'. Pass one with --chat-template FILE"
            )
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
                raise RequestError(
                    f"chat_template_kwargs may not set {name!r}: it is a field of the request",
                    "chat_template_kwargs",
                )
        template = self._pick("tool_use" if tools else "default")
        try:
            return template.render(  # one mapping: as keywords, a name like "self" would clash
                {
                    **self._special,
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
            RecursionError,
        ) as e:
            raise RequestError(f"the chat template refuses these messages: {e}", "messages") from e

    def _pick(self, name: str) -> jinja2.Template:
        found = self._templates.get(name) or self._templates.get("default")
        return found or self._templates["tool_use"]


def load_template(
    folder: str | Path, tokenizer: Tokenizer, override: str | None = None
) -> ChatTemplate | None:
    """The template of `--chat-template`, chat_template.jinja or tokenizer_config.json; or None."""
    if override is not None:
        path = Path(override)
        if not path.is_file():
            raise ConfigError(f"--chat-template {override}: no such file")
        return _single(path, tokenizer)
    path = Path(folder) / "chat_template.jinja"
    if path.is_file():
        return _single(path, tokenizer)
    found = tokenizer.settings.get("chat_template")
    origin = str(Path(folder) / "tokenizer_config.json")
    if isinstance(found, str):
        return ChatTemplate({"default": found}, tokenizer.special_tokens, origin)
    if isinstance(found, list):
        try:
            sources = {str(t["name"]): str(t["template"]) for t in found}
        except (TypeError, KeyError) as e:
            raise CheckpointError(
                f"{origin}: chat_template is a list whose entries lack name or template. "
                "Pass a template with --chat-template FILE"
            ) from e
        return ChatTemplate(sources, tokenizer.special_tokens, origin)
    return None


def _single(path: Path, tokenizer: Tokenizer) -> ChatTemplate:
    source = path.read_text(encoding="utf-8")
    return ChatTemplate({"default": source}, tokenizer.special_tokens, str(path))


def _environment() -> jinja2.Environment:
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
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
