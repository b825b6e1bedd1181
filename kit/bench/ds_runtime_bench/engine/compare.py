"""This runtime against another engine on the same machine: in one run, turn by turn.

Both get the same shapes: decode steps of some batches after short prompts, and the prefill of one
long prompt. Engines that Python can load stay loaded in processes of their own and wait while the
other is timed; llama.cpp's own benchmark programs run again at each of their turns. A round is one
turn of each with every case, in alternating order; figures are medians over rounds, and every round
is kept.

Memory that other machines share has more than one speed. Both engines time a case right after each
other. Memory is read before, between and after, so that turns of one speed can be taken together.
"""

from __future__ import annotations

import json
import math
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from ds_runtime.errors import ConfigError
from ds_runtime_bench.record import Neighbours, environment

_PROGRAMS = ("llama-bench", "llama-batched-bench")
_LONGEST = 3600  # seconds that one run of a peer's program may take
STEADY = 1.2  # readings of memory that are further apart are of different speeds


@dataclass(frozen=True, slots=True)
class Case:
    """`output_len` decode steps of `batch` sequences, or with none the prefill of one prompt."""

    batch: int
    input_len: int
    output_len: int

    @property
    def name(self) -> str:
        return f"batch {self.batch}" if self.output_len else f"prefill {self.input_len}"


class Turns(Protocol):
    """An engine that takes turns. cpu: processor seconds that it used so far, if it still runs."""

    name: str
    cpu: float

    def about(self, threads: int | None = None) -> dict[str, Any]:
        """Load what stays loaded, and say what it is. ConfigError if it cannot be timed.

        threads: of the engine that it is compared with, for both are to have as many.
        """

    def rates(self, cases: Sequence[Case]) -> list[float]:
        """Tokens per second of each case, once."""

    def close(self) -> None:
        """End it."""


