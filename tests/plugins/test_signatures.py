"""Recorded signatures: how they are read, what they refuse, and what is installed here."""

from __future__ import annotations

import json
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from vendor_doubles import SIGNATURES, RefusedError, double, parsed, records

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import record_signatures as recorder

RECORDS = sorted(SIGNATURES.glob("*.json"))


@pytest.mark.parametrize("record", RECORDS, ids=lambda p: p.stem)
def test_what_is_installed_is_as_recorded(record):
    """Where a vendor's package is here its source is read, which needs no device."""
    root = recorder.installed_root(record)
    if root is None:
        pytest.skip(f"{json.loads(record.read_text())['source']} is not installed here")
    assert recorder.differences(record, root) == []


@pytest.mark.parametrize("record", RECORDS, ids=lambda p: p.stem)
def test_every_recorded_signature_is_read(record):
    assert [parsed(text) for text in records(record.stem).values()]


@pytest.fixture
def package(tmp_path):
    files = {
        "acme/__init__.py": "from .ops import *\ntry:\n    from .fast import mul as times\n"
        "except ImportError:\n    times = None\nalias = times\n",
        "acme/ops.py": "def add(a: int, b=(1, 2), *, out=None): ...\n",
        "acme/fast.py": "class Plan:\n    def run(self, q, *args, scale: float = 1.0): ...\n"
        "def mul(x, dtype=torch.int8): ...\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("acme:add", "(a, b=(1, 2), *, out=None)"),
        ("acme:times", "(x, dtype=torch.int8)"),
        ("acme:alias", "(x, dtype=torch.int8)"),
        ("acme.fast:Plan.run", "(self, q, *args, scale=1.0)"),
    ],
)
def test_signatures_are_read_through_imports(package, name, found):
    assert recorder.signature(package, name) == found
    with zipfile.ZipFile(package / "acme.whl", "w") as made:
        for file in package.glob("acme/*.py"):
            made.write(file, f"acme/{file.name}")
    assert recorder.signature(zipfile.Path(package / "acme.whl"), name) == found


def test_what_a_package_has_otherwise_is_said(package, tmp_path):
    record = tmp_path / "acme.json"
    record.write_text('{"calls": {"acme:add": "(a, b=1)", "acme:gone": "()"}}')
    first, second = recorder.differences(record, package)
    assert first == "acme:add takes (a, b=(1, 2), *, out=None), recorded (a, b=1)"
    assert second == "acme:gone: acme has no gone"


SCHEMA = "(Tensor x, int k, *, Tensor? bias=None, int[]? perm=None, float eps=1e-20) -> Tensor"


def test_a_double_takes_what_the_vendor_takes_and_no_more():
    called = double("acme:top", SCHEMA, lambda x, k: (x, k))
    x = torch.ones(1)
    assert called(x, k=3, eps=1e-20) == (x, 3)
    for args, kwargs, said in (
        ((x,), {}, "missing a required argument: 'k'"),
        ((x, 3, None), {}, "too many positional"),
        ((x, 3), {"biass": None}, "unexpected keyword argument 'biass'"),
        ((x, 3.5), {}, "k must be int, not float"),
        ((x, 3), {"perm": x}, "perm must be List"),
    ):
        with pytest.raises(TypeError, match=said):
            called(*args, **kwargs)
    with pytest.raises(RefusedError, match="does not compute eps=1e-06"):
        called(x, 3, eps=1e-6)
    with pytest.raises(TypeError, match="has no parameter scale"):
        double("acme:top", SCHEMA, lambda x, scale: x)


@pytest.mark.parametrize("name", ["deep_gemm", "flash_mla", "flashinfer", "sgl_kernel", "vllm_xpu"])
def test_pinned_releases_are_the_recorded_ones(name):
    """Signatures are of the release that the extra of the platform installs."""
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    source = json.loads((SIGNATURES / f"{name}.json").read_text())["source"]
    assert f'"{source.replace(" ", "==")};' in text
