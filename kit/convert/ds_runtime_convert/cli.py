"""`ds-runtime convert`: a checkpoint in another weight format."""

from __future__ import annotations

import shlex
from argparse import Namespace, RawDescriptionHelpFormatter, _SubParsersAction
from pathlib import Path
from typing import Any

from ds_runtime.cli.flags import size
from ds_runtime_convert.targets import TARGETS


def add(subcommands: _SubParsersAction[Any]) -> None:
    """Register the verb."""
    parser = subcommands.add_parser(
        "convert",
        help="write a checkpoint again in another weight format",
        formatter_class=RawDescriptionHelpFormatter,
        description="Round a checkpoint's weights to another format, one weight at a time. Every\n"
        "format that can be served can be converted. The same command continues where it\n"
        "was interrupted.",
        epilog="formats:\n" + "\n".join(f"  {t.name:7} {t.summary}" for t in TARGETS.values()),
    )
    parser.add_argument("--model", required=True, help="checkpoint folder, hub id, or 'demo'")
    parser.add_argument("--to", required=True, choices=tuple(TARGETS), help="the format")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder to write")
    parser.add_argument(
        "--shard-size", type=size, default=5 * 10**9, metavar="SIZE", help="of a file (5GB)"
    )
    parser.set_defaults(run=run)


def run(args: Namespace) -> int:
    """Convert, and say what came of it."""
    from ds_runtime.checkpoint.hub import resolve_model
    from ds_runtime.common.progress import amount
    from ds_runtime_convert.run import convert

    out = Path(args.out)
    report = convert(resolve_model(args.model), args.to, out, args.shard_size, progress=True)
    if report.already:
        print(f"{out}: holds this conversion already")
        return 0
    print(f"{out}: {amount(report.after)} in {args.to}, from {amount(report.before)}")
    for format, error in report.errors.items():
        print(f"  {format}: error {error:.2%} of the weights' root mean square")
    if report.kept:
        more = f" and {len(report.kept) - 1} more" if report.kept[1:] else ""
        print(f"  not rounded, as its groups do not fit: {report.kept[0]}{more}")
    model = shlex.quote(str(out))
    print(f"next: ds-runtime generate --model {model} --max-tokens 32 'Once upon a time'")
    return 0
