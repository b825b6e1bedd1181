"""Sums whose answer is a JSON object under a schema, as `response_format` asks for.

A prompt never shows the schema: the server's rules force its braces and names, and the model says
the values. Names of operands are common ones; a field with any other name holds the result. The
held-out ones stand in a file of their own, with sums of the held-out set and with names that no
training text has.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

import demo_text as dt
import demo_tools

SCHEMAS, SCHEMAS_SEED = 200, 20261128
OPERANDS = (("a", "b"), ("x", "y"), ("first", "second"), ("left", "right"), ("num1", "num2"),
            ("operand1", "operand2"), ("lhs", "rhs"),
            ("first_number", "second_number"))  # fmt: skip
OPERATORS = ("operation", "op", "operator")
NAMED = ({"+": "add", "-": "subtract"}, {"+": "+", "-": "-"}, {"+": "plus", "-": "minus"})
RESULTS = ("result", "answer", "sum", "total", "value", "difference", "output", "number", "res")
KNOWN = frozenset(n for pair in OPERANDS for n in pair) | {*OPERATORS, *RESULTS}
ASKS = ("", "", "", " Answer in JSON.", " Reply as JSON.", " Give the answer as a JSON object.",
        " Return JSON only.", " Use the schema.")  # fmt: skip


def field_name(rng: random.Random, words: Sequence[str]) -> str:
    """A name in any of the common styles: words, a made-up one, snake_case, camelCase."""
    kind, values = rng.random(), demo_tools.Values(rng, words)
    if kind < 0.35:
        return rng.choice(words)
    if kind < 0.55:
        return values.made_up().lower()
    if kind < 0.75:
        return f"{rng.choice(words)}_{rng.choice(words)}"
    if kind < 0.87:
        return rng.choice(words) + rng.choice(words).capitalize()
    if kind < 0.94:
        return f"{rng.choice(words)}{rng.randint(1, 99)}"
    return rng.choice(words).capitalize()


def fresh_name(rng: random.Random, words: Sequence[str], not_these: frozenset[str]) -> str:
    """A name that is none of these and no operand's."""
    while (name := field_name(rng, words)) in not_these or name in KNOWN:
        pass
    return name


