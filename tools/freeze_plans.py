"""Plans of every described device for every bench shape, frozen, so that a change that means to
leave them alone can show that it does.

    python tools/freeze_plans.py            # freeze what is planned now
    python tools/freeze_plans.py --check    # exit code 1 and the differences, if there are some

tests/plans holds a file per device: a line per shape and dtype, packed. Contracts' versions,
packages' versions and the digest of both are left out. A model that does not fit has its sentence.
A commit that means to change plans freezes them again and says what changed.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import difflib
import gzip
import io
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from ds_runtime.cli import main as command
from ds_runtime.plugins.described_devices import described
from ds_runtime.plugins.manager import load_plugins
from ds_runtime_bench.shapes import SHAPES

FOLDER = Path(__file__).resolve().parent.parent / "tests" / "plans"
LEFT_OUT = frozenset({"contract", "versions", "digest"})
FP8 = frozenset({"v2-lite", "v3-narrow", "v3-slice", "v32-slice"})  # shapes that are served so, too


def cases() -> list[tuple[str, str]]:
    """(shape, dtype) of every frozen plan."""
    return [
        (shape, dtype)
        for shape in SHAPES
        for dtype in ("bfloat16", "fp8")
        if dtype == "bfloat16" or shape in FP8
    ]


@cache
def devices() -> tuple[str, ...]:
    """Names of the described devices."""
    return tuple(sorted(name for name, _ in described(load_plugins())))


def planned(device: str) -> dict[str, Any]:
    """Shape and dtype → the plan on this device, or the sentence that there is instead."""
    return {f"{shape} {dtype}": plan(shape, dtype, device) for shape, dtype in cases()}


def plan(shape: str, dtype: str, device: str) -> Any:
    """What `plan --json` prints, but for what may change."""
    folder = f"{_folder(shape, dtype).name}/{shape}"
    code, out, said = _run("plan", "--model", folder, "--device", device, "--json")
    if code:
        return said.replace(folder, shape)
    return json.loads(out.replace(folder, shape), object_hook=_kept)


@cache
def _folder(shape: str, dtype: str) -> tempfile.TemporaryDirectory[str]:
    """Where a checkpoint's configuration lies, for every device, until the process ends."""
    temporary = tempfile.TemporaryDirectory()
    atexit.register(temporary.cleanup)
    made = "bench", "make-checkpoint", "--config-only", "--shape", shape, "--dtype", dtype
    code, _, said = _run(*made, f"{temporary.name}/{shape}")
    assert code == 0, said
    return temporary


def _run(*words: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = command(list(words))
    return code, out.getvalue(), err.getvalue()


def _kept(value: dict[str, Any]) -> dict[str, Any]:
    return {key: part for key, part in value.items() if key not in LEFT_OUT}


def path_of(device: str) -> Path:
    """Where a device's plans are frozen."""
    return FOLDER / f"{device}.json.gz"


def frozen(device: str) -> dict[str, Any]:
    """What was frozen; nothing of a device that is new."""
    path = path_of(device)
    found: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes())) if path.exists() else {}
    return found


def freeze(device: str) -> None:
    """Write a device's plans of now. Equal plans are equal bytes."""
    FOLDER.mkdir(exist_ok=True)
    text = json.dumps(planned(device), indent=0, sort_keys=True)
    path_of(device).write_bytes(gzip.compress(text.encode(), 9, mtime=0))


def differences(device: str) -> Iterator[str]:
    """Lines of a diff between the frozen plans of a device and those of now."""
    before, now = frozen(device), planned(device)
    for case in sorted(before.keys() | now.keys()):
        if before.get(case) != now.get(case):
            yield from difflib.unified_diff(
                _lines(before.get(case)),
                _lines(now.get(case)),
                f"{device}, {case}, frozen",
                f"{device}, {case}, now",
                n=3,
                lineterm="",
            )


def _lines(plan: Mapping[str, Any] | str | None) -> list[str]:
    return json.dumps(plan, indent=1, sort_keys=True).splitlines()


def gone() -> list[Path]:
    """Files of devices that nobody describes any more."""
    return sorted(set(FOLDER.glob("*")) - {path_of(device) for device in devices()})


def main() -> int:
    parser = argparse.ArgumentParser(description="Freeze plans, or compare with the frozen ones.")
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    args = parser.parse_args()
    if not args.check:
        for device in devices():
            freeze(device)
        for path in gone():
            path.unlink()
        return 0
    lines = [f"{path.name}: no device has this name" for path in gone()]
    lines += [line for device in devices() for line in differences(device)]
    print("\n".join(lines) or f"{len(devices())} devices: plans are the frozen ones")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
