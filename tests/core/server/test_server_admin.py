"""Routes for operators: what runs, aborts, probes, profiles; TLS files and CORS."""

from __future__ import annotations

import json
import ssl
import subprocess
import threading

import httpx
import pytest
from server_harness import serving, until

from ds_runtime import __version__
from ds_runtime.config import ServerConfig
from ds_runtime.errors import ConfigError
from ds_runtime.server.serve import check_tls


@pytest.fixture
def started(served):
    """Starts a request in a thread; `reply()` waits for its answer."""

    def start(path, **body):
        before, box = len(served.engine.submits), []
        thread = threading.Thread(target=lambda: box.append(served.post(path, **body)))
        thread.start()
        until(lambda: len(served.engine.submits) > before)

        def reply():
            thread.join(10)
            return box[0]

        return reply

    return start


CHAT = {"messages": [{"role": "user", "content": "[go abc]"}]}


def test_abort_by_the_client_s_own_id(served, started):
    before = served.engine.generated + 20
    reply = started("/v1/chat/completions", **CHAT, rid="mine-1", n=2)
    until(lambda: served.engine.generated > before)
    assert served.post("/abort_request", rid="mine-1").json() == {"aborted": ["mine-1"]}
    body = reply().json()
    assert body["id"] == "mine-1"
    assert [c["finish_reason"] for c in body["choices"]] == ["abort", "abort"]
    assert body["choices"][0]["message"]["content"].startswith("abc")
    assert served.post("/abort_request", rid="mine-1").json() == {"aborted": []}
    until(lambda: not served.engine.jobs)


def test_abort_of_one_prompt_of_a_list(served, started):
    texts = ["[go ab]", "[hang]", "[go cd]"]
    for given, names in ((["p", "q", "r"], "pqr"), ("x", ("x_0", "x_1", "x_2"))):
        before = served.engine.generated + 20
        reply = started(
            "/generate", text=texts, rid=given, sampling_params={"max_new_tokens": 4000}
        )
        until(lambda least=before: served.engine.generated > least)
        for taken in names:
            again = served.post("/generate", text="[say x]", rid=taken)
            assert again.status_code == 400 and again.json()["error"]["param"] == "rid"
        assert served.http.get("/get_load").status_code in (200, 404)
        middle = names[1]
        assert served.post("/abort_request", rid=middle).json() == {"aborted": [middle]}
        assert served.post("/abort_request", rid=middle).json()["aborted"] in ([], [middle])
        whole = [*names[::2]] if isinstance(given, list) else [given]
        for name in whole:
            assert served.post("/abort_request", rid=name).json() == {"aborted": [name]}
        body = reply().json()
        assert [one["meta_info"]["id"] for one in body] == [*names]
        assert {one["meta_info"]["finish_reason"]["type"] for one in body} == {"abort"}
        assert [one["text"][:2] for one in body] == ["ab", "", "cd"]
        assert served.post("/abort_request", rid=names[0]).json() == {"aborted": []}


@pytest.mark.parametrize("given", [[None] * 3, [None, "own", None], ["own", None, None], None])
def test_prompts_without_an_id_in_a_list_are_aborted_alone(served, given):
    """Where a list says whose is which. Without one, the request's own id ends all."""
    before = {*served.engine.jobs}
    body = {"text": ["[go ab]"] * 3, "rid": given, "stream": True}
    body |= {"sampling_params": {"max_new_tokens": 4000}}
    with served.http.stream("POST", "/generate", json=body) as reply:
        events = (json.loads(line[6:]) for line in reply.iter_lines() if line.startswith("data: {"))
        names = {}
        while len(names) < 3:
            names |= {(event := next(events))["index"]: event["meta_info"]["id"]}
        own = given or [None]
        assert [names[n] for n, rid in enumerate(own) if rid] == [rid for rid in own if rid]
        assert len({*names.values()}) == (3 if given else 1)
        ended = list[int]()

        def ends(count):
            while len(ended) < count:
                if (event := next(events))["meta_info"]["finish_reason"] is not None:
                    assert event["meta_info"]["finish_reason"]["type"] == "abort"
                    ended.append(event["index"])

        order = [2, 0, 1] if given else [1]
        for count, number in enumerate(order, 1):
            found = served.post("/abort_request", rid=names[number]).json()
            assert found == {"aborted": [names[number]]}
            ends(count if given else 3)
            if given:
                assert ended == order[:count]
                until(lambda left=3 - count: len({*served.engine.jobs} - before) == left)
    until(lambda: {*served.engine.jobs} <= before)


