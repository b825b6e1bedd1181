"""`--model`: what is no hub id, and what lies in the cache only in part."""

from __future__ import annotations

import json
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants

from ds_runtime.checkpoint.hub import resolve_model
from ds_runtime.errors import CheckpointError

COMMIT = "0" * 40


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and no network."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    ours = huggingface_hub.snapshot_download

    def download(name: str, **kwargs: object) -> str:
        return ours(name, cache_dir=str(tmp_path), **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return tmp_path


def snapshot(cache: Path) -> Path:
    """Of a/b: an index that names two shards, of which one is here."""
    root = cache / "models--a--b"
    folder = root / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text(COMMIT)
    where = {"x": "1.safetensors", "y": "2.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    (folder / "1.safetensors").write_bytes(b"")
    return folder


@pytest.mark.parametrize("name", ["bad repo/..name", "a/b--c", "a/-b"])
def test_what_no_hub_id_can_be(cache: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match=r"no hub id: one is OWNER/NAME"):
        resolve_model(name)


def test_a_snapshot_that_lacks_a_shard_is_not_served(cache: Path) -> None:
    folder = snapshot(cache)
    with pytest.raises(CheckpointError, match=r"2\.safetensors: missing.*hf download a/b"):
        resolve_model("a/b")
    (folder / "2.safetensors").write_bytes(b"")
    assert resolve_model("a/b") == folder


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("No such repository.\n\nRequest id: 1\nPlease log in.", "(OSError: No such repository)"),
        ("\nIt failed:\n more", "(OSError: It failed)"),
        ("", "(OSError: )"),
    ],
)
def test_a_failed_download_is_one_line(
    cache: Path, monkeypatch: pytest.MonkeyPatch, text: str, said: str
) -> None:
    ours = huggingface_hub.snapshot_download

    def download(name: str, **kwargs: object) -> str:
        if "local_files_only" in kwargs:
            return ours(name, **kwargs)  # type: ignore[arg-type]
        raise OSError(text)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(CheckpointError) as raised:
        resolve_model("a/b")
    assert said in str(raised.value) and "\n" not in str(raised.value)


def test_what_is_not_cached_names_the_command(cache: Path) -> None:
    with pytest.raises(CheckpointError, match=r"not in the local cache.*hf download a/b"):
        resolve_model("a/b")
