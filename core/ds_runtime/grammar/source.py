"""Output rules as grammars in llguidance's language (Lark with JSON schemas inside).

Every token that the tokenizer adds to its vocabulary (roles, tool markers, `<think>`) is special to
the grammars. It never counts as text and comes only where a grammar names it by id.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from ds_runtime.errors import RequestError
from ds_runtime.grammar.keywords import without_idle
from ds_runtime.output_rules import OutputRules, ToolRules, ToolSchema

OPEN, CLOSE = "<think>", "</think>"
# Without a bound, a model may write white space for ever.
_JSON_OPTIONS = {"whitespace_pattern": r" |\n[ ]{0,32}", "lenient": False}
_TEXT = "/(?s:.*)/"


class Source:
    """Writes grammars for one vocabulary. `added`: id of every token added to it, by its text."""

    def __init__(self, added: Mapping[str, int]) -> None:
        self._added = {text: token for text, token in added.items() if text}
        texts = sorted(self._added, key=len, reverse=True)
        self._split = re.compile("(" + "|".join(map(re.escape, texts)) + ")" if texts else "(?!)")

    def grammar(self, rules: OutputRules) -> str:
        """The grammar of `rules`. Raises RequestError where llguidance's translators do."""
        if rules.kind == "thinking_budget":
            return json.dumps({"grammars": [{"lark_grammar": self._bounded(rules)}]})
        parts = [{"name": "answer", **self._answer(rules)}]
        if rules.kind != "tool_calls" and rules.tool_calls is not None:
            parts.append({"name": "calls", "lark_grammar": self._calls(rules.tool_calls)})
        if rules.reasoning == "none" and len(parts) == 1:
            return json.dumps({"grammars": parts})
        thought = {
            "none": "",
            "open": f"{self.literal(OPEN)}? thought",
            "optional": f"({self.literal(OPEN)} thought)?",
        }[rules.reasoning]
        answers = " | ".join(f"@{part['name']}" for part in parts)
        upto = self._upto(CLOSE)
        if rules.thinking_budget is not None:
            upto = self._at_most(rules, sorted(self._added.values()))
        lark = f"start: {thought} ({answers})\nthought: {upto}\n{self._texts()}"
        return json.dumps({"grammars": [{"name": "whole", "lark_grammar": lark}, *parts]})

    def _bounded(self, rules: OutputRules) -> str:
        """Anything, behind a thought that ends in time. A call that begins inside ends it, too."""
        calls = [self._added[text] for text in _CALLS if text in self._added]
        thought = self._at_most(rules, [self._added.get(CLOSE, 0), *calls])
        opens = f"<[{self._added[OPEN]}]>"
        first = f"{opens}? thought" if rules.reasoning == "open" else f"({opens} thought)?"
        rest = "<[*]>*" if rules.reasoning == "open" else f"(<[^{self._added[OPEN]}]> <[*]>*)?"
        if calls and rules.thinking_budget:
            ends = ",".join(map(str, calls))
            never = f"{self._added[CLOSE]},{ends}"
            thought += f" | {_some(f'<[^{never}]>', rules.thinking_budget - 1)}<[{ends}]>"
        return f"start: {first} {rest}\nthought: {thought}\n"

    def _at_most(self, rules: OutputRules, never: Sequence[int]) -> str:
        """A thought of as many tokens as the budget has, none of them among `never`."""
        if OPEN not in self._added or CLOSE not in self._added:
            raise RequestError.of(
                rules.budget_param,
                f" is {rules.thinking_budget}, but this model has no tokens {OPEN} and {CLOSE} "
                "that its thinking could be counted between: leave it out",
            )
        token = f"<[^{','.join(map(str, never))}]>"
        return f"{_some(token, rules.thinking_budget or 0)}<[{self._added[CLOSE]}]>"

    def _answer(self, rules: OutputRules) -> dict[str, Any]:
        if rules.kind == "json_schema":
            return {"json_schema": json_schema(rules.json_schema)}
        if rules.tool_calls is not None:
            return {"lark_grammar": self._calls(rules.tool_calls)}
        if rules.choice:
            return {"lark_grammar": f"start: {' | '.join(map(quoted, rules.choice))}"}
        return _library_grammar(rules)

    # ---- pieces of Lark ----

    def literal(self, text: str) -> str:
        """Exactly `text`, its added tokens by id."""
        parts = [p for p in self._split.split(text) if p]
        named = (f"<[{self._added[p]}]>" if p in self._added else quoted(p) for p in parts)
        return " ".join(named)

    def _upto(self, end: str) -> str:
        """Any text, up to `end` and with it."""
        head = self._head(end)
        if not head:  # no text can hold it
            return f"TEXT {self.literal(end)}"
        upto = f"upto_{head.encode().hex()}"
        # The text may hold what `end` begins with; only a token behind it ends the text.
        return upto if head == end else f"{upto}+ {self.literal(end[len(head) :])}"

    def _head(self, end: str) -> str:
        """`end` up to the first added token in it."""
        return self._split.split(end, maxsplit=1)[0]

    def _texts(self) -> str:
        """The rules that `_upto` names."""
        heads = filter(None, map(self._head, (CLOSE, _PARAMETER_END)))
        rules = (f"upto_{h.encode().hex()}[suffix={quoted(h)}]: {_TEXT}\n" for h in heads)
        return f"TEXT: {_TEXT}\n" + "".join(rules)

    # ---- tool calls ----

    def _calls(self, rules: ToolRules) -> str:
        names = [f"tool_{i}" for i in range(len(rules.tools))]
        any_tool, lit = " | ".join(names), self.literal
        begin, end = lit("<｜tool▁call▁begin｜>"), lit("<｜tool▁call▁end｜>")
        first, last = lit("<｜tool▁calls▁begin｜>"), lit("<｜tool▁calls▁end｜>")
        if rules.format == "deepseekv3":
            between, write = '"\\n" ', self._fenced
            call = f"{begin} {lit('function<｜tool▁sep｜>')} ({any_tool}) {end}"
        elif rules.format == "deepseekv31":
            between, write = "", self._bare
            call = f"{begin} ({any_tool}) {end}"
        else:
            block, empty = _DSML[rules.format]
            between, write, call = '"\\n" ', partial(self._dsml, empty=empty), any_tool
            first = f'"\\n\\n"? {lit(f"<｜DSML｜{block}>")} "\\n"'
            last = f'"\\n" {lit(f"</｜DSML｜{block}>")}'
        more = f" ({between}call)*" if rules.several else ""
        tools = "".join(write(n, t) for n, t in zip(names, rules.tools, strict=True))
        return f"start: {first} call{more} {last}\ncall: {call}\n{tools}{self._texts()}"

    def _fenced(self, rule: str, tool: ToolSchema) -> str:
        begin = self.literal(f"{tool.name}\n```json\n")
        return f'{rule}: {begin} {_json(_arguments(tool))} "\\n```"\n'

    def _bare(self, rule: str, tool: ToolSchema) -> str:
        return f"{rule}: {self.literal(f'{tool.name}<｜tool▁sep｜>')} {_json(_arguments(tool))}\n"

    def _dsml(self, rule: str, tool: ToolSchema, empty: str) -> str:
        begin = self.literal(f'<｜DSML｜invoke name="{tool.name}">\n')
        end = self.literal("</｜DSML｜invoke>")
        schema = _arguments(tool)
        properties = _plain_properties(schema)
        if properties is None:  # one JSON object, which the format's readers take as well
            return f'{rule}: {begin} {_json(schema)} "\\n" {end}\n'
        if not properties:
            return f"{rule}: {begin} {empty}{end}\n"
        required, parts, rules = schema.get("required", ()), [], []
        for i, (name, own) in enumerate(properties.items()):
            parts.append(f"{rule}_{i}" if name in required else f"{rule}_{i}?")
            rules.append(f"{rule}_{i}: {self._parameter(name, own, schema)}\n")
        return f"{rule}: {begin} {' '.join(parts)} {end}\n{''.join(rules)}"

    def _parameter(self, name: str, own: Any, whole: Mapping[str, Any]) -> str:
        is_text, value = True, ""
        if own == {"type": "string"}:
            value = self._upto(_PARAMETER_END)
        elif (words := _words(own)) is not None:
            value = f"({' | '.join(map(quoted, words))}) {self.literal(_PARAMETER_END)}"
        else:
            is_text = False
            scoped = {**own, **{k: whole[k] for k in _DEFINITIONS if k in whole}}
            value = f"{_json(scoped)} {self.literal(_PARAMETER_END)}"
        told = "true" if is_text else "false"
        begin = self.literal(f'<｜DSML｜parameter name="{name}" string="{told}">')
        return f'{begin} {value} "\\n"'


