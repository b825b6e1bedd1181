"""Adapters as models: listed, named by requests, loaded and unloaded while others are served."""

from __future__ import annotations

import threading
from functools import partial
from types import SimpleNamespace

import pytest
from server_harness import serving, until

from ds_runtime.description.adapter import LoraPlan
from ds_runtime.engine.engine import Engine
from ds_runtime.engine.process.loop import EngineLoop
from ds_runtime.engine.schedule.adapters import Adapters
from ds_runtime.errors import CheckpointError


@pytest.fixture
def adapting(bpe_folder):
    """A server with adapter `a` loaded."""
    with serving(bpe_folder) as one:
        assert load(one, "a").status_code == 200
        yield one


def load(served, name, path="/adapters/a", **headers):
    body = {"lora_name": name, "lora_path": path}
    return served.http.post("/v1/load_lora_adapter", json=body, headers=headers)


def unload(served, name):
    return served.post("/v1/unload_lora_adapter", lora_name=name)


def models(served):
    return [m["id"] for m in served.http.get("/v1/models").json()["data"]]


def error(reply, status, said):
    assert reply.status_code == status, reply.text
    found = reply.json()["error"]
    assert said in found["message"]
    return found


def test_every_route_takes_an_adapter_as_its_model(adapting):
    def adapter():
        return adapting.engine.submits[-1].adapter

    assert adapting.chat("[say so]", model="a").json()["model"] == "a"
    assert adapter() == "a"
    assert adapting.chat("[say so]", model="fake").json()["model"] == "fake"
    assert adapter() == ""
    reply = adapting.post("/v1/completions", model="a", prompt="[say so]", n=2)
    assert reply.json()["model"] == "a" and adapter() == "a"
    reply = adapting.post("/v1/responses", model="a", input="[say so]")
    assert reply.json()["model"] == "a" and adapter() == "a"
    messages = [{"role": "user", "content": "[say so]"}]
    reply = adapting.post("/v1/messages", model="a", max_tokens=9, messages=messages)
    assert reply.json()["model"] == "a" and adapter() == "a"
    assert adapting.post("/generate", text="[say so]", lora_path="a").status_code == 200
    assert adapter() == "a"
    assert adapting.post("/generate", text="[say so]").status_code == 200
    assert adapter() == ""


def test_each_prompt_may_have_an_adapter_of_its_own(adapting):
    assert load(adapting, "b").status_code == 200
    texts = ["[say so]", "[say it]", "[say on]"]
    reply = adapting.post("/generate", text=texts, lora_path=["b", None, "a"])
    assert [one["text"] for one in reply.json()] == ["so", "it", "on"]
    assert [submit.adapter for submit in adapting.engine.submits[-3:]] == ["b", "", "a"]
    box = []
    body = {"text": ["[go ab]", "[go cd]"], "lora_path": ["a", "b"], "rid": "two"}
    begun = adapting.engine.generated
    running = threading.Thread(target=lambda: box.append(adapting.post("/generate", **body)))
    running.start()
    until(lambda: adapting.engine.generated > begun + 3)
    leaving = threading.Thread(target=unload, args=(adapting, "b"))
    leaving.start()
    until(lambda: models(adapting) == ["fake", "a"])
    assert leaving.is_alive()
    unknown = adapting.post("/generate", text="x", lora_path="c"), unload(adapting, "c")
    adapting.post("/abort_request", rid="two")
    for thread in (running, leaving):
        thread.join(10)
    assert box[0].status_code == 200 and models(adapting) == ["fake", "a"]
    for reply, remedy in zip(unknown, (": name a", "; loaded are: a"), strict=True):
        said = error(reply, 400, "'c' is n")["message"]
        assert said.endswith(remedy), "what leaves is no remedy"


def test_models_are_listed_and_unknown_ones_refused(adapting):
    assert models(adapting) == ["fake", "a"]
    listed = adapting.http.get("/v1/models").json()["data"]
    assert [m.get("parent") for m in listed] == [None, "fake"]
    assert adapting.http.get("/v1/models/a").json() == listed[1]
    error(adapting.chat("[say so]", model="b"), 404, "model 'b' is not served here: use 'fake' or")
    reply = adapting.post("/generate", text="x", lora_path="b")
    assert error(reply, 400, "'b' is no loaded adapter: name a")["param"] == "lora_path"


