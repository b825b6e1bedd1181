"""`ds-runtime plan`: which kernel serves which op where, why, and whether that changed."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentTypeError, Namespace, _SubParsersAction
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_runtime.cli.config_file import add_config_file
from ds_runtime.cli.flags import add_flags, build
from ds_runtime.cli.inspect.fit import check_fit
from ds_runtime.cli.parser import near
from ds_runtime.config import EngineConfig, ServerConfig
from ds_runtime.errors import ConfigError, unwritable
from ds_runtime.ops.table import OPS

if TYPE_CHECKING:
    from ds_runtime.assembly.result import Assembly


CACHED_TOKENS = 512
_USAGES = {"show": "plan", "lock": "plan lock FILE", "diff": "plan diff A B"}  # by files needed


def _action(text: str) -> str:
    if text not in _USAGES:
        hint = near(text, _USAGES) or f"; a model is --model {text}"
        raise ArgumentTypeError(f"{text!r} is not one of {', '.join(_USAGES)}{hint}")
    return text


def add(subcommands: _SubParsersAction[Any]) -> None:
    """Register the verb."""
    parser = subcommands.add_parser(
        "plan",
        help="show which kernel serves which op, and why",
        description="Show which kernel runs each op. --verbose adds the kernels that lost or "
        "refused, and why. `plan lock FILE` writes the plan for `serve --plan FILE`. "
        "`plan diff A B` compares two files (exit code 1 if they differ). --device plans for a "
        "device that is not here. A model that does not fit on it is an error.",
    )
    parser.add_argument(
        "action",
        nargs="?",
        type=_action,
        metavar="{show,lock,diff}",
        default="show",
        help="print the plan, write it to a file, or compare two files (default: show)",
    )
    parser.add_argument("files", nargs="*", metavar="FILE", help="for lock: one, for diff: two")
    parser.add_argument("--json", action="store_true", help="the plan as JSON")
    parser.add_argument(
        "--verbose", action="store_true", help="every kernel that lost or refused, with the reason"
    )
    parser.add_argument("--explain", metavar="OP", help="every kernel and gate of this op")
    parser.add_argument(
        "--device",
        metavar="X",
        help="decide for this device or architecture, as a plugin describes it",
    )
    parser.add_argument(
        "--without",
        metavar="A,B",
        default="",
        help="features, such as libraries, that the described device is to lack",
    )
    parser.add_argument(
        "--costs", metavar="FILE", help="predict steps from this file of ds-runtime tune costs"
    )
    parser.add_argument(
        "--cached-tokens",
        type=int,
        metavar="N",
        help="cached tokens per request in predicted decode steps (default: 512, or the context)",
    )
    parser.add_argument("--receipts", metavar="DIR", help="folder of conform's (default: your own)")
    add_flags(parser, EngineConfig)
    add_flags(parser, ServerConfig, hidden=True)  # of `serve`'s command line: they decide nothing
    add_config_file(parser)
    parser.set_defaults(run=run, looks=True)


def run(args: Namespace) -> int:
    """Show, lock or compare."""
    if len(args.files) != list(_USAGES).index(args.action):
        given = " ".join(("plan", args.action, *args.files))
        raise ConfigError(f"{given}: write ds-runtime {_USAGES[args.action]}")
    if args.action == "diff":
        return _diff(*args.files)
    if args.explain is not None and args.explain not in OPS:
        hint = near(args.explain, OPS) or f"; ops: {', '.join(OPS)}"
        raise ConfigError(f"--explain {args.explain!r}: no such op{hint}")
    if args.cached_tokens is not None and args.cached_tokens < 1:
        raise ConfigError(f"--cached-tokens {args.cached_tokens}: must be at least 1")
    config, explicit = build(EngineConfig, args)
    from ds_runtime.assembly import room
    from ds_runtime.assembly.assemble import assemble
    from ds_runtime.assembly.plan import render
    from ds_runtime.cli.inspect import wire
    from ds_runtime.measured.found import costs_of
    from ds_runtime.predict import step

    lacking = [name.strip() for name in args.without.split(",") if name.strip()]
    if lacking and args.device is None:
        raise ConfigError("--without: only a device that --device describes can lack something")

    def decided(tp: int) -> Assembly:
        wanted = replace(config, tp=tp)
        return assemble(wanted, explicit, device=args.device, without=lacking)

    assembly = decided(config.tp)
    tell_left_out(assembly)
    cached = _cached(assembly, args.cached_tokens)
    held, predicted = room.said(assembly), list[str]()
    crossing = wire.said(assembly)
    whole = {**assembly.plan.to_dict(), "memory": held + crossing}
    shows = args.action == "show" and args.explain is None
    name = assembly.device.name
    if shows and (costs := costs_of(assembly.plugins, name, args.costs)) is not None:
        if args.json:
            whole["predicted"] = step.as_json(assembly, costs, cached)
        else:
            predicted = step.said(assembly, costs, cached)
    held += predicted + crossing
    text = json.dumps(whole, indent=1)
    if args.device is not None and args.action == "lock":
        check_fit(assembly, args.device, decided)
    if args.action == "lock":
        return _lock(args.files[0], text, assembly)
    if args.explain is not None:
        print(_explained(assembly, args.explain, args.json))
    else:
        shown = _described(assembly, args.device) + render(assembly.plan, args.verbose)
        print(text if args.json else "\n".join((shown, *held, *_receipts(assembly, args))))
        if args.device is not None:
            check_fit(assembly, args.device, decided)
    return 0


def _cached(assembly: Assembly, given: int | None) -> int:
    """Cached tokens of each request in a decode step, which computes one token more."""
    from ds_runtime.assembly.estimate import positions_of

    context = positions_of(assembly)
    if given is None:
        return max(1, min(CACHED_TOKENS, context - 1))
    if given > context:
        raise ConfigError(
            f"--cached-tokens {given}: this model's context has {context} tokens; give at most that"
        )
    return given


def _receipts(assembly: Assembly, args: Namespace) -> list[str]:
    """What `conform` found of the plugins whose kernels were chosen."""
    from ds_runtime.assembly import receipts

    where = Path(args.receipts) if args.receipts else receipts.folder()
    return receipts.standing(assembly, receipts.read_all(where))


def _described(assembly: Assembly, device: str | None) -> str:
    """What a described device is taken to be."""
    if device is None:
        return ""
    info = assembly.device
    from ds_runtime.plugins.described_devices import whole

    features = ", ".join(whole(info))
    return f"described device {info.name}: {info.cores} cores, with {features}\n"


def tell_left_out(assembly: Assembly) -> None:
    """A line on standard error per broken plugin, and per quantization_config that is not used."""
    for sentence in (*assembly.left_out(), *assembly.left_over()):
        print(f"ds-runtime: {sentence}", file=sys.stderr)


def _lock(path: str, text: str, assembly: Assembly) -> int:
    try:
        Path(path).write_text(text + "\n")
    except OSError as e:
        raise unwritable(f"plan lock {path}", e, "a file in a folder that is yours") from e
    print(f"plan {assembly.plan.digest()} written to {path}; hold to it with --plan {path}")
    return 0


def _diff(left: str, right: str) -> int:
    from ds_runtime.assembly.plan import difference, read_plan

    said = difference(read_plan(left), read_plan(right))
    print("\n".join(f"- {line}" for line in said) if said else "the plans are equal")
    return int(bool(said))


def _explained(assembly: Assembly, op: str, as_json: bool) -> str:
    """Every kernel of `op`, then which better ones are near, and what brings them."""
    from ds_runtime.assembly.explain import Explained

    found = Explained(assembly, op)
    rows, misses = list(found.rows()), found.misses()
    if as_json:
        rules = [{"rule": ruling.rule, "why": ruling.why} for ruling in assembly.rulings]
        found_misses = [asdict(m) for m in misses]
        return json.dumps({"op": op, "kernels": rows, "misses": found_misses, "rules": rules})
    lines = [f"{op}: {OPS[op].summary}"]
    for row in rows:
        lines.append(f"  {row['kernel']} (rank {row['rank']})")
        for said, sites in row["verdicts"].items():
            where = f" at {', '.join(sites)}" if len(row["verdicts"]) > 1 else ""
            lines.append(f"    {said}{where}")
        if not row["verdicts"]:
            lines.append("    this model has no site for it")
    lines += [f"decided again by rule {r.rule}: {r.why}" for r in assembly.rulings]
    lines.append("nearest misses:" if misses else "no setting brings a better kernel")
    for miss in misses:
        lines.append(f"  {miss}")
        lines.append(f"    instead of {miss.chosen} at {', '.join(miss.sites)}")
    return "\n".join(lines)
