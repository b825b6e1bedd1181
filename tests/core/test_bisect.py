"""Bisect names the first wrong kernel, writes its inputs, and conform replays them."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_runtime.api import OPS, Facts, Kernel, hookimpl
from ds_runtime.config import EngineConfig
from ds_runtime.errors import ConfigError
from ds_runtime.ops.contract import DeviceInfo
from ds_runtime.ops.kernel import RowRange
from ds_runtime.ops.reference import norm
from ds_runtime.ops.reference.attention import dense as attention
from ds_runtime.ops.reference.matrices import linear
from ds_runtime.ops.weight import Packed
from ds_runtime.plugins.manager import load_plugins
from ds_runtime_bench.checkpoints.checkpoint import make_checkpoint
from ds_runtime_kit.bisect import repro_case, search
from ds_runtime_kit.checks.conformance import cases_for, check_case, facts_for
from ds_runtime_kit.conform import replay

PLUGIN = "ds_runtime_planted"


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return norm.rms_norm(x, weight, eps * 1e4)


class MlaDecode(attention.ReferenceMlaDecode):
    def run(self, state: Any, q: Tensor, cache: Tensor, scale: float) -> Tensor:
        return super().run(state, q, cache, scale * 1.3)


class Forgetful(linear.ReferenceLinear):
    """Right in its first two calls."""

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self.calls = 0

    def apply(self, x: Tensor, packed: Packed) -> Tensor:
        self.calls += 1
        return super().apply(x, packed) * (1 if self.calls < 3 else 2)


class Few(linear.ReferenceLinear):
    """Packs for both of a pair."""

    tag = "planted.rows"


class Many(Few):
    """The other one, and wrong."""

    def apply(self, x: Tensor, packed: Packed) -> Tensor:
        return super().apply(x, packed) * 2


def planted(monkeypatch: pytest.MonkeyPatch, op: str, fn: Any, module: str = "") -> ModuleType:
    """A plugin with this one kernel, at the sites of `module` only."""
    made = ModuleType(PLUGIN)

    def refuse(facts: Facts) -> str | None:
        return None if facts.module.endswith(module) else f"serves {module}"

    def ds_ops(facts: Facts) -> list[Kernel]:
        offer = Kernel(OPS[op], f"{PLUGIN}:{fn.__name__}", "planted", 99, refuse)
        declared = {"formats": {"dense"}, "layouts": {"latent_pages.v1"}}
        values = {k: frozenset(v) for k, v in declared.items()}
        return [_with(offer, values)]

    made.ds_ops = hookimpl(ds_ops)  # type: ignore[attr-defined]
    setattr(made, fn.__name__, fn)
    monkeypatch.setitem(sys.modules, PLUGIN, made)
    return made


def _with(kernel: Kernel, values: dict[str, Any]) -> Kernel:
    owns = kernel.op.name == "linear"
    return replace(
        kernel,
        formats=values["formats"] if owns else frozenset(),
        layouts=values["layouts"] if kernel.op.layout else frozenset(),
    )


def find(
    plugin: ModuleType | None,
    out: Path,
    steps: int = 1,
    model: str = "demo",
    disable_mla: bool = False,
) -> search.Finding:
    config = EngineConfig(model, plugins=("cpu",), platform="cpu", dtype="float32",
                          context_length=256, disable_mla=disable_mla)  # fmt: skip
    given = ("plugins", "platform", "dtype", "context_length")
    extra = [] if plugin is None else [plugin]
    return search.bisect(config, given, ["1+2=", "hello"], steps, out, extra)


def test_both_kernels_of_a_pair_are_watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One has packed the weights of the other."""
    made = planted(monkeypatch, "linear", Few)
    made.Many = Many  # type: ignore[attr-defined]
    (few,) = made.ds_ops(facts_for(DeviceInfo("cpu", "any", "any"), "float32"))
    few = replace(few, rows=RowRange(Few.tag))
    many = replace(few, fn=f"{PLUGIN}:Many", rows=RowRange(Few.tag, 4))
    made.ds_ops = hookimpl(lambda facts: [few, many])  # type: ignore[attr-defined]
    finding = find(made, tmp_path / "case")
    assert finding.culprit is not None
    assert finding.culprit.kernel == "planted.Many"


def test_sparse_attention_is_watched(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "tiny-v32", "float32")
    finding = find(None, tmp_path / "case", 14, str(folder))
    assert finding.culprit is None
    watched = {op for _, op, _ in finding.shares}
    assert watched >= {"index_prologue", "index_scores", "index_topk", "sparse_decode"}


def test_expanded_attention_is_watched(tmp_path: Path) -> None:
    finding = find(None, tmp_path / "case", 3, disable_mla=True)
    assert finding.culprit is None
    watched = {op for _, op, _ in finding.shares}
    assert watched >= {"mha_decode", "cache_write", "rope"} and "mla_decode" not in watched


