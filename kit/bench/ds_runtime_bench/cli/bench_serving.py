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
from ds_runtime.config.spelling import add_spellings
from ds_runtime.errors import ConfigError

if TYPE_CHECKING:
    from ds_runtime_bench.serving.measure import Asked, Measured
    from ds_runtime_bench.serving.sessions import Session

ABOUT = """\
Sends prompts to a running server, open loop (--request-rate) or closed (--max-concurrency), and
reports what its clients feel. Works with every server that speaks OpenAI's API. Agents
(--dataset-name agent) come in sessions of many turns; rate and concurrency are then those of
sessions. --compare takes turns with a second server.
"""
_LIMITED = ("ttft", "itl", "tpot", "e2el")
_ROUNDS = 5
_SHARED = {"agent": (6000, 1)}  # --prefix-len and --num-prefixes by dataset
_OTHERS = (1024, 8)


def add(kinds: _SubParsersAction[Any]) -> None:
    """Register the kind."""
    about = "latencies and throughput of a running server under load"
    parser = kinds.add_parser("serving", help=about, description=ABOUT)
    group = parser.add_argument_group("server")
    group.add_argument(
        "--base-url",
        default="http://127.0.0.1:30000",
        metavar="URL",
        help="of the server (default: %(default)s)",
    )
    group.add_argument("--host", metavar="HOST", help="of --base-url")
    group.add_argument("--port", type=int, metavar="N", help="of --base-url")
    add_spellings([parser], SERVING)
    group.add_argument(
        "--endpoint",
        default="/v1/chat/completions",
        metavar="PATH",
        help="route to ask (default: %(default)s)",
    )
    group.add_argument("--model", metavar="NAME", help="in the API (default: the first it offers)")
    group.add_argument("--api-key", metavar="KEY", help="sent as a bearer token; not reported")
    group.add_argument(
        "--flush-cache", action="store_true", help="empty its prefix cache before the load"
    )
    group = parser.add_argument_group("compare with another server")
    group.add_argument(
        "--compare", metavar="URL", help="take turns with it; medians of both, and their ratios"
    )
    group.add_argument("--compare-api-key", metavar="KEY", help="of --compare; not reported")
    group.add_argument(
        "--rounds", type=int, metavar="N", help=f"of both, each with its own seed ({_ROUNDS})"
    )
    group = parser.add_argument_group("load")
    group.add_argument(
        "--request-rate",
        type=float,
        default=math.inf,
        metavar="R",
        help="sessions per second, each of one request but for agents (default: inf)",
    )
    group.add_argument(
        "--burstiness", type=float, default=1.0, metavar="B", help="1: Poisson; less: bursts (1)"
    )
    group.add_argument(
        *("--max-concurrency", "--concurrency"),
        type=int,
        metavar="N",
        help="the most sessions at once",
    )
    group.add_argument(
        *("--num-prompts",),
        type=int,
        metavar="N",
        help="requests; agent: sessions (default: 100; custom: the file's)",
    )
    group.add_argument("--num-warmups", type=int, default=1, metavar="N", help="before it (1)")
    group.add_argument(
        "--timeout", type=float, default=600.0, metavar="S", help="per request (600)"
    )
    group = parser.add_argument_group("prompts")
    names = ("random", "shared-prefix", "agent", "custom")
    group.add_argument(
        "--dataset-name",
        default="random",
        choices=names,
        help="what prompts are made of (default: %(default)s)",
    )
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
        *("--prefix-len",),
        type=int,
        metavar="N",
        help="shared tokens (1024); agent: of system prompt and tools (6000)",
    )
    group.add_argument(
        "--num-prefixes", type=int, metavar="N", help="beginnings (8); agent: system prompts (1)"
    )
    group.add_argument(
        "--num-turns", type=int, default=20, metavar="N", help="agent: requests of a session (20)"
    )
    group.add_argument(
        "--tool-result-len",
        nargs=2,
        type=int,
        default=[200, 2000],
        metavar=("LOW", "HIGH"),
        help="agent: tokens of each (200 2000)",
    )
    group.add_argument(
        "--think-time",
        type=float,
        default=1.0,
        metavar="S",
        help="agent: mean seconds between an answer and the next turn (1)",
    )
    group.add_argument(
        "--tokenizer", metavar="PATH", help="exact lengths (default: English words, about a token)"
    )
    group.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="of the prompts and of their times (default: 0)",
    )
    group = parser.add_argument_group("requests")
    group.add_argument("--ignore-eos", action="store_true", help="outputs of full length")
    group.add_argument(
        "--temperature", type=float, metavar="T", help="of sampling (default: the server's)"
    )
    group.add_argument("--extra-body", metavar="JSON", help="more fields, as an object")
    group.add_argument("--disable-stream", action="store_true", help="whole answers")
    group = parser.add_argument_group("results")
    group.add_argument(
        "--goodput",
        nargs="+",
        default=[],
        metavar="NAME:MS",
        help="limits of ttft, itl, tpot, e2el",
    )
    group.add_argument("--json", action="store_true", help="one JSON line")
    group.add_argument("--output-file", metavar="FILE", help="append that line to FILE")
    group.add_argument(
        "--save-token-ids", metavar="FILE", help="write every request's, for trace_bound.py"
    )
    parser.set_defaults(run=run)


