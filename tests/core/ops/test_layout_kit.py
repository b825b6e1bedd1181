"""The kit over cache layouts: those of the tree conform, and each kind of mistake is named."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from ds_runtime.ops.contract import DeviceInfo, Facts
from ds_runtime.ops.kernel import Layout
from ds_runtime.ops.reference.layouts import LATENT_PAGES
from ds_runtime.plugins.manager import load_plugins
from ds_runtime_kit.checks.conformance import facts_for
from ds_runtime_kit.conform import LAYOUT, Wanted, verdicts
from ds_runtime_kit.layouts import QUESTIONS, check_layout, layouts_of

CPU = DeviceInfo("cpu", "a CPU", "x86")
WIDTH = 3


def test_the_layouts_of_the_tree_conform():
    plugins = load_plugins()
    every = plugins.offers(facts_for(CPU, "bfloat16")).layouts
    assert len(every) >= 4
    for layout in every:
        results = check_layout(layout, CPU)
        assert {r.check for r in results} == set(QUESTIONS), f"{layout.tag} is asked nothing"
        for result in results:
            result.raise_if_failed()


def test_blocks_are_pages_and_states():
    cases = {r.case for r in check_layout(LATENT_PAGES, CPU)}
    assert any("per 4 tokens" in case for case in cases)
    assert any("to take back" in case for case in cases)


def test_a_layout_is_asked_of_the_sizes_that_it_takes():
    cases = {r.case for r in check_layout(replace(LATENT_PAGES, page_sizes=(8, 7)), CPU)}
    assert cases == {"blocks of 8", "blocks of 7", "pages of one entry per 4 tokens"}


def good(blocks: int, facts: Facts, device: torch.device) -> torch.Tensor:
    return torch.zeros(blocks, facts.page_size, WIDTH, device=device)


def entries_first(blocks: int, facts: Facts, device: torch.device) -> torch.Tensor:
    return torch.zeros(facts.page_size, blocks, WIDTH, device=device)


def one_more(blocks: int, facts: Facts, device: torch.device) -> torch.Tensor:
    return torch.zeros(blocks, facts.page_size + 1, WIDTH, device=device)


def copies_one(cache, sources, targets) -> None:
    cache[targets[0]] = cache[sources[0]]


def copies_back(cache, sources, targets) -> None:
    cache[sources] = cache[targets]


def copies_half(cache, sources, targets) -> None:
    half = cache.shape[1] // 2
    cache[targets, :half] = cache[sources, :half]


def copies_all(cache, sources, targets) -> None:
    cache[:] = cache[sources[0]].clone()


def exports_one(cache, blocks):
    return cache[blocks[:1]].view(torch.uint8).flatten(1)


def exports_next(cache, blocks):
    return cache[(blocks + 1) % len(cache)].view(torch.uint8).flatten(1)


def restores_all(cache, blocks, exported) -> None:
    cache[:] = exported[:1].view(cache.dtype).view(1, *cache.shape[1:])


def raises(*args: object) -> None:
    raise RuntimeError("no such copy")


def own(allocate=good, **said) -> Layout:
    return Layout("own", 1, f"{__name__}:{allocate.__name__}", lambda facts: 4 * WIDTH, **said)


@pytest.mark.parametrize(
    ("layout", "check", "said"),
    [
        (own(entries_first), "blocks", "they lie along the first dim"),
        (own(one_more), "bytes", "bytes, it says"),
        (own(copy=f"{__name__}:copies_one"), "copies", "leaves [0] wrong"),
        (own(copy=f"{__name__}:copies_half"), "copies", "changes 192 bytes, a block has 384"),
        (own(copy=f"{__name__}:copies_all"), "copies", "changes 1536 bytes, a block has 384"),
        (own(copy=f"{__name__}:copies_back"), "copies", "] wrong"),
        (own(copy=f"{__name__}:raises"), "copies", "no such copy"),
        (own(export=f"{__name__}:exports_one"), "exports", "[1, 384] of 2 blocks of 384 bytes"),
        (own(export=f"{__name__}:exports_next"), "exports", "are others"),
        (own(restore=f"{__name__}:restores_all"), "exports", "are others"),
    ],
)
def test_a_mistake_is_named(layout, check, said):
    assert all(r.ok for r in check_layout(own(), CPU))
    wrong = [r for r in check_layout(layout, CPU) if not r.ok]
    assert any(r.check == check and said in r.failure for r in wrong)


def test_conform_asks_layouts():
    plugins = load_plugins()
    found = list(verdicts(plugins, CPU, "reference", Wanted((LAYOUT,))))
    offers = plugins.offers(facts_for(CPU, "float32"))
    assert [v.name for v in found] == [x.tag for x in layouts_of(offers, ["reference"])] != []
    for verdict in found:
        entry = verdict.to_dict()
        assert entry["op"] == LAYOUT and entry["checks"].keys() == QUESTIONS.keys()
        assert not entry["failures"] and not entry["skipped"]


def test_the_layout_of_the_documents_conforms(monkeypatch):
    page = (Path(__file__).parents[3] / "docs" / "cache-groups.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.S)
    module = ModuleType("ds_runtime_acme.cache")
    exec(compile(code, "cache-groups.md", "exec"), vars(module))
    monkeypatch.setitem(sys.modules, "ds_runtime_acme", ModuleType("ds_runtime_acme"))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    results = check_layout(module.PAIRS, CPU)
    assert {r.case for r in results} == {"blocks of 16", "blocks of 64"}
    assert all(r.ok for r in results)
