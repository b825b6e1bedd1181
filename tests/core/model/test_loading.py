"""Whole checkpoints: what is missing, unexpected or wrong is named before anything is read."""

from __future__ import annotations

import json
import re
import shutil
from types import SimpleNamespace

import pytest
import torch
from model_harness import CPU, Harness, decide, on_ranks, run_schedule
from safetensors.torch import load_file, save_file

from ds_runtime.assembly.assemble import assemble
from ds_runtime.assembly.estimate import page_table_bytes
from ds_runtime.checkpoint.shards import Checkpoint
from ds_runtime.checkpoint.tensors import SINGLE
from ds_runtime.config import EngineConfig
from ds_runtime.errors import CheckpointError, ConfigError, UnsupportedError
from ds_runtime.model.deepseek import DeepSeekModel
from ds_runtime.ops.binding.bound import BoundOps
from ds_runtime.parallel.group import SoloCommunicator
from ds_runtime.parallel.world import World
from ds_runtime.platform.contract import MemoryInfo
from ds_runtime.weights.load import check_memory, load_model, needed_bytes, quant_of
from ds_runtime.weights.loader import Loader
from ds_runtime_kit.models.tiny import write_tiny, write_tiny_fp8

PROMPTS = [[5, 17, 3, 90, 41, 7, 8, 120], [1, 2, 3]]
EXPERTS = "model.layers.1.mlp.experts"


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    folder = tmp_path_factory.mktemp("v3")
    write_tiny(folder, "v3")
    return folder


@pytest.fixture
def change(original, tmp_path):
    """change(function of the tensors, **config values) → a folder with the changed copy."""

    def make(function=None, **config):
        shutil.copytree(original, tmp_path, dirs_exist_ok=True)
        tensors = load_file(original / SINGLE)
        if function is not None:
            function(tensors)
        save_file({k: v.contiguous() for k, v in tensors.items()}, tmp_path / SINGLE)
        raw = json.loads((original / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**raw, **config}))
        return tmp_path

    return make


def logits(folder) -> torch.Tensor:
    return torch.cat(run_schedule(Harness(decide(folder)), PROMPTS, 0, 5))


def refused(folder, said, error=CheckpointError):
    with pytest.raises(error, match=said):
        Harness(decide(folder))


def test_missing(change):
    def drop(tensors):
        del tensors["model.norm.weight"]

    refused(change(drop), r"tensor model\.norm\.weight is missing; config.json asks for 3 layers")


def test_many_missing(change):
    def drop(tensors):
        for name in [n for n in tensors if ".layers.2." in n]:
            del tensors[name]

    refused(change(drop), r"\d+ tensors \(model\.layers\.2\..*, …\) are missing")


def test_unexpected(change):
    def add(tensors):
        tensors["model.layers.0.self_attn.q_proj.bias"] = torch.ones(3)

    refused(change(add), r"tensor .*q_proj\.bias is not expected")


def test_more_layers_than_config_says(change):
    refused(change(num_hidden_layers=2), r"model\.layers\.2\..* not expected")


def test_scales_without_a_quantisation(change):
    def add(tensors):
        tensors["model.layers.0.self_attn.o_proj.weight_scale_inv"] = torch.ones(1, 1)

    refused(change(add), "quantization_config describe another model")


def test_wrong_shape(change):
    def cut(tensors):
        name = "model.layers.0.self_attn.o_proj.weight"
        tensors[name] = tensors[name][:, :-1]

    refused(change(cut), r"o_proj\.weight: shape \[64, 79\] found, \[64, 80\] expected")


def test_wrong_shape_of_a_norm(change):
    def cut(tensors):
        tensors["model.norm.weight"] = torch.ones(63)

    refused(change(cut), r"norm\.weight: shape \[63\] found, \[64\] expected")


def test_wrong_dtype(change):
    def cast(tensors):
        tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.int8)

    refused(change(cast), r"lm_head\.weight: dtype I8 found, BF16 or F16 or F32 or F64 expected")


def test_what_may_be_ignored(change, original):
    def add(tensors):
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
        tensors["model.layers.3.eh_proj.weight"] = torch.ones(2, 2)  # a draft layer
        tensors["model.layers.3.self_attn.o_proj.weight"] = torch.ones(2, 2)

    assert torch.equal(logits(change(add)), logits(original))


