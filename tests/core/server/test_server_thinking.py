"""How long a model thinks: effort, budget and count, in all three protocols."""

from __future__ import annotations

import pytest
from server_harness import serving

from ds_runtime.text.formats.families import V4, V31
from ds_runtime.text.formats.template import built_in
from ds_runtime.text.parsers.registry import Parsers

PROTOCOLS = ["chat", "responses", "messages"]
THINKS, TALKS = "<｜Assistant｜><think>", "<｜Assistant｜></think>"


@pytest.fixture(scope="module", params=["V4", "V31"])
def served(bpe_folder, request):
    family = {"V4": V4, "V31": V31}[request.param]
    parsers = Parsers(family.reasoning, family.tool_calls)
    with serving(bpe_folder, template=built_in(family), parsers=parsers) as one:
        one.is_v4 = request.param == "V4"
        yield one


def ask(served, protocol, order="[say hm</think>4]", effort=None, budget=None, thinks=None, **more):
    """The answer to a request of this effort and budget, in the protocol's own fields."""
    turn = [{"role": "user", "content": order}]
    if protocol == "chat":
        more |= {} if effort is None else {"reasoning_effort": effort}
        more |= {} if budget is None else {"thinking_token_budget": budget}
        more |= {} if thinks is None else {"thinking": {"type": thinks}}
        return served.post("/v1/chat/completions", messages=turn, **more)
    if protocol == "responses":
        more |= {} if effort is None else {"reasoning": {"effort": effort}}
        more |= {} if budget is None else {"thinking_token_budget": budget}
        more |= (
            {} if thinks is None else {"chat_template_kwargs": {"thinking": thinks == "enabled"}}
        )
        return served.post("/v1/responses", input=order, **more)
    thinking = {} if thinks is None else {"type": thinks}
    thinking |= {} if budget is None else {"budget_tokens": budget}
    more |= {"thinking": thinking} if thinking else {}
    more |= {} if effort is None else {"output_config": {"effort": effort}}
    return served.post("/v1/messages", messages=turn, max_tokens=64, **more)


def prompt(served):
    return served.tokenizer.decode(served.engine.submits[-1].prompt, skip_special=False)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_effort_reaches_the_prompt(served, protocol):
    on = "enabled" if protocol == "messages" else None  # which thinks only where it says so
    for effort, words in (("low", ""), ("high", "Absolute maximum"), ("max", "Beyond maximum")):
        assert ask(served, protocol, effort=effort, thinks=on).status_code == 200
        text = prompt(served)
        assert text.endswith(THINKS), "effort is a wish to think, where nobody says no"
        assert ("Reasoning Effort" in text) == bool(words and served.is_v4)
        assert not served.is_v4 or words in text


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_no_effort_is_no_thinking_and_the_switch_wins(served, protocol):
    ask(served, protocol, effort="none")
    assert prompt(served).endswith(TALKS)
    ask(served, protocol, effort="max", thinks="disabled")
    assert prompt(served).endswith(TALKS) and "Reasoning Effort" not in prompt(served)
    ask(served, protocol, effort="none", thinks="enabled")
    assert prompt(served).endswith(THINKS)


@pytest.mark.parametrize(
    "protocol, field",
    [
        ("chat", "reasoning_effort"),
        ("responses", "reasoning.effort"),
        ("messages", "output_config.effort"),
    ],
)
def test_an_effort_that_nobody_knows(served, protocol, field):
    answer = ask(served, protocol, effort="most")
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert message.startswith(f"{field} is 'most': must be one of none, minimal, low, medium")
    assert ask(served, protocol).status_code == 200


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_budget_is_a_rule_of_the_engine(served, protocol):
    assert ask(served, protocol, budget=7, thinks="enabled").status_code == 200
    rules = served.engine.submits[-1].params.rules
    assert (rules.kind, rules.thinking_budget, rules.reasoning) == ("thinking_budget", 7, "open")
    for more in ({"thinks": "disabled"}, {"thinks": "enabled", "budget": None}):
        ask(served, protocol, **{"budget": 7} | more)
        assert served.engine.submits[-1].params.rules is None
    if protocol != "messages":
        ask(served, protocol, budget=-1, thinks="enabled")  # vLLM's word for none
        assert served.engine.submits[-1].params.rules is None


def test_a_budget_beside_other_rules(served):
    ask(served, "chat", budget=0, thinks="enabled", response_format={"type": "json_object"})
    rules = served.engine.submits[-1].params.rules
    assert (rules.kind, rules.thinking_budget) == ("json_schema", 0)
    tool = {"type": "function", "function": {"name": "f"}}
    more = {"tools": [tool], "tool_choice": "required"}
    ask(served, "chat", budget=3, thinks="enabled", **more)
    rules = served.engine.submits[-1].params.rules
    assert (rules.kind, rules.thinking_budget) == ("tool_calls", 3)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("budget", [-2, 1 << 40])
def test_a_budget_that_is_none(served, protocol, budget):
    field = "thinking.budget_tokens" if protocol == "messages" else "thinking_token_budget"
    answer = ask(served, protocol, budget=budget, thinks="enabled")
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert message.startswith(f"{field} is {budget}: a number of tokens from 0 to")


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_tokens_of_reasoning_are_counted(served, protocol):
    def counted(thinks):
        usage = ask(served, protocol, thinks=thinks).json()["usage"]
        if protocol == "chat":
            return usage["completion_tokens_details"]["reasoning_tokens"], usage[
                "completion_tokens"
            ]
        details = usage["output_tokens_details"]
        name = "thinking_tokens" if protocol == "messages" else "reasoning_tokens"
        return details[name], usage["output_tokens"]

    of_reasoning, all_tokens = counted("enabled")
    assert 0 < of_reasoning < all_tokens
    assert counted("disabled")[0] == 0
