"""The page of flags that tools/gen_docs.py writes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import Field, fields
from typing import Any

from ds_runtime.cli.flags import _help
from ds_runtime.config import EngineConfig, ServerConfig
from ds_runtime.config.fields import flag_of

FLAGS_HEAD = """\
Every setting of `ds-runtime serve`. The verbs that run a model take those of the engine, too.
Offline, a setting is an argument of `LLM` with underscores for hyphens. `--config FILE` reads them
from YAML. `ds-runtime serve --help-all` prints the same texts, with all other names of a flag.
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
