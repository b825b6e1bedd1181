"""Rules written to exhaust whoever compiles them: refused or served, within bounds."""

from __future__ import annotations

import time

import httpx
import psutil
import pytest
from served import serving

WORDS = "|".join(f"word{i * 7919}" for i in range(20_000))
DEEP: dict = {"type": "string"}
for _ in range(200):
    DEEP = {"type": "object", "properties": {"a": DEEP}, "required": ["a"]}
RULES = {
    "catastrophic": {"regex": "(x+x+)+y"},
    "ambiguous": {"regex": "((a|a)*)*b"},
    "counted": {"regex": "([a-z]{1,500}){1,500}"},
    "long": {"regex": "a{10000000}"},
    "unicode": {"regex": r"(\p{L}{1,2000}){1,2000}"},
    "nested": {"regex": "(" * 4000 + "a" + ")" * 4000},
    "words": {"regex": WORDS},
    "look": {"regex": "(?=a)b"},
    "left": {"ebnf": 'start: start start | start "a" | "a"'},
    "itself": {"json_schema": {"$ref": "#"}},
    "remote": {"json_schema": {"$ref": "http://127.0.0.1:9/secret.json"}},
    "file": {"json_schema": {"$ref": "file:///etc/passwd"}},
    "enum": {"json_schema": {"enum": [f"{i}" * 3 for i in range(30_000)]}},
    "deep": {"json_schema": DEEP},
    "many": {"json_schema": {"type": "array", "minItems": 10**9, "items": {"type": "integer"}}},
    "multiple": {"json_schema": {"type": "number", "multipleOf": 1e-300}},
    "pattern": {"json_schema": {"type": "string", "pattern": "^(([a-z])+.)+[A-Z]([a-z])+$"}},
}
# Refused for what they are. The others may be, too, where following them meets a bound.
REFUSED = {"nested", "words", "look", "itself", "remote", "file", "enum", "multiple"}


def chat(**fields):
    return {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, **fields}


@pytest.mark.slow
def test_no_rule_takes_the_server_from_others():
    with serving("demo", "--threads", "1") as served:
        url = served.wait_url()
        with httpx.Client(base_url=url, timeout=120) as http:
            ranks = served.ranks()
            before = sum(p.memory_info().rss for p in ranks)
            found = {}
            for name, rule in RULES.items():
                begin = time.monotonic()
                reply = http.post("/v1/chat/completions", json=chat(**rule))
                assert time.monotonic() - begin < 60, name
                found[name] = reply.status_code
                assert reply.status_code in (200, 400), (name, reply.text)
                if reply.status_code == 400:
                    error = reply.json()["error"]
                    assert error["param"].partition(".")[0] in rule and len(error["message"]) < 4000
                assert "root:" not in reply.text
                assert http.post("/v1/chat/completions", json=chat()).status_code == 200, name
            assert {n for n, s in found.items() if s == 400} >= REFUSED
            assert [p.pid for p in served.ranks()] == [p.pid for p in ranks]  # none has fallen
            after = sum(psutil.Process(p.pid).memory_info().rss for p in ranks)
            assert after - before < 1 << 30, (before, after)
