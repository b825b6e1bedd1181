"""Paths that the system refuses, and the home of a user who has none, for each setting with one."""

from __future__ import annotations

import os

import pytest

from ds_runtime.assembly.assemble import assemble
from ds_runtime.checkpoint.hub import resolve_model
from ds_runtime.config import EngineConfig
from ds_runtime.errors import DsRuntimeError
from ds_runtime.kv.tiers.disks import check_folder

PATHS = {
    "model": {},
    "lora": {},
    "disk_cache": {"enable_hierarchical_cache": True},
    "speculative_draft_model_path": {"speculative_algorithm": "NEXTN"},
}


def start(name: str, path: str) -> None:
    """As a start reads the setting."""
    value = (f"name={path}",) if name == "lora" else path
    config = EngineConfig(**{"model": "demo", "platform": "cpu", name: value, **PATHS[name]})
    if name == "disk_cache":
        check_folder(config)
    else:
        assemble(config)


@pytest.mark.parametrize("name", PATHS)
@pytest.mark.parametrize("path", ["x" * 5000, "/" + "x" * 300, "~nobody-of-this-name/x", "~/x"])
def test_what_cannot_be_a_path_is_said(
    name: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message names the setting or the file in it, and no error of the system passes."""
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 4_000_000_000)  # of no user
    with pytest.raises(DsRuntimeError) as caught:
        start(name, path)
    said = str(caught.value)
    if path.startswith("~"):
        assert said.startswith(f"--{name.replace('_', '-')} ")
        assert said.endswith(
            f"{path}: the home folder is not known: set HOME, or write the whole path"
        )
    else:
        assert "File name too long" in said and path in said


def test_a_folder_of_another_user_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def stat(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patched:
        patched.setattr(os, "stat", stat)
        with pytest.raises(DsRuntimeError) as caught:
            resolve_model("/of/others")
    said = (
        "--model /of/others: cannot be read: Permission denied; give a checkpoint folder of yours"
    )
    assert str(caught.value) == said
