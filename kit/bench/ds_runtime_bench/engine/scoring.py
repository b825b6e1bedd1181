"""Scores of raw model text: sums, objects, planted keys and tool calls in the formats of V3 and V4,
and the prompts that keys are planted in. Pure functions, no torch.

Raw text is what the model wrote after the prompt with its marker tokens kept; a closing
end-of-sentence token may or may not be there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle, islice
from typing import Any

EOS = "<｜end▁of▁sentence｜>"
_NUMBER = re.compile(r"-?\d+")
_CALLS = re.compile(r"<｜tool▁calls▁begin｜>(?P<body>.*)<｜tool▁calls▁end｜>", re.DOTALL)
_CALL = re.compile(
    r"<｜tool▁call▁begin｜>function<｜tool▁sep｜>(?P<name>[^\n<]+)\n"
    r"```json\n(?P<arguments>.*?)\n```<｜tool▁call▁end｜>",
    re.DOTALL,
)
_DSML_CALLS = re.compile(
    r"\n\n<｜DSML｜tool_calls>\n(?P<body>.*)\n</｜DSML｜tool_calls>", re.DOTALL
)
_DSML_CALL = re.compile(
    r'<｜DSML｜invoke name="(?P<name>[^"\n]+)">\n(?P<parameters>.*?)</｜DSML｜invoke>', re.DOTALL
)
_DSML_PARAMETER = re.compile(
    r'<｜DSML｜parameter name="(?P<name>[^"\n]+)" string="(?P<text>true|false)">(?P<value>.*?)'
    r"</｜DSML｜parameter>\n",
    re.DOTALL,
)


def final_text(raw: str) -> str:
    """The text after the last `</think>`, without the closing token and outer white space."""
    return raw.removesuffix(EOS).rsplit("</think>", 1)[-1].strip()


def sum_answer(raw: str) -> int | None:
    """The number a sum's answer consists of, or None if it is anything but one number."""
    text = final_text(raw)
    return int(text) if _NUMBER.fullmatch(text) else None


def sum_correct(raw: str, expected: int) -> bool:
    """Whether the answer is exactly the expected number (after an optional trace)."""
    return sum_answer(raw) == expected


def key_correct(raw: str, expected: str) -> bool:
    """Whether the answer is exactly the planted key's value."""
    return final_text(raw) == expected


def object_correct(raw: str, expected: Mapping[str, Any]) -> bool:
    """Whether the answer is JSON that is equal to the expected object (after an optional trace)."""
    try:
        return same_value(json.loads(final_text(raw)), dict(expected))
    except ValueError:
        return False


def prose_tokens(
    prose: Sequence[str], first: int, room: int, encode: Callable[[str], Sequence[int]]
) -> list[int]:
    """`room` tokens of the passages, one after another and over again, from passage `first`."""
    ids: list[int] = []
    for passage in islice(cycle(prose), first, None):
        if len(ids) >= room:
            break
        ids += encode(passage + "\n\n")
    return ids[: max(room, 0)]


def planted(
    entry: Mapping[str, Any],
    prose: Sequence[str],
    first: int,
    tokens: int,
    encode: Callable[[str], Sequence[int]],
    decode: Callable[[list[int]], str],
) -> list[dict[str, str]]:
    """The messages of a prompt of about `tokens` tokens. The system text is the passages from
    `first` on, with the entry's fact at its depth (0 to 1) where a word ends. Its question follows.
    """
    fact, question = entry["fact"], entry["messages"]
    said = fact + "".join(m["content"] for m in question)
    text = decode(prose_tokens(prose, first, tokens - len(encode(said)) - 3, encode))
    at = max(text.rfind(" ", 0, int(entry["depth"] * len(text)) + 1), 0)
    return [{"role": "system", "content": f"{text[:at]} {fact}{text[at:]}"}, *question]


def parse_calls(raw: str) -> list[dict[str, Any]] | None:
    """The tool calls `{name, arguments}` of a raw answer, or None unless it is well formed.

    Well formed means: nothing but one block of calls, with one line break between calls, and at
    most a closing end-of-sentence token. Each call has a function name and a fenced JSON object
    (V3) or DSML parameters (V4, after an optional thought).
    """
    text = raw.removesuffix(EOS)
    answer = text.rpartition("</think>")[2]
    if (block := _DSML_CALLS.fullmatch(answer)) is not None:
        return _each(block["body"], _DSML_CALL, lambda call: _dsml_arguments(call["parameters"]))
    if (block := _CALLS.fullmatch(text)) is not None:
        return _each(block["body"], _CALL, lambda call: json.loads(call["arguments"]))
    return None


def _each(
    body: str, form: re.Pattern[str], arguments: Callable[[re.Match[str]], Any]
) -> list[dict[str, Any]] | None:
    """The calls of a block that has nothing but calls of that form."""
    calls: list[dict[str, Any]] = []
    position = 0
    while position < len(body):
        if calls:
            if body[position] != "\n":
                return None
            position += 1
        match = form.match(body, position)
        if match is None:
            return None
        try:
            said = arguments(match)
        except ValueError:
            return None
        if not isinstance(said, dict):
            return None
        calls.append({"name": match["name"], "arguments": said})
        position = match.end()
    return calls or None


def _dsml_arguments(text: str) -> dict[str, Any]:
    """The arguments of one call; ValueError unless there is nothing but parameters."""
    said: dict[str, Any] = {}
    position = 0
    while position < len(text):
        match = _DSML_PARAMETER.match(text, position)
        if match is None or match["name"] in said:
            raise ValueError(f"not a parameter, or one that was said already: {text[position:]!r}")
        value = match["value"]
        said[match["name"]] = value if match["text"] == "true" else json.loads(value)
        position = match.end()
    return said


def same_value(got: Any, expected: Any) -> bool:
    """JSON equality that tells true from 1 and treats 5 and 5.0 as equal numbers."""
    if isinstance(got, bool) or isinstance(expected, bool):
        return got is expected
    if isinstance(got, int | float) and isinstance(expected, int | float):
        return got == expected
    if type(got) is not type(expected):
        return False
    if isinstance(got, dict):
        return got.keys() == expected.keys() and all(same_value(got[k], expected[k]) for k in got)
    if isinstance(got, list):
        return len(got) == len(expected) and all(map(same_value, got, expected))
    return bool(got == expected)


def calls_correct(raw: str, expected: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the raw text is well formed and names exactly the expected calls, in order."""
    calls = parse_calls(raw)
    if calls is None or len(calls) != len(expected):
        return False
    return all(
        got["name"] == want["name"] and same_value(got["arguments"], dict(want["arguments"]))
        for got, want in zip(calls, expected, strict=True)
    )


def agreement(pairs: Sequence[tuple[int, int]]) -> float:
    """Share of equal (draft token, model token) pairs; 0.0 for none."""
    return sum(a == b for a, b in pairs) / len(pairs) if pairs else 0.0
