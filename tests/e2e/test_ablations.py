"""A server without latents in its cache answers as one with them, and says what that costs."""

from __future__ import annotations

import httpx
from served import serving

PROMPTS = ["Once upon a time there was", "def main():", "1+1="]


def answers(url):
    with httpx.Client(base_url=url, timeout=120) as http:
        asked = {"max_tokens": 20, "temperature": 0.0}
        return [
            http.post("/v1/completions", json={"prompt": p, **asked}).json()["choices"][0]["text"]
            for p in (*PROMPTS, PROMPTS[0] * 9, PROMPTS[0] * 9)  # the last from the prefix cache
        ]


def test_a_server_with_sglangs_flag_for_mla_off():
    found = []
    for flags in ((), ("--disable_mla", "--trust-remote-code")):
        with serving("demo", "--dtype", "float32", "--kv-memory", "300MB", *flags) as served:
            found.append(answers(served.wait_url()))
            said = "".join(served.lines)
    assert found[0] == found[1]
    assert "cache     --disable-mla: keys and values of all heads take" in said
    assert "mha_decode" in said and "expanded_pages.v1" in said
