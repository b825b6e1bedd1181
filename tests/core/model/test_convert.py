"""`ds-runtime convert`: every format from every other, read back by others, killed and resumed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from checkpoint_writers import e2m1, e4m3, grid_max, spread
from model_harness import Harness, decide, run_schedule
from published_kinds import KINDS, hold, write_kind
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ds_runtime.checkpoint.hub import resolve_model
from ds_runtime.cli import main
from ds_runtime.errors import CheckpointError, ConfigError, UnsupportedError
from ds_runtime_convert import run, write
from ds_runtime_convert.run import convert
from ds_runtime_convert.source import Source
from ds_runtime_convert.targets import TARGETS
from ds_runtime_kit.models.oracle import Oracle
from ds_runtime_kit.models.tiny import write_tiny

# Whole blocks of 128, so that transformers' own FP8 reader serves; few enough to be quick.
SHAPE = {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128}
SHAPE |= {"q_lora_rank": 128, "kv_lora_rank": 96, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32}
SHAPE |= {"v_head_dim": 32, "n_routed_experts": 4, "num_hidden_layers": 2}
SHAPE |= {"n_group": 1, "topk_group": 1}
QUANTISED = [name for name in TARGETS if name != "bf16"]
COMPRESSED = [n for n, t in TARGETS.items() if "config_groups" in t.quantization]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    return folder, write_tiny(folder, "v3", 3, **SHAPE)


@pytest.fixture(scope="module")
def converted(tiny, tmp_path_factory):
    made = {}

    def get(to):
        if to not in made:
            made[to] = tmp_path_factory.mktemp("converted") / to
            convert(tiny[0], to, made[to], shard_bytes=200_000)
        return made[to]

    return get


def step(values, format):
    """The most that rounding to the nearest may move each element, by the format's own grid."""
    rows, cols = values.shape
    if format.startswith("int8"):
        half = grid_max(values, 1, cols) / 127 / 2 * (1 + 2**-7)
        return spread(half, values.shape, 1, cols)
    if format in ("int4_group", "w4afp8"):  # a whole step where the codes end at 7
        return spread(grid_max(values, 1, 128) / 8 * (1 + 2**-7), values.shape, 1, 128)
    if format == "fp8_block":
        scale = spread(grid_max(values, 128, 128) / 448, values.shape, 128, 128)
        near = abs(e4m3(values / scale).astype(np.float64) - values / scale)
        return (near + 1e-6) * scale + 1e-7 * abs(values)
    width = 16 if format == "nvfp4" else 32
    most = spread(grid_max(values, 1, width), values.shape, 1, width)
    if format == "nvfp4":
        return most * (1 / 6 + 1 / 16)
    fits = np.exp2(np.ceil(np.log2(most / (448 if format == "mxfp8" else 6))))
    codes = (e4m3 if format == "mxfp8" else e2m1)(values / fits).astype(np.float64)
    error = (codes * fits - values) ** 2  # no worse than with the power of two that clips nothing
    blocks = error.reshape(rows, -1, width).sum(-1) ** 0.5
    return spread(blocks, values.shape, 1, width) * (1 + 1e-6) + 1e-9


@pytest.mark.parametrize("to", QUANTISED)
def test_a_round_trip_stays_within_the_formats_rounding(tiny, converted, to):
    before, after = Source(tiny[0]), Source(converted(to))
    formats = set()
    for module, stored in before.linears.items():
        want, back = before.part(module).dequantise(), after.part(module)
        formats.add(back.format)
        if back.format == "dense":
            assert torch.equal(back.dequantise(), want), module
            continue
        error = abs(back.dequantise().double() - want.double()).numpy()
        assert (error <= step(want.double().numpy(), back.format)).all(), module
        assert stored.shape == back.shape and module != "lm_head"
    expected = {
        "fp8": {"dense", "fp8_block"},
        "int8": {"dense", "int8_channel"},
        "w4a16": {"dense", "int4_group"},
        "w4afp8": {"dense", "fp8_block", "w4afp8"},
    }
    assert formats == expected.get(to, {"dense", to})


@pytest.mark.parametrize("to", TARGETS)
def test_all_else_is_copied(tiny, converted, to):
    before, after = Source(tiny[0]), Source(converted(to))
    others = list(before.others())
    assert set(after.others()) == set(others) and len(others) > 10
    for name in others:
        a, b = before.tensor(name), after.tensor(name)
        assert torch.equal(a.to(b.dtype), b), name
        tables = to == "bf16" and "embed" in name
        assert b.dtype == (torch.bfloat16 if tables else a.dtype), name


