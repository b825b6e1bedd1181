"""`ds-runtime`: serve, generate, bench, and the commands that explain every decision.

Torch-free at import: what a verb needs is imported when it runs, so that help answers at once.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any

from ds_runtime._version import __version__
from ds_runtime.cli import torchrun
from ds_runtime.cli.config_file import ahead
from ds_runtime.cli.flags import build
from ds_runtime.cli.inspect import doctor, ops, plan, plugins
from ds_runtime.cli.known import KNOWN, settle
from ds_runtime.cli.leaving import check_folder, never_unseen, own_streams
from ds_runtime.cli.parser import Parser
from ds_runtime.cli.run import chat, generate, serve, warm
from ds_runtime.common.interrupt import keep_exit_codes
from ds_runtime.config import EngineConfig
from ds_runtime.config.spelling import add_spellings, engines
from ds_runtime.errors import DsRuntimeError
from ds_runtime.ops.contract import Refusal
from ds_runtime.plugins.isolate import look
from ds_runtime.plugins.manager import (
    Plugins,
    importable,
    installed_plugins,
    load_plugins,
    load_tools,
)
from ds_runtime.plugins.select_platform import asked_for, stopped

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_REPORTING = ("plugins", "doctor")  # run whatever is wrong with the plugins, and say it
_ASKED = ("PROBE", "DIAGNOSE")  # by these
_HELP = {"-h", "--help", "--help-all"}
VERBS = (serve, warm, chat, generate, plan, ops, plugins, doctor)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code. Errors meant for people are one message, no traceback."""
    args = list(sys.argv[1:] if argv is None else argv)
    own_streams()
    keep_exit_codes()
    try:
        with never_unseen():
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
    check_folder(needed=not _only_tells(args))
    wanted, allowlist = _ahead(args, subcommands)
    looks = _looks(args, subcommands)
    installed = installed_plugins()
    ask = _ASKED if reports else ()
    failed = look(installed, wanted, allowlist, ask=ask) if looks else {}
    loaded = load_plugins(
        wanted, lenient=reports, allowlist=allowlist, failed=failed, installed=installed
    )
    _add_plugin_verbs(subcommands, loaded, loaded.implementing("ds_cli"))
    _add_plugin_flags(parser, loaded)
    namespace = parser.parse_args(args)
    environment = _unread(loaded) if looks else []
    serves = args[:1] == ["serve"]
    if serves and torchrun.is_spare(os.environ):
        return 0
    notes = torchrun.settle(namespace, os.environ) if serves else []
    for note in (*notes, *settle(namespace), *environment):
        print(f"ds-runtime: {note}", file=sys.stderr)
    if "run" not in namespace:
        parser.print_help()
        return 0
    if reports:
        namespace.failed = failed
    elif failed:
        _go_on_without(failed, namespace, list(importable(installed, wanted)))
    return int(namespace.run(namespace) or 0)


def _only_tells(args: list[str]) -> bool:
    """Whether the command prints help or the version, and does nothing else."""
    return not args or args[0].startswith("-") or not _HELP.isdisjoint(args)


def _looks(args: list[str], subcommands: argparse._SubParsersAction[Parser]) -> bool:
    """Whether plugins are asked about this machine, so that they are tried apart first."""
    named = {a.partition("=")[0] for a in args}
    apart = {"--device", "diff"} if args[:1] == ["plan"] else set()  # of no device that is here
    parser = subcommands.choices.get(args[0]) if args else None
    asks = parser is not None and parser.get_default("looks")
    return bool(asks) and not named & {*_HELP, *apart}


def _go_on_without(
    failed: Mapping[str, Refusal], namespace: argparse.Namespace, names: list[str]
) -> None:
    """Plugins that crash stop a start as every broken one does, unless the user has said more."""
    config, _ = build(EngineConfig, namespace)
    for name, refusal in failed.items():
        if asked_for(config.platform)[1] == "auto" and not config.allow_platform_downgrade:
            raise stopped(name, refusal)
        print(f"ds-runtime: plugin {name} is left out: {refusal}", file=sys.stderr)
    namespace.plugins = [n for n in names if n not in failed]


