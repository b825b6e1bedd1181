"""`ds-runtime new-plugin`: a package to begin a vendor's plugin with."""

from __future__ import annotations

from argparse import Namespace, _SubParsersAction
from pathlib import Path
from typing import Any

from ds_runtime_kit.scaffold import KINDS, PLATFORM


def add(subcommands: _SubParsersAction[Any]) -> None:
    """Register the verb."""
    parser = subcommands.add_parser(
        "new-plugin",
        help="write a complete plugin package: platform and kernels, or loader; tests, CI",
        description="Write a package that installs and passes its tests as it is. A platform: it "
        "takes the host for its device, and is used where it is named; a linear that packs "
        "weights, a small op, described devices, conformance tests, CI. A loader: it reads a "
        "checkpoint format of its own, on every platform; samples, conformance tests, a model that "
        "is served, CI.",
    )
    parser.add_argument("name", help="of the plugin, such as acme")
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--with",
        dest="kind",
        choices=tuple(KINDS),
        default=PLATFORM,
        help="what it brings (default: %(default)s)",
    )
    what.add_argument(
        "--platform",
        dest="kind",
        action="store_const",
        const=PLATFORM,
        help="as --with platform, which is the default",
    )
    parser.add_argument(
        "--into", default=".", metavar="DIR", help="folder to write it in (default: here)"
    )
    parser.set_defaults(run=run)


def run(args: Namespace) -> int:
    """Write it and say what comes next."""
    from ds_runtime.plugins.manager import load_plugins
    from ds_runtime_kit.scaffold import write_plugin

    taken = load_plugins(lenient=True).reports
    folder = write_plugin(args.name, Path(args.into), taken, args.kind)
    print(f"{folder} written; next:")
    print(f'  pip install -e "{folder}[test]" && pytest {folder}')
    print(f"  {KINDS[args.kind].format(name=args.name)}")
    return 0