@pytest.mark.parametrize("to", COMPRESSED)
def test_compressed_tensors_reads_the_same_values(converted, to):
    """Its config parser accepts what is written, its schemes choose the same modules, and its
    decompressors give the same numbers."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.utils import match_name

    folder = converted(to)
    stated = json.loads((folder / "config.json").read_text())["quantization_config"]
    config = QuantizationConfig.model_validate(stated)
    (scheme,) = config.config_groups.values()
    compressor = BaseCompressor.get_value_from_registry(stated["format"])
    after = Source(folder)
    tensors = {k: v for f in folder.glob("*.safetensors") for k, v in load_file(f).items()}
    for module in after.linears:
        back = after.part(module)
        ignored = any(match_name(module, pattern) for pattern in config.ignore)
        assert ignored == (back.format == "dense"), module
        if ignored:
            continue
        state = {
            k.removeprefix(f"{module}."): v
            for k, v in tensors.items()
            if k.startswith(f"{module}.")
        }
        theirs = compressor.decompress(state, scheme)["weight"]
        rounds = 2**-8 if to in ("nvfp4", "mxfp4", "mxfp8") else 1e-7  # theirs gives bfloat16
        np.testing.assert_allclose(theirs.float(), back.dequantise(), rounds, 0, err_msg=module)


@pytest.fixture(scope="module")
def dense_tiny(tmp_path_factory):
    """Its reader knows no routed experts in all of the formats."""
    folder = tmp_path_factory.mktemp("dense")
    write_tiny(folder, "v3", 5, **SHAPE, first_k_dense_replace=2)
    return folder


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`:UserWarning")
@pytest.mark.parametrize("to", [n for n in TARGETS if n != "w4afp8"])
def test_hugging_face_opens_it(dense_tiny, tmp_path, to):
    """transformers' from_pretrained, which dequantises, holds the values that our loader reads."""
    from transformers import AutoModelForCausalLM
    from transformers.utils.quantization_config import CompressedTensorsConfig, FineGrainedFP8Config

    convert(dense_tiny, to, tmp_path / "out")
    more = {}
    if to != "bf16":
        kind = CompressedTensorsConfig if to in COMPRESSED else FineGrainedFP8Config
        more = {"quantization_config": kind(dequantize=True)}
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32, **more)
    values, after = opened.state_dict(), Source(tmp_path / "out")
    for module in after.linears:
        want, got = after.part(module).dequantise(), values[f"{module}.weight"].float()
        np.testing.assert_allclose(got, want, 2**-8, 0, err_msg=module)


def check_from(tmp_path, kind, to):
    """Whatever is read can be converted; what it meant before is what is rounded."""
    write_kind(tmp_path / "from", kind, seed=3)
    convert(tmp_path / "from", to, tmp_path / "out")
    before, after = Source(tmp_path / "from"), Source(tmp_path / "out")
    rounded = 0
    for module in before.linears:
        want, back = before.part(module).dequantise().double().numpy(), after.part(module)
        got = back.dequantise().double().numpy()
        if back.format == "dense":
            limit = 2**-8 * abs(want) if to == "bf16" else 0
        else:
            limit = step(want, back.format)
            rounded += 1
        assert (abs(got - want) <= limit).all(), module
    assert rounded > 10 or to == "bf16"


SOURCES = ("awq", "fp8 bytes", "modelopt nvfp4", "quark")


@pytest.mark.parametrize("kind", SOURCES)
def test_from_other_formats(tmp_path, kind):
    check_from(tmp_path, kind, "int8")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("to", ["bf16", "fp8", "int8", "mxfp8", "mxfp4"])
def test_from_every_format(tmp_path, kind, to):
    check_from(tmp_path, kind, to)


@pytest.mark.parametrize("to", ["fp8", "w4a16", "nvfp4", "mxfp4", "mxfp8"])
def test_codes_that_mean_the_same_are_kept(converted, tmp_path, to):
    """From a format to itself, nothing is rounded."""
    convert(converted(to), to, tmp_path / "again")
    before, after = Source(converted(to)), Source(tmp_path / "again")
    for module in before.linears:
        a, b = before.part(module), after.part(module)
        assert torch.equal(a.tensors["weight"].view(torch.uint8), b.tensors["weight"].view(
            torch.uint8)), module  # fmt: skip
        np.testing.assert_allclose(a.dequantise(), b.dequantise(), 2e-7)


