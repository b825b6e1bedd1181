"""Prompts find on disk what an engine before this one has computed."""

from __future__ import annotations

import errno
import gc
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
import urllib.request
import weakref
from pathlib import Path

import pytest

from ds_runtime import LLM, SamplingParams
from ds_runtime.description.hf import load_config
from ds_runtime.engine.device.runner import Runner
from ds_runtime.errors import ConfigError
from ds_runtime.kv.tiers.folder import DiskFolder
from ds_runtime.platform.page_copies import TorchPageCopies
from ds_runtime_kit.models.adapters import write_adapter
from parts import mostly_slow

SETTINGS = {"platform": "cpu", "dtype": "float32", "threads": 1, "enable_hierarchical_cache": True}
GREEDY = SamplingParams(max_tokens=6, logprobs=2, ignore_eos=True)
PROMPT = [random.Random(4).randrange(2, 258) for _ in range(130)]


def answer(llm, prompt=PROMPT, **more):
    (output,) = llm.generate(prompt, GREEDY, **more)
    return output.token_ids, [e.logprob for e in output.logprobs], output.usage.cached_by_tier


@pytest.mark.parametrize("tokens", [1, 6])
def test_a_restart_keeps_what_was_cached(tiny, tmp_path, tokens):
    given = {**SETTINGS, "disk_cache": str(tmp_path / "cache")}
    with LLM(tiny, **given) as llm:
        llm.generate(PROMPT, SamplingParams(max_tokens=tokens, ignore_eos=True))
        llm.flush_cache()
        cold = answer(llm)
        written = llm.stats().disk_written_bytes
    assert cold[2]["device"] == 0 and written > 0
    with LLM(tiny, **given) as llm:
        again = answer(llm)
        stats = llm.stats()
    assert again[2] == {"device": 0, "host": 0, "storage": 128}
    assert again[0] == cold[0] and again[1] == pytest.approx(cold[1], abs=1e-4)
    assert stats.cached_disk_tokens == 128 and stats.disk_read_bytes > 0


RANKS = [
    {"tp": 2},
    {"tp": 2, "enable_dp_attention": True},
    {"tp": 2, "disable_mla": True},
]


@pytest.mark.parametrize("more", mostly_slow(RANKS, 1))
def test_several_ranks_keep_what_was_cached(tiny, tmp_path, more):
    """Alike on all of them, of sequences of each, or the heads of each."""
    given = {**SETTINGS, **more, "disk_cache": str(tmp_path / "cache")}
    prompts = [[n, *PROMPT] for n in range(2, 6)]
    with LLM(tiny, **given) as llm:
        cold = [answer(llm, prompt) for prompt in prompts]
    files = [path.name for path in (tmp_path / "cache").glob("*/*.page")]
    assert len(files) == len({*files}) and len(files) >= 32 * (1 + ("disable_mla" in more))
    with LLM(tiny, **given) as llm:
        again = [answer(llm, prompt) for prompt in prompts]
        read = llm.stats().disk_read_bytes
    assert [one[2]["storage"] for one in again] == [128] * 4 and read > 0
    for mine, theirs in zip(again, cold, strict=True):
        assert mine[0] == theirs[0] and mine[1] == pytest.approx(theirs[1], abs=1e-4)


def test_what_one_rank_cannot_read_is_computed(tiny, tmp_path):
    """Its heads lie in files of its own, of which some are torn and some are gone."""
    given = {**SETTINGS, "tp": 2, "disable_mla": True, "disk_cache": str(tmp_path / "cache")}
    with LLM(tiny, **given) as llm:
        cold = answer(llm)
    files = sorted((tmp_path / "cache").glob("*/*.page"), key=lambda path: path.stat().st_mtime_ns)
    files[0].write_bytes(files[0].read_bytes()[:-1])
    files[-1].unlink()
    with LLM(tiny, **given) as llm:
        again = answer(llm)
    assert again[2]["storage"] < 128
    assert again[0] == cold[0] and again[1] == pytest.approx(cold[1], abs=1e-4)


