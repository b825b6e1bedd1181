"""What a JSON schema costs per token and request on a CPU: the grammar takes the token and makes
the next mask, the step carries the mask to the sampler, the sampler applies it. Compiling is not
counted.

    python benchmarks/mask_cost.py --tokenizer core/ds_runtime/demo DIR ... [--no-record]

Per schema of grammar_schemas.TIMED, `guide_us`: `Followers` along an instance's tokens. Per number
of requests, `apply_us` of a request: `Sampler.prepare` and `draw` of a greedy step with a mask in
every row, less the same without, the two by turns; `reference_us` is the same with the reference
kernel for mask_logits. `total_us`: the schemas' mean guide_us and apply_us. Rows go to
benchmarks/results/masks.jsonl.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from grammar_schemas import TIMED

from ds_runtime.engine.step.plan import RowInit
from ds_runtime.engine.step.sampler import Draw, Sampler
from ds_runtime.engine.step.transfer import Upload
from ds_runtime.grammar.followers import Followers, Following
from ds_runtime.grammar.guide import Guide
from ds_runtime.grammar.library import Grammars
from ds_runtime.ops.reference import sampling as reference
from ds_runtime.ops.table import Ops
from ds_runtime.output_rules import OutputRules
from ds_runtime.sampling_params import SamplingParams
from ds_runtime.text.tokenizer import Tokenizer
from ds_runtime_bench.record import append, environment
from ds_runtime_cpu import sampling as native

RESULTS = Path(__file__).parent / "results" / "masks.jsonl"
DEVICE = torch.device("cpu")
PASSES, STEPS = 20, 300


def figures(times: Sequence[float]) -> dict[str, float]:
    """Microseconds; the first pass, which fills the grammar's caches, is among them."""
    ordered = sorted(times)
    return {
        "mean": round(statistics.fmean(times), 1),
        "median": round(statistics.median(times), 1),
        "p99": round(ordered[int(len(ordered) * 0.99)], 1),
        "tokens": len(times),
    }


def follow(new: Callable[[], Guide], tokens: Sequence[int]) -> tuple[list[float], bytes]:
    """Microseconds per token, with the way to the thread and back; and a mask from the middle."""
    times, mask, followers = [], b"", Followers()
    for _ in range(PASSES):
        guide = new()
        for number, token in enumerate(tokens):
            begin = time.perf_counter()
            following = [Following(guide, [token], (), ())]
            followers.begin(following)
            followers.wait(following)
            times.append((time.perf_counter() - begin) * 1e6)
            if number == len(tokens) // 2:
                mask = guide.mask
    followers.close()
    return times, mask


def applying(mask_logits: Any, vocab: int, mask: bytes, rows: int) -> float:
    """Median microseconds that masks add to a step of `rows` greedy draws, per row."""
    bound = {"sample": native.sample, "logprobs": native.logprobs, "mask_logits": mask_logits}
    sampler = Sampler(Ops.of(bound, "sampler"), rows, vocab, DEVICE)
    for row in range(rows):
        start = RowInit(row=row, params=SamplingParams(), seed=0, choice=0, prompt=[1])
        sampler.start(start)
    logits = torch.randn(rows, vocab)

    def step(own: bytes | None) -> float:
        begin = time.perf_counter()
        sent = Upload(DEVICE)
        prepared = sampler.prepare([Draw(row, 5, mask=own) for row in range(rows)], sent)
        sent.send()
        sampler.draw(logits, prepared, sent)
        return (time.perf_counter() - begin) * 1e6

    extra = [step(mask) - step(None) for _ in range(STEPS)]
    return round(statistics.median(extra[STEPS // 10 :]) / rows, 1)


def measured(folder: Path) -> dict[str, Any]:
    """One tokenizer's row."""
    tokenizer = Tokenizer.load(folder)
    grammars = Grammars(folder, tokenizer.vocab_size, tokenizer.eos_ids)
    schemas, mask = {}, b""
    for name, (schema, instance) in TIMED.items():
        rules = OutputRules(json_schema=schema)
        matcher = grammars.ask(rules).result()
        tokens = tokenizer.encode(json.dumps(instance, ensure_ascii=False))
        times, mask = follow(lambda r=rules, m=matcher: grammars.guide(r, m), tokens)  # type: ignore[misc]
        schemas[name] = figures(times)
    grammars.close()
    guide = statistics.fmean(s["mean"] for s in schemas.values())
    sizes = (1, 16)
    applied = {n: applying(native.mask_logits, tokenizer.vocab_size, mask, n) for n in sizes}
    slow = {n: applying(reference.mask_logits, tokenizer.vocab_size, mask, n) for n in sizes}
    return {
        "bench": "masks",
        "vocab": tokenizer.vocab_size,
        "guide_us": schemas,
        "apply_us": applied,
        "reference_us": slow,
        "total_us": {n: round(guide + us, 1) for n, us in applied.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--tokenizer", nargs="+", default=["core/ds_runtime/demo"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--no-record", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    for folder in args.tokenizer:
        row = measured(Path(folder)) | {"threads": args.threads}
        print(json.dumps(row, indent=1))
        if not args.no_record:
            names = " ".join(Path(one).name for one in args.tokenizer)
            command = f"python benchmarks/mask_cost.py --tokenizer {names}"
            append(RESULTS, row | {"command": command} | environment())


if __name__ == "__main__":
    main()