def test_an_adapter_that_cannot_be_loaded_changes_nothing(adapting):
    found = error(load(adapting, "b", "/bad"), 400, "/bad: rank 3 found, 4 expected")
    assert found["param"] == "lora_path"
    error(load(adapting, "fake"), 400, "'fake' is the model's own name")
    error(unload(adapting, "b"), 400, "adapter 'b' is not loaded; loaded are: a")
    error(unload(adapting, "fake"), 400, "adapter 'fake' is not loaded")
    error(adapting.post("/v1/load_lora_adapter", lora_name="b"), 400, "lora_path")
    error(adapting.post("/v1/load_lora_adapter", lora_name=3, lora_path="x"), 400, "lora_name")
    assert models(adapting) == ["fake", "a"]
    assert adapting.chat("[say so]", model="a").status_code == 200


def really(served, num_slots):
    """Loading as engines have it, but for the weights."""

    def put(message):
        if "bad" in message.folder:
            raise CheckpointError(f"{message.folder}: rank 3 found, 4 expected")

    table = Adapters(LoraPlan(num_slots, 8, 8, frozenset(), ()), stamps=())
    engine = SimpleNamespace(adapters=table, leader=None, runner=SimpleNamespace(put_adapter=put))
    engine.load_adapter = partial(Engine.load_adapter, engine)
    served.engine.adapt = partial(
        EngineLoop._adapt, SimpleNamespace(engine=engine, emit=served.engine.send)
    )


def test_a_refusal_names_the_field_that_is_wrong(bpe_folder):
    with serving(bpe_folder) as served:
        really(served, num_slots=2)
        assert load(served, "a").status_code == 200
        for name, said in (
            ("b c", "must be 1 to 128 characters without spaces"),
            ("a", "'a' is loaded already, from /adapters/a"),
        ):
            assert error(load(served, name), 400, said)["param"] == "lora_name"
        found = error(load(served, "b", "/bad"), 400, "/bad: rank 3 found, 4 expected")
        assert found["param"] == "lora_path"
        assert load(served, "b").status_code == 200
        found = error(load(served, "c"), 400, "all 2 slots are in use (--max-loras), by a, b")
        assert found["param"] == "lora_name"
        assert models(served) == ["fake", "a", "b"]
    with serving(bpe_folder) as served:
        really(served, num_slots=0)
        found = error(load(served, "a"), 400, "start it with --max-loras N")
        assert found["param"] == "lora_name"


def test_unloading_waits_for_those_that_run_and_takes_no_more(adapting):
    assert load(adapting, "b").json() == {"lora_name": "b", "adapters": ["a", "b"]}
    box = []

    def run(target, *args, **more):
        thread = threading.Thread(target=lambda: box.append(target(*args, **more)))
        thread.start()
        return thread

    begun = adapting.engine.generated
    answer = run(adapting.chat, "[go ab]", model="a", rid="long")
    until(lambda: adapting.engine.generated > begun + 3)
    leaving = run(unload, adapting, "a")
    until(lambda: models(adapting) == ["fake", "b"])
    error(adapting.chat("[say so]", model="a"), 404, "is not served here")
    assert adapting.chat("[say so]", model="b").status_code == 200
    assert leaving.is_alive() and answer.is_alive()
    error(unload(adapting, "a"), 400, "adapter 'a' is being unloaded already")
    assert not [m for m in adapting.engine.adapts if m.folder is None]
    adapting.post("/abort_request", rid="long")
    for thread in (answer, leaving):
        thread.join(10)
    replies = {r.json().get("lora_name"): r for r in box}
    assert replies["a"].json() == {"lora_name": "a", "adapters": ["b"]}
    assert replies[None].json()["choices"][0]["message"]["content"].startswith("ab")
    assert load(adapting, "a").status_code == 200 and models(adapting) == ["fake", "b", "a"]


def test_the_routes_ask_for_the_key(bpe_folder):
    with serving(bpe_folder, api_key=("secret",)) as served:
        error(load(served, "a"), 401, "API key")
        error(unload(served, "a"), 401, "API key")
        assert not served.engine.adapts
        assert load(served, "a", Authorization="Bearer secret").status_code == 200
