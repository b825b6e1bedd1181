"""What lists and left-over configs of published checkpoints say of modules: matched as the programs
that wrote them match it, or refused in a sentence of its own."""

from __future__ import annotations

import json
import re

import pytest
import torch
from checkpoint_writers import awq, fp8, gptq
from hypothesis import example, given, settings
from hypothesis import strategies as st
from model_harness import Harness, decide
from published_kinds import _LINEAR, AWQ, BESIDE, FP8, GPTQ, KINDS, WIDTHS, write_kind
from safetensors.torch import load_file, save_file
from transformers.quantizers.quantizers_utils import should_convert_module

from ds_runtime import LLM, SamplingParams
from ds_runtime.cli import main
from ds_runtime.description.hf import load_config
from ds_runtime.errors import CheckpointError
from ds_runtime.ops.contract import DeviceInfo, Dims, Facts
from ds_runtime.plugins.manager import load_plugins
from ds_runtime_convert.source import Source
from ds_runtime_kit.models.tiny import write_tiny
from examples import examples

CONFIGS = {"awq": AWQ, "gptq": GPTQ, "fp8": FP8}
ATTENTION = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
MODULES = [
    f"model.layers.{layer}.{name}"
    for layer in (0, 1, 2, 10, 11)
    for name in (
        *(f"self_attn.{n}" for n in ATTENTION),
        *(f"mlp.{n}_proj" for n in ("gate", "up", "down")),
        *(f"mlp.shared_experts.{n}_proj" for n in ("gate", "up")),
        *(f"mlp.experts.{e}.{n}_proj" for e in (0, 1, 12) for n in ("up", "down")),
    )
]
LOADERS = {
    loader.name: loader
    for loader in load_plugins(()).offers(Facts(DeviceInfo("cpu", "", ""), Dims({}))).quant_loaders
}


def dense(name, **keys):
    """The modules that a loader leaves dense."""
    of = LOADERS[name].encodings({**CONFIGS[name], **keys})
    return {m for m in MODULES if of(m).format == "dense"}


def by_transformers(entries):
    """A dot is a dot in names alone; to transformers "model.layers.1." names layers 10 to 19, too,
    which no one means who publishes such a list for vLLM."""
    starts = [re.escape(e) if re.fullmatch(r"[\w.]*", e) else e for e in entries]
    ends = tuple(entries)
    return {m for m in MODULES if not should_convert_module(m, starts) or m.endswith(ends)}


@st.composite
def patterns(draw):
    """(an entry made of a module's path, whether it stands at the path's beginning or end)."""
    parts = draw(st.sampled_from(MODULES)).split(".")
    i = draw(st.integers(0, len(parts) - 1))
    j = draw(st.integers(i + 1, len(parts)))
    end, start = j == len(parts), i == 0
    text = ".".join(parts[i:j])
    form = draw(st.sampled_from(["plain", "dots", "part", "escaped", "any", "choice", "class"]))
    if form == "dots":
        before, after = draw(st.sampled_from([("", "."), (".", ""), (".", ".")]))
        outer = (start and not before and not end) or (end and not after and not start)
        return before + text + after, outer
    if form == "part" and end:  # of the first name, such as "_proj"
        return text[draw(st.integers(0, len(parts[i]) - 1)) :], True
    if form == "escaped":
        return re.escape(text), start
    if form == "any" and start:
        return draw(st.sampled_from([f"{text}.*", f".*{parts[-1]}"])), True
    if form == "choice" and start:
        return rf"model\.layers\.({parts[2]}|10)\.{parts[3]}", True
    if form == "class" and start:
        return rf"model.layers.[01].{parts[3]}", True
    return text, start or end


@settings(max_examples=examples(300), deadline=None)
@given(st.lists(patterns(), max_size=4), st.sampled_from(sorted(CONFIGS)))
@example([("mlp.gate.", False), ("model.layers.0.", True)], "awq")
@example([(".self_attn.", False)], "gptq")
@example([("model.layers.1", True)], "fp8")
@example([("model.layers.1.", True)], "awq")
def test_modules_not_to_convert_are_those_that_transformers_leaves(entries, name):
    """Entries from inside of a path, which vLLM finds there, name the same parts wherever they are
    whole; all others leave exactly what transformers leaves."""
    said = [text for text, _ in entries]
    ours, theirs = dense(name, modules_to_not_convert=said), by_transformers(said)
    assert theirs <= ours
    inside = [text.strip(".").removeprefix("model.") for text, at_end in entries if not at_end]
    assert all(any(f".{p}." in f".{m}." for p in inside) for m in ours - theirs)
    if not inside:
        assert ours == theirs


