"""`bench compare`: the same shapes for both, in turns, and what is made of the times."""

from __future__ import annotations

import io
import json
import sys

import pytest
import torch

from ds_runtime.cli import main
from ds_runtime.config import EngineConfig
from ds_runtime.errors import ConfigError
from ds_runtime.platform.contract import Ceilings
from ds_runtime_bench.checkpoints.checkpoint import make_checkpoint
from ds_runtime_bench.engine import compare, interleaved
from ds_runtime_bench.engine.compare import Case, Child, LlamaCpp, cases_of
from ds_runtime_bench.ops import measure, step_work
from ds_runtime_cpu.platform import CpuPlatform

PROGRAM = """#!{python}
import json, sys
flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
with open({calls!r}, "a") as f:
    print(json.dumps([{name!r}, flags]), file=f)
print("noise")
if {name!r} == "llama-bench":
    print(json.dumps({{"build_commit": "c0ffee", "avg_ts": 100.0 + int(flags["-p"])}}))
else:
    for batch in flags["-npl"].split(",")[: {rows}]:
        print(json.dumps({{"pl": int(batch), "speed_tg": 10.0 * int(batch)}}))
    print('{{"pl": 1, "spe')
sys.exit({rc})
"""


def programs(folder, rows=99, rc=0):
    """Stand-ins for llama.cpp's programs that note their flags."""
    calls = folder / "calls"
    for name in ("llama-bench", "llama-batched-bench"):
        path = folder / name
        path.write_text(
            PROGRAM.format(python=sys.executable, calls=str(calls), name=name, rows=rows, rc=rc)
        )
        path.chmod(0o755)
    (folder / "m.gguf").write_bytes(b"GGUF")
    return lambda: [json.loads(x) for x in calls.read_text().splitlines()]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("ck") / "tiny", "tiny-v2-lite", "float32")


class Fixed:
    """An engine that answers from a list."""

    def __init__(self, name, rounds, order, reads=()):
        self.name, self.cpu, self._rounds, self._order = name, 0.0, iter(rounds), order
        self._reads = iter(reads)
        self.closed, self._due = False, []

    def about(self, threads=None):
        return {"is": self.name, "threads": threads or 3}

    def ask(self, request):
        self._order.append(request["do"])
        if request["do"] == "read":
            return {"read": 1e9 * next(self._reads)}
        step_bytes = [4e9 * batch for batch, _ in request["steps"]]
        return {"ceilings": {"bandwidth": 1e15}, "step_bytes": step_bytes}

    def rates(self, cases):
        (case,) = cases
        self._order.append(f"{self.name} {case.name}")
        if not self._due:
            self._due = list(next(self._rounds))
        return [self._due.pop(0)]

    def close(self):
        self.closed = True


def test_rounds_alternate_and_medians_are_compared():
    order = []
    reads = [190, 210, 200, 210, 190, *(50, 110, 90, 100, 50), *(200, 200, 210, 200, 200)]
    ours = Fixed("ds-runtime", [[10.0, 5.0], [30.0, 1.0], [20.0, 3.0]], order, reads)
    peer = Fixed("other", [[4.0, 6.0], [5.0, 6.0], [99.0, 6.0]], order)
    cases = (Case(2, 16, 32), Case(1, 512, 0))
    found = compare.run(ours, peer, cases, 3, lambda n: order.append(n))
    assert order == [
        *(0, "limits", "read", "ds-runtime batch 2", "read", "other batch 2", "read"),
        *("other prefill 512", "read", "ds-runtime prefill 512", "read"),
        *(1, "limits", "read", "other batch 2", "read", "ds-runtime batch 2", "read"),
        *("ds-runtime prefill 512", "read", "other prefill 512", "read"),
        *(2, "limits", "read", "ds-runtime batch 2", "read", "other batch 2", "read"),
        *("other prefill 512", "read", "ds-runtime prefill 512", "read"),
    ]
    decode, prefill = found["results"]
    assert decode["tokens_per_s"] == {"ds-runtime": 20.0, "other": 5.0}
    assert decode["ratio"] == 4.0 and prefill["ratio"] == 0.5
    assert decode["rounds"]["other"] == [4.0, 5.0, 99.0]
    # Of what was read before and behind this engine's turn.
    assert decode["limits"] == [50.0, 25.0, 50.0] and prefill["limits"] == [None] * 3
    assert [c["bandwidth"] for c in found["ceilings"]] == [1e15] * 3
    assert decode["reads"][1] == [50e9, 110e9, 90e9] and prefill["reads"][1] == [90e9, 100e9, 50e9]
    assert found["engines"]["other"] == {"is": "other", "threads": 3} and found["commit"]
    assert "ended" not in found
    assert ours.closed and peer.closed
    text = compare.render(found | {"model": "m"}).splitlines()
    assert "medians of 3" in text[0]
    assert "memory reads 200.0 GB/s" in text[0]
    assert "40% of its limit" in text[1] and "ratio 4.00" in text[1]
    assert text[2] == "    2 rounds at 200.0 GB/s: ratio 0.29"
    assert "prefill 512" in text[3]
    assert text[4] == "    2 rounds at 200.0 GB/s: ratio 0.67"
    assert text[-1] == "both with 3 threads"


