"""ds-runtime against transformers' eager `generate` on the same checkpoint, side by side.

    python benchmarks/compare_transformers.py --model DIR [--batch-size 1 8] [--rounds 3]

Each measurement is a process of its own, the engines take turns, and only one is in memory at a
time. Both get the same random token ids and generate the same number of tokens without an early
end; prefill is the time of one token, decode the rest. Medians over rounds go to
benchmarks/results/compare_transformers.jsonl with command, machine, versions and commit.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from ds_runtime.bench.one_batch import random_prompts
from ds_runtime.bench.record import append, environment, peak_bytes

RESULTS = Path(__file__).parent / "results" / "compare_transformers.jsonl"
ENGINES = ("transformers", "ds-runtime")


def measure_transformers(args: argparse.Namespace, batch: int, vocab: int) -> dict[str, float]:
    """Seconds of prefill and decode with transformers, eager attention, its own cache."""
    import torch
    from transformers import AutoModelForCausalLM

    if args.threads:
        torch.set_num_threads(args.threads)
    model = AutoModelForCausalLM.from_pretrained(
        args.model, dtype=getattr(torch, args.dtype), attn_implementation="eager"
    ).eval()
    ids = torch.tensor(random_prompts(batch, args.input_len, vocab))

    def timed(tokens: int) -> float:
        start = time.perf_counter()
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            use_cache=True,
            pad_token_id=0,
        )
        spent = time.perf_counter() - start
        assert out.shape == (batch, args.input_len + tokens), out.shape
        return spent

    with torch.inference_mode():
        return _times(timed, args.output_len)


def measure_ds_runtime(args: argparse.Namespace, batch: int, vocab: int) -> dict[str, float]:
    """Seconds of prefill and decode with this runtime, prefix cache off."""
    from ds_runtime import LLM, SamplingParams

    prompts = random_prompts(batch, args.input_len, vocab)
    context = args.input_len + args.output_len
    settings: dict[str, Any] = {"threads": args.threads} if args.threads else {}
    with LLM(
        model=args.model,
        dtype=args.dtype,
        prefix_cache=False,
        context_length=context,
        **settings,
    ) as llm:

        def timed(tokens: int) -> float:
            start = time.perf_counter()
            outputs = llm.generate(prompts, SamplingParams(max_tokens=tokens, ignore_eos=True))
            spent = time.perf_counter() - start
            assert [len(o.token_ids) for o in outputs] == [tokens] * batch
            return spent

        return _times(timed, args.output_len)


def _times(timed: Any, output_len: int) -> dict[str, float]:
    """A warm-up of both shapes, then medians of three measurements of each."""
    timed(output_len)
    times = [(timed(1), timed(output_len)) for _ in range(3)]
    return {
        "prefill_s": statistics.median(first for first, _ in times),
        "decode_s": statistics.median(whole - first for first, whole in times),
        "peak_bytes": peak_bytes(),
    }


def child(args: argparse.Namespace) -> int:
    """One measurement, as JSON on the last line of standard output."""
    vocab = json.loads((Path(args.model) / "config.json").read_text())["vocab_size"]
    measure = measure_transformers if args.engine == "transformers" else measure_ds_runtime
    print(json.dumps(measure(args, args.batch_size[0], vocab)))
    return 0


def spawn(args: argparse.Namespace, engine: str, batch: int) -> dict[str, float]:
    """A measurement in a process of its own."""
    command = [sys.executable, __file__, "--engine", engine, "--model", args.model]
    command += ["--batch-size", str(batch), "--input-len", str(args.input_len)]
    command += ["--output-len", str(args.output_len), "--dtype", args.dtype]
    command += ["--threads", str(args.threads)] if args.threads else []
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def compare(args: argparse.Namespace, batch: int) -> dict[str, Any]:
    """Alternating rounds of one batch size; medians, rates and ratios."""
    times: dict[str, list[dict[str, float]]] = {engine: [] for engine in ENGINES}
    for number in range(args.rounds):
        turns = ENGINES if number % 2 == 0 else tuple(reversed(ENGINES))
        for engine in turns:
            times[engine].append(spawn(args, engine, batch))
    medians = {
        engine: {key: statistics.median(t[key] for t in found) for key in found[0]}
        for engine, found in times.items()
    }
    steps = batch * (args.output_len - 1)
    ours, theirs = medians["ds-runtime"], medians["transformers"]
    return {
        "batch_size": batch,
        "medians": medians,
        "decode_tokens_per_s": {e: steps / m["decode_s"] for e, m in medians.items()},
        "prefill_tokens_per_s": {
            e: batch * args.input_len / m["prefill_s"] for e, m in medians.items()
        },
        "decode_ratio": theirs["decode_s"] / ours["decode_s"],
        "prefill_ratio": theirs["prefill_s"] / ours["prefill_s"],
    }


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Compare ds-runtime with transformers.")
    parser.add_argument("--model", required=True, help="checkpoint folder that both can read")
    parser.add_argument("--batch-size", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--input-len", type=int, default=512)
    parser.add_argument("--output-len", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3, help="measurements per engine")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--threads", type=int, help="CPU threads (default: all cores)")
    parser.add_argument("--engine", choices=ENGINES, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main() -> int:
    """Compare, print and record."""
    args = parse()
    if args.engine:
        return child(args)
    for batch in args.batch_size:
        row = {
            "bench": "compare-transformers",
            "model": Path(args.model).name,
            "command": " ".join(["python", "benchmarks/compare_transformers.py", *sys.argv[1:]]),
            "input_len": args.input_len,
            "output_len": args.output_len,
            "dtype": args.dtype,
            "rounds": args.rounds,
            **compare(args, batch),
            **environment(),
        }
        append(RESULTS, row)
        ours, theirs = (row["decode_tokens_per_s"][e] for e in ("ds-runtime", "transformers"))
        print(
            f"batch {batch}: decode {ours:.1f} tokens/s, transformers {theirs:.1f} "
            f"({row['decode_ratio']:.2f}×); prefill {row['prefill_ratio']:.2f}×",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
