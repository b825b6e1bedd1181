"""API keys: who may come, who may operate, and that nobody learns anything of another key's."""

from __future__ import annotations

import contextlib
import json
import threading

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from server_harness import serving, until
from test_server_abuse import routes
from test_server_serve import read_until, started

from ds_runtime.config import ServerConfig
from ds_runtime.errors import ConfigError
from ds_runtime.server.generate.prepare import Service
from ds_runtime.server.http.guard import OPEN_PATHS
from ds_runtime.server.http.keys import Keys
from ds_runtime.server.protocols import store as shelves
from ds_runtime.server.protocols.store import Kept

OPERATING = {
    ("/flush_cache", "POST"),
    ("/start_profile", "POST"),
    ("/stop_profile", "POST"),
    ("/v1/load_lora_adapter", "POST"),
    ("/v1/unload_lora_adapter", "POST"),
}
MESSAGES = [{"role": "user", "content": "[say hi]"}]
PROMPTS = {  # every route that computes a prompt
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "[say hi]"},
    "/v1/responses": {"input": "[say hi]"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 4},
    "/generate": {"text": "[say hi]"},
}
COUNTED = {  # and those that only count one
    "/tokenize": {"prompt": "hi"},
    "/v1/responses/input_tokens": {"input": "hi"},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
}


def bearer(key):
    return {"authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def tenants(bpe_folder, tmp_path_factory):
    """A server with keys a and b, c in a file, and root for who operates it."""
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text("# of c\n\nc\n")
    with serving(
        bpe_folder,
        api_key=("a", "b"),
        api_key_file=str(file),
        admin_api_key="root",
        profile_dir=str(file.parent),
    ) as one:
        yield one


def test_every_key_is_asked_for_and_none_is_told(tenants):
    for path, method in routes(tenants.app):
        if path in OPEN_PATHS:
            continue
        for key in ("a", "b", "c", "root", "d", "# of c", "A", "a b", None):
            for headers in ({"x-api-key": key}, bearer(key)) if key is not None else ({},):
                reply = tenants.http.request(method, path, headers=headers)
                found = reply.status_code
                assert (found == 401) == (key not in ("a", "b", "c", "root")), (method, path, key)
                denied = (path, method) in OPERATING and key in ("a", "b", "c")
                assert (found == 403) == denied, (method, path, key, reply.text)
                if denied:
                    assert reply.json()["error"]["code"] == "admin_key_needed"
    info = tenants.http.get("/server_info", headers=bearer("a")).json()["server"]
    assert info["api_key"] == info["admin_api_key"] == "(set)"
    assert info["ssl_keyfile_password"] is None


def test_an_admin_key_alone_leaves_the_rest_open(bpe_folder):
    with serving(bpe_folder, admin_api_key="root") as served:
        assert served.chat("[say hi]").status_code == 200
        for headers in ({}, bearer("x")):  # clients that must send some key send any
            assert served.http.get("/v1/models", headers=headers).status_code == 200
            for path, method in OPERATING:
                reply = served.http.request(method, path, headers=headers)
                assert reply.status_code == 401 and reply.headers["www-authenticate"] == "Bearer"
        assert served.http.post("/flush_cache", headers=bearer("root")).status_code == 200


def test_without_an_admin_key_every_key_operates(bpe_folder):
    with serving(bpe_folder, api_key=("a", "b")) as served:
        for key in ("a", "b"):
            assert served.http.post("/flush_cache", headers=bearer(key)).status_code == 200
        assert served.http.post("/flush_cache", headers=bearer("x")).status_code == 401


def test_no_key_comes_from_the_environment(bpe_folder, monkeypatch):
    for prefix in ("", "DS_", "DS_RUNTIME_", "OPENAI_", "VLLM_", "SGLANG_", "SGL_", "HF_"):
        monkeypatch.setenv(f"{prefix}API_KEY", "from-outside")
        monkeypatch.setenv(f"{prefix}ADMIN_API_KEY", "from-outside")
    with started(bpe_folder) as process:
        url = read_until(process, r"serving \S+ at (http://\S+)")[1]
        assert httpx.get(f"{url}/v1/models").status_code == 200
    with started(bpe_folder, api_key=["mine"]) as process:
        url = read_until(process, r"serving \S+ at (http://\S+)")[1]
        assert httpx.get(f"{url}/v1/models", headers=bearer("from-outside")).status_code == 401


@pytest.mark.parametrize(
    "fields, said",
    [
        ({"api_key": ("",)}, "--api-key: is empty"),
        ({"api_key": ("a\n",)}, "--api-key: must be printable, on one line"),
        ({"api_key": (" a",)}, "without spaces around it"),
        ({"admin_api_key": ""}, "--admin-api-key: is empty"),
        ({"admin_api_key": "a", "api_key": ("b", "a")}, "--admin-api-key: is one of --api-key"),
    ],
    ids=range(5),
)
def test_keys_that_no_header_carries(fields, said):
    with pytest.raises(ConfigError, match=said) as found:
        ServerConfig(**fields)
    assert repr(fields.get("api_key")) not in str(found.value)


@pytest.mark.parametrize(
    "content, said",
    [
        (b"", "holds no key"),
        (b"# none\n \n", "holds no key"),
        (b"a\n\xff\n", "is not UTF-8 at byte 2"),
        (b"good\nse\x00cret\n", "line 2: must be printable"),
        (b"x" * ((1 << 20) + 1), "more than 1048576 bytes"),
        (None, "cannot be read: No such file or directory; give a file with one key a line"),
    ],
    ids=range(6),
)
def test_a_file_of_keys_that_cannot_be_used_is_a_sentence(tmp_path, content, said):
    path = tmp_path / "keys"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"--api-key-file {path}.*{said}") as found:
        Keys.of(ServerConfig(api_key_file=str(path)))
    assert "cret" not in str(found.value)