@pytest.mark.parametrize(
    ("reads", "groups"),
    [
        ([[30, 31, 33], [60, 55, 58], [30, 60, 30], [34, 36, 35]], [[0, 3], [1]]),
        ([[50, 50, 50], [60, 60, 60], [61, 61, 61]], [[0, 1], [2]]),
        ([[1, 2, 3]], []),
    ],
)
def test_rounds_are_told_by_the_speed_of_memory(reads, groups):
    assert compare.by_speed(reads) == groups


def test_both_end_when_one_fails():
    ours, peer = (Fixed(name, [], []) for name in ("ds-runtime", "other"))
    peer.about = lambda threads: (_ for _ in ()).throw(ConfigError("no"))
    with pytest.raises(ConfigError, match="no"):
        compare.run(ours, peer, (Case(1, 1, 1),), 1, lambda n: None)
    assert ours.closed and peer.closed


def test_llama_cpp_is_asked_for_the_same_shapes(tmp_path):
    calls = programs(tmp_path)
    peer = LlamaCpp(tmp_path / "m.gguf", tmp_path)
    assert peer.about(threads=2) == {"build_commit": "c0ffee", "model": "m.gguf"}
    assert peer.rates(cases_of([1, 16, 4], 16, 32, 512)) == [10.0, 160.0, 40.0, 612.0]
    (_, prefill), (name, decode) = calls()[1:]
    assert prefill["-p"] == "512" and prefill["-n"] == "0" and prefill["-t"] == "2"
    assert name == "llama-batched-bench"
    assert (decode["-npp"], decode["-ntg"], decode["-npl"]) == ("16", "32", "1,4,16,1")
    assert int(decode["-c"]) >= 16 * 48 and decode["-tb"] == decode["-t"] == "2"


def test_llama_cpp_that_cannot_be_run(tmp_path):
    with pytest.raises(ConfigError, match=r"llama-bench: not found in .*--bin DIR"):
        LlamaCpp(tmp_path / "m.gguf", tmp_path)
    programs(tmp_path, rows=1)
    with pytest.raises(ConfigError, match=r"none\.gguf: is no file"):
        LlamaCpp(tmp_path / "none.gguf", tmp_path)
    with pytest.raises(ConfigError, match=r"timed \[1\], not \[1, 4\]"):
        LlamaCpp(tmp_path / "m.gguf", tmp_path).rates(cases_of([1, 4], 1, 1, 0))
    programs(tmp_path, rc=3)
    with pytest.raises(ConfigError, match="llama-bench: ended with 3"):
        LlamaCpp(tmp_path / "m.gguf", tmp_path).about()
    (tmp_path / "text.gguf").write_text("weights")
    with pytest.raises(ConfigError, match=r"text\.gguf: is no GGUF file.*make-gguf"):
        LlamaCpp(tmp_path / "text.gguf", tmp_path)


@pytest.mark.parametrize(
    ("printed", "said"),
    [
        ("", "answered with 0 lines of JSON instead of one; is --bin"),
        ('{"avg_ts": 1}\n{"avg_ts": 2}', "answered with 2 lines"),
        ("{not json}", "answered with '{not json}', which is no JSON"),
        ('{"build_commit": "x"}', "avg_ts is None, which is no rate"),
        ('{"avg_ts": 0.0}', r"avg_ts is 0\.0"),
        ('{"avg_ts": -9.0}', r"avg_ts is -9\.0"),
        ('{"avg_ts": NaN}', "avg_ts is nan"),
        ('{"avg_ts": "fast"}', "avg_ts is 'fast'"),
        ("\udcff", "answered with 0 lines"),
    ],
)
def test_llama_cpp_that_answers_nonsense(tmp_path, printed, said):
    programs(tmp_path)
    answer = tmp_path / "answer"
    answer.write_bytes(printed.encode(errors="surrogateescape"))
    (tmp_path / "llama-bench").write_text(f"#!/bin/sh\ncat {answer}\n")
    with pytest.raises(ConfigError, match=f"llama-bench: {said}"):
        LlamaCpp(tmp_path / "m.gguf", tmp_path).rates(cases_of([1], 1, 1, 8))