def run(args: Namespace) -> int:
    """Measure and print; 1 if a request failed."""
    if args.host is not None or args.port is not None:
        args.base_url = f"http://{args.host or '127.0.0.1'}:{args.port or 30000}"
    _check(args)
    from ds_runtime_bench.serving import outputs
    from ds_runtime_bench.serving.measure import Asked

    limits = goodput(args.goodput)
    ids = args.dataset_name == "agent" or args.save_token_ids is not None
    asked = Asked(args.endpoint, args.model, not args.disable_stream, ids, _extra(args))
    outputs.check(args)
    report, said, measured = (_compare if args.compare else _one)(args, asked, limits)
    print(json.dumps(report) if args.json else said, flush=True)  # also where no file takes it
    outputs.keep(args, report, measured)
    return 1 if report["failed"] else 0


Found = tuple[dict[str, Any], str, "Measured | None"]
"""A report for programs and for people, and what one server was measured with."""


def _one(args: Namespace, asked: Asked, limits: Mapping[str, float]) -> Found:
    """Of one server."""
    import uvloop

    from ds_runtime_bench.serving import hits, report

    measured = uvloop.run(_measure(args, asked, limits, args.base_url, args.api_key, 0))
    found = measured.report
    found["command"] = command()
    if args.save_token_ids and not all(a.has_ids for a in measured.warm):
        raise ConfigError(
            f"--save-token-ids: {args.base_url} returns no token ids (return_token_ids)"
        )
    return found, report.render(found, hits.render(found)), measured


def _compare(args: Namespace, asked: Asked, limits: Mapping[str, float]) -> Found:
    """Of two servers."""
    import uvloop

    from ds_runtime.common.address import Address, checked_key
    from ds_runtime_bench.record import environment
    from ds_runtime_bench.serving import compare

    sides = dict(zip(compare.SIDES, (args.base_url, args.compare), strict=True))
    keys = dict(zip(compare.SIDES, (args.api_key, args.compare_api_key), strict=True))
    Address.of(args.base_url)  # what is none ends it here, and is no error of a round
    Address.of(args.compare, "--compare")
    checked_key(args.api_key)
    checked_key(args.compare_api_key, "--compare-api-key")

    async def measure(side: str, number: int) -> dict[str, Any]:
        measured = await _measure(args, asked, limits, sides[side], keys[side], number)
        return measured.report

    found = uvloop.run(compare.compare([*sides.values()], args.rounds or _ROUNDS, measure))
    found |= {"command": command(), **environment()}
    return found, compare.render(found), None


async def _measure(
    args: Namespace,
    asked: Asked,
    limits: Mapping[str, float],
    url: str,
    key: str | None,
    number: int,
) -> Measured:
    """Round `number` of a server, with a seed of its own."""
    from ds_runtime_bench.serving.client import Target
    from ds_runtime_bench.serving.load import Load
    from ds_runtime_bench.serving.measure import measure

    seed = args.seed + number
    load = Load(args.request_rate, args.max_concurrency, args.burstiness, seed)
    sessions = sessions_of(args, asked.chat, seed)
    target = Target(url, key, args.timeout)
    try:
        return await measure(
            target, asked, sessions, load, limits, args.num_warmups, args.flush_cache
        )
    finally:
        await target.close()


