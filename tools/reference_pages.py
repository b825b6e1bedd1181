"""Reference pages that tools/gen_docs.py writes: flags, and the names that plugins import."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import Field, fields
from typing import Any

from ds_runtime import LLM, SamplingParams, api
from ds_runtime.cli.flags import _help
from ds_runtime.config import EngineConfig, ServerConfig
from ds_runtime.config.fields import flag_of

FLAGS_HEAD = """\
Every setting of `ds-runtime serve`. The verbs that run a model take those of the engine, too.
Offline, a setting is an argument of `LLM` with underscores for hyphens. `--config FILE` reads them
from YAML. `ds-runtime serve --help-all` prints the same texts, with all other names of a flag.
"""

API_HEAD = """\
`ds_runtime.api` has everything that a plugin may import. It imports no torch; a name that holds
tensors is imported on first use. The table has the first sentence of each docstring.
"""


def flags(note: str) -> str:
    """The settings of `serve` by group, with their help."""
    out = [note, "# Flags\n\n", FLAGS_HEAD]
    for title, several in _groups():
        out.append(f"\n## {title.capitalize()}\n\n| flag | what |\n|---|---|\n")
        for field in several:
            text = _help(field).replace("%%", "%").replace("|", "\\|")
            text = text.replace("<", "&lt;").replace("*", "\\*")
            out.append(f"| `{flag_of(field.name)}` | {text} |\n")
    return "".join(out)


def _groups() -> Iterator[tuple[str, list[Field[Any]]]]:
    title, several = "", list[Field[Any]]()
    for field in (*fields(EngineConfig), *fields(ServerConfig)):
        if (now := field.metadata.get("group", title)) != title:
            if several:
                yield title, several
            title, several = now, []
        several.append(field)
    yield title, several


def plugin_api(note: str) -> str:
    """The names of `ds_runtime.api`, then `LLM` and `SamplingParams`."""
    out = [note, "# Plugin API\n\n", API_HEAD, "\n| name | kind | what |\n|---|---|---|\n"]
    for name in sorted(api.__all__, key=str.lower):
        value = getattr(api, name)
        out.append(f"| `{name}` | {_kind(value)} | {_sentence(value)} |\n")
    out.append("\n# Offline API\n\n`ds_runtime` has the class `LLM`, and what its methods take.\n")
    for owner in (LLM, SamplingParams):
        out.append(f"\n## `{owner.__name__}`\n\n{_sentence(owner)}\n\n")
        for name, member in vars(owner).items():
            if inspect.isfunction(member) and not name.startswith("_"):
                arguments = ", ".join(list(inspect.signature(member).parameters)[1:])
                out.append(f"* `{name}({arguments})`: {_sentence(member)}\n")
    return "".join(out)


def _kind(value: object) -> str:
    if inspect.isclass(value):
        return "class"
    if inspect.ismodule(value):
        return "module"
    return "function" if callable(value) else "value"


def _sentence(value: object) -> str:
    """The first sentence of a docstring on one line; a value's own text if it is short."""
    if not (inspect.isclass(value) or inspect.ismodule(value) or inspect.isroutine(value)):
        text = repr(value)
        return f"`{text}`" if len(text) <= 40 else ""
    paragraph = (inspect.getdoc(value) or "").partition("\n\n")[0]
    said = " ".join(paragraph.split()).partition(". ")[0].rstrip(".")
    return said.replace("|", "\\|").replace("*", "\\*")
