"""Named faults that the tests must catch: each is put into a copy of the sources, one at a time.

    python tools/mutate.py [--only NAME] [--list]

The working tree is never touched. A fault whose text is not found exactly once, a copy that is
not what the tests import, or a test that is red without the fault, too, is an error of its own.
"""

from __future__ import annotations

import argparse
import compileall
import contextlib
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from py_compile import PycInvalidationMode

ROOT = Path(__file__).resolve().parents[1]
COPIED = (
    "core",
    "kit",
    "plugins",
    "tests",
    "tools",
    "pyproject.toml",
    "README.md",
    "ARCHITECTURE.md",
)
INPUTS = "core/ds_runtime/engine/step/inputs.py"
TIMEOUT = 900.0  # seconds for one selection


@dataclass(frozen=True)
class Fault:
    """One wrong line: `find` is in `file` exactly once, and `tests` turn red with `replace`."""

    name: str
    file: str
    find: str
    replace: str
    tests: tuple[str, ...]


class MutationError(Exception):
    """The machinery cannot say anything about a fault."""


FAULTS: tuple[Fault, ...] = (
    Fault(
        "logits that nobody looks at",
        "core/ds_runtime/engine/step/finite.py",
        "(total - total) == 0",
        "total.new_ones(total.shape).bool()",
        ("tests/e2e/test_broken_logits.py",),
    ),
    Fault(
        "pages of a broken answer that stay cached",
        "core/ds_runtime/kv/prefix.py",
        "if i >= known or not n.is_proved",
        "if not n.is_proved",
        ("tests/core/engine/test_pages_prefix.py",),
    ),
    Fault(
        "negative NaN in weights",
        "core/ds_runtime/checkpoint/nan.py",
        'pairs = (("i", last), ("u", last | 1 << (8 * size - 1)))',
        'pairs = (("i", last),)',
        ("tests/core/model/test_nan_weights.py",),
    ),
    Fault(
        "codes from attention although a prefix is there",
        "core/ds_runtime/model/attention.py",
        "or part is None or part.prefix or",
        "or part is None or",
        ("tests/e2e/test_quantised_inputs.py",),
    ),
    Fault(
        "bounds of rows that hold for every method",
        "core/ds_runtime/ops/binding/bound.py",
        "and method in (kernel.rows.methods or (method,))",
        "",
        ("tests/core/test_bind.py",),
    ),
    Fault(
        "softmax scale without mscale squared",
        "core/ds_runtime/description/config.py",
        "scale *= self.yarn.multiplier(self.yarn.mscale_all_dim) ** 2",
        "scale *= 1.0",
        ("tests/core/model/test_parity.py::test_whole_prompts",),
    ),
    Fault(
        "masked groups 0 instead of -inf",
        "core/ds_runtime/ops/reference/matrices/moe.py",
        'closed = float("-inf") if routing.method == "noaux_tc" else 0.0',
        "closed = 0.0",
        ("tests/core/ops/test_reference_routing.py",),
    ),
    Fault(
        "bias kept in the routing weights",
        "core/ds_runtime/ops/reference/matrices/moe.py",
        "weights = scores.gather(1, ids)",
        "weights = choice.gather(1, ids)",
        ("tests/core/ops/test_reference_routing.py",),
    ),
    Fault(
        "half-split rope",
        "core/ds_runtime/ops/reference/attention/rope.py",
        "a, b = x[..., 0::2].to(cos.dtype), x[..., 1::2].to(cos.dtype)",
        "a, b = x.to(cos.dtype).chunk(2, dim=-1)",
        ("tests/core/ops/test_reference_small.py",),
    ),
    Fault(
        "nibbles swapped",
        "core/ds_runtime/weights/layouts.py",
        "torch.stack((data & 15, data >> 4), dim=-1)",
        "torch.stack((data >> 4, data & 15), dim=-1)",
        ("tests/core/model/test_published_formats.py",),
    ),
    Fault(
        "AWQ's order taken backwards",
        "core/ds_runtime/weights/layouts.py",
        "_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)",
        "_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)",
        ("tests/core/model/test_published_formats.py",),
    ),
    Fault(
        "a global scale that divides multiplies",
        "core/ds_runtime/weights/layouts.py",
        "self.sent(1 / value if self.encoding.divides else value)",
        "self.sent(value)",
        ("tests/core/model/test_published_formats.py",),
    ),
    Fault(
        "a conversion is not said",
        "core/ds_runtime/ops/binding/bind.py",
        "converts = str(conversion)",
        'converts = ""',
        ("tests/core/test_conversions.py",),
    ),
    Fault(
        "fp8 scale transposed",
        "core/ds_runtime/ops/weight.py",
        "scale = scale_grid(part, compute)\n",
        "scale = scale_grid(part, compute)\n    scale = scale.t().reshape(scale.shape)\n",
        ("tests/core/ops/test_reference_formats.py",),
    ),
    Fault(
        "page off by one",
        "core/ds_runtime/ops/reference/attention/cache.py",
        "owners = pages[tokens // page_size].to(torch.int64)",
        "owners = pages[(tokens - 1).clamp_min(0) // page_size].to(torch.int64)",
        ("tests/core/ops/test_reference_attention.py",),
    ),
    Fault(
        "decode page off by one",
        INPUTS,
        "slots = [p[t // n] * n",
        "slots = [p[max(t - 1, 0) // n] * n",
        ("tests/core/engine/test_batch.py",),
    ),
    Fault(
        "merge missing",
        "core/ds_runtime/model/attention.py",
        "merged, merged_lse = self.ops.merge_state(own_out, own_lse, *old)",
        "merged, merged_lse = own_out, old[1]",
        ("tests/core/model/test_parity.py::test_random_schedules",),
    ),
    Fault(
        "swapped shard",
        "core/ds_runtime/parallel/layout.py",
        "share = shard.slice(size,",
        "last = shard.size - 1 - shard.rank\n                "
        "share = (shard if cut.dim else Shard(last, shard.size)).slice(size,",
        ("tests/core/model/test_parity.py::test_tensor_parallel",),
    ),
    Fault(
        "stale prefix",
        "core/ds_runtime/kv/prefix.py",
        "        if not node.is_cut:\n            del parent.children[node.key]\n",
        "",
        ("tests/core/engine/test_scheduler.py", "tests/core/engine/test_scheduler_random.py"),
    ),
    Fault(
        "shared seed",
        "core/ds_runtime/engine/step/sampler.py",
        "return _mix((_mix((seed + _GOLDEN) & _MASK) + (choice + 1) * _GOLDEN) & _MASK)",
        "return _mix((seed + _GOLDEN) & _MASK)",
        ("tests/core/engine/test_sampler.py",),
    ),
    Fault(
        "a rule of assembly that nobody applies",
        "core/ds_runtime/assembly/rules.py",
        "RULES = (uncaptured, widening, index_keys, crowded",
        "RULES = (uncaptured, widening, crowded",
        ("tests/core/test_rules.py",),
    ),
    Fault(
        "refusal ignored",
        "core/ds_runtime/ops/binding/bind.py",
        "        if (said := _asked(check, facts)) is not None:\n",
        "        if (said := _asked(check, facts)) is not None and not said:\n",
        ("tests/core/test_bind.py",),
    ),
    Fault(
        "abort leaks a page",
        "core/ds_runtime/kv/rank_pages.py",
        "self.pool.free(request.pages[request.num_shared :])",
        "self.pool.free(request.pages[request.num_shared : -1])",
        ("tests/core/engine/test_scheduler.py", "tests/core/engine/test_scheduler_random.py"),
    ),
    Fault(
        "a prompt goes on where no snapshot is",
        "core/ds_runtime/kv/snapshots.py",
        "        while node.parent is not None and node not in self:\n",
        "        while False:\n",
        ("tests/core/engine/test_snapshots.py",),
    ),
    Fault(
        "what prompts have gone on from is pushed out",
        "core/ds_runtime/kv/snapshots.py",
        "if len(self._read) > self.pool.num_pages // 4:",
        "if self._read:",
        ("tests/core/engine/test_snapshots.py", "tests/core/engine/test_toy_model.py"),
    ),
    Fault(
        "answers under way take every snapshot",
        "core/ds_runtime/kv/snapshots.py",
        "if answers and count - free - self.num_kept >= count // 2:",
        "if False:",
        ("tests/core/engine/test_snapshots.py",),
    ),
    Fault(
        "a snapshot is offered before it is copied",
        "core/ds_runtime/kv/transfer/leases.py",
        "self.settle()  # its reader may look before this engine does anything more",
        "pass",
        ("tests/core/engine/test_handover.py",),
    ),
    Fault(
        "what came first is the cause, though somebody saw another",
        "core/ds_runtime/parallel/link/messages.py",
        "min(causes, key=lambda cause: cause.known)",
        "causes[0]",
        ("tests/core/parallel/test_link_ends.py",),
    ),
    Fault(
        "pages of a lease that has ended are kept",
        "core/ds_runtime/kv/transfer/handover.py",
        "                if said.whole and pull.ticket is None:\n",
        "                if pull.ticket is None:\n",
        ("tests/core/engine/test_handover.py",),
    ),
    Fault(
        "pages of a pull that failed are lost",
        "core/ds_runtime/kv/transfer/handover.py",
        "        self._pages.pool.free(blocks.pages)\n",
        "        self._pages.pool.free(blocks.pages[1:])\n",
        ("tests/core/engine/test_handover.py",),
    ),
    Fault(
        "bytes of another meeting reach a page",
        "core/ds_runtime/kv/transfer/mailbox.py",
        "known = line is not None and (answers, epoch) == (line.own, line.theirs)\n",
        "known = line is not None\n",
        ("tests/core/engine/test_socket_pairs.py",),
    ),
    Fault(
        "a pull is forgotten before its read is given up",
        "core/ds_runtime/kv/transfer/handover.py",
        "            self._transfer.release(pull.ticket)  # until then its blocks are written to\n",
        "            del self._pulls[pull.token]\n            self._transfer.release(pull.ticket)\n"
        "            self._pulls[pull.token] = pull\n",
        ("tests/core/engine/test_handover.py",),
    ),
    Fault(
        "a snapshot that became another still stands",
        "core/ds_runtime/kv/snapshots.py",
        "            pin.stands = False\n",
        "            pass\n",
        ("tests/core/engine/test_handover.py",),
    ),
    Fault(
        "a lease is renewed for ever",
        "core/ds_runtime/kv/transfer/leases.py",
        "lease.until = min(now + lease.seconds, lease.last)",
        "lease.until = now + lease.seconds",
        ("tests/core/engine/test_handover.py",),
    ),
    Fault(
        "weights that changed since they were loaded have a digest",
        "core/ds_runtime/kv/digest.py",
        "        if loaded.get(file) != Stamp.of(file):\n",
        "        if False:\n",
        ("tests/core/model/test_weights_digest.py",),
    ),
    Fault(
        "a peer's page numbers are believed",
        "core/ds_runtime/kv/transfer/sockets.py",
        "        if not self.holds(blocks):\n",
        "        if False:\n",
        ("tests/core/engine/test_socket_transfer.py",),
    ),
    Fault(
        "a piece's slot is filled before it was taken",
        "core/ds_runtime/kv/transfer/sockets.py",
        "            slot = peer.free.pop()\n",
        "            slot = peer.free[0]\n",
        ("tests/core/engine/test_socket_transfer.py",),
    ),
    Fault(
        "plugin half registered",
        "core/ds_runtime/plugins/manager.py",
        "            self.manager.unregister(plugin)\n",
        "            pass\n",
        ("tests/core/test_plugins.py",),
    ),
    Fault(
        "pin beats a refusal",
        "core/ds_runtime/ops/binding/bind.py",
        "if all(sentence is not None for _, sentence in said):",
        "if not said:",
        ("tests/core/test_bind.py",),
    ),
    Fault(
        "spare rows write to a page",
        INPUTS,
        "np.array(slots + [-1] * dummies, np.int64)",
        "np.array(slots + [0] * dummies, np.int64)",
        ("tests/e2e/test_graphs.py",),
    ),
    Fault(
        "spare rows of prompts write to a page",
        "core/ds_runtime/engine/capture/prefill.py",
        "self.slots[n:].fill_(-1)",
        "self.slots[n:].fill_(0)",
        ("tests/e2e/test_prefill_graphs.py",),
    ),
    Fault(
        "captures between steps write to pages",
        "core/ds_runtime/engine/capture/prefill.py",
        "self._rows.spare()",
        "self._rows.spare(self.size)",
        ("tests/e2e/test_prefill_graphs.py",),
    ),
    Fault(
        "spare rows read a foreign page",
        "core/ds_runtime/engine/step/page_table.py",
        "spare = [[self._spare]] * (",
        "spare = [[0]] * (",
        ("tests/e2e/test_graphs.py",),
    ),
    Fault(
        "a replay on the last step's page table",
        "core/ds_runtime/engine/step/page_table.py",
        "if self._held is table or (self._held is not None and np.array_equal(self._held, table)):",
        "if self._held is not None and self._held.shape == table.shape:",
        ("tests/e2e/test_graphs.py",),
    ),
    Fault(
        "a recorded chain of drafts attends by an older plan",
        "core/ds_runtime/engine/speculate/chain.py",
        "self._parts.prepare(batch, self._keys, inside=True if self.size else None)",
        "self._parts.prepare(batch, () if self.size else self._keys)",
        ("tests/e2e/test_speculation_captured.py",),
    ),
    Fault(
        "a kernel whose rows' bits hang on others is bound where they must not",
        "core/ds_runtime/ops/binding/invariant.py",
        "            yield NO_BITS",
        "            yield from ()",
        ("tests/core/test_bind_invariant.py",),
    ),
    Fault(
        "ranks add up as the library likes",
        "core/ds_runtime/parallel/world.py",
        "InOrder(own) if in_order and own.size > 1 else own",
        "own",
        ("tests/core/test_bind_invariant.py",),
    ),
    Fault(
        "a level of a tree reads where the one before it no longer writes",
        "core/ds_runtime/engine/speculate/tree.py",
        "if any(map(given_up, self._runs)):",
        "if not self._runs:",
        ("tests/plugins/test_cpu_graphs.py",),
    ),
    Fault(
        "drafts of another rank's sequences",
        "core/ds_runtime/engine/speculate/chain.py",
        "self._mine(found[-1])",
        "found[-1][: batch.num_tokens]",
        ("tests/e2e/test_speculation_pairs.py",),
    ),
    Fault(
        "a captured step takes the wrong rows",
        INPUTS,
        "np.array([w.row * width for w in works] + [",
        "np.array([*range(len(works))] + [",
        ("tests/e2e/test_graphs.py",),
    ),
    Fault(
        "logits of another rank's rows",
        "core/ds_runtime/parallel/row_order.py",
        "free = [group * size for group in range(groups)]",
        "free = [(groups - 1 - group) * size for group in range(groups)]",
        ("tests/core/parallel/test_exchange.py",),
    ),
    Fault(
        "every rank computes attention of all sequences",
        "core/ds_runtime/parallel/exchange.py",
        "[work for work in works if work.group == self.group]",
        "list(works)",
        ("tests/e2e/test_dp_attention_kv.py",),
    ),
    Fault(
        "sums of a group leave out its other ranks",
        "core/ds_runtime/parallel/exchange.py",
        "self._inside.all_reduce(summed)[:count]",
        "summed[:count]",
        ("tests/core/parallel/test_exchange.py",),
    ),
    Fault(
        "the shared experts of a group's own rows are lost",
        "core/ds_runtime/parallel/exchange.py",
        "summed[:count].add_(own)",
        "summed[:count].add_(0 * own)",
        ("tests/core/parallel/test_exchange.py",),
    ),
    Fault(
        "choices of experts of other ranks reach the last one here",
        "core/ds_runtime/ops/reference/matrices/moe.py",
        "torch.unique(ids[ids >= 0]).tolist()",
        "torch.unique(ids).tolist()",
        ("tests/conformance/test_ops.py",),
    ),
    Fault(
        "every rank takes the experts of the first for its own",
        "core/ds_runtime/weights/loader.py",
        "local = self.placement.local(here.rank)",
        "local = self.placement.local(0)",
        ("tests/e2e/test_expert_parallel.py",),
    ),
    Fault(
        "a group preempts the requests of another",
        "core/ds_runtime/engine/schedule/scheduler.py",
        "victim = next(r for r in reversed(self.running) if r.group == request.group)",
        "victim = self.running[-1]",
        ("tests/core/engine/test_scheduler_ranks.py",),
    ),
    Fault(
        "results read before they have come",
        "core/ds_runtime/engine/engine.py",
        "len(self._launched) > self._ahead",
        "len(self._launched) >= self._ahead",
        ("tests/e2e/test_overlap.py",),
    ),
    Fault(
        "tokens beyond the end reach the client",
        "core/ds_runtime/engine/schedule/scheduler.py",
        "if request.is_finished:  # aborted, or ended by the step before",
        "if False:",
        ("tests/e2e/test_overlap.py",),
    ),
)


