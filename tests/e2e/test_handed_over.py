"""Two engines of one model: one computes a prompt, the other reads its pages and goes on."""

from __future__ import annotations

import os
import shutil
import signal
import time
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import httpx
import pytest
import torch
from served import serving

from ds_runtime.api import hookimpl
from ds_runtime.assembly.assemble import assemble
from ds_runtime.config import EngineConfig
from ds_runtime.description.hf import load_config
from ds_runtime.engine.device.runner import Runner
from ds_runtime.engine.engine import Engine
from ds_runtime.engine.messages import Submit
from ds_runtime.engine.process.loop import desk_of
from ds_runtime.kv.keys import Origin
from ds_runtime.kv.transfer.asked import HoldPages, PullPages
from ds_runtime.kv.transfer.desk import Desk
from ds_runtime.kv.transfer.host import HostTransfer
from ds_runtime.kv.transfer.leases import SOON
from ds_runtime.ops.contract import load_attr
from ds_runtime.parallel.group import SoloCommunicator
from ds_runtime.parallel.mesh import Mesh
from ds_runtime.parallel.world import World
from ds_runtime.sampling_params import SamplingParams
from ds_runtime_kit.models.adapters import write_adapter
from ds_runtime_kit.models.tiny import write_tiny

SETTINGS = {"platform": "cpu", "dtype": "float32", "kv_memory": 2_000_000, "threads": 1}
FLAGS = ("--dtype", "float32", "--kv-memory", "2MB", "--threads", "1", "--routes", "handing")
PROMPT = [n * 5 % 97 + 3 for n in range(70)]
SECONDS = 30.0


def made(model, address, plugins=(), **more):
    settings = {**SETTINGS, **more}
    assembly = assemble(EngineConfig(model=str(model), **settings), settings, plugins)
    engine = Engine(assembly, Runner(assembly, World(Mesh(), SoloCommunicator()), poison=True))
    return engine, desk_of(engine, f"ipc://{address}")


def asked(engine, **more):
    params, said, cached = SamplingParams(max_tokens=20, ignore_eos=True), [], 0
    assert engine.submit(Submit(rid="r", prompt=PROMPT, params=params, seed=0, **more)) is None
    while engine.has_work:
        for message in engine.step():
            said += message.tokens
            cached = message.cached_tokens
    return said, cached


def answered(desk, *others):
    """The next answer of a desk, the others coming by."""
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        for other in others:
            assert not other.poll()
        if found := desk.poll():
            (answer,) = found
            return answer
        time.sleep(0.001)
    raise AssertionError("no answer")


def exported(engine, pages):
    """Bytes of pages, of every layer of every group."""
    return [
        load_attr(laid.layout.export)(cache, torch.tensor(pages))
        for laid, layers in engine.runner.caches.groups
        for cache in layers.values()
    ]


@pytest.fixture(scope="module")
def sparse(tmp_path_factory):
    """One with two groups of caches: latents, and index keys."""
    write_tiny(folder := tmp_path_factory.mktemp("v32"), "v32", seed=11)
    return folder


@pytest.mark.parametrize(("model", "groups"), [("tiny", 1), ("sparse", 2)])
def test_pages_come_byte_for_byte_and_answers_are_the_same(model, groups, request, tmp_path):
    model = request.getfixturevalue(model)
    (first, there), (second, here) = made(model, tmp_path / "a"), made(model, tmp_path / "b")
    wanted, _ = asked(first)
    assert len(first.runner.caches.groups) == groups
    there.take(HoldPages(token="h", prompt=PROMPT))
    held = answered(there)
    assert there.counts["pages_held"] == 4 and not held.refused
    time.sleep(SOON)
    assert there.busy and there.turn == 50, "a lease that nobody reads yet lets its engine rest"
    here.take(PullPages(token="p", prompt=PROMPT, offer=held.offer))
    pulled = answered(here, there)
    assert (pulled.tokens, pulled.refused) == (64, "")
    pages = [e.scheduler.holdings.groups[0].prefix.find(PROMPT).pages for e in (first, second)]
    for mine, other in zip(exported(first, pages[0]), exported(second, pages[1]), strict=True):
        assert torch.equal(mine, other)
    assert asked(second) == (wanted, 64)
    there.poll()
    for engine, desk in ((first, there), (second, here)):
        stats = engine.stats()
        assert stats.pages_free + stats.pages_cached == stats.pages_total and not desk.busy
    assert there.counts == {
        "pages_held": 0,
        "pages_coming": 0,
        "pages_given": 4,
        "pages_pulled": 0,
    }
    assert here.counts["pages_pulled"] == 4
    for one in (there, here, first, second):
        one.close()


