"""`plan --device`: a model that does not fit there is said so, with what does."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from ds_runtime.assembly.assemble import assemble
from ds_runtime.cli import main
from ds_runtime.cli.inspect.fit import shortfall
from ds_runtime.config import EngineConfig
from parts import mostly_slow

CONFIG = Path(__file__).parent / "model/fixtures/deepseek-v3.json"


@pytest.fixture
def v3(tmp_path):
    (tmp_path / "config.json").write_text(CONFIG.read_text())
    return str(tmp_path)


@pytest.mark.parametrize(("device", "smallest"), mostly_slow([("910b", 32), ("h200", 8)], 1))
def test_the_smallest_layout_that_fits_is_named_and_fits(v3, capsys, device, smallest):
    plan = ["plan", "--model", v3, "--device", device]
    assert main(plan) == 1
    out, err = capsys.readouterr()
    assert "mla_decode" in out
    assert "does not fit" in err and "the weights of one rank need" in err
    assert int(re.search(r"--tp (\d+) is the smallest", err)[1]) == smallest
    assert main([*plan, "--tp", str(smallest)]) == 0
    assert main([*plan, "--tp", str(smallest // 2)]) == 1
    assert f"with --tp {smallest // 2}" in capsys.readouterr().err


def test_json_is_whole_and_a_plan_that_does_not_fit_is_not_locked(v3, tmp_path, capsys):
    assert main(["plan", "--model", v3, "--device", "h200", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["rows"]
    file = tmp_path / "plan.json"
    assert main(["plan", "lock", str(file), "--model", v3, "--device", "h200"]) == 1
    assert not file.exists()
    assert main(["plan", "lock", str(file), "--model", v3, "--device", "h200", "--tp", "8"]) == 0


def test_a_cache_that_holds_no_context_does_not_fit(v3, capsys):
    plan = ["plan", "--model", v3, "--device", "h200", "--tp", "8", "--mem-fraction-static"]
    assert main([*plan, "0.9"]) == 0
    assert main([*plan, "0.5"]) == 1
    assert "--mem-fraction-static 0.5" in capsys.readouterr().err
    assert main([*plan, "0.6"]) == 1
    assert "KV cache: one context of 163840 tokens needs" in capsys.readouterr().err
    assert main([*plan[:-1], "--kv-memory", "1GB"]) == 1
    assert "but your setting gives 998.4 MB" in capsys.readouterr().err


def test_a_cache_that_the_user_made_too_small_is_no_fault_of_the_device(tmp_path, capsys):
    (tmp_path / "config.json").write_text(CONFIG.with_name("deepseek-v2-lite.json").read_text())
    plan = ["plan", "--model", str(tmp_path), "--device", "h200"]
    assert main([*plan, "--kv-memory", "100MB"]) == 1
    said = capsys.readouterr().err
    assert "does not fit on" not in said and "but your setting gives" in said
    assert main([*plan, "--max-running-requests", "1000000000"]) == 1
    assert "--max-running-requests 1000000000: must be at most 65536" in capsys.readouterr().err
    assert main([*plan, "--max-step-tokens", "10000000"]) == 1
    assert "lower --max-step-tokens (now 10000000)" in capsys.readouterr().err
    assert main([*plan, "--prefix-chunk", "100000000"]) == 1
    assert "lower --prefix-chunk (now 100000000)" in capsys.readouterr().err


def test_what_fits_is_what_starting_would_find(v3):
    one = assemble(EngineConfig(model=v3), ["model"], device="h200")
    assert "694.1 GB" in shortfall(one)
    assert shortfall(assemble(EngineConfig(), device="h200")) is None  # the demo
