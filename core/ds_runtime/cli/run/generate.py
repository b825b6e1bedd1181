"""`ds-runtime generate`: one prompt, text to standard output as it comes."""

from __future__ import annotations

import argparse
import sys
from argparse import Namespace, _SubParsersAction
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from ds_runtime.cli.config_file import add_config_file
from ds_runtime.cli.flags import add_flags, build
from ds_runtime.config import EngineConfig
from ds_runtime.config.fields import flag_of
from ds_runtime.description.adapter import AdapterSpec
from ds_runtime.errors import ConfigError, FieldPath, RequestError

if TYPE_CHECKING:
    from ds_runtime.sampling_params import SamplingParams

SAMPLING: tuple[tuple[str, type, str], ...] = (
    ("max_tokens", int, "most tokens to generate (default: up to the context's end)"),
    ("min_tokens", int, "fewest tokens before an end (default: 0)"),
    ("temperature", float, "0 is greedy (default: 0)"),
    ("top_k", int, "only the k likeliest tokens; 0 is all (default: 0)"),
    ("top_p", float, "only the likeliest tokens up to this mass (default: 1)"),
    ("min_p", float, "only tokens at least this likely, relative to the best (default: 0)"),
    ("presence_penalty", float, "taken from logits of tokens in the answer (default: 0)"),
    ("frequency_penalty", float, "the same, times how often they occur (default: 0)"),
    ("repetition_penalty", float, "above 1: makes tokens that were seen less likely (default: 1)"),
    ("seed", int, "of the random draws (default: a new one)"),
)


def add(subcommands: _SubParsersAction[Any]) -> None:
    """Register the verb."""
    parser = subcommands.add_parser(
        "generate",
        help="complete one prompt and print the text as it comes",
        description="Complete one prompt and print the text as it comes. '-' reads the prompt "
        "from standard input.",
    )
    parser.add_argument("prompt", help="the text to complete, or '-' for standard input")
    parser.add_argument("--chat", action="store_true", help="prompt as a user's chat message")
    parser.add_argument(
        "--adapter",
        metavar="NAME",
        help="the adapter of --lora that completes it (default: the one that is given)",
    )
    group = parser.add_argument_group("sampling")
    for name, kind, text in SAMPLING:
        group.add_argument(
            flag_of(name),
            type=kind,
            metavar="N",
            default=argparse.SUPPRESS,
            help=text.replace("%", "%%"),
        )
    group.add_argument("--stop", action="append", default=[], help="end before this text")
    group.add_argument("--ignore-eos", action="store_true", help="generate on after the end token")
    add_flags(parser, EngineConfig)
    add_config_file(parser)
    parser.set_defaults(run=run, looks=True)


def sampling_params(args: Namespace) -> SamplingParams:
    """The flags as SamplingParams. Raises RequestError for impossible values."""
    from ds_runtime.sampling_params import SamplingParams

    given = {name: getattr(args, name) for name, _, _ in SAMPLING if name in args}
    given.setdefault("max_tokens", None)
    return SamplingParams(stop=tuple(args.stop), ignore_eos=args.ignore_eos, **given)


def chosen_adapter(given: Sequence[str], asked: str | None) -> str | None:
    """The name of one of --lora's adapters, or None if there are none. Raises ConfigError if it is
    none of them, or if it is not said which of several."""
    names = [AdapterSpec.parse(text).name for text in given]
    if asked is not None and asked not in names:
        have = f"--lora names {', '.join(names)}" if names else "give --lora NAME=DIR with it"
        raise ConfigError(f"--adapter {asked}: no such adapter; {have}")
    if asked is None and len(names) > 1:
        raise ConfigError(f"--lora names {', '.join(names)}: say with --adapter which completes it")
    return asked or next(iter(names), None)


def run(args: Namespace) -> int:
    """Generate and stream."""
    with _flags_named():
        return _run(args)


@contextmanager
def _flags_named() -> Iterator[None]:
    """What errors say of fields of SamplingParams, they say of the flags."""
    try:
        yield
    except RequestError as e:
        flags = {name: flag_of(name) for name in (*(name for name, *_ in SAMPLING), "stop")}
        said = (flags.get(str(p), p) if isinstance(p, FieldPath) else p for p in e.said)
        raise RequestError(tuple(said), e.param) from e


def _run(args: Namespace) -> int:
    config, explicit = build(EngineConfig, args)
    adapter = chosen_adapter(config.lora, args.adapter)
    params = sampling_params(args)
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    if not prompt:
        raise ConfigError("generate: the prompt is empty; give some text, or '-' for stdin")
    from ds_runtime import LLM

    given = {f.name: getattr(config, f.name) for f in fields(config) if f.name in explicit}
    with LLM(**given) as llm:
        for text in llm.stream(prompt, params, chat=args.chat, lora=adapter):
            print(text, end="", flush=True)
    print()
    return 0
