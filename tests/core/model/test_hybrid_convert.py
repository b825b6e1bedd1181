"""`ds-runtime convert` of DeepSeek-V4: names of transformers or native ones in, native ones out."""

from __future__ import annotations

import json

import pytest
import torch
from hybrid_models import BASE, SCORED, SETTINGS, HybridOracle, compare, write_native
from safetensors.torch import load_file
from test_config import published

from ds_runtime.assembly.assemble import assemble
from ds_runtime.assembly.site_list import target_format
from ds_runtime.config import EngineConfig
from ds_runtime.description.hf import from_hf
from ds_runtime.description.hybrid.structure import native_name
from ds_runtime.description.structure import model_of
from ds_runtime.description.tree import COMPRESSOR, HEAD, by_name
from ds_runtime.offline.llm import LLM
from ds_runtime_convert.run import convert
from ds_runtime_convert.targets import TARGETS

WIDE = {**BASE, "hidden_size": 128, "moe_intermediate_size": 128}


def answered(oracle, folder):
    prompts = [oracle.prompt(n, n) for n in (7, 40, 140)]
    with LLM(folder, **SETTINGS) as llm:
        compare(oracle, prompts, llm.generate(prompts, SCORED))


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Folders of one model whose numbers FP4 and FP8 hold: as transformers writes it, and native,
    instruct and base."""
    folder, oracle = tmp_path_factory.mktemp("v4"), HybridOracle(WIDE, seed=4)
    oracle.round()
    with torch.no_grad():
        for p in oracle.model.parameters():
            p.copy_(p.bfloat16())
    oracle._double()
    oracle.model.save_pretrained(folder / "transformers")
    write_native(oracle, folder / "native")
    return folder, oracle


@pytest.mark.parametrize("source", ["transformers", "native"])
def test_numbers_in_bfloat16_are_the_model(sources, tmp_path, source):
    folder, oracle = sources
    report = convert(folder / source, "bf16", tmp_path / "out")
    assert not report.errors
    answered(oracle, tmp_path / "out")


@pytest.mark.parametrize("to", sorted(TARGETS))
@pytest.mark.parametrize("source", ["transformers", "native"])
def test_every_format_has_native_names(sources, tmp_path, source, to):
    """And is read back, name by name and shape by shape, which `convert` itself does at its end."""
    folder, _ = sources
    convert(folder / source, to, tmp_path / "out", shard_bytes=500_000)
    files = [load_file(path) for path in (tmp_path / "out").glob("*.safetensors")]
    names = [name for tensors in files for name in tensors]
    assert len(files) > 1 and len(set(names)) == len(names)
    assert all(native_name(name) == name for name in names)


@pytest.mark.parametrize(("quantize", "to"), [("int8", "int8"), ("int4", "w4a16")])
def test_weights_that_are_quantised_as_they_are_loaded(sources, tmp_path, quantize, to):
    """Answer with the bits of a checkpoint that was converted, whose head and odd widths are wide
    in the files and rounded by the flag.
    """
    folder, oracle = sources
    convert(folder / "transformers", to, tmp_path / "out")
    found = []
    for source in (folder / "transformers", tmp_path / "out"):
        with LLM(source, **SETTINGS, quantize=quantize) as llm:
            outputs = llm.generate([oracle.prompt(n, n) for n in (7, 140)], SCORED)
            found.append([x.logprob for o in outputs for x in o.prompt_logprobs[1:]])
    assert found[0] == found[1]


def test_native_fp8_leaves_native_weights_as_they_are(sources, tmp_path):
    folder, oracle = sources
    report = convert(folder / "native", "fp8", tmp_path / "out")
    assert report.errors == {"fp8_block": 0.0, "mxfp4": 0.0}
    answered(oracle, tmp_path / "out")


def test_experts_that_were_in_no_format_are_in_fp8_then(sources, tmp_path):
    folder, _ = sources
    report = convert(folder / "transformers", "fp8", tmp_path / "out")
    assert set(report.errors) == {"fp8_block"}
    raw = json.loads((tmp_path / "out" / "config.json").read_text())
    assert raw["expert_dtype"] == "fp8" and raw["quantization_config"]["quant_method"] == "fp8"


@pytest.mark.parametrize(("quantize", "format"), [("int8", "int8_channel"), ("int4", "int4_group")])
@pytest.mark.parametrize("source", ["transformers", "native"])
def test_heads_are_int8_at_most_and_compressors_as_they_are(sources, source, quantize, format):
    """Whichever names they have in the files: of transformers, or DeepSeek's own."""
    folder, _ = sources
    given = {"model": str(folder / source), "platform": "cpu", "dtype": "float32"}
    plain, made = (assemble(EngineConfig(**given, quantize=q)) for q in ("none", quantize))
    stored = {(s.op, s.layer, s.module): s.weight_format for s, _ in plain.binding.choices}
    found = {(s.op, s.layer, s.module): s.weight_format for s, _ in made.binding.choices}
    heads = {key for key in found if key[2] == HEAD and key[0] == "linear"}
    compressors = {key for key in found if COMPRESSOR in key[2].split(".")}
    linears = {key for key in compressors if key[0] == "linear"}
    assert len(heads) == 1 and len(linears) >= 4
    assert {found[key] for key in heads} == {"int8_channel"}
    assert all(found[key] == stored[key] for key in compressors)
    assert format in {found[key] for key in found.keys() - heads - compressors}


@pytest.mark.parametrize("quantize", ["int8", "int4"])
@pytest.mark.parametrize("family", ["deepseek-v4-flash", "deepseek-v3", "deepseek-v2-lite"])
def test_what_the_flag_rounds_of_published_models(family, quantize):
    """Every Linear but what is kept: kv_b and compressors; heads to int8."""
    for module in by_name(model_of(from_hf(published(family)), lambda module: "dense")):
        to = target_format(quantize, module, "dense")
        if module.split(".")[-1] in ("head", "lm_head"):
            assert to == "int8_channel"
        elif module.endswith("kv_b_proj") or "compressor" in module:
            assert to == "dense"
        else:
            assert to == {"int8": "int8_channel", "int4": "int4_group"}[quantize]