def check_text(fault: Fault, root: Path = ROOT) -> None:
    """Raise MutationError unless the fault's text is in its file exactly once."""
    path = root / fault.file
    if not path.is_file():
        raise MutationError(f"{fault.name}: {fault.file} does not exist")
    if (count := path.read_text().count(fault.find)) != 1:
        raise MutationError(f"{fault.name}: {fault.find!r} is {count} times in {fault.file}")


# Editable installs put a finder before every path; without it PYTHONPATH names the copy.
SITECUSTOMIZE = """
import sys
sys.meta_path[:] = [f for f in sys.meta_path if "_editable" not in type(f).__module__]
"""
# Imported once, in the process that every run of pytest is forked from.
WARM = ("torch", "transformers.models.deepseek_v3.modeling_deepseek_v3", "hypothesis", "pytest")


@dataclass(frozen=True)
class Outcome:
    """What pytest said: whether all was green, the first test that was not, and the output."""

    green: bool
    first_red: str
    output: str


def run_here(folder: str, environment: Mapping[str, str], tests: Sequence[str], log: str) -> None:
    """In a forked process: pytest over a copy, its output in the file `log`, its status the exit's.

    Nothing of the project may have been imported before the fork.
    """
    with open(log, "wb") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.dont_write_bytecode = True
    roots = environment["PYTHONPATH"].split(os.pathsep)
    sys.path[:] = [*roots, *(p for p in sys.path if not Path(p).is_relative_to(ROOT))]
    exec(SITECUSTOMIZE, {})
    import ds_runtime
    import ds_runtime_cpu

    for module in (ds_runtime, ds_runtime_cpu):
        if not Path(str(module.__file__)).resolve().is_relative_to(Path(folder).resolve()):
            sys.exit(f"{module.__file__} would be tested, not the copy in {folder}")
    import pytest

    # Warm imports are earlier than pytest's rewriting of assertions in its plugins.
    early = ("-W", "ignore::pytest.PytestAssertRewriteWarning")
    sys.exit(int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *early, *tests])))


