"""What /openapi.json says of statuses: each of them comes, and no other stands there."""

from __future__ import annotations

import ast
import time
from pathlib import Path

import pytest
from server_harness import serving

import ds_runtime.server
from ds_runtime.server.http import bodies
from ds_runtime.server.http.guard import OPEN_PATHS
from ds_runtime.server.http.statuses import MEANING, TABLE, statuses

KEY = {"x-api-key": "secret"}
CHAT = {"messages": [{"role": "user", "content": "[say on]"}]}
GOOD = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "[say on]"},
    "/v1/responses": {"input": "[say on]"},
    "/v1/responses/input_tokens": {"input": "on"},
    "/v1/messages": CHAT | {"max_tokens": 8},
    "/v1/messages/count_tokens": CHAT,
    "/generate": {"text": "[say on]"},
    "/tokenize": {"prompt": "on"},
    "/detokenize": {"tokens": [70]},
    "/abort_request": {"abort_all": True},
    "/v1/load_lora_adapter": {"lora_name": "x", "lora_path": "/nowhere"},
    "/v1/unload_lora_adapter": {"lora_name": "x"},
}


@pytest.fixture(scope="module")
def guarded(bpe_folder):
    own = {"api_key": ("secret",), "max_body": 4096, "allowed_hosts": ("localhost",)}
    with serving(bpe_folder, **own) as one:
        yield one


@pytest.fixture(scope="module")
def starting(bpe_folder):
    more = {"api_key": ("secret",), "profile_dir": str(bpe_folder)}
    with serving(bpe_folder, ready=False, **more) as one:
        yield one


@pytest.fixture(scope="module")
def document(guarded):
    return guarded.http.get("/openapi.json", headers=KEY).json()


def told(document):
    return {
        (method, path): {int(s) for s in operation["responses"]}
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    }


def test_the_table_has_every_route_and_says_what_the_document_says(document):
    found = told(document)
    assert set(found) == set(TABLE)
    for (method, path), said in found.items():
        operation = document["paths"][path][method]
        asks = path not in OPEN_PATHS
        assert said == {200, *statuses(method, path, path in GOOD, asks)}
        assert ("security" in operation) is asks
        assert ("requestBody" in operation) is (path in GOOD)


def test_every_status_that_the_code_gives_has_a_meaning():
    """But 499, which nobody reads."""
    found = set()
    for file in Path(ds_runtime.server.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "ApiError":
                first = node.args[0] if node.args else None
                if isinstance(first, ast.Constant):
                    found.add(first.value)
    assert found - {499} == set(MEANING)


def called(server, method, path, **more):
    path = path.replace("{response_id}", "resp_0").replace("{name}", "nobody")
    json = {"content-type": "application/json"} if "content" in more else {}
    return server.http.request(method, path, **{"headers": KEY | json, **more})


@pytest.mark.parametrize(("method", "path"), TABLE)
def test_each_status_comes(guarded, starting, document, monkeypatch, method, path):
    said, came = told(document)[method, path], {}
    if path not in OPEN_PATHS:
        came[401] = guarded.http.request(method, path)
    came[403] = guarded.http.request(method, path, headers=KEY | {"host": "elsewhere.example"})
    if path in GOOD:
        came[400] = called(guarded, method, path, json={"nonsense": 1})
        came[413] = called(guarded, method, path, content=b'{"x": "' + b"x" * 5000 + b'"}')
        plain = {"content-type": "text/plain"}
        came[415] = called(guarded, method, path, content=b"{}", headers=KEY | plain)
        monkeypatch.setattr(bodies, "_BODY_SECONDS", 0.0)
        monkeypatch.setattr(bodies, "_BODY_RATE", 1e9)
        came[408] = called(guarded, method, path, content=slowly())
        monkeypatch.undo()
        if "model" in document["paths"][path][method]["requestBody"]["content"]["application/json"][
            "schema"
        ].get("properties", {}):
            came[404] = called(guarded, method, path, json=GOOD[path] | {"model": "nobody"})
    elif 404 in said:
        came[404] = called(guarded, method, path)
    if path in ("/start_profile", "/stop_profile"):
        came[400] = called(guarded, method, path)
    elif 400 in said and path not in GOOD:
        kept = called(guarded, "post", "/v1/responses", json=GOOD["/v1/responses"]).json()["id"]
        came[400] = called(guarded, method, f"/v1/responses/{kept}?stream=maybe")
    waiting = called(starting, method, path, json=GOOD.get(path))
    if (waiting.status_code != 200 and path in GOOD) or (503 in said and path not in GOOD):
        came[503] = waiting
    for status, reply in came.items():
        if status in said:
            assert reply.status_code == status, (status, reply.status_code, reply.text)
    certain = said - {200, 500} - ({503} if path in GOOD else set())
    assert certain <= set(came), certain - set(came)


def slowly():
    yield b"{"
    time.sleep(0.2)
    yield b"}"
