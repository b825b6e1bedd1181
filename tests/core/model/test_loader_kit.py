"""The kit for loaders: right for published formats, and every planted fault has its question."""

from __future__ import annotations

import importlib
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from published_kinds import BESIDE, KINDS
from safetensors.torch import load_file, save_file

from ds_runtime import LLM, SamplingParams
from ds_runtime.api import LoaderSample
from ds_runtime.assembly import receipts
from ds_runtime.assembly.assemble import assemble
from ds_runtime.cli import main
from ds_runtime.config import EngineConfig
from ds_runtime.errors import CheckpointError, UnsupportedError
from ds_runtime.ops.contract import DeviceInfo, Dims, Facts
from ds_runtime.plugins.manager import load_plugins
from ds_runtime_kit import conform
from ds_runtime_kit.loaders.checkpoints import write_checkpoint
from ds_runtime_kit.loaders.checks import QUESTIONS, check_loader

FACTS = Facts(DeviceInfo("cpu", "", ""), Dims({}), dtype="float32")


def published(kind: str) -> ModuleType:
    """A module whose `samples` are those of a writer of published formats."""
    writer, config, _ = KINDS[kind]
    said = config | ({"hf_quant_config.json": BESIDE[kind]} if kind in BESIDE else {})
    (loader,) = (x for x in load_plugins(()).offers(FACTS).quant_loaders if x.accepts(said))

    def samples(values, module):
        encoding = loader.encodings(said)(module)
        if encoding.format == "dense" or values.shape[1] % 32 or values.shape[0] % 8:
            return
        made, meant = writer(module, values.double().numpy())
        names = {name: component for component, name in encoding.tensors.items()}
        tensors = {names[n]: t for n, t in made.items() if n in names}
        meant = torch.from_numpy(np.ascontiguousarray(meant)).float()
        yield LoaderSample(said, tensors, meant)

    made = ModuleType("published_samples")
    made.samples = samples
    made.loader = replace(loader, samples="published_samples:samples")
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_loaders_of_published_formats_pass(kind, monkeypatch):
    module = published(kind)
    monkeypatch.setitem(sys.modules, "published_samples", module)
    results = check_loader(module.loader)
    assert [f"{r.check} {r.case}: {r.failure}" for r in results if not r.ok] == []
    assert {r.check for r in results} >= QUESTIONS.keys() - {"stacks"}


TERNARY = Path(__file__).parents[2] / "fixtures" / "ternary.py"
SKIP = "codes[:, skip : skip + request.shape[1]]"
BUFFER = "BUFFER[: codes.shape[0] * request.shape[1]].view(request.shape)"
# Question → edits of the one file, each (what is right, what is wrong), and what conform says.
FAULTS = {
    "accepts": (
        [('return quantization.get("quant_method") == METHOD', "return True")],
        "accepts takes every checkpoint",
    ),
    "values": ([("packed >> 2 * i & 3", "packed >> 6 - 2 * i & 3")], "values differ, the first at"),
    "slices": ([(SKIP, "codes[:, : request.shape[1]]")], "of the whole: "),
    "shards": (
        [
            ("def read(request):", "BUFFER = torch.empty(1 << 18, dtype=torch.uint8)\n\n\n"
             "def read(request):"),
            (SKIP, f"{BUFFER}.copy_({SKIP})"),
        ],
        "rank 0 of 2, by ",
    ),
    "stacks": (
        [("request.matrix_rows, slice(first", "request.rows, slice(first")],
        "of three experts in one tensor, the second: ",
    ),
}  # fmt: skip
# The same for what numbers alone do not show.
FORMS = {
    "name": ("WeightPart(request.module,", 'WeightPart("linear",', "name of the part is 'linear'"),
    "format": ("(request.module, METHOD,", '(request.module, "ours",', "format of the part is"),
    "dequantiser": (", dequantiser=own)", ")", "name its dequantiser"),
    "canonical": (
        'STORED = Encoding(METHOD, METHOD',
        'STORED = Encoding("int4_group", METHOD',
        "format of the part is 'ternary', expected 'int4_group'",
    ),
    "dense": ("request.encoding != STORED", "False", "CheckpointError: "),
    "nothing": ("    return WeightPart(", "    WeightPart(", "read returns NoneType"),
    "components": ('tensors = {"weight": packed, "scale": scale}', 'tensors = {"weight": packed}',
                   "samples gives ['weight']"),
    "raises": ("first, last = request.cols", "first, last = 1 / 0, request.cols", "ZeroDivision"),
    "none": ("    yield LoaderSample(", "    LoaderSample(", "raised"),
}  # fmt: skip


