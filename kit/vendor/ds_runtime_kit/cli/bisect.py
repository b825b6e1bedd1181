"""`ds-runtime bisect`: the first kernel that departs from the reference, and its inputs."""

from __future__ import annotations

from argparse import Namespace, _SubParsersAction
from pathlib import Path
from typing import Any

from ds_runtime.cli.flags import add_flags, build
from ds_runtime.cli.outputs import check_output
from ds_runtime.config import EngineConfig
from ds_runtime.errors import ConfigError


def add(subcommands: _SubParsersAction[Any]) -> None:
    """Register the verb."""
    parser = subcommands.add_parser(
        "bisect",
        help="find the first kernel that departs from the reference",
        description="Run prompts (or built-in ones) with the plan's kernels, and compare every op "
        "call with the reference in float64 on the same inputs. The first call that departs by "
        "more than its tolerance is named. Its inputs are written to a file for ds-runtime conform "
        "--case. Before, the samples of a third party's loader are checked, as by ds-runtime "
        "conform. Exit code 1 if one departs.",
    )
    parser.add_argument("prompt", nargs="*", help="texts to complete (default: built-in ones)")
    parser.add_argument("--steps", type=int, default=3, metavar="N", help="of decode (default: 3)")
    parser.add_argument(
        "--out",
        default="bisect.case",
        metavar="FILE",
        help="file for the inputs of the first call that departs (default: %(default)s)",
    )
    add_flags(parser, EngineConfig)
    parser.set_defaults(run=run, looks=True)


def run(args: Namespace) -> int:
    """Watch, and say what was seen."""
    if args.steps < 0:
        raise ConfigError(f"bisect --steps {args.steps}: must be at least 0")
    check_output(Path(args.out), "--out")
    config, explicit = build(EngineConfig, args)
    from ds_runtime_kit.bisect import search

    out = Path(args.out)
    finding = search.bisect(config, explicit, args.prompt or search.PROMPTS, args.steps, out)
    print(search.render(finding, out))
    return int(finding.found)
