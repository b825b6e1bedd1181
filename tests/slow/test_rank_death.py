"""A rank that dies, in every phase: everybody reads why, and no process is left after 10 s.

In servers and offline; also where a communicator never notices, as of most devices, and where it
holds Python's lock while it waits.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
import zmq

from ds_runtime.config import EngineConfig
from ds_runtime.engine.messages import Ready, Submit, Tokens, decode_from_engine, encoder
from ds_runtime.engine.process.launch import EngineProcesses
from ds_runtime.engine.process.transport import bind_pull, connect_push, private_folder
from ds_runtime.plugins.manager import load_plugins
from ds_runtime.plugins.select_platform import select_platform
from ds_runtime.sampling_params import SamplingParams

LIMIT = 10.0  # seconds from a death to the last process's end
HERE = Path(__file__).parent
PHASES = ("start", "load", "capture", "prefill", "decode", "close")
WHY = {
    "raise": "engine rank {rank} failed: RuntimeError: this is the cause",
    "leave": "engine rank {rank} failed: SystemExit: this is the cause",
    "exit": "engine rank {rank} has left by itself with exit code 7",
    "kill": "engine rank {rank} was ended by SIGKILL",
    "stop": "engine rank {rank} was stopped by a signal and not continued for 3 s",
    "sleep": "engine rank {rank} did not come within 5 s (--dist-timeout) to what engine rank ",
}
IN_A_PLUGIN = {  # a rank's exception there has become a sentence
    "load": r"kernel mortal\.Linear of plugin mortal, linear at layers\.0\.\S+, given .*, failed: ",
    "capture": r"a (decode step of 2 requests|step of \d+ tokens) cannot be captured: ",
}
# phase → how, communicator, of rank 0 and of rank 1
OFFLINE = {
    "start": ("raise deaf", "exit gloo"),
    "load": ("kill deaf", "kill gloo"),
    "capture": ("leave deaf", "raise holding"),
    "prefill": ("raise gloo", "leave gloo"),
    "decode": ("raise deaf", "raise deaf"),
    "close": ("raise gloo", "kill deaf"),
}
SERVED = {
    "start": ("raise gloo", "raise deaf"),
    "load": ("kill deaf", "raise holding"),
    "capture": ("raise deaf", "exit gloo"),
    "prefill": ("leave holding", "kill deaf"),
    "decode": ("exit gloo", "leave deaf"),
    "close": ("raise deaf", "raise gloo"),
}


def check_told(said, rank, phase, how):
    """Whether this is the cause."""
    if how == "raise" and phase in IN_A_PLUGIN:
        assert re.search(f"{IN_A_PLUGIN[phase]}RuntimeError: this is the cause;", said), said
    else:
        assert WHY[how].format(rank=rank) in said


@pytest.fixture(autouse=True)
def plugin(monkeypatch):
    """Where children find it."""
    monkeypatch.syspath_prepend(str(HERE / "plugins"))
    yield
    sys.modules.pop("mortal", None)


def environment(tmp_path, rank, phase, how):
    at = tmp_path / f"at{rank}"
    return {"MORTAL": f"{rank} {phase} {how}", "MORTAL_AT": str(at)}, at


def family(pid):
    """A process with all below it."""
    with contextlib.suppress(psutil.NoSuchProcess):
        one = psutil.Process(pid)
        return {one, *one.children(recursive=True)}
    return set()


def check_end(at, processes, since=None):
    """No process is left, LIMIT seconds after the death."""
    died = float(at.read_text())
    _, alive = psutil.wait_procs(processes, max(0.1, died + LIMIT - time.time()))
    assert not alive, [(p.pid, p.cmdline()) for p in alive]


class Offline:
    """A script's process."""

    def __init__(self, tmp_path, rank, phase, how, base=None, slow=None):
        tmp_path.mkdir(exist_ok=True)
        env, self.at = environment(tmp_path, rank, phase, how)
        if slow is not None:
            env["MORTAL_SLOW"] = slow
        if base is not None:
            env["MORTAL_BASE"] = base
        self.rank, self.phase, self.how = rank, phase, how.split()[0]
        self.said = tmp_path / f"said{rank}"
        command = [sys.executable, str(HERE / "mortal_main.py"), "demo", "mortal"]
        with self.said.open("w") as file:
            self.process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, env=os.environ | env
            )
        self.family = set()

    def check(self):
        """It ends in time, and says why."""
        while self.process.poll() is None:
            self.family |= family(self.process.pid)
            if self.at.exists() and time.time() > float(self.at.read_text()) + LIMIT:
                break
            time.sleep(0.25)
        said = self.said.read_text()
        assert self.at.exists(), said
        check_end(self.at, self.family)
        assert self.process.wait() != 0, said
        if self.rank or self.how in ("raise", "leave"):
            self.told(said)
        assert "\nclosed\n" not in said

    def told(self, said):
        """The last line but for notes; a rank's own exception keeps its class."""
        last = re.findall(r"^(?:\[rank0\]: )?((?:\S*Error|ds-runtime): .*)", said, re.MULTILINE)[-1]
        if self.rank == 0 and self.how == "raise" and self.phase not in IN_A_PLUGIN:
            assert last == "RuntimeError: this is the cause"
        else:
            check_told(last, self.rank, self.phase, self.how)

    def end(self):
        for one in self.family | family(self.process.pid):
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        self.process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("phases", [PHASES[n : n + 2] for n in range(0, len(PHASES), 2)])
def test_offline_a_death_is_told_and_ends_both_ranks(tmp_path, phases):
    cases = [
        Offline(tmp_path / phase, rank, phase, OFFLINE[phase][rank])
        for phase in phases
        for rank in (0, 1)
    ]
    check_all(cases)


