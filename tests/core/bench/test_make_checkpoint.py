"""Generated checkpoints: equal bytes for equal arguments, and models that transformers runs."""

from __future__ import annotations

import hashlib
import json
import re

import pytest
import torch
import transformers
from safetensors import safe_open

from ds_runtime import LLM, SamplingParams
from ds_runtime.checkpoint.shards import Checkpoint
from ds_runtime.cli import main
from ds_runtime.errors import ConfigError
from ds_runtime_bench.checkpoints.checkpoint import Pools, make_checkpoint, plan_tensors
from ds_runtime_bench.record import load_format
from ds_runtime_bench.shapes import DTYPES, config_of
from ds_runtime_kit.models.oracle import Oracle

SETTINGS = {"platform": "cpu", "dtype": "float32", "threads": 1}
SETTINGS |= {"context_length": 320, "kv_memory": "8MB"}


def digest(folder):
    files = sorted(folder.iterdir())
    return {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        *((f"tiny-{s}", d) for s, d in zip(("v3", "v2-lite") * 3, DTYPES[:-1], strict=False)),
        *(("v4-tiny", d) for d in (None, "bfloat16", "fp8", "fp8_ue8m0")),
    ],
)
def test_same_arguments_same_bytes(tmp_path, shape, dtype):
    first = make_checkpoint(tmp_path / "a", shape, dtype, seed=4, shard_bytes=300_000)
    second = make_checkpoint(tmp_path / "b", shape, dtype, seed=4, shard_bytes=300_000)
    other = make_checkpoint(tmp_path / "c", shape, dtype, seed=5, shard_bytes=300_000)
    assert digest(first) == digest(second) != digest(other)
    shards = sorted(first.glob("*.safetensors"))
    assert len(shards) > 2
    index = json.loads((first / "model.safetensors.index.json").read_text())
    checkpoint = Checkpoint(first)
    assert index["metadata"]["total_size"] == sum(
        checkpoint.entry(name).nbytes for name in checkpoint.names
    )
    for shard in shards:  # the format's own reader agrees
        with safe_open(shard, "pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                theirs = file.get_tensor(name)
                ours = checkpoint.read(name)
                assert ours.dtype == theirs.dtype
                assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.parametrize("shape", ["tiny-v2-lite", "tiny-v3"])
def test_transformers_runs_them(tmp_path, shape):
    folder = make_checkpoint(tmp_path, shape, "float32")
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True, attn_implementation="eager"
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    oracle = Oracle(model.eval())
    prompt = oracle.draw_prompt(300, seed=0)
    with LLM(folder, **SETTINGS) as llm:
        output = llm.generate(prompt, SamplingParams(max_tokens=1, prompt_logprobs=0))[0]
        assert llm.tokenizer.decode(llm.tokenizer.encode("random weights")) == "random weights"
        assert llm.chat([{"role": "user", "content": "x"}])[0].token_ids
    exact = oracle.logprobs(prompt)
    assert exact.std() > 0.1
    for position, entry in enumerate(output.prompt_logprobs[1:], start=1):
        assert entry.logprob == pytest.approx(float(exact[position - 1, entry.token]), abs=1e-4)


V4 = {  # as DeepSeek publishes it
    r"embed|head|norm|.*_norm|.*compressor\.(norm|wkv|wgate)|.*weights_proj|.*ffn\.gate": "BF16",
    r".*attn\.(wq_a|wq_b|wkv|wo_a|wo_b)|.*indexer\.wq_b|.*shared_experts\.w[123]": "F8_E4M3",
    r".*experts\.\d+\.w[123]": "I8",
}
V4_BARE = {
    r".*_(fn|base|scale)|.*attn_sink|.*ape|.*gate\.bias": "F32",
    r".*tid2eid": "I64",
    r".*\.scale": "F8_E8M0",
}


def dtype_of(table, name):
    found = [dtype for pattern, dtype in table.items() if re.fullmatch(pattern, name)]
    assert len(found) == 1, (name, found)
    return found[0]


def test_v4_has_native_names_and_formats(tmp_path):
    folder = make_checkpoint(tmp_path, "v4-tiny")
    checkpoint = Checkpoint(folder)
    for name in checkpoint.names:
        module, weight = name.removesuffix(".weight"), name.endswith(".weight")
        assert checkpoint.entry(name).dtype == dtype_of(V4 if weight else V4_BARE, module), name
    expert = "layers.3.ffn.experts.15.w2"
    assert checkpoint.entry(f"{expert}.weight").shape == (256, 96)
    assert checkpoint.entry(f"{expert}.scale").shape == (256, 6)
    chosen = checkpoint.read("layers.1.ffn.gate.tid2eid")
    assert chosen.shape == (512, 4) and 0 <= int(chosen.min()) <= int(chosen.max()) < 16
    assert (chosen.sort(1).values.diff(dim=1) > 0).all()
    prompt = list(range(2, 302))
    with LLM(folder, **{**SETTINGS, "kv_memory": "64MB"}) as llm:
        output = llm.generate(prompt, SamplingParams(max_tokens=4, prompt_logprobs=0))[0]
    found = torch.tensor([entry.logprob for entry in output.prompt_logprobs[1:]])
    assert found.isfinite().all() and found.std() > 0.1


def test_sizes_are_those_of_the_real_models():
    def parameters(shape, dtype="bfloat16"):
        return sum(p.nbytes for p in plan_tensors(config_of(shape, dtype))) / 2

    assert parameters("v2-lite") == pytest.approx(15.706e9, rel=1e-3)
    assert 2 * parameters("lite-8") == pytest.approx(9.19e9, rel=1e-3)
    assert 2 * parameters("v4-cpu", "fp4") == pytest.approx(5.3e9, rel=0.05)
    assert parameters("v3-cpu") == pytest.approx(2.9e9, rel=0.05)
    planned = list(plan_tensors(config_of("v3-slice", "fp8")))
    draft = sum(p.nbytes for p in planned if ".layers.4." in p.name)
    assert 37e9 < sum(p.nbytes for p in planned) - draft < 42e9
    assert draft == pytest.approx(11.6e9, rel=0.02)  # without copies of embedding and head


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--seed=-1", "--seed -1: must be from 0 to 18446744073709551615"),
        (f"--seed={1 << 64}", f"--seed {1 << 64}: must be from 0 to"),
        ("--shard-size=0", "--shard-size 0: must be above 0"),
    ],
)
def test_what_is_refused_leaves_no_folder(tmp_path, capsys, flag, said):
    assert main(["bench", "make-checkpoint", str(tmp_path / "new"), flag]) != 0
    assert said in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_the_largest_seed():
    Pools(torch.float32, "float32", (1 << 64) - 1, 8, (8, 2))


def test_unknown_names():
    with pytest.raises(ConfigError, match="--shape 'huge': known are tiny-v2-lite"):
        config_of("huge", "bfloat16")
    with pytest.raises(ConfigError, match="--dtype fp4: is for --shape v4-cpu, v4-tiny, not v3"):
        config_of("v3-cpu", "fp4")
    with pytest.raises(ConfigError, match="--dtype 'int3'"):
        config_of("lite-8", "int3")


def test_a_config_alone_is_enough_for_random_weights(tmp_path, capsys):
    folder = tmp_path / "m"
    command = ["bench", "make-checkpoint", str(folder), "--shape", "tiny-v3", "--config-only"]
    assert main(command) == 0
    assert "--load-format dummy" in capsys.readouterr().out
    assert not any(folder.glob("*.safetensors")) and load_format(folder) == "dummy"
    assert main(["generate", "hello", "--model", str(folder), "--load-format", "dummy"]) == 0