def test_llama_cpp_that_is_no_program_or_never_ends(tmp_path, monkeypatch):
    programs(tmp_path)
    peer = LlamaCpp(tmp_path / "m.gguf", tmp_path)
    (tmp_path / "llama-bench").write_bytes(bytes(range(7, 99)))
    with pytest.raises(ConfigError, match=r"llama-bench: cannot be run: .*; --bin DIR"):
        peer.about()
    monkeypatch.setattr(compare, "_LONGEST", 0.2)
    (tmp_path / "llama-bench").write_text("#!/bin/sh\nexec sleep 60\n")
    with pytest.raises(ConfigError, match=r"llama-bench: has not ended after 0\.2 s"):
        peer.about()


def test_whole_rounds_are_kept_when_an_engine_fails():
    ours = Fixed("ds-runtime", [[10.0], [30.0], [20.0]], [], [100] * 40)
    peer = Fixed("other", [[4.0], [5.0]], [])
    answer = peer.rates

    def rates(cases):
        try:
            return answer(cases)
        except StopIteration:
            raise ConfigError("other: is gone") from None

    peer.rates = rates
    found = compare.run(ours, peer, (Case(1, 16, 32),), 5, lambda n: None)
    assert found["results"][0]["rounds"] == {"ds-runtime": [10.0, 30.0], "other": [4.0, 5.0]}
    assert len(found["results"][0]["reads"]) == len(found["results"][0]["limits"]) == 2
    assert len(found["neighbours"]) == len(found["ceilings"]) == 2
    text = compare.render(found | {"model": "m"}).splitlines()
    assert text[-1] == "ended early in round 3 of 5: other: is gone"
    again = Fixed("ds-runtime", [[10.0]], [], [100] * 40)
    with pytest.raises(ConfigError, match="is gone"):
        compare.run(again, peer, (Case(1, 16, 32),), 5, lambda n: None)


def test_the_rate_of_a_child_leaves_the_prompt_out(monkeypatch):
    child = Child("ds-runtime", {}, [Case(4, 16, 32)])
    monkeypatch.setattr(child, "ask", lambda request: {"first": 0.5, "whole": 2.5})
    assert child.rates([Case(4, 16, 32), Case(1, 100, 0)]) == [4 * 32 / 2.0, 200.0]


class Counted:
    vocab = 9

    def __init__(self, settings, rows, context):
        self.asked = []

    def about(self):
        return {}

    def limits(self, steps):
        return {"steps": steps}

    def read_rate(self):
        return 5e9

    def seconds(self, prompts, tokens):
        self.asked.append((len(prompts), len(prompts[0]), tokens))
        return float(tokens)


def test_a_turn_times_one_token_and_all(monkeypatch):
    made = Counted({}, 1, 1)
    monkeypatch.setattr(interleaved, "load_attr", lambda name: lambda *args: made)
    asked = [
        {"settings": {}, "rows": 4, "context": 49},
        {"do": "seconds", "batch": 4, "input_len": 16, "output_len": 32},
        {"do": "seconds", "batch": 1, "input_len": 64, "output_len": 0},
        {"do": "limits", "steps": [[1, 32]]},
        {"do": "read"},
    ]
    out = io.StringIO()
    assert interleaved.main("ds-runtime", io.StringIO("\n".join(map(json.dumps, asked))), out) == 0
    about, decode, prefill, limits, read = map(json.loads, out.getvalue().splitlines())
    assert about == {"about": {}}
    assert (decode["first"], decode["whole"]) == (1.0, 33.0)
    assert prefill["first"] == 1.0 and limits["steps"] == [[1, 32]] and read["read"] == 5e9
    # The first run of each, behind another engine's turn, is not counted.
    assert made.asked[1:] == [(4, 16, 1), (4, 16, 1), (4, 16, 33), (1, 64, 1), (1, 64, 1)]
    assert decode["cpu"] >= 0