# what the prefix cache shares


def salt(served, path, body, headers=None):
    """What the engine was told."""
    before = len(served.engine.submits)
    assert served.http.post(path, json=body, headers=headers).status_code == 200
    found = {s.salt for s in served.engine.submits[before:]}
    assert len(found) == 1
    return found.pop()


@pytest.mark.parametrize("path", PROMPTS)
def test_each_key_has_a_salt_and_each_may_add_its_own(served, tenants, path):
    body = PROMPTS[path]
    plain, mine = body, body | {"cache_salt": "mine"}
    assert salt(served, path, plain) == ""
    assert salt(served, path, mine) == salt(served, path, mine) != ""
    assert salt(served, path, mine) != salt(served, path, body | {"cache_salt": "other"})
    found = {
        (key, name): salt(tenants, path, one, bearer(key))
        for key in ("a", "b", "c", "root")
        for name, one in (("", plain), ("mine", mine))
    }
    assert len(set(found.values())) == 8 and "" not in found.values()
    assert salt(tenants, path, mine, {"x-api-key": "a"}) == found["a", "mine"]
    assert all(key not in s and "mine" not in s for (key, _), s in found.items() if key == "root")


def test_one_key_alone_shares_as_without(bpe_folder):
    with serving(bpe_folder, api_key=("a", "a")) as one:
        assert salt(one, "/generate", PROMPTS["/generate"], bearer("a")) == ""


@pytest.mark.parametrize("path", PROMPTS | COUNTED)
@pytest.mark.parametrize("value", ["", 3, ["x"], {"a": 1}, "x" * 1025, True])
def test_a_bad_salt_names_its_field(served, path, value):
    reply = served.post(path, **(PROMPTS | COUNTED)[path], cache_salt=value)
    assert reply.status_code == 400 and "cache_salt" in reply.text


@pytest.mark.parametrize("path", COUNTED)
def test_what_only_counts_takes_a_salt_too(served, path):
    plain = served.post(path, **COUNTED[path]).json()
    assert served.post(path, **COUNTED[path], cache_salt="x").json() == plain


@given(
    st.lists(st.tuples(st.text(max_size=3), st.none() | st.text(min_size=1, max_size=3))),
    st.lists(st.text(min_size=1, max_size=4), min_size=2, unique=True),
)
@settings(deadline=None)
def test_no_two_of_key_and_salt_give_the_same(asked, names):
    keys = Keys(names)
    callers = {name: keys.caller([name.encode()]) for name in names}
    found = {
        (name, one): callers[name].salt(one) for name in names for _, one in [*asked, ("", None)]
    }
    assert len({(n, s) for (n, _), s in found.items()}) == len(set(found.values()))
    assert len(set(found.values())) >= len({(n, s or "") for n, s in found})
    assert all(len(s) == 32 for s in found.values())


# ids


@contextlib.contextmanager
def running(served, key, rid):
    body = {"prompt": "[go ab]", "rid": rid, "max_tokens": 4000}
    before, box = len(served.engine.submits), []
    url = f"{served.url}/v1/completions"
    ask = threading.Thread(
        target=lambda: box.append(httpx.post(url, json=body, headers=bearer(key), timeout=20))
    )
    ask.start()
    until(lambda: len(served.engine.submits) > before)
    yield box
    ask.join(20)


def abort(served, key, **body):
    return served.http.post("/abort_request", json=body, headers=bearer(key)).json()["aborted"]


