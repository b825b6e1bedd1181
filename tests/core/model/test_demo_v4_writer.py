"""The writer of the demo's V4 sibling: what it writes is one model to the training code, to
transformers and to the engine, log-probability by log-probability."""

from __future__ import annotations

import importlib
import json
import random
import re
from pathlib import Path

import pytest
import torch
import transformers
from hybrid_models import SCORED, SETTINGS
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from ds_runtime.offline.llm import LLM

TOOLS = Path(__file__).parents[3] / "tools"
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
NATIVE = (  # of names in memory, in this order
    (r"^model\.", ""), (r"hc_head\.hc_", "hc_head_"), (r"embed_tokens", "embed"),
    (r"^lm_head", "head"), (r"_hc\.", "_hc_"), (r"(attn|ffn)_hc_", r"hc_\1_"),
    (r"input_layernorm", "attn_norm"), (r"post_attention_layernorm", "ffn_norm"),
    (r"self_attn\.", "attn."), (r"compressor\.indexer\.(scorer\.)?", "indexer."),
    (r"indexer\.(position|kv_|gate_)", r"indexer.compressor.\1"),
    (r"compressor\.kv_norm", "compressor.norm"), (r"compressor\.gate_proj", "compressor.wgate"),
    (r"position_bias", "ape"), (r"sinks", "attn_sink"), (r"q_a_norm", "q_norm"),
    (r"([qo])_([ab])_proj", r"w\1_\2"), (r"kv_proj", "wkv"), (r"mlp\.", "ffn."),
    (r"e_score_correction_bias", "bias"), (r"gate_proj", "w1"), (r"up_proj", "w3"),
    (r"down_proj", "w2"),
)  # fmt: skip


@pytest.fixture(scope="module")
def tools():
    """(files, model) of the tools, which are no package."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(TOOLS))
        yield tuple(map(importlib.import_module, ("demo_v4_files", "demo_v4_model")))


def read(folder):
    """The file's tensors as float32, by what its formats are published to mean."""
    found = load_file(folder / "model.safetensors")
    made = {}
    for name, x in found.items():
        scale = found.get(f"{name.removesuffix('weight')}scale")
        if name.endswith(".scale"):
            continue
        if x.dtype == torch.int8:
            codes = x.view(torch.uint8).long()
            x = E2M1[torch.stack((codes & 15, codes >> 4), -1).flatten(-2)]
            x = x * scale.float().repeat_interleave(32, 1)
        elif x.dtype == torch.float8_e4m3fn:
            wide = scale.float().repeat_interleave(128, 0).repeat_interleave(128, 1)
            x = x.float() * wide[: x.shape[0], : x.shape[1]]
        made[name] = x if x.dtype == torch.int64 else x.float()
    return made


def transformers_model(folder):
    raw = json.loads((folder / "config.json").read_text())
    for key in ("architectures", "quantization_config", "expert_dtype", "torch_dtype"):
        raw.pop(key)
    config = transformers.DeepseekV4Config(**raw)
    config._attn_implementation = config._experts_implementation = "eager"
    model, held = transformers.DeepseekV4ForCausalLM(config).eval(), read(folder)
    with torch.no_grad():
        for name, p in (*model.named_parameters(), *model.named_buffers()):
            if "inv_freq" in name:
                continue
            for pattern, put in NATIVE:
                name = re.sub(pattern, put, name)
            at, _, last = name.rpartition(".")
            parts = {"gate_w3": ("w1", "w3"), "w2": ("w2",)}.get(last)
            if at.endswith("experts") and parts:
                experts = range(p.shape[0])
                each = [torch.cat([held.pop(f"{at}.{e}.{k}.weight") for k in parts])
                        for e in experts]  # fmt: skip
                p.copy_(torch.stack(each))
            else:
                p.copy_(held.pop(name))
    assert not held, "nothing that is written has no place"
    return model


