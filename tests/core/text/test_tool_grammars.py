"""Demanded tool calls: every format as its own encoding writes it, with thinking first or without,
over vocabularies whose markers are tokens and over plain ones."""

from __future__ import annotations

import json
import random

import jsonschema
import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from ds_runtime.grammar.compile import Compiler
from ds_runtime.output_rules import OutputRules, ToolRules, ToolSchema
from ds_runtime.text.formats.families import V3, V4, V31, V32
from ds_runtime.text.formats.template import built_in
from ds_runtime.text.parsers.events import Answer
from ds_runtime.text.parsers.registry import Parsers
from ds_runtime.text.tokenizer import Tokenizer as OurTokenizer

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
TOOL_TOKENS = [
    f"<｜tool▁{part}｜>" for part in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")
]
FAMILIES = {"deepseekv3": V3, "deepseekv31": V31, "deepseekv32": V32, "deepseekv4": V4}
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "unit": {"enum": ["C", "F"]},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
PICK = {  # nothing in it is of any length, so that draws from the masks end
    "type": "object",
    "properties": {
        "row": {"type": "integer", "minimum": 0, "maximum": 9},
        "side": {"enum": ["left", "right"]},
        "both": {"type": "boolean"},
    },
    "required": ["side", "both"],
    "additionalProperties": False,
}
TOOLS = (ToolSchema("get_weather", WEATHER), ToolSchema("now"), ToolSchema("pick", PICK))
ROME = ("get_weather", {"city": 'R"o<m>e</b>', "days": 3, "unit": "C"})
NOW = ("now", {})