def test_ids_are_each_key_s_own(tenants):
    with running(tenants, "a", "same") as first, running(tenants, "b", "same") as second:
        assert abort(tenants, "c", rid="same") == abort(tenants, "c", abort_all=True) == []
        assert abort(tenants, "b", rid="same") == ["same"]
        until(lambda: second)
        assert second[0].json()["id"] == "same" and not first
        with running(tenants, "b", "other") as third:
            assert abort(tenants, "a", abort_all=True) == ["same"]
            until(lambda: first)
            assert not third
            assert abort(tenants, "root", rid="other") == ["other"]
        assert third[0].json()["choices"][0]["finish_reason"] == "abort"


# what is kept


def test_nobody_sees_what_another_key_keeps(tenants):
    def ask(key, **body):
        return tenants.http.post(
            "/v1/responses", json={"input": "[say hi]"} | body, headers=bearer(key)
        )

    mine = ask("a", rid="resp_1").json()["id"]
    path = f"/v1/responses/{mine}"
    for key in ("b", "c", "root"):
        for method in ("GET", "DELETE"):
            assert tenants.http.request(method, path, headers=bearer(key)).status_code == 404
        assert ask(key, previous_response_id=mine).status_code == 404
    assert ask("b", rid="resp_1").status_code == 200  # and the id says nothing
    assert ask("a", rid="resp_1").status_code == 400
    assert tenants.http.get(path, headers=bearer("a")).json()["id"] == mine
    thread = {"messages": MESSAGES, "max_tokens": 4, "thread": {"type": "create"}}
    first = tenants.http.post("/v1/messages", json=thread, headers=bearer("a")).json()["id"]
    more = thread | {"thread": {"type": "continue", "previous_message_id": first}}
    for key, status in (("b", 404), ("root", 404), ("a", 200)):
        assert (
            tenants.http.post("/v1/messages", json=more, headers=bearer(key)).status_code == status
        )
    assert tenants.http.delete(path, headers=bearer("a")).json()["deleted"]


def test_a_flood_of_tiny_responses_evicts_its_own(bpe_folder, monkeypatch):
    monkeypatch.setattr(shelves, "KEPT", 40)
    with serving(bpe_folder, api_key=("honest", "flood")) as served:

        def ask(key):
            reply = served.http.post(
                "/v1/responses", json={"input": "[say a]"}, headers=bearer(key)
            )
            return reply.json()["id"]

        def found(key, name):
            return served.http.get(f"/v1/responses/{name}", headers=bearer(key)).status_code == 200

        mine = [ask("honest") for _ in range(15)]
        theirs = [ask("flood") for _ in range(60)]
        assert all(found("honest", name) for name in mine)
        assert [found("flood", name) for name in theirs] == [False] * 35 + [True] * 25
        lines = served.http.get("/metrics").text.splitlines()
        assert "ds_runtime_kept_answers 40.0" in lines
        assert "ds_runtime_kept_dropped_total 35.0" in lines
        assert "ds_runtime_body_bytes 0.0" in lines


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 12), st.integers(0, 3000), st.booleans()),
        max_size=80,
    )
)
@settings(deadline=None)
def test_nobody_loses_what_is_within_his_share(steps):
    """Against a slow model: who keeps no more than an equal share of all never loses an answer."""
    whole, most = 20, 20_000
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shelves, "KEPT", whole)
        patch.setattr(shelves, "_KEPT_BYTES", most)
        kept, put = Kept(), {}
        for owner, name, size, drops in steps:
            shelf = kept.shelf(f"k{owner}", f"k{owner}")
            if drops:
                shelf.drop(str(name))
                put.pop((owner, name), None)
            else:
                shelf.put(str(name), "x" * size, None)
                put.pop((owner, name), None)
                put[owner, name] = size + 6
            sharers = {o for o, _ in put}
            for one in sharers:
                sizes = [s for (o, _), s in put.items() if o == one]
                if len(sizes) <= whole / 4 and sum(sizes) <= most / 4:
                    for (o, n), size_of in put.items():
                        if o == one:
                            answer = kept.shelf(f"k{o}", f"k{o}").answer(str(n))
                            assert answer is not None and len(answer) == size_of - 4
            assert len(kept) <= whole and kept.num_bytes <= most
            live = {(o, n) for o, n in put if kept.shelf(f"k{o}", "").answer(str(n)) is not None}
            assert len(live) == len(kept) and sum(put[k] for k in live) == kept.num_bytes


def test_the_service_is_told_of_no_key(tenants):
    service: Service = tenants.app.state.service
    tenants.http.post("/v1/completions", json={"prompt": "[say x]"}, headers=bearer("root"))
    assert all("root" not in repr(s) for s in tenants.engine.submits)
    assert "root" not in json.dumps(list(service.running))
