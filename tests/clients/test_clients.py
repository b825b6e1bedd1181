"""Clients, each as it comes from its package, against a server that runs: `-m clients`."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from packages import CLIENTS, MODEL, VERSIONS, environment, known
from record import worth, write
from relay import Relay

pytestmark = [pytest.mark.clients, pytest.mark.timeout(1800)]
USES = Path(__file__).parent / "uses"
_OWN = ("OPENAI_", "ANTHROPIC_", "LITELLM_", "HF_", "PYTHON")  # would change what a client does


def run(python, client, relay):
    """Every use of a client; the names of those that failed, and all that was printed."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(_OWN)}
    with subprocess.Popen(
        [python, USES / f"use_{client}.py", relay.url, MODEL],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=env | {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "NO_PROXY": "*"},
    ) as process:
        told = []
        for line in process.stdout:
            told.append(line)
            if line.startswith("use "):
                relay.use = line.split()[1]
                process.stdin.write("\n")
                process.stdin.flush()
    failed = [line.split()[1] for line in told if line.startswith("failed ")]
    return failed, process.returncode, "".join(told)


@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_runs_as_it_comes(url, client, request):
    record = request.config.getoption("--record", False)
    python, versions = environment(client, newest=record)
    relay = Relay(url)
    try:
        failed, code, told = run(python, client, relay)
    finally:
        relay.close()
    print(f"{client} {versions}\n{told}")
    assert (failed, code) == ([], 0), told
    assert relay.sent
    assert all(one.status < 500 for one in relay.sent), told
    if record:
        write(client, worth(relay.sent))
        found = known() if VERSIONS.exists() else {}
        found[client] = versions
        VERSIONS.write_text(json.dumps(dict(sorted(found.items())), indent=1) + "\n")
