"""Rules → matchers, over one checkpoint's vocabulary, within bounds."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from ds_runtime.checkpoint.base import part_of
from ds_runtime.checkpoint.files import LISTS, read_object
from ds_runtime.errors import FieldPath, RequestError, shown
from ds_runtime.grammar.guide import MASK_SECONDS, Start, too_slow, words
from ds_runtime.grammar.source import Source, json_schema
from ds_runtime.output_rules import MAX_CHOICES, OutputRules, ToolRules

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits

_REGEX_FAULT = re.compile(r".* error: (.+?) 1 \| start: ")  # the last is the reason
_DIGEST = 300  # characters of the library's message
_PATH = 200  # characters of a field's path
_PROBES = 256  # subschemas that are tried, one by one, to find the one at fault
_CHILDREN = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "not", "if", "then", "else", "contains")


def why_not(folder: Path) -> str | None:
    """Why no output rule can be followed for this checkpoint, or None."""
    if find_spec("llguidance") is None:
        return "structured output needs the package llguidance: pip install llguidance"
    if not part_of(folder, "tokenizer.json").exists():
        return f"structured output needs a tokenizer, and {folder} has no tokenizer.json"
    return None


class Compiler:
    """Compiles for a model of `vocab_size` ids, of which `eos` end a text. The tokenizer may know
    more of them; those never come. `allowed`: words with the bits of ids that the model has.

    Time per mask is bounded by the limits below; time and memory of compiling are not quite, so
    rules of strangers go through `grammar/check.py` first.
    """

    def __init__(self, folder: Path, vocab_size: int, eos: Sequence[int]) -> None:
        from llguidance import LLTokenizer

        whole = read_object(part_of(folder, "tokenizer.json"), LISTS)
        added = whole.get("added_tokens") or []
        for token in added:  # never text, see grammar/source.py
            token["special"] = True
        self.allowed = _bits(vocab_size)
        self.eos = tuple(eos)
        self._source = Source({t["content"]: t["id"] for t in added})
        self._tokenizer = LLTokenizer(
            json.dumps(whole, ensure_ascii=False),
            n_vocab=max(vocab_size, 1 + _largest_id(whole)),
            eos_token=list(eos),
        )

    def compile(self, rules: OutputRules) -> Start:
        """A rule at its beginning. Raises RequestError that names the field and the fault."""
        matcher = self._make(rules)
        if matcher.is_error():
            raise self._fault(rules, matcher.get_error())
        # Reasoning that may come first says nothing about what is to come behind it.
        alone = rules.reasoning == "none" or rules.kind == "thinking_budget"
        plain = replace(rules, reasoning="none", thinking_budget=None) if not alone else rules
        answer = matcher if alone else self._make(plain)
        mask = self._first(rules, answer)
        return Start(matcher, mask if alone else self._first(rules, matcher))

    def _first(self, rules: OutputRules, matcher: LLMatcher) -> bytes:
        """The first mask of a matcher."""
        begin = time.thread_time()
        mask = words(matcher, self.allowed)
        seconds = time.thread_time() - begin
        if not any(mask) or matcher.is_error():
            said = matcher.get_error()
            empty = not said or "NoExtensionBias" in said
            raise self._fault(rules, "nothing can satisfy it" if empty else said)
        if seconds > MASK_SECONDS:
            raise self._fault(rules, too_slow(seconds, seconds))
        return mask

    def _make(self, rules: OutputRules) -> LLMatcher:
        from llguidance import LLMatcher

        grammar = self._source.grammar(rules)
        return LLMatcher(self._tokenizer, grammar, log_level=0, limits=_limits())

    def _fault(self, rules: OutputRules, said: str) -> RequestError:
        where, whose, found = rules.param, "", None
        if rules.kind == "json_schema":
            found = self._locate(rules, said)
        if found is not None:
            where, said = where + found[0], found[1]
        elif rules.tool_calls is not None:
            where, whose, said = self._locate_tool(rules.tool_calls, said)
        where = where if len(where) <= _PATH else where[: _PATH - 3] + "..."
        said = " ".join(said.replace("<non-verbose/>", "").split())
        if rules.kind == "regex" and (fault := _REGEX_FAULT.search(said)) is not None:
            said = fault[1]  # not the grammar around it, which the client has not sent
        said = said if len(said) <= _DIGEST else said[: _DIGEST - 3] + "..."
        return RequestError.of(where, f"{whose} cannot be compiled: {said}")

    def _locate(self, rules: OutputRules, said: str) -> tuple[str, str] | None:
        """(path, message) of the innermost subschema that fails on its own as well; None where the
        whole schema does not, but something beside it."""
        plain = replace(rules, reasoning="none", thinking_budget=None, tool_calls=None)
        if rules.tool_calls is not None:
            whole = self._make(plain)
            if not whole.is_error():
                return None
            said = whole.get_error()
        root = schema = json_schema(rules.json_schema)
        path, left, failing = "", _PROBES, True
        shared = {k: root[k] for k in ("$defs", "definitions") if k in root}
        while failing:
            failing = False
            for step, child in _subschemas(schema):
                if not left:
                    break
                left -= 1
                alone = {**shared, **child} if isinstance(child, dict) else child
                try:
                    matcher = self._make(replace(plain, json_schema=alone))
                except RequestError as e:
                    parts = ["it" if isinstance(part, FieldPath) else part for part in e.said]
                    return path + step, "".join(parts)
                if matcher.is_error():
                    schema, path, said, failing = child, path + step, matcher.get_error(), True
                    break
        return path, said

    def _locate_tool(self, calls: ToolRules, said: str) -> tuple[str, str, str]:
        """(field, whose it is, message) of the first tool whose schema fails on its own as well."""
        for i, tool in enumerate(calls.tools):
            if isinstance(tool.parameters, dict):
                alone = OutputRules(json_schema=tool.parameters)
                matcher = self._make(alone)
                if matcher.is_error():
                    path, said = self._locate(alone, matcher.get_error()) or ("", said)
                    field = tool.field or f"tools[{i}].function.parameters"
                    return field + path, f" (of {shown(tool.name)})", said
        return "tools", "", said


def _bits(count: int) -> npt.NDArray[np.uint32]:
    """Words whose first `count` bits are set."""
    bits = np.zeros(-(-count // 32) * 32, np.uint8)
    bits[:count] = 1
    return np.packbits(bits, bitorder="little").view(np.uint32)


def _largest_id(tokenizer: Mapping[str, Any]) -> int:
    """The largest id in a tokenizer.json."""
    vocab = (tokenizer.get("model") or {}).get("vocab") or {}
    ids = list(vocab.values()) if isinstance(vocab, Mapping) else [len(vocab) - 1]
    ids += [token["id"] for token in tokenizer.get("added_tokens") or []]
    return max(ids, default=-1)


def _subschemas(schema: Any) -> Iterator[tuple[str, Any]]:
    """(path, subschema) of a schema's direct children."""
    if not isinstance(schema, dict):
        return
    for key in _CHILDREN:
        if isinstance(named := schema.get(key), dict):
            yield from ((f".{key}.{name}", child) for name, child in named.items())
    for key in _LISTS:
        if isinstance(listed := schema.get(key), list):
            yield from ((f".{key}[{i}]", child) for i, child in enumerate(listed))
    for key in _SINGLE:
        if isinstance(schema.get(key), dict):
            yield f".{key}", schema[key]


def _limits() -> LLParserLimits:
    """Bounds of one mask: some milliseconds, and some tens of megabytes per grammar."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_items_in_row=4 * MAX_CHOICES,
        step_max_items=20_000,
        step_lexer_fuel=100_000,
        max_lexer_states=20_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )
