"""--expert-metrics: as many choices of each expert as transformers makes of the same tokens."""

from __future__ import annotations

import random

import pytest
import torch
from test_dp_attention import SETTINGS

from ds_runtime import LLM, SamplingParams

LAYOUTS = {
    "op by op": {"disable_graph": True, "disable_prefill_graph": True},
    "captured": {},
    "tp": {"tp": 2},
    "ep": {"tp": 2, "ep": 2},
    "groups": {"tp": 2, "enable_dp_attention": True},
    "ep, groups": {"tp": 2, "ep": 2, "enable_dp_attention": True},
    "ep, groups, shared ones beside": {
        "tp": 2,
        "ep": 2,
        "enable_dp_attention": True,
        "fusion": ("shared_experts=on",),
    },
}


@pytest.fixture(scope="module")
def made(tiny):
    from transformers import DeepseekV3ForCausalLM

    return tiny, DeepseekV3ForCausalLM.from_pretrained(tiny, dtype=torch.float32).eval()


def chosen_of(model, tokens):
    """By layer, [experts]: how many of these tokens choose each."""
    found, hooks = {}, []
    for number, layer in enumerate(model.model.layers):
        if hasattr(layer.mlp, "experts"):

            def note(module, arguments, number=number):
                ids = next(a for a in arguments[1:] if not a.is_floating_point())
                found[number] = torch.bincount(
                    ids.flatten(), minlength=model.config.n_routed_experts
                )

            hooks.append(layer.mlp.experts.register_forward_pre_hook(note))
    with torch.no_grad():
        model(torch.tensor([tokens]))
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_computed_token_counts_once(made, name):
    folder, model = made
    layout = LAYOUTS[name]
    draw = random.Random(2)
    prompts = [[draw.randrange(2, 250) for _ in range(n)] for n in (30, 7, 41)]
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (5, 12, 9)]
    with LLM(folder, **SETTINGS, **layout, expert_metrics=True, disable_radix_cache=True) as llm:
        assert all(not any(counts) for counts in llm.stats().expert_tokens.values())
        outputs = llm.generate(prompts, params)
        found = llm.stats().expert_tokens
    whole = [[*p, *o.token_ids[:-1]] for p, o in zip(prompts, outputs, strict=True)]
    each = [chosen_of(model, tokens) for tokens in whole]
    layers = sorted(each[0])
    assert sorted(found) == layers
    groups = 2 if layout.get("enable_dp_attention") else 1
    last = model.config.num_hidden_layers - 1
    sums = {
        layer: [sum(c[layer] for i, c in enumerate(each) if some >> i & 1) for some in range(1, 8)]
        for layer in layers
    }
    for layer in layers:
        counted = torch.tensor(found[layer])
        if groups == 1 and layer < last:
            assert torch.equal(counted, sums[layer][-1])
        elif layer < last:  # those of one group, whichever has which
            assert any(torch.equal(counted, some) for some in sums[layer][:-1])
        else:
            assert 0 < counted.sum() <= sums[layer][-1].sum()


def test_nothing_is_counted_unless_asked(made):
    with LLM(made[0], **SETTINGS) as llm:
        llm.generate([[5, 6, 7]], SamplingParams(max_tokens=3))
        assert llm.stats().expert_tokens == {}
