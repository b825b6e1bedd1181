"""The weights of DeepSeek-V4: against the files of transformers, and what is said of wrong ones."""

from __future__ import annotations

import json

import pytest
from hybrid_models import BASE, HybridOracle, drawn
from safetensors.torch import load_file, save_file
from test_config import published

from ds_runtime.assembly.assemble import assemble
from ds_runtime.checkpoint.shards import Checkpoint
from ds_runtime.config import EngineConfig
from ds_runtime.description.caches import cache_groups
from ds_runtime.description.hf import from_hf, load_config
from ds_runtime.description.hybrid.structure import native_name
from ds_runtime.description.sites import model_sites
from ds_runtime.description.structure import model_of
from ds_runtime.description.tree import Ranks, by_name
from ds_runtime.errors import CheckpointError, ConfigError, DsRuntimeError
from ds_runtime.ops.binding.bound import BoundOps
from ds_runtime.ops.table import OPS
from ds_runtime.parallel.world import World
from ds_runtime.weights.load import load_model


def dense(module):
    return "dense"


def stored(config):
    """Tensor → shape."""
    found = by_name(model_of(config, dense)).values()
    return {s.module if s.bare else f"{s.module}.weight": s.shape for s in found}


@pytest.mark.parametrize("seed", range(6))
def test_every_tensor_of_transformers_is_one_of_the_tree(tmp_path, seed):
    HybridOracle(drawn(seed)).model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    shapes = {native_name(name): tuple(t.shape) for name, t in tensors.items()}
    assert len(shapes) == len(tensors)
    assert stored(load_config(tmp_path)) == shapes


def test_native_names_stay_and_are_those_of_published_checkpoints():
    """Those that DeepSeek's `inference/model.py` has."""
    config = from_hf(published("deepseek-v4-flash"))
    names = {s.module: s.shape for s in by_name(model_of(config, dense, range(0, 4))).values()}
    assert all(native_name(name) == name for name in stored(config))
    assert names["layers.2.attn.wo_a"] == (8192, 4096)
    assert names["layers.2.attn.compressor.ape"] == (4, 1024)
    assert names["layers.3.attn.compressor.ape"] == (128, 512)
    assert names["layers.2.attn.indexer.compressor.wgate"] == (256, 4096)
    assert names["layers.0.ffn.gate.tid2eid"] == (129280, 6)
    assert names["layers.3.ffn.gate.bias"] == (256,)
    assert names["layers.1.hc_ffn_fn"] == (24, 16384)
    assert not any(name.startswith("layers.1.attn.compressor") for name in names)
    assert not any(name.startswith("layers.3.attn.indexer") for name in names)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_ranks_share_heads_groups_and_experts(tp):
    config = from_hf({**BASE, "architectures": ["DeepseekV4ForCausalLM"], "o_groups": 4})
    whole, ranks = by_name(model_of(config, dense)), Ranks(tp, tp)
    for name, s in whole.items():
        share = s.local(ranks)
        cut = ("wq_b", "wo_a", "wo_b", "sink", "experts", "embed", "head")
        divided = any(part in name for part in cut)
        divided = divided and "indexer" not in name and not name.startswith("hc_head")
        assert (share != s.shape) == (divided and tp > 1), name


def test_caches_are_those_that_its_ops_use():
    config = from_hf({**BASE, "architectures": ["DeepseekV4ForCausalLM"]})
    used = {}
    for site in model_sites(config, dense):
        if layout := OPS[site.op].layout:
            used.setdefault((site.group or layout, layout), set()).add(site.layer)
    groups = cache_groups(config)
    assert {(g.name, g.layout): set(g.layers) for g in groups if g.layout != "rows"} == used
    states = {g.name: (g.rows, g.width) for g in groups if g.per_request}
    assert states == {
        "window": (16, 0), "open_4": (7, 128), "open_index": (7, 64), "open_128": (127, 64),
    }  # fmt: skip


def loaded(folder):
    assembly = assemble(EngineConfig(model=str(folder), platform="cpu", dtype="float32"))
    return load_model(assembly, BoundOps(assembly.binding), World.alone(), "cpu"), assembly


