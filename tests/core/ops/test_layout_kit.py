"""The kit over cache layouts: those of the tree conform, and each kind of mistake is named."""

from __future__ import annotations

import re
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from ds_runtime.ops.contract import DeviceInfo, Facts
from ds_runtime.ops.kernel import Layout
from ds_runtime.ops.reference.layouts import LATENT_PAGES
from ds_runtime.ops.table import OPS
from ds_runtime.platform.page_copies import LayerBlocks, TorchPageCopies
from ds_runtime.plugins.manager import load_plugins
from ds_runtime.testing import fake
from ds_runtime_kit.checks.conformance import facts_for
from ds_runtime_kit.conform import LAYOUT, Wanted, verdicts
from ds_runtime_kit.layouts import QUESTIONS, check_layout, layouts_of
from peak import peak

CPU = DeviceInfo("cpu", "a CPU", "x86")
FACTS = Facts(CPU, {}, page_size=4)
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
        (own(entries_first), "blocks", "the first dim counts blocks"),
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


class Swaps(TorchPageCopies):
    """Takes one layer for the other."""

    def load(self, layers):
        hosts = [one.host for one in layers]
        return super().load(
            [one._replace(host=h) for one, h in zip(layers, hosts[::-1], strict=True)]
        )


class SavesLate(TorchPageCopies):
    """Nothing of it is there when it says so."""

    def save(self, layers):
        return super().save([one._replace(host=one.host.clone()) for one in layers])


class LoadsMore(TorchPageCopies):
    def load(self, layers):
        for one in layers:
            one.cache[4] = one.cache[0]
        return super().load(layers)


class Device(TorchPageCopies):
    def buffer(self, blocks, size):
        return torch.empty(blocks, size, dtype=torch.uint8, device="meta")


@pytest.mark.parametrize(
    ("copies", "said"),
    [
        (Swaps, "layer 0: blocks 3 and 0, saved and loaded as 1 and 2, are others"),
        (SavesLate, "are others"),
        (LoadsMore, "are others"),
        (Device, "on meta, not host memory"),
    ],
)
def test_a_mistake_of_a_platforms_copies_is_named(copies, said):
    made = copies(torch.device("cpu"))
    wrong = [r for r in check_layout(own(), CPU, ("host",), made) if not r.ok]
    assert wrong and all(r.check == "host" and said in r.failure for r in wrong)


class Main:
    def __init__(self, streams: Streams) -> None:
        self._streams = streams

    def __str__(self) -> str:
        return "main"

    def wait_event(self, event) -> None:
        self._streams.done.append(f"main waits for {event.name}")


class Streams:
    """torch's module of a device that has streams: what is queued, in order."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def Stream(self, device):
        return SimpleNamespace(
            wait_stream=lambda other: self.done.append(f"side waits for {other}")
        )

    def current_stream(self, device):
        return Main(self)

    def stream(self, side):
        return nullcontext(self.done.append("on the side"))

    def Event(self):
        number = sum("record" in done for done in self.done)
        one = SimpleNamespace(name=f"event {number}", query=lambda: True)
        one.record = lambda stream: self.done.append(f"record {one.name}")
        one.synchronize = lambda: self.done.append(f"host waits for {one.name}")
        return one


def test_copies_run_beside_and_in_order():
    """They begin behind what was queued, each layer has an event of its own, and only who asks
    waits."""
    copies, streams = TorchPageCopies(torch.device("cpu")), Streams()
    copies._runtime, copies._stream = streams, streams.Stream(None)
    copies._numbers = torch.tensor  # nothing is page-locked here
    caches = [good(4, FACTS, torch.device("cpu")) for _ in range(3)]
    host = torch.zeros(1, 4 * WIDTH * 4, dtype=torch.uint8)
    queued = copies.load([LayerBlocks(c, own(), (1,), host) for c in caches])
    begun = ["side waits for main", "on the side", "record event 0", "record event 1"]
    assert streams.done == [*begun, "record event 2"]
    assert queued.ended(1)
    queued.wait(1)
    assert streams.done[-1] == "main waits for event 1"
    queued.finish()
    assert streams.done[-1] == "host waits for event 2"


@pytest.mark.parametrize("layers", [1, 4, 32])
def test_copies_under_way_hold_the_blocks_of_one_layer(layers):
    """Besides the caches and host memory, however many layers are queued."""
    copies, streams = TorchPageCopies(torch.device("cpu")), Streams()
    copies._runtime, copies._stream = streams, streams.Stream(None)
    copies._numbers = torch.tensor
    size = 1000 * 4 * WIDTH * 4
    cache = good(1000, FACTS, torch.device("cpu"))
    host = torch.zeros(1000, size // 1000, dtype=torch.uint8)
    under_way = []
    blocks = [LayerBlocks(cache, own(), range(1000), host)] * layers
    took = peak(lambda: under_way.append(copies.save(blocks)))
    assert size <= took < 2 * size + layers * 1000 * 8


def test_conform_asks_layouts():
    plugins = load_plugins()
    found = list(verdicts(plugins, CPU, "reference", Wanted((LAYOUT,))))
    offers = plugins.offers(facts_for(CPU, "float32"))
    assert [v.name for v in found] == [x.tag for x in layouts_of(offers, ["reference"])] != []
    for verdict in found:
        entry = verdict.to_dict()
        assert entry["op"] == LAYOUT and entry["checks"].keys() == QUESTIONS.keys()
        assert not entry["failures"] and not entry["skipped"]


@pytest.mark.parametrize(
    ("model", "row", "more"),
    [
        ("demo", "DeepSeek-V2 to V3.1", ()),
        ("demo-v32", "DeepSeek-V3.2", ()),
        ("demo-v4", "DeepSeek-V4", ()),
        ("demo", "trees of drafts", ("EAGLE", 3, 2, 6)),
    ],
)
def test_the_documents_name_the_cache_ops_of_a_model(model, row, more):
    """Fusions that are composed are left out: their parts are named."""
    page = (Path(__file__).parents[3] / "docs" / "writing-a-plugin.md").read_text(encoding="utf-8")
    said = [line for line in page.splitlines() if line.startswith(f"| {row} |")]
    named = {op for op in re.findall(r"`(\w+)`", said[0]) if op in OPS}
    names = ("algorithm", "num_steps", "eagle_topk", "num_draft_tokens")
    drafts = {f"speculative_{n}": v for n, v in zip(names, more, strict=False)}
    base = {r.op for r in fake.plan(model, "xeon-6980p").plan.rows} if more else set()
    rows = {r.op for r in fake.plan(model, "xeon-6980p", **drafts).plan.rows} - base
    needed = {op for op in rows if OPS[op].layout == "kv" and not OPS[op].optional}
    if "mla_prologue" in needed:
        needed.add("cache_write")
    assert len(said) == 1 and named == needed


def test_the_layout_of_the_documents_conforms(monkeypatch):
    page = (Path(__file__).parents[3] / "docs" / "cache-groups.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.S)
    layouts, cache = (ModuleType(f"ds_runtime_acme.{name}") for name in ("layouts", "cache"))
    monkeypatch.setitem(sys.modules, "ds_runtime_acme", ModuleType("ds_runtime_acme"))
    for code, module in zip(blocks, (layouts, cache), strict=True):
        exec(compile(code, "cache-groups.md", "exec"), vars(module))
        monkeypatch.setitem(sys.modules, module.__name__, module)
    assert "torch" not in vars(layouts), "an offer imports no torch"
    results = check_layout(layouts.PAIRS, CPU)
    assert {r.case for r in results} == {"blocks of 16", "blocks of 64"}
    assert all(r.ok for r in results)
