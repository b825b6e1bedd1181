"""A model is described once: names of weights stand in one file, and so does the arithmetic of
their shapes."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from ds_runtime.description.hf import from_hf
from ds_runtime.description.structure import draft_of, model_of
from ds_runtime.description.tree import by_name
from ds_runtime_bench.shapes import config_of

ROOT = Path(__file__).resolve().parents[2]
STRUCTURE = "core/ds_runtime/description/structure.py"
TREE = "core/ds_runtime/description/tree.py"  # of words that are places of every model
# Other files that spell a weight's name, and why.
SPELL = {
    # What others call them, or say of them.
    "core/ds_runtime/checkpoint/gguf/names.py": "the names of GGUF files beside a checkpoint's",
    "core/ds_runtime/weights/loaders/names.py": "what no checkpoint quantises, whatever its model",
    "core/ds_runtime/weights/loaders/int4.py": "what no checkpoint of AWQ or GPTQ quantises",
    "core/ds_runtime/weights/loaders/modelopt.py": "older names that input scales have",
    "core/ds_runtime/config/engine.py": "the help of flags names what they round and join",
    # Words that are also something else than a weight's name.
    "core/ds_runtime/description/config.py": "a field: how many shared experts",
    "core/ds_runtime/description/hf.py": "the same field",
    "core/ds_runtime/description/hybrid/config.py": "the same field",
    "core/ds_runtime/description/hybrid/structure.py": "the names of DeepSeek-V4",
    "core/ds_runtime/description/joins.py": "the name of a rule",
    "core/ds_runtime/cli/known/kernels.py": "the name of that rule",
    "core/ds_runtime/model/attention.py": "an attribute of a layer",
    "core/ds_runtime/model/base.py": "an attribute of a model",
    # Tools that check the rest may not be derived from it.
    "kit/bench/ds_runtime_bench/checkpoints/gguf.py": "the names of GGUF files",
    "kit/bench/ds_runtime_bench/ops/measure.py": "places of experts one by one",
    "kit/convert/ds_runtime_convert/targets.py": "what is never quantised",
    "kit/vendor/ds_runtime_kit/devices/null_kernels.py": "a head without a preference",
    "kit/vendor/ds_runtime_kit/loaders/checks.py": "samples that plugins are asked for",
    "kit/vendor/ds_runtime_kit/models/adapters.py": "changes a model of transformers",
    "kit/vendor/ds_runtime_kit/models/oracle.py": "computes a model by itself",
    "kit/vendor/ds_runtime_kit/models/tiny.py": "writes models of transformers",
}
COMMON = {"model", "layers", "mlp", "norm", "gate", "bias", "experts", "self_attn", "indexer"}


def names() -> set[str]:
    """Every word of the paths of the weights of models that have all there is."""
    raw = config_of("v32-slice", "bfloat16")
    plain = config_of("v2-lite", "bfloat16")
    config = from_hf(raw)
    trees = (
        model_of(config, str, experts=range(1)),
        model_of(from_hf(plain), str, experts=range(1)),
        draft_of(config, config.layers, str, experts=range(1)),
    )
    words = {word for tree in trees for path in by_name(tree) for word in path.split(".")}
    return {word for word in words if not word.isdigit()} - COMMON


@cache
def code(path: Path) -> str:
    """A file without its comments and docstrings."""
    text = path.read_text()
    docs = {
        (node.body[0].lineno, node.body[0].end_lineno)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
        and isinstance(node.body[0].value, ast.Constant)
    }
    kept = [
        token.string
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type != tokenize.COMMENT
        and not any(first <= token.start[0] <= (last or 0) for first, last in docs)
    ]
    return " ".join(kept)


def files() -> Iterator[Path]:
    for room in ("core", "kit"):
        yield from (ROOT / room).rglob("*.py")


def spelling(word: str) -> set[str]:
    """Files whose code has this word."""
    found = re.compile(rf"(?<![\w]){word}(?![\w])")
    return {str(p.relative_to(ROOT)) for p in files() if found.search(code(p))}


def test_names_of_weights_stand_in_one_file():
    words = names()
    assert {"kv_b_proj", "q_proj", "q_a_proj", "wq_b", "shared_experts", "eh_proj"} <= words
    found = {word: spelling(word) for word in sorted(words)}
    assert all({STRUCTURE, TREE} & where for where in found.values())
    others = {word: where - {STRUCTURE, TREE} - SPELL.keys() for word, where in found.items()}
    assert not {word: where for word, where in others.items() if where}
    spelt = set().union(*found.values())
    assert not SPELL.keys() - spelt, "these spell none any more: take them off the list"


def is_product_with_latent(node: ast.AST) -> bool:
    """heads · (nope + v) · kv_lora, in any order and by any names."""
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Mult):
        return False
    said = ast.unparse(node)
    sums = [n for n in ast.walk(node) if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Add)]
    widths = any("nope" in ast.unparse(s) and "v" in ast.unparse(s) for s in sums)
    return widths and "lora" in said


def test_shapes_are_computed_in_one_file():
    """The largest weight of attention, which was spelt in five."""
    assert is_product_with_latent(ast.parse("heads * (c.nope + c.v) * c.kv_lora").body[0].value)
    found = {
        str(path.relative_to(ROOT))
        for path in files()
        if "/reference/" not in str(path)
        for node in ast.walk(ast.parse(path.read_text()))
        if is_product_with_latent(node)
    }
    assert not found
