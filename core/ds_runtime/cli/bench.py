"""`ds-runtime bench`: figures of speed, accuracy and host cost."""

from __future__ import annotations

import json
import sys
from argparse import BooleanOptionalAction, Namespace, _SubParsersAction
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from ds_runtime.bench.shapes import DTYPES, SHAPES
from ds_runtime.cli.flags import add_flags, build, size
from ds_runtime.cli.parser import Parser
from ds_runtime.config import EngineConfig
from ds_runtime.errors import ConfigError


def add(subcommands: _SubParsersAction[Any]) -> None:
    """Register the verb and its kinds."""
    parser = subcommands.add_parser("bench", help="measure speed, accuracy and host cost")
    kinds = parser.add_subparsers(metavar="KIND", required=True, parser_class=Parser)
    _one_batch(kinds)
    _accuracy(kinds)
    _host(kinds)
    _make_checkpoint(kinds)


def _one_batch(kinds: _SubParsersAction[Any]) -> None:
    parser = kinds.add_parser("one-batch", help="prefill and decode rates of one batch")
    parser.add_argument("--batch-size", type=int, nargs="+", default=[1], metavar="N")
    parser.add_argument("--input-len", type=int, default=512, metavar="N", help="(default: 512)")
    parser.add_argument("--output-len", type=int, default=32, metavar="N", help="(default: 32)")
    parser.add_argument("--runs", type=int, default=3, metavar="N", help="(default: 3)")
    parser.add_argument("--json", action="store_true", help="one JSON line")
    add_flags(parser, EngineConfig, "engine")
    parser.set_defaults(run=run_one_batch)


def _host(kinds: _SubParsersAction[Any]) -> None:
    parser = kinds.add_parser("host", help="host time per step, on the null platform")
    parser.add_argument("--running", type=int, default=64, metavar="N", help="(default: 64)")
    parser.add_argument("--input-len", type=int, default=512, metavar="N", help="(default: 512)")
    parser.add_argument("--steps", type=int, default=200, metavar="N", help="(default: 200)")
    parser.add_argument("--json", action="store_true", help="one JSON line")
    given = ("platform", "plugins", "max_running")  # set by the measurement itself
    names = [f.name for f in fields(EngineConfig) if f.name not in given]
    add_flags(parser, EngineConfig, "engine", only=names)
    parser.set_defaults(run=run_host)


def _accuracy(kinds: _SubParsersAction[Any]) -> None:
    parser = kinds.add_parser("accuracy", help="scores on the demo model's held-out set")
    parser.add_argument("--limit", type=int, metavar="N", help="only N entries of each kind")
    parser.add_argument(
        "--mtp",
        action=BooleanOptionalAction,
        default=True,
        help="also compare the MTP layer's drafts (default: on)",
    )
    parser.add_argument("--json", action="store_true", help="one JSON line")
    add_flags(parser, EngineConfig, "engine")
    parser.set_defaults(run=run_accuracy)


def _make_checkpoint(kinds: _SubParsersAction[Any]) -> None:
    parser = kinds.add_parser("make-checkpoint", help="write a random checkpoint of a real shape")
    parser.add_argument("out", metavar="DIR", help="folder to write")
    parser.add_argument("--shape", default="tiny-v3", choices=tuple(SHAPES), help="(%(default)s)")
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES, help="(%(default)s)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="(default: 0)")
    parser.add_argument("--shard-size", type=size, default=5 * 10**9, metavar="SIZE", help="(5GB)")
    parser.set_defaults(run=run_make_checkpoint)


def settings(args: Namespace) -> dict[str, Any]:
    """The EngineConfig fields that the user set, checked."""
    config, explicit = build(EngineConfig, args)
    return {f.name: getattr(config, f.name) for f in fields(config) if f.name in explicit}


def run_one_batch(args: Namespace) -> int:
    """Measure and print."""
    given = settings(args)
    from ds_runtime.bench import one_batch

    report = one_batch.run(given, args.batch_size, args.input_len, args.output_len, args.runs)
    return _show(report, args.json, one_batch.render)


def run_accuracy(args: Namespace) -> int:
    """Score and print."""
    given = settings(args)
    from ds_runtime.bench import accuracy

    return _show(accuracy.run(given, args.limit, args.mtp), args.json, accuracy.render)


def run_host(args: Namespace) -> int:
    """Measure and print."""
    given = settings(args)
    from ds_runtime.bench import host

    return _show(host.run(given, args.running, args.input_len, args.steps), args.json, host.render)


def run_make_checkpoint(args: Namespace) -> int:
    """Write the checkpoint."""
    from ds_runtime.bench.checkpoint import make_checkpoint

    out = Path(args.out)
    try:
        if out.exists() and not (out.is_dir() and not any(out.iterdir())):
            raise ConfigError(
                f"make-checkpoint {out}: exists and is not an empty folder; name another"
            )
        make_checkpoint(out, args.shape, args.dtype, args.seed, args.shard_size, progress=True)
    except OSError as e:
        raise ConfigError(f"make-checkpoint {out}: cannot be written: {e}") from e
    print(f"{out}: {args.shape} in {args.dtype}; next: ds-runtime bench one-batch --model {out}")
    return 0


def _show(report: dict[str, Any], as_json: bool, render: Callable[[dict[str, Any]], str]) -> int:
    report["command"] = " ".join(["ds-runtime", *sys.argv[1:]])
    print(json.dumps(report) if as_json else render(report))
    return 0
