"""`ds-runtime conform`: a plugin's kernels and loaders held against their contracts, timed, or
tabulated."""

from __future__ import annotations

import json
import sys
from argparse import Namespace, _SubParsersAction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_runtime.cli.outputs import check_output
from ds_runtime.errors import ConfigError, UnsupportedError
from ds_runtime.ops.table import OPS

if TYPE_CHECKING:
    from ds_runtime.platform.contract import GraphBackend, Platform
    from ds_runtime.plugins.manager import Plugins
    from ds_runtime_kit.conform import Verdict

MODES = ("test", "perf", "support")
RANKS_PER_CORE = 4  # each is a process: a mistyped number would end the machine
CHECKS_HELP = (
    "samples, weights, rows, memory, codes, capture, honesty; of loaders: accepts, values, slices, "
    "shards, stacks; of layouts: blocks, bytes, copies, exports, host"
)


def add(subcommands: _SubParsersAction[Any]) -> None:
    """Register the verb."""
    parser = subcommands.add_parser(
        "conform",
        help="hold a plugin's kernels and loaders against their contracts",
        description="Run every kernel of the named plugins (or of all) on the device that is here. "
        "Each runs over its op's samples, shapes and formats, against the reference in float64. "
        "Samples of the plugins' loaders are read in every cut. The result is a receipt that "
        "ds-runtime plan shows. Mode perf times kernels. Mode support says which op, kernel and "
        "format runs on which described device.",
    )
    parser.add_argument("plugin", nargs="*", help="names, as ds-runtime plugins lists them")
    parser.add_argument(
        "--mode", choices=MODES, default="test", help="what to do with the kernels (default: test)"
    )
    parser.add_argument(
        "--op", nargs="+", default=[], metavar="OP", help="only these ops, or loader, or layout"
    )
    parser.add_argument(
        "--kernel",
        nargs="+",
        default=[],
        metavar="K",
        help="only these kernels, loaders or layouts",
    )
    parser.add_argument("--check", nargs="+", default=[], metavar="C", help=f"of {CHECKS_HELP}")
    parser.add_argument(
        "--ranks",
        type=int,
        metavar="N",
        help="instead, run the operations of groups of ranks in N processes, a device each",
    )
    parser.add_argument("--case", metavar="FILE", help="replay a case that bisect recorded")
    parser.add_argument(
        "--platform", default="auto", metavar="X", help="platform to run on (default: auto)"
    )
    parser.add_argument("--plugins", metavar="A,B", help="load only these plugins")
    parser.add_argument(
        "--recorder",
        action="store_true",
        help="where the platform captures nothing, record torch's ops: for kernels in torch alone",
    )
    parser.add_argument("--receipts", metavar="DIR", help="folder for receipts (default: your own)")
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.set_defaults(run=run, looks=True)


def run(args: Namespace) -> int:
    """Test, time or tabulate; 1 if a kernel does not conform."""
    from ds_runtime.plugins.manager import load_plugins
    from ds_runtime.plugins.select_platform import select_platform

    names = None if args.plugins is None else [n.strip() for n in args.plugins.split(",")]
    if args.ranks is not None:
        _check_alone(args)
    plugins = load_plugins(names)
    if args.mode == "support":
        return _support(plugins, args)
    if args.mode == "perf":
        return _perf(plugins, args)
    if args.ranks is not None:
        return _ranks(plugins, names, args)
    platform, _ = select_platform(plugins, args.platform)
    return _case(plugins, platform, args) if args.case else _test(plugins, platform, args)


def _backend(platform: Platform, args: Namespace) -> GraphBackend | None:
    """What captures calls; None where nothing does. ConfigError if it was asked for by name."""
    if platform.captures:
        return platform.graph_backend(0)
    if args.recorder:
        from ds_runtime_kit.checks.replay import ReplayBackend

        return ReplayBackend()
    if "capture" in args.check:
        raise ConfigError(f"--check capture: {_cannot_capture(platform)}")
    return None


def _cannot_capture(platform: Platform) -> str:
    return f"platform {platform.name} captures nothing; --recorder records torch's ops instead"


def _test(plugins: Plugins, platform: Platform, args: Namespace) -> int:
    from ds_runtime.assembly import receipts
    from ds_runtime_kit import conform
    from ds_runtime_kit.selection import plugins_of

    backend = _backend(platform, args)
    able = [c for c in conform.ALL_CHECKS if c != "capture" or backend is not None]
    wanted = conform.Wanted(args.op, args.kernel, args.check or able)
    device, copies = platform.device_info(0), platform.page_copies(0)
    whole = not (args.op or args.kernel or args.check)
    where = Path(args.receipts) if args.receipts else receipts.folder()
    names, made = plugins_of(plugins, args.plugin), []
    for name in names if whole else ():
        if name != "reference":
            path = where / f"{name}-{device.arch}.json"
            check_output(path, "--receipts", "a folder that is yours")
    for name in names:
        found = []
        for verdict in conform.verdicts(plugins, device, name, wanted, backend, copies):
            found.append(verdict)
            if not args.json:
                print(_line(verdict), flush=True)
        if not found:
            continue
        made.append(conform.receipt(plugins.reports[name], platform, device, found, able))
        if whole and name != "reference":  # part of the truth is no receipt
            path = where / f"{name}-{device.arch}.json"
            receipts.write(made[-1], path)
            if not args.json:
                print(f"receipt written to {path}")
    if not made:
        asked = " ".join(["conform", *args.plugin, *args.op, *args.kernel])
        raise ConfigError(f"{asked}: no such kernel or loader is offered here")
    if args.json:
        print(json.dumps(made, indent=1))
    elif whole and backend is None and any(k["op"] in OPS for r in made for k in r["kernels"]):
        print(f"capture was not asked: {_cannot_capture(platform)}")
    return int(any(kernel["failures"] for receipt in made for kernel in receipt["kernels"]))


