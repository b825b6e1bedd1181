"""`ds-runtime tune`: what this device's ops and collectives take, for predictions of `plan`."""

from __future__ import annotations

import sys
import time
from argparse import Namespace, _SubParsersAction
from dataclasses import replace
from pathlib import Path
from typing import Any

from ds_runtime.cli.flags import add_flags, build
from ds_runtime.cli.outputs import check_output
from ds_runtime.cli.parser import Parser
from ds_runtime.config import EngineConfig
from ds_runtime.errors import ConfigError
from ds_runtime.ops.table import OPS
from ds_runtime_bench.shapes import DTYPES, SHAPES

COSTS_ABOUT = """\
Times the kernels of this device one by one, at widths like DeepSeek's, and writes what they took to
a file. `ds-runtime plan` predicts steps from it. No model is run. It takes about two minutes.
"""
COMM_ABOUT = """\
Times the collectives of --ranks ranks of this machine, each on a device of its own, by kind and
size, and adds them to a file of `tune costs`.
"""
HOST_ABOUT = """\
Times what the engine itself does on the host for a decode step, by requests, and adds it to a file
of `tune costs`. No device is used for it. It takes about a minute.
"""
_COMM = ("platform", "plugins")  # collectives have bytes, and no threads of their own
_COSTS = (*_COMM, "dtype", "threads")


def add(subcommands: _SubParsersAction[Any]) -> None:
    """Register the verb and its kinds."""
    parser = subcommands.add_parser("tune", help="measure what plan predicts steps from")
    parser.set_defaults(looks=True)
    kinds = parser.add_subparsers(metavar="KIND", required=True, parser_class=Parser)
    costs = kinds.add_parser("costs", help="ops, one by one", description=COSTS_ABOUT)
    _common(costs, _COSTS)
    costs.add_argument(
        "--shapes", nargs="+", default=[], metavar="SHAPE", choices=tuple(SHAPES), help="of models"
    )
    costs.add_argument(
        "--weights",
        nargs="+",
        default=["fp8"],
        choices=DTYPES,
        help="weight formats to time (default: fp8)",
    )
    costs.add_argument("--op", nargs="+", default=[], metavar="OP", help="only these")
    costs.add_argument(
        "--rows", nargs="+", type=int, default=[], metavar="N", help="of calls (default: 1 to 8192)"
    )
    costs.add_argument(
        "--seconds", type=float, default=0.02, metavar="S", help="per point (default: 0.02)"
    )
    costs.add_argument(
        "--add", action="store_true", help="measure a part, and keep all else that the file holds"
    )
    costs.set_defaults(run=run_costs)
    comm = kinds.add_parser("comm", help="collectives", description=COMM_ABOUT)
    _common(comm, _COMM)
    comm.add_argument(
        "--ranks", type=int, default=2, metavar="N", help="processes, a device each (default: 2)"
    )
    comm.set_defaults(run=run_comm)
    host = kinds.add_parser("host", help="the engine's own work", description=HOST_ABOUT)
    _common(host, _COMM)
    host.add_argument(
        "--requests",
        nargs="+",
        type=int,
        default=[],
        metavar="N",
        help="in a step, one measurement each (default: 1 to 1024)",
    )
    host.set_defaults(run=run_host)


def _common(parser: Any, flags: tuple[str, ...]) -> None:
    parser.add_argument(
        "--out", metavar="FILE", help="the file of costs (default: where plan looks for it)"
    )
    add_flags(parser, EngineConfig, only=flags)


def run_costs(args: Namespace) -> int:
    """Measure and write."""
    if args.seconds <= 0:
        raise ConfigError(f"--seconds {args.seconds}: must be above 0")
    for rows in args.rows:
        if rows < 1:
            raise ConfigError(f"--rows {rows}: must be at least 1")
    config, explicit = build(EngineConfig, args)
    from ds_runtime_bench.ops import measure, tune

    measure.check_names(args.op)
    began = time.monotonic()

    def tell(said: str) -> None:
        print(f"{time.monotonic() - began:6.1f} s  {said}", file=sys.stderr, flush=True)

    tuning = tune.Tuning(args.seconds, args.rows or tune.ROWS, tell)
    smallest = tune.assembled(config, explicit, tune.Geometry("tiny-v3"), "bfloat16")
    device = smallest.device.name
    out = _file(args, device)
    whole = _to_add_to(args, out, smallest) if args.add else None
    known = _known(out, device) if out.exists() else None
    if known is None and args.out is None:
        from ds_runtime.measured.found import costs_of

        known = costs_of(smallest.plugins, device)  # the file hides what a plugin ships
    if not args.add and _replaces_more(args, known):
        raise ConfigError(
            f"{out}: holds costs; a part of them would replace all: give --out FILE, or --add"
        )
    costs = None
    for weights in dict.fromkeys(args.weights):
        for geometry in _geometries(config, explicit, args.shapes, weights):
            only = tuple(op for op in args.op or OPS if not geometry.only or op in geometry.only)
            if not only:
                continue
            assembly = tune.assembled(config, explicit, geometry, weights)
            tell(f"{geometry.shape} in {weights}, tp {assembly.mesh.tp}, ep {assembly.mesh.ep}")
            tuning.add(assembly, only, geometry.seen)
            costs = tuning.costs()  # what is known so far, should this be stopped
            if costs.kernels and whole is not None:
                whole.with_kernels(costs.kernels).write(out)
            elif costs.kernels:
                kept = costs if known is None else costs.with_collectives(known.collectives)
                replace(kept, host=() if known is None else known.host).write(out)
    if costs is None or not costs.kernels:
        raise ConfigError(
            "tune costs: no kernel could be timed; nothing was written. Give other --op or --rows"
        )
    points = sum(len(cost.points) for cost in costs.kernels.values())
    print(
        f"{out}: {points} points of {len(costs.kernels)} kernels on {costs.device} in "
        f"{time.monotonic() - began:.0f} s; next: ds-runtime tune comm --ranks N --out {out}"
    )
    return 0


