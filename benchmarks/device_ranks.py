"""Ranks that divide attention by heads, by sequences, and by both, beside each other.

python benchmarks/device_ranks.py [--ranks N] [--groups N ...] [--experts]
    [--arms ARM ...] [--shapes v2-lite v3-slice] [--requests 64 256 512] [--prompt 256]
    [--dtype fp8] [--set NAME=VALUE ...] [--out FILE]

Random weights of each shape. Every arm is an engine in a process of its own: `heads` is --tp N,
`sequences` is --tp N --enable-dp-attention, `groups G` has --dp G beside it, and `experts`, asked
for by --experts, has --ep N. `halves` is `heads` with --enable-two-batch-overlap. --arms names arms
in their order, also one several times. One JSON line per figure: `step_ms`, a decode step by
LLM.generate, (t(97 tokens) − t(33)) / 64, `prompt_tokens_per_s` of random tokens, both the median
of three, and `ready_s`. It speaks to an engine through LLM alone, so it also measures an
older tree, PYTHONPATH=TREE/core:TREE/kit/bench; `tree` of each line says which that was.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import ds_runtime
from ds_runtime import LLM
from ds_runtime_bench.engine.one_batch import generate_seconds, random_prompts
from ds_runtime_bench.shapes import SHAPES

FIRST, LAST = 33, 97
RUNS = 3


def measure(llm: LLM, asked: list[list[int]], tell: Callable[..., None]) -> None:
    """Steps and prompts of these requests, all of one length."""
    count, length = len(asked), len(asked[0])
    generate_seconds(llm, asked, 3)
    first = [generate_seconds(llm, asked, 1) for _ in range(RUNS)]
    each = [
        (generate_seconds(llm, asked, LAST) - generate_seconds(llm, asked, FIRST)) / (LAST - FIRST)
        for _ in range(RUNS)
    ]
    for figure, values in (
        ("step_ms", [one * 1e3 for one in each]),
        ("prompt_tokens_per_s", [count * length / one for one in first]),
    ):
        rounded = [round(one, 3) for one in values]
        tell(figure, statistics.median(rounded), requests=count, prompt=length, runs=rounded)


def settings_of(args: argparse.Namespace, arm: str) -> dict[str, Any]:
    """Of the engine of an arm."""
    counts = sorted(args.requests)
    sizes = {size for n in counts for size in (n, -(-n // args.ranks))}
    if arm.startswith("groups"):
        sizes |= {-(-n // int(arm.split()[1])) for n in counts}
    found: dict[str, Any] = {
        "tp": args.ranks,
        "load_format": "dummy",
        "disable_radix_cache": True,
        "context_length": 1024,
        "kv_memory": "6GB",
        "max_running_requests": counts[-1],
        "graph_sizes": tuple(sorted(sizes)),
    }
    if arm == "halves":
        found["enable_two_batch_overlap"] = True
    elif arm != "heads":
        found["enable_dp_attention"] = True
    if arm.startswith("groups"):
        found["dp"] = int(arm.split()[1])
    if arm == "experts":
        found["ep"] = args.ranks
    for one in args.set:
        name, _, text = one.partition("=")
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        found[name] = tuple(value) if isinstance(value, list) else value
    return found


def run(args: argparse.Namespace) -> None:
    """One arm of one shape, in this process."""
    config = dict(SHAPES[args.shape])
    config.pop("num_nextn_predict_layers", None)
    if args.dtype == "fp8":
        config["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        }
    device = torch.accelerator.current_accelerator()
    about = {"bench": "device-ranks", "shape": args.shape, "dtype": args.dtype, "arm": args.arm}
    about["device"] = torch.cuda.get_device_name() if device is not None else "cpu"
    about["tree"] = str(Path(ds_runtime.__file__).parents[2])

    def tell(figure: str, value: float, **more: Any) -> None:
        print(json.dumps({**about, "ranks": args.ranks, **more, "figure": figure, "value": value}))
        sys.stdout.flush()

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        start = time.perf_counter()
        with LLM(folder, **settings_of(args, args.arm)) as llm:
            tell("ready_s", round(time.perf_counter() - start, 1))
            for count in args.requests:
                measure(llm, random_prompts(count, args.prompt, config["vocab_size"], count), tell)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--groups", type=int, nargs="*", default=[], help="arms with --dp N")
    parser.add_argument("--experts", action="store_true", help="an arm with experts by number")
    parser.add_argument("--arms", nargs="+", help="these, in place of heads, sequences and others")
    parser.add_argument("--shapes", nargs="+", default=["v2-lite", "v3-slice"])
    parser.add_argument("--requests", type=int, nargs="+", default=[64, 256, 512])
    parser.add_argument("--prompt", type=int, default=256, help="tokens of a prompt")
    parser.add_argument("--dtype", choices=["fp8", "bfloat16"], default="fp8")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE")
    parser.add_argument("--out", type=Path, help="add the lines to this file")
    parser.add_argument("--shape", help=argparse.SUPPRESS)
    parser.add_argument("--arm", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.arm:
        run(args)
        return
    failed = 0
    for shape in args.shapes:
        arms = ["heads", "sequences", *(f"groups {n}" for n in args.groups)]
        for arm in args.arms or arms + ["experts"] * args.experts:
            command = [sys.executable, __file__, *sys.argv[1:], "--shape", shape, "--arm", arm]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
            print(done.stdout, end="", flush=True)
            failed |= done.returncode
            if args.out:
                with args.out.open("a") as file:
                    file.write(done.stdout)
    sys.exit(failed)


if __name__ == "__main__":
    main()