@pytest.mark.slow
def test_rank_0_gets_the_error_where_it_does_not_wait(tmp_path):
    """It loads for longer than the sentry is patient, and raises: its process is not ended."""
    case = Offline(tmp_path, 1, "load", "kill deaf", slow="load 0.9")
    check_all([case])
    assert case.process.returncode == 1
    assert "so this process" not in case.said.read_text()


@pytest.mark.slow
def test_rank_0_may_close_slowly(tmp_path):
    """The other rank has left because it was told to: that is no death."""
    case = Offline(tmp_path, 1, "never", "kill gloo", slow="close 7")
    try:
        assert case.process.wait(60) == 0
        assert case.said.read_text().endswith("closed\n")
    finally:
        case.end()


@pytest.mark.gpu
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("rank, how", [(0, "raise"), (1, "raise"), (1, "kill")])
def test_on_two_devices_a_death_is_told_and_ends_both_ranks(tmp_path, phase, rank, how):
    """Whose collectives wait for ever."""
    base, _ = select_platform(load_plugins())
    if not base.asynchronous or torch.accelerator.device_count() < 2:
        pytest.skip(f"two devices are needed; the best platform here is {base.name}")
    path = f"{type(base).__module__}:{type(base).__qualname__}"
    check_all([Offline(tmp_path, rank, phase, f"{how} device", path)])


def check_all(cases):
    """They run side by side: most of their time they wait."""
    try:
        for case in cases:
            case.check()
    finally:
        for case in cases:
            case.end()


class Front:
    """What a server's front end does: it starts the ranks, asks, and has them closed."""

    def __init__(self, folder, phase, **more):
        config = EngineConfig(
            model="demo", platform="mortal", dtype="float32", kv_memory=32_000_000, threads=1,
            context_length=128, tp=2, max_running_requests=2, disable_graph=phase != "capture",
            **more,
        )  # fmt: skip
        self.engine = self.made(config, folder, ("platform",), ("mortal",))
        self.context = zmq.Context()
        self.inbox = bind_pull(self.context, self.engine.from_engine)
        self.outbox = connect_push(self.context, self.engine.to_engine)
        self.start()

    def made(self, *given) -> EngineProcesses:
        return EngineProcesses(*given)

    def start(self):
        self.engine.start()
        self.family = set().union(*map(family, self.engine.pids))

    def until(self, *kinds):
        """Whether a message of these kinds came before the engine's end."""
        deadline = time.monotonic() + 60
        while self.engine.poll() is None and time.monotonic() < deadline:
            if self.inbox.poll(50):
                found = decode_from_engine.decode(self.inbox.recv())
                if any(isinstance(m, kinds) for m in found):
                    return True
        return False

    def ask(self):
        """Ask for three tokens."""
        import mortal

        params = SamplingParams(max_tokens=3, ignore_eos=True)
        prompt = list(range(5, 5 + mortal.PROMPT))
        self.outbox.send(encoder.encode(Submit(rid="a", prompt=prompt, params=params, seed=1)))

    def close(self):
        self.engine.stop()
        self.context.destroy(linger=0)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("phase", PHASES)
def test_a_front_end_learns_of_a_death_and_ends_both_ranks(tmp_path, monkeypatch, phase, rank):
    how = SERVED[phase][rank]
    env, at = environment(tmp_path, rank, phase, how)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with private_folder() as folder:
        front = Front(folder, phase)
        try:
            serves = front.until(Ready)
            assert serves is (phase in PHASES[3:]), front.engine.poll()
            if serves:
                front.ask()
                assert front.until(Tokens) is (phase != "prefill")
            if phase == "close":
                front.engine.stop()
            else:
                assert not front.until(())
            check_told(front.engine.poll(), rank, phase, how.split()[0])
            if phase in ("prefill", "decode") and how.split()[0] in ("raise", "leave"):
                named = "in kernel mortal.Linear of plugin mortal, linear at layers."
                said = front.engine.poll()
                assert said is not None and named in said
            check_end(at, front.family)
        finally:
            front.close()


INFO = {
    "METADATA": "Metadata-Version: 2.1\nName: mortal-ranks\nVersion: 1\n",
    "entry_points.txt": "[ds_runtime]\nmortal = mortal\n",
}


@pytest.mark.slow
@pytest.mark.parametrize("rank, phase, how", [(0, "load", "raise deaf"), (1, "close", "kill gloo")])
def test_the_command_says_why_and_fails(tmp_path, rank, phase, how):
    info = tmp_path / "site" / "mortal_ranks-1.dist-info"
    info.mkdir(parents=True)
    for name, text in INFO.items():
        (info / name).write_text(text)
    (tmp_path / "site" / "mortal.py").write_text((HERE / "plugins" / "mortal.py").read_text())
    env, at = environment(tmp_path, rank, phase, how)
    env["PYTHONPATH"] = str(tmp_path / "site")
    flags = "--platform mortal --tp 2 --port 0 --dtype float32 --threads 1 --disable-graph"
    flags += " --context-length 128 --kv-memory 32MB"
    command = [sys.executable, "-m", "ds_runtime", "serve", *flags.split()]
    said = tmp_path / "said"
    with said.open("w") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env=os.environ | env
        )
    try:
        found = set()
        while process.poll() is None:
            found |= family(process.pid)
            if "serving" in said.read_text():
                process.terminate()
                break
            time.sleep(0.25)
        assert process.wait(60) == 1
        text = said.read_text()
        check_told(text.splitlines()[-1], rank, phase, how.split()[0])
        check_end(at, found)
    finally:
        process.kill()
        process.wait()