def _some(token: str, most: int) -> str:
    return f"{token}{{0,{most}}} " if most else ""


_PARAMETER_END = "</｜DSML｜parameter>"
_CALLS = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "｜DSML｜", "<tool_call>")
# The block's name, and what stands in a call without arguments.
_DSML = {"deepseekv32": ("function_calls", '"\\n" '), "deepseekv4": ("tool_calls", "")}
_DEFINITIONS = ("$defs", "definitions")
_GBNF = re.compile(
    r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE
)  # a rule's name, and what Lark writes as ":"
_NOTES = frozenset({"title", "description", "default", "examples", "$comment"})
_PLAIN = frozenset({"type", "properties", "required", "additionalProperties", "$schema", "strict"})


def quoted(text: str) -> str:
    """A Lark string."""
    return _as_json(text)


def _as_json(value: Any) -> str:
    """JSON as the grammar's lexer reads it, which takes no DEL as it is."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def json_schema(schema: Any) -> dict[str, Any]:
    """A schema as an object, without what restricts nothing, with this runtime's options."""
    if isinstance(schema, str):
        schema = json.loads(schema)
    schema = without_idle(schema)
    whole = dict(schema) if isinstance(schema, dict) else {}
    return {**whole, "x-guidance": _JSON_OPTIONS}


