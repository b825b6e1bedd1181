"""Compilations that plugins tell: counts, lines of the log, metrics."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor

from ds_runtime import LLM, api
from ds_runtime.engine.messages import Stats
from ds_runtime.platform import compilations
from ds_runtime.server.metrics import Metrics


def test_compilations_are_counted_from_any_thread():
    with ThreadPoolExecutor(8) as threads:
        for _ in range(1000):
            threads.submit(api.compiled, "some", "kernel_a", 0.1)
    assert compilations.counted()["some", "kernel_a"] == 1000


def test_only_what_requests_wait_for_is_told(caplog):
    caplog.set_level(logging.WARNING)
    compilations.serving(False)
    api.compiled("some", "kernel_b", 0.25, "M=4")
    assert not caplog.records
    with LLM("demo", platform="cpu", threads=1, kv_memory="8MB", context_length=512) as llm:
        api.compiled("some", "kernel_b", 0.25, "M=5")
        api.compiled("some", "kernel_b", 1)
        assert llm.stats().compilations["some kernel_b"] == 3
    compilations.serving(False)
    told = [record.getMessage() for record in caplog.records]
    assert told == [
        "some compiled kernel_b while serving, which took 0.25 s: M=5",
        "some compiled kernel_b while serving, which took 1.00 s",
    ]


def test_compilers_that_do_not_tell_are_counted_by_their_folders(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    compilations.serving(False)
    cache = tmp_path / "later" / "cache"
    old = tmp_path / "old"
    (old / "kernel.before.0123").mkdir(parents=True)
    api.kept_in("lazy", cache, tells=False)
    api.kept_in("lazy", old, tells=False)
    assert not [key for key in compilations.counted() if key[0] == "lazy"]
    (cache / "kernel.gemm.0123abc").mkdir(parents=True)
    (old / "decode_uri").mkdir()
    (old / "lock").touch()
    (old / "0123456789abcdef").mkdir()
    compilations.serving(True)
    for _ in range(2):
        found = {key[1]: n for key, n in compilations.counted().items() if key[0] == "lazy"}
        assert found == {"gemm": 1, "decode_uri": 1, "kernel": 1}
    compilations.serving(False)
    told = sorted(record.getMessage() for record in caplog.records)
    assert told == [
        f"lazy compiled {name} while serving" for name in ("decode_uri", "gemm", "kernel")
    ]
    assert {cache, old} <= set(compilations.folders())


class One:
    """An engine with these figures."""

    def stats(self):
        return Stats(compilations={"triton copy_rows": 2, "nvrtc gemm.cu": 1})

    def ready(self):
        return None

    def alive(self):
        return True

    def restarts(self):
        return 0


def test_metrics_tell_them_by_compiler_and_kernel():
    text = Metrics([One()], "m", lambda: 0).text().decode()
    labels = 'compiler="{}",engine="0",kernel="{}",model_name="m"'
    name = "ds_runtime_kernel_compilations_total"
    assert f"{name}{{{labels.format('triton', 'copy_rows')}}} 2.0" in text
    assert f"{name}{{{labels.format('nvrtc', 'gemm.cu')}}} 1.0" in text
