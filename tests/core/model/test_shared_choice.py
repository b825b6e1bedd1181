"""Weights with an indexer in every layer under a config that lets layers share: what IndexCache
(arXiv 2603.12201) does to a model that was trained without it."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from model_harness import CPU, Harness, decide, run_schedule
from safetensors.torch import load_file, save_file

from ds_runtime.assembly.estimate import packed_bytes
from ds_runtime.checkpoint.shards import Checkpoint
from ds_runtime.checkpoint.tensors import SINGLE
from ds_runtime.errors import CheckpointError
from ds_runtime.ops.binding.bound import BoundOps
from ds_runtime.parallel.world import World
from ds_runtime.weights.load import load_model, needed_bytes, quant_of
from ds_runtime.weights.loader import Loader
from ds_runtime_convert.run import convert
from ds_runtime_kit.models.oracle import Oracle, compare
from ds_runtime_kit.models.tiny import write_tiny, write_tiny_fp8

LAYERS = 6
SHARED = (2, 4)  # of index_topk_freq 2: every other one behind the offset
SAYS = {
    "index_topk_freq": 2,
    "index_topk_pattern": "FFSFSF",
    "indexer_types": ["full", "full", "shared", "full", "shared", "full"],
}


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    folder = tmp_path_factory.mktemp("v32")
    return folder, write_tiny(folder, "v32", seed=3, num_hidden_layers=LAYERS)


def with_config(source, folder, **values):
    """A copy with other values in its config.json."""
    shutil.copytree(source, folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
    return folder


def without_indexers(folder, layers=SHARED):
    """The same checkpoint without the tensors of these layers' indexers."""
    at = tuple(f"model.layers.{layer}.self_attn.indexer." for layer in layers)
    tensors = load_file(folder / SINGLE)
    save_file({n: t for n, t in tensors.items() if not n.startswith(at)}, folder / SINGLE)
    return folder


def sharing(model):
    """transformers' model, whose layers `SHARED` attend what the last one before them chose."""
    chosen = []
    for number, layer in enumerate(model.model.layers):
        indexer = layer.self_attn.indexer
        if number in SHARED:
            indexer.forward = lambda *args, **kwargs: chosen[-1]
        else:
            indexer.register_forward_hook(lambda module, args, out: chosen.append(out))
    return model


@pytest.mark.parametrize("key", SAYS)
def test_it_runs_as_if_they_were_not_there(original, tmp_path, key, capfd):
    folder = with_config(original[0], tmp_path / "shares", **{key: SAYS[key]})
    prompts = [list(range(5, 90)), list(range(60, 100))]

    def told(folder):
        harness = Harness(decide(folder))
        assert [b.attention.indexer is None for b in harness.model.blocks] == [
            layer in SHARED for layer in range(LAYERS)
        ]
        assert len(list(harness.caches)) == LAYERS + LAYERS - len(SHARED)
        return run_schedule(harness, prompts, 1, 40)

    ours = told(folder)
    assert "warning" not in capfd.readouterr().err  # of the rank that shows progress alone
    bare = told(without_indexers(folder))
    assert all(torch.equal(a, b) for a, b in zip(ours, bare, strict=True))


def test_against_transformers(tmp_path):
    model = write_tiny(tmp_path / "whole", "v32", seed=4, num_hidden_layers=LAYERS)
    oracle = Oracle(sharing(model))
    folder = with_config(tmp_path / "whole", tmp_path / "shares", index_topk_freq=2)
    prompts = [oracle.draw_prompt(n, i) for i, n in enumerate((120, 40, 25))]
    compare(oracle, prompts, run_schedule(Harness(decide(folder, "cpu")), prompts, 2, 50), 1e-4)


