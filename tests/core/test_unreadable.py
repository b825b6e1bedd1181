"""A file of the user's that cannot be read is named, with the reason and what to give."""

from __future__ import annotations

from pathlib import Path

import pytest

from ds_runtime.cli import main

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
