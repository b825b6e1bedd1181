"""`ds-runtime bench serving`: flags for a load on any OpenAI-compatible server."""

from __future__ import annotations

import json
import math
import sys
from argparse import Namespace, _SubParsersAction
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_runtime.cli.known import SERVING
from ds_runtime.errors import ConfigError
from ds_runtime.spelling import add_spellings

if TYPE_CHECKING:
    from ds_runtime.bench.serving.measure import Asked, Measured
    from ds_runtime.bench.serving.prompts import Prompt

ABOUT = """\
Sends prompts to a running server, open loop (--request-rate) or closed (--max-concurrency), and
reports what its clients feel. Works with every server that speaks OpenAI's API.
"""
_LIMITED = ("ttft", "tpot", "e2el")


def add(kinds: _SubParsersAction[Any]) -> None:
    """Register the kind."""
    about = "latencies and throughput of a running server under load"
    parser = kinds.add_parser("serving", help=about, description=ABOUT)
    group = parser.add_argument_group("server")
    group.add_argument(
        "--base-url", default="http://127.0.0.1:30000", metavar="URL", help="(%(default)s)"
    )
    group.add_argument("--host", metavar="HOST", help="of --base-url")
    group.add_argument("--port", type=int, metavar="N", help="of --base-url")
    add_spellings(parser, SERVING)
    group.add_argument(
        "--endpoint", default="/v1/chat/completions", metavar="PATH", help="(%(default)s)"
    )
    group.add_argument("--model", metavar="NAME", help="in the API (default: the first it offers)")
    group.add_argument("--api-key", metavar="KEY", help="sent as a bearer token; not reported")
    group = parser.add_argument_group("load")
    group.add_argument(
        "--request-rate",
        type=float,
        default=math.inf,
        metavar="R",
        help="per second (default: inf)",
    )
    group.add_argument(
        "--burstiness", type=float, default=1.0, metavar="B", help="1: Poisson; less: bursts (1)"
    )
    group.add_argument(
        "--max-concurrency", "--concurrency", type=int, metavar="N", help="at most so many at once"
    )
    group.add_argument(
        "--num-prompts", type=int, metavar="N", help="requests (default: 100; custom: the file's)"
    )
    group.add_argument("--num-warmups", type=int, default=1, metavar="N", help="before it (1)")
    group.add_argument(
        "--timeout", type=float, default=600.0, metavar="S", help="per request (600)"
    )
    group = parser.add_argument_group("prompts")
    names = ("random", "shared-prefix", "custom")
    group.add_argument("--dataset-name", default="random", choices=names, help="(%(default)s)")
    group.add_argument("--dataset-path", metavar="FILE", help="custom: JSONL, prompt or messages")
    group.add_argument(
        *("--input-len", "--random-input-len", "--random-input"),
        type=int,
        default=256,
        metavar="N",
        help="tokens (256)",
    )
    group.add_argument(
        *("--output-len", "--random-output-len", "--random-output"),
        type=int,
        default=64,
        metavar="N",
        help="tokens (64)",
    )
    group.add_argument(
        "--random-range-ratio",
        type=float,
        default=1.0,
        metavar="X",
        help="lengths are drawn from X of these to all of them (1: as long as asked)",
    )
    group.add_argument(
        "--prefix-len", type=int, default=1024, metavar="N", help="shared tokens (1024)"
    )
    group.add_argument("--num-prefixes", type=int, default=8, metavar="N", help="beginnings (8)")
    group.add_argument(
        "--tokenizer", metavar="PATH", help="exact lengths (default: English words, about a token)"
    )
    group.add_argument("--seed", type=int, default=0, metavar="N", help="(default: 0)")
    group = parser.add_argument_group("requests")
    group.add_argument("--ignore-eos", action="store_true", help="outputs of full length")
    group.add_argument("--temperature", type=float, metavar="T", help="(default: the server's)")
    group.add_argument("--extra-body", metavar="JSON", help="more fields, as an object")
    group.add_argument("--disable-stream", action="store_true", help="whole answers")
    group = parser.add_argument_group("results")
    group.add_argument(
        "--goodput", nargs="+", default=[], metavar="NAME:MS", help="ttft, tpot, e2el limits"
    )
    group.add_argument("--json", action="store_true", help="one JSON line")
    group.add_argument("--output-file", metavar="FILE", help="append that line to FILE")
    group.add_argument("--plot", metavar="FILE", help="write an SVG")
    parser.set_defaults(run=run)


