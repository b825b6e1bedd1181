"""GGUF files hold the checkpoint's values, as the format's own package reads them."""

from __future__ import annotations

import builtins
from dataclasses import replace

import gguf
import pytest
import torch

from ds_runtime.checkpoint.shards import Checkpoint
from ds_runtime.cli import main
from ds_runtime.description.config import Yarn
from ds_runtime.description.hf import load_config
from ds_runtime.errors import ConfigError, UnsupportedError
from ds_runtime_bench.checkpoints import gguf as module
from ds_runtime_bench.checkpoints.checkpoint import make_checkpoint
from ds_runtime_bench.checkpoints.gguf import make_gguf, metadata

KINDS = {"F32": torch.float32, "F16": torch.float16}


def read_back(path):
    """Name → tensor in the order of numpy, and key → value."""
    reader = gguf.GGUFReader(path)
    tensors = {}
    for t in reader.tensors:
        shape = [int(n) for n in reversed(t.shape)]
        raw = torch.from_numpy(t.data.copy())
        if t.tensor_type.name == "BF16":
            raw = raw.view(torch.uint8).view(torch.bfloat16)
        else:
            assert raw.dtype == KINDS[t.tensor_type.name]
        tensors[t.name] = raw.view(shape)
    return tensors, {k: f.contents() for k, f in reader.fields.items()}


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [("tiny-v2-lite", "bfloat16"), ("tiny-v3", "float32"), ("tiny-v3", "float16")],
)
def test_the_file_holds_the_checkpoint(tmp_path, shape, dtype):
    folder = make_checkpoint(tmp_path / "ck", shape, dtype)
    tensors, values = read_back(make_gguf(folder, tmp_path / "out.gguf"))
    config, checkpoint = load_config(folder), Checkpoint(folder)
    seen = set()

    def stored(name):
        seen.add(name)
        return checkpoint.read(name)

    def same(name, want):
        assert tensors[name].shape == want.shape, name
        assert torch.equal(tensors[name], want.to(tensors[name].dtype)), name
        assert tensors.pop(name).dtype in (want.dtype, torch.float32)

    same("token_embd.weight", stored("model.embed_tokens.weight"))
    same("output.weight", stored("lm_head.weight"))
    same("output_norm.weight", stored("model.norm.weight"))
    layer = "model.layers.1"
    for name, where in {
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
        "attn_kv_a_norm": "self_attn.kv_a_layernorm",
        "attn_output": "self_attn.o_proj",
        "ffn_gate_inp": "mlp.gate",
        "ffn_up_shexp": "mlp.shared_experts.up_proj",
        "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
        "ffn_down_shexp": "mlp.shared_experts.down_proj",
    }.items():
        same(f"blk.1.{name}.weight", stored(f"{layer}.{where}.weight"))
    for kind in ("gate", "up", "down"):
        experts = [
            stored(f"{layer}.mlp.experts.{e}.{kind}_proj.weight") for e in range(config.experts)
        ]
        same(f"blk.1.ffn_{kind}_exps.weight", torch.stack(experts))
        same(f"blk.0.ffn_{kind}.weight", stored(f"model.layers.0.mlp.{kind}_proj.weight"))
    kv_b = stored(f"{layer}.self_attn.kv_b_proj.weight")
    kv_b = kv_b.view(config.heads, config.qk_nope + config.v_head, config.kv_lora)
    same("blk.1.attn_k_b.weight", kv_b[:, : config.qk_nope].transpose(1, 2))
    same("blk.1.attn_v_b.weight", kv_b[:, config.qk_nope :])
    if config.q_lora:
        names = {"q_a": "q_a_proj", "q_b": "q_b_proj", "q_a_norm": "q_a_layernorm"}
        for name, where in names.items():
            same(f"blk.1.attn_{name}.weight", stored(f"{layer}.self_attn.{where}.weight"))
        bias = "mlp.gate.e_score_correction_bias"
        same("blk.1.exp_probs_b.bias", stored(f"{layer}.{bias}"))
    else:
        same("blk.1.attn_q.weight", stored(f"{layer}.self_attn.q_proj.weight"))
    assert {n for n in checkpoint.names if n.startswith(layer)} <= seen
    assert not [n for n in tensors if n.startswith(("blk.1.", "output", "token"))]

    assert values["general.architecture"] == "deepseek2"
    assert values["deepseek2.attention.q_lora_rank"] == (config.q_lora or 0)
    assert values["deepseek2.attention.key_length"] == config.kv_lora + config.qk_rope
    assert values["deepseek2.expert_used_count"] == config.routing.top_k
    assert values["deepseek2.expert_weights_scale"] == pytest.approx(config.routing.scale)
    assert values["deepseek2.rope.scaling.factor"] == pytest.approx(config.yarn.factor)
    assert values["deepseek2.vocab_size"] == config.vocab_size
    for key in metadata(config, "m"):
        assert key in values


def test_fp8_is_dequantised(tmp_path):
    folder = make_checkpoint(tmp_path / "ck", "tiny-v3", "fp8")
    tensors, _ = read_back(make_gguf(folder, tmp_path / "out.gguf"))
    checkpoint = Checkpoint(folder)
    name = "model.layers.2.self_attn.o_proj"
    codes = checkpoint.read(f"{name}.weight").to(torch.float32)
    scale = checkpoint.read(f"{name}.weight_scale_inv")
    scale = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    want = codes * scale[: codes.shape[0], : codes.shape[1]]
    got = tensors["blk.2.attn_output.weight"]
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.to(torch.float32), want, rtol=2**-8, atol=0)


def test_what_cannot_be_said_is_refused(tmp_path, monkeypatch):
    folder = make_checkpoint(tmp_path / "ck", "tiny-v3", "bfloat16")
    good = load_config(folder)
    yarn = Yarn(8.0, 256, mscale=1.0, mscale_all_dim=0.5)
    routing = replace(good.routing, method="group_limited_greedy")
    for changed, named in (
        (replace(good, moe_every=2), "moe_layer_freq 2"),
        (replace(good, rope_interleave=False), "rope_interleave"),
        (replace(good, routing=routing), "group_limited_greedy"),
        (replace(good, yarn=yarn), "mscale 1.0"),
    ):
        monkeypatch.setattr(module, "load_config", lambda _, c=changed: c)
        with pytest.raises(UnsupportedError, match=named):
            make_gguf(folder, tmp_path / "out.gguf")
    assert not (tmp_path / "out.gguf").exists()


def test_without_the_package(tmp_path, monkeypatch):
    real = builtins.__import__

    def fake(name, *args, **kwargs):
        if name == "gguf":
            raise ImportError("no gguf")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", fake)
    with pytest.raises(ConfigError, match="pip install gguf"):
        make_gguf(tmp_path, tmp_path / "out.gguf")


def test_the_verb(tmp_path, capsys):
    folder = make_checkpoint(tmp_path / "ck", "tiny-v2-lite", "bfloat16")
    out = tmp_path / "out.gguf"
    assert main(["bench", "make-gguf", str(folder), str(out)]) == 0
    size = out.stat().st_size
    assert size > 1_000_000
    assert main(["bench", "make-gguf", str(folder), str(out)]) != 0
    assert "exists; name another file" in capsys.readouterr().err
    assert out.stat().st_size == size