class Child:
    """An engine of `turns`, loaded in a process of its own."""

    def __init__(self, name: str, settings: Mapping[str, Any], cases: Sequence[Case]) -> None:
        self.name = name
        self.cpu = 0.0
        self._wanted: dict[str, Any] = {
            "settings": dict(settings),
            "rows": max(case.batch for case in cases),
            "context": max(case.input_len + case.output_len + 1 for case in cases),
        }
        self._process: subprocess.Popen[str] | None = None

    def about(self, threads: int | None = None) -> dict[str, Any]:
        if threads is not None:
            self._wanted["settings"] |= {"threads": threads}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "ds_runtime_bench.engine.interleaved", self.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        found: dict[str, Any] = self.ask(self._wanted)["about"]
        return found

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Send a line and read one."""
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        try:
            print(json.dumps(request), file=process.stdin, flush=True)
            line = process.stdout.readline()
        except (BrokenPipeError, ValueError):  # it ended, or was closed
            line = ""
        if not line:
            raise ConfigError(f"{self.name}: its process ended with {process.wait()}; see above")
        found: dict[str, Any] = json.loads(line)
        if "error" in found:
            raise ConfigError(f"{self.name}: {found['error']}")
        self.cpu = found.get("cpu", self.cpu)
        return found

    def rates(self, cases: Sequence[Case]) -> list[float]:
        found = []
        for case in cases:
            spent = self.ask({"do": "seconds", **asdict(case)})
            if case.output_len:
                rest = max(spent["whole"] - spent["first"], 1e-9)
                found.append(case.batch * case.output_len / rest)
            else:
                found.append(case.batch * case.input_len / spent["first"])
        return found

    def close(self) -> None:
        if self._process is None:
            return
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):  # it ended with a request unread
                if pipe is not None:
                    pipe.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class LlamaCpp:
    """llama.cpp's programs on a GGUF file; `programs` is their folder, or None for PATH."""

    name = "llama.cpp"
    cpu = 0.0  # its processes are waited for

    def __init__(self, gguf: Path, programs: Path | None, threads: int = 1) -> None:
        self._gguf, self._threads = gguf, threads
        self._found: dict[str, str] = {}
        for program in _PROGRAMS:
            path = shutil.which(program, path=None if programs is None else str(programs))
            if path is None:
                where = "PATH" if programs is None else programs
                raise ConfigError(f"{program}: not found in {where}; --bin DIR names its folder")
            self._found[program] = path
        if not gguf.is_file():
            raise ConfigError(
                f"--peer-model {gguf}: is no file; `ds-runtime bench make-gguf` writes one"
            )
        with gguf.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise ConfigError(
                    f"--peer-model {gguf}: is no GGUF file; `ds-runtime bench make-gguf` writes one"
                )

    def about(self, threads: int | None = None) -> dict[str, Any]:
        self._threads = threads or self._threads
        row = self._bench("-p", "1", "-n", "0", "-r", "1", "--no-warmup")
        names = ("build_commit", "build_number", "model_type", "model_size", "cpu_info", "backends")
        return {n: row[n] for n in names if n in row} | {"model": self._gguf.name}

    def rates(self, cases: Sequence[Case]) -> list[float]:
        found: dict[Case, float] = {}
        same: dict[tuple[int, int], list[Case]] = {}
        for case in cases:
            if case.output_len:
                same.setdefault((case.input_len, case.output_len), []).append(case)
                continue
            row = self._bench("-p", str(case.input_len), "-n", "0", "-r", "1")
            found[case] = _rate("llama-bench", row, "avg_ts")
        for (input_len, output_len), group in same.items():
            batches = sorted({case.batch for case in group})
            listed = ",".join(map(str, [*batches, 1]))  # its last line gets lost at times
            given = {"-npp": input_len, "-ntg": output_len, "-tb": self._threads}
            given["-c"] = max(512, 2 * batches[-1] * (input_len + output_len))
            flags = [str(x) for pair in given.items() for x in pair]
            flags += ["-npl", listed, "--output-format", "jsonl"]
            rows = self._run("llama-batched-bench", *flags)
            program = "llama-batched-bench"
            by_batch = {row.get("pl"): _rate(program, row, "speed_tg") for row in reversed(rows)}
            if not by_batch.keys() >= set(batches):
                raise ConfigError(f"llama-batched-bench: timed {[*by_batch]}, not {batches}")
            found |= {case: by_batch[case.batch] for case in group}
        return [found[case] for case in cases]

    def _bench(self, *flags: str) -> dict[str, Any]:
        """The one line of llama-bench for one case."""
        rows = self._run("llama-bench", *flags, "-o", "jsonl")
        if len(rows) != 1:
            raise ConfigError(
                f"llama-bench: answered with {len(rows)} lines of JSON instead of one; is --bin "
                "the folder of llama.cpp's programs?"
            )
        return rows[0]

    def _run(self, program: str, *flags: str) -> list[dict[str, Any]]:
        """The JSON lines of one program's output."""
        command = [self._found[program], "-m", str(self._gguf), "-t", str(self._threads), *flags]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, errors="replace", timeout=_LONGEST
            )
        except subprocess.TimeoutExpired as e:
            raise ConfigError(
                f"{program}: has not ended after {_LONGEST} s; give smaller cases"
            ) from e
        except OSError as e:
            raise ConfigError(
                f"{self._found[program]}: cannot be run: {e}; --bin DIR names a folder of "
                "llama.cpp's programs, built for this machine"
            ) from e
        if done.returncode:
            said = "\n".join(done.stderr.strip().splitlines()[-5:])
            raise ConfigError(f"{program}: ended with {done.returncode}: {said}")
        lines = [x for x in done.stdout.splitlines() if x.startswith("{") and x.endswith("}")]
        try:
            return [json.loads(line) for line in lines]
        except json.JSONDecodeError as e:
            raise ConfigError(f"{program}: answered with {e.doc[:80]!r}, which is no JSON") from e

    def close(self) -> None:
        pass


def _rate(program: str, row: Mapping[str, Any], name: str) -> float:
    """Tokens per second, as a program's answer has it."""
    rate = row.get(name)
    if not isinstance(rate, int | float) or not 0 < rate < math.inf:
        raise ConfigError(f"{program}: {name} is {rate!r}, which is no rate in tokens per second")
    return float(rate)


def cases_of(
    batches: Sequence[int], input_len: int, output_len: int, prefill: int
) -> tuple[Case, ...]:
    """Decode of every batch size, and a prefill unless its length is 0."""
    checked = {"--batch-size": min(batches), "--input-len": input_len, "--output-len": output_len}
    for name, value in checked.items():
        if value < 1:
            raise ConfigError(f"{name} {value}: must be at least 1")
    if prefill < 0:
        raise ConfigError(f"--prefill {prefill}: must be a length, or 0 for none")
    decode = tuple(Case(b, input_len, output_len) for b in batches)
    return (*decode, Case(1, prefill, 0)) if prefill else decode