def test_abort_of_a_stream_by_the_id_in_its_answer(served):
    with served.http.stream("POST", "/generate", json={"text": "[go ab]", "stream": True}) as reply:
        lines = (line[6:] for line in reply.iter_lines() if line)
        rid = json.loads(next(lines))["meta_info"]["id"]
        assert served.post("/abort_request", rid=rid).json() == {"aborted": [rid]}
        found = [json.loads(line) for line in lines if line != "[DONE]"]
    assert found[-1]["meta_info"]["finish_reason"]["type"] == "abort"


def test_abort_all(served, started):
    replies = [started("/v1/completions", prompt="[hang]") for _ in range(3)]
    assert len(served.post("/abort_request", abort_all=True).json()["aborted"]) == 3
    for reply in replies:
        assert reply().json()["choices"][0]["finish_reason"] == "abort"


def test_an_id_counts_once_at_a_time(served, started):
    reply = started("/v1/completions", prompt="[hang]", rid="twice")
    again = served.post("/v1/completions", prompt="[say x]", rid="twice")
    assert again.status_code == 400 and again.json()["error"]["param"] == "rid"
    served.post("/abort_request", rid="twice")
    assert reply().status_code == 200
    assert served.post("/v1/completions", prompt="[say x]", rid="twice").json()["id"] == "twice"


@pytest.mark.parametrize("body", [{}, {"rid": 3}, {"rid": None}, {"abort_all": False}])
def test_an_abort_names_a_request(served, body):
    assert served.post("/abort_request", **body).json()["error"]["param"] == "rid"


def test_health_generate_makes_a_token(served):
    before = len(served.engine.submits)
    assert served.http.get("/health_generate").json() == {"status": "ok"}
    assert served.engine.submits[before].params.max_tokens == 1


def test_what_is_served(served):
    info = served.http.get("/get_model_info").json()
    assert served.http.get("/model_info").json() == info
    assert (info["served_model_name"], info["context_length"]) == ("fake", 4096)
    assert info["default_sampling_params"]["temperature"] == 0.6 and info["has_chat_template"]
    info = served.http.get("/server_info").json()
    assert info["server"]["port"] == 0 and info["server"]["api_key"] is None
    assert info["engine"] == {"tp": 1} and info["kv_tokens"] == 1 and "running" in info["stats"]
    assert served.http.get("/v1/plan").json() == {"rows": []}


def test_the_routes_of_other_servers(served, started):
    assert served.http.get("/ping").json() == served.http.get("/health").json()
    assert [served.http.head(path).status_code for path in ("/ping", "/health")] == [200, 200]
    assert served.http.get("/version").json() == {"version": __version__}
    own, info = (served.http.get(path).json() for path in ("/server_info", "/get_server_info"))
    assert info.keys() > own.keys() | own["server"].keys() and info["server"] == own["server"]
    assert (info["tp_size"], info["dp_size"], info["max_total_num_tokens"]) == (1, 1, 1)
    assert info["max_req_input_len"] == 4095 and len(info["internal_states"]) == 1
    assert "running" in info["internal_states"][0] and info["context_length"] == 4096
    until(lambda: served.http.get("/load").json() == {"server_load": 0})
    replies = [started("/v1/completions", prompt="[hang]") for _ in range(2)]
    until(lambda: served.http.get("/load").json() == {"server_load": 2})
    served.post("/abort_request", abort_all=True)
    for reply in replies:
        reply()
    assert served.http.get("/load").json() == {"server_load": 0}


def test_before_the_engine_is_ready(bpe_folder):
    with serving(bpe_folder, ready=False) as served:
        assert served.http.get("/ping").status_code == 503
        assert served.http.get("/get_server_info").status_code == 503
        assert served.http.get("/version").status_code == 200
        assert served.http.get("/load").json() == {"server_load": 0}


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
def test_secrets_stay_secret(bpe_folder, path):
    with serving(bpe_folder, api_key=("hidden",)) as served:
        said = served.http.get(path, headers={"authorization": "Bearer hidden"})
        assert said.json()["server"]["api_key"] == "(set)" and "hidden" not in said.text
        assert served.http.get(path).status_code == 401
        assert served.http.get("/ping").status_code == 200  # as /health


