"""Verbs that load a model, as a user runs them: in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ds_runtime import LLM, SamplingParams
from ds_runtime.description.hf import load_config
from ds_runtime_kit.models.adapters import write_adapter


def ds_runtime(*args: str, stdin: str = "", path: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ds_runtime", *args],
        input=stdin,
        env=os.environ | ({"PYTHONPATH": path} if path else {}),
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_generate_prints_what_the_offline_api_gives(tiny: Path) -> None:
    settings = {"model": str(tiny), "platform": "cpu", "dtype": "float32"}
    flags = [word for name, value in settings.items() for word in (f"--{name}", value)]
    sampling = ["--max-tokens", "12", "--temperature", "0.8", "--seed", "5"]
    done = ds_runtime("generate", *flags, *sampling, "-", stdin="Once upon")
    assert done.returncode == 0, done.stderr
    with LLM(**settings) as llm:
        params = SamplingParams(max_tokens=12, temperature=0.8, seed=5)
        assert done.stdout == llm.generate("Once upon", params)[0].text + "\n"
        chat = llm.chat([{"role": "user", "content": "hi"}], SamplingParams(max_tokens=6))[0].text
    done = ds_runtime("generate", *flags, "--chat", "--max-tokens", "6", "hi")
    assert done.stdout == chat + "\n"


@pytest.mark.slow
def test_generate_with_an_adapter_prints_what_the_offline_api_gives(
    tiny: Path, tmp_path: Path
) -> None:
    lora = []
    for seed, name in enumerate("ab"):
        write_adapter(tmp_path / name, load_config(tiny), lambda m: "experts" not in m, seed=seed)
        lora.append(f"{name}={tmp_path / name}")
    flags = ["--model", str(tiny), "--platform", "cpu", "--dtype", "float32", "--max-tokens", "8"]
    params = SamplingParams(max_tokens=8)
    with LLM(tiny, platform="cpu", dtype="float32", lora=tuple(lora)) as llm:
        base, *adapted = (llm.generate("Once upon", params, lora=n)[0].text for n in (None, *"ab"))
    assert len({base, *adapted}) == 3
    done = ds_runtime("generate", *flags, "--lora", lora[0], "Once upon")
    assert done.stdout == adapted[0] + "\n", done.stderr
    both = [*flags, "--lora", lora[0], "--lora", lora[1]]
    done = ds_runtime("generate", *both, "--adapter", "b", "Once upon")
    assert done.stdout == adapted[1] + "\n", done.stderr
    for wrong, said in ((["Once"], "say with --adapter"), (["--adapter", "c", "Once"], "no such")):
        done = ds_runtime("generate", *both, *wrong)
        assert done.returncode != 0 and said in done.stderr and "Traceback" not in done.stderr


def test_bench_one_batch_reports_rates_and_where_they_come_from(tiny: Path) -> None:
    shape = ["--batch-size", "1", "3", "--input-len", "20", "--output-len", "4", "--runs", "2"]
    done = ds_runtime("bench", "one-batch", "--model", str(tiny), *shape, "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert [r["batch_size"] for r in report["results"]] == [1, 3]
    for r in report["results"]:
        assert r["prefill_tokens_per_s"] > 0 and r["decode_tokens_per_s"] > 0
        assert (r["input_len"], r["output_len"], r["runs"]) == (20, 4, 2)
    assert report["peak_bytes"] > 50 << 20
    assert report["versions"]["torch"] and report["machine"]["cores"] >= 1


def test_make_checkpoint_writes_what_plan_and_generate_read(tmp_path: Path) -> None:
    out = str(tmp_path / "made")
    done = ds_runtime("bench", "make-checkpoint", out, "--shape", "tiny-v3", "--dtype", "fp8")
    assert done.returncode == 0, done.stderr
    assert f"ds-runtime bench one-batch --model {out}" in done.stdout
    plan = json.loads(ds_runtime("plan", "--model", out, "--json").stdout)
    assert plan["model"] == "made"
    done = ds_runtime("generate", "--model", out, "--max-tokens", "2", "--ignore-eos", "hello")
    assert done.returncode == 0, done.stderr


LEAVER = """
import os
from ds_runtime.api import OPS, RANK_SPECIALISED, Kernel, hookimpl
def leave(gate_up): os._exit(0)
@hookimpl
def ds_defaults(facts): {defaults}; return []
@hookimpl
def ds_ops(facts):
    return [Kernel(OPS["silu_mul"], "leaver:leave", "leaver", RANK_SPECIALISED)] if {kernel} else []
"""


@pytest.mark.parametrize(
    "how",
    [{"defaults": "os._exit(0)", "kernel": "False"}, {"defaults": "pass", "kernel": "True"}],
    ids=["hook", "kernel"],
)
def test_generate_that_a_plugin_ends_says_so(tiny: Path, tmp_path: Path, how: dict) -> None:
    (tmp_path / "leaver.py").write_text(LEAVER.format(**how))
    info = tmp_path / "leaver-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: leaver\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[ds_runtime]\nleaver = leaver\n")
    flags = ["--model", str(tiny), "--platform", "cpu", "--dtype", "float32", "--max-tokens", "2"]
    done = ds_runtime("generate", *flags, "Once", path=str(tmp_path))
    assert done.returncode == 1 and not done.stdout, done
    (line,) = [one for one in done.stderr.splitlines() if one.startswith("ds-runtime: ")]
    assert f"{tmp_path / 'leaver.py'}, line " in line and "os._exit(0)" in line
    assert "Traceback" not in done.stderr