def _replaces_more(args: Namespace, known: Any) -> bool:
    """Whether a part alone is to be measured, and would stand for costs that nobody named."""
    part = bool(args.op or args.rows or args.shapes)
    return part and args.out is None and known is not None


def _file(args: Namespace, device: str) -> Path:
    from ds_runtime.measured.found import own

    out = own(device) if args.out is None else Path(args.out)
    check_output(out, "--out")
    return out


def _geometries(config: EngineConfig, explicit: Any, shapes: list[str], weights: str) -> Any:
    from ds_runtime_bench.ops import tune

    smallest = tune.assembled(config, explicit, tune.Geometry("tiny-v3"), weights)
    return tune.geometries(shapes, smallest.platform.own_memory)


def _known(path: Path, device: str) -> Any:
    """The costs in a file that is to be added to."""
    from ds_runtime.measured.costs import Costs

    found = Costs.read(path)
    if found.device != device:
        raise ConfigError(
            f"--out {path}: holds costs of {found.device}, and this is {device}; name another file"
        )
    return found


def _to_add_to(args: Namespace, out: Path, assembly: Any) -> Any:
    """The costs in the file, or else those that a plugin ships for the device."""
    from ds_runtime.measured.found import costs_of

    device = assembly.device.name
    if out.exists():
        return _known(out, device)
    shipped = None if args.out is not None else costs_of(assembly.plugins, device)
    if shipped is None:
        raise ConfigError(
            f"costs {out}: cannot be read: there is no such file; run ds-runtime tune costs"
            f"{'' if args.out is None else f' --out {out}'} first"
        )
    return shipped


def _served(costs: Any, ranks: int) -> str:
    """Which kind of all-reduce engines will have for which size."""
    from ds_runtime.measured import sums

    sizes = sums.of(costs, ranks)
    if sizes is None:
        return "this platform's communicator has the library's all-reduce alone"
    return f"all-reduce by size: {sizes}"


def run_comm(args: Namespace) -> int:
    """Measure and add to the file."""
    if args.ranks < 2:
        raise ConfigError(f"--ranks {args.ranks}: must be at least 2")
    config, explicit = build(EngineConfig, args)
    from ds_runtime.engine.process.entry import set_environment
    from ds_runtime_bench.ops import comm, tune
    from ds_runtime_bench.ops.devices import check_room

    assembly = tune.assembled(config, explicit, tune.Geometry("tiny-v3"), "bfloat16")
    check_room(assembly.platform, args.ranks)
    out = _file(args, assembly.device.name)
    costs = _to_add_to(args, out, assembly)
    set_environment(assembly.platform.process_env())
    found = comm.measure(assembly.platform, args.ranks)
    costs = costs.without_sums(args.ranks).with_collectives(found)
    costs.write(out)
    for kind, curves in found.items():
        said = ", ".join(
            f"{size >> 10} KiB {took * 1e6:.1f}" for size, took in curves[args.ranks][::3]
        )
        print(f"{kind} of {args.ranks} ranks, µs: {said}")
    print(f"{out}: collectives of {args.ranks} ranks added; {_served(costs, args.ranks)}")
    return 0


def run_host(args: Namespace) -> int:
    """Measure and add to the file."""
    for count in args.requests:
        if count < 1:
            raise ConfigError(f"--requests {count}: must be at least 1")
    config, explicit = build(EngineConfig, args)
    from ds_runtime_bench.ops import host_steps, tune

    assembly = tune.assembled(config, explicit, tune.Geometry("tiny-v3"), "bfloat16")
    out = _file(args, assembly.device.name)
    costs = _to_add_to(args, out, assembly)
    found = host_steps.measure(args.requests or host_steps.REQUESTS)
    replace(costs, host=found).write(out)
    said = ", ".join(f"{count}: {seconds * 1e3:.2f}" for count, seconds in found)
    print(f"the engine's work for a decode step, by requests, ms: {said}")
    print(f"{out}: the engine's work on the host added")
    return 0
