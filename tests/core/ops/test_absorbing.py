"""Which chunks of prompts attend latents, counted by what the ops say of their own work."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_runtime.ops.contract import DeviceInfo, Dims, Facts
from ds_runtime.ops.contracts.attention.absorbing import Absorbing
from ds_runtime.ops.contracts.work import Sizes
from ds_runtime.ops.table import OPS
from examples import examples

NAMES = ("heads", "qk_nope", "qk_rope", "v", "kv_lora")
PUBLISHED = [(16, 128, 64, 128, 512), (128, 128, 64, 128, 512)]  # V2-Lite and V3
WIDTHS = st.tuples(
    st.integers(1, 128), *(st.integers(1, most) for most in (256, 128, 256, 1024))
) | st.sampled_from(PUBLISHED)


def flops(widths, start, length):
    """(expanding what is cached, absorbing queries): of all the ops that differ."""
    device = DeviceInfo("cpu", "a", "b")
    sizes = Sizes(facts=Facts(device, Dims(dict(zip(NAMES, widths, strict=True)))))
    absorb, decode = OPS["mla_absorb"].cost.calls, OPS["mla_decode"].cost.calls["run"][1]
    heads, nope, rope, v, _ = widths
    seen = sum(start + j + 1 for j in range(length))
    attended = 2.0 * heads * (nope + rope + v) * seen
    expanded = absorb["expand"][1](sizes, start + length).flops + attended
    absorbed = sum(absorb[method][1](sizes, length).flops for method in ("apply_q", "apply_v"))
    return expanded, absorbed + decode(replace(sizes, context=seen), 1).flops


@given(widths=WIDTHS, start=st.integers(0, 5000), length=st.integers(1, 300))
@settings(max_examples=examples(100), deadline=None)
def test_what_is_absorbed_takes_fewer_flops(widths, start, length):
    rule = Absorbing(*widths)
    expanded, absorbed = flops(widths, start, length)
    if rule.pays(start, length):
        assert absorbed < expanded and start > 0
        assert length == 1 or rule.pays(start, length - 1), "so do fewer tokens"
        assert rule.pays(start + 1, length), "behind more that are cached, too"


@given(length=st.integers(1, 400), times=st.integers(4, 60))
@settings(max_examples=examples(50), deadline=None)
@pytest.mark.parametrize("widths", PUBLISHED)
def test_behind_long_beginnings_flops_alone_decide(widths, length, times):
    expanded, absorbed = flops(widths, times * length, length)
    assert Absorbing(*widths).pays(times * length, length) == (absorbed < expanded)


@given(widths=WIDTHS, end=st.integers(1, 400))
@settings(max_examples=examples(100), deadline=None)
def test_the_longest_chunk_is_found(widths, end):
    rule = Absorbing(*widths)
    assert rule.most(end) == max((n for n in range(1, end + 1) if rule.pays(end - n, n)), default=0)


@pytest.mark.parametrize("widths", PUBLISHED)
def test_published_models_absorb_up_to_170_tokens(widths):
    rule = Absorbing(*widths)
    assert rule.pays(50_000, 170) and not rule.pays(50_000, 171)
    assert not any(rule.pays(0, n) for n in range(1, 200)), "nothing is cached"
