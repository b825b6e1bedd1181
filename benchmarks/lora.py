"""Tokens per second of the demo with random adapters: none, one, and four in a batch.

python benchmarks/lora.py [--rows 4] [--tokens 96] [--repeats 5]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from ds_runtime import LLM, SamplingParams
from ds_runtime.checkpoint.hub import resolve_model
from ds_runtime.description.hf import load_config
from ds_runtime_kit.models.adapters import write_adapter


def rate(llm: LLM, rows: int, tokens: int, names: list[str | None]) -> float:
    """Generated tokens per second of one batch."""
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    prompts = [[5 + row, 6, 7, 8] for row in range(rows)]
    start = time.perf_counter()
    llm.generate(prompts, params, lora=[names[row % len(names)] for row in range(rows)])
    return rows * tokens / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rank", type=int, default=16)
    given = parser.parse_args()
    config = load_config(resolve_model("demo"))
    with tempfile.TemporaryDirectory() as folder:
        plain, experts = [], []
        for seed in range(4):
            at = Path(folder) / str(seed)
            write_adapter(
                at, config, lambda m: ".experts." not in m, rank=given.rank, alpha=1.0, seed=seed
            )
            plain.append(f"{seed}={at}")
        at = Path(folder) / "all"
        write_adapter(at, config, rank=given.rank, alpha=1.0)
        experts.append(f"all={at}")
        reference = {"pin": ("lora_delta=reference",)}
        four: list[str | None] = ["0", "1", "2", "3"]
        for what, settings, cases in (
            ("no slots", {}, {"none": [None]}),
            ("4 slots", {"lora": tuple(plain)}, {"none": [None], "one": ["0"], "four": four}),
            (
                "4 slots, reference",
                {"lora": tuple(plain)} | reference,
                {"one": ["0"], "four": four},
            ),
            ("1 slot, experts too", {"lora": tuple(experts)}, {"none": [None], "one": ["all"]}),
        ):
            with LLM("demo", platform="cpu", disable_radix_cache=True, **settings) as llm:
                for name, names in cases.items():
                    rate(llm, given.rows, 8, names)
                    found = [
                        rate(llm, given.rows, given.tokens, names) for _ in range(given.repeats)
                    ]
                    low, high = min(found), max(found)
                    print(
                        f"{what}; {name} in a batch of {given.rows}: "
                        f"{statistics.median(found):.0f} tokens/s ({low:.0f} to {high:.0f})",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
