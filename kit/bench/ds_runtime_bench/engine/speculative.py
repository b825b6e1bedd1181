"""Which speculation pays: chains and trees of several sizes and plain decode, in one run.

Prompts are the checkpoint's held-out tool calls, where it has some, and random ones else, for which
an acceptance can be simulated. Then requests sample at a temperature of 1, because greedy
continuations of random weights repeat themselves and so choose fewer experts than real ones. A
figure is decode alone: the time of all tokens less that of the first, medians over runs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_runtime.errors import ConfigError
from ds_runtime_bench.engine.one_batch import random_prompts
from ds_runtime_bench.record import environment

if TYPE_CHECKING:
    from ds_runtime.offline.llm import LLM

PROMPTS = 8  # held-out prompts per batch slot


@dataclass(frozen=True, slots=True)
class Figure:
    """One setting at one batch size. steps 0: plain decode; None: as many as --speculative-adaptive
    chooses. length: tokens per verification.
    """

    batch_size: int
    steps: int | None
    topk: int
    draft_tokens: int | None  # verified, the last one drawn included
    tokens_per_s: float
    length: float
    acceptance: float
    tokens: int


def run(
    settings: Mapping[str, Any],
    batch_sizes: Sequence[int],
    steps: Sequence[int],
    lens: tuple[int, int],
    runs: int,
    simulated: float | None = None,
    topks: Sequence[int] = (1,),
    nodes: Sequence[int] = (),
) -> dict[str, Any]:
    """Load the engine plainly, once for all chains, and once per tree; first of all every setting
    is looked at. lens: input (of random prompts) and output. nodes: tokens that trees verify; none:
    whole trees.
    """
    for name, value in (
        ("--batch-size", min(batch_sizes, default=0)),
        ("--steps", min(steps, default=0)),
        ("--topk", min(topks, default=0)),
        ("--draft-tokens", min(nodes, default=2) - 1),
        ("--runs", runs),
        ("--input-len", lens[0]),
    ):
        if value < 1:
            least = 2 if name == "--draft-tokens" else 1
            raise ConfigError(f"{name} {value + least - 1}: must be at least {least}")
    if lens[1] < 2:
        raise ConfigError(f"--output-len {lens[1]}: must be at least 2")
    if simulated is not None and not 0.0 <= simulated <= 1.0:
        raise ConfigError(f"--simulate-acceptance {simulated:g}: must be a probability, 0 to 1")
    from ds_runtime import LLM
    from ds_runtime.checkpoint.hub import resolve_model

    impossible = _impossible(steps, topks, nodes)
    folder = resolve_model(str(settings.get("model", "demo")))
    natural = _held_out(folder, simulated) is not None
    batch_sizes, nodes = tuple(dict.fromkeys(batch_sizes)), tuple(dict.fromkeys(nodes))
    given = {"disable_radix_cache": True, "speculative_algorithm": "NEXTN", **settings}
    running = given.setdefault("max_running_requests", max(batch_sizes))
    if running < max(batch_sizes):
        raise ConfigError(
            f"--batch-size {max(batch_sizes)}: only --max-running-requests {running} run at once: "
            "give a larger one, or leave it out"
        )
    found, answers = [], dict[int, list[list[int]]]()
    for chosen, forced in _engines(given, sorted(set(steps)), sorted(set(topks)), nodes):
        with LLM(**chosen) as llm:
            drafts = "speculative_algorithm" in chosen
            if drafts and simulated is not None:
                llm.simulate_acceptance(simulated)
            for size in batch_sizes:
                prompts = _prompts(llm, folder, size, lens[0], simulated)
                for count, shape in forced.items():
                    if drafts:
                        llm.force_drafts(count)
                    heat = 0.0 if simulated is None else 1.0
                    asked = lens[1], heat, natural
                    figure, ids = _measure(llm, prompts, size, shape, asked, runs)
                    found.append(figure)
                    same = answers.setdefault(size, ids) == ids or simulated is not None
                    if not same and given.get("dtype") == "float32":
                        said = _named(asdict(figure))
                        raise ConfigError(f"batch {size}, {said}: greedy answers differ")
    return {
        "bench": "speculative",
        "model": str(settings.get("model", "demo")),
        "settings": {k: v for k, v in settings.items() if k != "model"},
        "simulated": simulated,
        "left_out": impossible,
        "results": [asdict(f) for f in found],
        **environment(),
    }


Shape = tuple[int | None, int, int | None]  # steps, topk, tokens verified, as in Figure


def _impossible(steps: Sequence[int], topks: Sequence[int], nodes: Sequence[int]) -> list[str]:
    """The trees asked for that cannot be, in words; ConfigError if nothing else was asked for."""
    from ds_runtime.common.speculation import Speculation

    wide, said = [k for k in topks if k > 1], list[str]()
    if nodes and not wide:
        numbers = " ".join(map(str, nodes))
        raise ConfigError(
            f"--draft-tokens {numbers}: is of trees: give --topk 2 or more, or leave it out"
        )
    for count, topk in ((count, topk) for count in steps for topk in wide):
        whole = Speculation.whole(count, topk)
        said += [
            f"--draft-tokens {tokens}: a tree of --steps {count} and --topk {topk} has {whole} "
            "tokens: give at most that"
            for tokens in nodes
            if tokens > whole
        ]
    if said and 1 not in topks and len(said) == len(steps) * len(wide) * len(nodes):
        raise ConfigError(said[0])
    return said


def _engines(
    given: Mapping[str, Any], steps: Sequence[int], topks: Sequence[int], nodes: Sequence[int]
) -> list[tuple[dict[str, Any], dict[int | None, Shape]]]:
    """Settings of the engines to load, each with what it is measured as: forced drafts → shape."""
    from ds_runtime.common.speculation import Speculation
    from ds_runtime.config import EngineConfig

    plain = {k: v for k, v in given.items() if not k.startswith("speculative_")}
    found: list[tuple[dict[str, Any], dict[int | None, Shape]]] = [(plain, {None: (0, 1, 1)})]
    if 1 in topks:
        longest = {"speculative_num_steps": max(steps), "speculative_adaptive": True}
        chains: dict[int | None, Shape] = {n: (n, 1, n + 1) for n in steps}
        EngineConfig(**{**given, **longest})  # refused before the plain engine is loaded
        found.append(({**given, **longest}, {**chains, None: (None, 1, None)}))
    for count in steps:
        for topk in topks:
            whole = Speculation.whole(count, topk)
            possible = [n for n in nodes if n <= whole] if nodes else [None]
            for tokens in possible if topk > 1 else ():
                tree = {"speculative_num_steps": count, "speculative_eagle_topk": topk}
                chosen = {**given, **tree, "speculative_num_draft_tokens": tokens}
                shape = Speculation.of(EngineConfig(**chosen))
                assert shape is not None
                found.append((chosen, {shape.drafts: (count, topk, shape.tokens)}))
    return found


def _named(row: Mapping[str, Any]) -> str:
    """A setting in words."""
    if row["steps"] is None:
        return "adaptive"
    if not row["steps"]:
        return "plain"
    tree = f", top-k {row['topk']}, {row['draft_tokens']} tokens" if row["topk"] > 1 else ""
    return f"{row['steps']} steps{tree}"


def _flags(row: Mapping[str, Any]) -> str:
    if row["steps"] is None:
        return "--speculative-adaptive"
    if not row["steps"]:
        return "no speculation"
    found = f"--speculative-num-steps {row['steps']}"
    if row["topk"] > 1:
        found += f" --speculative-eagle-topk {row['topk']}"
        found += f" --speculative-num-draft-tokens {row['draft_tokens']}"
    return found


def _held_out(folder: Path, simulated: float | None) -> Path | None:
    """The checkpoint's held-out chats, where these are what is measured."""
    path = folder / "heldout.json"
    return path if simulated is None and path.is_file() else None


