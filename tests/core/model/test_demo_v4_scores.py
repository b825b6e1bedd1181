"""The trainer's scores of the demo's V4 sibling: under a schema, the rules say what a model cannot
know, and no more than that."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path

import pytest
import torch

TOOLS = Path(__file__).parents[3] / "tools"
OTHERWISE = {"+": "add", "-": "sub", "a": "+", "p": "+", "s": "-", "m": "-"}  # by a first letter
ENTRIES = 16  # of the held-out set; they have all kinds of fields


@pytest.fixture(scope="module")
def scores():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(TOOLS))
        yield importlib.import_module("demo_v4_scores")


@pytest.fixture(scope="module")
def held(scores):
    return scores.Heldout(ENTRIES)


class Speaker:
    """A model that says traces as they are and then the entry's answer. Like one that has not seen
    the schema, it takes every value for a number first, and an operator for another's spelling."""

    def __init__(self, held, wrong=None):
        self.held, self.wrong = held, wrong
        self.words = held.tokenizer.get_vocab()
        texts = {i: held.tokenizer.decode([i]) for i in self.words.values()}
        self.texts = {i: text for i, text in texts.items() if text and "\ufffd" not in text}
        self.answers = {tuple(o.said[0].tolist()): o.answer for o in held.objects}
        self.close = self.words["</think>"]

    def __call__(self, ids):
        out = torch.nn.functional.one_hot(ids.roll(-1, 1), len(self.words)).float()
        for row, said in enumerate(ids.tolist()):
            end = len(said)
            while said[end - 1] == 2:
                end -= 1
            at = end - said[end - 1 :: -1].index(self.close)
            if self.wrong == "trace":
                out[row, at - 3] = -out[row, at - 3]
            prompt, behind = tuple(said[:at]), self.held.tokenizer.decode(said[at:end])
            out[row, end - 1] = 0
            for liking, token in enumerate(self.liked(json.dumps(self.of(prompt)), behind)):
                out[row, end - 1, token] = 9 - liking
        return out

    def of(self, prompt):
        answer = json.loads(json.dumps(self.answers[prompt]))
        if self.wrong == "value":  # of the last field
            holder, key = answer, list(answer)[-1]
            while isinstance(holder[key], dict | list):
                holder = holder[key]
                key = list(holder)[-1] if isinstance(holder, dict) else 0
            value = holder[key]
            holder[key] = str(int(value) + 1) if isinstance(value, str) else value + 1
        return answer

    def liked(self, want, said):
        """Tokens that it would say, the best first."""
        rest = want[len(said) :] if want.startswith(said) else ""
        if said.endswith(":"):
            yield self.words["Ġ"]
        elif said.endswith('": "') and not re.match("-?[0-9]", rest):  # an operator
            yield self.words[OTHERWISE[rest[0]]]
        elif said.endswith(": ") and rest[:1] in tuple('["{'):
            yield self.words["9"]
        fit = [i for i, text in self.texts.items() if rest.startswith(text)]
        yield from sorted(fit, key=lambda i: -len(self.texts[i]))
        yield self.words["<｜end▁of▁sentence｜>"]


@pytest.mark.parametrize(("wrong", "right"), [(None, ENTRIES), ("value", 0), ("trace", 0)])
def test_a_model_that_has_not_seen_the_schema_is_right_by_its_values(held, wrong, right):
    shapes = {type(v) for o in held.objects for v in o.answer.values()}
    assert shapes == {int, str, list, dict}
    assert held.guided.right(Speaker(held, wrong), held.objects, "cpu") == right


def test_what_never_ends_is_wrong(held):
    """Rules allow white space in front of every value, and a number of any length."""

    def endless(ids):
        out = torch.nn.functional.one_hot(ids.roll(-1, 1), held.tokenizer.get_vocab_size()).float()
        out[..., held.tokenizer.token_to_id("9")] += 0.5
        return out

    assert held.guided.right(endless, held.objects[:8], "cpu") == 0
    assert held.guided.said(endless, held.objects[:1], "cpu")[0].endswith("9" * 50)
