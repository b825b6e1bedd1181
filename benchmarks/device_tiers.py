"""What host memory is worth to sessions that return, on the accelerator that is here.

python benchmarks/device_tiers.py CHECKPOINT [--sessions 64] [--held 16] [--tokens 8000]
    [--more 256] [--out 128] [--set NAME=VALUE ...]

Each session has --tokens random token ids, and the device's cache holds --held of them, while host
memory holds all as they are in the end; --set kv_memory and hicache_ratio say otherwise. Returning
alone: a session whose pages are in host memory comes with --more new tokens; the figure is the time
to its first token, and beside it that of a prompt as long that nobody has seen, each the median of
five. In a loop: all sessions at once come with --more new tokens and get --out, once with host
memory and once without; the figure is generated tokens per second of the second turn. All is
captured first that a server captures while idle: `prefill_graphs` of the record. --out-file adds
the record to a file: the table of docs/operating.md is of results/device_tiers.jsonl.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from device_decode import all_captured, value

from ds_runtime import LLM, SamplingParams
from ds_runtime.assembly.assemble import assemble
from ds_runtime.config import EngineConfig
from ds_runtime_bench.engine.one_batch import generate_seconds
from ds_runtime_bench.record import append, environment, load_format


def drawn(count: int, length: int, vocab: int, seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(2, vocab) for _ in range(length)] for _ in range(count)]


def alone(llm: LLM, said: list[list[int]], more: int, vocab: int) -> dict[str, float]:
    """Milliseconds to the first token: of sessions that return, and of others as long."""
    back, new = list[float](), list[float]()
    for number, (old, tail) in enumerate(zip(said, drawn(5, more, vocab, 8), strict=False)):
        (fresh,) = drawn(1, len(old) + more, vocab, 100 + number)
        back.append(generate_seconds(llm, [old + tail], 1))
        new.append(generate_seconds(llm, [fresh], 1))
    ms = {"back_ms": statistics.median(back) * 1e3, "new_ms": statistics.median(new) * 1e3}
    return {**ms, "share": ms["back_ms"] / ms["new_ms"]}


def loop(llm: LLM, said: list[list[int]], more: int, out: int, vocab: int) -> float:
    """Generated tokens per second of all sessions' second turn."""
    params = SamplingParams(max_tokens=out, ignore_eos=True, temperature=0.0)
    rate = 0.0
    for turn in range(2):
        tails = drawn(len(said), more, vocab, 20 + turn)
        prompts = [old + tail for old, tail in zip(said, tails, strict=True)]
        begin = time.perf_counter()
        found = llm.generate(prompts, params)
        rate = len(said) * out / (time.perf_counter() - begin)
        said = [p + list(o.token_ids) for p, o in zip(prompts, found, strict=True)]
    return rate


def sized(args: argparse.Namespace, given: dict[str, Any]) -> dict[str, Any]:
    """Settings of caches, where they are not given: the longest session is a context, the device
    has --held sessions as they are first, and a page each, and host memory all of them."""
    longest = args.tokens + 2 * (args.more + args.out)
    given = {"context_length": longest + args.more, **given}
    found = assemble(EngineConfig(model=str(args.checkpoint), **given), tuple(given))
    size, sizes, config = found.config.page_size, found.cache_sizes, found.config
    snapshots = 4 * args.held if sizes.state else 0
    states = config.max_running_requests + 1 + snapshots if snapshots else 0
    held = args.held * (args.tokens // size + 1)
    held = max(held, -(-given["context_length"] // size) + 1)
    ratio = 1.1 * args.sessions * (longest // size + 1) / held
    kept = {"kv_memory": held * sizes.page + states * sizes.state, "hicache_ratio": ratio}
    return {**kept, **({"state_snapshots": snapshots} if snapshots else {}), **given}


def device_name() -> str:
    """The accelerator's, else the processor's."""
    if torch.accelerator.is_available():
        found = torch.accelerator.current_accelerator()
        assert found is not None
        name: str = torch.get_device_module(found).get_device_name()
        return name
    processor: str = environment()["machine"]["processor"]
    return processor


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checkpoint", type=Path, help="its folder, or one of a config.json alone")
    for name, default in (("sessions", 64), ("held", 16), ("tokens", 8000), ("more", 256)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--out", type=int, default=128)
    parser.add_argument("--out-file", type=Path, help="add the record to this file")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE")
    args = parser.parse_args()
    given: dict[str, Any] = {n: value(v) for n, _, v in (s.partition("=") for s in args.set)}
    given = sized(args, {"load_format": load_format(args.checkpoint), **given})
    asked = {name: getattr(args, name) for name in ("sessions", "held", "tokens", "more", "out")}
    record: dict[str, Any] = {"bench": "device-tiers", "checkpoint": args.checkpoint.name}
    record |= {"device": device_name(), "settings": args.set, **asked}
    for host in (True, False):
        with LLM(args.checkpoint, **given, enable_hierarchical_cache=host) as llm:
            record["prefill_graphs"] = all_captured(llm)
            vocab = llm._alive().assembly.model.vocab_size
            said = drawn(args.sessions, args.tokens, vocab, 1)
            for session in said:
                generate_seconds(llm, [session], 1)
            if host:
                pace = llm._alive().runner.pace
                assert pace is not None, "the start measures it"
                each = {"computed": pace.computed, "loaded": pace.loaded}
                record["page_us"] = {name: round(1e6 * took) for name, took in each.items()}
                record |= alone(llm, said, args.more, vocab)
            record["host_rate" if host else "plain_rate"] = loop(
                llm, said, args.more, args.out, vocab
            )
    record["gain"] = record["host_rate"] / record["plain_rate"]
    print(record)
    if args.out_file is not None:
        append(args.out_file, {**record, **environment()})
    return 0


if __name__ == "__main__":
    sys.exit(main())
