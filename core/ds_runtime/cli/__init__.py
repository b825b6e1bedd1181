"""`ds-runtime`: serve, generate, bench, and the commands that explain every decision.

Torch-free at import: what a verb needs is imported when it runs, so that help answers at once.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Sequence
from typing import Any

from ds_runtime import __version__
from ds_runtime.cli import bench, doctor, generate, ops, plan, plugins, serve
from ds_runtime.cli.parser import Parser
from ds_runtime.errors import DsRuntimeError
from ds_runtime.ops.spec import Refusal
from ds_runtime.plugins import Plugins, load_plugins

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_REPORTING = ("plugins", "doctor")  # run whatever is wrong with the plugins, and say it
VERBS = (serve, generate, plan, ops, plugins, doctor, bench)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code. Errors meant for people are one message, no traceback."""
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _run(args)
        sys.stdout.flush()  # here, where a full disk has its sentence
        return code
    except DsRuntimeError as e:
        print(f"ds-runtime: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("ds-runtime: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output left, e.g. `| head`
        _drop_output()
        return 141
    except OSError as e:
        if e.errno not in _FULL:
            raise
        _drop_output()
        print(f"ds-runtime: the output cannot be written: {e}", file=sys.stderr)
        return 1
    except SystemExit as e:  # argparse: 0 after help, 2 after a usage error
        return e.code if isinstance(e.code, int) else int(e.code is not None)


def _drop_output() -> None:
    """What is still buffered goes nowhere, so that leaving does not fail on it again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(args: list[str]) -> int:
    parser, subcommands = build_parser()
    reports = not args or args[0].startswith("-") or args[0] in _REPORTING
    _add_plugin_verbs(subcommands, load_plugins(_plugins_wanted(args), lenient=reports))
    namespace = parser.parse_args(args)
    if "run" not in namespace:
        parser.print_help()
        return 0
    return int(namespace.run(namespace) or 0)


def build_parser() -> tuple[Parser, argparse._SubParsersAction[Parser]]:
    """The parser with the built-in verbs, and the place where plugins add theirs."""
    parser = Parser(prog="ds-runtime", description="Serves DeepSeek models on any accelerator.")
    parser.add_argument("--version", action="version", version=f"ds-runtime {__version__}")
    subcommands = parser.add_subparsers(metavar="COMMAND", parser_class=Parser)
    for verb in VERBS:
        verb.add(subcommands)
    return parser, subcommands


def _plugins_wanted(args: list[str]) -> list[str] | None:
    """--plugins, read ahead: plugins may add the very verb that is being parsed."""
    wanted: list[str] | None = None
    for i, arg in enumerate(args):
        flag, equals, value = arg.partition("=")
        if flag == "--plugins" and (equals or i + 1 < len(args)):
            names = (value if equals else args[i + 1]).split(",")
            wanted = [*(wanted or ()), *(n.strip() for n in names if n.strip())]
    return wanted


def _add_plugin_verbs(subcommands: argparse._SubParsersAction[Any], loaded: Plugins) -> None:
    """Each plugin adds to a parser of its own first, so that a failing one leaves nothing."""
    for name in loaded.implementing("ds_cli"):
        scratch = Parser(prog="ds-runtime").add_subparsers(parser_class=Parser)
        loaded.call("ds_cli", only=name, subcommands=scratch)
        if taken := sorted(scratch.choices.keys() & subcommands.choices.keys()):
            loaded.drop(name, Refusal("broken", f"ds_cli adds {taken[0]!r}, which is taken"))
        if refusal := loaded.reports[name].refusal:
            print(
                f"ds-runtime: plugin {name} is {refusal}; its commands are left out",
                file=sys.stderr,
            )
            continue
        for verb, parser in scratch.choices.items():
            helped = [a.help for a in scratch._choices_actions if a.dest == verb]
            added = subcommands.add_parser(
                verb, parents=[parser], add_help=False, help=helped[0] if helped else None
            )
            added.set_defaults(**parser._defaults)