def _check(args: Namespace) -> None:
    """ConfigError for the first flag out of bounds."""
    counts = ("max_concurrency", "num_prompts", "input_len", "output_len", "num_prefixes")
    for name in (*counts, "num_turns", "rounds"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {value}: must be at least 1")
    for name in ("request_rate", "burstiness", "timeout"):
        if not getattr(args, name) > 0:
            raise ConfigError(
                f"--{name.replace('_', '-')} {getattr(args, name):g}: must be above 0"
            )
    for name in ("prefix_len", "num_warmups", "think_time"):
        value = getattr(args, name)
        if value is not None and not 0 <= value < math.inf:
            raise ConfigError(f"--{name.replace('_', '-')} {value:g}: must be at least 0")
    low, high = args.tool_result_len
    if not 1 <= low <= high:
        raise ConfigError(f"--tool-result-len {low} {high}: write the least, from 1, and the most")
    if args.compare is None and (args.rounds is not None or args.compare_api_key is not None):
        raise ConfigError("--rounds and --compare-api-key: need --compare URL")
    if args.compare is not None and args.save_token_ids:
        raise ConfigError("--save-token-ids: is of one server; leave --compare out")
    if not 0 <= args.random_range_ratio <= 1:
        raise ConfigError(f"--random-range-ratio {args.random_range_ratio:g}: from 0 to 1")
    if not args.endpoint.endswith(("/chat/completions", "/completions")):
        raise ConfigError(
            f"--endpoint {args.endpoint}: must be /v1/chat/completions or /v1/completions"
        )
    if (args.dataset_name == "custom") != (args.dataset_path is not None):
        raise ConfigError("--dataset-name custom and --dataset-path FILE: one needs the other")


def goodput(words: Sequence[str]) -> dict[str, float]:
    """Limits in ms, from words like ttft:500."""
    limits = {}
    for word in words:
        name, _, value = word.partition(":")
        try:
            limits[name] = float(value)
        except ValueError:
            limits[name] = math.nan
        if name not in _LIMITED or not limits[name] > 0:
            raise ConfigError(
                f"--goodput {word}: write NAME:MS, like ttft:500 itl:50; also tpot and e2el"
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


def sessions_of(args: Namespace, chat: bool, seed: int) -> list[Session]:
    """What is sent, in order."""
    from ds_runtime_bench.serving import prompts
    from ds_runtime_bench.serving.sessions import Agent, Session, agent_sessions

    if args.dataset_name == "custom":
        path = Path(args.dataset_path)
        found = prompts.from_file(path, args.num_prompts, args.output_len, chat)
        return [Session(prompt) for prompt in found]
    tokenizer = None
    if args.tokenizer is not None:
        from ds_runtime.checkpoint.hub import resolve_model
        from ds_runtime.text.tokenizer import Tokenizer

        tokenizer = Tokenizer.load(resolve_model(args.tokenizer))
    words, count = prompts.Words(seed, tokenizer, chat), args.num_prompts or 100
    usual = _SHARED.get(args.dataset_name, _OTHERS)
    shared = usual[0] if args.prefix_len is None else args.prefix_len
    prefixes = args.num_prefixes or usual[1]
    if args.dataset_name == "agent":
        agent = Agent(
            turns=args.num_turns,
            shared=shared,
            question=args.input_len,
            answer=args.output_len,
            result=tuple(args.tool_result_len),
            pause=args.think_time,
        )
        return agent_sessions(words, count, prefixes, agent, chat)
    if args.dataset_name == "random":
        ratio = args.random_range_ratio
        made = prompts.random_prompts(words, count, args.input_len, args.output_len, ratio)
    else:
        lengths = shared, prefixes, args.input_len, args.output_len
        made = prompts.shared_prefix(words, count, *lengths)
    return [Session(prompt) for prompt in made]


def command() -> str:
    """The command line, without the key."""
    words = ["ds-runtime", *sys.argv[1:]]
    for i, word in enumerate(words):
        name, given, _ = word.partition("=")
        if name not in ("--api-key", "--compare-api-key"):
            continue
        if given:
            words[i] = f"{name}=***"
        elif words[i + 1 :]:
            words[i + 1] = "***"
    return " ".join(words)