def test_pages_of_an_adapter_go_to_the_same_adapter(tiny, tmp_path):
    """Whatever its name there; the model's own, another adapter's and another salt's do not fit."""
    config = load_config(tiny)
    folders = [tmp_path / name for name in "ab"]
    for seed, folder in enumerate(folders):
        write_adapter(folder, config, lambda module: module.endswith("o_proj"), seed=seed, rank=4)
    (first, there), (second, here) = (
        made(tiny, tmp_path / end, max_loras=2, max_lora_rank=4, lora_target_modules=("o_proj",))
        for end in "xy"
    )
    first.load_adapter("one", str(folders[0]))
    for name, folder in zip(("other", "same"), reversed(folders), strict=True):
        second.load_adapter(name, str(folder))
    wanted, _ = asked(first, adapter="one", salt="s")
    there.take(HoldPages(token="h", prompt=PROMPT, adapter="one", salt="s"))
    offer = answered(there).offer
    for adapter, salt in (("", "s"), ("other", "s"), ("same", "")):
        here.take(PullPages(token="p", prompt=PROMPT, offer=offer, adapter=adapter, salt=salt))
        assert "of another prompt, model, adapter" in answered(here).refused
    here.take(PullPages(token="p", prompt=PROMPT, offer=offer, adapter="none", salt="s"))
    assert "'none' is not loaded" in answered(here).refused
    here.take(PullPages(token="p", prompt=PROMPT, offer=offer, adapter="same", salt="s"))
    assert answered(here, there).tokens == 64
    assert asked(second, adapter="same", salt="s") == (wanted, 64)
    assert asked(second, salt="s")[1] == asked(second, adapter="other", salt="s")[1] == 0
    for one in (there, here, first, second):
        one.close()


@pytest.mark.parametrize("which", ["model", "adapter at the start", "adapter"])
def test_files_that_changed_since_they_were_loaded_are_of_other_pages(tiny, tmp_path, which):
    """What runs is what was loaded: nobody can say any more what that was."""
    shutil.copytree(tiny, model := tmp_path / "model")
    write_adapter(tmp_path / "a", load_config(tiny), lambda m: m.endswith("o_proj"), rank=4)
    more = {"lora": (f"one={tmp_path / 'a'}",)} if which == "adapter at the start" else {}
    engine, desk = made(
        model, tmp_path / "x", max_loras=2, max_lora_rank=4, lora_target_modules=("o_proj",), **more
    )
    if which == "adapter":
        engine.load_adapter("one", str(tmp_path / "a"))
    adapter = "" if which == "model" else "one"
    asked(engine, adapter=adapter)
    file = (model if which == "model" else tmp_path / "a") / "new"
    target = next(f for f in file.parent.iterdir() if f.suffix == ".safetensors")
    shutil.copy(target, file)
    os.replace(file, target)
    desk.take(HoldPages(token="h", prompt=PROMPT, adapter=adapter))
    assert f"{target}: has changed since it was loaded" in answered(desk).refused
    for one in (desk, engine):
        one.close()


class Plugin(ModuleType):
    """Brings what moves pages: ends of one process."""

    def __init__(self, name, net, kind=HostTransfer) -> None:
        super().__init__(name)

        @hookimpl
        def ds_kv_transfer(config, origin):
            return kind(f"{name} {len(net)}", origin, net)

        self.ds_kv_transfer = ds_kv_transfer


class Breaks(HostTransfer):
    """Raises while it moves pages."""

    def _copy(self, other, read):
        raise OSError("the fabric is gone")