def test_dots_at_either_end_name_the_parts_between_them():
    for text in ("self_attn", "mlp.shared_experts", "model.layers.1", "experts.1"):
        want = dense("awq", modules_to_not_convert=[text])
        assert want and len(want) < len(MODULES)
        for dotted in (f".{text}", f"{text}.", f".{text}."):
            assert dense("awq", modules_to_not_convert=[dotted]) == want


@pytest.mark.parametrize("entry", ["layers.(0", "a{99999999999999999999}"])
def test_an_entry_that_is_no_regex_is_named(entry):
    said = LOADERS["awq"].refuse({**AWQ, "modules_to_not_convert": [entry]})
    assert said.startswith(f"modules_to_not_convert: {entry!r} is no regular expression")
    assert LOADERS["awq"].refuse({**AWQ, "modules_to_not_convert": ["*.self_attn*"]}) is None


def override(dynamic, module):
    """As GPTQModel, vLLM and SGLang look a module up: False leaves it dense."""
    for pattern, values in dynamic.items():
        if pattern.startswith("-:"):
            if re.match(pattern.removeprefix("-:"), module):
                return False
        elif re.match(pattern.removeprefix("+:"), module):
            return values
    return {}


REGEXES = [r".*self_attn.*", r".*\.o_proj$", r"model\.layers\.1\.", r".*layers\.(0|10)\..*", "mlp"]
REGEXES += [r".*experts\.\d+\.up_proj", r"model.layers.1", r"(?!.*experts).*mlp.*", "lm_head"]
VALUES = {"group_size": st.sampled_from([-1, 8, 64]), "desc_act": st.booleans()}
VALUES |= {"bits": st.just(4), "mse": st.just(2.4)}


@settings(max_examples=examples(200), deadline=None)
@given(
    st.dictionaries(
        st.builds(str.__add__, st.sampled_from(["-:", "+:", ""]), st.sampled_from(REGEXES)),
        st.fixed_dictionaries({}, optional=VALUES),
        max_size=4,
    )
)
def test_dynamic_is_read_as_gptqmodel_means_it(dynamic):
    of = LOADERS["gptq"].encodings({**GPTQ, "dynamic": dynamic})
    for module in MODULES:
        values = override(dynamic, module)
        if values is False:
            assert of(module).format == "dense", module
            continue
        alone = LOADERS["gptq"].encodings({**GPTQ, **values})
        assert of(module) == alone(module), module


@pytest.mark.parametrize(
    ("dynamic", "said"),
    [
        ({"+:.*o_proj": {"bits": 8}}, "dynamic.+:.*o_proj: bits 8 is not supported; expected 4"),
        ({".*o_proj": {"group_size": 5}}, "dynamic..*o_proj: group_size 5 is not supported"),
        ({"-:(": {}}, "dynamic.-:(: '(' is no regular expression"),
        ({"+:a": 3}, "dynamic.+:a 3 is not supported; expected an object"),
        ([".*"], "dynamic ['.*'] is not supported; expected an object"),
    ],
)
def test_what_dynamic_says_and_nobody_reads_is_named(dynamic, said):
    assert LOADERS["gptq"].refuse({**GPTQ, "dynamic": dynamic}).startswith(said)


LISTED = "modules_in_block_to_quantize"
BLOCK_LISTS = [
    [["self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"], ["self_attn.o_proj"]],
    [["mlp.gate_proj", "mlp.up_proj"], ["mlp.down_proj"]],
    [[f"mlp.experts.{e}.{n}_proj" for e in (0, 1, 12)] for n in ("up", "down")],
    [["model.layers.1.self_attn.o_proj"]],
    ["o_proj", "down_proj"],
    [["o_proj"], []],
    [["lm_head"]],
]


@pytest.mark.parametrize("said", BLOCK_LISTS, ids=str)
def test_the_modules_in_a_block_that_are_listed_are_quantised_alone(said):
    """As optimum chooses them: by the end of a path."""
    ends = tuple(e for each in said for e in ([each] if isinstance(each, str) else each))
    assert dense("gptq", **{LISTED: said}) == {m for m in MODULES if not m.endswith(ends)}


@pytest.mark.parametrize("said", [None, []])
def test_a_list_of_no_modules_leaves_none_dense(said):
    assert not dense("gptq", **{LISTED: said})


