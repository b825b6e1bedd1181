"""`ds-runtime bench`: figures of speed, accuracy and host cost."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, BooleanOptionalAction, Namespace, _SubParsersAction
from dataclasses import fields
from pathlib import Path
from typing import Any

from ds_runtime.cli.flags import add_flags, build, size
from ds_runtime.cli.known import BATCH
from ds_runtime.cli.parser import Parser
from ds_runtime.config import EngineConfig
from ds_runtime.config.spelling import add_spellings
from ds_runtime.errors import ConfigError, unwritable
from ds_runtime_bench.cli import bench_ops, bench_serving
from ds_runtime_bench.cli.show import show
from ds_runtime_bench.shapes import DTYPES, SHAPES, own_dtype


def add(subcommands: _SubParsersAction[Any]) -> None:
    """Register the verb and its kinds."""
    parser = subcommands.add_parser("bench", help="measure speed, serving, accuracy and host cost")
    parser.set_defaults(looks=True)
    kinds = parser.add_subparsers(metavar="KIND", required=True, parser_class=Parser)
    _one_batch(kinds)
    _speculative(kinds)
    bench_serving.add(kinds)
    _accuracy(kinds)
    _host(kinds)
    bench_ops.add(kinds)
    _compare(kinds)
    _make_checkpoint(kinds)
    _make_gguf(kinds)


def _batch_sizes(parser: ArgumentParser, *default: int) -> None:
    parser.add_argument(
        "--batch-size",
        type=int,
        nargs="+",
        default=list(default),
        metavar="N",
        help=f"requests in a step, one measurement each (default: {' '.join(map(str, default))})",
    )


def _one_batch(kinds: _SubParsersAction[Any]) -> None:
    parser = kinds.add_parser("one-batch", help="prefill and decode rates of one batch")
    _batch_sizes(parser, 1)
    parser.add_argument(
        "--input-len",
        "--input",
        type=int,
        default=512,
        metavar="N",
        help="tokens of each prompt (default: 512)",
    )
    parser.add_argument(
        "--output-len",
        "--output",
        type=int,
        default=32,
        metavar="N",
        help="tokens of each answer (default: 32)",
    )
    add_spellings([parser], BATCH)
    parser.add_argument(
        "--runs",
        type=int,
        default=3,
        metavar="N",
        help="measurements, of which the median counts (default: 3)",
    )
    parser.add_argument("--json", action="store_true", help="one JSON line")
    add_flags(parser, EngineConfig, spaces=True)
    parser.set_defaults(run=run_one_batch)


def _speculative(kinds: _SubParsersAction[Any]) -> None:
    parser = kinds.add_parser(
        "speculative", help="decode rates with drafts and without, and the best"
    )
    _batch_sizes(parser, 1)
    parser.add_argument(
        "--steps",
        type=int,
        nargs="+",
        default=[1, 2, 3],
        metavar="N",
        help="drafts in a row (default: 1 2 3)",
    )
    parser.add_argument(
        "--topk", type=int, nargs="+", default=[1], metavar="N", help="1: chains (default: 1)"
    )
    parser.add_argument(
        "--draft-tokens",
        type=int,
        nargs="+",
        default=[],
        metavar="N",
        help="that trees verify, the last one drawn included (default: whole trees)",
    )
    parser.add_argument(
        "--input-len", type=int, default=512, metavar="N", help="of random prompts (default: 512)"
    )
    parser.add_argument(
        "--output-len",
        type=int,
        default=128,
        metavar="N",
        help="tokens of each answer (default: 128)",
    )
    parser.add_argument(
        "--runs",
        type=int,
        default=3,
        metavar="N",
        help="measurements, of which the median counts (default: 3)",
    )
    parser.add_argument(
        "--simulate-acceptance",
        type=float,
        metavar="P",
        help="take each draft for right with this probability: for random checkpoints",
    )
    parser.add_argument("--json", action="store_true", help="one JSON line")
    add_flags(parser, EngineConfig, spaces=True)
    parser.set_defaults(run=run_speculative)


COMPARE_ABOUT = """\
Times this runtime and another engine in turns, on the same machine and with the same shapes. It
times decode steps of each batch size after prompts of --input-len tokens, and one prompt's prefill.

