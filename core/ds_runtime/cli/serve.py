"""`ds-runtime serve`: the OpenAI-compatible server."""

from __future__ import annotations

from argparse import Namespace, _SubParsersAction
from typing import Any

from ds_runtime.cli.config_file import add_config_file
from ds_runtime.cli.flags import add_flags, build
from ds_runtime.config import EngineConfig, ServerConfig


def add(subcommands: _SubParsersAction[Any]) -> None:
    """Register the verb."""
    parser = subcommands.add_parser(
        "serve",
        help="serve a model over HTTP, OpenAI-compatible",
        description="Serve a model over HTTP, OpenAI-compatible. Without flags: the demo model.",
    )
    add_flags(parser, EngineConfig)
    add_flags(parser, ServerConfig)
    add_config_file(parser)
    parser.set_defaults(run=run)


def run(args: Namespace) -> int:
    """Serve until interrupted."""
    engine, explicit = build(EngineConfig, args)
    server, _ = build(ServerConfig, args)
    from ds_runtime.server.serve import serve

    return int(serve(engine, server, explicit) or 0)
