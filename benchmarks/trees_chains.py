"""Where a tree of drafts beats the best chain: how long it makes a step, and what the step costs.

    python benchmarks/trees_chains.py [CHECKPOINT] [--rounds 5] [--threads N] [--layers N]
        [--platform NAME] [--no-record]

Lengths are tokens per verification of real drafts: the demo's draft layer on its held-out prose,
24 beginnings of 64 tokens that go on for 64, greedy and sampled. Costs are milliseconds of a cycle,
draft and verify, of one request behind 64 tokens, on CHECKPOINT, whose weights may be random;
without one, of a model like the shape v3-narrow, whose tokens take all of its experts, but 2048
wide. Its settings take turns, and the medians count. A rate is a length by a cost: of this model,
were its drafts as good as the demo's. The row goes to benchmarks/results/trees_chains.jsonl.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from ds_runtime import LLM, SamplingParams
from ds_runtime.checkpoint.hub import resolve_model
from ds_runtime_bench.record import append, environment, load_format
from ds_runtime_bench.shapes import config_of

RESULTS = Path(__file__).parent / "results" / "trees_chains.jsonl"
NARROW = {
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": 768,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "vocab_size": 32768,
}
HEATS = (0.0, 0.6, 1.0)
TOKENS, TEXTS, CYCLES = 64, 24, 16


class Shape(NamedTuple):
    """A chain of `steps` drafts, or a tree. tokens: verified, the last one drawn included."""

    steps: int
    topk: int
    tokens: int

    @property
    def settings(self) -> dict[str, Any]:
        """Of the engine."""
        return {
            "speculative_algorithm": "NEXTN",
            "speculative_num_steps": self.steps,
            "speculative_eagle_topk": self.topk,
            "speculative_num_draft_tokens": self.tokens,
        }


CHAINS = [Shape(n, 1, n + 1) for n in (1, 2, 3, 4)]
TREES = [Shape(*s) for s in ((1, 2, 3), (2, 2, 4), (3, 3, 8), (4, 2, 8), (4, 4, 16))]


def lengths(shape: Shape, texts: list[str], common: dict[str, Any]) -> list[float]:
    """Tokens per verification, by temperature."""
    found = []
    with LLM("demo", **common, **shape.settings, max_running_requests=8) as llm:
        prompts = [llm.tokenizer.encode(text)[:TOKENS] for text in texts]
        for heat in HEATS:
            given = {"max_tokens": TOKENS, "ignore_eos": True, "temperature": heat}
            before = llm.stats()
            llm.generate(prompts, [SamplingParams(**given, seed=i) for i in range(len(prompts))])
            after = llm.stats()
            right = after.accepted_tokens - before.accepted_tokens
            found.append(1 + right / (after.verified - before.verified))
    return found


def cycle(llm: LLM) -> float:
    """Seconds of a step in which one request decodes."""
    prompt, spent, steps = list(range(5, 5 + TOKENS)), 0.0, 0
    for sign, tokens in ((-1, 1), (1, CYCLES)):
        params = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=1.0, seed=1)
        before, start = llm.stats().verified, time.perf_counter()
        llm.generate([prompt], params)
        spent += sign * (time.perf_counter() - start)
        steps += sign * (llm.stats().verified - before)
    return spent / (steps or CYCLES - 1)


def costs(model: Path, common: dict[str, Any], rounds: int) -> dict[Shape, list[float]]:
    """Milliseconds of a cycle: of plain decode, of chains, and of trees, round by round."""
    plain = Shape(0, 1, 1)
    found: dict[Shape, list[float]] = {shape: [] for shape in (plain, *CHAINS, *TREES)}
    common = {**common, "load_format": load_format(model), "max_running_requests": 1}
    longest = CHAINS[-1].settings | {"speculative_adaptive": True}
    with ExitStack() as stack:
        chains = stack.enter_context(LLM(model, **common, **longest))
        trees = {s: stack.enter_context(LLM(model, **common, **s.settings)) for s in TREES}
        for turn in range(rounds + 1):
            for shape, times in found.items():
                llm = trees.get(shape, chains)
                if llm is chains:
                    llm.force_drafts(shape.steps)
                took = cycle(llm) * 1e3
                if turn:  # the first warms up
                    times.append(took)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("checkpoint", nargs="?", type=Path, metavar="CHECKPOINT")
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    parser.add_argument("--threads", type=int, default=None, metavar="N")
    parser.add_argument("--layers", type=int, default=10, metavar="N", help="of the narrow model")
    parser.add_argument(
        "--platform", metavar="NAME", help="for costs (default: cpu)", default="cpu"
    )
    parser.add_argument("--no-record", action="store_true")
    args = parser.parse_args()
    held = json.loads((resolve_model("demo") / "heldout.json").read_text())["prose"]
    texts = [entry["text"] for entry in held[:TEXTS]]
    common = {"disable_radix_cache": True, "context_length": 512, "threads": args.threads}
    common = {k: v for k, v in common.items() if v is not None}
    here = {**common, "platform": "cpu", "kv_memory": "40MB", "threads": 1}
    long = dict[Shape, list[float]]()
    for shape in (*CHAINS, *TREES):
        long[shape] = lengths(shape, texts, here)
        print(f"{tuple(shape)!s:12} {long[shape]}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        model = args.checkpoint
        if model is None:
            model = Path(folder)
            config = config_of("v3-narrow", "bfloat16") | NARROW
            config["num_hidden_layers"] = args.layers
            (model / "config.json").write_text(json.dumps(config))
        spent = costs(
            model, {**common, "platform": args.platform, "kv_memory": "64MB"}, args.rounds
        )
    rows = []
    for shape, times in spent.items():
        took = statistics.median(times)
        own = long.get(shape, [1.0] * len(HEATS))
        row = {**shape._asdict(), "lengths": own, "ms": took, "least_ms": min(times)}
        row["tokens_per_s"] = [length / took * 1e3 for length in own]
        rows.append(row)
        said = "  ".join(
            f"{n:.3f} {rate:7.1f}" for n, rate in zip(own, row["tokens_per_s"], strict=True)
        )
        print(f"{tuple(shape)!s:12} {took:8.2f} ms ({min(times):.2f})  {said}", flush=True)
    if not args.no_record:
        about = str(args.checkpoint or f"narrow, {args.layers} layers")
        append(RESULTS, {"model": about, "heats": HEATS, "rows": rows, **environment()})


if __name__ == "__main__":
    main()
