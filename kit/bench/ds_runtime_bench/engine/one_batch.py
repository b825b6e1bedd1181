"""Prefill and decode rates of one batch: random prompts of equal length, no early end.

A run times generate() twice: with one output token (prefill) and with all of them; the
difference is decode. Medians over runs. The prefix cache is off, and one warm-up run of each
shape is not counted.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ds_runtime.engine.process.entry import set_environment
from ds_runtime.errors import ConfigError
from ds_runtime_bench.record import environment, peak_bytes

if TYPE_CHECKING:
    from ds_runtime.offline.llm import LLM


@dataclass(frozen=True, slots=True)
class Rates:
    """Medians over runs. Seconds; rates in tokens per second over the whole batch."""

    batch_size: int
    input_len: int
    output_len: int
    runs: int
    prefill_s: float
    decode_s: float
    prefill_tokens_per_s: float
    decode_tokens_per_s: float


def random_prompts(batch: int, length: int, vocab: int, seed: int = 0) -> list[list[int]]:
    """`batch` prompts of `length` random ids below `vocab`; the same for the same seed."""
    draw = random.Random(seed)
    return [[draw.randrange(vocab) for _ in range(length)] for _ in range(batch)]


def rates(shape: tuple[int, int, int], prefill: Sequence[float], total: Sequence[float]) -> Rates:
    """Medians from the times of each run with one and with all output tokens."""
    batch, input_len, output_len = shape
    first = statistics.median(prefill)
    rest = statistics.median(max(t - p, 1e-9) for p, t in zip(prefill, total, strict=True))
    return Rates(
        batch,
        input_len,
        output_len,
        len(prefill),
        first,
        rest,
        batch * input_len / first,
        batch * (output_len - 1) / rest,
    )


def generate_seconds(llm: LLM, prompts: Sequence[Sequence[int]], tokens: int) -> float:
    """Time to generate `tokens` tokens for every prompt."""
    from ds_runtime.sampling_params import SamplingParams

    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    asked = [list(prompt) for prompt in prompts]
    start = time.perf_counter()
    outputs = llm.generate(asked, params)
    spent = time.perf_counter() - start
    produced = [len(o.token_ids) for o in outputs]
    assert produced == [tokens] * len(asked), produced
    return spent


def measure(llm: LLM, shape: tuple[int, int, int], vocab: int, runs: int) -> Rates:
    """Time one (batch, input length, output length) on a loaded engine."""
    batch, input_len, output_len = shape
    prompts = random_prompts(batch, input_len, vocab)

    timed = partial(generate_seconds, llm, prompts)
    timed(min(2, output_len))
    times = [(timed(1), timed(output_len)) for _ in range(runs)]
    return rates(shape, [p for p, _ in times], [t for _, t in times])


def run(
    settings: Mapping[str, Any],
    batch_sizes: Sequence[int],
    input_len: int,
    output_len: int,
    runs: int,
) -> dict[str, Any]:
    """Load the engine with these EngineConfig fields and measure every batch size."""
    for name, value, least in (
        ("--batch-size", min(batch_sizes, default=0), 1),
        ("--input-len", input_len, 1),
        ("--output-len", output_len, 2),
        ("--runs", runs, 1),
    ):
        if value < least:
            raise ConfigError(f"{name} {value}: must be at least {least}")
    from ds_runtime.assembly.assemble import assemble
    from ds_runtime.config import EngineConfig

    set_environment(assemble(EngineConfig(**settings), tuple(settings)).platform.process_env())
    from ds_runtime import LLM
    from ds_runtime.checkpoint.hub import resolve_model
    from ds_runtime.description.hf import load_config

    model = str(settings.get("model", "demo"))
    vocab = load_config(resolve_model(model)).vocab_size
    start = time.perf_counter()
    with LLM(**{"disable_radix_cache": True, **settings}) as llm:
        load_s = time.perf_counter() - start
        found = [measure(llm, (b, input_len, output_len), vocab, runs) for b in batch_sizes]
    return {
        "bench": "one-batch",
        "model": model,
        "settings": {k: v for k, v in settings.items() if k != "model"},
        "load_s": load_s,
        "results": [asdict(r) for r in found],
        "peak_bytes": peak_bytes(),
        **environment(),
    }


def render(report: Mapping[str, Any]) -> str:
    """The report for people."""
    lines = [f"{report['model']}: loaded in {report['load_s']:.1f} s"]
    for r in report["results"]:
        lines.append(
            f"batch {r['batch_size']:>3}, {r['input_len']} in, {r['output_len']} out: "
            f"prefill {r['prefill_tokens_per_s']:,.0f} tokens/s, "
            f"decode {r['decode_tokens_per_s']:,.1f} tokens/s (median of {r['runs']})"
        )
    lines.append(f"peak resident size {report['peak_bytes'] / 2**30:.2f} GiB")
    return "\n".join(lines)
