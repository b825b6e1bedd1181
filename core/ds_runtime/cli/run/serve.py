"""`ds-runtime serve`: the OpenAI-compatible server."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace, _SubParsersAction
from typing import Any

from ds_runtime.cli.config_file import add_config_file
from ds_runtime.cli.flags import add_flags, build
from ds_runtime.config import EngineConfig, ServerConfig
from ds_runtime.config.ranks import check_secret
from ds_runtime.errors import ConfigError


def add(subcommands: _SubParsersAction[Any]) -> None:
    """Register the verb."""
    parser = subcommands.add_parser(
        "serve",
        help="serve a model over HTTP, OpenAI-compatible",
        description="Serve a model over HTTP, OpenAI-compatible. Without flags: the demo model.",
    )
    add_settings(parser)
    parser.set_defaults(run=run, looks=True)


def add_settings(parser: ArgumentParser) -> None:
    """Every flag of a server, for verbs that `configs` reads."""
    parser.add_argument("folder", nargs="?", metavar="MODEL", help="the same as --model")
    add_flags(parser, EngineConfig, spaces=True)
    add_flags(parser, ServerConfig, spaces=True)
    add_config_file(parser)


def configs(args: Namespace) -> tuple[EngineConfig, ServerConfig, frozenset[str]]:
    """What the arguments say, and the names of the engine's fields among them."""
    if args.folder is not None:
        if "model" in args:
            said = f"{args.folder}: --model {args.model} names another model: give one of them"
            if "served_model_name" in args:
                said += f"; --served-model-name takes one name, here {args.served_model_name}"
            raise ConfigError(said)
        args.model = args.folder
    engine, explicit = build(EngineConfig, args)
    check_secret(engine)
    return engine, build(ServerConfig, args)[0], explicit


def run(args: Namespace) -> int:
    """Serve until interrupted."""
    engine, server, explicit = configs(args)
    from ds_runtime.server.serve import serve

    return int(serve(engine, server, explicit) or 0)