def test_parts_of_paths_are_found_as_vllm_finds_them():
    want = {m for m in MODULES if "self_attn" not in m and "shared_experts" not in m}
    assert dense("gptq", **{LISTED: ["self_attn", "mlp.shared_experts"]}) == want
    assert dense("gptq", **{LISTED: [["model.layers.1"]]}) == {
        m for m in MODULES if ".layers.1." not in m
    }


def test_what_is_listed_may_still_be_left_dense_or_be_different():
    more = {"dynamic": {"-:.*o_proj": {}}, "modules_to_not_convert": ["model.layers.0."]}
    got = dense("gptq", **{LISTED: [["self_attn.o_proj", "mlp.down_proj"]]}, **more)
    assert got == {m for m in MODULES if not m.endswith("mlp.down_proj") or ".layers.0." in m}


@pytest.mark.parametrize(
    "said", ["o_proj", 3, {"a": 1}, [["o_proj", 3]], [[["o_proj"]]], [""], [[]]]
)
def test_a_list_that_is_none_of_modules_is_named(said):
    found = LOADERS["gptq"].refuse({**GPTQ, LISTED: said})
    assert found == f"{LISTED} {said!r} is not supported; expected lists of module names"


def write(folder, writer, config, chosen):
    """A tiny V3 with these Linears in a format; returns the values that are meant."""
    write_tiny(folder, "v3", 3, **WIDTHS)
    tensors = load_file(folder / "model.safetensors")
    meant = {}
    for name in [n for n in tensors if _LINEAR.search(n)]:
        module = name.removesuffix(".weight")
        meant[module] = tensors[name].float()
        if chosen(module):
            made, values = writer(module, tensors.pop(name).double().numpy())
            tensors |= {f"{module}.{k}": v.contiguous() for k, v in made.items()}
            meant[module] = torch.from_numpy(values).float()
    save_file(tensors, folder / "model.safetensors")
    configure(folder, config)
    return meant


def configure(folder, quantization):
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"quantization_config": quantization}))


