"""A tiny DeepSeek-V3 checkpoint written by transformers, with a byte-level tokenizer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

import ds_runtime
from tiny_models import made_once

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
VOCAB = 288
DEMO_FOLDER = Path(ds_runtime.__file__).parent / "demo"
CONTEXT = 160
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def write_tokenizer(folder: Path) -> None:
    """Every byte is a token; 0 is BOS, 1 is EOS."""
    letters = [BOS, EOS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Tokenizer(BPE(vocab={t: i for i, t in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([BOS, EOS])
    backend.save(str(folder / "tokenizer.json"))
    settings = {"add_bos_token": True, "bos_token": BOS, "eos_token": EOS}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")


def write_model(folder: Path) -> None:
    """Random float32 weights, wide enough apart that greedy choices are clear."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    torch.manual_seed(7)
    config = DeepseekV3Config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        n_routed_experts=8,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        routed_scaling_factor=1.5,
        max_position_embeddings=CONTEXT,
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=None,
    )
    model = DeepseekV3ForCausalLM(config).eval()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name.endswith("e_score_correction_bias"):
                tensor.uniform_(-0.2, 0.2)
        # EOS never wins by itself, so that lengths are those that a test asks for.
        model.lm_head.weight[1].zero_()
    model.save_pretrained(folder)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny-v3")
    write_model(folder)
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_without_tokenizer(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny-ids")
    for file in tiny.iterdir():
        if file.suffix == ".safetensors" or file.name in ("config.json", "generation_config.json"):
            (folder / file.name).symlink_to(file)
    return folder


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return made_once(tmp_path_factory, seed=11)


@pytest.fixture(scope="module")
def recorded():
    """The plugin of that name: its kernels never wait, and its platform records captured steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parent / "plugins"))
        import recorded

        yield recorded


@pytest.fixture(scope="session")
def chat_v4(tmp_path_factory):
    """A random model with the demo's tokenizer and layers of every kind of compression."""
    made = tmp_path_factory.mktemp("v4")
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    demo = json.loads((DEMO_FOLDER / "config.json").read_text())
    torch.manual_seed(5)
    named: dict[str, Any] = {  # as checkpoints call them
        "compress_ratios": [0, 4, 128, 4],
        "num_hash_layers": 1,
        "qk_rope_head_dim": 8,
    }
    config = DeepseekV4Config(
        vocab_size=demo["vocab_size"], hidden_size=64, moe_intermediate_size=32,
        num_hidden_layers=4, num_attention_heads=8, head_dim=32, q_lora_rank=32,
        num_experts_per_tok=2, n_routed_experts=8, index_n_heads=16, index_head_dim=16,
        index_topk=8, o_groups=2, o_lora_rank=16, sliding_window=16, max_position_embeddings=2048,
        eos_token_id=demo["eos_token_id"], **named,
    )  # fmt: skip
    model = DeepseekV4ForCausalLM(config)
    for name, buffer in model.named_buffers():
        if name.endswith("tid2eid"):
            buffer.copy_(torch.arange(2).expand_as(buffer))
    model.save_pretrained(made)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_FOLDER / name, made)
    return made