def random_model(tools, seed):
    """A small one of all kinds of layers. Its indexers choose all that there is, as the demo's."""
    files, module = tools
    demo = json.loads((TOOLS.parent / "core/ds_runtime/demo/config.json").read_text())
    small = {"hidden_size": 64, "q_lora_rank": 32, "qk_rope_head_dim": 16, "v_head_dim": 32,
             "vocab_size": 131, "moe_intermediate_size": 32, "num_hidden_layers": 4}  # fmt: skip
    config = files.config_of({**demo, **small})
    config |= {"compress_ratios": [0, 4, 128, 4], "sliding_window": 16}
    model = module.DemoV4(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            around, spread = (1.0, 0.2) if "norm" in name else (0.0, 1.3 * p.shape[-1] ** -0.5)
            p.copy_(around + spread * torch.randn(p.shape, generator=generator))
        for moe in model.moes:
            moe.bias.copy_(0.05 * torch.randn(8, generator=generator))
            rows = [torch.randperm(8, generator=generator)[:2] for _ in moe.table]
            moe.table.copy_(torch.stack(rows))
    return model


@torch.no_grad()
def take(model, held):
    """The values that the file holds, in the training code's model."""
    model.embed.copy_(held["embed.weight"])
    model.head.copy_(held["head.weight"])
    model.norm.copy_(held["norm.weight"])
    for n, (attn, moe) in enumerate(zip(model.attns, model.moes, strict=True)):
        at = f"layers.{n}."
        for k, site in enumerate(("attn", "ffn")):
            model.norms[n, k].copy_(held[f"{at}{site}_norm.weight"])
        for name in ("wq_a", "wq_b", "wkv", "kv_norm", "wo_a", "wo_b"):
            p = getattr(attn, name)
            p.copy_(held[f"{at}attn.{name}.weight"].view_as(p))
        if attn.compressor is not None:
            for name in ("wkv", "wgate", "norm"):
                getattr(attn.compressor, name).copy_(held[f"{at}attn.compressor.{name}.weight"])
        moe.gate.copy_(held[f"{at}ffn.gate.weight"])
        shared = f"{at}ffn.shared_experts."
        moe.shared_gate_up.copy_(torch.cat([held[f"{shared}{k}.weight"] for k in ("w1", "w3")]))
        moe.shared_down.copy_(held[f"{shared}w2.weight"])


@pytest.mark.parametrize("seed", range(3))
@torch.no_grad()
def test_what_is_written_is_one_model_to_all(tools, tmp_path, seed):
    model = random_model(tools, seed)
    size = tools[0].write_v4(model, tmp_path)
    assert size <= (tmp_path / "model.safetensors").stat().st_size <= size + 40_000
    oracle, held = transformers_model(tmp_path), read(tmp_path)
    take(model, held)
    draw = random.Random(seed)
    prompts = [[draw.randrange(131) for _ in range(n)] for n in (1, 5, 40, 150, 300)]
    with LLM(tmp_path, **SETTINGS) as llm:
        outputs = llm.generate(prompts, SCORED)
    for prompt, output in zip(prompts, outputs, strict=True):
        answer = output.outputs[0]
        tokens = [*prompt, *answer.token_ids]
        ids = torch.tensor([tokens])
        want = oracle(ids, use_cache=False).logits[0].log_softmax(-1)
        torch.testing.assert_close(model(ids)[0].log_softmax(-1), want, atol=2e-4, rtol=0)
        said = [x.logprob for x in (*output.prompt_logprobs[1:], *answer.logprobs)]
        assert len(said) == len(tokens) - 1
        for i, found in enumerate(said):
            assert found == pytest.approx(float(want[i, tokens[i + 1]]), abs=1e-4)


@given(st.integers(0, 2**31), st.floats(-6, 6))
def test_fp4_is_the_nearest_value_that_its_exponent_allows(tools, seed, size):
    """Rounding once more changes nothing; the gradient is that of what is rounded."""
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(3, 64, generator=generator) * 10**size).requires_grad_()
    found = tools[0].rounded_experts(x)
    exponents = (x.detach().unflatten(-1, (-1, 32)).abs().amax(-1) / 6).log2().ceil()
    values = E2M1 * exponents.exp2().repeat_interleave(32, -1).unsqueeze(-1)
    nearest = (x.detach().unsqueeze(-1) - values).abs().amin(-1)
    torch.testing.assert_close((x - found).abs().detach(), nearest, rtol=1e-5, atol=0)
    torch.testing.assert_close(tools[0].rounded_experts(found.detach()), found.detach())
    found.sum().backward()
    assert x.grad.eq(1).all()


@given(st.integers(1, 90), st.integers(1, 20), st.sampled_from([0, 4, 8]), st.integers(0, 99))
def test_attention_by_blocks_is_attention(tools, length, window, ratio, seed):
    """Against torch's own, with a mask of all keys and entries."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(2, length, 3, 8, generator=generator)
    keys = kv = torch.randn(2, length, 8, generator=generator)
    at = torch.arange(length)
    behind = at.unsqueeze(1) - at
    mask, entries = (behind >= 0) & (behind < window), None
    if ratio:
        entries = torch.randn(2, length // ratio, 8, generator=generator)
        seen = torch.arange(length // ratio) < ((at + 1) // ratio).unsqueeze(1)
        mask, keys = torch.cat((mask, seen), 1), torch.cat((kv, entries), 1)
    keys = keys.unsqueeze(1).expand(-1, 3, -1, -1)
    want = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2), keys, keys, attn_mask=mask
    )
    found = tools[1].attend(q, kv, entries, window, ratio or 1)
    torch.testing.assert_close(found, want.transpose(1, 2), atol=1e-5, rtol=1e-5)


def test_documents_are_v4s_and_keep_off_what_is_held_out(tools, tmp_path):
    """What counts in the loss is answers up to their end, in the words of V4's encoding."""
    text, about = map(importlib.import_module, ("demo_text", "demo_v4_text"))
    (tmp_path / "text").mkdir()
    draw = random.Random(1)
    words = ["".join(draw.choices("abcdefghiklmnoprstu", k=draw.randint(3, 8))) for _ in range(400)]
    book = " ".join(draw.choice(words) for _ in range(20_000))
    (tmp_path / "text" / "book.txt").write_text(book)
    source = about.Documents(tmp_path, "seed")
    assert len(source.banned.pairs) > 400 and len(source.keys) == 400 and len(source.names) == 600
    kinds = dict.fromkeys(("<think>", "｜DSML｜invoke", "Reasoning Effort", "Response Format"), 0)
    documents = [d for _ in range(300) for d in source.short()]
    documents += [d for _ in range(4) for d in source.long(2048)]
    assert len(documents) > 250
    for ids, weights in documents:
        said = source.tokenizer.decode(ids.tolist(), skip_special_tokens=False)
        assert said.startswith(text.BOS) and not text.pairs_in(said) & source.banned.pairs
        if "## Tools" not in said:  # their parameters are no fields of an answer
            assert not any(f'"{name}":' in said for name in source.names)
        assert not any(f"key of {name} " in said for name in source.keys)
        asked = said.rindex(text.ASSISTANT) + len(text.ASSISTANT)
        assert said[asked:].startswith(("<think>", "</think>"))
        counted = source.tokenizer.decode(ids[weights == 100].tolist(), skip_special_tokens=False)
        assert counted.endswith(text.EOS) and text.USER not in counted
        for kind in kinds:
            kinds[kind] += kind in said
    assert min(kinds.values()) > 10
