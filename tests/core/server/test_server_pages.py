"""Web pages of other origins: they cannot use a browser to act on a server that has no key."""

from __future__ import annotations

import httpx
import pytest
from server_harness import serving
from test_server_abuse import routes
from test_server_keys import MESSAGES, bearer
from test_server_serve import read_errors, started

from ds_runtime.config import ServerConfig
from ds_runtime.errors import ConfigError
from ds_runtime.server.http.guard import OPEN_PATHS

EVIL = "https://evil.example"
SIMPLE = ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "")
CHAT = {"messages": MESSAGES}


def changing(app):
    """What may change something: every route but those that are read."""
    return [(path, method) for path, method in routes(app) if method not in ("GET", "HEAD")]


def test_only_what_changes_nothing_is_a_get(served):
    paths = {path for path, method in routes(served.app) if method == "GET"}
    assert not paths & {path for path, _ in changing(served.app)} - {"/v1/responses/x"}
    assert len(changing(served.app)) > 12
    for path, _ in changing(served.app):
        assert served.http.get(path).status_code in (404, 405), path


@pytest.mark.parametrize("kind", [*SIMPLE, "text/json", "application/jsonx", "x/json", None])
def test_only_json_is_read(served, kind):
    """What a page may send without asking first is no JSON, on every route, with or without key."""
    flushes = served.engine.flushes
    for path, method in changing(served.app):
        headers = {} if kind is None else {"content-type": kind}
        url = served.url + path
        reply = httpx.request(method, url, content=b'{"text": "[say hi]"}', headers=headers)
        error = reply.json()["error"]
        assert reply.status_code == 415, (path, reply.text)
        assert "Content-Type: application/json" in error["message"]
        assert error.get("code") == "unsupported_media_type" or path.startswith("/v1/messages")
        if kind:
            assert repr(kind) in error["message"]
    assert served.engine.flushes == flushes


@pytest.mark.parametrize(
    "kind", ["application/json", "Application/JSON; charset=utf-8", "application/json;x=y"]
)
def test_json_by_any_name_is_read(served, kind):
    headers = {"content-type": kind}
    reply = httpx.post(f"{served.url}/generate", content=b'{"text": "[say hi]"}', headers=headers)
    assert reply.status_code == 200


FOREIGN = (
    {"origin": EVIL},
    {"origin": "null"},
    {"origin": "http://localhost:1", "sec-fetch-site": "same-site"},
    {"origin": EVIL, "sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"},
    {"origin": "chrome-extension://abc", "sec-fetch-site": "cross-site"},
)


@pytest.mark.parametrize("headers", FOREIGN, ids=range(len(FOREIGN)))
def test_pages_of_other_origins_do_nothing(served, headers):
    submits, flushes = len(served.engine.submits), served.engine.flushes
    for path, method in routes(served.app):
        if path in OPEN_PATHS:
            continue
        reply = served.http.request(method, path, headers=headers)
        assert reply.status_code == 403, (method, path)
        if method != "HEAD":
            assert "--cors-origins" in reply.json()["error"]["message"]
    assert served.engine.flushes == flushes and len(served.engine.submits) == submits


def test_own_pages_links_and_programs_do_what_they_did(served):
    host = served.url.partition("://")[2]
    for headers in (
        {},
        {"origin": f"http://{host}"},
        {"origin": f"https://{host.upper()}"},  # TLS may end before us
        {"origin": f"http://{host}", "sec-fetch-site": "same-origin"},
        {"origin": "https://behind.a.proxy", "sec-fetch-site": "same-origin"},
        {"sec-fetch-site": "none"},
    ):
        assert served.http.post("/flush_cache", headers=headers).status_code == 200
        reply = served.http.post("/v1/chat/completions", json=CHAT, headers=headers)
        assert reply.status_code == 200
    link = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    for path in ("/", "/v1/plan", "/openapi.json", "/health", "/metrics"):
        assert served.http.get(path, headers=link).status_code == 200
    assert served.http.post("/flush_cache", headers=link).status_code == 403


