"""Runs the CPU plugin's native code under the tools that watch memory and threads.

python tools/check_native.py [valgrind] [address] [thread] [pytest] [arm] [--require]
    [--build FOLDER]

valgrind  the driver on the generic library, under memcheck, leaks included
address   the driver on every library, instrumented by AddressSanitizer and UBSan
thread    the driver under ThreadSanitizer, with std::thread in place of OpenMP, whose runtime the
          tool cannot see through: the same division of work, the same kernels
pytest    conformance of the CPU's kernels on the instrumented libraries of `address`, and the tests
          that fuzz their shapes
arm       the driver on the generic library of aarch64, cross-compiled and emulated; its results
          must be near those of this machine

Each but the last also does on purpose what it must find. Without names all run; one whose tool is
missing is skipped with a line, or with --require ends the run. Needs cmake and a C++ compiler.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ds_runtime_cpu import native

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 1500  # seconds for one command, on a machine that also does other things
CXX = os.environ.get("CXX") or shutil.which("c++") or "c++"
RUNTIMES = "Debian: g++, or libclang-rt-dev for clang++"
# LeakSanitizer stops all threads through ptrace, and with OpenMP's may itself crash; leaks are
# valgrind's to find.
NO_LEAKS = {"ASAN_OPTIONS": "detect_leaks=0"}
FUZZED = ("matmul", "attention")  # experts are in the driver and in conformance
TESTS = (
    *(f"tests/conformance/test_{name}.py" for name in ("variants", "ops")),
    *(f"tests/plugins/test_cpu_{name}.py" for name in FUZZED),
    *("-k", "cpu", "-n", "2"),
)


class Missing(Exception):
    """What a check needs and this machine lacks, with the package of Debian that has it."""


def say(text: str) -> None:
    print(text, flush=True)


def run(command: Sequence[str | Path], env: Mapping[str, str] | None = None) -> int:
    """The exit status of a command in the repository's root; its output is passed on."""
    start = time.monotonic()
    say("$ " + " ".join(map(str, command)))
    done = subprocess.run(
        list(map(str, command)), cwd=ROOT, env={**os.environ, **(env or {})}, timeout=LIMIT
    )
    say(f"  exit {done.returncode} after {time.monotonic() - start:.1f} s")
    return done.returncode


def must(command: Sequence[str | Path], env: Mapping[str, str] | None = None) -> None:
    if run(command, env):
        sys.exit("FAILED")


def must_find(
    command: Sequence[str | Path], says: str, env: Mapping[str, str] | None = None
) -> None:
    """The command must fail and say `says`: the tool sees this kind of fault."""
    merged = {**os.environ, **(env or {})}
    done = subprocess.run(
        list(map(str, command)), env=merged, timeout=LIMIT, capture_output=True, text=True
    )
    if done.returncode == 0 or says not in done.stderr:
        sys.exit(f"FAILED: {' '.join(map(str, command))} does not find its fault:\n{done.stderr}")
    say(f"  found as it should be: {says}")