llama.cpp is measured by its own llama-bench and llama-batched-bench. They read a GGUF file of any
quantisation (`bench make-gguf` writes one from a checkpoint). transformers reads the checkpoint
itself. Both engines must fit into memory together.
"""


def _compare(kinds: _SubParsersAction[Any]) -> None:
    about = "compare rates with another engine, turn by turn"
    parser = kinds.add_parser("compare", help=about, description=COMPARE_ABOUT)
    parser.add_argument(
        "--engine", required=True, choices=("llama.cpp", "transformers"), help="the other engine"
    )
    parser.add_argument(
        "--peer-model", metavar="PATH", help="its GGUF file or folder (transformers: --model)"
    )
    parser.add_argument("--bin", metavar="DIR", help="folder of its programs (default: PATH)")
    parser.add_argument(
        "--rounds", type=int, default=5, metavar="N", help="turns of each engine (default: 5)"
    )
    _batch_sizes(parser, 1, 4, 16)
    parser.add_argument(
        "--input-len", type=int, default=16, metavar="N", help="tokens of each prompt (default: 16)"
    )
    parser.add_argument(
        "--output-len", type=int, default=32, metavar="N", help="decode steps (default: 32)"
    )
    parser.add_argument(
        "--prefill", type=int, default=512, metavar="N", help="tokens of its prompt; 0: none (512)"
    )
    parser.add_argument(
        "--pause", action="store_true", help="wait for Enter before each round is timed"
    )
    parser.add_argument("--json", action="store_true", help="one JSON line")
    add_flags(parser, EngineConfig, spaces=True)
    parser.set_defaults(run=run_compare)


def _host(kinds: _SubParsersAction[Any]) -> None:
    parser = kinds.add_parser("host", help="host time per step, on the null platform")
    parser.add_argument(
        "--running", type=int, default=64, metavar="N", help="requests in a step (default: 64)"
    )
    parser.add_argument(
        "--input-len",
        type=int,
        default=512,
        metavar="N",
        help="tokens of each prompt (default: 512)",
    )
    parser.add_argument(
        "--steps", type=int, default=200, metavar="N", help="decode steps to time (default: 200)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON line")
    given = ("platform", "plugins", "max_running_requests")  # set by the measurement itself
    names = [f.name for f in fields(EngineConfig) if f.name not in given]
    add_flags(parser, EngineConfig, only=names)
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
    about = "also ask for tool calls after prose, in prompts of N tokens"
    parser.add_argument("--behind", type=int, nargs="+", default=[], metavar="N", help=about)
    about = "also ask for keys that are planted in prose, in prompts of N tokens"
    parser.add_argument("--planted", type=int, nargs="+", default=[], metavar="N", help=about)
    parser.add_argument("--json", action="store_true", help="one JSON line")
    add_flags(parser, EngineConfig, spaces=True)
    parser.set_defaults(run=run_accuracy)


def _make_checkpoint(kinds: _SubParsersAction[Any]) -> None:
    parser = kinds.add_parser("make-checkpoint", help="write a random checkpoint of a real shape")
    parser.add_argument("out", metavar="DIR", help="folder to write")
    parser.add_argument(
        "--shape",
        default="tiny-v3",
        choices=tuple(SHAPES),
        help="whose widths and layers (default: %(default)s)",
    )
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        help="how weights are stored (default: bfloat16, and fp4 for DeepSeek-V4's shapes)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of the random weights (default: 0)"
    )
    parser.add_argument(
        "--shard-size",
        type=size,
        default=5 * 10**9,
        metavar="SIZE",
        help="most bytes of a file (default: 5GB)",
    )
    parser.add_argument(
        "--config-only",
        action="store_true",
        help="write no weights: --load-format dummy makes them on the device",
    )
    parser.set_defaults(run=run_make_checkpoint)


def _make_gguf(kinds: _SubParsersAction[Any]) -> None:
    about = "write a checkpoint's weights as a GGUF file, to measure engines that read that"
    parser = kinds.add_parser("make-gguf", help=about)
    parser.add_argument("model", metavar="DIR", help="checkpoint folder, hub id or 'demo'")
    parser.add_argument("out", metavar="FILE", help="file to write")
    parser.set_defaults(run=run_make_gguf)


def settings(args: Namespace) -> dict[str, Any]:
    """The EngineConfig fields that the user set, checked."""
    config, explicit = build(EngineConfig, args)
    return {f.name: getattr(config, f.name) for f in fields(config) if f.name in explicit}


def run_one_batch(args: Namespace) -> int:
    """Measure and print."""
    given = settings(args)
    from ds_runtime_bench.engine import one_batch

    report = one_batch.run(given, args.batch_size, args.input_len, args.output_len, args.runs)
    return show(report, args.json, one_batch.render)


_MEASURED = {  # flags of an engine, and those that give several values of them here
    "--speculative-num-steps": "--steps",
    "--speculative-eagle-topk": "--topk",
    "--speculative-num-draft-tokens": "--draft-tokens",
}


def run_speculative(args: Namespace) -> int:
    """Measure and print."""
    for flag, instead in _MEASURED.items():
        value = getattr(args, flag.removeprefix("--").replace("-", "_"), None)
        if value is not None:
            raise ConfigError(f"{flag} {value}: what is measured here: use {instead}")
    if getattr(args, "speculative_algorithm", None) is None:
        args.speculative_algorithm = "NEXTN"  # what else is said of drafts goes with one
    given = settings(args)
    from ds_runtime_bench.engine import speculative

    lens = (args.input_len, args.output_len)
    try:
        report = speculative.run(
            given,
            args.batch_size,
            args.steps,
            lens,
            args.runs,
            args.simulate_acceptance,
            args.topk,
            args.draft_tokens,
        )
    except ConfigError as e:
        said = str(e)
        for flag, instead in _MEASURED.items():
            said = said.replace(flag, instead)
        raise ConfigError(said) from e
    return show(report, args.json, speculative.render)


def run_accuracy(args: Namespace) -> int:
    """Score and print."""
    given = settings(args)
    from ds_runtime_bench.engine import accuracy

    report = accuracy.run(given, args.limit, args.mtp, args.behind, args.planted)
    return show(report, args.json, accuracy.render)


def run_host(args: Namespace) -> int:
    """Measure and print."""
    given = settings(args)
    from ds_runtime_bench.engine import host

    return show(host.run(given, args.running, args.input_len, args.steps), args.json, host.render)


def run_compare(args: Namespace) -> int:
    """Let both engines take turns, and print."""
    given = settings(args)
    from ds_runtime.checkpoint.hub import resolve_model
    from ds_runtime_bench.engine import compare

    cases = compare.cases_of(args.batch_size, args.input_len, args.output_len, args.prefill)
    folder = resolve_model(str(given.get("model", "demo")))
    ours = compare.Child("ds-runtime", given | {"model": str(folder)}, cases)
    peer: compare.Turns
    if args.engine == "llama.cpp":
        if args.peer_model is None:
            raise ConfigError("--engine llama.cpp: --peer-model must name a GGUF file")
        programs = None if args.bin is None else Path(args.bin)
        peer = compare.LlamaCpp(Path(args.peer_model), programs)
    else:
        peer = compare.Child(args.engine, {"model": args.peer_model or str(folder)}, cases)

    def ready(number: int) -> None:
        print(f"round {number + 1} of {args.rounds}", file=sys.stderr, flush=True)
        if args.pause:
            sys.stdin.readline()

    report = compare.run(ours, peer, cases, args.rounds, ready)
    about = {"model": folder.name, "settings": {k: v for k, v in given.items() if k != "model"}}
    show(report | about, args.json, compare.render)
    return 1 if "ended" in report else 0


def run_make_checkpoint(args: Namespace) -> int:
    """Write the checkpoint."""
    from ds_runtime_bench.checkpoints.checkpoint import make_checkpoint, make_config

    out = Path(args.out)
    try:
        if out.exists() and not (out.is_dir() and not any(out.iterdir())):
            raise ConfigError(
                f"make-checkpoint {out}: exists and is not an empty folder; name another"
            )
        if args.config_only:
            make_config(out, args.shape, args.dtype)
        else:
            make_checkpoint(out, args.shape, args.dtype, args.seed, args.shard_size, progress=True)
    except OSError as e:
        raise unwritable(f"make-checkpoint {out}", e, "a folder that is yours") from e
    dummy = " --load-format dummy" if args.config_only else ""
    then = f"ds-runtime bench one-batch --model {out}{dummy}"
    print(f"{out}: {args.shape} in {args.dtype or own_dtype(args.shape)}; next: {then}")
    return 0


def run_make_gguf(args: Namespace) -> int:
    """Write the file."""
    from ds_runtime.checkpoint.hub import resolve_model
    from ds_runtime_bench.checkpoints.gguf import make_gguf

    out = Path(args.out)
    if out.exists():
        raise ConfigError(f"make-gguf {out}: exists; name another file")
    try:
        make_gguf(resolve_model(args.model), out, progress=True)
    except OSError as e:
        raise unwritable(f"make-gguf {out}", e, "a file in a folder that is yours") from e
    print(f"{out}: the weights of {args.model}")
    return 0