@pytest.mark.parametrize("fp8", [False, True])
def test_they_are_neither_read_nor_held_nor_expected_to_be(tmp_path, fp8, capsys):
    write = write_tiny_fp8 if fp8 else write_tiny
    write(tmp_path / "whole", "v32", seed=3, num_hidden_layers=LAYERS, index_n_heads=64)
    folder = with_config(tmp_path / "whole", tmp_path / "shares", index_topk_freq=2)

    def load(folder):
        assembly = decide(folder, "cpu")
        bound, world, read = BoundOps(assembly.binding), World.alone(), []
        checkpoint, quant = Checkpoint(folder), quant_of(assembly)
        loader = Loader(assembly.model, quant, checkpoint, bound, world, CPU, torch.float32)
        model = load_model(assembly, bound, world, CPU, progress=True)
        said = capsys.readouterr().err
        checkpoint.on_read = read.append
        type(model)(assembly.model, loader, 8)
        assert abs(sum(read) - loader.total_bytes()) <= 0.01 * sum(read)
        needed = needed_bytes(assembly)
        return (loader.total_bytes(), sum(read), needed, model.packed_bytes), said, assembly

    whole, nothing, _ = load(tmp_path / "whole")
    found, said, assembly = load(folder)
    bare, quiet, _ = load(without_indexers(folder))
    assert found == bare and all(a < 0.97 * b for a, b in zip(found, whole, strict=True))
    assert packed_bytes(assembly.model, assembly.binding, "float32", 0) < found[2]
    assert "warning" not in nothing + quiet
    (line,) = [x for x in said.splitlines() if x.startswith("warning: ")]
    tensors, first = 2 * (7 if fp8 else 5), ", ".join(_first(tmp_path / "whole"))
    assert line == (
        f"warning: {folder}: {tensors} tensors ({first}, …) are not read: "
        "index_topk_freq 2 in config.json lets layers 2, 4 attend what an earlier one chose; "
        "in a config without indexer_types, "
        "index_topk_pattern and index_topk_freq each chooses"
    )


def _first(folder):
    names = [n for n in Checkpoint(folder).names if ".indexer." in n]
    return [n for n in names if int(n.split(".")[2]) in SHARED][:4]


def test_a_layer_that_chooses_still_needs_all_of_its_own(original, tmp_path):
    folder = with_config(original[0], tmp_path / "shares", index_topk_freq=2)
    with pytest.raises(CheckpointError, match=r"5 tensors \(model\.layers\.3\.self_attn\.indexer"):
        Harness(decide(without_indexers(folder, (3,))))


def test_weights_that_share_under_a_config_that_does_not_say_so(tmp_path):
    write_tiny(tmp_path / "glm", "glm", seed=3)
    folder = with_config(tmp_path / "glm", tmp_path / "each", indexer_types=None, index_topk_freq=1)
    said = r"10 tensors \(.*\) are missing; .*\. If layers 2, 4 attended what .* index_topk_freq"
    with pytest.raises(CheckpointError, match=said):
        Harness(decide(folder))
    with pytest.raises(CheckpointError, match=r"from the same checkpoint$"):
        Harness(decide(without_indexers(folder, range(5))))
    with pytest.raises(CheckpointError, match=r"from the same checkpoint$"):
        Harness(decide(without_tensor(folder, "model.layers.2.mlp.gate.weight")))


def without_tensor(folder, name):
    tensors = load_file(folder / SINGLE)
    del tensors[name]
    save_file(tensors, folder / SINGLE)
    return folder


def test_nothing_else_of_such_a_layer_is_passed_over(original, tmp_path):
    folder = with_config(original[0], tmp_path / "shares", index_topk_freq=2)
    tensors = load_file(folder / SINGLE)
    tensors["model.layers.2.self_attn.indexes.wk.weight"] = torch.ones(2, 2)
    save_file(tensors, folder / SINGLE)
    with pytest.raises(CheckpointError, match=r"layers\.2\.self_attn\.indexes\.wk\.weight is not"):
        Harness(decide(folder))


@pytest.mark.parametrize("to", ["fp8", "int8"])
def test_conversion_keeps_them(original, tmp_path, to):
    """In the new format, so that who takes the key out of config.json has every indexer."""
    wide = {"hidden_size": 128, "q_lora_rank": 128}
    write_tiny(tmp_path / "whole", "v32", seed=3, num_hidden_layers=LAYERS, **wide)
    folder = with_config(tmp_path / "whole", tmp_path / "shares", index_topk_freq=2)
    convert(folder, to, tmp_path / "shared")
    convert(tmp_path / "whole", to, tmp_path / "each")
    one, other = (Checkpoint(tmp_path / name) for name in ("shared", "each"))
    assert sorted(one.names) == sorted(other.names)
    assert all(torch.equal(one.read(n).view(torch.uint8), other.read(n).view(torch.uint8))
               for n in one.names)  # fmt: skip
    Harness(decide(tmp_path / "shared"))
