"""`ds-runtime ops`: the vocabulary, and what is offered for it here."""

from __future__ import annotations

import json
from argparse import Namespace, _SubParsersAction
from typing import Any

from ds_runtime.cli.flags import add_flags, build
from ds_runtime.config import EngineConfig
from ds_runtime.ops.table import OPS


def add(subcommands: _SubParsersAction[Any]) -> None:
    """Register the verb."""
    parser = subcommands.add_parser(
        "ops",
        help="list every op, its contract and the kernels offered here",
        description="List every op of the runtime with its contract version and tolerance, and "
        "for the given model on this machine every kernel with its rank and verdict.",
    )
    parser.add_argument("--json", action="store_true", help="as JSON")
    add_flags(parser, EngineConfig)
    parser.set_defaults(run=run, looks=True)


def run(args: Namespace) -> int:
    """Print the table."""
    config, explicit = build(EngineConfig, args)
    from ds_runtime.assembly.assemble import assemble
    from ds_runtime.assembly.explain import Explained
    from ds_runtime.cli.inspect.plan import tell_left_out

    assembly = assemble(config, explicit)
    tell_left_out(assembly)
    table = [
        {
            "op": op.name,
            "summary": op.summary,
            "contract": op.version,
            "protocol": op.protocol,
            "heavy": op.heavy,
            "tolerance": dict(op.tolerance),
            "composed_of": list(op.uses),
            "kernels": list(Explained(assembly, op.name).rows()),
        }
        for op in OPS.values()
    ]
    print(json.dumps(table, indent=1) if args.json else _text(table))
    return 0


def _text(table: list[dict[str, Any]]) -> str:
    lines = []
    for row in table:
        slack = ", ".join(f"{dtype} {bound:g}" for dtype, bound in row["tolerance"].items())
        heavy = ", heavy" if row["heavy"] else ""
        lines.append(f"{row['op']}: {row['summary']} (contract {row['contract']}{heavy})")
        lines.append(f"  tolerance: {slack}")
        if row["composed_of"]:
            lines.append(f"  composed of {', '.join(row['composed_of'])} where no fusion is bound")
        for kernel in row["kernels"]:
            verdicts = "; ".join(_short(said, at) for said, at in kernel["verdicts"].items())
            said = verdicts or "this model has no site for it"
            lines.append(f"  {kernel['kernel']} (rank {kernel['rank']}): {said}")
    return "\n".join(lines)


def _short(said: str, sites: list[str]) -> str:
    return f"{said} ({', '.join(sites)})" if len(sites) <= 2 else f"{said} ({len(sites)} places)"
