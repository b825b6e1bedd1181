"""docs/known-flags.md: the names of other engines that this one knows."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from ds_runtime.cli.known import BATCH, SERVING, TOPICS
from ds_runtime.config import EngineConfig, ServerConfig
from ds_runtime.config.fields import flag_of
from ds_runtime.config.spelling import Spelling
from ds_runtime.ops.binding.backends import NAMES
from ds_runtime.plugins.hooks import of as hooks_of


def known_flags(note: str) -> str:
    """Every name of other engines that this one knows. note: the page's first line."""
    out = [note, "# Flags that you know from elsewhere\n\n", FLAGS_HEAD]
    for topic, flags in TOPICS.items():
        out += [f"\n## {topic}\n\n", _names(flags)]
    for verb, flags in (("one-batch", BATCH), ("serving", SERVING)):
        out += [f"\n## Only of `ds-runtime bench {verb}`\n\n", _names(flags)]
    plugins = {name: own_hooks(name) for name in ("cuda", "rocm", "npu", "xpu", "cpu", "triton")}
    for name, plugin in plugins.items():
        if flags := getattr(plugin, "FLAGS", {}):
            out += [f"\n## Of the plugin `{name}`\n\n", _names(flags)]
    out += ["\n## Values\n\n| flag | value | here |\n|---|---|---|\n"]
    for config in (EngineConfig, ServerConfig):
        for f in fields(config):
            for word, meant in f.metadata.get("also", {}).items():
                out.append(f"| `{flag_of(f.name)}` | `{word}` | `{meant}` |\n")
    out += ["\n## Values that name kernels\n\n| flag | value | here |\n|---|---|---|\n"]
    for named in (NAMES, *(getattr(p, "BACKENDS", {}) for p in plugins.values())):
        for name, words in named.items():
            for word, meant in words.items():
                said = f"the provider `{meant}`" if isinstance(meant, str) else _said(meant)
                out.append(f"| `{flag_of(name)}` | `{word}` | {said} |\n")
    return "".join(out)


FLAGS_HEAD = """\
Flags have SGLang's names. vLLM's names for the same are accepted, too. Underscores may stand for
hyphens, and lists take commas or spaces. Every flag of SGLang 0.5.23 and of vLLM 0.33.0 is known.

* A flag in the right column is the setting that the left one sets.
* A sentence is printed, and the start continues. Answers, memory and safety are the same without
  such a flag. It tunes how fast another engine runs or what it logs, belongs to a refused flag, or
  asks for what is so here.
* A sentence marked "refused" ends the start.
* A value marked "accepted" asks for what is so anyway.
* A flag without a value may have `no-` in front, where it turns something on or changes nothing.
* A key may follow a dot: `--compilation-config.mode 3` is `--compilation-config mode=3`.
* vLLM's short names, such as `-tp 8` and `-O3`, stand for their long ones.

A name that is neither here nor in [Flags](flags.md) ends the start as unknown, with the nearest
known name.
"""


def _names(flags: Mapping[str, str | Spelling]) -> str:
    """A table: flags that mean the same here share a row."""
    rows: dict[str, list[str]] = {}
    for flag, meant in flags.items():
        if isinstance(meant, str):
            rows.setdefault(f"`{flag_of(meant)}`", []).append(flag)
            continue
        if meant.says:
            rows.setdefault(_said(meant), []).append(flag)
        for value, own in meant.values.items():
            rows.setdefault(_said(own) or "accepted", []).append(f"{flag} {value}")
    return "".join(
        ["| flag | here |\n|---|---|\n"]
        + [
            f"| {', '.join(f'`{name}`' for name in names)} | {said} |\n"
            for said, names in rows.items()
        ]
    )


def _said(meant: Spelling) -> str:
    return "refused: " * meant.refused + meant.says


def own_hooks(name: str) -> Any:
    """What has the hooks of a plugin of this repository."""
    return hooks_of(importlib.import_module(f"ds_runtime_{name}"))