@pytest.mark.parametrize("to", ["fp8", "int8", "mxfp4", "nvfp4"])
def test_half_split_rotation_of_rounded_weights(tmp_path, to):
    """Rows are reordered with their scales: logits against transformers with the same values."""
    model = write_tiny(tmp_path / "from", "v3", 4, **SHAPE, rope_interleave=False)
    convert(tmp_path / "from", to, tmp_path / "out")
    after = Source(tmp_path / "out")
    hold(model, {f"{m}.weight": after.part(m).dequantise() for m in after.linears})
    oracle = Oracle(model)
    prompt = oracle.draw_prompt(21, 1)
    (logits,) = run_schedule(Harness(decide(tmp_path / "out")), [prompt], 0, 4)
    want = oracle.logprobs(prompt).double()[: len(prompt)]
    got = torch.log_softmax(logits[: len(want)].double(), -1)
    assert (got - want).abs().max() < 1e-4


def contents(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir()}


class Killed(BaseException):
    """Not an error that anything catches."""


@pytest.mark.parametrize("after", [1, 7, 23])
def test_a_killed_run_goes_on_where_it_stopped(tiny, converted, tmp_path, monkeypatch, after):
    whole, out, writes = contents(converted("nvfp4")), tmp_path / "out", []
    real = write._append

    def append(handle, tensors, item):
        if len(writes) == after:
            handle.write(b"torn")  # in the middle of a tensor
            handle.flush()
            raise Killed
        writes.append(item)
        real(handle, tensors, item)

    monkeypatch.setattr(write, "_append", append)
    with pytest.raises(Killed):
        convert(tiny[0], "nvfp4", out, shard_bytes=200_000)
    assert not (out / "config.json").exists()
    with pytest.raises(CheckpointError):
        Source(out)
    monkeypatch.setattr(write, "_append", lambda *a: (writes.append(a[2]), real(*a)))
    convert(tiny[0], "nvfp4", out, shard_bytes=200_000)
    assert contents(out) == whole
    items = sum(len(s.items) for s in _plan(tiny[0], "nvfp4"))
    assert items <= len(writes) <= items + 1  # the last of a killed run is written again


def _plan(folder, to):
    return run._Job(Source(folder), TARGETS[to], folder / "nowhere", 200_000).plan


def test_a_fault_of_the_disk_is_found(tiny, tmp_path, monkeypatch):
    """A byte that is not what was written, in codes and in a copied tensor."""
    real = write._append
    for wanted in ("model.layers.0.mlp.up_proj", ""):

        def append(handle, tensors, item, wanted=wanted):
            made = {k: t.clone() for k, t in tensors.items()}
            if item.module == wanted:
                made["weight"].view(torch.uint8).view(-1)[3] ^= 0x77
            real(handle, made, item)

        monkeypatch.setattr(write, "_append", append)
        with pytest.raises(CheckpointError, match="reads back"):
            convert(tiny[0], "w4a16", tmp_path / f"out{bool(wanted)}")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_a_file_beside_the_shards_that_is_lost_or_torn_is_written_again(
    tiny, converted, tmp_path, name
):
    whole, out = contents(converted("int8")), tmp_path / "out"
    shutil.copytree(converted("int8"), out)
    for damage in ((out / name).unlink, lambda: (out / name).write_bytes(whole[name][:-9])):
        damage()
        assert not convert(tiny[0], "int8", out, shard_bytes=200_000).already
        assert contents(out) == whole
    assert convert(tiny[0], "int8", out, shard_bytes=200_000).already


@pytest.mark.parametrize("to", ["bf16", "fp8", "int8", "w4a16", "nvfp4"])
def test_values_that_are_no_numbers_are_named(tiny, tmp_path, to):
    """By the tensor that is read, not by the one that would be written."""
    shutil.copytree(tiny[0], tmp_path / "from")
    tensors = load_file(tmp_path / "from" / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][3, 5] = float("nan")
    save_file(tensors, tmp_path / "from" / "model.safetensors")
    said = r"^model\.layers\.0\.mlp\.up_proj: value \[3, 5\] of the checkpoint is nan in "
    with pytest.raises(CheckpointError, match=said):
        convert(tmp_path / "from", to, tmp_path / "out")
    assert not (tmp_path / "out" / "config.json").exists()


def test_what_cannot_be_done_is_said_before_anything_is_written(tiny, converted, tmp_path):
    source, out = tiny[0], tmp_path / "out"
    with pytest.raises(UnsupportedError, match=r"--to int3: is none of bf16, fp8, int8"):
        convert(source, "int3", out)
    with pytest.raises(ConfigError, match="is the checkpoint that is read"):
        convert(source, "int8", source)
    with pytest.raises(ConfigError, match=r"--shard-size 0: must be above 0, like 5GB"):
        convert(source, "int8", out, shard_bytes=0)
    shutil.copytree(converted("fp8"), tmp_path / "taken")
    with pytest.raises(ConfigError, match=r"of another conversion \(fp8, or of another source\)"):
        convert(source, "int8", tmp_path / "taken", shard_bytes=200_000)
    with pytest.raises(ConfigError, match=r"holds model-.*of another checkpoint"):
        convert(source, "int8", tmp_path / "taken")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").write_text("x")
    with pytest.raises(ConfigError, match="is not empty"):
        convert(source, "int8", tmp_path / "full")
    with pytest.raises(ConfigError, match="is a file"):
        convert(source, "int8", tmp_path / "full" / "letter.txt")
    assert not out.exists() and contents(tmp_path / "taken") == contents(converted("fp8"))