def run(args: Namespace) -> int:
    """Measure and print; 1 if a request failed."""
    if args.host is not None or args.port is not None:
        args.base_url = f"http://{args.host or '127.0.0.1'}:{args.port or 30000}"
    _check(args)
    from ds_runtime.bench.serving.measure import Asked

    limits = goodput(args.goodput)
    asked = Asked(args.endpoint, args.model, not args.disable_stream, _extra(args))
    prompts = prompts_of(args, asked.chat)
    from ds_runtime.bench.record import append
    from ds_runtime.bench.serving.plot import svg
    from ds_runtime.bench.serving.report import render

    measured = _measure(args, asked, prompts, limits)
    report = measured.report
    report["command"] = command()
    try:
        if args.output_file:
            append(Path(args.output_file), report)
        if args.plot:
            Path(args.plot).write_text(svg(report, measured.answers, measured.begin))
    except OSError as e:
        raise ConfigError(f"--output-file or --plot: {e}") from e
    print(json.dumps(report) if args.json else render(report))
    return 1 if report["failed"] else 0


def _measure(
    args: Namespace, asked: Asked, prompts: Sequence[Prompt], limits: Mapping[str, float]
) -> Measured:
    import uvloop

    from ds_runtime.bench.serving.client import Target
    from ds_runtime.bench.serving.load import Load
    from ds_runtime.bench.serving.measure import measure

    load = Load(args.request_rate, args.max_concurrency, args.burstiness, args.seed)

    async def main() -> Measured:
        target = Target(args.base_url, args.api_key, args.timeout)
        try:
            return await measure(target, asked, prompts, load, limits, args.num_warmups)
        finally:
            target.close()

    return uvloop.run(main())


def _check(args: Namespace) -> None:
    """ConfigError for the first flag out of bounds."""
    for name in ("max_concurrency", "num_prompts", "input_len", "output_len", "num_prefixes"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {value}: must be at least 1")
    for name in ("request_rate", "burstiness", "timeout"):
        if not getattr(args, name) > 0:
            raise ConfigError(
                f"--{name.replace('_', '-')} {getattr(args, name):g}: must be above 0"
            )
    if args.prefix_len < 0 or args.num_warmups < 0:
        raise ConfigError("--prefix-len and --num-warmups: must be at least 0")
    if not 0 <= args.random_range_ratio <= 1:
        raise ConfigError(f"--random-range-ratio {args.random_range_ratio:g}: from 0 to 1")
    if not args.endpoint.endswith(("/chat/completions", "/completions")):
        raise ConfigError(
            f"--endpoint {args.endpoint}: must be /v1/chat/completions or /v1/completions"
        )
    if (args.dataset_name == "custom") != (args.dataset_path is not None):
        raise ConfigError("--dataset-name custom and --dataset-path FILE: one needs the other")


def goodput(words: Sequence[str]) -> dict[str, float]:
    """Limits in ms, from words like ttft:200."""
    limits = {}
    for word in words:
        name, _, value = word.partition(":")
        try:
            limits[name] = float(value)
        except ValueError:
            limits[name] = math.nan
        if name not in _LIMITED or not limits[name] > 0:
            raise ConfigError(
                f"--goodput {word}: write NAME:MS with ttft, tpot or e2el, like ttft:200 tpot:50"
            )
    return limits


def _extra(args: Namespace) -> dict[str, Any]:
    extra: dict[str, Any] = {}
    if args.ignore_eos:
        extra["ignore_eos"] = True
    if args.temperature is not None:
        extra["temperature"] = args.temperature
    if args.extra_body is None:
        return extra
    try:
        more = json.loads(args.extra_body)
    except ValueError as e:
        raise ConfigError(f"--extra-body: no JSON: {e}") from e
    if not isinstance(more, dict):
        raise ConfigError(f"--extra-body {args.extra_body}: must be a JSON object")
    return extra | more


def prompts_of(args: Namespace, chat: bool) -> list[Prompt]:
    """What is sent, in order."""
    from ds_runtime.bench.serving import prompts

    if args.dataset_name == "custom":
        return prompts.from_file(Path(args.dataset_path), args.num_prompts, args.output_len, chat)
    tokenizer = None
    if args.tokenizer is not None:
        from ds_runtime.model.hub import resolve_model
        from ds_runtime.text.tokenizer import Tokenizer

        tokenizer = Tokenizer.load(resolve_model(args.tokenizer))
    words, count = prompts.Words(args.seed, tokenizer, chat), args.num_prompts or 100
    if args.dataset_name == "random":
        ratio = args.random_range_ratio
        return prompts.random_prompts(words, count, args.input_len, args.output_len, ratio)
    lengths = args.prefix_len, args.num_prefixes, args.input_len, args.output_len
    return prompts.shared_prefix(words, count, *lengths)


def command() -> str:
    """The command line, without the key."""
    words = ["ds-runtime", *sys.argv[1:]]
    for i, word in enumerate(words):
        if word.startswith("--api-key="):
            words[i] = "--api-key=***"
        elif word == "--api-key" and words[i + 1 :]:
            words[i + 1] = "***"
    return " ".join(words)