def test_profiles_go_where_the_operator_says(served, bpe_folder, tmp_path):
    refused = served.http.post("/start_profile")
    assert refused.status_code == 400 and "--profile-dir" in refused.json()["error"]["message"]
    with serving(bpe_folder, profile_dir=str(tmp_path)) as one:
        assert one.http.post("/stop_profile").status_code == 400
        assert one.http.post("/start_profile").json() == {"status": "profiling"}
        assert one.http.post("/start_profile").status_code == 400
        assert one.http.post("/stop_profile").json() == {"path": f"{tmp_path}/1.trace.json.gz"}


def test_lists_of_prompts_for_generate(served):
    body = served.post("/generate", text=["[say a]", "[say b]"]).json()
    assert [one["text"] for one in body] == ["a", "b"]
    ids = [served.tokenizer.encode(t) for t in ("[say c]", "[say d]")]
    assert [one["text"] for one in served.post("/generate", input_ids=ids).json()] == ["c", "d"]
    assert served.post("/generate", text=["[say a]"]).json()[0]["text"] == "a"
    assert served.post("/generate", text=[]).json()["error"]["param"] == "text"


# browsers and TLS


def test_other_origins_get_nothing_unless_the_operator_lets_them(served, bpe_folder):
    asks = {"origin": "https://a.b", "access-control-request-method": "POST"}
    assert (
        "access-control-allow-origin" not in served.http.options("/v1/models", headers=asks).headers
    )
    with serving(bpe_folder, api_key=("k",), cors_origins=("https://a.b",)) as one:
        reply = one.http.options("/v1/models", headers=asks)
        assert reply.status_code == 200
        assert reply.headers["access-control-allow-origin"] == "https://a.b"
        refused = one.http.get("/v1/models", headers={"origin": "https://a.b"})
        assert refused.status_code == 401  # and the page may read why
        assert refused.headers["access-control-allow-origin"] == "https://a.b"
        other = one.http.options("/v1/models", headers=asks | {"origin": "https://c.d"})
        assert "access-control-allow-origin" not in other.headers


@pytest.fixture(scope="module")
def pem(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pem")
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2"
    for name in ("a", "b"):
        out = ["-keyout", str(folder / f"{name}.key"), "-out", str(folder / f"{name}.pem")]
        more = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
        subprocess.run([*command.split(), *out, *more], check=True, timeout=60)
    return folder


def test_https(bpe_folder, pem):
    files = {"ssl_certfile": str(pem / "a.pem"), "ssl_keyfile": str(pem / "a.key")}
    check_tls(ServerConfig(**files))
    trusted = ssl.create_default_context(cafile=files["ssl_certfile"])
    with (
        serving(bpe_folder, **files) as served,
        httpx.Client(base_url=served.url, verify=trusted) as http,
    ):
        assert http.get("/v1/models").json()["data"][0]["id"] == "fake"


def test_tls_files_that_cannot_be_used(pem, tmp_path):
    with pytest.raises(ConfigError, match=r"--ssl-certfile /no/cert\.pem: cannot be read"):
        check_tls(ServerConfig(ssl_certfile="/no/cert.pem"))
    other = ServerConfig(ssl_certfile=str(pem / "a.pem"), ssl_keyfile=str(pem / "b.key"))
    with pytest.raises(ConfigError, match="belong together"):
        check_tls(other)
    (tmp_path / "x.pem").write_text("no certificate")
    with pytest.raises(ConfigError, match="must be PEM"):
        check_tls(ServerConfig(ssl_certfile=str(tmp_path / "x.pem")))


def test_health_generate_fails_while_its_answer_is_no_number(served):
    served.engine.broken = True
    reply = served.http.get("/health_generate")
    assert reply.status_code == 503
    assert reply.json()["error"]["code"] == "logits_not_finite"
    assert "not finite" in reply.json()["error"]["message"]
    assert served.http.get("/health").status_code == 200
    served.engine.broken = False
    assert served.http.get("/health_generate").status_code == 200