def test_this_runtime_takes_turns_in_its_own_process(checkpoint):
    cases = cases_of([1, 2], 4, 2, 8)
    settings = {"model": str(checkpoint), "threads": 1, "kv_memory": 1 << 20}
    child = Child("ds-runtime", settings, cases)
    try:
        about = child.about()
        assert about["kernels"]["linear"] and about["dtype"] == "float32" and about["load_s"] > 0
        assert min(child.rates(cases)) > 0
        assert child.cpu > 0
    finally:
        child.close()
    with pytest.raises(ConfigError, match="its process ended with 0"):
        child.ask({"do": "limits"})


def test_limits_of_this_runtime(monkeypatch, checkpoint):
    """Bytes of a step are those of `bench ops --bytes`."""
    monkeypatch.setattr(CpuPlatform, "ceilings", lambda self, rank=0: Ceilings(5e9, {}))
    settings = {"model": str(checkpoint), "platform": "cpu", "threads": torch.get_num_threads()}
    found = interleaved.Ours(settings, 4, 64).limits([(1, 8), (4, 8)])
    assert found["ceilings"]["bandwidth"] == 5e9
    assembly = measure.assembled(EngineConfig(**settings), frozenset(settings), None, "")
    steps = step_work.step_bytes(assembly, (1, 4), 8)
    assert found["step_bytes"] == [sum(w.nbytes for w in steps[n].values()) for n in (1, 4)]


def test_the_verb(tmp_path, capsys, monkeypatch, checkpoint):
    asked = []

    def child(name, settings, cases):
        asked.append((name, settings, cases))
        return Fixed(name, [[20.0, 80.0]] * 2, [], [100] * 40)

    monkeypatch.setattr(compare, "Child", child)
    programs(tmp_path)
    command = ["bench", "compare", "--engine", "llama.cpp", "--bin", str(tmp_path), "--rounds", "2"]
    command += ["--peer-model", str(tmp_path / "m.gguf"), "--model", str(checkpoint), "--pause"]
    command += ["--batch-size", "2", "--prefill", "60", "--threads", "1"]
    monkeypatch.setattr("sys.stdin", lines := io.StringIO("\n\nleft"))
    assert main([*command, "--json"]) == 0
    assert lines.read() == "left"
    said = capsys.readouterr()
    assert said.err.splitlines() == ["round 1 of 2", "round 2 of 2"]
    found = json.loads(said.out)
    assert [r["ratio"] for r in found["results"]] == [1.0, 0.5]
    assert found["model"] == "tiny" and found["settings"] == {"threads": 1} and found["command"]
    assert asked[0] == (
        "ds-runtime",
        {"model": str(checkpoint), "threads": 1},
        (Case(2, 16, 32), Case(1, 60, 0)),
    )
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert main(command) == 0
    assert "tiny against llama.cpp: medians of 2" in capsys.readouterr().out
    transformers = ["--engine", "transformers", "--rounds", "2", "--model", str(checkpoint)]
    assert main(["bench", "compare", *transformers, "--batch-size", "1", "--prefill", "9"]) == 0
    assert [name for name, _, _ in asked[-2:]] == ["ds-runtime", "transformers"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--batch-size", "0"], "--batch-size 0: must be at least 1"),
        (["--prefill", "-1"], "--prefill -1"),
        ([], "--peer-model must name a GGUF file"),
        (["--peer-model", "x", "--bin", "/none"], "llama-bench: not found in /none"),
    ],
)
def test_wrong_flags_are_refused(capsys, checkpoint, flags, said):
    command = ["bench", "compare", "--engine", "llama.cpp", "--model", str(checkpoint)]
    assert main([*command, *flags]) != 0
    assert said in capsys.readouterr().err


def test_an_engine_that_does_not_start_says_why(checkpoint):
    child = Child("ds-runtime", {"model": str(checkpoint), "platform": "none"}, [Case(1, 1, 1)])
    with pytest.raises(ConfigError, match=r"ds-runtime: .*none"):
        child.about()
    child.close()


@pytest.mark.slow
def test_transformers_takes_turns(checkpoint):
    child = Child("transformers", {"model": str(checkpoint), "threads": 1}, [Case(2, 4, 2)])
    assert child.about()["dtype"] == "torch.float32"
    assert min(child.rates([Case(2, 4, 2), Case(1, 8, 0)])) > 0
    child.close()
