"""`ds-runtime convert`: a checkpoint written again in another weight format."""

from __future__ import annotations

from argparse import _SubParsersAction
from typing import Any

from ds_runtime.plugins.hookspecs import hookimpl


@hookimpl
def ds_cli(subcommands: _SubParsersAction[Any]) -> None:
    """The command convert."""
    from ds_runtime_convert import cli

    cli.add(subcommands)