def test_a_plugins_transfer_that_raises_is_dropped(tiny, tmp_path, capfd):
    plugins = [Plugin("plugin_1", {}, Breaks)]
    (first, there), (second, here) = (made(tiny, tmp_path / "n", plugins) for _ in range(2))
    wanted, _ = asked(first)
    there.take(HoldPages(token="h", prompt=PROMPT, seconds=0.3))
    here.take(PullPages(token="p", prompt=PROMPT, offer=answered(there).offer))
    said = "the transfer of pages is dropped: it raised OSError: the fabric is gone"
    assert answered(here).refused == said and said in capfd.readouterr().err
    here.take(HoldPages(token="h", prompt=PROMPT))
    assert answered(here).refused == said
    assert asked(second) == (wanted, 0)
    end = time.monotonic() + SECONDS
    while there.busy and time.monotonic() < end:  # its reader left before its first word was heard
        there.poll()
    for engine in (first, second):
        stats = engine.stats()
        assert stats.pages_free + stats.pages_cached == stats.pages_total
    for one in (there, here, first, second):
        one.close()


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"kv_cache_dtype": "bfloat16"}, "of another prompt, model, adapter, layout, page size"),
        ({"page_size": 32}, "of another prompt, model, adapter, layout, page size"),
        ({"quantize": "int8", "dtype": "bfloat16"}, "of another prompt, model"),
        ({"disable_radix_cache": True}, "--disable-radix-cache keeps no pages"),
    ],
)
def test_engines_that_differ_exchange_nothing(tiny, tmp_path, other, said):
    (first, there), (second, here) = made(tiny, tmp_path / "a"), made(tiny, tmp_path / "b", **other)
    asked(first)
    there.take(HoldPages(token="h", prompt=PROMPT))
    here.take(PullPages(token="p", prompt=PROMPT, offer=answered(there).offer))
    answer = answered(here)
    assert said in answer.refused and answer.tokens == 0
    for one in (there, here, first, second):
        one.close()


@pytest.mark.parametrize("count", [1, 2])
def test_a_plugin_brings_what_moves_pages(tiny, tmp_path, count):
    net: dict = {}
    plugins = [Plugin(f"plugin_{n}", net) for n in range(count)]
    ends = [made(tiny, tmp_path / "never", plugins) for _ in range(2)]
    (first, there), (second, here) = ends
    wanted, _ = asked(first)
    there.take(HoldPages(token="h", prompt=PROMPT))
    held = answered(there)
    if count == 1:
        here.take(PullPages(token="p", prompt=PROMPT, offer=held.offer))
        assert answered(here, there).tokens == 64 and asked(second) == (wanted, 64)
        assert not (tmp_path / "never").exists() and len(net) == 2
    else:
        assert held.refused.startswith("plugins plugin_0, plugin_1 each move pages")
    for one in (there, here, first, second):
        one.close()


def test_ranks_of_several_are_refused(tiny, tmp_path):
    settings = {**SETTINGS, "tp": 2}
    assembly = assemble(EngineConfig(model=str(tiny), **settings), settings)
    desk = Desk(assembly, None, (), lambda name: None, f"ipc://{tmp_path}/a")
    desk.take(HoldPages(token="h", prompt=PROMPT))
    assert answered(desk).refused.startswith("--tp 2: engines of one rank alone")
    desk.close()


def test_the_origin_of_an_engine_says_all_that_its_pages_depend_on(tiny, tmp_path):
    """A copy of the checkpoint has the same one; other weights, settings or shares have others."""

    def origin(model=tiny, rank=0, **more):
        settings = {**SETTINGS, **more}
        return Origin.of(assemble(EngineConfig(model=str(model), **settings), settings), rank)

    shutil.copytree(tiny, copy := tmp_path / "copy")
    own = origin()
    assert own == origin(copy) == origin(rank=1, tp=2)
    config = copy / "config.json"
    config.write_text(config.read_text().replace('"rope_theta": ', '"rope_theta": 1'))
    heads = {"disable_mla": True}
    others = [
        origin(copy),
        origin(page_size=32),
        origin(dtype="bfloat16"),
        origin(kv_cache_dtype="bfloat16"),
        origin(load_format="dummy"),
        origin(**heads),
        origin(tp=2, **heads),
        origin(rank=1, tp=2, **heads),
        replace(own, adapter="a"),
    ]
    assert len({one.root() for one in (own, *others)}) == len(others) + 1
    model = load_config(tiny)
    page = 16 * (model.kv_lora + model.qk_rope) * 4
    assert own.layouts == (("kv", f"latent_pages.v1 {page} [0, 1, 2]"),) and own.shard == (0, 1)


