"""Checkpoints in every published quantisation: unpacked bit by bit, cut anywhere, run whole."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from model_harness import Harness, decide, run_schedule
from published_kinds import KINDS, write_kind
from safetensors.torch import load_file, save_file

from ds_runtime import LLM, SamplingParams
from ds_runtime.assembly.assemble import find_loader
from ds_runtime.checkpoint.shards import Checkpoint
from ds_runtime.description.hf import load_config
from ds_runtime.description.structure import stored_modules
from ds_runtime.ops.contract import DeviceInfo, Dims, Facts
from ds_runtime.ops.formats import FORMATS
from ds_runtime.ops.reference.cases import Maker
from ds_runtime.plugins.manager import load_plugins
from ds_runtime.weights.quant import PartRequest, Quant
from ds_runtime.weights.rows import with_rows
from ds_runtime_kit.models.oracle import Oracle

FACTS = Facts(DeviceInfo("cpu", "", ""), Dims({}), dtype="float32")
# An inverse of the global scale is rounded once more.
TIMES = {"ct nvfp4": 2e-7, "modelopt nvfp4": 2e-7}


class Published:
    """A written checkpoint, the model that holds its values, and how it is read."""

    def __init__(self, folder, kind):
        self.folder, self.kind = folder, kind
        self.model = write_kind(folder, kind, seed=3)
        self.config = load_config(folder)
        loader = find_loader(load_plugins(()).offers(FACTS), self.config)
        self.quant = Quant.open(loader, self.config.quantization)
        self.modules = stored_modules(self.config, self.quant.format_of)
        self.values = {k: v.detach() for k, v in self.model.state_dict().items()}

    def part(self, module, rows, cols):
        checkpoint = Checkpoint(self.folder)
        place = self.quant.place(checkpoint, self.modules[module])
        encoding = self.quant.encoding(module)
        return self.quant.read(PartRequest(checkpoint, {}, module, encoding, place, rows, cols))

    def want(self, module):
        above, _, name = module.rpartition(".")
        at, _, index = above.rpartition(".")
        if at.endswith("experts"):
            stack = self.values[f"{at}.{'down_proj' if name == 'down_proj' else 'gate_up_proj'}"]
            whole = stack[int(index)]
            half = whole.shape[0] // 2
            return {"gate_proj": whole[:half], "up_proj": whole[half:], "down_proj": whole}[name]
        return self.values[f"{module}.weight"]


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    made = {}

    def get(kind):
        if kind not in made:
            made[kind] = Published(tmp_path_factory.mktemp("kind"), kind)
        return made[kind]

    return get


@pytest.mark.parametrize("kind", KINDS)
def test_any_part_is_that_part_of_the_whole(published, kind):
    """Whole, halves and quarters as ranks cut them, and cuts through groups, bytes and words."""
    it, draw = published(kind), random.Random(kind)
    linear = [m for m, s in it.modules.items() if s.format not in ("", "dense")]
    chosen = [m for m in linear if ".experts." not in m] + draw.sample(linear, 3)
    for module in chosen:
        want = it.want(module)
        rows, cols = want.shape
        cuts = [(slice(0, rows), slice(0, cols))]
        cuts += [(slice(rows // 2, rows), slice(0, cols)), (slice(0, rows), slice(cols // 2, cols))]
        for _ in range(2):
            r, c = (sorted(draw.sample(range(n + 1), 2)) for n in (rows, cols))
            cuts.append((slice(*r), slice(*c)))
        for r, c in cuts:
            part = it.part(module, r, c)
            got = part.dequantise()
            np.testing.assert_allclose(
                got, want[r, c], rtol=TIMES.get(kind, 0), atol=0, err_msg=f"{module} {r} {c}"
            )


@pytest.mark.parametrize("kind", KINDS)
def test_it_computes_what_its_values_compute(published, kind):
    """Logits of the whole model against transformers, holding the dequantised values."""
    it = published(kind)
    oracle = Oracle(it.model)
    prompts = [oracle.draw_prompt(n, n) for n in (23, 5)]
    logits = run_schedule(Harness(decide(it.folder)), prompts, 0, 4)
    for prompt, rows in zip(prompts, logits, strict=True):
        got = torch.log_softmax(rows[: len(prompt)].double(), -1)
        want = oracle.logprobs(prompt).double()[: len(prompt)]
        assert (got[: len(want)] - want).abs().max() < 1e-4


def stacked(tensors, layer, suffixes):
    """The experts of a layer as some re-exports have them: gate over up, and down, of all."""
    at = f"model.layers.{layer}.mlp.experts"

    def take(name, suffix):
        found = [tensors.pop(f"{at}.{e}.{name}.{suffix}") for e in range(8)]
        return torch.stack([t.view(torch.uint8) if t.itemsize == 1 else t for t in found]), found[0]

    for suffix in suffixes:
        (gate, kind), (up, _), (down, _) = (
            take(f"{n}_proj", suffix) for n in ("gate", "up", "down")
        )
        end = suffix.removeprefix("weight")
        tensors[f"{at}.gate_up_proj{end}"] = torch.cat((gate, up), 1).view(kind.dtype)
        tensors[f"{at}.down_proj{end}"] = down.view(kind.dtype)


@pytest.mark.parametrize(
    ("kind", "suffixes"),
    [
        ("int8 rows", ("weight", "weight_scale")),
        ("ct int8", ("weight", "weight_scale")),
        ("ct fp8-channel", ("weight", "weight_scale")),
        ("ct mxfp4", ("weight_packed", "weight_scale")),
        ("quark", ("weight", "weight_scale")),
        ("w4afp8", ("weight", "weight_scale_inv")),
    ],
)
def test_stacked_experts(published, tmp_path, kind, suffixes):
    """Also where static scales of activations could lie beside them, and none do."""
    it = published(kind)
    tensors = load_file(it.folder / "model.safetensors")
    tensors = {n: t for n, t in tensors.items() if not n.endswith("input_scale")}
    stacked(tensors, 1, suffixes)
    save_file(tensors, tmp_path / "model.safetensors")
    for name in ("config.json", "hf_quant_config.json"):
        if (it.folder / name).is_file():
            (tmp_path / name).write_bytes((it.folder / name).read_bytes())
    one, other = (
        run_schedule(Harness(decide(f)), [[1, 2, 3]], 0, 4) for f in (it.folder, tmp_path)
    )
    assert torch.equal(one[0], other[0])


ROUNDED = ("int8 rows", "ct int8", "ct int4", "ct mixed", "awq", "gptq", "w4afp8")
SERVED = ("modelopt nvfp4", "gptq act-order", "quark", "w4afp8")
SETTINGS = {"platform": "cpu", "dtype": "float32", "context_length": 64, "threads": 1}
SETTINGS |= {"kv_memory": "4MB", "plugins": ("cpu",)}


def served(it, **more):
    """(worst, mean) error of log-probabilities that the platform's own kernels give."""
    oracle = Oracle(it.model)
    prompts = [oracle.draw_prompt(n, n) for n in (23, 5)]
    params = SamplingParams(max_tokens=6, prompt_logprobs=1, logprobs=1, ignore_eos=True)
    errors = []
    with LLM(it.folder, **SETTINGS, **more) as llm:
        for output in llm.generate(prompts, params):
            tokens = output.prompt_token_ids + output.token_ids
            expected = oracle.logprobs(tokens)
            entries = [*output.prompt_logprobs, *output.logprobs]
            for position, entry in enumerate(entries[1:], start=1):
                want = float(expected[position - 1, entry.token])
                errors.append(abs(entry.logprob - want))
    assert len(errors) == 23 + 5 - 2 + 12
    return max(errors), sum(errors) / len(errors)