@pytest.mark.parametrize("closes", [False, True])
def test_what_never_left_the_device_is_on_disk(tiny, tmp_path, closes):
    """Written back once the engine is idle, or closes."""
    more = {"hicache_write_policy": "write_back", "disk_cache": str(tmp_path / "cache")}
    with LLM(tiny, **SETTINGS, **more) as llm:
        cold = answer(llm)
        assert not list((tmp_path / "cache").glob("*/*.page"))
        engine, until = llm._alive(), time.monotonic() + 30
        while not closes and engine.prepare() and time.monotonic() < until:
            pass
        found = len(list((tmp_path / "cache").glob("*/*.page")))
        assert found == 0 if closes else found >= 8
    with LLM(tiny, **SETTINGS, **more) as llm:
        again = answer(llm)
    assert again[2]["storage"] == 128
    assert again[0] == cold[0] and again[1] == pytest.approx(cold[1], abs=1e-4)


LOOP = """
    import sys
    from ds_runtime import LLM, SamplingParams
    from test_disk_tier_llm import PROMPT, SETTINGS

    params = SamplingParams(max_tokens=6, ignore_eos=True)
    with LLM(sys.argv[1], **SETTINGS, disk_cache=sys.argv[2]) as llm:
        while True:
            for n in range(2, 250):
                llm.generate([n, *PROMPT], params)
"""


@pytest.mark.parametrize("pages", mostly_slow([60, 1, 200], 1))
def test_an_engine_that_is_killed_leaves_what_another_may_read(tiny, tmp_path, pages):
    """Whatever it was writing. Two of them share the folder."""
    folder = tmp_path / "cache"
    command = [sys.executable, "-c", textwrap.dedent(LOOP), str(tiny), str(folder)]
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parent), os.environ.get("PYTHONPATH", "")])
    both = [subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}) for _ in range(2)]
    until = time.monotonic() + 90
    while len(list(folder.glob("*/*.page"))) < pages:
        assert time.monotonic() < until and all(one.poll() is None for one in both)
        time.sleep(0.01)
    for one in both:
        one.send_signal(signal.SIGKILL)
        one.wait()
    with LLM(tiny, **SETTINGS) as llm:
        cold = [answer(llm, [n, *PROMPT[:120]]) for n in (2, 3, 9)]
    with LLM(tiny, **SETTINGS, disk_cache=str(folder)) as llm:
        again = [answer(llm, [n, *PROMPT[:120]]) for n in (2, 3, 9)]
    for mine, theirs in zip(again, cold, strict=True):
        assert mine[0] == theirs[0] and mine[1] == pytest.approx(theirs[1], abs=1e-4)
    assert again[0][2]["storage"] == (112 if pages > 20 else again[0][2]["storage"])


DEATH = """
    import json, os, signal, sys, time
    import psutil
    from ds_runtime import LLM, SamplingParams
    from ds_runtime.errors import EngineDeadError

    if __name__ == "__main__":
        model, given, seconds = json.loads(sys.argv[1])
        llm = LLM(model, **given)
        prompts = [[number, *range(2, 130)] for number in range(2, 8)]
        llm.generate(prompts, SamplingParams(max_tokens=4, ignore_eos=True))
        (other,) = llm.pids
        os.kill(other, signal.SIGKILL)
        time.sleep(seconds)
        begin = time.monotonic()
        try:
            llm.close()
            print("closed")
        except EngineDeadError as e:
            print(f"{e}, after {time.monotonic() - begin:.1f} s")
        print("alive", psutil.pid_exists(other), "on")
    """


