"""`ds-runtime plan`: which kernel serves which op where, why, and whether that changed."""

from __future__ import annotations

import json
import sys
from argparse import Namespace, _SubParsersAction
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_runtime.cli.flags import add_flags, build
from ds_runtime.cli.parser import near
from ds_runtime.config import EngineConfig
from ds_runtime.errors import ConfigError
from ds_runtime.ops.table import OPS

if TYPE_CHECKING:
    from ds_runtime.assemble import Assembly


def add(subcommands: _SubParsersAction[Any]) -> None:
    """Register the verb."""
    parser = subcommands.add_parser(
        "plan",
        help="show which kernel serves which op, and why",
        description="Show the binding: a line per op with its kernel, then who lost and who "
        "refused, with the reason. `plan lock FILE` writes it for `serve --plan FILE`; "
        "`plan diff A B` compares two such files (exit code 1 if they differ).",
    )
    parser.add_argument("action", nargs="?", choices=("show", "lock", "diff"), default="show")
    parser.add_argument("files", nargs="*", metavar="FILE", help="for lock: one, for diff: two")
    parser.add_argument("--json", action="store_true", help="the plan as JSON")
    parser.add_argument("--explain", metavar="OP", help="every kernel of this op, site by site")
    add_flags(parser, EngineConfig, "engine")
    parser.set_defaults(run=run)


def run(args: Namespace) -> int:
    """Show, lock or compare."""
    expected = {"show": 0, "lock": 1, "diff": 2}[args.action]
    if len(args.files) != expected:
        usage = {"show": "plan", "lock": "plan lock FILE", "diff": "plan diff A B"}[args.action]
        raise ConfigError(f"plan {args.action} {' '.join(args.files)}: write ds-runtime {usage}")
    if args.action == "diff":
        return _diff(*args.files)
    if args.explain is not None and args.explain not in OPS:
        hint = near(args.explain, OPS) or f"; ops: {', '.join(OPS)}"
        raise ConfigError(f"--explain {args.explain!r}: no such op{hint}")
    config, explicit = build(EngineConfig, args)
    from ds_runtime.assemble import assemble
    from ds_runtime.plan import render

    assembly = assemble(config, explicit)
    tell_left_out(assembly)
    text = json.dumps(assembly.plan.to_dict(), indent=1)
    if args.action == "lock":
        return _lock(args.files[0], text, assembly)
    if args.explain is not None:
        rows = list(explain(assembly, args.explain))
        text = json.dumps(rows) if args.json else _table(args.explain, rows)
        print(text)
    else:
        print(text if args.json else render(assembly.plan))
    return 0


def tell_left_out(assembly: Assembly) -> None:
    """A line on standard error per broken plugin."""
    for sentence in assembly.left_out():
        print(f"ds-runtime: {sentence}", file=sys.stderr)


def _lock(path: str, text: str, assembly: Assembly) -> int:
    try:
        Path(path).write_text(text + "\n")
    except OSError as e:
        raise ConfigError(f"plan lock {path}: cannot be written: {e}") from e
    print(f"plan {assembly.plan.digest()} written to {path}; hold to it with --plan {path}")
    return 0


def _diff(left: str, right: str) -> int:
    from ds_runtime.plan import difference, read_plan

    said = difference(read_plan(left), read_plan(right))
    print("\n".join(f"- {line}" for line in said) if said else "the plans are equal")
    return int(bool(said))


def explain(assembly: Assembly, op: str) -> Iterator[dict[str, Any]]:
    """Every kernel of `op` with its verdicts: {kernel, rank, provider, verdicts: {said: sites}}."""
    from ds_runtime.ops.bind import Binder, refusal, site_facts
    from ds_runtime.plan import compress_sites

    binding = assembly.binding
    mine = [(site, kernel) for site, kernel in binding.choices if site.op == op]
    decisions = {d.site: d for d in binding.decisions}
    for kernel in Binder(assembly.offers, binding.base).by_op[op]:
        verdicts: dict[str, list[Any]] = {}
        for site, chosen in mine:
            sentence = refusal(kernel, site_facts(binding.base, site), binding.layout.tag)
            lost = f"accepts, but {decisions[site].kernel} is preferred"
            said = f"refused: {sentence}" if sentence else lost
            verdict = "chosen" if kernel is chosen else said
            verdicts.setdefault(verdict, []).append(decisions[site])
        yield {
            "kernel": kernel.name,
            "rank": kernel.rank,
            "provider": kernel.provider,
            "verdicts": {said: list(compress_sites(found)) for said, found in verdicts.items()},
        }


def _table(op: str, rows: list[dict[str, Any]]) -> str:
    lines = [f"{op}: {OPS[op].summary}"]
    for row in rows:
        lines.append(f"  {row['kernel']} (rank {row['rank']})")
        lines += [f"    {said}: {', '.join(sites)}" for said, sites in row["verdicts"].items()]
        if not row["verdicts"]:
            lines.append("    this model has no site for it")
    return "\n".join(lines)