def test_fused_experts(change, original):
    """A re-export that stacks gate and up, and down, of all experts of a layer."""

    def fuse(tensors):
        def taken(name):
            return [tensors.pop(f"{EXPERTS}.{e}.{name}.weight") for e in range(16)]

        pairs = zip(taken("gate_proj"), taken("up_proj"), strict=True)
        tensors[f"{EXPERTS}.gate_up_proj"] = torch.stack([torch.cat(p) for p in pairs])
        tensors[f"{EXPERTS}.down_proj"] = torch.stack(taken("down_proj"))

    assert torch.equal(logits(change(fuse)), logits(original))


def test_too_few_fused_experts(change):
    def fuse(tensors):
        for name in [n for n in tensors if n.startswith(EXPERTS)]:
            del tensors[name]
        tensors[f"{EXPERTS}.gate_up_proj"] = torch.ones(15, 64, 64)
        tensors[f"{EXPERTS}.down_proj"] = torch.ones(15, 64, 32)

    refused(change(fuse), "15 experts found, more expected")


def test_16_bit_checkpoints_in_float32(change, original):
    def cast(tensors):
        for name, t in tensors.items():
            tensors[name] = t.half() if "proj" in name else t.bfloat16()

    def cast_back(tensors):
        cast(tensors)
        for name, t in tensors.items():
            tensors[name] = t.float()

    assert torch.equal(logits(change(cast)), logits(change(cast_back)))


def test_half_split_rotation_across_blocks_needs_dense_weights(tmp_path):
    """Rows 120 to 135 of the first head lie in two blocks of 128."""
    write_tiny_fp8(tmp_path, "v3", rope_interleave=False, qk_nope_head_dim=120)
    refused(tmp_path, "rope_interleave false with fp8_block weights .* two blocks of 128 rows, as "
            "those of model.layers.0.self_attn.q_b_proj", UnsupportedError)  # fmt: skip


def test_not_enough_memory(original, monkeypatch):
    assembly = decide(original)
    needed, tables = needed_bytes(assembly), page_table_bytes(assembly)
    free = MemoryInfo(9, needed + tables)
    monkeypatch.setattr(type(assembly.platform), "memory", lambda self, rank: free)
    Harness(assembly)
    free = MemoryInfo(9, needed + tables - 1)
    with pytest.raises(
        ConfigError, match=r"--max-running-requests 64: page tables .*--context-length"
    ):
        Harness(assembly)
    free = MemoryInfo(9, needed - 1)
    with pytest.raises(ConfigError, match=r"weights need .* are free on cpu: --dtype bfloat16"):
        Harness(assembly)


@pytest.mark.parametrize(("heads", "said"), [(4, "--tp 2 divides it"), (3, "--tp 3 divides it")])
def test_ranks_that_are_named_divide_the_model(tmp_path, monkeypatch, heads, said):
    """What is proposed where weights do not fit can be given."""
    sizes = {"moe_intermediate_size": 48, "intermediate_size": 96, "n_shared_experts": 1}
    write_tiny(tmp_path, "v3", num_attention_heads=heads, num_key_value_heads=heads, **sizes)
    settings = {"model": str(tmp_path), "platform": "cpu", "dtype": "bfloat16"}
    assembly = assemble(EngineConfig(**settings))
    monkeypatch.setattr(type(assembly.platform), "memory", lambda self, rank: MemoryInfo(9, 1))
    with pytest.raises(ConfigError, match=f"are free on cpu: {said} where every rank"):
        check_memory(assembly, SoloCommunicator(), "cpu", 0)
    whole = assemble(EngineConfig(**settings, tp=heads))
    with pytest.raises(ConfigError, match=r"a model of fewer or smaller weights fits \("):
        check_memory(whole, SoloCommunicator(), "cpu", 0)