def test_caches_with_other_pages_have_another_origin(tiny, monkeypatch):
    """Layouts with one tag, whose pages are of other sizes, or of other layers."""
    settings = {**SETTINGS, "platform": "cpu", "dtype": "float32"}
    made = assemble(EngineConfig(model=str(tiny), **settings), settings)
    (own,) = made.caches
    width = own.layout.bytes_per_token(own.facts)
    caches = [
        (own,),
        *(
            (replace(own, layout=replace(own.layout, bytes_per_token=lambda _, n=n: n)),)
            for n in (width - 4, width + 4, 2 * width)
        ),
        (replace(own, group=replace(own.group, layers=own.group.layers[:-1])),),
        (replace(own, group=replace(own.group, layers=(*own.group.layers[:-1], 7))),),
        (own, replace(own, group=replace(own.group, name="another"))),
    ]
    roots = set()
    for some in caches:
        monkeypatch.setattr(type(made), "caches", property(lambda _, some=some: some))
        roots.add(Origin.of(made).root())
    assert len(roots) == len(caches)


def test_rows_with_bits_of_their_own_have_an_origin_of_their_own(tiny, monkeypatch):
    """Whatever changes the bits that --batch-invariant promises of a page; without it a peer may
    compute in another way."""

    def assembled(**more):
        settings = {**SETTINGS, "platform": "cpu", "dtype": "float32", **more}
        return assemble(EngineConfig(model=str(tiny), **settings), settings)

    made = assembled(batch_invariant=True)
    own, (first, *rest) = Origin.of(made), made.binding.decisions
    assert own == Origin.of(assembled(batch_invariant=True, max_running_requests=3))
    decided = [
        replace(made.binding, decisions=(replace(first, **changed), *rest))
        for changed in ({"kernel": "another.one"}, {"converts": "fp8 → dense"})
    ]
    others = [
        assembled(),
        assembled(batch_invariant=True, tp=2),
        assembled(batch_invariant=True, tp=2, dp=2, enable_dp_attention=True),
        *(replace(made, binding=binding) for binding in decided),
        *(
            replace(made, device=replace(made.device, **changed))
            for changed in ({"arch": "another"}, {"cores": 999}, {"name": "another"})
        ),
    ]
    roots = {Origin.of(one).root() for one in (made, *others)}
    assert len(roots) == len(others) + 1
    with monkeypatch.context() as patch:
        patch.setattr("ds_runtime.assembly.result.installed", lambda name: "0.0.of-another")
        roots.add(Origin.of(replace(made)).root())
    assert len(roots) == len(others) + 2
    plain = assembled()
    assert Origin.of(plain) == Origin.of(replace(plain, device=others[5].device))
    assert not Origin.of(plain).computed


# ---- whole servers ----

PLUGIN = '''
"""Hands pages over by HTTP, as a router of tests wants it."""

import uuid

from fastapi import Request

from ds_runtime.api import hookimpl
from ds_runtime.kv.keys import Origin
from ds_runtime.kv.transfer.asked import HoldPages, PullPages


@hookimpl
def ds_routes(app, engine):
    @app.post("/hold")
    async def hold(request: Request):
        body = await request.json()
        client = engine._service.client.clients[0]
        return {"offer": (await client.hold(HoldPages(token=uuid.uuid4().hex, **body))).hex()}

    @app.post("/pull")
    async def pull(request: Request):
        body = await request.json()
        body["offer"] = bytes.fromhex(body["offer"])
        client = engine._service.client.clients[0]
        return {"tokens": await client.pull(PullPages(token=uuid.uuid4().hex, **body))}
'''