CASES = {
    "awq dots": (
        awq,
        {**AWQ, "modules_to_not_convert": ["mlp.gate.", "model.layers.0."]},
        lambda m: ".layers.0." not in m,
    ),
    "fp8 dots": (
        fp8(),
        {**FP8, "modules_to_not_convert": [".self_attn.", ".shared_experts."]},
        lambda m: "self_attn" not in m and "shared" not in m,
    ),
    "gptq without attention": (
        gptq(False),
        {**GPTQ, "desc_act": False, "dynamic": {"-:.*self_attn.*": {}}},
        lambda m: "self_attn" not in m,
    ),
    "gptq listed": (
        gptq(False),
        {**GPTQ, "desc_act": False, LISTED: [["mlp.gate_proj", "mlp.up_proj"], ["o_proj"]]},
        lambda m: m.endswith(("mlp.gate_proj", "mlp.up_proj", "o_proj")),
    ),
    "gptq other groups": (
        gptq(False),
        {**GPTQ, "group_size": 64, "dynamic": {"-:.*o_proj": {}, "+:.*": {"group_size": 32}}},
        lambda m: "o_proj" not in m,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_it_loads_with_the_values_that_are_meant(tmp_path, case):
    meant = write(tmp_path, *CASES[case])
    it = Source(tmp_path)
    for module, values in meant.items():
        assert torch.equal(it.part(module).dequantise(), values), module
    Harness(decide(tmp_path))


def is_left_over(folder):
    config = load_config(folder)
    assert bool(config.left_over) == (not config.quantization)
    return config.left_over


LEFT = {kind: config for kind, (_, config, _) in KINDS.items() if config or kind in BESIDE}


@pytest.mark.parametrize("kind", LEFT)
def test_a_config_left_over_on_plain_weights_is_said_and_not_used(tmp_path, kind):
    write_tiny(tmp_path, "v3", 3, **WIDTHS)
    configure(tmp_path, LEFT[kind])
    if kind in BESIDE:
        (tmp_path / "hf_quant_config.json").write_text(json.dumps(BESIDE[kind]))
    said = is_left_over(tmp_path)
    assert said.startswith(f"{tmp_path}: the quantization_config (") and "read as dense" in said
    it = Source(tmp_path)
    assert {s.format for s in it.linears.values()} == {"dense"}
    Harness(decide(tmp_path))


@pytest.mark.parametrize("command", ["plan", "ops", "convert"])
@pytest.mark.parametrize("kind", ["fp8", "gptq"])
def test_whoever_reads_a_left_over_config_says_so(tmp_path, capsys, command, kind):
    folder = tmp_path / "model"
    folder.mkdir()
    write_tiny(folder, "v3", 3, **WIDTHS)
    more = ["--to", "bf16", "--out", str(tmp_path / "out")] if command == "convert" else []

    def said():
        assert main([command, "--model", str(folder), *more]) == 0
        return [line for line in capsys.readouterr().err.splitlines() if "read as dense" in line]

    configure(folder, CONFIGS[kind])
    (line,) = said()
    assert line.endswith("remove it from config.json")
    assert f"{folder}: the quantization_config (quant_method '{kind}') is not used" in line
    raw = json.loads((folder / "config.json").read_text())
    del raw["quantization_config"]
    (folder / "config.json").write_text(json.dumps(raw))
    assert said() == []


@pytest.mark.parametrize("kind", LEFT)
def test_a_config_of_quantised_weights_is_used(tmp_path, kind):
    write_kind(tmp_path, kind)
    assert not is_left_over(tmp_path)
    sharded(tmp_path)
    assert not is_left_over(tmp_path)


def sharded(folder):
    """The same tensors in two files with an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names, where = sorted(tensors), {}
    for part, mine in (("a.safetensors", names[::2]), ("b.safetensors", names[1::2])):
        save_file({n: tensors[n] for n in mine}, folder / part)
        where |= dict.fromkeys(mine, part)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": where}))


def test_it_is_said_once_and_served(tmp_path, capfd):
    write_tiny(tmp_path, "v3", 3, **WIDTHS)
    sharded(tmp_path)
    with LLM(tmp_path, platform="cpu", threads=1, context_length=64) as llm:
        (want,) = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=3))
    assert "warning: " not in capfd.readouterr().err
    configure(tmp_path, FP8)
    with LLM(tmp_path, platform="cpu", threads=1, context_length=64) as llm:
        (got,) = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=3))
    assert got.token_ids == want.token_ids
    (line,) = [x for x in capfd.readouterr().err.splitlines() if x.startswith("warning: ")]
    assert "quantization_config (quant_method 'fp8') is not used: all tensors are" in line


@pytest.mark.parametrize("kind", ["fp8", "int8 rows", "ct fp8-channel", "modelopt fp8"])
def test_codes_without_any_scale_are_not_taken_for_numbers(tmp_path, kind):
    write_kind(tmp_path, kind)
    tensors = load_file(tmp_path / "model.safetensors")
    kept = {n: t for n, t in tensors.items() if "scale" not in n}
    save_file(kept, tmp_path / "model.safetensors")
    assert not is_left_over(tmp_path)
    with pytest.raises(CheckpointError, match=r"scale.* missing; .* weights of model\.layers\.0"):
        Harness(decide(tmp_path))


@pytest.mark.parametrize(("writer", "config"), [(fp8(), FP8), (awq, AWQ), (gptq(False), GPTQ)])
def test_a_module_that_is_dense_although_not_listed_is_named(tmp_path, writer, config):
    module = "model.layers.1.self_attn.o_proj"
    write(tmp_path, writer, config, lambda m: m != module)
    with pytest.raises(CheckpointError) as caught:
        Harness(decide(tmp_path))
    assert f"{module} is dense: list it where quantization_config names" in str(caught.value)
    configure(tmp_path, {**config, "modules_to_not_convert": [module]})
    Harness(decide(tmp_path))


def test_only_a_file_that_is_missing_may_not_have_been_downloaded(tmp_path):
    """Neither tensors that are missing, nor those of another kind than config.json says."""
    write_kind(tmp_path, "awq all")
    tensors, asked = load_file(tmp_path / "model.safetensors"), "is the download complete?"
    changed = [
        {n: t for n, t in tensors.items() if ".layers.1." not in n},
        {n: t for n, t in tensors.items() if not n.endswith("o_proj.scales")},
        {n: t for n, t in tensors.items() if n != "model.norm.weight"},
        {**tensors, "model.layers.0.odd.weight": torch.ones(2)},
    ]
    for each in changed:
        save_file(each, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError) as caught:
            Harness(decide(tmp_path))
        assert asked not in str(caught.value) and "config.json" in str(caught.value)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=re.escape(asked)):
        Harness(decide(tmp_path))
