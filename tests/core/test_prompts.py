"""What the offline API takes as prompts and conversations, and what it refuses in a sentence."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ds_runtime.errors import RequestError
from ds_runtime.offline.prompts import conversations, listed


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ("abc", ["abc"]),
        (["abc", "de"], ["abc", "de"]),
        ([1, 2], [[1, 2]]),
        ((1, 2), [[1, 2]]),
        ([[1, 2], (3,)], [[1, 2], [3]]),
        (["a", [5]], ["a", [5]]),
        ([], []),
        ([np.int64(5), 6], [[5, 6]]),
        (np.array([5, 6]), [[5, 6]]),
        (torch.tensor([[5, 6], [7, 8]]), [[5, 6], [7, 8]]),
        ([torch.tensor([5, 6])], [[5, 6]]),
        (range(3), [[0, 1, 2]]),
    ],
)
def test_prompts_that_are_taken(given, taken):
    assert listed(given) == taken


@pytest.mark.parametrize(
    "given",
    [None, b"abc", 5, 1.5, {}, {"a": 1}, [1.5], [[1.5, 2]], [True], [5, "a"], ["a", 5], [None],
     [[None]], [b"a"], np.array([0.5]), object()],
)  # fmt: skip
def test_prompts_that_are_refused(given):
    with pytest.raises(RequestError, match="the prompt"):
        listed(given)


USER = {"role": "user", "content": "Hello"}


def test_one_conversation_or_several():
    assert conversations([USER]) == [[USER]]
    assert conversations([[USER], [USER, USER]]) == [[USER], [USER, USER]]


@pytest.mark.parametrize(
    "given",
    ["hi", None, [], [[]], ["hi"], [{"rolle": "user"}], [{"role": "king", "content": ""}],
     [{"role": "user", "content": 5}], [USER, 3], [[USER], USER], 7],
)  # fmt: skip
def test_conversations_that_are_refused(given):
    with pytest.raises(RequestError, match="message"):
        conversations(given)