def test_listed_origins_are_let_in_and_no_other(bpe_folder):
    friends = ("https://a.b", "chrome-extension://abc")
    with serving(bpe_folder, cors_origins=friends) as served:
        for origin in friends:
            headers = {"origin": origin, "sec-fetch-site": "cross-site"}
            reply = served.http.post("/v1/chat/completions", json=CHAT, headers=headers)
            assert reply.status_code == 200
            assert reply.headers["access-control-allow-origin"] == origin
            assert served.http.post("/flush_cache", headers=headers).status_code == 200
        for headers in FOREIGN[:5]:
            for path, method in routes(served.app):
                if path not in OPEN_PATHS:
                    assert served.http.request(method, path, headers=headers).status_code == 403
            asks = headers | {"access-control-request-method": "POST"}
            reply = served.http.options("/flush_cache", headers=asks)
            assert "access-control-allow-origin" not in reply.headers
        text = {"origin": "https://a.b", "content-type": "text/plain"}
        reply = served.http.post("/generate", content=b'{"text": "x"}', headers=text)
        assert reply.status_code == 415


def test_all_origins_may_ask_but_not_operate(bpe_folder):
    with serving(bpe_folder, cors_origins=("*",)) as served:
        headers = {"origin": EVIL, "sec-fetch-site": "cross-site"}
        assert served.http.post("/v1/chat/completions", json=CHAT, headers=headers).is_success
        for path in ("/flush_cache", "/start_profile", "/v1/load_lora_adapter"):
            reply = served.http.post(path, headers=headers)
            assert reply.status_code == 403 and "--cors-origins" in reply.text
        assert not served.engine.flushes
        assert served.http.post("/flush_cache").status_code == 200
    with serving(bpe_folder, cors_origins=("*",), api_key=("k",)) as served:
        assert served.http.post("/flush_cache", headers=headers).status_code == 401
        assert served.http.post("/flush_cache", headers=headers | bearer("k")).is_success


# names of the host


OWN = (
    "localhost",
    "localhost:7",
    "LOCALHOST.",
    "a.localhost",
    "127.0.0.1",
    "127.9.9.9:1",
    "[::1]:5",
)
OTHERS = ("evil.example", "evil.example:30000", "localhost.evil.example", "x", "127.0.0.1.nip.io")


@pytest.mark.parametrize("listens", ["127.0.0.1", "0.0.0.0"])
def test_a_name_that_was_made_to_point_here_is_refused(bpe_folder, listens):
    """As a page does whose owner lets its own name point to loopback: all is of one origin then."""
    with serving(bpe_folder, host=listens) as served:
        for host in OTHERS:
            headers = {"host": host, "origin": f"http://{host}", "sec-fetch-site": "same-origin"}
            for path, method in routes(served.app):
                reply = served.http.request(method, path, headers=headers)
                assert reply.status_code == 403, (method, path, host)
            assert "--allowed-hosts" in served.http.get("/health", headers=headers).text
        for host in OWN:
            assert served.http.get("/v1/models", headers={"host": host}).status_code == 200
        assert not served.engine.flushes


def test_names_that_the_operator_gives(bpe_folder):
    names = ("api.example.com", "*.lan")
    for keys in ({}, {"api_key": ("k",)}):
        with serving(bpe_folder, allowed_hosts=names, **keys) as served:
            good = ("api.example.com", "API.example.com:443", "gpu.lan", *OWN)
            for host in (*good, *OTHERS, "lan", "example.com", "x.api.example.com"):
                reply = served.http.get("/v1/models", headers={"host": host} | bearer("k"))
                assert (reply.status_code == 200) == (host in good), host


def test_with_a_key_a_name_says_nothing(bpe_folder):
    with serving(bpe_folder, api_key=("k",)) as served:
        for host in OTHERS:
            headers = {"host": host, "origin": EVIL} | bearer("k")
            assert served.http.get("/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize("host", ["https://a.b", "a.b:80", "a b", "", "a/b", "*a"])
def test_a_host_is_a_name(host):
    with pytest.raises(ConfigError, match="--allowed-hosts"):
        ServerConfig(allowed_hosts=(host,))


@pytest.mark.parametrize(
    "config, said",
    [
        ({"host": "0.0.0.0"}, r"WARNING.* 0\.0\.0\.0 is open to everybody who reaches.*--api-key"),
        ({"cors_origins": ["*"]}, r"WARNING.* 127\.0\.0\.1 is open to everybody whose page"),
    ],
    ids=["host", "cors"],
)
def test_a_server_that_is_open_to_all_says_so(bpe_folder, config, said):
    with started(bpe_folder, **config) as process:
        assert read_errors(process, said)


def test_a_server_that_is_not_says_nothing(bpe_folder):
    for config in ({"host": "127.0.0.1"}, {"host": "0.0.0.0", "api_key": ["k"]}):
        with started(bpe_folder, **config) as process:
            next(line for line in process.stdout if "serving" in line)
            process.terminate()
            process.wait(10)
            assert "everybody" not in process.stderr.read()
