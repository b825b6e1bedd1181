"""GGUF files as checkpoints: bit by bit as the format's own package reads them, and run whole."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from hypothesis import given, settings
from hypothesis import strategies as st
from model_harness import Harness, decide, run_schedule
from published_kinds import hold
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE

from ds_runtime import LLM, SamplingParams
from ds_runtime.checkpoint.gguf.header import read_header
from ds_runtime.checkpoint.hub import resolve_model
from ds_runtime.cli import main
from ds_runtime.description.hf import load_config
from ds_runtime.errors import CheckpointError, UnsupportedError
from ds_runtime.text.tokenizer import Tokenizer as OurTokenizer
from ds_runtime_bench.checkpoints.gguf import metadata, plan_targets
from ds_runtime_convert.run import convert
from ds_runtime_convert.source import Source
from ds_runtime_kit.models.oracle import Oracle
from ds_runtime_kit.models.tiny import write_tiny
from examples import examples

# K types store 256 columns at once.
SHAPE = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256}
SHAPE |= {"v_head_dim": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "num_hidden_layers": 2}
SHAPE |= {"n_routed_experts": 8, "num_experts_per_tok": 2}
V3 = {**SHAPE, "q_lora_rank": 256}
MIXED = {"attn_k_b": Type.Q8_0, "attn_v_b": Type.Q8_0, "ffn_down": Type.Q6_K, "output.": Type.Q6_K}
# name → (shape of the model, type of matrices, others by parts of their names)
FILES = {
    "f32": ("v3", Type.F32, {}),
    "f16": ("v2-lite", Type.F16, {}),
    "bf16": ("v3", Type.BF16, {}),
    "q8_0": ("v3", Type.Q8_0, {}),
    "q4_0": ("v2-lite", Type.Q4_0, {"attn_v_b": Type.Q5_0, "ffn_up": Type.Q5_0}),
    "q4_k": ("v3", Type.Q4_K, MIXED),
    "q5_k": ("v2-lite", Type.Q5_K, MIXED),
    "q6_k": ("v3", Type.Q6_K, {"attn_k_b": Type.Q8_0, "attn_v_b": Type.F16}),
}


def quantised(values, kind, draw):
    """(bytes, the values that they mean by the gguf package). It has no rounding to K types: their
    blocks are random bytes with small scales."""
    if kind in (Type.Q4_K, Type.Q5_K, Type.Q6_K):
        elements, nbytes = gguf.GGML_QUANT_SIZES[kind]
        shape = (*values.shape[:-1], values.shape[-1] // elements, nbytes)
        raw = draw.integers(0, 256, shape, dtype=np.uint8)
        scale = draw.uniform(0.5, 1, (*shape[:-1], 1)) * values.std()
        wide = {Type.Q4_K: 250, Type.Q5_K: 500, Type.Q6_K: 1300}[kind]  # codes times scales
        at = 208 if kind == Type.Q6_K else 0
        raw[..., at : at + 2] = (scale / wide).astype(np.float16).view(np.uint8)
        if at == 0:  # the minimum takes away the mean
            ratio = 7.5 if kind == Type.Q4_K else 15.5
            raw[..., 2:4] = (scale / wide * ratio).astype(np.float16).view(np.uint8)
        raw = raw.reshape(*values.shape[:-1], -1)
    else:
        raw = gguf.quants.quantize(values, kind)
    return raw, gguf.quants.dequantize(raw, kind)


def write(folder, name, seed=3, tokens=None, nextn=False, **more):
    """(the file, transformers' model that holds what it means, checkpoint name → values)."""
    shape, kind, others = FILES[name]
    widths = V3 if shape == "v3" else SHAPE
    model = write_tiny(folder / "hf", shape, seed, **{**widths, **more})
    config, source = load_config(folder / "hf"), Source(folder / "hf")
    writer = gguf.GGUFWriter(folder / f"{name}.gguf", "deepseek2")
    said = metadata(config, name)
    if tokens is not None:
        said.pop("tokenizer.ggml.model")
        tokens(writer)
    if not config.q_lora:
        said.pop("deepseek2.attention.q_lora_rank")
    for key, value in said.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
        add.get(type(value), writer.add_string)(key, value)
    draw, meant, halves = np.random.default_rng(seed), {}, {}
    for t in plan_targets(config, source.modules):
        of = kind if t.dtype == torch.float32 and len(t.shape) > 1 else Type.F32
        of = Type.F32 if "gate_inp" in t.name or "norm" in t.name else of
        of = next((k for part, k in others.items() if part in t.name), of)
        values = stacked(source, t)
        raw, values = quantised(values, of, draw) if of != Type.F32 else (values, values)
        writer.add_tensor(t.name, raw, raw_dtype=of)
        values = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))
        if len(t.modules) > 1:
            meant |= {f"{m}.weight": v for m, v in zip(t.modules, values, strict=True)}
        elif t.heads is not None:
            halves.setdefault(t.modules[0], []).append(values.mT if t.transpose else values)
        else:
            bare = t.modules[0].endswith("bias")
            meant[t.modules[0] if bare else f"{t.modules[0]}.weight"] = values
    for module, (keys, below) in halves.items():
        meant[f"{module}.weight"] = torch.cat((keys, below), 1).flatten(0, 1)
    if nextn:
        writer.add_tensor("blk.2.nextn.eh_proj.weight", np.zeros((256, 512), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    hold(model, {k: v for k, v in meant.items() if not k.endswith("bias")})
    return folder / f"{name}.gguf", model, meant


def stacked(source, target):
    """A target's values in its shape, in float32."""

    def one(module):
        stored = source.modules[module]
        if stored.format:
            return source.part(module).dequantise()
        return source.tensor(source.places[module].names[0]).float()

    if len(target.modules) > 1:
        return torch.stack([one(m) for m in target.modules]).numpy()
    values = one(target.modules[0])
    if target.heads is not None:
        values = values.view(target.shape[0], -1, values.shape[-1])[:, target.heads]
        values = values.mT if target.transpose else values
    return values.contiguous().view(target.shape).numpy()


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        yield


@pytest.fixture(scope="module")
def files(tmp_path_factory, home):
    made = {}

    def get(name):
        if name not in made:
            made[name] = write(tmp_path_factory.mktemp("gguf"), name)
        return made[name]

    return get


@pytest.mark.parametrize("name", FILES)
def test_every_tensor_is_what_the_gguf_package_reads(files, name):
    """Bit by bit, whole and cut anywhere."""
    path, _, meant = files(name)
    it, draw = Source(resolve_model(str(path))), random.Random(name)
    seen = set()
    for module, stored in it.modules.items():
        names = it.places[module].names
        seen |= set(names)
        bare = module.endswith("e_score_correction_bias")
        want = meant[module if bare else f"{module}.weight"]
        if not stored.format:
            assert torch.equal(it.tensor(names[0]).float(), want), module
            continue
        part = it.part(module)
        assert torch.equal(part.dequantise(), want), module
        if ".experts." in module and not module.endswith("1.down_proj"):
            continue
        for _ in range(3):
            r, c = (sorted(draw.sample(range(n + 1), 2)) for n in stored.shape)
            cut = cut_of(it, module, slice(*r), slice(*c))
            assert torch.equal(cut.dequantise(), want[slice(*r), slice(*c)]), (module, r, c)
    assert seen == set(it.checkpoint.names)
    for rows in (slice(0, 131), slice(7, 40)):
        table = it.checkpoint.read("model.embed_tokens.weight", rows)
        assert torch.equal(table.float(), meant["model.embed_tokens.weight"][rows])


def cut_of(it, module, rows, cols):
    from ds_runtime.weights.quant import PartRequest

    quant = it.quant
    return quant.read(
        PartRequest(
            it.checkpoint,
            quant.quantization,
            module,
            quant.encoding(module),
            it.places[module],
            rows,
            cols,
        )
    )


@pytest.mark.parametrize("name", FILES)
def test_the_config_is_the_one_the_file_was_made_from(files, name):
    path, _, _ = files(name)
    ours, theirs = load_config(resolve_model(str(path))), load_config(path.parent / "hf")
    for field in ours.__dataclass_fields__:
        if field not in ("quantization", "dtype", "eos_tokens", "mtp_layers"):
            a, b = getattr(ours, field), getattr(theirs, field)
            if field == "yarn":
                assert a.mscale_all_dim == pytest.approx(b.mscale_all_dim, rel=1e-6)
                assert (a.factor, a.original) == (b.factor, b.original)
            elif isinstance(a, float):
                assert a == pytest.approx(b, rel=1e-6), field
            else:
                assert a == b, field


@pytest.mark.parametrize("name", ["q8_0", "q4_k", "q4_0"])
def test_it_computes_what_its_values_compute(files, name):
    path, model, _ = files(name)
    oracle = Oracle(model)
    prompts = [oracle.draw_prompt(n, n) for n in (19, 5)]
    logits = run_schedule(Harness(decide(resolve_model(str(path)))), prompts, 0, 4)
    for prompt, rows in zip(prompts, logits, strict=True):
        got = torch.log_softmax(rows[: len(prompt)].double(), -1)
        want = oracle.logprobs(prompt).double()[: len(prompt)]
        assert (got[: len(want)] - want).abs().max() < 2e-4


def test_the_plan_says_what_is_converted(files, capsys):
    path, _, _ = files("q4_k")
    assert main(["plan", "--model", str(path), "--platform", "cpu"]) == 0
    said = capsys.readouterr().out
    assert "converts q4_k → dense" in said and "converts int8_group → dense" in said


def test_it_converts(files, tmp_path):
    """A GGUF file is a source as any other."""
    path, _, meant = files("q6_k")
    convert(resolve_model(str(path)), "bf16", tmp_path / "out")
    after = Source(tmp_path / "out")
    assert not (tmp_path / "out" / "gguf.json").exists()
    for module in after.linears:
        want = meant[f"{module}.weight"].to(torch.bfloat16)
        assert torch.equal(after.part(module).tensors["weight"], want), module
    table = after.tensor("model.embed_tokens.weight")
    assert torch.equal(table, meant["model.embed_tokens.weight"].to(torch.bfloat16))


# What DeepSeek-V3's own tokenizer.json makes of them.
PIECES = {
    "Hi you're 12345, 你好x  \n y  #tag$A": [
        *("Hi", "Ġyou", "'re", "Ġ", "123", "45", ",", "Ġ", "ä½łå¥½", "x", "ĠĠĊ"),
        *("Ġy", "Ġ", "Ġ#", "tag", "$A"),
    ],
}
MARKS = {"<｜begin▁of▁sentence｜>": 3, "<｜end▁of▁sentence｜>": 3, "<think>": 4, "<｜User｜>": 4}


@pytest.fixture(scope="module")
def vocabulary():
    """A small byte-level BPE: (its backend, a function that writes it)."""
    backend = Tokenizer(BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    lines = ["the quick brown fox jumps over the lazy dog", "größe 你好 世界 1234 5678"] * 5
    backend.train_from_iterator(lines, trainer)
    backend.add_tokens([AddedToken(t, special=kind == 3) for t, kind in MARKS.items()])
    model = json.loads(backend.to_str())["model"]
    size = backend.get_vocab_size()

    def tokens(writer, pre="deepseek-v3"):
        texts = [backend.id_to_token(i) for i in range(size)]
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(texts)
        writer.add_token_types([MARKS.get(t, 1) for t in texts])
        writer.add_token_merges([" ".join(m) for m in model["merges"]])
        writer.add_bos_token_id(backend.token_to_id("<｜begin▁of▁sentence｜>"))
        writer.add_eos_token_id(backend.token_to_id("<｜end▁of▁sentence｜>"))
        writer.add_chat_template("{% for m in messages %}{{ m.content }}{% endfor %}")

    return backend, tokens, size


def test_a_file_with_a_vocabulary_serves_text(home, tmp_path, vocabulary):
    backend, tokens, size = vocabulary
    path, _, _ = write(tmp_path, "q8_0", tokens=tokens, nextn=True, vocab_size=size)
    ours = OurTokenizer.load(resolve_model(str(path)))
    for text, pieces in PIECES.items():
        found = ours.backend.pre_tokenizer.pre_tokenize_str(text)
        assert [piece for piece, _ in found] == pieces
    for text in ("the<think>fox<｜User｜>", "größe 1234\n", "🎈 你"):
        ids = ours.encode(text)
        assert ours.decode(ids, skip_special=False) == text
        assert all(ours.token_text(i) == backend.id_to_token(i) for i in ids if i >= size - 4)
    bos, eos = (backend.token_to_id(t) for t in list(MARKS)[:2])
    assert ours.encode("the", add_special=True)[0] == bos and ours.eos_ids == (eos,)
    with LLM(path, platform="cpu", dtype="float32", threads=1, context_length=64) as llm:
        (output,) = llm.generate(["the lazy dog"], SamplingParams(max_tokens=4, ignore_eos=True))
        assert len(output.token_ids) == 4 and llm.tokenizer.decode(output.token_ids) == output.text


def test_an_unknown_way_to_cut_text_is_refused_unless_a_tokenizer_lies_beside(
    home, tmp_path, vocabulary
):
    backend, tokens, size = vocabulary
    made = write(
        tmp_path, "f32", tokens=lambda writer: tokens(writer, "deepseek-llm"), vocab_size=size
    )
    path = str(made[0])
    said = r"tokenizer.ggml.pre 'deepseek-llm', only from 'gpt2' with 'deepseek-v3'; put tokenizer"
    with pytest.raises(CheckpointError, match=said):
        resolve_model(path)
    backend.save(str(tmp_path / "tokenizer.json"))
    folder = resolve_model(path)
    assert folder.name == "f32" and OurTokenizer.load(folder).encode("the")
    assert resolve_model(path) == folder


def rewritten(path, out, change):
    """The file's header as the package reads it, written again with other keys and tensors."""
    reader, writer = gguf.GGUFReader(path), gguf.GGUFWriter(out, "deepseek2")
    values = {k: f.contents() for k, f in reader.fields.items() if not k.startswith("GGUF.")}
    tensors = {t.name: (t.data, t.tensor_type) for t in reader.tensors}
    change(values, tensors)
    for key, value in values.items():
        if key == "general.architecture":
            continue
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
        add.get(type(value), writer.add_string)(key, value)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def test_an_older_file_with_whole_kv_b(files, tmp_path):
    """Also without the widths of absorbed heads, and lengths that are the model's own."""
    path, _, meant = files("f32")

    def older(values, tensors):
        for layer in range(2):
            for half in ("k_b", "v_b"):
                del tensors[f"blk.{layer}.attn_{half}.weight"]
            whole = meant[f"model.layers.{layer}.self_attn.kv_b_proj.weight"].numpy()
            tensors[f"blk.{layer}.attn_kv_b.weight"] = (whole, Type.F32)
        for key in ("key_length", "value_length"):
            at = f"deepseek2.attention.{key}"
            values[at] = values.pop(f"{at}_mla")

    it = Source(resolve_model(str(rewritten(path, tmp_path / "old.gguf", older))))
    for module in it.linears:
        assert torch.equal(it.part(module).dequantise(), meant[f"{module}.weight"])


def with_whole(meant, layers=(0, 1), flat=False, kind=Type.F32):
    """Adds attn_kv_b to the halves of these layers, which may be without heads (ik_llama.cpp)."""

    def change(values, tensors):
        for layer in layers:
            whole = meant[f"model.layers.{layer}.self_attn.kv_b_proj.weight"].numpy()
            raw = gguf.quants.quantize(whole, kind) if kind != Type.F32 else whole
            tensors[f"blk.{layer}.attn_kv_b.weight"] = (raw, kind)
            for half in ("k_b", "v_b") if flat else ():
                data, of = tensors[f"blk.{layer}.attn_{half}.weight"]
                data = np.ascontiguousarray(data).reshape(-1, data.shape[-1])
                tensors[f"blk.{layer}.attn_{half}.weight"] = (data, of)

    return change


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("layers", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("name", ["f32", "q8_0", "q4_k", "q4_0"])
def test_a_file_with_kv_b_and_its_halves(files, tmp_path, name, layers, flat):
    """Of such a layer the whole is read, in its own type; of others the halves."""
    path, _, meant = files(name)
    change = with_whole(meant, layers, flat, Type.F32 if name == "f32" else Type.Q8_0)
    it = Source(resolve_model(str(rewritten(path, tmp_path / "both.gguf", change))))
    for module in it.linears:
        part, want = it.part(module), meant[f"{module}.weight"]
        whole = module.endswith("kv_b_proj") and int(module.split(".")[2]) in layers
        if whole and name != "f32":
            assert part.format == "int8_group"
            torch.testing.assert_close(part.dequantise(), want, rtol=0, atol=want.abs().max() / 99)
        else:
            assert torch.equal(part.dequantise(), want), module


def test_one_half_beside_a_whole_kv_b_says_nothing(files, tmp_path):
    path, _, meant = files("f32")

    def change(values, tensors):
        with_whole(meant)(values, tensors)
        del tensors["blk.0.attn_k_b.weight"], tensors["blk.1.attn_v_b.weight"]

    it = Source(resolve_model(str(rewritten(path, tmp_path / "half.gguf", change))))
    for module in it.linears:
        assert torch.equal(it.part(module).dequantise(), meant[f"{module}.weight"])


@pytest.mark.parametrize("half", ["k_b", "v_b"])
@pytest.mark.parametrize("cut", [np.s_[:3], np.s_[:, :32], np.s_[:, :, :16]])
def test_halves_of_another_shape_than_the_whole_are_named(files, tmp_path, half, cut):
    path, _, meant = files("f32")

    def change(values, tensors):
        with_whole(meant)(values, tensors)
        data, kind = tensors[f"blk.1.attn_{half}.weight"]
        tensors[f"blk.1.attn_{half}.weight"] = (np.ascontiguousarray(data[cut]), kind)

    said = r"model\.layers\.1\.self_attn\.kv_b_proj\.weight has shape \[384, 64\], and its halves"
    with pytest.raises(CheckpointError, match=said):
        Source(resolve_model(str(rewritten(path, tmp_path / "other.gguf", change))))


def renamed(values, tensors):
    tensors["blk.0.odd.weight"] = tensors.pop("blk.0.attn_output.weight")


def short(values, tensors):
    data, kind = tensors["blk.0.attn_k_b.weight"]
    tensors["blk.0.attn_k_b.weight"] = (np.ascontiguousarray(data[:3]), kind)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda v, t: v.pop("deepseek2.attention.kv_lora_rank"), "kv_lora_rank is missing"),
        (lambda v, t: v.update({"deepseek2.block_count": "two"}), "block_count is 'two', expected"),
        (lambda v, t: v.update({"deepseek2.expert_gating_func": 9}), "expert_gating_func is 9"),
        (lambda v, t: t.pop("blk.1.attn_output.weight"), "o_proj.weight is missing"),
        (renamed, "o_proj.weight is missing"),
        (lambda v, t: v.update({"deepseek2.embedding_length": 128}), "shape .* expected"),
    ],
)
def test_a_file_that_does_not_fit_is_named(files, tmp_path, change, said):
    path, _, _ = files("f32")
    with pytest.raises(Exception, match=said) as caught:
        Source(resolve_model(str(rewritten(path, tmp_path / "bad.gguf", change))))
    assert type(caught.value).__module__ == "ds_runtime.errors"


def test_halves_of_kv_b_that_do_not_fit_are_named(files, tmp_path):
    path, _, _ = files("f32")
    it = Source(resolve_model(str(rewritten(path, tmp_path / "short.gguf", short))))
    with pytest.raises(CheckpointError, match=r"kv_b_proj.k_b .*\[3, 64, 32\] .*\[384, 64\] exp"):
        it.part("model.layers.0.self_attn.kv_b_proj")


def flat(values, tensors):
    data, kind = tensors["blk.0.attn_k_b.weight"]
    tensors["blk.0.attn_k_b.weight"] = (data.reshape(-1, data.shape[-1]), kind)


def test_halves_of_kv_b_without_heads_are_named(files, tmp_path):
    path, _, _ = files("f32")
    it = Source(resolve_model(str(rewritten(path, tmp_path / "flat.gguf", flat))))
    with pytest.raises(CheckpointError, match=r"kv_b_proj.k_b .*\[256, 32\] .*\[384, 64\] exp"):
        it.part("model.layers.0.self_attn.kv_b_proj")


@pytest.mark.parametrize(
    ("file", "tensor", "at", "named"),
    [
        ("q8_0", "blk.0.attn_k_b.weight", 0, r"layers\.0\.self_attn\.kv_b_proj\.k_b"),
        ("q8_0", "blk.1.attn_v_b.weight", 0, r"layers\.1\.self_attn\.kv_b_proj\.v_b"),
        ("q8_0", "token_embd.weight", 0, r"model\.embed_tokens\.weight"),
        ("q8_0", "blk.0.attn_output.weight", 0, r"layers\.0\.self_attn\.o_proj\.weight"),
        ("q4_k", "blk.0.attn_q_a.weight", 0, r"layers\.0\.self_attn\.q_a_proj\.weight"),
        ("q4_k", "blk.1.ffn_gate_exps.weight", 2, r"experts\.0\.gate_proj\.weight"),
        ("q5_k", "blk.1.ffn_up_exps.weight", 0, r"experts\.0\.up_proj\.weight"),
    ],
)
def test_a_scale_that_is_no_number_is_named(files, tmp_path, file, tensor, at, named):
    path, _, _ = files(file)
    found = next(t for t in gguf.GGUFReader(path).tensors if t.name == tensor)
    raw = bytearray(Path(path).read_bytes())
    begin = int(found.data_offset) + at
    raw[begin : begin + 2] = np.float16("nan").tobytes()
    (tmp_path / "nan.gguf").write_bytes(raw)
    with pytest.raises(CheckpointError, match=rf"{named}: a scale .*finite number"):
        Harness(decide(resolve_model(str(tmp_path / "nan.gguf"))))


def test_another_architecture_and_another_type_are_refused(tmp_path, home):
    for name, arch, kind, said in (
        ("a", "llama", Type.F32, "general.architecture 'llama' is not supported"),
        ("b", "deepseek2", Type.IQ4_NL, "x is of type IQ4_NL, which is not supported; supported"),
    ):
        writer = gguf.GGUFWriter(tmp_path / f"{name}.gguf", arch)
        blocks = np.zeros((4, 18), np.uint8) if kind != Type.F32 else np.zeros((4, 8), np.float32)
        writer.add_tensor("x", blocks, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        with pytest.raises(UnsupportedError, match=said):
            resolve_model(str(tmp_path / f"{name}.gguf"))


def test_a_split_file_is_read_whole(files, tmp_path, home):
    path, _, meant = files("q8_0")
    names = [t.name for t in gguf.GGUFReader(path).tensors]
    for part, mine in enumerate((names[::2], names[1::2])):

        def half(values, tensors, part=part, mine=mine):
            for name in [n for n in tensors if n not in mine]:
                del tensors[name]
            if part:
                values.clear()
            values["split.count"] = 2

        rewritten(path, tmp_path / f"m-{part + 1:05}-of-00002.gguf", half)
    first = tmp_path / "m-00001-of-00002.gguf"
    it = Source(resolve_model(str(first)))
    for module in it.linears:
        assert torch.equal(it.part(module).dequantise(), meant[f"{module}.weight"])
    with pytest.raises(CheckpointError, match="give the first, which ends in -00001-of-00002"):
        resolve_model(str(tmp_path / "m-00002-of-00002.gguf"))
    (tmp_path / "m-00002-of-00002.gguf").unlink()
    with pytest.raises(CheckpointError, match=r"n-00002-of-00002\.gguf: missing; n-0"):
        resolve_model(str(first.rename(first.with_name("n-00001-of-00002.gguf"))))


@pytest.fixture(scope="module")
def bytes_of(files):
    return Path(files("q4_0")[0]).read_bytes()


@settings(max_examples=examples(200), deadline=None)
@given(data=st.data())
def test_a_damaged_header_is_an_error_of_ours(bytes_of, tmp_path_factory, data):
    """Cut anywhere, or with any eight bytes of the header changed: never a crash, nor memory that
    the file could not fill."""
    raw = bytearray(bytes_of)
    if data.draw(st.booleans()):
        raw = raw[: data.draw(st.integers(0, len(raw) - 1))]
    else:
        at = data.draw(st.integers(0, 3000))
        raw[at : at + 8] = struct.pack("<Q", data.draw(st.integers(0, 2**64 - 1)))
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    path.write_bytes(raw)
    try:
        header = read_header(path)
    except (CheckpointError, UnsupportedError) as e:
        assert str(path) in str(e)
    else:
        size = len(raw)
        assert all(t.begin + t.nbytes <= size for t in header.tensors.values())
