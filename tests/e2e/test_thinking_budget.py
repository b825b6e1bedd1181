"""A thinking budget: the span ends in time, and nothing else changes; with drafts and without."""

from __future__ import annotations

import pytest

from ds_runtime import LLM, OutputRules, SamplingParams
from ds_runtime.errors import RequestError

SETTINGS = {"platform": "cpu", "dtype": "float32", "threads": 1, "context_length": 160}
DRAFTS = {"speculative_algorithm": "NEXTN"}
ASKED = "<｜begin▁of▁sentence｜><｜User｜>What is 12 + 30?<｜Assistant｜>"


def answer(llm, prompt, budget=None, **more):
    """The tokens of an answer."""
    rules = more.pop("rules", {})
    if budget is not None:
        opened = "open" if prompt.endswith("<think>") else "optional"
        rules = {"reasoning": opened, "thinking_budget": budget, **rules}
    params = SamplingParams(
        max_tokens=90, seed=3, rules=OutputRules(**rules) if rules else None, **more
    )
    return llm.generate([llm.tokenizer.encode(prompt)], [params])[0].token_ids


def test_thinking_ends_in_time():
    found = []
    for settings in ({}, DRAFTS):
        with LLM("demo", **SETTINGS, **settings) as llm:
            opened, closed = (llm.tokenizer.token_id(t) for t in ("<think>", "</think>"))
            free = answer(llm, ASKED + "<think>")
            length = free.index(closed)
            assert length > 2
            told = []
            for budget in (0, 1, 2, length - 1, length, 1000):
                tokens = answer(llm, ASKED + "<think>", budget)
                spent = min(budget, length)
                assert tokens[: spent + 1] == [*free[:spent], closed]
                assert tokens == free or budget < length
                told.append(tokens)
            drawn = answer(llm, ASKED + "<think>", 2, temperature=1.0)
            assert drawn[:3].count(closed) == 1
            # Behind it any other rule.
            ruled = {"rules": {"choice": ("nothing",)}}
            tokens = answer(llm, ASKED + "<think>", 2, **ruled)
            assert tokens[:3] == [*free[:2], closed]
            assert llm.tokenizer.decode(tokens[3:]) == "nothing"
            # The model may open the span itself, or not at all.
            tokens = answer(llm, ASKED, 1, logit_bias={opened: 100.0})
            assert tokens[0] == opened and closed in tokens[1:3]
            tokens = answer(llm, ASKED, 1, logit_bias={opened: -100.0})
            assert tokens == answer(llm, ASKED, logit_bias={opened: -100.0})
            found.append([free, *told])
    assert found[0] == found[1], "drafts change nothing"


def test_a_vocabulary_without_the_tags_says_so(tiny):
    with LLM(model=str(tiny), **SETTINGS) as llm:
        rules = OutputRules(reasoning="open", thinking_budget=3, field="thinking_token_budget")
        with pytest.raises(
            RequestError, match=r"thinking_token_budget is 3, but this model has no"
        ):
            llm.generate(["Tell me"], [SamplingParams(rules=rules)])
        for budget, said in ((-1, "is -1: a number"), (True, "is True: a number")):
            with pytest.raises(RequestError, match=f"thinking_budget {said}"):
                OutputRules(thinking_budget=budget, reasoning="open")