def test_without_a_fault_nothing_departs(tmp_path: Path) -> None:
    finding = find(None, tmp_path / "case")
    assert finding.culprit is None
    assert {op for _, op, _ in finding.shares} >= set(OPS) - {
        *("quantize_group", "logprobs", "mask_logits", "lora_delta"),
        *("cache_write", "rope"),  # inside the fused prologue
        *("index_prologue", "index_select", "index_scores", "index_topk"),  # another attention
        "mha_decode",
        *("sparse_prefill", "sparse_decode", "cache_move"),  # and trees of drafts
        # Nobody offers these here.
        *("mla_inputs", "rms_norm_quantize", "add_rms_norm_quantize", "silu_mul_quantize"),
        "mha_prefill_quantize",
        # Those of V4, which no model calls yet.
        *("hc_pre", "hc_post", "hc_head", "norm_rope", "rope_back", "compress_windows"),
        *("window_prefill", "window_decode", "grouped_linear", "route_softplus"),
        *("silu_mul_limited", "experts_limited", "index_encode"),
    }
    assert "no kernel departs" in search.render(finding, tmp_path / "case")
    assert not (tmp_path / "case").exists()


@pytest.mark.parametrize(
    ("op", "fn", "module", "step"),
    [("rms_norm", rms_norm, "", 0), ("mla_decode", MlaDecode, "", 2)],
)
def test_the_planted_kernel_is_named_and_its_case_replays(
    op: str, fn: Any, module: str, step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "case"
    plugin = planted(monkeypatch, op, fn, module)
    finding = find(plugin, out)
    assert finding.culprit is not None
    assert (finding.culprit.op, finding.culprit.kernel) == (op, f"planted.{fn.__name__}")
    assert finding.step == step and finding.alone
    assert f"conform --case {out}" in search.render(finding, out)
    held = repro_case.load(out)
    assert held.versions["torch"] == torch.__version__ and "relative error" in held.said
    plugins = load_plugins(("cpu",), extra=[plugin])
    device = DeviceInfo("cpu", "host", "any")
    again = replay(plugins, device, str(out))
    assert not again.ok and again.failure.endswith(held.said.rpartition(": ")[2])
    plugins.offers(facts_for(device, "float32"))
    reference = OPS[op].reference.rpartition(":")[2]
    assert replay(plugins, device, str(out), f"reference.{reference}").ok
    with pytest.raises(ConfigError, match="has no kernel 'none-such'"):
        replay(plugins, device, str(out), "none-such")


class WideHead(linear.ReferenceLinear):
    def gives_float32(self, rows: int, packed: Any) -> bool:
        return True


class WrongHead(WideHead):
    def apply_float32(self, x: torch.Tensor, packed: Any, out: Any = None) -> torch.Tensor:
        return super().apply_float32(x, packed, out) * 1.5


@pytest.mark.parametrize("head", [WideHead, WrongHead])
def test_logits_that_are_not_rounded_are_watched(
    head: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finding = find(planted(monkeypatch, "linear", head, "lm_head"), tmp_path / "case")
    if head is WideHead:
        assert finding.culprit is None
    else:
        assert finding.culprit is not None
        assert finding.culprit.kernel == "planted.WrongHead" and finding.where == "lm_head"


@pytest.mark.slow
def test_what_a_kernel_keeps_of_earlier_calls_is_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finding = find(planted(monkeypatch, "linear", Forgetful, "lm_head"), tmp_path / "case", 3)
    assert finding.culprit is not None and finding.where == "lm_head"
    assert not finding.alone
    assert "look at what it keeps" in search.render(finding, tmp_path / "case")


def test_every_kind_of_sample_survives_the_file(tmp_path: Path) -> None:
    """Saved and read, a case says the same of the reference as before."""
    plugins = load_plugins(())
    facts = facts_for(DeviceInfo("cpu", "host", "any"), "bfloat16")
    kinds = ("linear", "experts", "mla_decode", "cache_write", "cache_gather", "route")
    for kernel in plugins.offers(facts).kernels:
        if kernel.op.name not in kinds or kernel.numerics:
            continue
        cases = cases_for((kernel,), facts)
        if not cases:  # of another cache layout
            assert "fp8_groups" in str(kernel.refuse(facts))
            continue
        case = cases[1][1]
        case = replace(case, calls=tuple(c for c in case.calls if c.raises is None))
        path = tmp_path / kernel.op.name
        repro_case.save(repro_case.Capsule(kernel.op.name, kernel.name, case), path)
        back = repro_case.load(path).case
        before, after = check_case(kernel, case), check_case(kernel, back)
        assert before.ok and after == before, kernel.name


@pytest.mark.parametrize("content", [b"", b"{}", b"\x80\x04K\x01.", b"PK\x03\x04 not a zip"])
def test_a_file_that_is_no_case_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "case"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"is no case that ds-runtime bisect wrote \(\w+\)$"):
        repro_case.load(path)
    with pytest.raises(ConfigError, match=r"cannot be read: .*; give a case"):
        repro_case.load(tmp_path / "missing")


class Stranger:
    """What torch does not load, unless it is told to trust a file."""


@pytest.mark.parametrize(
    ("held", "says"),
    [
        (Stranger(), r"is no case that ds-runtime bisect wrote \(UnpicklingError\)$"),
        ([1], r"is no case that ds-runtime bisect wrote \(TypeError\)$"),
        ({"format": repro_case.FORMAT}, r"is no case that ds-runtime bisect wrote \(KeyError\)$"),
        ({"format": 99}, r"has format 99, and this runtime reads \d+: record it again"),
        ({"format": "x" * 99}, "has format unknown"),
    ],
    ids=("stranger", "list", "fields", "format", "text"),
)
def test_no_advice_to_trust_a_file_is_repeated(held: Any, says: str, tmp_path: Path) -> None:
    torch.save(held, tmp_path / "case")
    with pytest.raises(ConfigError, match=says) as caught:
        repro_case.load(tmp_path / "case")
    assert "weights_only" not in str(caught.value)
