"""Rotation tables against transformers' own rotary modules."""

from __future__ import annotations

from copy import deepcopy
from itertools import product

import pytest
import torch
from transformers import DeepseekV2Config, DeepseekV3Config
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2RotaryEmbedding
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3RotaryEmbedding,
    yarn_apply_mscale,
)

from ds_runtime.description.hf import from_hf
from ds_runtime.errors import DsRuntimeError, UnsupportedError
from ds_runtime.model.rope import amplitude, cos_sin_table, inverse_frequencies
from ds_runtime_kit.models.tiny import config_dict

SCALINGS = [
    {"rope_type": "default", "rope_theta": 10000.0},
    {"mscale": 0.707, "mscale_all_dim": 0.707},
    {"mscale": 1.0, "mscale_all_dim": 1.0, "factor": 40.0},
    {"mscale": 1.0, "mscale_all_dim": 0.707},
    {"mscale": 0.5, "mscale_all_dim": 1.3, "rope_theta": 50000.0, "factor": 64.0},
    {"beta_fast": 2.0, "beta_slow": 2.0},
    {"factor": 1.0},
]


@pytest.mark.parametrize("dim", [6, 64])
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("family", ["v2", "v3"])
def test_table(family, scaling, dim):
    base = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0}
    base |= {"original_max_position_embeddings": 64}
    parameters = scaling if scaling.get("rope_type") == "default" else {**base, **scaling}
    _, values = config_dict(family, rope_parameters=parameters, qk_rope_head_dim=dim)
    cls = {"v2": DeepseekV2Config, "v3": DeepseekV3Config}[family]
    config = cls(**values, architectures=[f"Deepseek{family.upper()}ForCausalLM"])
    ours = cos_sin_table(from_hf(config.to_dict()), 700, torch.device("cpu"))
    assert ours.shape == (700, dim) and ours.dtype == torch.float32
    positions, x = torch.arange(700)[None], torch.zeros(1, 1, dtype=torch.float32)
    if family == "v2":
        complex_table = DeepseekV2RotaryEmbedding(config)(x, positions)[0]
        theirs = torch.cat((complex_table.real, complex_table.imag), -1)
    else:
        cos, sin = DeepseekV3RotaryEmbedding(config)(x, positions)
        theirs = torch.cat((cos[0, :, : dim // 2], sin[0, :, : dim // 2]), -1)
    # Theirs multiplies float32 frequencies by positions up to 700.
    assert (ours - theirs).abs().max() < 2e-4


def test_amplitude_is_one_for_equal_mscales():
    _, values = config_dict("v3")
    raw = {**values, "architectures": ["DeepseekV3ForCausalLM"]}
    assert amplitude(from_hf(raw)) == 1.0


YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
LEGACY = {"type": "yarn", "factor": 4, "original_max_position_embeddings": 96}
FORMS = [  # of rope_scaling and of rope_parameters
    None,
    {},
    {"rope_type": "default"},
    {"type": "default"},
    {"rope_theta": 3e5},  # without a type
    YARN,
    LEGACY,
    {"rope_type": "yarn", "factor": 8.0},  # the original length is the model's
    {**YARN, "type": "linear"},
    {**LEGACY, "rope_type": "default"},
    {"rope_type": "yarn"},  # without a factor
    {**YARN, "factor": 0.5},
    {**YARN, "truncate": True, "attention_factor": None},
    {**YARN, "original_max_position_embeddings": 0},
    {**YARN, "beta_fast": 0, "beta_slow": 0},
    {**YARN, "beta_fast": 4, "beta_slow": 2.0},
    *(
        {**YARN, **fields}
        for fields in (
            {k: v for k, v in (("mscale", m), ("mscale_all_dim", a)) if v is not None}
            for m, a in product((None, 0, 0.707, 1.0), (None, 0, 0.707))
        )
    ),
]
OTHERS = [None, {"rope_type": "default", "rope_theta": 7e4}, {**YARN, "factor": 3.0}]


def with_thetas(form):
    """The same with and without a theta of its own."""
    return [form] if not form or "rope_theta" in form else [form, {**form, "rope_theta": 5e5}]


def combinations():
    forms = [each for form in FORMS for each in with_thetas(form)]
    for form, other, outer, length in product(forms, OTHERS, (None, 2e4), (None, 128)):
        for one, two in (("rope_scaling", "rope_parameters"), ("rope_parameters", "rope_scaling")):
            said = {one: form, two: other, "rope_theta": outer}
            said["original_max_position_embeddings"] = length
            yield {k: v for k, v in said.items() if v is not None}


def by_transformers(cls, rotary, raw):
    """(inverse frequencies, what cos and sin and what scores are multiplied by); None: refused."""
    try:
        config = cls.from_dict(deepcopy(raw))
        made = rotary(config)
    except (KeyError, ZeroDivisionError):
        return None
    head = raw["qk_nope_head_dim"] + raw["qk_rope_head_dim"]
    scale = yarn_apply_mscale(config.rope_parameters, head**-0.5)
    return made.inv_freq.double(), made.attention_scaling, scale


@pytest.mark.parametrize("family", ["v2", "v3"])
def test_every_combination_of_keys_means_what_transformers_reads(family):
    """Where it raises, so does this runtime, in its own words."""
    cls = {"v2": DeepseekV2Config, "v3": DeepseekV3Config}[family]
    rotary = {"v2": DeepseekV2RotaryEmbedding, "v3": DeepseekV3RotaryEmbedding}[family]
    _, values = config_dict(family, qk_rope_head_dim=16)
    values = {k: v for k, v in values.items() if k != "rope_parameters"}
    values["architectures"] = [f"Deepseek{family.upper()}ForCausalLM"]
    served = refused = 0
    for said in combinations():
        raw = {**values, **said}
        theirs = by_transformers(cls, rotary, raw)
        if theirs is None:
            with pytest.raises(DsRuntimeError, match=r"factor|original_max_position"):
                from_hf(raw)
            refused += 1
            continue
        ours = from_hf(raw)
        assert torch.allclose(inverse_frequencies(ours), theirs[0], rtol=1e-5), said
        assert amplitude(ours) == pytest.approx(theirs[1], rel=1e-9), said
        assert ours.softmax_scale == pytest.approx(theirs[2], rel=1e-9), said
        served += 1
    assert served > 800 and refused > 20


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"rope_scaling": {**YARN, "attention_factor": 1.5}}, "rope_scaling.attention_factor 1.5"),
        ({"rope_parameters": {**YARN, "truncate": None}}, "rope_parameters.truncate None"),
        ({"rope_scaling": {**YARN, "partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
        ({"rope_scaling": YARN, "partial_rotary_factor": 0.5}, ": partial_rotary_factor 0.5 is"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope type 'linear'; supported"),
        ({"rope_scaling": {"rope_type": "", "type": "yarn"}}, "rope type ''; supported"),
    ],
)
def test_what_transformers_reads_and_this_runtime_does_not_is_named(said, message):
    _, values = config_dict("v3", rope_parameters=None)
    with pytest.raises(UnsupportedError) as caught:
        from_hf({**values, "architectures": ["DeepseekV3ForCausalLM"], **said})
    assert message in str(caught.value)