def build_parser() -> tuple[Parser, argparse._SubParsersAction[Parser]]:
    """The parser with the verbs of this distribution, and the place where plugins add theirs."""
    parser = Parser(prog="ds-runtime", description="Serves DeepSeek models on any accelerator.")
    parser.add_argument("--version", action="version", version=f"ds-runtime {__version__}")
    subcommands = parser.add_subparsers(metavar="COMMAND", parser_class=Parser)
    for verb in VERBS:
        verb.add(subcommands)
    tools = load_tools()
    _add_plugin_verbs(subcommands, tools, tools.reports)
    add_spellings(engines(parser), KNOWN, taken=False)
    return parser, subcommands


def _ahead(
    args: list[str], subcommands: argparse._SubParsersAction[Parser]
) -> tuple[list[str] | None, str | None]:
    """--plugins and --plugin-allowlist, read ahead, also from --config FILE.

    Plugins may add the very verb that is being parsed; and what may not be loaded, never is.
    """
    several = any(a.dest == "plugins" and a.nargs for a in _verb(args, subcommands))
    said: dict[str, list[str]] = {}
    for i, arg in enumerate(args):
        flag, equals, value = arg.partition("=")
        flag = flag.replace("_", "-")
        if flag not in ("--plugins", "--plugin-allowlist", "--config"):
            continue
        words = [value] if equals else args[i + 1 : i + 2]
        if several and flag == "--plugins" and not equals:
            words = [*takewhile(lambda word: not word.startswith("-"), args[i + 1 :])]
        if words:
            said.setdefault(flag, []).extend(words)
    if "--config" in said:
        said = {**ahead(said["--config"][-1]), **said}
    names = [n.strip() for text in said.get("--plugins", ()) for n in text.split(",")]
    wanted = [n for n in names if n] if "--plugins" in said else None
    return wanted, said.get("--plugin-allowlist", [None])[-1]


def _verb(
    args: list[str], subcommands: argparse._SubParsersAction[Any]
) -> Sequence[argparse.Action]:
    """The actions of the command that the first arguments name; none for one of a plugin's."""
    parser = subcommands.choices.get(args[0]) if args else None
    actions = parser._actions if parser is not None else []
    nested = (a for a in actions if isinstance(a, argparse._SubParsersAction))
    return next((_verb(args[1:], a) for a in nested), actions)


def _add_plugin_verbs(
    subcommands: argparse._SubParsersAction[Any], loaded: Plugins, names: Iterable[str]
) -> None:
    """Each plugin adds to a parser of its own first, so that a failing one leaves nothing."""
    for name in names:
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
        subcommands.choices.update(scratch.choices)
        subcommands._choices_actions += scratch._choices_actions


def _unread(loaded: Plugins) -> list[str]:
    """A sentence for every variable of the environment that another engine would read, by the
    plugins' `ENVIRONMENT`: the beginning of the name, and what decides here."""
    known = {name: says for own in loaded.named("ENVIRONMENT") for name, says in own.items()}
    longest = sorted(known, key=len, reverse=True)
    found = []
    for name in sorted(os.environ):
        if (start := next((k for k in longest if name.startswith(k)), None)) is not None:
            found.append(f"{name} is set and not read: {known[start]}")
    return found


def _add_plugin_flags(parser: Parser, loaded: Plugins) -> None:
    """The names that a plugin's FLAGS give to settings: how its vendor's users know them."""
    for name, report in loaded.reports.items():
        flags = getattr(loaded.manager.get_plugin(name), "FLAGS", {})
        if report.refusal is None and flags:
            try:
                add_spellings(engines(parser), flags)
            except Exception as e:
                loaded.drop(name, Refusal("broken", f"FLAGS: {e}"))
                print(f"ds-runtime: plugin {name} is broken: FLAGS: {e}", file=sys.stderr)
