"""A file of the user's that cannot be read or written is named, with the reason and the remedy."""

from __future__ import annotations

import errno
import os
import re
import select
from pathlib import Path

import pytest

from ds_runtime.cli import main
from ds_runtime.cli.outputs import check_output

FLAGS = [  # command lines that end in a file which they read
    ["serve", "--config"],
    ["serve", "--api-key-file"],
    ["serve", "--ssl-certfile"],
    ["plan", "--plugin-allowlist"],
    ["plan", "diff", "b"],
    ["plan", "--device", "h200", "--costs"],
    ["chat", "--tools"],
    ["bench", "serving", "--dataset-name", "custom", "--dataset-path"],
    ["conform", "--case"],
]


@pytest.mark.parametrize("args", FLAGS, ids=" ".join)
@pytest.mark.parametrize("kind", ["missing", "folder", "locked"])
def test_a_file_that_cannot_be_read(
    args: list[str], kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "given"
    if kind == "folder":
        path.mkdir()
    elif kind == "locked":
        path.symlink_to(path)  # even root cannot open a link to itself
    args = [str(path) if a == "b" else a for a in args]
    assert main([*args, str(path)]) == 1
    said = capsys.readouterr().err
    assert str(path) in said and "Traceback" not in said and "Errno" not in said
    assert "give " in said, said
    reasons = ("cannot be read: ", "is not a regular file")
    assert any(reason in said for reason in reasons), said


WRITES = [  # command lines that end in what they write
    ["plan", "lock"],
    ["plugins", "--plugins", "cpu", "--lock"],
    ["new-plugin", "acme", "--into"],
    ["convert", "--model", "demo", "--to", "fp8", "--out"],
    ["bench", "make-checkpoint"],
    ["bench", "make-checkpoint", "--config-only"],
    ["bench", "make-gguf", "demo"],
    ["bench", "serving", "--base-url", "http://127.0.0.1:9", "--output-file"],
    ["bench", "serving", "--base-url", "http://127.0.0.1:9", "--save-token-ids"],
    ["tune", "costs", "--platform", "cpu", "--out"],
    ["tune", "host", "--platform", "cpu", "--out"],
    ["bisect", "--platform", "cpu", "--out"],
    ["conform", "--platform", "cpu", "cpu", "--receipts"],
]


@pytest.mark.parametrize("args", WRITES, ids=" ".join)
@pytest.mark.parametrize("kind", ["below a file", "locked"])
def test_a_file_that_cannot_be_written_is_told_at_once(
    args: list[str], kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also by a command that measures for an hour first: what it measured would be lost."""
    path = tmp_path / "given"
    if kind == "below a file":
        path.write_text("")
        path = path / "below"
    else:
        path.symlink_to(path)  # even root cannot open a link to itself
    assert main([*args, str(path)]) == 1
    said = capsys.readouterr().err
    assert str(path) in said and "Traceback" not in said and "Errno" not in said, said
    assert re.search(r"cannot be (written|read): [A-Z].*; give |exists|not a folder", said), said
    assert sorted(tmp_path.iterdir()) == [tmp_path / "given"]


def test_what_is_written_may_be_a_link_to_a_new_file_or_a_pipe(tmp_path: Path) -> None:
    link, pipe = tmp_path / "link", tmp_path / "pipe"
    link.symlink_to(tmp_path / "new" / "file")
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        for path in (link, pipe):
            check_output(path, "--out")
        assert not link.exists() and not (tmp_path / "new").exists()
        assert select.select([reader], [], [], 0)[0] == [], "its reader sees no end"
    finally:
        os.close(reader)


def test_a_measurement_is_printed_where_no_file_takes_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk has filled since the start."""
    from ds_runtime_bench.cli import bench_serving

    def one(*_: object) -> tuple[dict[str, int], str, None]:
        return {"failed": 0}, "12 ms to the first token", None

    monkeypatch.setattr(bench_serving, "_one", one)
    monkeypatch.setattr("ds_runtime_bench.serving.outputs.append", fails)
    args = ["bench", "serving", "--base-url", "http://127.0.0.1:9", "--output-file"]
    assert main([*args, str(tmp_path / "report")]) == 1
    said = capsys.readouterr()
    assert "12 ms to the first token" in said.out
    assert f"--output-file {tmp_path / 'report'}: cannot be written: No space left" in said.err


def fails(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
