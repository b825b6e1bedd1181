"""The offline API: a model in this process, prompts in, results out.

    with LLM(model="/models/deepseek", platform="cpu") as llm:
        outputs = llm.generate(["Once upon a time"], SamplingParams(max_tokens=64))

With `tp` > 1 this process is rank 0 and starts the others, so a script needs the usual
`if __name__ == "__main__":`.
"""

from __future__ import annotations

import difflib
import secrets
import shutil
import signal
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, NoReturn, TypeAlias

from msgspec.structs import replace

from ds_runtime.config import EngineConfig, parse_size
from ds_runtime.engine.banner import banner
from ds_runtime.engine.engine import Engine
from ds_runtime.engine.launch import RankGroup
from ds_runtime.engine.messages import Failed, Stats, Submit, TokenLogprob, Tokens
from ds_runtime.engine.rankspec import RankSpec
from ds_runtime.engine.start import start_engine
from ds_runtime.engine.transport import make_private_folder
from ds_runtime.errors import ConfigError, EngineDeadError, RequestError
from ds_runtime.outputs import Completion, Job, RequestOutput, Usage
from ds_runtime.plan import Plan
from ds_runtime.sampling_params import SamplingParams
from ds_runtime.text.template import ChatTemplate, Message, load_template
from ds_runtime.text.tokenizer import Tokenizer

__all__ = ["LLM", "Completion", "RequestOutput", "Usage"]

Prompts: TypeAlias = str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]