def check_served(it, **more):
    """As exact as the values where kernels multiply numbers; where they round activations to int8,
    too, within what that costs a model of random weights."""
    worst, mean = served(it, **more)
    rounds = it.kind.startswith(ROUNDED) and it.kind != "gptq act-order"
    assert mean < 0.08 if rounds else worst < 1e-4, (worst, mean)


@pytest.mark.parametrize("kind", SERVED)
def test_it_serves(published, kind):
    check_served(published(kind))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [k for k in KINDS if k not in SERVED])
def test_all_serve(published, kind):
    check_served(published(kind))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ct int4 head", "modelopt nvfp4", "gptq act-order", "awq all"])
def test_two_ranks_serve(published, kind):
    """Also a head in groups, whose 131 rows are filled up."""
    check_served(published(kind), tp=2, dist_timeout=60)


@pytest.mark.parametrize("fmt", FORMATS)
def test_rows_below_are_zeros(fmt):
    part = Maker(FACTS, fmt).weight(133, 64, fmt).parts[0]
    made = with_rows(part, 140)
    values = made.dequantise()
    assert made.shape == (140, 64) and torch.equal(values[:133], part.dequantise())
    assert values[133:].eq(0).all()


def test_ranks_read_the_same_values(published):
    """What two ranks hold of a row cut and of a column cut, side by side, is the whole."""
    for kind in ("awq", "gptq act-order", "ct int4-zeros", "modelopt nvfp4", "w4afp8", "mxfp8"):
        it = published(kind)
        for module in ("model.layers.0.self_attn.o_proj", "model.layers.0.mlp.up_proj"):
            want = it.want(module)
            rows, cols = want.shape
            left, right = (
                it.part(module, slice(0, rows), slice(a * cols // 2, (a + 1) * cols // 2))
                for a in (0, 1)
            )
            whole = it.part(module, slice(0, rows), slice(0, cols)).dequantise()
            assert torch.equal(torch.cat((left.dequantise(), right.dequantise()), 1), whole)


def test_formats_are_what_their_names_say(published):
    expected = {
        "int8 blocks": {"int8_block"},
        "int8 rows": {"int8_channel"},
        "ct int8-zeros": {"int8_group"},
        "ct int8-packed": {"int8_channel"},
        "ct int8-packed-zeros": {"int8_group"},
        "fp8 64x32": {"fp8_group"},
        "awq": {"int4_group", "dense"},
        "gptq act-order": {"int4_actorder"},
        "ct mixed": {"int4_group", "fp8_channel", "dense"},
        "w4afp8": {"w4afp8", "fp8_block"},
        "modelopt nvfp4": {"nvfp4", "dense"},
        "modelopt fp8": {"fp8_tensor"},
        "quark": {"mxfp4", "fp8_tensor", "dense"},
        "mxfp8": {"mxfp8"},
    }
    for kind, formats in expected.items():
        modules = published(kind).modules
        found = {s.format for m, s in modules.items() if s.format and m != "lm_head"}
        assert found == formats, kind
        assert modules["lm_head"].format == "dense"
    assert published("ct int4 head").modules["lm_head"].format == "int4_group"


def test_calibrated_scales_of_activations_are_kept(published):
    part = published("w4afp8")
    for name in ("gate_proj", "up_proj", "down_proj"):
        module = f"model.layers.1.mlp.experts.0.{name}"
        rows, cols = part.want(module).shape
        made = part.part(module, slice(0, rows), slice(0, cols))
        assert made.tensors["input_scale"].item() == pytest.approx(0.02, rel=4e-3)
    names = load_file(part.folder / "model.safetensors")
    assert "model.layers.1.mlp.experts.0.w3.input_scale" in names