@pytest.mark.parametrize("rename", [False, True], ids=["transformers", "native"])
def test_every_tensor_is_read_once(tmp_path, monkeypatch, rename):
    HybridOracle(BASE).model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    if rename:
        tensors = {native_name(name): t for name, t in load_file(path).items()}
        save_file({**tensors, "mtp.0.enorm.weight": tensors["norm.weight"].clone()}, path)
    reads, read = {}, Checkpoint.read

    def counted(self, name, *args, **more):
        reads[name] = reads.get(name, 0) + 1
        return read(self, name, *args, **more)

    monkeypatch.setattr(Checkpoint, "read", counted)
    _, assembly = loaded(tmp_path)
    assert reads == dict.fromkeys(stored(assembly.model), 1)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop("layers.2.attn.compressor.ape"), "layers.2.attn.compressor.ape"),
        (lambda t: t.update({"layers.1.attn.attn_sink": t["layers.1.attn.attn_sink"][:3].clone()}),
         r"layers.1.attn.attn_sink: shape \[3\] found"),
        (lambda t: t.update({"layers.0.ffn.gate.tid2eid": t["layers.0.ffn.gate.tid2eid"].float()}),
         "layers.0.ffn.gate.tid2eid: dtype F32 found, I32 or I64 expected"),
        (lambda t: t.update({"layers.0.attn.compressor.ape": t["hc_head_base"].clone()}),
         "layers.0.attn.compressor.ape is not expected"),
        (lambda t: t["layers.0.ffn.gate.tid2eid"][-1].fill_(8),
         "FOLDER: layers.0.ffn.gate.tid2eid: names experts that are not there; there are 8"),
        (lambda t: t["layers.1.ffn.gate.tid2eid"][5, 1:].fill_(-1),
         "FOLDER: layers.1.ffn.gate.tid2eid: names experts that are not there; there are 8"),
        (lambda t: t["layers.1.ffn.gate.tid2eid"][0].fill_(1 << 30),
         "FOLDER: layers.1.ffn.gate.tid2eid: names experts that are not there; there are 8"),
    ],
    ids=["missing", "shape", "dtype", "unexpected", "no such", "negative", "huge"],
)  # fmt: skip
def test_wrong_tensors_are_named(tmp_path, change, said):
    HybridOracle(BASE).model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = {native_name(name): t for name, t in load_file(path).items()}
    change(tensors)
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=said.replace("FOLDER", str(tmp_path))):
        loaded(tmp_path)


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """A folder with config.json alone."""
    folder = tmp_path_factory.mktemp("bare")
    raw = {**BASE, "architectures": ["DeepseekV4ForCausalLM"], "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(raw))
    return str(folder)


@pytest.fixture(scope="module")
def bare_dense(tmp_path_factory):
    """The same of a model without an indexer."""
    folder, kinds = tmp_path_factory.mktemp("dense"), [0, 128]
    raw = {**BASE, "num_hidden_layers": 2, "compress_ratios": kinds, "torch_dtype": "bfloat16"}
    raw["architectures"] = ["DeepseekV4ForCausalLM"]
    (folder / "config.json").write_text(json.dumps(raw))
    return str(folder)


@pytest.mark.parametrize("device", ["xeon-6980p", "h200", "mi300x", "910b", "max1550", "b580"])
def test_it_is_planned_on_every_platform(bare, device):
    """No plugin has a line for it: what none of them serves, the references do."""
    config = EngineConfig(model=bare, load_format="dummy")
    made = assemble(config, device=device)
    served = {row.op: row.provider for row in made.plan.rows}
    assert served["window_decode"] and served["experts_limited"] and served["compress_windows"]
    assert made.config.page_size % 128 == 0
    sizes = made.cache_sizes
    assert sizes.page and sizes.state


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"speculative_algorithm": "NEXTN"}, "--speculative-algorithm: DeepseekV4ForCausalLM is"),
        ({"batch_invariant": True}, "--batch-invariant: DeepseekV4ForCausalLM is"),
        ({"lora": ("a=/x",)}, "--lora: DeepseekV4ForCausalLM is"),
        ({"max_loras": 2}, "--max-loras: DeepseekV4ForCausalLM is"),
        ({"disable_mla": True}, "--disable-mla: DeepseekV4ForCausalLM is"),
    ],
)
@pytest.mark.parametrize("chooses", [True, False], ids=["chooses", "chooses nothing"])
def test_what_it_is_not_served_with(bare, bare_dense, chooses, more, said):
    """Whether or not it has layers that choose what they attend."""
    given = {"model": bare if chooses else bare_dense, "platform": "cpu", "load_format": "dummy"}
    with pytest.raises(DsRuntimeError, match=said):
        assemble(EngineConfig(**given, **more))
    assemble(EngineConfig(**given))


def test_index_keys_in_fp4_are_the_user_s_own(tmp_path):
    """They come by a flag alone, and a kernel that reads them takes them."""
    raw = {**BASE, "index_head_dim": 32, "architectures": ["DeepseekV4ForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    given = {"model": str(tmp_path), "platform": "cpu", "load_format": "dummy"}
    made = assemble(EngineConfig(**given, trained_rounding=True))
    bound = {d.site.op: d.kernel for d in made.binding.decisions}
    assert bound["index_encode"] == "cpu.index_encode"
    assert bound["index_scores"] == "cpu.index_scores"
    assert made.plan.index_dtype == "float4_e2m1fn_x2"
    assert assemble(EngineConfig(**given)).plan.index_dtype == "float8_e4m3fn"


def test_pages_hold_whole_entries(bare):
    with pytest.raises(ConfigError, match=r"--page-size 64: an entry covers several tokens"):
        assemble(EngineConfig(model=bare, load_format="dummy", page_size=64), ["page_size"])