@pytest.fixture
def one_file(tmp_path, monkeypatch):
    """Puts the one file, edited, where pip would, and conforms it; returns code and words."""
    monkeypatch.syspath_prepend(str(tmp_path))
    info = tmp_path / "ternary-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ternary\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[ds_runtime]\nternary = ternary_format\n")
    source = TERNARY.read_text()

    def write(*edits):
        text = source
        for right, wrong in edits:
            assert text.count(right) == 1, right
            text = text.replace(right, wrong)
        (tmp_path / "ternary_format.py").write_text(text)
        importlib.invalidate_caches()
        return tmp_path

    yield write
    sys.modules.pop("ternary_format", None)


def asked(folder, capsys, *args):
    code = main(["conform", "ternary", "--platform", "cpu", "--receipts", str(folder), *args])
    return code, capsys.readouterr().out


def test_a_format_in_one_file_conforms_and_its_receipt_says_so(one_file, capsys):
    folder = one_file()
    code, said = asked(folder, capsys)
    assert (code, said.count(" conforms (accepts ")) == (0, 1), said
    (receipt,) = folder.glob("ternary-*.json")
    (entry,) = json.loads(receipt.read_text())["kernels"]
    assert (entry["op"], entry["kernel"]) == ("loader", "ternary.ternary")
    assert entry["checks"].keys() == QUESTIONS.keys() and entry["formats"] == ["dense", "ternary"]


@pytest.mark.parametrize("question", FAULTS)
def test_conform_names_a_planted_fault(question, one_file, capsys):
    edits, says = FAULTS[question]
    code, said = asked(one_file(*edits), capsys)
    assert code == 1 and "ternary.ternary" in said and "FAILED" in said
    (first, *_) = re.findall(r"^  (\w+), case ", said, re.MULTILINE)
    assert first == question
    assert re.search(rf"^  {question}, case .*{says}", said, re.MULTILINE), said
    code, said = asked(one_file(*edits), capsys, "--check", question, "--json")
    (entry,) = json.loads(said)[0]["kernels"]
    assert code == 1 and entry["checks"].keys() == {question}


@pytest.mark.parametrize("fault", FORMS)
def test_conform_names_what_kernels_could_not_read(fault, one_file, capsys):
    right, wrong, says = FORMS[fault]
    code, said = asked(one_file((right, wrong)), capsys)
    assert code == 1 and says in said, said


def test_a_loader_without_samples_does_not_conform(one_file, capsys):
    code, said = asked(one_file((', "samples": f"{__name__}:samples"', "")), capsys)
    assert code == 1 and "brings no samples, so that nothing can be asked" in said
    assert "QuantLoader.samples" in said


