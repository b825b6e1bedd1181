"""Where a step with prompts is divided: the same tokens, in order, and halves as even as may be."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from itertools import accumulate

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ds_runtime.cli import main
from ds_runtime.config import EngineConfig
from ds_runtime.engine.step.halves import divided, rows_of
from ds_runtime.engine.step.plan import Work
from ds_runtime.errors import ConfigError
from ds_runtime.parallel.sums.halves import Halves, why_not

works_of = st.builds(
    lambda decodes, absorbed, prompts: (
        [made(n, 1 + n % 3, tokens=False) for n in range(decodes)]
        + [made(10 + n, length, absorbed=True) for n, length in enumerate(absorbed)]
        + [made(20 + n, *what) for n, what in enumerate(prompts)]
    ),
    st.integers(0, 5),
    st.lists(st.integers(1, 9), max_size=2),
    st.lists(st.tuples(st.integers(1, 400), st.booleans(), st.booleans()), max_size=8),
)


def made(row, length, scored=False, sample=True, tokens=True, absorbed=False):
    ids = [1000 * row + n for n in range(length)] if tokens else None
    return Work(
        rid=str(row),
        row=row,
        start=7 * row,
        length=length,
        pages=[row],
        tokens=ids,
        sample=sample,
        prompt_logprobs=1 if scored else None,
        absorbed=absorbed,
        masks=[b"x"] if sample and not tokens else [],
    )


def tokens(works):
    """(row, position, token) of each, in order."""
    return [
        (w.row, w.start + n, None if w.tokens is None else w.tokens[n])
        for w in works
        for n in range(w.length)
    ]


def wanted(works):
    """Rows of logits, by their places among all rows."""
    ends = accumulate(w.length for w in works)
    return [end - n for w, end in zip(works, ends, strict=True) for n in range(w.logit_rows, 0, -1)]


@example([made(1, 400), made(2, 40)], 300, 0.0)
@example([made(1, 400), made(2, 60)], 300, 0.1)
@given(works_of, st.integers(2, 300), st.sampled_from([0.0, 0.1, 0.25, 0.48, 0.5]))
def test_two_halves_are_the_step(works, least, share):
    before = [(w.start, w.length, w.tokens) for w in works]
    both = divided(works, Halves(least, share))
    prompts = [w for w in works if not w.as_decode]
    if sum(w.length for w in prompts) < least:
        assert both == ()
    if not both:
        return
    first, second = both
    assert first and second
    assert tokens(first) + tokens(second) == tokens(works)
    rows = sum(w.length for w in first)
    assert rows_of(works, Halves(least, share)) == (rows, sum(w.length for w in second))
    assert wanted(first) + [rows + at for at in wanted(second)] == wanted(works)
    assert all(not w.as_decode for w in second), "kernels were told of the step's decode rows once"
    assert [w for w in first if w.as_decode] == [w for w in works if w.as_decode]
    assert before == [(w.start, w.length, w.tokens) for w in works], "the plan is for others, too"
    total, cut = sum(w.length for w in works), len(first) + len(second) > len(works)
    assert min(rows, total - rows) >= least / 4
    if cut:
        assert share and rows in (total // 2, total // 2 // 64 * 64)
    elif share and min(rows, total - rows) < share * total:
        # A sequence was to be divided, but it begins at most 63 rows before the middle.
        assert 0 <= total // 2 - rows < 64


@given(works_of, st.integers(2, 300))
def test_a_step_of_enough_prompt_tokens_is_divided(works, least):
    """Unless its middle lies in rows that go together."""
    total = sum(w.length for w in works)
    fixed = sum(w.length for w in works if w.as_decode)
    if total - fixed >= least and 2 * fixed <= total - 128:
        assert divided(works, Halves(least, 0.48))


@pytest.mark.parametrize(
    ("lengths", "fixed", "share", "found"),
    [
        ([100, 100], 0, 0.48, (1, 0)),
        ([100, 100, 100, 100], 0, 0.48, (2, 0)),
        ([1000], 0, 0.48, (0, 448)),  # whole tiles of rows
        ([1000], 0, 0.0, None),
        ([100, 900], 0, 0.0, (1, 0)),
        ([100, 900], 0, 0.48, (1, 348)),
        ([900, 100], 0, 0.48, (0, 448)),
        ([1, 1, 100, 100], 2, 0.48, (3, 0)),
        ([90, 90, 30], 2, 0.48, None),  # the middle is among rows that go together
        ([90, 90, 30], 2, 0.0, (2, 0)),
    ],
)
def test_places(lengths, fixed, share, found):
    assert Halves(2, share).place(lengths, fixed) == found


def test_no_half_is_tiny():
    assert Halves(1024, 0.0).place([4000, 1], 0) is None
    assert Halves(1024, 0.0).place([4000, 256], 0) == (1, 0)
    assert Halves(1024, 0.48).place([4000, 1], 0) == (0, 1984)


def test_an_engine_says_why_no_step_is_divided():
    on = {"enable_two_batch_overlap": True}
    whole = EngineConfig(tp=2, **on)
    assert Halves.of(whole, hybrid=False) == Halves(whole.max_step_tokens // 2, 0.48)
    assert Halves.of(EngineConfig(tp=2), hybrid=False) is None
    long = {"dbo_prefill_token_threshold": 5000}
    for config, hybrid, said in (
        (EngineConfig(**on), False, "one rank"),
        (EngineConfig(tp=4, dp=2, enable_dp_attention=True, **on), False, "--enable-dp-attention"),
        (EngineConfig(tp=2, batch_invariant=True, **on), False, "--batch-invariant"),
        (EngineConfig(tp=2, **on), True, "V4"),
        (
            EngineConfig(tp=2, **on, **long),
            False,
            "--max-step-tokens 2048 is fewer than .*threshold 5000",
        ),
        (
            EngineConfig(tp=2, max_step_tokens=1, **on),
            False,
            "^--max-step-tokens 1 is fewer than the 2 that a divided step needs$",
        ),
    ):
        assert Halves.of(config, hybrid) is None and re.search(said, why_not(config, hybrid))


@pytest.mark.parametrize("share", [-0.1, 0.6, 1.0, float("nan")])
def test_a_share_that_no_half_can_have_is_refused(share):
    said = "must be a finite number" if share != share else r"must be from 0 to 0\.5"
    with pytest.raises(ConfigError, match=f"--tbo-token-distribution-threshold {share:g}: {said}"):
        EngineConfig(enable_two_batch_overlap=True, tbo_token_distribution_threshold=share)


NEEDING = [
    *(("dbo_prefill_token_threshold", value) for value in (2, 1024, 2**31 - 1)),
    *(("tbo_token_distribution_threshold", value) for value in (0, 0.0, 0.25, 0.48, 0.5)),
]


@pytest.mark.parametrize(("name", "value"), NEEDING)
@pytest.mark.parametrize("off", [{}, {"enable_two_batch_overlap": False}], ids=str)
def test_a_threshold_that_would_do_nothing_is_refused(name, value, off):
    flag = f"--{name.replace('_', '-')}"
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**{name: value}, **off)
    assert str(caught.value) == f"{flag} {value}: needs --enable-two-batch-overlap, too"
    EngineConfig(**{name: value}, enable_two_batch_overlap=True)


def test_every_threshold_of_halves_needs_them():
    told = {f.name for f in fields(EngineConfig) if re.match("[dt]bo_", f.name)}
    assert told == {name for name, _ in NEEDING}


@pytest.mark.parametrize(
    ("model", "words", "line"),
    [
        ("demo", "--tp 2", "steps with 1024 tokens of prompts or more run as two halves, "),
        (
            "demo",
            "--tp 2 --dbo-prefill-token-threshold 9 --tbo-token-distribution-threshold 0",
            "steps with 9 tokens of prompts or more run as two halves, divided between sequences",
        ),
        ("demo", "", "--enable-two-batch-overlap changes nothing: there is one rank"),
        ("demo", "--tp 2 --batch-invariant", "--enable-two-batch-overlap changes nothing: "),
        ("demo", "--tp 2 --enable-dp-attention", "--enable-two-batch-overlap changes nothing: "),
        ("demo-v4", "--tp 2", "--enable-two-batch-overlap changes nothing: models of the V4"),
    ],
)
def test_a_plan_says_which_steps_are_divided(model, words, line, capsys):
    """In one line, for people and as JSON; nothing where nobody asked."""
    given = ["plan", "--model", model, "--platform", "cpu", *words.split()]
    assert main([*given, "--enable-two-batch-overlap"]) == 0
    said = [one for one in capsys.readouterr().out.splitlines() if "halves" in one or "two-" in one]
    assert len(said) == 1 and said[0].startswith(line), said
    assert main([*given, "--enable-two-batch-overlap", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["halves" if line.startswith("steps") else "undivided"] == said[0]
    if "threshold" not in words:
        assert main(given) == 0
        out = capsys.readouterr().out
        assert "halves" not in out and "two-batch" not in out
