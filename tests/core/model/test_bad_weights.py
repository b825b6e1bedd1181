"""Damaged quantised checkpoints: a sentence that names the tensor and both values, before or while
its weights are read; nothing is half-loaded."""

from __future__ import annotations

import json

import pytest
import torch
from model_harness import Harness, decide
from published_kinds import KINDS, write_kind
from safetensors.torch import load_file, save_file

from ds_runtime.errors import CheckpointError, DsRuntimeError

EXPERT = "model.layers.1.mlp.experts.3.up_proj"
O_PROJ = "model.layers.0.self_attn.o_proj"


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    made = {}

    def get(kind):
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp("kind")
            write_kind(made[kind], kind)
        return made[kind]

    return get


def cut(name, cols):
    def change(tensors):
        tensors[name] = tensors[name][..., :cols]

    return change


def put(name, index, value):
    def change(tensors):
        raw = tensors[name]
        flat = raw.clone().view(torch.uint8) if raw.dtype.itemsize == 1 else raw.clone()
        flat.view(-1)[index] = value
        tensors[name] = flat.view(raw.dtype).reshape(raw.shape)

    return change


def drop(name):
    def change(tensors):
        del tensors[name]

    return change


def cast(name, dtype):
    def change(tensors):
        tensors[name] = tensors[name].to(dtype)

    return change


def move(name, by):
    def change(tensors):
        tensors[name] = tensors[name].to(torch.int64) + by

    return change


NAN = float("nan")
CASES = [
    (
        "ct int4",
        cut(f"{EXPERT}.weight_packed", 7),
        r"weight_packed: shape \[32, 7\] found, \[32, 8\]",
    ),
    (
        "ct int4",
        cut(f"{EXPERT}.weight_scale", 1),
        r"weight_scale: shape \[32, 1\] found, \[32, 2\]",
    ),
    (
        "ct int4",
        drop(f"{EXPERT}.weight_scale"),
        rf"{EXPERT}\.weight_scale is missing; .*int4_group weights of {EXPERT}, where",
    ),
    (
        "ct int4",
        put(f"{EXPERT}.weight_shape", 0, 31),
        r"weight_shape: says \[31, 64\], \[32, 64\] expected",
    ),
    ("awq all", cut(f"{O_PROJ}.qweight", 7), r"qweight: shape \[96, 7\] found, \[96, 8\] expected"),
    ("awq all", cut(f"{O_PROJ}.scales", 63), r"scales: shape \[3, 63\] found, \[3, 64\] expected"),
    (
        "awq all",
        put(f"{O_PROJ}.scales", 65, NAN),
        r"o_proj\.scales: scale \[1, 1\] of the part read is nan",
    ),
    (
        "gptq act-order",
        put(f"{O_PROJ}.g_idx", 5, 3),
        r"g_idx: names groups 0 to 3, expected 0 to 2",
    ),
    (
        "gptq act-order",
        move(f"{O_PROJ}.g_idx", 2**32),
        r"g_idx: names groups 4294967296 to 4294967298, expected 0 to 2",
    ),
    (
        "gptq",
        put(f"{O_PROJ}.g_idx", 33, 2),
        r"o_proj\.g_idx: column 33 is of group 2, expected 1 as desc_act is false",
    ),
    (
        "fp8",
        put(f"{O_PROJ}.weight_scale_inv", 0, NAN),
        r"weight_scale_inv: scale \[0, 0\] .* is nan",
    ),
    ("fp8", drop(f"{O_PROJ}.weight_scale_inv"), r"o_proj\.weight_scale_inv is missing"),
    (
        "fp8",
        cast(f"{O_PROJ}.weight", torch.bfloat16),
        r"o_proj\.weight: dtype BF16 found, F8_E4M3 exp",
    ),
    (
        "quark",
        put(f"{EXPERT}.weight_scale", 4, 255),
        r"up_proj\.weight_scale: scale \[2, 0\] .* is 255 \(no number\)",
    ),
    (
        "modelopt nvfp4",
        put(f"{O_PROJ}.weight_scale", 3, 0x7F),
        r"o_proj\.weight_scale: scale \[0, 3\] .* is nan",
    ),
    (
        "modelopt nvfp4",
        put(f"{O_PROJ}.weight_scale_2", 0, 0.0),
        r"weight_scale_2: is 0\.0, expected a positive",
    ),
    (
        "modelopt nvfp4",
        cut(f"{O_PROJ}.weight", 47),
        r"o_proj\.weight: shape \[64, 47\] found, \[64, 48\]",
    ),
    (
        "w4afp8",
        put("model.layers.1.mlp.experts.3.w3.input_scale", 0, NAN),
        r"experts\.3\.w3\.input_scale: is nan",
    ),
]


@pytest.mark.parametrize(
    ("kind", "change", "said"), CASES, ids=[f"{c[0]}-{i}" for i, c in enumerate(CASES)]
)
def test_it_is_named(originals, tmp_path, kind, change, said):
    folder = originals(kind)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({k: v.contiguous() for k, v in tensors.items()}, tmp_path / "model.safetensors")
    for name in ("config.json", "hf_quant_config.json"):
        if (folder / name).is_file():
            (tmp_path / name).write_bytes((folder / name).read_bytes())
    with pytest.raises(CheckpointError, match=said):
        Harness(decide(tmp_path))


def test_another_group_size_in_the_config(originals, tmp_path):
    folder = originals("awq all")
    raw = json.loads((folder / "config.json").read_text())
    raw["quantization_config"] = {
        **KINDS["awq"][1],
        "group_size": 16,
        "modules_to_not_convert": None,
    }
    (tmp_path / "config.json").write_text(json.dumps(raw))
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match=r"qzeros|scales: shape \[2, 64\] found, \[4, 64\]"):
        Harness(decide(tmp_path))


@pytest.mark.parametrize("content", ["[1]", "{", '{"quantization": 3}'])
def test_a_file_beside_that_is_no_config(originals, tmp_path, content):
    folder = originals("fp8")
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    (tmp_path / "hf_quant_config.json").write_text(content)
    with pytest.raises(DsRuntimeError, match=r"hf_quant_config\.json"):
        decide(tmp_path)
