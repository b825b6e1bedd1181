"""A plugin's routes generate through the engine that they are given."""

from __future__ import annotations

import re
from contextlib import aclosing
from pathlib import Path

import pytest
from server_harness import serving

from ds_runtime.api import SamplingParams
from ds_runtime.server.engines.plugin_routes import ServedEngine

PAGE = Path(__file__).parents[3] / "docs" / "writing-a-plugin.md"
LONG = SamplingParams(max_tokens=200)


def error(response, status):
    assert response.status_code == status, response.text
    return response.json()["error"]


@pytest.fixture(scope="module")
def served(bpe_folder):
    """With the route that the page shows, and some more."""
    (shown,) = re.findall(r"```python\n(from contextlib.*?)```", PAGE.read_text(), re.DOTALL)
    page = {"__name__": "acme"}
    exec(compile(shown, "acme", "exec", dont_inherit=True), page)

    def routes(app):
        engine = ServedEngine(app.state.service)
        page["ds_routes"](app, engine)

        @app.post("/pieces")
        async def pieces(body: dict):
            params = SamplingParams(**body.get("params", {"max_tokens": 200}))
            given = {k: v for k, v in body.items() if k not in ("params", "leave")}
            found = []
            async with aclosing(engine.generate(params=params, **given)) as made:
                async for piece in made:
                    found.append(piece._asdict())
                    if body.get("leave"):
                        break
            return found

        @app.get("/about")
        async def about():
            ids = engine.encode("[say ok]")
            return [engine.ready, engine.model, engine.decode(ids)]

    with serving(bpe_folder, routes_of=routes) as served:
        yield served


def test_the_route_of_the_page_answers(served):
    assert served.http.get("/complete", params={"text": "[say ok]"}).json() == {"text": "ok"}


def test_pieces_have_text_tokens_and_an_end(served):
    for prompt in ("[say one two]", served.tokenizer.encode("[say one two]")):
        pieces = served.post("/pieces", prompt=prompt).json()
        assert "".join(p["text"] for p in pieces) == "one two"
        assert [p["finish_reason"] for p in pieces][-1] == "stop"
        assert not any(p["finish_reason"] for p in pieces[:-1])
        ids = [t for p in pieces for t in p["tokens"]]
        assert served.tokenizer.decode(ids) == "one two"


def test_it_ends_at_its_limit_and_at_a_stop_string(served):
    pieces = served.post("/pieces", prompt="[go ab]", params={"max_tokens": 5}).json()
    assert pieces[-1]["finish_reason"] == "length"
    assert sum(len(p["tokens"]) for p in pieces) == 5
    stop = {"max_tokens": 200, "stop": ["tw"]}
    pieces = served.post("/pieces", prompt="[say one two]", params=stop).json()
    assert "".join(p["text"] for p in pieces) == "one "


def test_a_route_that_leaves_ends_the_request(served):
    before = len(served.engine.aborted)
    params = {"max_tokens": 2000}
    assert len(served.post("/pieces", prompt="[go ab]", leave=True, params=params).json()) == 1
    assert len(served.wait_aborted(before + 1)) == before + 1


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"prompt": []}, "prompt", "the prompt is empty"),
        ({"prompt": [1, 99999]}, "prompt", "holds token id 99999: the vocabulary's ids are 0 to"),
        ({"prompt": "a" * 99999}, "prompt", "the context holds 4096"),
        ({"prompt": "a", "params": {"n": 2}}, "n", "generate makes one answer"),
        ({"prompt": "a", "params": {"max_tokens": 5000}}, "max_tokens", "ask for at most"),
        ({"prompt": "a", "params": {"stop_token_ids": [4000]}}, "stop_token_ids", "4000"),
        ({"prompt": "a", "adapter": "x"}, "adapter", "'x' is not loaded; loaded: none"),
        ({"prompt": "[invalid x]"}, "seed", ""),
    ],
)
def test_bad_input_is_a_400_and_the_server_goes_on(served, body, param, says):
    found = error(served.post("/pieces", **body), 400)
    assert found["param"] == param and says in found["message"]
    assert served.http.get("/complete", params={"text": "[say ok]"}).json() == {"text": "ok"}


def test_a_full_queue_is_a_503(served):
    assert served.post("/pieces", prompt="[full x]").status_code == 503


def test_its_requests_count(served):
    def counted():
        text = served.http.get("/metrics").text
        return float(
            re.search(r'request_success_total\{.*?finished_reason="stop".*?\} (\S+)', text)[1]
        )

    served.http.get("/complete", params={"text": "[say ok]"})
    before = counted()
    served.http.get("/complete", params={"text": "[say ok]"})
    assert counted() == before + 1


def test_it_tells_about_the_model(served):
    assert served.http.get("/about").json() == [True, "fake", "[say ok]"]
