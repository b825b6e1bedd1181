"""Runs the CPU plugin's native code under the tools that watch memory and threads.

python tools/check_native.py [valgrind] [address] [thread] [pytest] [arm] [amx] [--require]
    [--seed SEED] [--build FOLDER] [--outcomes FOLDER]

valgrind  the driver on the generic library, under memcheck, leaks included
address   the driver on every library, instrumented by AddressSanitizer and UBSan
thread    the driver under ThreadSanitizer, with std::thread in place of OpenMP, whose runtime the
          tool cannot see through: the same division of work, the same kernels
pytest    conformance of the CPU's kernels on the instrumented libraries of `address`, and the tests
          that fuzz their shapes
arm       the driver on the generic library of aarch64, cross-compiled and emulated; its results
          must be near those of this machine
amx       the driver, conformance and the CPU's tests on the library for AMX, whose instructions are
          emulated (tests/native/amx_emulated.h)

Each but the last two also does on purpose what it must find. Without names all run; one whose tool
is missing is skipped with a line, or with --require ends the run. With --seed the libraries are the
best, the generic and a tenth of the others, as tools/receipts.py draws them; without, all that run
here. --outcomes leaves what to make a receipt of. Needs cmake and a C++ compiler.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import receipts
from ds_runtime_cpu import native
from ds_runtime_cpu.isa import missing
from ds_runtime_cpu.machine import processor

Env = Mapping[str, str] | None

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 1500  # seconds for one command, on a machine that also does other things
CXX = os.environ.get("CXX") or shutil.which("c++") or "c++"
RUNTIMES = "Debian: g++, or libclang-rt-dev for clang++"
# LeakSanitizer stops all threads through ptrace, and with OpenMP's may itself crash; leaks are
# valgrind's to find.
NO_LEAKS = {"ASAN_OPTIONS": "detect_leaks=0"}
FUZZED = ("matmul", "attention")  # experts are in the driver and in conformance
TILED = (*FUZZED, "experts", "int8", "bf12", "sparse", "window")  # what matrix units multiply
TESTS = (
    *(f"tests/conformance/test_{name}.py" for name in ("variants", "ops")),
    *(f"tests/plugins/test_cpu_{name}.py" for name in FUZZED),
    *("-k", "cpu", "-n", "2"),
)

OF_AMX = (
    *(f"tests/conformance/test_{name}.py" for name in ("variants", "ops")),
    *(f"tests/plugins/test_cpu_{name}.py" for name in TILED),
    *("-k", "amx or (test_ops and cpu)", "-n", "2"),
)


class Missing(Exception):
    """What a check needs and this machine lacks, with the package of Debian that has it."""


@dataclass
class Check:
    """What a check may use, and what it found."""

    build: Path  # for what it compiles
    isas: Sequence[str]  # best first
    outcomes: Path | None  # where pytest leaves what it found
    found: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    def drives(self, command: Sequence[str | Path], library: Path, env: Env = None) -> None:
        """Run the driver on one library; it must say that all is well."""
        said = must([*command, library], env)
        options = [word for word in map(str, command) if not word.startswith("/")]
        isa = library.stem.rpartition("_")[2]
        self.found[isa].append(f"{' '.join(options)}: {said.replace(f'{library.parent}/', '')}")

    def finds(
        self, command: Sequence[str | Path], library: Path, says: str, env: Env = None
    ) -> None:
        """Run the driver with a fault: it must fail and say `says`, so the tool sees this kind."""
        must_find([*command, library], says, env)
        self.found[library.stem.rpartition("_")[2]].append(f"found {says}")


def say(text: str) -> None:
    print(text, flush=True)


def must(command: Sequence[str | Path], env: Env = None) -> str:
    """What a command in the repository's root prints, which is passed on; it must succeed."""
    start = time.monotonic()
    say("$ " + " ".join(map(str, command)))
    done = subprocess.run(
        list(map(str, command)),
        cwd=ROOT,
        env={**os.environ, **(env or {})},
        timeout=LIMIT,
        stdout=subprocess.PIPE,
        text=True,
    )
    say(done.stdout.rstrip())
    say(f"  exit {done.returncode} after {time.monotonic() - start:.1f} s")
    if done.returncode:
        sys.exit("FAILED")
    return done.stdout.strip()


def must_find(command: Sequence[str | Path], says: str, env: Env = None) -> None:
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


def valgrind(check: Check) -> None:
    tool = shutil.which("valgrind")
    if tool is None:
        raise Missing("valgrind (Debian: valgrind)")
    driver, library = built(check.build / "plain", "", ["generic"])
    leaks = ["--leak-check=full", "--errors-for-leak-kinds=definite", "--show-leak-kinds=definite"]
    command = [tool, "--quiet", "--error-exitcode=9", *leaks, driver]
    check.drives([driver, "--stress", "4"], library)
    check.drives(command, library)
    check.finds([*command, "--fault", "overrun"], library, "Invalid write")
    check.finds([*command, "--fault", "uninitialised"], library, "uninitialised value")
    check.finds([*command, "--fault", "leak"], library, "definitely lost")