def test_only_what_is_named_is_asked(one_file, capsys):
    folder = one_file()
    code, said = asked(folder, capsys, "--op", "loader", "--check", "slices", "values")
    assert code == 0 and "conforms (values " in said and "shards" not in said
    assert asked(folder, capsys, "--kernel", "ternary.ternary")[0] == 0
    assert main(["conform", "ternary", "--platform", "cpu", "--check", "samples"]) == 1
    assert "no such kernel or loader" in capsys.readouterr().err


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The demo in ternary, and the same values in bfloat16: folders."""
    spec = importlib.util.spec_from_file_location("ternary", TERNARY)
    module = importlib.util.module_from_spec(spec)
    sys.modules["ternary"] = module
    spec.loader.exec_module(module)
    (loader,) = module.ds_quant_loaders(None)
    folder = write_checkpoint(loader, tmp_path_factory.mktemp("ternary"))
    dense = tmp_path_factory.mktemp("dense")
    config = json.loads((folder / "config.json").read_text())
    assert config.pop("quantization_config") == {"quant_method": "ternary"}
    (dense / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (dense / name).write_bytes((folder / name).read_bytes())
    tensors = load_file(folder / "model.safetensors")
    for name in [n for n in tensors if n.endswith("weight_scale")]:
        at, scale = name.removesuffix("_scale"), tensors.pop(name)
        codes = torch.stack([tensors[at] >> 2 * i & 3 for i in range(4)], dim=-1).flatten(1)
        tensors[at] = ((codes.float() - 1) * scale.unsqueeze(-1)).to(torch.bfloat16)
    save_file(tensors, dense / "model.safetensors")
    yield module, folder, dense
    del sys.modules["ternary"]


def test_a_model_in_it_answers_as_its_values_do(model):
    module, folder, dense = model
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)

    def answers(path, **extra):
        with LLM(str(path), platform="cpu", **extra) as llm:
            return [out.token_ids for out in llm.generate(["12+30=", "a"], params)]

    assert answers(folder, extra_plugins=[module]) == answers(dense)


def test_the_plan_says_what_a_receipt_covers(model):
    module, folder, _ = model
    config = EngineConfig(model=str(folder), platform="cpu")
    assembly = assemble(config, extra_plugins=[module])
    (said, *_) = [x for x in receipts.standing(assembly, ()) if "ternary" in x]
    assert said == "receipt  ternary: none for this device; ds-runtime conform makes one"
    report = assembly.plugins.reports["ternary"]
    found = [conform.loader_verdict(assembly.loader)]
    made = conform.receipt(report, assembly.platform, assembly.device, found)
    (said, *_) = [x for x in receipts.standing(assembly, [made]) if "ternary" in x]
    assert "1 of 1 kernels and loaders conform" in said


def test_bisect_names_a_wrong_loader_first(model, monkeypatch, tmp_path):
    from ds_runtime_kit.bisect import search

    module, folder, _ = model
    config = EngineConfig(model=str(folder), platform="cpu")
    right = module.values
    monkeypatch.setattr(module, "values", lambda part, dtype: -right(part, dtype))
    given = (config, (), ["a"], 0, tmp_path / "case")
    finding = search.bisect(*given, extra_plugins=[module])
    said = search.render(finding, tmp_path / "case")
    assert finding.found and "loader ternary.ternary of plugin ternary does not conform" in said
    assert "values, case " in said and "ds-runtime conform ternary --op loader" in said


def test_a_checkpoint_needs_samples_of_what_is_stored(model, monkeypatch, tmp_path):
    module, _, _ = model
    (loader,) = module.ds_quant_loaders(None)
    every = module.samples

    def some(values, name):
        return () if "kv_b_proj" in name else every(values, name)

    monkeypatch.setattr(module, "samples", some)
    with pytest.raises(UnsupportedError, match=r"gives none for .*kv_b_proj, which encodings"):
        write_checkpoint(loader, tmp_path)
    monkeypatch.setattr(module, "samples", lambda values, name: ())
    with pytest.raises(UnsupportedError, match="samples gives none for demo"):
        write_checkpoint(loader, tmp_path)


def test_a_damaged_tensor_is_the_loaders_to_refuse(model, tmp_path):
    module, folder, _ = model
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.self_attn.o_proj.weight"
    tensors[name] = tensors[name][:, 1:].contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"o_proj: \[256, 127\] found"):
        LLM(str(tmp_path), platform="cpu", extra_plugins=[module])
