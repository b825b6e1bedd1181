"""Rules of assembly: what each changes and why, and that they are applied until none fires."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
from faulty import tiny_config

from ds_runtime.assembly import assemble as assembling
from ds_runtime.assembly import rules
from ds_runtime.assembly.assemble import assemble
from ds_runtime.assembly.result import Assembly, Ruling
from ds_runtime.assembly.rules import RULES, Draft, Fired, Terms
from ds_runtime.cli import main
from ds_runtime.config import EngineConfig
from ds_runtime_kit.models.tiny import write_tiny

PINNED = "not safe under graph capture: experts (reference.ReferenceExperts)"
NEXTN = {"speculative_algorithm": "NEXTN"}
WIDE = {**NEXTN, "pin": ("linear=triton.linear_dense",)}


def settled(device: str | None = None, **given: object) -> Assembly:
    given = {**given} if device else {"platform": "cpu", **given}
    return assemble(EngineConfig(**given), tuple(given), device=device)  # type: ignore[arg-type]


def said(assembly: Assembly) -> dict[str, str]:
    return {ruling.rule: ruling.why for ruling in assembly.rulings}


@pytest.mark.parametrize(
    ("rule", "device", "given", "why"),
    [
        ("uncaptured", "h100", {"pin": ("experts=reference",)}, PINNED),
        (
            "widening",
            "sm90",
            WIDE,
            "triton.linear_dense would hold the copy of the head in bfloat16",
        ),
        ("index_keys", None, {"model": "demo-v32", "pin": ("mla_inputs=reference",)}, "makes no"),
        ("crowded", "h100", {"memory_for_speed": "off"}, "--memory-for-speed off"),
        ("requests", "h100", {}, "decodes hundreds of requests in little more time"),
    ],
)
def test_a_rule_says_what_it_changed_and_why(
    rule: str, device: str | None, given: dict[str, object], why: str
) -> None:
    found = settled(device, **given)
    assert why in said(found)[rule]
    assert [r.rule for r in found.rulings].count(rule) == 1
    fields = {"uncaptured": "disable_graph", "requests": "max_running_requests"}
    if rule in fields:
        assert [c[3] for c in found.changes if c[0] == fields[rule]] == [said(found)[rule]]


def test_the_compact_rule_fires_where_weights_would_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny(tmp_path, "v3")
    (tmp_path / "model.safetensors").unlink()
    path = tmp_path / "config.json"
    blocks = {"quant_method": "blockwise_int8", "weight_block_size": [128, 128]}
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": blocks}))
    given = {"model": str(tmp_path), "dtype": "float32"}
    assert "compact" not in said(settled(**given))
    device, small = assembling._device, partial(replace, memory=1)
    monkeypatch.setattr(assembling, "_device", lambda *args: small(device(*args)))
    assert "weights would take" in said(settled(**given))["compact"]


def test_rules_are_asked_from_the_first_until_none_fires(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, drafts = list[str](), list[Terms]()
    assembly = settled()

    def rule(name: str, crowded: str) -> object:
        def fires(draft: Draft) -> Fired | None:
            asked.append(name)
            there = draft.terms.crowded
            if crowded in there or (name == "second" and "one" not in there):
                return None
            return {"crowded": there | {crowded}}, Ruling(name, crowded)

        return fires

    def decide(terms: Terms) -> Assembly:
        drafts.append(terms)
        return assembly

    monkeypatch.setattr(rules, "RULES", (rule("second", "two"), rule("first", "one")))
    found = rules.settle(Terms(False, False, frozenset()), decide)
    assert [r.rule for r in found.rulings] == ["first", "second"]
    assert asked == ["second", "first", "second", "second", "first"]
    assert drafts[0].crowded == {"one", "two"}


@pytest.mark.parametrize("device", ["h100", "b200", "mi300x", "910b", "sm90"])
@pytest.mark.parametrize("given", [{}, NEXTN, {"max_running_requests": 8}])
def test_nothing_fires_on_what_they_agree_on(
    device: str, given: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And every rule that fired moved to terms that were not tried before."""
    tried = list[Terms]()
    last = RULES[-1]

    def watching(draft: Draft) -> Fired | None:
        fired = last(draft)
        if fired is None:
            assert not any(rule(draft) for rule in RULES)
        return fired

    def init(self: Draft, terms: Terms, decide: rules.Decide) -> None:
        tried.append(terms)
        self.terms, self.decide = terms, decide

    monkeypatch.setattr(rules, "RULES", (*RULES[:-1], watching))
    monkeypatch.setattr(Draft, "__init__", init)
    found = settled(device, **given)
    steps = tried[: len(found.rulings) + 1]
    assert all(one != other for one, other in pairwise(steps)) and len(set(steps)) == len(steps)


def test_every_rule_says_what_it_is_for() -> None:
    assert all(rule.__doc__ for rule in RULES)


def test_explain_shows_what_was_decided_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_config(tmp_path)
    plan = ["plan", "--model", str(model), "--device", "h100", "--pin", "experts=reference"]
    assert main([*plan, "--explain", "experts"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"decided again by rule uncaptured: {PINNED}" in lines
    assert main([*plan, "--explain", "experts", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rules"]
    assert rows[0] == {"rule": "uncaptured", "why": PINNED}
    assert [row["rule"] for row in rows] == ["uncaptured", "requests"]
