"""What it means that two engines answer alike."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ds_runtime_kit.models.answers import bits, check_coarse, check_float32


def entry(token, logprob, second=-3.0):
    return SimpleNamespace(token=token, logprob=logprob, top=[(token, logprob), (7, second)])


def output(*pairs, second=-3.0, prompt=None):
    entries = [entry(*pair, second) for pair in pairs]
    tokens = [token for token, _ in pairs]
    return SimpleNamespace(token_ids=tokens, logprobs=entries, prompt_logprobs=prompt)


def test_float32_asks_for_equal_tokens_and_near_values():
    ours = [output((1, -0.5), (2, -1.0), prompt=[None, entry(4, -2.0)])]
    check_float32(ours, [output((1, -0.500005), (2, -1.0), prompt=[None, entry(4, -2.0)])])
    with pytest.raises(AssertionError, match=r"answer 0: \[1, 2\], not \[1, 3\]"):
        check_float32(ours, [output((1, -0.5), (3, -1.0), prompt=[None, entry(4, -2.0)])])
    with pytest.raises(AssertionError, match=r"output 0, answer\[1\]: -1.0, not -1.001"):
        check_float32(ours, [output((1, -0.5), (2, -1.001), prompt=[None, entry(4, -2.0)])])
    with pytest.raises(AssertionError, match=r"output 0, prompt\[1\]"):
        check_float32(ours, [output((1, -0.5), (2, -1.0), prompt=[None, entry(4, -2.1)])])


def test_coarse_asks_for_a_near_tie_where_tokens_first_differ():
    ours, tie = [output((1, -0.5), (2, -1.0))], -1.04
    check_coarse(ours, [output((1, -0.9), (3, -1.0), second=tie)])
    with pytest.raises(AssertionError, match=r"answer 0, token 1: 2, not 3, where the gap is 2"):
        check_coarse(ours, [output((1, -0.9), (3, -1.0))])


def test_coarse_asks_that_texts_are_scored_nearly_alike():
    theirs = [output((1, -0.5), (2, -1.0))]
    theirs[0].prompt_token_ids = [9, 9]

    def scoring(second):
        scored = [None, entry(9, -1.0), entry(1, -0.52), entry(2, second)]
        return SimpleNamespace(generate=lambda texts, params: [output(prompt=scored)])

    check_coarse(theirs, theirs, scored_by=scoring(-1.04))
    with pytest.raises(AssertionError, match=r"answer 0, token 1: scored -1.0600, not -1.0000"):
        check_coarse(theirs, theirs, scored_by=scoring(-1.06))


def test_bits_tell_neighbouring_values_apart():
    one, next_one = 1.0, 1.0000001192092896
    assert bits([entry(1, -one)]) == bits([entry(1, -one)])
    assert bits([entry(1, -one)]) != bits([entry(1, -next_one)])
    assert bits([entry(1, -one)]) != bits([entry(2, -one)])