def _prompts(
    llm: LLM, folder: Path, size: int, input_len: int, simulated: float | None
) -> list[list[int]]:
    """At least `size` prompts, in batches of as many."""
    path = _held_out(folder, simulated)
    if path is None:
        return random_prompts(size, input_len, llm.vocab_size)
    from ds_runtime.text.formats.families import find_family
    from ds_runtime.text.formats.template import load_template
    from ds_runtime_bench.engine.accuracy import load_heldout

    template = load_template(folder, llm.tokenizer, family=find_family(folder))
    assert template is not None, "a checkpoint with held-out chats has a template"
    entries = load_heldout(path)[0]["tools"][: PROMPTS * size]
    if len(entries) < size:
        raise ConfigError(
            f"--batch-size {size}: the checkpoint has {len(entries)} held-out prompts: give at "
            "most that, or random ones by --simulate-acceptance"
        )
    texts = [template.render(e["messages"], e.get("tools")) for e in entries]
    return [llm.tokenizer.encode(text) for text in texts]


def _measure(
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    size: int,
    shape: Shape,
    asked: tuple[int, float, bool],
    runs: int,
) -> tuple[Figure, list[list[int]]]:
    """asked: tokens of an answer, the temperature, and whether it ends where it ends."""
    from ds_runtime.sampling_params import SamplingParams

    output_len, heat, natural = asked

    def timed(tokens: int) -> tuple[float, list[list[int]]]:
        params = [
            SamplingParams(max_tokens=tokens, ignore_eos=not natural, temperature=heat, seed=i)
            for i in range(size)
        ]
        ids: list[list[int]] = []
        start = time.perf_counter()
        for first in range(0, len(prompts), size):
            batch = [list(p) for p in prompts[first : first + size]]
            ids += [list(o.token_ids) for o in llm.generate(batch, params[: len(batch)])]
        return time.perf_counter() - start, ids

    _, ids = timed(output_len)
    before = llm.stats()
    whole, first = ([timed(n)[0] for _ in range(runs)] for n in (output_len, 1))
    after = llm.stats()
    tokens = sum(len(one) - 1 for one in ids)
    seconds = statistics.median(whole) - statistics.median(first)
    verified = after.verified - before.verified
    drafted = after.draft_tokens - before.draft_tokens
    accepted = after.accepted_tokens - before.accepted_tokens
    return Figure(
        size,
        *shape,
        tokens / max(seconds, 1e-9),
        1 + accepted / verified if verified else 1.0,
        accepted / drafted if drafted else 0.0,
        tokens,
    ), ids


def render(report: Mapping[str, Any]) -> str:
    """The report for people: every figure, and per batch size the best."""
    lines = [f"{report['model']}: decode with and without speculation"]
    for size in sorted({r["batch_size"] for r in report["results"]}):
        rows = [r for r in report["results"] if r["batch_size"] == size]
        plain = next(r for r in rows if r["steps"] == 0)["tokens_per_s"]
        width = max(len(_named(r)) for r in rows)
        for r in rows:
            lines.append(
                f"batch {size:>3}, {_named(r):<{width}} {r['tokens_per_s']:>10,.1f} tokens/s  "
                f"{r['tokens_per_s'] / plain:.2f} ×  acceptance length {r['length']:.2f} "
                f"({r['acceptance']:.0%} of drafts)"
            )
        best = max(rows, key=lambda r: r["tokens_per_s"])
        lines.append(f"batch {size:>3}: best with {_flags(best)}")
    lines += [f"left out: {said}" for said in report["left_out"]]
    return "\n".join(lines)