def test_tables_of_every_token_of_a_step(original, monkeypatch):
    """With --batch-invariant each token of a prompt is a sequence of its own."""
    given = {"model": str(original), "platform": "cpu"}
    plain, assembly = (
        assemble(EngineConfig(**given, batch_invariant=asked)) for asked in (False, True)
    )
    config = assembly.config
    tables, needed = page_table_bytes(assembly), needed_bytes(assembly)
    rows = config.max_step_tokens / config.max_running_requests
    assert tables == page_table_bytes(plain) * rows > page_table_bytes(plain)
    monkeypatch.setattr(
        type(assembly.platform), "memory", lambda self, rank: MemoryInfo(9, needed + tables - 1)
    )
    tokens = config.max_step_tokens
    said = f"--max-step-tokens {tokens} with --batch-invariant: page tables for {tokens} sequences"
    with pytest.raises(ConfigError, match=rf"{said}.*give less, or lower --context-length"):
        check_memory(assembly, SoloCommunicator(), "cpu", 0)


def test_an_enormous_context_is_blamed_on_the_rotation_table(tmp_path, monkeypatch):
    write_tiny(tmp_path, "v3")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"max_position_embeddings": 10**9}))
    assembly = decide(tmp_path)
    free = MemoryInfo(9, 1 << 30)
    monkeypatch.setattr(type(assembly.platform), "memory", lambda self, rank: free)
    with pytest.raises(ConfigError, match=r"rotation table of 10{9} positions.*--context-length"):
        Harness(assembly)


@pytest.mark.parametrize("kernels", ["reference", "cpu"])
@pytest.mark.parametrize("fp8", [False, True])
def test_estimate_and_progress(tmp_path, fp8, kernels, capsys):
    """The estimate is what is packed, and the bar's total what is read, within 2 %."""
    whole = {  # widths that native packing need not fill up
        "qk_nope_head_dim": 64,
        "v_head_dim": 64,
        "kv_lora_rank": 64,
        "q_lora_rank": 112,
        "intermediate_size": 192,
        "moe_intermediate_size": 64,
        "vocab_size": 192,
    }
    (write_tiny_fp8 if fp8 else write_tiny)(tmp_path, "v3", **whole)
    assembly = decide(tmp_path, kernels)
    checkpoint = Checkpoint(tmp_path)
    bound, world = BoundOps(assembly.binding), World.alone()
    quant = quant_of(assembly)
    loader = Loader(assembly.model, quant, checkpoint, bound, world, CPU, torch.float32)
    file_bytes = sum(checkpoint.entry(name).nbytes for name in checkpoint.names)
    assert abs(loader.total_bytes() - file_bytes) <= 0.02 * file_bytes
    model = load_model(assembly, bound, world, CPU, progress=True)
    bar = re.search(r"loading weights: (\S+ \S+) of (\S+ \S+),", capsys.readouterr().err)
    assert bar is not None and bar[1] == bar[2]
    held = _held(model)
    assert model.packed_bytes == held
    assert abs(needed_bytes(assembly) - held) <= 0.02 * held


def test_each_rank_looks_at_its_own_device(original, monkeypatch):
    """By the number that it has on its machine, whatever its rank of the group is."""
    asked = []

    def memory(rank):
        asked.append(rank)
        return MemoryInfo(total=1 << 40, free=1 << 40)

    assembly = decide(original)
    monkeypatch.setattr(assembly.platform, "memory", memory)
    comm = SimpleNamespace(rank=9, gather_objects=lambda value: [value])
    check_memory(assembly, comm, CPU, 1)
    assert asked == [1]


def test_progress_of_ranks(original):
    """Every rank reads what its bar says, although columns are read by whole rows."""

    def load(world):
        assembly = decide(original, tp=2)
        checkpoint, bound = Checkpoint(original), BoundOps(assembly.binding)
        quant = quant_of(assembly)
        loader = Loader(assembly.model, quant, checkpoint, bound, world, CPU, torch.float32)
        read = []
        checkpoint.on_read = read.append
        DeepSeekModel(assembly.model, loader, 8)
        return sum(read), loader.total_bytes()

    for read, total in on_ranks(2, load):
        assert abs(total - read) <= 0.01 * read


def _held(model) -> int:
    """Bytes of all packed weights, tables and vectors of a model."""
    total, todo, seen = 0, [model], set()
    while todo:
        item = todo.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor) or hasattr(item, "nbytes"):
            total += item.nbytes
        elif isinstance(item, list):
            todo += item
        elif type(item).__module__.startswith("ds_runtime.model") and type(item) is not type(
            model.config
        ):
            slots = getattr(type(item), "__slots__", ())
            todo += [getattr(item, name) for name in (*slots, *getattr(item, "__dict__", {}))]
    return total
