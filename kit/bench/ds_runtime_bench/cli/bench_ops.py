"""`ds-runtime bench ops`: flags and the run."""

from __future__ import annotations

from argparse import Namespace, _SubParsersAction
from typing import Any

from ds_runtime.cli.flags import add_flags, build, size
from ds_runtime.cli.parser import near
from ds_runtime.config import EngineConfig
from ds_runtime.errors import ConfigError
from ds_runtime_bench.cli.show import show
from ds_runtime_bench.shapes import DTYPES, SHAPES

OPS_ABOUT = """\
Times every distinct (op, local shape, weight format) of a model on this device, with random inputs.
It compares them with the read bandwidth and the matmul rates, which it measures first.

If the model does not fit into the last-level cache, calls take turns over copies of their weights,
or of the cache for decode attention. All copies together are twice as large as the last-level
cache, so that each call reads them from memory, as in the model. A figure says if --memory was too
small for that. Only as many experts are made as fit. Activations stay in caches, as in the model.
"""


def add(kinds: _SubParsersAction[Any]) -> None:
    """Register the kind."""
    about = "time, rates and shares of the device's limits, kernel by kernel"
    parser = kinds.add_parser("ops", help=about, description=OPS_ABOUT)
    parser.add_argument("--shape", choices=tuple(SHAPES), help="of a model, instead of --model")
    parser.add_argument(
        "--weights",
        choices=DTYPES,
        help="with --shape: as stored (bfloat16)",
    )
    parser.add_argument("--op", nargs="+", default=[], metavar="OP", help="only these")
    parser.add_argument(
        "--tokens",
        type=int,
        nargs="+",
        default=[1, 4, 16, 512],
        metavar="N",
        help="rows of a call, one measurement each (default: 1 4 16 512)",
    )
    parser.add_argument(
        "--kernels",
        nargs="+",
        default=[],
        metavar="NAME",
        help="more kernels than those of the plan, marked *: names, or 'all' that accept the site",
    )
    parser.add_argument(
        "--context", type=int, default=512, metavar="N", help="cached tokens (default: 512)"
    )
    parser.add_argument(
        "--memory", type=size, metavar="SIZE", help="for copies (default: a quarter of the free)"
    )
    parser.add_argument(
        "--seconds", type=float, default=0.3, metavar="S", help="per figure (default: 0.3)"
    )
    parser.add_argument(
        "--bytes", action="store_true", help="what a decode step must read; times nothing"
    )
    parser.add_argument("--json", action="store_true", help="one JSON line")
    add_flags(parser, EngineConfig, spaces=True)
    parser.set_defaults(run=run_ops)


def run_ops(args: Namespace) -> int:
    """Measure and print, figure by figure unless as JSON."""
    for flag, least in (("tokens", min(args.tokens)), ("context", args.context)):
        if least < 1:
            raise ConfigError(f"--{flag} {least}: must be at least 1")
    if args.seconds <= 0:
        raise ConfigError(f"--seconds {args.seconds}: must be above 0")
    if args.memory == 0:
        raise ConfigError("--memory 0: must be above 0; leave it out for a quarter of the free")
    config, explicit = build(EngineConfig, args)
    from ds_runtime_bench.ops import measure, report
    from ds_runtime_bench.ops.step_work import step_bytes

    measure.check_names(args.op)
    assembly = measure.assembled(config, explicit, args.shape, args.weights)
    known = sorted({"all", *(k.name for k in assembly.offers.kernels)})
    for name in args.kernels:
        if name not in known:
            raise ConfigError(f"--kernels {name}: no plugin offers it{near(name, known)}")
    measure.check_kernels(assembly, args.op, args.kernels)
    if args.context > assembly.model.max_positions:
        raise ConfigError(
            f"--context {args.context}: {assembly.plan.model} ends at "
            f"{assembly.model.max_positions} tokens; give at most that"
        )
    if args.bytes:
        steps = step_bytes(assembly, args.tokens, args.context, args.op)
        return show(
            report.bytes_report(assembly, steps), args.json, lambda _: report.render_bytes(steps)
        )
    measurement = measure.Measurement(assembly, args.context, args.memory, args.seconds)
    if not args.json:
        print(report.render_ceilings(measurement.ceilings), flush=True)
        print(f"attention over {args.context:,} cached tokens of each sequence", flush=True)
        if measurement.stays_in_cache:
            print("the model fits the cache and stays there: its ops may read faster than memory")
    figures = []
    for figure in measurement.figures(args.op, args.tokens, args.kernels):
        figures.append(figure)
        if not args.json:
            print(report.render(figure), flush=True)
    if args.json:
        show(report.report(measurement, figures), True, str)
    elif warning := report.render_neighbours(measurement.neighbours.share()):
        print(warning)
    return 1 if any(f.error and f.bound for f in figures) else 0