class LLM:
    """An engine in this process. `settings` are fields of `EngineConfig`.

    model: folder, hub id or "demo". extra_plugins: modules with hooks, used beside the installed
    plugins. Raises ConfigError, UnsupportedError or CheckpointError when it cannot start. Not for
    several threads at once. Close it, or use it as a context manager.
    """

    def __init__(
        self,
        model: str | Path = "demo",
        platform: str = "auto",
        dtype: str = "auto",
        *,
        extra_plugins: Sequence[ModuleType] = (),
        **settings: Any,
    ) -> None:
        given = {"model": str(model), "platform": platform, "dtype": dtype, **settings}
        config = _config(given)
        defaults = EngineConfig()
        explicit = tuple(n for n in given if n in settings or given[n] != getattr(defaults, n))
        names = tuple(m.__name__ for m in extra_plugins)
        folder = make_private_folder() if config.tp > 1 else Path()
        specs = [RankSpec(config, explicit, names, folder, r) for r in range(config.tp)]
        self._group = RankGroup(specs[1:]) if config.tp > 1 else None
        self._finalizer = weakref.finalize(self, _release, self._group, folder)
        self._broken: str | None = None
        self._served = 0
        self._engine: Engine | None = None
        try:
            self._engine = engine = start_engine(specs[0], extra_plugins, self._group)
        except BaseException as e:
            self._fail(e)
        self._assembly = engine.assembly
        tokenizer_file = self._assembly.folder / "tokenizer.json"
        self._tokenizer = (
            Tokenizer.load(self._assembly.folder) if tokenizer_file.is_file() else None
        )
        self._template: ChatTemplate | None = None

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Free the model and end the other ranks. May be called twice."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()
        self._finalizer()

    @property
    def plan(self) -> Plan:
        """Which kernel serves each op, and why."""
        return self._assembly.plan

    @property
    def banner(self) -> str:
        """What a server prints at start."""
        engine = self._alive()
        return banner(engine.assembly, engine.runner)

    @property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer; CheckpointError if it has none."""
        if self._tokenizer is None:
            return Tokenizer.load(self._assembly.folder)  # raises, naming what is missing
        return self._tokenizer

    @property
    def pids(self) -> list[int]:
        """Processes of the other ranks, from rank 1 on."""
        return [] if self._group is None else self._group.pids

    def stats(self) -> Stats:
        """Counters since start and gauges now."""
        return self._alive().stats()

    def flush_cache(self) -> int:
        """Empty the prefix cache; pages freed."""
        return self._alive().flush()

    def generate(
        self,
        prompts: Prompts,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Complete every prompt; results in the order of the prompts.

        A prompt is text or a list of token ids, alone or in a list. `params`: one for all, one
        per prompt, or None for the defaults (greedy, 16 tokens). RequestError for a prompt or
        parameter that cannot be served; the others are then dropped.
        """
        asked = _listed(prompts)
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(asked)
        if len(params) != len(asked):
            raise RequestError(
                f"{len(params)} params for {len(asked)} prompts: give one for all or one each",
                "params",
            )
        encoded = [self._encode(p) for p in asked]
        outputs = [
            RequestOutput(text, ids, [Completion(c, logprobs=_no_logprobs(p)) for c in range(p.n)])
            for (text, ids), p in zip(encoded, params, strict=True)
        ]
        jobs = [job for o, p in zip(outputs, params, strict=True) for job in self._jobs(o, p)]
        for _ in self._run(jobs):
            pass
        return outputs

    def stream(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None, chat: bool = False
    ) -> Iterator[str]:
        """The text of one prompt as it appears. `chat`: the prompt is a user's message.

        Leaving the iterator early drops the request.
        """
        if chat:
            prompt = self.tokenizer.encode(self._render([{"role": "user", "content": prompt}]))
        text, ids = self._encode(prompt)
        params = params or SamplingParams()
        output = RequestOutput(text, ids, [Completion(0, logprobs=_no_logprobs(params))])
        jobs = self._jobs(output, replace(params, n=1))
        seen = 0
        for job in self._run(jobs):
            if piece := job.completion.text[seen:]:
                seen += len(piece)
                yield piece

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **template_kwargs: Any,
    ) -> list[RequestOutput]:
        """`generate` on conversations rendered with the checkpoint's chat template.

        messages: one conversation, or a list of them. `template_kwargs` reach the template.
        """
        several = [messages] if messages and isinstance(messages[0], Mapping) else messages
        texts = [self._render(c, tools, template_kwargs) for c in several]  # type: ignore[arg-type]
        outputs = self.generate([self.tokenizer.encode(t) for t in texts], params)
        for output, text in zip(outputs, texts, strict=True):
            output.prompt = text
        return outputs

    def _render(
        self,
        conversation: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        if self._template is None:
            folder, override = self._assembly.folder, self._assembly.config.chat_template
            self._template = load_template(folder, self.tokenizer, override)
        if self._template is None:
            raise ConfigError(f"{self._assembly.folder}: has no chat template; pass chat_template=")
        return self._template.render(conversation, tools, kwargs=kwargs)

    def _encode(self, prompt: str | Sequence[int]) -> tuple[str | None, list[int]]:
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise RequestError(
                    f"the prompt is text, but {self._assembly.folder} has no tokenizer.json: "
                    "give token ids, or add the model's tokenizer files",
                    "prompt",
                )
            return prompt, self.tokenizer.encode(prompt, add_special=True)
        return None, list(prompt)

    def _jobs(self, output: RequestOutput, params: SamplingParams) -> list[Job]:
        """The choices of one prompt."""
        if params.stop and self._tokenizer is None:
            raise RequestError(
                "stop strings need a tokenizer, and this checkpoint has none: use stop_token_ids",
                "stop",
            )
        seed = secrets.randbits(63) if params.seed is None else params.seed
        output.usage.prompt_tokens = len(output.prompt_token_ids)
        self._served += 1
        jobs = []
        for choice in range(params.n):
            own = params if choice == 0 else replace(params, prompt_logprobs=None)
            submit = Submit(
                rid=f"{self._served}.{choice}",
                prompt=output.prompt_token_ids,
                params=own,
                seed=seed,
                choice=choice,
                group=str(self._served) if params.n > 1 else "",
            )
            jobs.append(Job(submit, output, choice, self._tokenizer))
        return jobs

    def _run(self, jobs: Sequence[Job]) -> Iterator[Job]:
        """Feed the engine as its queue allows until every job is done; each that got tokens."""
        engine = self._alive()
        window = engine.assembly.config.queue_limit
        pending, running = deque(jobs), dict[str, Job]()
        try:
            while pending or running:
                while pending and len(running) < window:
                    job = pending.popleft()
                    failed = engine.submit(job.submit)
                    if failed is not None:
                        raise _refusal(failed)
                    running[job.submit.rid] = job
                for message in self._step(engine):
                    job = running[message.rid]
                    ended = job.take(message)
                    if ended or message.finish is not None:
                        del running[message.rid]
                    if ended:
                        engine.abort([message.rid])
                    yield job
        finally:
            engine.abort(running)

    def _step(self, engine: Engine) -> list[Tokens]:
        with _interrupt_deferred():
            try:
                return engine.step()
            except BaseException as e:
                self._fail(e)

    def _fail(self, error: BaseException) -> NoReturn:
        """A step or the start broke: nothing can be served any more."""
        group = self._group
        first = None if group is None else group.wait_failure(2.0)
        self._broken = str(first or error) or type(error).__name__
        self.close()
        if first is not None and isinstance(error, Exception):
            raise first from error
        raise error

    def _alive(self) -> Engine:
        if self._engine is None:
            raise EngineDeadError(f"this LLM is closed{_because(self._broken)}")
        return self._engine


@contextmanager
def _interrupt_deferred() -> Iterator[None]:
    """Ctrl-C waits for the end of a step, which it would leave half done; a second one does not."""
    before = signal.getsignal(signal.SIGINT)
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or before is not signal.default_int_handler:
        yield
        return
    pressed: list[int] = []

    def note(number: int, frame: object) -> None:
        pressed.append(number)
        if len(pressed) > 1:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed:
        raise KeyboardInterrupt


def _because(reason: str | None) -> str:
    return "" if reason is None else f": {reason}"


def _release(group: RankGroup | None, folder: Path) -> None:
    """End the other ranks and remove the sockets' folder. Holds no reference to the LLM."""
    if group is not None:
        group.stop()
        shutil.rmtree(folder, ignore_errors=True)


def _config(given: Mapping[str, Any]) -> EngineConfig:
    """EngineConfig from keyword arguments: sizes may be text, tuples lists."""
    known = {f.name: f for f in fields(EngineConfig)}
    values = dict(given)
    for name, value in given.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(known))}"
            raise ConfigError(f"LLM({name}=...): no such setting; {hint}")
        if isinstance(value, list):
            values[name] = tuple(value)
        elif isinstance(value, str) and known[name].metadata.get("size"):
            values[name] = parse_size(value)
    return EngineConfig(**values)


def _listed(prompts: Prompts) -> list[str | Sequence[int]]:
    if isinstance(prompts, str):
        return [prompts]
    if prompts and isinstance(prompts[0], int):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _no_logprobs(params: SamplingParams) -> list[TokenLogprob] | None:
    return None if params.logprobs is None else []


def _refusal(failed: Failed) -> RequestError:
    return RequestError(failed.message, failed.param)
