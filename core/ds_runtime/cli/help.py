"""What `--help` shows of a verb with many flags: one screen. `--help-all` shows every flag."""

from __future__ import annotations

import argparse
import copy
import re
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

LINES = 60  # of `--help`, at 80 columns
COMMON = {  # by the name of a setting: what `--help` says of it, in one line
    "model": "folder, hub id or 'demo' (default: demo)",
    "context_length": "longest prompt + output (default: the model's)",
    "quantize": "round weights at load: int8, int4 (default: none)",
    "lora": "NAME=DIR: serve a PEFT adapter under this name",
    "platform": "platform to run on (default: auto, the best here)",
    "tp": "ranks that divide each layer (default: 1)",
    "dp": "copies of the engine in one server (default: 1)",
    "enable_dp_attention": "divide attention among the ranks by sequences",
    "ep": "parts of routed experts by number (default: 1)",
    "kv_cache_dtype": "dtype of the KV cache: auto, bfloat16, fp8, …",
    "kv_memory": "memory for the KV cache, e.g. 2GB",
    "max_running_requests": "most requests that run at once",
    "disable_graph": "run steps op by op, without captured graphs",
    "speculative_algorithm": "NEXTN: drafts by the checkpoint's MTP layer",
    "pin": "OP[@SITE-GLOB]=KERNEL: take this kernel for the op",
    "batch_invariant": "same bits for a request, whatever else runs",
    "host": "address to listen on (default: 127.0.0.1)",
    "port": "port to listen on; 0: a free one (default: 30000)",
    "served_model_name": "model name in the API (default: folder name)",
    "api_key": "bearer token that requests must carry",
    "reasoning_parser": "who splits thinking from answers (default: auto)",
    "tool_call_parser": "who reads tool calls (default: auto)",
    "log_level": "debug, info, warning or error (default: info)",
}
_FLAGS = argparse.Action(["--FLAG"], "flags", metavar="…")
INDENT = 28  # columns before the help of a flag
_NARROWEST = 11  # columns of that help, as argparse has them


class HelpAll(argparse.Action):
    """Prints every flag and exits."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        print(argparse.ArgumentParser.format_help(parser), end="")
        parser.exit()


def add_help_all(parser: argparse.ArgumentParser) -> None:
    """Gives a parser `--help-all`; only the short help mentions it."""
    parser.add_argument("--help-all", action=HelpAll, nargs=0, help=argparse.SUPPRESS)


def short(parser: argparse.ArgumentParser, whole: str) -> str:
    """`whole` if it has at most `LINES` lines, else the common settings and a verb's own flags.

    The description is its first sentence. A flag shows its first name and one line. The end
    counts the flags that are left out, by group.
    """
    if whole.count("\n") <= LINES:
        return whole
    formatter = argparse.HelpFormatter(parser.prog, max_help_position=INDENT)
    width = max(_NARROWEST, formatter._width - INDENT)  # argparse's own bound lies below INDENT
    needed = [a for a in parser._actions if a.required or not a.option_strings]
    formatter.add_usage(None, [parser._actions[0], _FLAGS, *needed], [])
    formatter.add_text(re.split(r"(?<=\.) ", parser.description or "")[0])
    left: dict[str, int] = {}
    for group in parser._action_groups:
        shown = list(_shown(group, width))
        seen = [a for a in group._group_actions if a.help is not argparse.SUPPRESS]
        if hidden := len(seen) - len(shown):
            left[str(group.title)] = hidden
        formatter.start_section(group.title)
        formatter.add_arguments(shown)
        formatter.end_section()
    more = ", ".join(f"{title} {count}" for title, count in left.items())
    formatter.add_text("--help-all says all." + (f" Flags left out: {more}." if more else ""))
    return formatter.format_help()


def _shown(group: argparse._ArgumentGroup, width: int) -> Iterator[argparse.Action]:
    """Copies of the actions that the short help has, each with a line that fits."""
    for action in group._group_actions:
        setting = getattr(action, "setting", False)
        if action.help is argparse.SUPPRESS or (setting and action.dest not in COMMON):
            continue
        brief = copy.copy(action)
        if action.option_strings:
            long = [o for o in action.option_strings if o[:2] == "--"]
            brief.option_strings = [*long, *action.option_strings][:1]  # a plugin's may be short
        if setting:
            brief.metavar = "X" if action.choices else action.metavar
            brief.nargs = None if action.nargs == "+" else action.nargs
            brief.help = COMMON[action.dest]
        else:
            brief.help = textwrap.shorten(str(action.help or ""), width, placeholder=" …")
        yield brief