def run(
    ours: Child, peer: Turns, cases: Sequence[Case], rounds: int, ready: Callable[[int], None]
) -> dict[str, Any]:
    """Load both, and let them take turns; `ready(number)` is called before each round is timed.

    Where an engine fails after whole rounds the report has these, and why it ended as "ended".
    """
    if rounds < 1:
        raise ConfigError(f"--rounds {rounds}: must be at least 1")
    found: dict[str, list[list[float]]] = {ours.name: [], peer.name: []}
    disturbed: list[float | None] = []
    limits: list[list[float | None]] = []  # by round
    ceilings: list[dict[str, Any]] = []  # at the beginning of each
    reads: list[list[list[float]]] = []  # by round and case: before, between and behind both turns
    ended: str | None = None
    try:
        about = {ours.name: ours.about()}
        about[peer.name] = peer.about(about[ours.name].get("threads"))
        steps = [(c.batch, c.input_len + c.output_len // 2) for c in cases if c.output_len]
        for number in range(rounds):
            ready(number)
            timed: dict[str, list[float]] = {ours.name: [], peer.name: []}
            read_at: list[list[float]] = []
            limited: list[float | None] = []
            try:
                measured = ours.ask({"do": "limits", "steps": steps})
                first, step_bytes = measured["ceilings"], iter(measured["step_bytes"])
                neighbours, before = Neighbours(), ours.cpu + peer.cpu
                read = ours.ask({"do": "read"})["read"]
                for i, case in enumerate(cases):
                    turns = (ours, peer) if (number + i) % 2 == 0 else (peer, ours)
                    around = [read]
                    for engine in turns:
                        timed[engine.name] += engine.rates([case])
                        around.append(read := ours.ask({"do": "read"})["read"])
                    turn = turns.index(ours)
                    mean = sum(around[turn : turn + 2]) / 2
                    decodes = case.output_len and mean
                    limited.append(case.batch * mean / next(step_bytes) if decodes else None)
                    read_at.append(around)
            except ConfigError as e:
                if number == 0:
                    raise
                ended = f"round {number + 1} of {rounds}: {e}"
                break
            for name, rates in timed.items():
                found[name].append(rates)
            disturbed.append(neighbours.share(ours.cpu + peer.cpu - before))
            ceilings.append(first)
            reads.append(read_at)
            limits.append(limited)
    finally:
        peer.close()
        ours.close()
    results = []
    for i, case in enumerate(cases):
        own, other = ([of[i] for of in found[e.name]] for e in (ours, peer))
        mine, theirs = statistics.median(own), statistics.median(other)
        results.append(
            {
                "case": case.name,
                **asdict(case),
                "tokens_per_s": {ours.name: mine, peer.name: theirs},
                "ratio": mine / theirs,
                "limits": [of[i] for of in limits],
                "reads": [of[i] for of in reads],
                "rounds": {ours.name: own, peer.name: other},
            }
        )
    return {
        "bench": "compare",
        "engine": peer.name,
        "engines": about,
        "results": results,
        "ceilings": ceilings,
        "neighbours": disturbed,
        **({"ended": ended} if ended else {}),
        **environment(),
    }


def by_speed(reads: Sequence[Sequence[float]]) -> list[list[int]]:
    """Rounds whose readings of memory agree, those of the same speed together, the slowest first.

    reads: of each round, bytes per second before, between and after the turns. What happened
    within a turn they do not tell.
    """
    steady = sorted((max(r), i) for i, r in enumerate(reads) if max(r) <= STEADY * min(r))
    found: list[list[tuple[float, int]]] = []
    for read, number in steady:
        if found and read <= STEADY * found[-1][0][0]:
            found[-1].append((read, number))
        else:
            found.append([(read, number)])
    return [sorted(number for _, number in group) for group in found]


def _ratio(
    rounds: Mapping[str, Sequence[float]], ours: str, peer: str, some: Sequence[int]
) -> float:
    own, other = (statistics.median(rounds[name][i] for i in some) for name in (ours, peer))
    return own / other


def render(report: Mapping[str, Any]) -> str:
    """The report for people."""
    peer = report["engine"]
    rounds = len(report["neighbours"])
    every = (x for r in report["results"] for reads in r["reads"] for x in reads)
    read = statistics.median(every) / 1e9
    lines = [f"{report['model']} against {peer}: medians of {rounds}; memory reads {read:.1f} GB/s"]
    for r in report["results"]:
        rates = r["tokens_per_s"]
        shares = [a / b for a, b in zip(r["rounds"]["ds-runtime"], r["limits"], strict=True) if b]
        share = f", {statistics.median(shares):.0%} of its limit" if shares else ""
        lines.append(
            f"{r['case']:<12} {rates['ds-runtime']:>9,.1f} tokens/s{share:<22} "
            f"{peer} {rates[peer]:>9,.1f}  ratio {r['ratio']:.2f}"
        )
        for group in by_speed(r["reads"]):
            if 1 < len(group) < rounds:
                read = statistics.median(x for i in group for x in r["reads"][i]) / 1e9
                ratio = _ratio(r["rounds"], "ds-runtime", peer, group)
                lines.append(f"    {len(group)} rounds at {read:.1f} GB/s: ratio {ratio:.2f}")
    worst = max((x for x in report["neighbours"] if x is not None), default=0.0)
    lines.append(f"other processes used at most {worst:.0%} of the processors in a round")
    if threads := report["engines"].get("ds-runtime", {}).get("threads"):
        lines.append(f"both with {threads} threads")
    if "ended" in report:
        lines.append(f"ended early in {report['ended']}")
    return "\n".join(lines)