class Vocabulary:
    def __init__(self, folder, added):
        letters = [BOS, EOS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
        backend = Tokenizer(BPE(vocab={t: i for i, t in enumerate(letters)}, merges=[]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens([BOS, EOS])
        backend.add_tokens([AddedToken(t, special=False, normalized=False) for t in added])
        backend.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": EOS}))
        self.tokenizer = OurTokenizer.load(folder)
        self.compiler = Compiler(folder, self.tokenizer.vocab_size, [1])

    def matcher(self, form, reasoning="none", tools=TOOLS, several=True):
        calls = ToolRules(format=form, tools=tools, several=several)
        return self.compiler.compile(OutputRules(tool_calls=calls, reasoning=reasoning)).matcher

    def accepts(self, matcher, text):
        """Whether `text`, all of it, is what the rule asks for."""
        tokens = self.tokenizer.encode(text)
        return all(matcher.consume_token(t) for t in tokens) and matcher.is_accepting()

    def draw(self, matcher, rng):
        """A text of tokens that the masks allow."""
        tokens = []
        while True:
            bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
            token = int(rng.choice(allowed))
            if token == 1:
                return self.tokenizer.decode(tokens)
            assert matcher.consume_token(token)
            tokens.append(token)
            assert len(tokens) < 4000


@pytest.fixture(scope="module", params=["tokens", "plain"])
def vocabulary(request, tmp_path_factory):
    """V3.2's vocabulary has `｜DSML｜` as a token, as V3's has the others."""
    added = [*TOOL_TOKENS, "<think>", "</think>", "｜DSML｜"] if request.param == "tokens" else []
    return Vocabulary(tmp_path_factory.mktemp(request.param), added)


def written(form, *calls):
    """The calls as the format's own encoding writes an earlier turn."""
    made = [
        {"type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for name, arguments in calls
    ]
    turn = {"role": "assistant", "content": None, "tool_calls": made}
    encoding = built_in(FAMILIES[form])
    text = encoding.render(
        [{"role": "user", "content": "q"}, turn], None, False, {"thinking": False}
    )
    said = text.partition("<｜Assistant｜>")[2].removeprefix("</think>")
    return said.removesuffix(EOS)


def read(form, text, prompt):
    tools = [{"function": {"name": t.name, "parameters": t.parameters}} for t in TOOLS]
    parser = Parsers("deepseek-v3", form).start(prompt, tools)
    answer = Answer()
    answer.add([*parser.feed(text), *parser.finish(natural=True)])
    return answer, [(c.name, json.loads(c.arguments)) for c in answer.calls]


@pytest.mark.parametrize("form", FAMILIES)
@pytest.mark.parametrize(
    "reasoning, thought, prompt",
    [
        ("none", "", "<｜Assistant｜></think>"),
        ("optional", "", "<｜Assistant｜>"),
        ("optional", "<think>hm, a < b</think>", "<｜Assistant｜>"),
        ("open", "hm\n</think>", "<｜Assistant｜><think>"),
    ],
)
def test_what_the_encoding_writes_is_allowed_and_read_back(
    vocabulary, form, reasoning, thought, prompt
):
    for calls, tools, several in (
        ([ROME, NOW, ROME], TOOLS, True),  # tool_choice "required"
        ([ROME], TOOLS[:1], False),  # a function's name
        ([NOW], TOOLS, False),
    ):
        text = thought + written(form, *calls)
        assert vocabulary.accepts(vocabulary.matcher(form, reasoning, tools, several), text)
        answer, found = read(form, text, prompt)
        assert found == calls and not answer.content.strip()
        assert answer.reasoning == thought.removeprefix("<think>").removesuffix("</think>")


@pytest.mark.parametrize("form", FAMILIES)
def test_nothing_else_is_allowed(vocabulary, form):
    good = written(form, ROME)
    city, unit = ROME[1]["city"], ROME[1]["unit"]
    bad = {
        "words first": "I will " + good,
        "words after": good + "so",
        "no call": "",
        "another function": written(form, ("got_weather", ROME[1])),
        "a field missing": written(form, ("get_weather", {"city": city})),
        "a field too many": written(form, ("get_weather", {**ROME[1], "x": 1})),
        "a wrong type": written(form, ("get_weather", {"city": city, "days": "3", "unit": unit})),
        "out of range": written(form, ("get_weather", {"city": city, "days": 15, "unit": unit})),
        "no such word": written(form, ("get_weather", {"city": city, "unit": "K"})),
        "arguments for none": written(form, ("now", {"x": 1})),
        "thinking": "<think>hm</think>" + good,
        "cut": good[:-3],
    }
    for what, text in bad.items():
        assert not vocabulary.accepts(vocabulary.matcher(form), text), what
    one = vocabulary.matcher(form, several=False)
    assert not vocabulary.accepts(one, written(form, ROME, NOW))
    assert not vocabulary.accepts(vocabulary.matcher(form, "open"), good), "thinking is not ended"


@pytest.mark.parametrize("form", FAMILIES)
def test_whatever_is_drawn_from_the_masks_is_a_call_that_fits(vocabulary, form):
    rng = random.Random(form)
    for number in range(4):
        matcher = vocabulary.matcher(form, "open", TOOLS[1:], several=False)
        assert all(matcher.consume_token(t) for t in vocabulary.tokenizer.encode("hm</think>"))
        text = vocabulary.draw(matcher, rng)
        answer, ((name, arguments),) = read(form, text, "<｜Assistant｜></think>")
        assert not answer.content.strip(), number
        jsonschema.validate(arguments, PICK if name == "pick" else {"maxProperties": 0})


@pytest.mark.parametrize("form", FAMILIES)
@pytest.mark.parametrize("reasoning", ["open", "optional"])
def test_a_budget_does_not_cut_a_call_that_begins_inside_thinking(tmp_path, form, reasoning):
    vocabulary = Vocabulary(tmp_path, [*TOOL_TOKENS, "<think>", "</think>", "｜DSML｜"])
    begun = "<think>" if reasoning == "optional" else ""
    call = vocabulary.tokenizer.encode(f"{begun}hm" + written(form, ROME))
    close = vocabulary.tokenizer.token_id("</think>")

    def matcher(budget):
        rules = OutputRules(reasoning=reasoning, thinking_budget=budget)
        return vocabulary.compiler.compile(rules).matcher

    whole = matcher(8)
    assert all(whole.consume_token(t) for t in call) and whole.is_accepting()
    for budget in range(3):
        cut = matcher(budget)
        for token in call[: budget + bool(begun)]:
            assert cut.consume_token(token)
        bits = np.unpackbits(np.frombuffer(cut.compute_bitmask(), np.uint8), bitorder="little")
        again = [vocabulary.tokenizer.token_id("<think>")] if budget == 0 and not begun else []
        assert np.flatnonzero(bits).tolist() == [*again, close]
