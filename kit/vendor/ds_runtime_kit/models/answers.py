"""What it means that two engines answer alike.

With `--batch-invariant` the same engine gives the same bits: `bits`. Elsewhere another order of
sums shows: in float32 tokens are equal and log-probabilities nearly so (`check_float32`). In
bfloat16 and FP8 the first different token was nearly as likely, and a text is scored nearly alike
(`check_coarse`). All take the outputs of `LLM.generate`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ds_runtime import LLM

FLOAT32 = 1e-5  # most that log-probabilities differ in float32
NEAR = 0.05  # most that they do in coarser dtypes, and the gap of a near-tie


def bits(entries: Iterable[Any]) -> list[bytes]:
    """Of each position the tokens and log-probabilities as they are in memory."""
    pairs = [(e.token, e.logprob, *(x for pair in e.top for x in pair)) for e in entries]
    return [struct.pack("=" + "qf" * (len(pair) // 2), *pair) for pair in pairs]


def positions(output: Any) -> Iterator[tuple[str, Any]]:
    """(where, entry) of every log-probability that an output carries."""
    for of, entries in (("prompt", output.prompt_logprobs), ("answer", output.logprobs)):
        for number, entry in enumerate(entries or ()):
            if entry is not None:
                yield f"{of}[{number}]", entry


def check_float32(ours: Sequence[Any], theirs: Sequence[Any], tolerance: float = FLOAT32) -> None:
    """Raises AssertionError unless tokens are equal, and log-probabilities to the tolerance."""
    for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert a.token_ids == b.token_ids, f"answer {number}: {a.token_ids}, not {b.token_ids}"
        for (where, x), (_, y) in zip(positions(a), positions(b), strict=True):
            said = f"output {number}, {where}: {x.logprob}, not {y.logprob}"
            assert x.token == y.token and abs(x.logprob - y.logprob) <= tolerance, said


def check_coarse(
    ours: Sequence[Any], theirs: Sequence[Any], scored_by: LLM | None = None, near: float = NEAR
) -> None:
    """Raises AssertionError unless the first different token of each pair of greedy answers is
    at a near-tie. Answers have the log-probabilities of two alternatives at least. scored_by: the
    engine of `ours`, by which the texts of `theirs` are scored `near` enough, too.
    """
    for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        pairs = zip(a.token_ids, b.token_ids, strict=False)
        first = next((i for i, (x, y) in enumerate(pairs) if x != y), None)
        if first is not None:
            (_, best), (_, second), *_ = b.logprobs[first].top
            said = f"answer {number}, token {first}: {a.token_ids[first]}, not {b.token_ids[first]}"
            assert best - second < near, f"{said}, where the gap is {best - second:.3g}"
    if scored_by is None:
        return
    for number, (b, scores) in enumerate(zip(theirs, forced(scored_by, theirs), strict=True)):
        for i, (x, y) in enumerate(zip(scores, b.logprobs, strict=True)):
            said = f"answer {number}, token {i}: scored {x.logprob:.4f}, not {y.logprob:.4f}"
            assert abs(x.logprob - y.logprob) < near, said


def forced(llm: LLM, outputs: Sequence[Any], alternatives: int = 1) -> list[list[Any]]:
    """The log-probabilities that an engine gives the tokens of these answers, as prompts."""
    from ds_runtime import SamplingParams

    params = SamplingParams(max_tokens=1, prompt_logprobs=alternatives, ignore_eos=True)
    texts = [output.prompt_token_ids + output.token_ids for output in outputs]
    found = llm.generate(texts, [params] * len(texts))
    return [
        (one.prompt_logprobs or [])[len(output.prompt_token_ids) :]
        for one, output in zip(found, outputs, strict=True)
    ]