@pytest.mark.parametrize(
    ("policy", "disk", "seconds"),
    [
        ("write_back", True, 0.0),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ("write_through", True, 0.0),
                ("write_back", True, 2.0),
                ("write_through", True, 2.0),
                ("write_back", False, 0.0),
            ]
        ),
    ],
)
def test_closing_ends_soon_where_another_rank_has_died(tiny, tmp_path, policy, disk, seconds):
    """Though the disk waits for what that one writes: it says so, and the caller goes on."""
    given = {**SETTINGS, "tp": 2, "hicache_write_policy": policy}
    if disk:
        given["disk_cache"] = str(tmp_path / "cache")
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(DEATH))
    command = [sys.executable, str(script), json.dumps([str(tiny), given, seconds])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as done:
        try:
            said, _ = done.communicate(timeout=60)
        finally:
            done.kill()
    told, left = said.splitlines()
    found = re.fullmatch(r"engine rank 1 was ended by SIGKILL.*, after (\d+\.\d) s", told)
    assert found is not None, told
    assert float(found[1]) < 10 and left == "alive False on"


def test_other_weights_find_nothing(tiny, tmp_path):
    """Nor does another page size."""
    given = {**SETTINGS, "disk_cache": str(tmp_path / "cache")}
    with LLM(tiny, **given) as llm:
        answer(llm)
    for more in ({"load_format": "dummy"}, {"page_size": 32}):
        with LLM(tiny, **given, **more) as llm:
            assert sum(answer(llm)[2].values()) == 0


def test_what_cannot_be(tiny, tmp_path):
    with pytest.raises(ConfigError, match="--enable-hierarchical-cache"):
        LLM(tiny, platform="cpu", disk_cache=str(tmp_path))


def test_an_adapter_that_is_gone_leaves_its_pages_to_nobody(tiny, tmp_path):
    """Two of them lay in one folder, one after the other, and no longer do."""
    place, said = tmp_path / "adapter", []
    given = {**SETTINGS, "disk_cache": str(tmp_path / "cache"), "max_loras": 1, "max_lora_rank": 8}
    for seed in (1, 2):
        write_adapter(place, load_config(tiny), lambda m: "self_attn" in m, seed=seed)
        with LLM(tiny, **given) as llm:
            llm.load_lora_adapter("x", str(place))
            shutil.rmtree(place)
            said.append(answer(llm, lora="x"))
    assert [sum(cached.values()) for _, _, cached in said] == [0, 0]
    assert said[0][1] != said[1][1]


def test_an_idle_engine_writes_to_the_end(tiny, tmp_path, monkeypatch):
    """More than may be on its way at a time; nobody asks for anything meanwhile."""
    cache, write = tmp_path / "cache", DiskFolder.write

    def slow(*args):
        time.sleep(0.1)
        return write(*args)

    monkeypatch.setattr(DiskFolder, "write", slow)
    with LLM(tiny, **SETTINGS, kv_memory="300KB", hicache_ratio=1, disk_cache=str(cache)) as llm:
        answer(llm)
        engine = llm._alive()
        assert engine.disk.lags and len(list(cache.glob("*/*.page"))) < 8
        until = time.monotonic() + 30
        while engine.prepare() and time.monotonic() < until:
            pass
        assert not engine.disk.lags and len(list(cache.glob("*/*.page"))) >= 8


def test_an_idle_engine_goes_on_beside_a_look_that_hangs(tiny, tmp_path, monkeypatch):
    """What the device alone has goes to the disk while nobody knows what is there."""
    cache, has, release = tmp_path / "cache", DiskFolder.has, threading.Event()

    def stuck(*given):
        release.wait(60)
        return has(*given)

    monkeypatch.setattr("ds_runtime.kv.tiers.disk.LONGEST", 0.3)
    monkeypatch.setattr(DiskFolder, "has", stuck)
    more = {"hicache_write_policy": "write_back", "disk_cache": str(cache)}
    try:
        with LLM(tiny, **SETTINGS, **more) as llm:
            answer(llm)
            engine, until = llm._alive(), time.monotonic() + 20
            while len(list(cache.glob("*/*.page"))) < 8 and time.monotonic() < until:
                engine.prepare()
            assert engine.disk.lags, "the look hangs yet"
            assert len(list(cache.glob("*/*.page"))) >= 8
            assert not any(tier.unsettled for tier in engine._tiers)
            release.set()
    finally:
        release.set()


SLOWLY = """
    import sys, time
    from ds_runtime.kv.tiers.folder import DiskFolder

    write = DiskFolder.write

    def slow(*given):
        time.sleep(float(sys.argv[1]))
        return write(*given)

    DiskFolder.write = slow  # the engine's process imports this script, too
    if __name__ == "__main__":
        from ds_runtime.cli import main

        sys.exit(main(["serve", *sys.argv[2:], "--platform", "cpu", "--port", "0"]))
"""


@pytest.mark.parametrize("signals", [1, 2])
def test_a_server_that_ends_waits_for_its_disk_unless_told_twice(tiny, tmp_path, signals):
    """For longer than an engine has to leave that writes nothing."""
    cache, script = tmp_path / "cache", tmp_path / "slowly.py"
    script.write_text(textwrap.dedent(SLOWLY))
    flags = ["--enable-hierarchical-cache", "--hicache-write-policy", "write_back"]
    flags += ["--disk-cache", str(cache), "--threads", "1", "--served-model-name", "any"]
    command = [sys.executable, str(script), "0.5", "--model", str(tiny), *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            lines = iter(server.stdout)
            url = next(found[1] for line in lines if (found := re.search(r"at (http://\S+)", line)))
            body = json.dumps({"model": "any", "prompt": PROMPT, "max_tokens": 1}).encode()
            head = {"content-type": "application/json"}
            request = urllib.request.Request(f"{url}/v1/completions", body, head)
            urllib.request.urlopen(request, timeout=60).read()
            server.send_signal(signal.SIGTERM)
            if signals == 2:
                time.sleep(1)
                server.send_signal(signal.SIGTERM)
            begin = time.monotonic()
            assert server.wait(40) == 0
            took = time.monotonic() - begin
        finally:
            server.kill()
    found = len(list(cache.glob("*/*.page")))
    assert (found >= 8) == (signals == 1) and (took > 3 or signals == 2)


@pytest.mark.parametrize("ratio", [2.0, 0.5])
def test_equal_prompts_read_each_file_once(tiny, tmp_path, ratio):
    """They come together, after a restart; also where host memory has no room for a whole one."""
    given = {**SETTINGS, "kv_memory": "300KB", "disk_cache": str(tmp_path / "cache")}
    with LLM(tiny, **given) as llm:
        answer(llm)
    read = list[int]()
    for count in (1, 12):
        with LLM(tiny, **given, hicache_ratio=ratio) as llm:
            outputs = llm.generate([PROMPT] * count, GREEDY)
            read.append(llm.stats().disk_read_bytes)
        assert all(sum(o.usage.cached_by_tier.values()) > 0 for o in outputs)
    assert 0 < read[0] == read[1]


def test_a_disk_that_is_full_at_the_start_is_a_line(tiny, tmp_path, monkeypatch, capfd):
    def full(path, parts):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("ds_runtime.kv.tiers.folder._write", full)
    with LLM(tiny, **SETTINGS, disk_cache=str(tmp_path / "cache")) as llm:
        assert len(answer(llm)[0]) == 6
    lines = [line for line in capfd.readouterr().err.splitlines() if "No space left" in line]
    assert len(lines) == 1 and lines[0].startswith("warning: --disk-cache")


def test_a_start_that_fails_late_leaves_the_process_as_it_was(tiny, monkeypatch):
    """The model is loaded by then: its memory can be had again."""
    made, start = weakref.WeakSet(), Runner.__init__

    def seen(self, *args, **more):
        made.add(self)
        start(self, *args, **more)

    monkeypatch.setattr(Runner, "__init__", seen)
    before = gc.get_threshold(), gc.get_freeze_count()
    with pytest.raises(ConfigError, match="--disk-cache /proc/nope"):
        LLM(tiny, **SETTINGS, disk_cache="/proc/nope")
    assert (gc.get_threshold(), gc.get_freeze_count()) == before
    gc.collect()
    assert len(made) == 0


@pytest.mark.parametrize("error", [RuntimeError, MemoryError])
def test_no_host_memory_names_the_flags(tiny, monkeypatch, error):
    """Whatever it is that a device's runtime says then."""

    def none(self, blocks, size):
        raise error("there is none")

    monkeypatch.setattr(TorchPageCopies, "buffer", none)
    said = "--enable-hierarchical-cache.*--hicache-ratio or --hicache-size.*there is none"
    with pytest.raises(ConfigError, match=said):
        LLM(tiny, **SETTINGS)


@pytest.mark.parametrize("tp", mostly_slow([1, 2], 1))
@pytest.mark.parametrize("flag", [{"hicache_size": 10**6}, {"hicache_ratio": 1e5}])
def test_more_host_memory_than_there_is_is_refused(tiny, flag, tp):
    """In a sentence with the flag, what it asks for, what is free, and what would do."""
    ((name, value),) = flag.items()
    asks = f"--{name.replace('_', '-')} {value:g}".replace("1e+06", "1000000")
    said = rf"{re.escape(asks)}: asks for .* of host memory.* (\S+ .B) are free: give --hicache-"
    given = {**SETTINGS, "kv_memory": "100MB", "tp": tp}
    with pytest.raises(ConfigError, match=said):
        LLM(tiny, **given, **flag)


def replaced(folder):
    """By a file, as it may be by a link that is gone."""
    shutil.rmtree(folder)
    folder.write_text("")


def emptied(folder):
    shutil.rmtree(folder)
    folder.mkdir(mode=0o700)


@pytest.mark.parametrize("change", [shutil.rmtree, replaced, emptied])
@pytest.mark.parametrize("before", [False, True])
def test_a_folder_that_goes_while_it_is_used(tiny, tmp_path, capfd, change, before):
    """Answers stay right, the process lives, and at most one line tells of it."""
    folder = tmp_path / "cache"
    prompts = [[n, *PROMPT] for n in (2, 3, 4)]
    with LLM(tiny, **SETTINGS) as llm:
        cold = [answer(llm, prompt) for prompt in prompts]
    with LLM(tiny, **SETTINGS, disk_cache=str(folder)) as llm:
        if before:  # what lies there is not read back then
            answer(llm, prompts[0])
            while llm._alive().prepare():
                pass
            llm.flush_cache()
        change(folder)
        found = [answer(llm, prompt) for prompt in prompts]
        while llm._alive().prepare():
            pass
        stats = llm.stats()
    for mine, theirs in zip(found, cold, strict=True):
        assert mine[0] == theirs[0] and mine[1] == pytest.approx(theirs[1], abs=1e-4)
        assert mine[2]["storage"] == 0
    lines = [line for line in capfd.readouterr().err.splitlines() if "--disk-cache" in line]
    assert len(lines) == stats.disk_stopped == (change is not emptied)


@pytest.mark.parametrize("size", [0, -1, "0"])
def test_a_size_that_holds_nothing_is_refused(tiny, tmp_path, size):
    with pytest.raises(ConfigError, match="disk-cache-size"):
        LLM(tiny, **SETTINGS, disk_cache=str(tmp_path / "cache"), disk_cache_size=size)


def test_a_size_below_a_page_is_a_line(tiny, tmp_path, capfd):
    with LLM(tiny, **SETTINGS, disk_cache=str(tmp_path / "cache"), disk_cache_size=100) as llm:
        assert len(answer(llm)[0]) == 6
        while llm._alive().prepare():
            pass
    lines = [line for line in capfd.readouterr().err.splitlines() if "--disk-cache" in line]
    assert len(lines) == 1 and "does not fit into --disk-cache-size 100" in lines[0]