def address(check: Check) -> None:
    need("address,undefined")
    driver, *libraries = built(check.build / "address", "address,undefined", check.isas)
    for library in libraries:
        check.drives([driver, "--large"], library, NO_LEAKS)
        check.drives([driver, "--stress", "4"], library, NO_LEAKS)
    last = libraries[-1]
    check.finds([driver, "--fault", "overrun"], last, "ERROR: AddressSanitizer", NO_LEAKS)
    check.finds([driver, "--fault", "misaligned"], last, "misaligned address", NO_LEAKS)


def thread(check: Check) -> None:
    need("thread")
    isas = dict.fromkeys((check.isas[0], receipts.BASELINE))
    driver, *libraries = built(check.build / "thread", "thread", list(isas))
    for library in libraries:
        check.drives([driver], library)
        check.drives([driver, "--stress", "4"], library)
    check.finds([driver, "--fault", "race"], libraries[-1], "data race")


def pytest(check: Check) -> None:
    need("address,undefined")
    runtimes = [
        Path(subprocess.check_output([CXX, f"-print-file-name={name}"], text=True).strip())
        for name in ("libasan.so", "libstdc++.so")
    ]
    for runtime in runtimes:
        if not runtime.is_absolute():
            raise Missing(f"{runtime} of {CXX}, to preload (Debian: g++, with CXX=g++)")
    folder = check.build / "address"
    if not folder.is_dir():
        built(folder, "address,undefined", check.isas)
    env = {
        "LD_PRELOAD": " ".join(map(str, runtimes)),
        **NO_LEAKS,
        "PYTHONPATH": str(ROOT / "tests" / "native"),
    }
    python = [sys.executable, "-c", OVERRUN, str(folder)]
    must_find(python, "ERROR: AddressSanitizer", env)
    options = ["-p", "instrumented", "--native-libraries", folder, "-p", "no:cacheprovider"]
    options += ["--every-isa"]
    if check.outcomes is not None:
        options += ["--outcomes", check.outcomes]
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


def arm(check: Check) -> None:
    compiler, emulator = (shutil.which(n) for n in ("aarch64-linux-gnu-g++", "qemu-aarch64-static"))
    if compiler is None:
        raise Missing("aarch64-linux-gnu-g++ (Debian: g++-aarch64-linux-gnu)")
    if emulator is None:
        raise Missing("qemu-aarch64-static (Debian: qemu-user-static)")
    driver, library = built(check.build / "plain", "", ["generic"])
    results = check.build / "results"
    must([driver, "--save", results, library])
    system = ["-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64"]
    system.append(f"-DCMAKE_CXX_COMPILER={compiler}")
    driver, library = built(check.build / "arm", "", ["generic"], system)
    must([emulator, "-L", "/usr/aarch64-linux-gnu", driver, library])
    must([emulator, "-L", "/usr/aarch64-linux-gnu", driver, "--like", results, library])


def amx(check: Check) -> None:
    if lacking := missing("avx512bf16", processor().features):
        raise Missing(f"{', '.join(lacking)} of this processor")
    folder = check.build / "amx"
    driver, *libraries = built(folder, "", ["amx", "generic"], ["-DDS_EMULATE_AMX=ON"])
    for command in ([driver], [driver, "--stress", "4"]):
        must([*command, libraries[0]])
    options = ["-p", "instrumented", "--native-libraries", folder, "--emulated-amx"]
    options += ["-p", "no:cacheprovider", "--every-isa"]
    env = {"PYTHONPATH": str(ROOT / "tests" / "native")}
    must([sys.executable, "-m", "pytest", *options, *OF_AMX], env)


CHECKS: Mapping[str, Callable[[Check], None]] = {
    "valgrind": valgrind,
    "address": address,
    "thread": thread,
    "pytest": pytest,
    "arm": arm,
    "amx": amx,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checks", nargs="*", metavar="CHECK", help=", ".join(CHECKS))
    parser.add_argument("--build", type=Path, help="keep what is built in this folder")
    parser.add_argument("--outcomes", type=Path, help="leave what each check found in this folder")
    parser.add_argument("--seed", help="check a draw of the instruction sets, not all of them")
    parser.add_argument("--require", action="store_true", help="fail where a tool is missing")
    args = parser.parse_args()
    if unknown := set(args.checks) - set(CHECKS):
        parser.error(f"{', '.join(sorted(unknown))}: no such check; there are {', '.join(CHECKS)}")
    if shutil.which("cmake") is None:
        sys.exit("FAILED: missing: cmake (Debian: cmake)")
    isas = receipts.instruction_sets(native.runnable(), args.seed)
    say(f"instruction sets: {', '.join(isas)}" + (f" (--seed {args.seed})" if args.seed else ""))
    with tempfile.TemporaryDirectory() as temporary:
        build = (args.build or Path(temporary)).resolve()
        for name in args.checks or CHECKS:
            say(f"== {name}")
            path = args.outcomes.resolve() / f"{name}.json" if args.outcomes else None
            check = Check(build, isas, path)
            try:
                CHECKS[name](check)
            except Missing as absent:
                if args.require:
                    sys.exit(f"FAILED: missing: {absent}")
                say(f"skipped: missing: {absent}")
            if path is not None and check.found:
                receipts.save(path, check.found)


if __name__ == "__main__":
    main()