def _line(verdict: Verdict) -> str:
    head = f"{verdict.op:<14} {verdict.name:<28}"
    if verdict.skipped:
        return f"{head} not here: {verdict.skipped}"
    if not verdict.results:
        return f"{head} has nothing that this would ask"
    asked: dict[str, int] = {}
    for r in verdict.results:
        asked[r.check] = asked.get(r.check, 0) + 1
    counts = ", ".join(f"{name} {n}" for name, n in asked.items())
    lines = [f"{head} {'FAILED' if verdict.failures else 'conforms'} ({counts})"]
    seen = set()
    for r in verdict.failures:
        if (r.check, r.failure) not in seen:
            seen.add((r.check, r.failure))
            indented = r.failure.rstrip().replace("\n", "\n    ")
            lines.append(f"  {r.check}, case {r.case!r} in {r.dtype}: {indented}")
    return "\n".join(lines)


def _check_alone(args: Namespace) -> None:
    """Raise ConfigError for what says nothing of a communicator, beside `--ranks`."""
    if args.ranks < 2:
        raise ConfigError(f"--ranks {args.ranks}: a group has at least 2 ranks")
    about = f"with --ranks {args.ranks}: only a platform's communicator is tested"
    if args.plugin:
        named = args.plugin[0] if len(args.plugin) == 1 else "X"
        raise ConfigError(f'"{" ".join(args.plugin)}" {about}; give --platform {named}')
    given = {
        "--mode": args.mode if args.mode != "test" else None,
        "--op": " ".join(args.op),
        "--kernel": " ".join(args.kernel),
        "--check": " ".join(args.check),
        "--case": args.case,
        "--receipts": args.receipts,
    }
    for flag, value in given.items():
        if value:
            raise ConfigError(f"{flag} {value} {about}; leave {flag} out")
    if args.recorder:
        raise ConfigError(f"--recorder {about}; leave it out")


def _ranks(plugins: Plugins, names: list[str] | None, args: Namespace) -> int:
    """Group operations; 1 if one of them is wrong."""
    from ds_runtime.config import EngineConfig
    from ds_runtime.plugins.select_platform import select_platform
    from ds_runtime_bench.ops.devices import check_room
    from ds_runtime_kit.ranks import runs

    platform, _ = select_platform(plugins, args.platform)
    platform.configure(EngineConfig())
    check_room(platform, args.ranks, RANKS_PER_CORE)
    found = list(runs.check_ranks(args.platform, names, args.ranks))
    lines = [json.dumps(runs.as_dict(found), indent=1)] if args.json else runs.as_lines(found)
    print("\n".join(lines))
    return int(any(one.failure for one in found))


def _case(plugins: Plugins, platform: Platform, args: Namespace) -> int:
    from ds_runtime_kit import conform

    name = args.kernel[0] if args.kernel else ""
    result = conform.replay(plugins, platform.device_info(0), args.case, name)
    said = result.failure or f"conforms: error {result.error:.3g} within {result.tolerance:.3g}"
    print(f"{result.op} {result.kernel}, case {result.case!r} in {result.dtype}: {said}")
    return int(not result.ok)


def _perf(plugins: Plugins, args: Namespace) -> int:
    """`bench ops` over all kernels of the ops that the named plugins offer."""
    from ds_runtime.config import EngineConfig
    from ds_runtime_bench.ops import measure, report
    from ds_runtime_kit.selection import check_names, plugins_of

    check_names("--op", args.op)
    wanted = plugins_of(plugins, args.plugin)
    names = None if args.plugins is None else tuple(n.strip() for n in args.plugins.split(","))
    config = EngineConfig(platform=args.platform, plugins=names)
    assembly = measure.assembled(config, ("platform",), None, "")
    owners = assembly.plugins.owners
    offered = {k.op.name for k in assembly.offers.kernels if owners[k.provider] in wanted}
    only = args.op or sorted(offered)
    measurement = measure.Measurement(assembly, 512, None, 0.1)
    figures = list(measurement.figures(only, (1, 16), ["all"]))
    if args.json:
        print(json.dumps(report.report(measurement, figures)))
    else:
        print(report.render_ceilings(measurement.ceilings))
        print("\n".join(map(report.render, figures)))
    return int(any(f.error for f in figures))


def _support(plugins: Plugins, args: Namespace) -> int:
    from ds_runtime_kit import support
    from ds_runtime_kit.selection import check_names, plugins_of

    check_names("--op", args.op)
    wanted = plugins_of(plugins, args.plugin)
    rows = [r for r in support.matrix(plugins, wanted) if not args.op or r.op in args.op]
    if not rows:
        asked = " ".join(["conform --mode support", *args.plugin, *args.op])
        raise UnsupportedError(f"{asked}: no such kernel serves a described device")
    sys.stdout.write(support.as_json(rows) if args.json else support.as_markdown(rows, plugins))
    return 0
