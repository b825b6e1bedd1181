"""From which context on the demo's sparse sibling decodes faster than the dense demo, on the CPU.

python benchmarks/sparse_crossover.py [--batch-size 1 8] [--multiples 4 8 16 32 60] [--threads 1]
    [--dtype bfloat16] >> benchmarks/results/sparse_crossover.jsonl

Both models are in memory and take turns; contexts are multiples of index_topk. A decode step is the
time of 33 tokens less that of one, over 32, of random prompts that the prefix cache holds. Wall
times are the least of the runs, for neighbours only add; processor times of the process are
medians. One JSON line per batch size.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from contextlib import ExitStack

from ds_runtime import LLM
from ds_runtime.checkpoint.hub import resolve_model
from ds_runtime.description.hf import load_config
from ds_runtime_bench.engine.one_batch import generate_seconds, random_prompts
from ds_runtime_bench.record import environment

MODELS = {"dense": "demo", "sparse": "demo-v32"}
STEPS = 32


def step_ms(llm: LLM, prompts: list[list[int]]) -> tuple[float, float]:
    """Wall and processor time of a decode step, milliseconds; the prompts are cached."""
    spent, busy = list[float](), list[float]()
    for tokens in (1, STEPS + 1):
        begin = time.process_time()
        spent.append(generate_seconds(llm, prompts, tokens))
        busy.append(time.process_time() - begin)
    return (spent[1] - spent[0]) / STEPS * 1e3, (busy[1] - busy[0]) / STEPS * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--batch-size", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--multiples", type=int, nargs="+", default=[4, 8, 16, 32, 60])
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args()
    config = load_config(resolve_model(MODELS["sparse"]))
    assert config.indexing is not None
    settings = {"platform": "cpu", "threads": args.threads, "dtype": args.dtype}
    with ExitStack() as stack:
        llms = {
            name: stack.enter_context(LLM(model, kv_memory="800MB", **settings))
            for name, model in MODELS.items()
        }
        for batch in args.batch_size:
            rows = []
            for multiple in args.multiples:
                context = multiple * config.indexing.top_k
                prompts = random_prompts(batch, context, config.vocab_size)
                for llm in llms.values():
                    generate_seconds(llm, prompts, 2)
                times: dict[str, list[tuple[float, float]]] = {name: [] for name in llms}
                for _ in range(args.runs):
                    for name, llm in llms.items():
                        times[name].append(step_ms(llm, prompts))
                row = {"context": context, "multiple": multiple}
                for name, spent in times.items():
                    row[f"{name}_ms"] = round(min(wall for wall, _ in spent), 4)
                    row[f"{name}_cpu_ms"] = round(statistics.median(cpu for _, cpu in spent), 4)
                row["ratio"] = round(row["dense_ms"] / row["sparse_ms"], 3)
                row["cpu_ratio"] = round(row["dense_cpu_ms"] / row["sparse_cpu_ms"], 3)
                rows.append(row)
                print(batch, rows[-1], file=sys.stderr)
            slower = [r["context"] for r in rows if min(r["ratio"], r["cpu_ratio"]) <= 1]
            faster = [r["context"] for r in rows if r["context"] > max(slower, default=0)]
            report = {
                "bench": "sparse_crossover",
                "batch_size": batch,
                "index_topk": config.indexing.top_k,
                "settings": settings,
                "runs": args.runs,
                "results": rows,
                "faster_from": min(faster, default=None),
                **environment(),
            }
            print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
