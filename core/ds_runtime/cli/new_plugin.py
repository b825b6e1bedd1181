"""`ds-runtime new-plugin`: a package to begin a vendor's plugin with."""

from __future__ import annotations

from argparse import Namespace, _SubParsersAction
from pathlib import Path
from typing import Any


def add(subcommands: _SubParsersAction[Any]) -> None:
    """Register the verb."""
    parser = subcommands.add_parser(
        "new-plugin",
        help="write a complete plugin package: platform, kernel, tests, CI",
        description="Write a package that installs, is selected and passes its tests as it is: "
        "a platform that takes the host for its device, one kernel, conformance tests, CI.",
    )
    parser.add_argument("name", help="of the plugin, such as acme")
    parser.add_argument("--into", default=".", metavar="DIR", help="(default: here)")
    parser.set_defaults(run=run)


def run(args: Namespace) -> int:
    """Write it and say what comes next."""
    from ds_runtime.plugins import load_plugins
    from ds_runtime.scaffold import write_plugin

    folder = write_plugin(args.name, Path(args.into), load_plugins(lenient=True).reports)
    print(f"{folder} written; next:")
    print(f"  pip install -e {folder}[test] && pytest {folder}")
    print(f"  ds-runtime serve --platform {args.name}")
    return 0
