"""xgrammar against llguidance: time of a mask, and which JSON schemas are kept to.

    python benchmarks/compare_grammars.py --tokenizer core/ds_runtime/demo DIR ... [--no-record]

One thread, one request. Per schema of grammar_schemas.TIMED: compile time; then, along the tokens
of an instance and along draws from the masks (seeded), microseconds of "fill the mask" and "take
the token" together. Coverage: per feature, whether instances that satisfy the schema are accepted
and others refused, in the writing of json.dumps; jsonschema judged the instances. Needs xgrammar,
llguidance and jsonschema. Rows go to benchmarks/results/grammars.jsonl.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any, Protocol

import jsonschema
import numpy as np
from grammar_schemas import FEATURES, TIMED, Feature

from ds_runtime.text.tokenizer import Tokenizer
from ds_runtime_bench.record import append, environment

RESULTS = Path(__file__).parent / "results" / "grammars.jsonl"


class Matcher(Protocol):
    def fill(self) -> np.ndarray: ...
    def take(self, token: int) -> bool: ...
    def complete(self) -> bool: ...


class Library(Protocol):
    name: str

    def compile(self, schema: Any) -> Any: ...
    def matcher(self, compiled: Any) -> Matcher: ...


class LlGuidance:
    name = "llguidance"

    def __init__(self, tokenizer: Tokenizer) -> None:
        from llguidance import LLTokenizer

        text = tokenizer.backend.to_str()
        self.tokenizer = LLTokenizer(text, eos_token=tokenizer.eos_ids[0])
        self.words = -(-tokenizer.vocab_size // 32)

    def compile(self, schema: Any) -> Any:
        from llguidance import LLMatcher

        grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema))
        made = LLMatcher(self.tokenizer, grammar, log_level=0)
        if made.is_error():
            raise ValueError(made.get_error())
        return made

    def matcher(self, compiled: Any) -> Matcher:
        own, bits = compiled.deep_copy(), np.zeros(self.words, np.int32)
        address, size = bits.ctypes.data, bits.nbytes

        class One:
            def fill(self) -> np.ndarray:
                own.unsafe_compute_mask_ptr(address, size)
                return bits

            def take(self, token: int) -> bool:
                return own.consume_token(token)

            def complete(self) -> bool:
                return own.is_accepting()

        return One()


class XGrammar:
    name = "xgrammar"

    def __init__(self, tokenizer: Tokenizer) -> None:
        import xgrammar

        self.lib = xgrammar
        vocab = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
        info = xgrammar.TokenizerInfo(
            vocab, vocab_size=tokenizer.vocab_size, stop_token_ids=list(tokenizer.eos_ids)
        )
        self.compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self.words = -(-tokenizer.vocab_size // 32)

    def compile(self, schema: Any) -> Any:
        return self.compiler.compile_json_schema(json.dumps(schema), strict_mode=False)

    def matcher(self, compiled: Any) -> Matcher:
        import torch

        own = self.lib.GrammarMatcher(compiled)
        mask = torch.zeros(1, self.words, dtype=torch.int32)
        bits = mask.numpy()[0]

        class One:
            def fill(self) -> np.ndarray:
                own.fill_next_token_bitmask(mask)
                return bits

            def take(self, token: int) -> bool:
                return own.accept_token(token)

            def complete(self) -> bool:
                return own.is_completed()

        return One()


def allowed(bits: np.ndarray) -> np.ndarray:
    """The ids whose bits are set."""
    return np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))


def walk(matcher: Matcher, tokens: list[int]) -> list[float]:
    """Microseconds per token along `tokens`."""
    out = []
    for token in tokens:
        begin = time.perf_counter()
        matcher.fill()
        good = matcher.take(token)
        out.append((time.perf_counter() - begin) * 1e6)
        if not good:
            raise ValueError("an instance is refused")
    return out


def wander(matcher: Matcher, rng: random.Random, eos: int, steps: int) -> list[float]:
    """Microseconds per token along draws from the masks."""
    out = []
    for _ in range(steps):
        begin = time.perf_counter()
        bits = matcher.fill()
        spent = time.perf_counter() - begin
        ids = [i for i in allowed(bits).tolist() if i != eos]
        if not ids:
            break
        begin = time.perf_counter()
        matcher.take(rng.choice(ids))
        out.append((spent + time.perf_counter() - begin) * 1e6)
    return out


def figures(times: list[float]) -> dict[str, float]:
    ordered = sorted(times)
    return {
        "mean": round(statistics.fmean(times), 1),
        "median": round(statistics.median(times), 1),
        "p99": round(ordered[int(len(ordered) * 0.99)], 1),
        "max": round(ordered[-1], 1),
        "tokens": len(times),
    }


def timed(library: Library, tokenizer: Tokenizer) -> dict[str, Any]:
    """Per schema: compile milliseconds, first and again, and microseconds per token."""
    out: dict[str, Any] = {}
    for name, (schema, instance) in TIMED.items():
        compiles = []
        for _ in range(3):
            begin = time.perf_counter()
            compiled = library.compile(schema)
            compiles.append((time.perf_counter() - begin) * 1e3)
        tokens = tokenizer.encode(json.dumps(instance, ensure_ascii=False))
        try:
            first = walk(library.matcher(compiled), tokens)
            again = [t for _ in range(5) for t in walk(library.matcher(compiled), tokens)]
        except ValueError as e:
            out[name] = {"compile_ms": round(min(compiles), 2), "error": str(e)}
            continue
        rng, drawn = random.Random(1), []
        for _ in range(4):
            drawn += wander(library.matcher(compiled), rng, tokenizer.eos_ids[0], 60)
        out[name] = {
            "compile_ms": round(min(compiles), 2),
            "first_us": figures(first),
            "again_us": figures(again),
            "drawn_us": figures(drawn),
        }
    return out


def judge(library: Library, tokenizer: Tokenizer, feature: Feature) -> str:
    """kept, refused (said so), too strict, or too lax (silently)."""
    for value, good in [(v, True) for v in feature.valid] + [(v, False) for v in feature.invalid]:
        checker = jsonschema.Draft202012Validator(
            feature.schema, format_checker=jsonschema.FormatChecker()
        )
        assert checker.is_valid(value) == good, (feature.name, value)
    try:
        compiled = library.compile(feature.schema)
    except Exception:
        return "refused"

    def accepts(value: Any) -> bool:
        one = library.matcher(compiled)
        tokens = tokenizer.encode(json.dumps(value, ensure_ascii=False))
        return all(one.take(t) for t in tokens) and one.complete()

    if not all(accepts(v) for v in feature.valid):
        return "too strict"
    return "too lax" if any(accepts(v) for v in feature.invalid) else "kept"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--tokenizer", nargs="+", default=["core/ds_runtime/demo"])
    parser.add_argument("--no-record", action="store_true")
    parser.add_argument("--no-time", action="store_true")
    args = parser.parse_args()
    for number, folder in enumerate(args.tokenizer):
        tokenizer = Tokenizer.load(folder)
        for kind in (LlGuidance, XGrammar):
            begin = time.perf_counter()
            library = kind(tokenizer)
            row: dict[str, Any] = {
                "bench": "grammars",
                "library": library.name,
                "vocab": tokenizer.vocab_size,
                "load_s": round(time.perf_counter() - begin, 2),
            }
            if not args.no_time:
                row["schemas"] = timed(library, tokenizer)
            if number == 0:
                verdicts = {f.name: judge(library, tokenizer, f) for f in FEATURES}
                row["features"] = dict(Counter(verdicts.values()))
                row["not_kept"] = {n: v for n, v in verdicts.items() if v != "kept"}
            print(json.dumps(row, indent=1))
            if not args.no_record:
                append(RESULTS, row | environment())


if __name__ == "__main__":
    main()