class Server:
    def __init__(self, served) -> None:
        self.served, url = served, served.wait_url()
        self.http = httpx.Client(base_url=url, timeout=60)

    def post(self, path, **body):
        return self.http.post(path, json=body)

    def asked(self) -> tuple[str, int]:
        found = self.post("/v1/completions", prompt=PROMPT, max_tokens=20, temperature=0).json()
        usage = found["usage"].get("prompt_tokens_details") or {}
        return found["choices"][0]["text"], usage.get("cached_tokens", 0)

    def offer(self, seconds=30.0) -> str:
        return self.post("/hold", prompt=PROMPT, seconds=seconds).json()["offer"]

    def pull(self, offer):
        return self.post("/pull", prompt=PROMPT, offer=offer)

    def engine(self) -> int:
        return self.served.ranks()[0].pid

    def rests(self, seconds=15.0) -> dict:
        """What /server_info has once free = total − tree; nothing else holds a page then."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            stats = self.http.get("/server_info").json()["stats"]
            held = stats["pages_held"] + stats["pages_coming"]
            if not held and stats["pages_free"] == stats["pages_total"] - stats["pages_cached"]:
                return stats
            time.sleep(0.05)
        raise AssertionError(f"pages leak: {stats}")

    def comes_back(self) -> None:
        """Its engine has died, and another one is there."""
        self.served.wait("SIGKILL.*restart 1 of 3")
        self.served.wait_url()


@contextmanager
def servers(tiny, folder: Path, count=2):
    site = folder / "site"
    info = site / "handing-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: handing\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[ds_runtime]\nhanding = handing\n")
    (site / "handing.py").write_text(PLUGIN)
    with pytest.MonkeyPatch.context() as patch, ExitStack() as opened:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")]))
        served = [opened.enter_context(serving(tiny, *FLAGS)) for _ in range(count)]
        made = [Server(one) for one in served]
        for one in made:
            opened.enter_context(one.http)
        yield made


def test_two_servers_hand_a_prompt_over(tiny, tmp_path):
    with servers(tiny, tmp_path) as (there, here):
        wanted, _ = there.asked()
        assert here.pull(there.offer()).json() == {"tokens": 64}
        assert here.asked() == (wanted, 64)
        assert there.rests()["pages_given"] == 4 and here.rests()["pages_pulled"] == 4
        refused = here.pull(there.offer()[:-2])
        assert refused.status_code == 400 and "no offer" in refused.json()["error"]["message"]
        late = there.offer(seconds=0.1)
        there.rests(), time.sleep(2)  # the engine has had nothing to do for long
        begin = time.monotonic()
        assert "holds these pages no more" in here.pull(late).text
        assert time.monotonic() - begin < 30  # of the 60 that a client waits here
        assert "no page of this prompt" in there.post("/hold", prompt=[1] * 40).text
        assert "ds_runtime_kv_pages_given_total" in there.http.get("/metrics").text


@pytest.mark.slow
@pytest.mark.parametrize("when", ["offered", "read", "done"])
@pytest.mark.parametrize("who", ["here", "there"])
def test_no_page_leaks_when_either_side_is_killed(tiny, tmp_path, when, who):
    with servers(tiny, tmp_path) as (there, here):
        dies(there, here, there.asked()[0], when, who)


def dies(there, here, wanted, when, who):
    """An engine is killed; the other serves on with all its pages, and both hand over again."""
    gone, other = (there, here) if who == "there" else (here, there)
    offer = there.offer(seconds=2.0)
    if when == "done":
        assert here.pull(offer).json() == {"tokens": 64}
    if when == "read":  # the one that is to die stops in the middle
        os.kill(gone.engine(), signal.SIGSTOP)
        with pytest.raises(httpx.ReadTimeout):
            here.http.post("/pull", json={"prompt": PROMPT, "offer": offer}, timeout=0.5)
        os.kill(gone.engine(), signal.SIGKILL)
    else:
        os.kill(gone.engine(), signal.SIGKILL)
    gone.comes_back()
    other.rests()
    there.asked()
    assert here.pull(there.offer()).json() == {"tokens": 64}
    assert here.asked() == (wanted, 64)
    gone.rests()
    other.rests()