def need(sanitizer: str) -> None:
    """The compiler must link programs with this sanitizer."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "probe.cpp")
        source.write_text("int main() { return 0; }\n")
        command = [CXX, f"-fsanitize={sanitizer}", source, "-o", source.with_suffix("")]
        if subprocess.run(list(map(str, command)), capture_output=True).returncode:
            raise Missing(f"{CXX} links nothing with -fsanitize={sanitizer} ({RUNTIMES})")


def built(
    folder: Path, sanitize: str, isas: Sequence[str], extra: Sequence[str] = ()
) -> list[Path]:
    """The driver and the libraries, built in `folder`."""
    options = [f"-DDS_SANITIZE={sanitize}", f"-DDS_ISAS={';'.join(isas)}", "-DDS_DRIVER=ON"]
    options += extra
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    must(["cmake", "-S", ROOT, "-B", folder, *generator, *options])
    must(["cmake", "--build", folder, "--parallel", str(os.cpu_count() or 1)])
    return [folder / "ds_cpu_driver", *(folder / f"libds_cpu_{isa}.so" for isa in isas)]


def valgrind(build: Path) -> None:
    tool = shutil.which("valgrind")
    if tool is None:
        raise Missing("valgrind (Debian: valgrind)")
    driver, library = built(build / "plain", "", ["generic"])
    leaks = ["--leak-check=full", "--errors-for-leak-kinds=definite", "--show-leak-kinds=definite"]
    command = [tool, "--quiet", "--error-exitcode=9", *leaks, driver]
    must([driver, "--stress", "4", library])
    must([*command, library])
    must_find([*command, "--fault", "overrun", library], "Invalid write")
    must_find([*command, "--fault", "uninitialised", library], "uninitialised value")
    must_find([*command, "--fault", "leak", library], "definitely lost")


def address(build: Path) -> None:
    need("address,undefined")
    driver, *libraries = built(build / "address", "address,undefined", native.runnable())
    must([driver, "--large", *libraries], NO_LEAKS)
    must([driver, "--stress", "4", *libraries], NO_LEAKS)
    must_find([driver, "--fault", "overrun", libraries[-1]], "ERROR: AddressSanitizer", NO_LEAKS)
    must_find([driver, "--fault", "misaligned", libraries[-1]], "misaligned address", NO_LEAKS)


def thread(build: Path) -> None:
    need("thread")
    isas = dict.fromkeys((native.runnable()[0], "generic"))
    driver, *libraries = built(build / "thread", "thread", list(isas))
    must([driver, *libraries])
    must([driver, "--stress", "4", *libraries])
    must_find([driver, "--fault", "race", libraries[-1]], "data race")


def pytest(build: Path) -> None:
    need("address,undefined")
    runtimes = [
        Path(subprocess.check_output([CXX, f"-print-file-name={name}"], text=True).strip())
        for name in ("libasan.so", "libstdc++.so")
    ]
    for runtime in runtimes:
        if not runtime.is_absolute():
            raise Missing(f"{runtime} of {CXX}, to preload (Debian: g++, with CXX=g++)")
    folder = build / "address"
    if not folder.is_dir():
        built(folder, "address,undefined", native.runnable())
    env = {
        "LD_PRELOAD": " ".join(map(str, runtimes)),
        **NO_LEAKS,
        "PYTHONPATH": str(ROOT / "tests" / "native"),
    }
    python = [sys.executable, "-c", OVERRUN, str(folder)]
    must_find(python, "ERROR: AddressSanitizer", env)
    options = ["-p", "instrumented", "--native-libraries", folder, "-p", "no:cacheprovider"]
    must([sys.executable, "-m", "pytest", *options, *TESTS], env)


OVERRUN = """
import sys, torch
from pathlib import Path
from ds_runtime_cpu import native, small
native.library_folder = lambda: Path(sys.argv[1])
x = torch.ones(4, 64)
out = torch.empty(4, 63)
native.calls().rms_norm(0, 0, x.data_ptr(), 64, x.data_ptr(), 1e-6, out.data_ptr(), 4, 64)
"""


def arm(build: Path) -> None:
    compiler, emulator = (shutil.which(n) for n in ("aarch64-linux-gnu-g++", "qemu-aarch64-static"))
    if compiler is None:
        raise Missing("aarch64-linux-gnu-g++ (Debian: g++-aarch64-linux-gnu)")
    if emulator is None:
        raise Missing("qemu-aarch64-static (Debian: qemu-user-static)")
    driver, library = built(build / "plain", "", ["generic"])
    results = build / "results"
    must([driver, "--save", results, library])
    system = ["-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64"]
    system.append(f"-DCMAKE_CXX_COMPILER={compiler}")
    driver, library = built(build / "arm", "", ["generic"], system)
    must([emulator, "-L", "/usr/aarch64-linux-gnu", driver, library])
    must([emulator, "-L", "/usr/aarch64-linux-gnu", driver, "--like", results, library])


CHECKS: Mapping[str, Callable[[Path], None]] = {
    "valgrind": valgrind,
    "address": address,
    "thread": thread,
    "pytest": pytest,
    "arm": arm,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checks", nargs="*", metavar="CHECK", help=", ".join(CHECKS))
    parser.add_argument("--build", type=Path, help="keep what is built in this folder")
    parser.add_argument("--require", action="store_true", help="fail where a tool is missing")
    args = parser.parse_args()
    if unknown := set(args.checks) - set(CHECKS):
        parser.error(f"{', '.join(sorted(unknown))}: no such check; there are {', '.join(CHECKS)}")
    if shutil.which("cmake") is None:
        sys.exit("FAILED: missing: cmake (Debian: cmake)")
    with tempfile.TemporaryDirectory() as temporary:
        for name in args.checks or CHECKS:
            say(f"== {name}")
            try:
                CHECKS[name]((args.build or Path(temporary)).resolve())
            except Missing as missing:
                if args.require:
                    sys.exit(f"FAILED: missing: {missing}")
                say(f"skipped: missing: {missing}")


if __name__ == "__main__":
    main()