class Copy:
    """A copy of the sources that tests import instead of the originals."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        skipped = shutil.ignore_patterns("__pycache__", ".*_cache", "*.pyc")
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, folder / name, ignore=skipped)
            elif source.exists():
                shutil.copy(source, folder / name)
        self._copy_native()
        (folder / "sitecustomize.py").write_text(SITECUSTOMIZE)
        # A fault is as long as what it replaces, or made within the same second: ask the text.
        compileall.compile_dir(
            str(folder / "core"), quiet=2, invalidation_mode=PycInvalidationMode.CHECKED_HASH
        )
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(WARM))

    def _copy_native(self) -> None:
        """The built library, which an editable install keeps outside the sources."""
        with contextlib.suppress(ModuleNotFoundError):
            built = Path(str(files("ds_runtime_cpu") / "_lib"))
            target = self.folder / "plugins/cpu/ds_runtime_cpu/_lib"
            if built.is_dir() and not target.exists():
                shutil.copytree(built, target)

    @property
    def environment(self) -> dict[str, str]:
        packages = (
            p for part in ("kit", "plugins") for p in sorted((self.folder / part).iterdir())
        )
        roots = [self.folder, self.folder / "core", *packages]
        path = os.pathsep.join(str(r) for r in roots)
        # Runs are no workers of a run that may be theirs.
        own = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
        return {**own, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}

    @contextlib.contextmanager
    def with_fault(self, fault: Fault) -> Iterator[None]:
        """The copy with one fault in it. Raises MutationError if its text is not there once."""
        check_text(fault, self.folder)
        path = self.folder / fault.file
        original = path.read_text()
        path.write_text(original.replace(fault.find, fault.replace))
        try:
            yield
        finally:
            path.write_text(original)

    def run(self, tests: Sequence[str]) -> Outcome:
        """Run a selection in the copy, in a fork of a process that has torch and transformers.

        Raises MutationError if pytest itself fails, or the tests would not import the copy.
        """
        log = self.folder / "output"
        log.unlink(missing_ok=True)
        arguments = (str(self.folder), self.environment, tuple(tests), str(log))
        process = self._context.Process(target=run_here, args=arguments)
        process.start()
        process.join(TIMEOUT)
        if process.is_alive():
            process.kill()
            process.join()
            raise MutationError(f"{' '.join(tests)}: not done after {TIMEOUT:.0f} s")
        output = log.read_text(errors="replace") if log.exists() else ""
        red = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", output, re.MULTILINE)
        if process.exitcode not in (0, 1) or (process.exitcode == 1) != bool(red):
            raise MutationError(f"{' '.join(tests)}: pytest failed ({process.exitcode}):\n{output}")
        return Outcome(process.exitcode == 0, red.group(1) if red else "", output)


@contextlib.contextmanager
def copied() -> Iterator[Copy]:
    """A copy in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="ds-mutate-") as folder:
        yield Copy(Path(folder))


def check_fault(copy: Copy, fault: Fault) -> Outcome:
    """Run the fault's selection with the fault in place, and what turned red without it.

    Raises MutationError if that is red without the fault, too.
    """
    with copy.with_fault(fault):
        found = copy.run(fault.tests)
    if not found.green and not (without := copy.run((found.first_red,))).green:
        raise MutationError(f"red without a fault: {without.first_red}\n{without.output}")
    return found


def main() -> int:
    """Print fault → test that went red; exit 1 if one stayed green."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", action="append", metavar="NAME", choices=[f.name for f in FAULTS])
    parser.add_argument("--list", action="store_true", help="name the faults and run nothing")
    args = parser.parse_args()
    faults = [f for f in FAULTS if not args.only or f.name in args.only]
    if args.list:
        print("\n".join(f"{f.name}: {f.file}" for f in faults))
        return 0
    for fault in faults:
        check_text(fault)
    survived = 0
    with copied() as copy:
        for fault in faults:
            found = check_fault(copy, fault)
            survived += found.green
            print(f"{fault.name:<36} {found.first_red or 'NOT CAUGHT'}", flush=True)
    return int(survived > 0)


if __name__ == "__main__":
    sys.exit(main())