def test_too_little_space_is_said_with_both_numbers(tiny, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=300_000))
    with pytest.raises(ConfigError, match=r"\d+\.\d kB are to be written and 300\.0 kB are free"):
        convert(tiny[0], "int8", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_disk_that_fills_up_is_said_with_the_remedy(tiny, tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(write, "_append", full)
    with pytest.raises(ConfigError, match="No space left on device; make space and run the same"):
        convert(tiny[0], "int8", tmp_path / "out")


def test_groups_that_do_not_fit_leave_a_weight_as_it_is(tmp_path):
    """72 columns are no multiple of 128, nor of 16."""
    write_tiny(tmp_path / "from", "v3", 1, **{**SHAPE, "intermediate_size": 72})
    for to, kept in (("w4a16", True), ("nvfp4", True), ("fp8", False)):
        report = convert(tmp_path / "from", to, tmp_path / to)
        module = "model.layers.0.mlp.down_proj"
        assert report.kept == ((module,) if kept else ())
        stated = json.loads((tmp_path / to / "config.json").read_text())["quantization_config"]
        assert (module in stated.get("ignore", ())) is kept
        assert (Source(tmp_path / to).part(module).format == "dense") is kept


def test_the_draft_layer_and_all_files_come_along(tmp_path, capsys):
    demo, out = resolve_model("demo"), tmp_path / "out"
    command = ["convert", "--model", "demo", "--to", "fp8", "--out", str(out)]
    assert main(command) == 0
    said = capsys.readouterr().out
    assert re.search(r"12\.9 MB in fp8, from 23\.2 MB\n  fp8_block: error 2\.\d+%", said), said
    assert main(command) == 0 and "holds this conversion already" in capsys.readouterr().out
    after = Source(out)
    draft = {m: s.format for m, s in after.linears.items() if m.startswith("model.layers.5.")}
    assert draft.pop("model.layers.5.eh_proj") == "dense" and set(draft.values()) == {"fp8_block"}
    names = {p.name for p in demo.iterdir() if p.suffix == ".json"} - {
        "model.safetensors.index.json"
    }
    assert names <= {p.name for p in out.iterdir()}
    with safe_open(next(out.glob("*.safetensors")), "pt") as file:
        assert file.metadata()["ds_runtime_conversion"].startswith("fp8 ")


def test_a_checkpoint_on_top_of_another_becomes_whole(tmp_path):
    """Its base is elsewhere, or gone, where the output goes."""
    out = tmp_path / "out"
    convert(resolve_model("demo-v32"), "int8", out)
    assert "base_model" not in json.loads((out / "config.json").read_text())
    assert (out / "tokenizer.json").is_file() and (out / "generation_config.json").is_file()
    own = json.loads((resolve_model("demo-v32") / "RECIPE.json").read_text())
    assert json.loads((out / "RECIPE.json").read_text()) == own
    formats = {s.format for m, s in Source(out).linears.items() if ".indexer." in m}
    assert formats == {"int8_channel"}
    Harness(decide(out, "cpu"))


@pytest.mark.slow
def test_it_is_killed_for_real(tmp_path):
    """SIGKILL in the middle, from outside; the second run ends as if there had been no first."""
    code = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from ds_runtime_convert import write\n"
        "from ds_runtime_convert.run import convert\n"
        "real, seen = write._append, []\n"
        "def append(*a):\n"
        "    seen.append(a); real(*a)\n"
        "    if len(seen) == 60: os.kill(os.getpid(), signal.SIGKILL)\n"
        "write._append = append\n"
        "from ds_runtime.checkpoint.hub import resolve_model\n"
        "convert(resolve_model('demo'), 'mxfp8', Path(sys.argv[1]))\n"
    )
    out = tmp_path / "out"
    killed = subprocess.run([sys.executable, "-c", code, str(out)], check=False)
    assert killed.returncode == -9 and [p.suffix for p in out.iterdir()] == [".partial"]
    convert(resolve_model("demo"), "mxfp8", out)
    convert(resolve_model("demo"), "mxfp8", tmp_path / "whole")
    assert contents(out) == contents(tmp_path / "whole")
