"""An engine that speaks the real messages over real sockets, and says what the prompt orders.

Orders stand in the prompt in square brackets, or in ⟦⟧ where they hold some: [say TEXT] answers
TEXT and ends with EOS, [go] never ends by itself, [hang] never answers, [full] and [invalid]
refuse, [die] dies after three tokens, [bytes e4 bd] gives raw byte tokens. [break N] gives so many
tokens to the first choice, whose logits are then no numbers, and `so` to the others; where `broken`
is set, none to anybody.
"""

from __future__ import annotations

import re
import threading
import time
from dataclasses import dataclass, field

import msgspec
import zmq

from ds_runtime.engine.messages import (
    Abort,
    Adapt,
    Adapted,
    Dead,
    Failed,
    Flush,
    Flushed,
    Profile,
    Profiled,
    Ready,
    Stats,
    Stop,
    Submit,
    SubmitGroup,
    TokenLogprob,
    Tokens,
    decode_to_engine,
    encoder,
)
from ds_runtime.text.tokenizer import Tokenizer

CONTEXT, VOCAB, EOS = 4096, 512, 1
READY = Ready(
    banner="fake engine ready",
    context_length=CONTEXT,
    vocab_size=VOCAB,
    kv_tokens=1,
    page_size=16,
    queue_limit=1024,
    settings={"tp": 1},
    plan={"rows": []},
)


@dataclass
class Job:
    submit: Submit
    script: list[int]
    order: str
    done: int = 0


@dataclass
class FakeEngine:
    tokenizer: Tokenizer
    to_engine: str
    from_engine: str
    ready: bool = True
    queue_limit: int = READY.queue_limit
    submits: list[Submit] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    flushes: int = 0
    profiling: str | None = None
    adapters: list[str] = field(default_factory=list)
    adapts: list[Adapt] = field(default_factory=list)
    refuses: str = ""
    broken: bool = False
    generated: int = 0
    bytes_in: int = 0

    def start(self) -> None:
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self) -> None:
        context = zmq.Context()
        self.pull, self.push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        self.pull.bind(self.to_engine)
        self.push.connect(self.from_engine)
        self.jobs: dict[str, Job] = {}
        self.alive = True
        if self.ready:
            self.send(msgspec.structs.replace(READY, queue_limit=self.queue_limit))
        while self.alive:
            if self.pull.poll(0 if self.jobs else 20):
                self.receive(self.pull.recv())
            else:
                self.step()
        context.destroy(linger=500)

    def send(self, *messages) -> None:
        self.push.send(encoder.encode(messages))

    def receive(self, data) -> None:
        match message := decode_to_engine.decode(data):
            case SubmitGroup():
                self.bytes_in += len(data)
                for submit in message.choices():
                    self.submits.append(submit)
                    self.admit(submit)
            case Abort():
                for rid in message.rids:
                    if self.jobs.pop(rid, None) is not None:
                        self.aborted.append(rid)
            case Flush():
                self.flushes += 1
                self.send(Flushed(message.token, 7))
            case Profile():
                refused = "one runs or none does" if message.folder == self.profiling else ""
                path = "" if message.folder else f"{self.profiling}/1.trace.json.gz"
                self.profiling = message.folder
                self.send(Profiled(message.token, path, refused))
            case Adapt():
                self.adapt(message)
            case Stop():
                self.alive = False

    def adapt(self, message: Adapt) -> None:
        """A folder whose path says bad is refused."""
        self.adapts.append(message)
        refused = self.refuses
        if refused:
            pass
        elif message.folder is None:
            if any(j.submit.adapter == message.name for j in self.jobs.values()):
                refused = "in use"
            else:
                self.adapters.remove(message.name)
        elif "bad" in message.folder:
            refused = f"{message.folder}: rank 3 found, 4 expected"
        else:
            self.adapters.append(message.name)
        self.send(Adapted(message.token, list(self.adapters), refused))

    def admit(self, submit: Submit) -> None:
        text = self.tokenizer.decode(submit.prompt, skip_special=False)
        found = re.findall(r"⟦(\w+) ?([^⟧]*)⟧", text) or re.findall(r"\[(\w+) ?([^\]]*)\]", text)
        order, rest = (found or [("say", "so")])[-1]
        if order == "full":
            return self.send(Failed(submit.rid, "queue_full", "the queue holds 1024 requests"))
        if order == "invalid":
            return self.send(Failed(submit.rid, "invalid", "seed is odd", "seed"))
        if self.broken:
            return self.send(Failed(submit.rid, "broken", "the logits are not finite"))
        if order == "break" and submit.choice:
            order, rest = "say", "so"
        script = [*self.tokenizer.encode(rest), EOS]
        if order == "bytes":
            wanted = bytes.fromhex(rest)
            table = {self.tokenizer.token_bytes(t): t for t in reversed(range(VOCAB))}
            script = [*(table[bytes([b])] for b in wanted), EOS]
        self.jobs[submit.rid] = Job(submit, script, order)
        if order == "hang":
            self.send(Stats(running=len(self.jobs)))

    def step(self) -> None:
        """One token for every job."""
        if any(j.order == "go" for j in self.jobs.values()):
            time.sleep(0.001)
        messages = [m for j in list(self.jobs.values()) if (m := self.advance(j)) is not None]
        for job in [j for j in self.jobs.values() if j.order == "break"]:
            if job.done == int(self.tokenizer.decode(job.script[:-1])):
                del self.jobs[job.submit.rid]
                said = f"the logits for token {job.done + 1} are not finite"
                messages.append(Failed(job.submit.rid, "broken", said))
        if messages:
            stats = Stats(running=len(self.jobs), generated_tokens=self.generated)
            self.send(*messages, stats)
        elif self.jobs:
            time.sleep(0.005)
        if any(j.order == "die" and j.done == 3 for j in self.jobs.values()):
            self.send(Dead("rank 1 was killed by signal 9"))
            self.alive = False

    def advance(self, job: Job) -> Tokens | None:
        params = job.submit.params
        if job.order == "hang":
            return None
        endless = job.order in ("go", "die", "break")
        token = job.script[job.done % (len(job.script) - 1) if endless else job.done]
        first = job.done == 0
        job.done += 1
        self.generated += 1
        finish = stop = None
        if token in params.stop_token_ids or (token == EOS and not params.ignore_eos):
            finish, stop = "stop", token
        elif job.done == params.max_tokens or (not endless and job.done == len(job.script)):
            finish = "length"
        if finish is not None:
            del self.jobs[job.submit.rid]
        prompt = None
        if first and params.prompt_logprobs is not None:
            prompt = [None, *(logprob(t, params.prompt_logprobs) for t in job.submit.prompt[1:])]
        return Tokens(
            rid=job.submit.rid,
            tokens=[token],
            logprobs=None if params.logprobs is None else [logprob(token, params.logprobs)],
            prompt_logprobs=prompt,
            finish=finish,
            stop_token=stop,
            cached_tokens=4,
            cached_by_tier={"device": 1, "host": 3} if job.order == "tiers" else None,
        )


def logprob(token: int, top: int) -> TokenLogprob:
    """The chosen token is the second best."""
    best = [(token + 1, -0.25), (token, -0.5), (token + 2, -float("inf"))]
    return TokenLogprob(token, -0.5, best[:top])