def _json(schema: Any) -> str:
    return f"%json {_as_json(json_schema(schema))}"


def _arguments(tool: ToolSchema) -> dict[str, Any]:
    """The schema of a tool's arguments, always an object's."""
    given = without_idle(tool.parameters)
    if not given:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return {"type": "object", **given} if isinstance(given, dict) else {"type": "object"}


def _plain_properties(schema: Mapping[str, Any]) -> dict[str, Any] | None:
    """Schemas by name where each stands for itself; None where keywords tie them together."""
    rest = schema.keys() - _PLAIN - _NOTES - {*_DEFINITIONS}
    properties = schema.get("properties", {})
    if rest or schema["type"] != "object" or not isinstance(properties, dict):
        return None
    if not set(schema.get("required", ())) <= properties.keys():
        return None
    if not all(isinstance(p, dict) for p in properties.values()):
        return None
    return {n: {k: v for k, v in p.items() if k not in _NOTES} for n, p in properties.items()}


def _words(schema: Mapping[str, Any]) -> list[str] | None:
    """The strings of an enum or const of nothing else."""
    if schema.keys() - {"type", "enum", "const"} or len(schema.keys() & {"enum", "const"}) != 1:
        return None
    found: Iterable[Any] = schema["enum"] if "enum" in schema else [schema["const"]]
    words = list(found) if isinstance(found, list) else []
    return words if words and all(isinstance(w, str) and w for w in words) else None


def _library_grammar(rules: OutputRules) -> dict[str, Any]:
    """A user's regular expression or grammar, by llguidance's own translators.

    `\\d` and `\\w` mean ASCII: what else counts as a digit depends on who is asked.
    """
    from llguidance import grammar_from, regex_to_lark

    try:
        if rules.regex is not None:
            return {"lark_grammar": f"start: /{regex_to_lark(rules.regex, 'dw')}/"}
        text = rules.ebnf or ""
        return {"lark_grammar": grammar_from("ebnf" if _GBNF.search(text) else "lark", text)}
    except (ValueError, RecursionError) as e:
        raise RequestError.of(rules.param, f": {e}") from e
