"""The vendor kit: what a plugin is written, tested and looked into with."""

from __future__ import annotations

from argparse import _SubParsersAction
from typing import Any

from ds_runtime.plugins.hookspecs import hookimpl


@hookimpl
def ds_cli(subcommands: _SubParsersAction[Any]) -> None:
    """The commands conform, bisect, new-plugin."""
    from ds_runtime_kit.cli import bisect, conform, new_plugin

    for verb in (conform, bisect, new_plugin):
        verb.add(subcommands)