def obj(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of an object with exactly these fields."""
    return {"type": "object", "properties": dict(fields), "required": list(fields),
            "additionalProperties": False}  # fmt: skip


def draw(
    rng: random.Random, a: int, b: int, op: str, names: Sequence[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(schema, answer) of one sum; `names` are those of the result's field and of what holds it."""
    result = dt.sum_result(a, b, op)
    kind = rng.random()
    leaf: dict[str, Any] = {
        "type": "string" if kind < 0.15 else "number" if kind < 0.3 else "integer"
    }
    value: Any = str(result) if kind < 0.15 else result
    fields, answer = dict[str, Any](), dict[str, Any]()
    if rng.random() < 0.15:
        spelling, name = rng.choice(NAMED), rng.choice(OPERATORS)
        fields[name], answer[name] = (
            {"type": "string", "enum": list(spelling.values())},
            spelling[op],
        )
    if rng.random() < 0.35:
        for name, number in zip(rng.choice(OPERANDS), (a, b), strict=True):
            fields[name], answer[name] = {"type": "integer"}, number
    shape = rng.random()
    if shape < 0.15:
        leaf, value = {"type": "array", "items": leaf, "minItems": 1, "maxItems": 1}, [value]
    elif shape < 0.35:
        leaf, value = obj({names[1]: leaf}), {names[1]: value}
    fields[names[0]], answer[names[0]] = leaf, value
    if rng.random() < 0.15:
        return obj({names[2]: obj(fields)}), {names[2]: answer}
    return obj(fields), answer


def heldout_schemas(heldout: Mapping[str, Any], words: Sequence[str]) -> dict[str, Any]:
    """The held-out schemas: sums of the held-out set, in fields with names of their own."""
    rng, taken, entries = random.Random(SCHEMAS_SEED), set[str](), list[dict[str, Any]]()
    for entry in heldout["sums"][:SCHEMAS]:
        names = list[str]()
        for _ in range(3):
            names.append(fresh_name(rng, words, frozenset(taken)))
            taken.add(names[-1])
        schema, answer = draw(rng, entry["a"], entry["b"], entry["op"], names)
        ask = entry["messages"][0]["content"] + rng.choice(ASKS)
        entries.append({"messages": [{"role": "user", "content": ask}], "names": names,
                        "a": entry["a"], "b": entry["b"], "op": entry["op"],
                        "schema": schema, "answer": answer})  # fmt: skip
    return {"seed": SCHEMAS_SEED, "schemas": entries}


def write_schemas(held: Mapping[str, Any], folder: Path) -> str:
    """Write heldout_schemas.json and heldout_schemas.sha256; returns the hash."""
    entries = ",\n".join(dt.dumps(entry) for entry in held["schemas"])
    text = f'{{"seed": {held["seed"]},\n"schemas": [\n{entries}\n]\n}}\n'
    assert json.loads(text) == held
    digest = hashlib.sha256(text.encode()).hexdigest()
    (folder / "heldout_schemas.json").write_text(text, encoding="utf-8")
    (folder / "heldout_schemas.sha256").write_text(f"{digest}  heldout_schemas.json\n")
    return digest


def reserved_names(held: Mapping[str, Any]) -> frozenset[str]:
    """Names of the held-out schemas' fields."""
    return frozenset(name for entry in held["schemas"] for name in entry["names"])


def schema_chat(
    rng: random.Random, words: Sequence[str], pairs: frozenset[tuple[int, int]],
    names: frozenset[str],
) -> tuple[list[dt.Message], dict[str, Any]]:  # fmt: skip
    """A sum that is answered by an object, after its trace, and the object's schema."""
    a, b, op = dt.draw_pair(rng, pairs)
    mine = [fresh_name(rng, words, names) for _ in range(3)]
    if len(set(mine)) < 3:
        return schema_chat(rng, words, pairs, names)
    if rng.random() < 0.25:
        mine[0] = rng.choice(RESULTS)
    schema, answer = draw(rng, a, b, op, mine)
    messages = [{"role": "system", "content": rng.choice(dt.SYSTEMS)}] if rng.random() < 0.1 else []
    return [
        *messages,
        {"role": "user", "content": dt.sum_question(rng, a, b, op) + rng.choice(ASKS)},
        {"role": "assistant", "content": f"<think>{dt.trace(a, b, op)}</think>{dt.dumps(answer)}"},
    ], schema  # fmt: skip


def schema_document(
    rng: random.Random, words: Sequence[str], pairs: frozenset[tuple[int, int]],
    names: frozenset[str],
) -> str:  # fmt: skip
    """`schema_chat` as text."""
    return dt.render(schema_chat(rng, words, pairs, names)[0], keep_last=True)


def weigh_object(tokenizer: Tokenizer, text: str, apart: bool) -> tuple[np.ndarray, np.ndarray]:
    """Token ids of a document and its loss weights in percent: all of the answer, names a tenth,
    and the brace that begins the object nothing, because rules decide whether there is one.

    apart: the space before a string, list or object is a token of its own, as a model says it that
    expected a number and is kept from one by the rules.
    """
    said, after = text.rindex(dt.ASSISTANT), text.rindex("</think>") + len("</think>")
    ids, offsets = list[int](), list[tuple[int, int]]()
    cuts = [m.start() + k for m in re.finditer(r'(?<=":) (?=["\[{])', text) for k in (0, 1)]
    cuts = [0, *[cut for cut in cuts if apart and cut >= after], len(text)]
    for low, high in pairwise(cuts):
        part = tokenizer.encode(text[low:high], add_special_tokens=False)
        ids += part.ids
        offsets += [(low + a, low + b) for a, b in part.offsets]
    weights = np.zeros(len(ids), np.uint8)
    for i, (start, _) in enumerate(offsets):
        if start >= said + len(dt.ASSISTANT):
            weights[i] = 100
    weights[next(i for i, (start, _) in enumerate(offsets) if start >= after)] = 0
    for start, end in name_spans(text, after):
        for i, (low, high) in enumerate(offsets):
            if low >= start and high <= end:
                weights[i] = min(weights[i], 10)
    return np.array(ids, np.uint16), weights


def name_spans(text: str, after: int) -> list[tuple[int, int]]:
    """Where the names of fields stand in an object that begins at `after`."""
    spans, at = list[tuple[int, int]](), after
    while (end := text.find('": ', at)) >= 0:
        spans.append((text.rindex('"', at, end) + 1, end))
        at = end + 3
    return spans
