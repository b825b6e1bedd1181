"""The offline API: a model in this process, prompts in, results out.

    with LLM(model="/models/deepseek", platform="cpu") as llm:
        outputs = llm.generate(["Once upon a time"], SamplingParams(max_tokens=64))

With `tp` > 1 this process is rank 0 and starts the others, so a script needs the usual
`if __name__ == "__main__":`.
"""

from __future__ import annotations

import difflib
import gc
import shutil
import weakref
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import fields
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, NoReturn

from msgspec.structs import replace

from ds_runtime.assembly.plan import Plan
from ds_runtime.common import interrupt
from ds_runtime.config import EngineConfig, parse_size
from ds_runtime.engine.banner import banner
from ds_runtime.engine.engine import Engine
from ds_runtime.engine.messages import Stats
from ds_runtime.engine.process.failure import described
from ds_runtime.engine.process.launch import RankGroup
from ds_runtime.engine.process.rankspec import RankSpec
from ds_runtime.engine.process.start import start_engine
from ds_runtime.engine.process.transport import make_private_folder
from ds_runtime.engine.process.worker import leave_unless_guarded
from ds_runtime.errors import ConfigError, EngineDeadError, RequestError
from ds_runtime.offline.jobs import PendingCall, Registry
from ds_runtime.offline.outputs import Completion, PendingChoice, RequestOutput, Usage
from ds_runtime.offline.prompts import JobMaker, Prompts, conversations, listed
from ds_runtime.sampling_params import SamplingParams
from ds_runtime.text.formats.template import Message
from ds_runtime.text.tokenizer import Tokenizer

__all__ = ["LLM", "Completion", "RequestOutput", "Usage"]


class LLM:
    """An engine in this process, as a context manager or until `close`. Calls may overlap, such as
    `generate` inside the loop of a stream. Threads may not.

    * model: a folder, a hub id, a .gguf file or "demo".
    * platform: a name, or "auto".
    * dtype: the compute dtype, or "auto".
    * extra_plugins: modules with hooks, used in addition to the installed plugins.
    * settings: further fields of `EngineConfig`.

    Raises ConfigError, UnsupportedError or CheckpointError when it cannot start.
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
        leave_unless_guarded()
        given = {"model": str(model), "platform": platform, "dtype": dtype, **settings}
        config = _config(given)
        if config.replicas > 1:
            raise ConfigError(
                f"--dp {config.dp}: a server runs replicas (ds-runtime serve), and this is one "
                "engine: leave it out, or give --enable-dp-attention, too, for groups of ranks"
            )
        if config.nnodes > 1:
            raise ConfigError(
                f"--nnodes {config.nnodes}: ranks on several machines are a server's (ds-runtime "
                "serve on each): leave it out"
            )
        defaults = EngineConfig()
        explicit = tuple(n for n in given if n in settings or given[n] != getattr(defaults, n))
        names = tuple(m.__name__ for m in extra_plugins)
        folder = make_private_folder() if config.tp > 1 else Path()
        specs = [RankSpec(config, explicit, names, folder, r) for r in range(config.tp)]
        self._group = RankGroup(specs[1:], own=specs[0]) if config.tp > 1 else None
        self._finalizer = weakref.finalize(self, _release, self._group, folder)
        self._broken: str | None = None
        self._engine: Engine | None = None
        with self._call():
            self._engine = engine = start_engine(specs[0], extra_plugins, self._group)
        self._assembly = engine.assembly
        self._maker = JobMaker(engine.assembly)
        self._registry = Registry()

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
        """Free the model and end the other ranks. May be called twice. Raises EngineDeadError if
        another rank has died, or fails in closing.
        """
        if self._engine is None:
            return
        group = self._group
        with self._call():
            if group is not None:
                group.leave()
            self._engine.close()
        self._maker.close()
        self._engine = None
        self._finalizer()
        gc.collect()  # the runner and its model refer to each other
        if group is not None and group.failure is not None:
            self._broken = str(group.failure)
            raise group.failure

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
        return self._maker.tokenizer

    @property
    def pids(self) -> list[int]:
        """Processes of the other ranks, from rank 1 on."""
        return [] if self._group is None else self._group.pids

    def stats(self) -> Stats:
        """Returns counters since start and gauges now: `Stats` of docs/hooks.md."""
        return self._alive().stats()

    @property
    def vocab_size(self) -> int:
        """Ids are below this."""
        return self._assembly.model.vocab_size

    def simulate_acceptance(self, probability: float) -> None:
        """Accept each draft with this probability, 0 to 1, whatever its token. For measurements of
        one rank on random checkpoints, whose answers mean nothing.
        """
        self._alive().runner.parts.simulated = probability

    def force_drafts(self, count: int | None) -> None:
        """Draft `count` tokens per step, whatever pays. None: as the setting says. For
        measurements.
        """
        pace = self._alive().scheduler.limits.pace
        assert pace is not None, "this engine does not draft"
        pace.forced = count

    def flush_cache(self) -> int:
        """Empty the prefix cache. Returns the number of pages freed."""
        return self._alive().flush()

    def load_lora_adapter(self, name: str, path: str | Path) -> None:
        """Load a PEFT folder, `path`, under a name, also while streams are open. Raises
        RequestError saying why it cannot be; nothing has changed then.
        """
        engine = self._alive()
        with self._call():
            engine.load_adapter(name, str(path))

    def unload_lora_adapter(self, name: str) -> None:
        """Forget an adapter by its name. Raises RequestError while requests use it."""
        self._alive().unload_adapter(name)

    def generate(
        self,
        prompts: Prompts,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        lora: str | Sequence[str | None] | None = None,
    ) -> list[RequestOutput]:
        """Complete every prompt. Returns a RequestOutput for each, in the order of the prompts.

        * prompts: a text or a list of token ids, or a list of these.
        * params: one for all, one per prompt, or None for the defaults (greedy, 16 tokens).
        * lora: the name of an adapter for all, or one or None per prompt.

        Raises RequestError for a prompt or parameter that cannot be served, LogitsError if the
        model's logits are NaN or infinite. The others are then dropped.
        """
        asked = listed(prompts)
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(asked)
        if not all(isinstance(own, SamplingParams) for own in params):
            raise RequestError.of("params", ": give SamplingParams, or a list of them")
        if len(params) != len(asked):
            raise RequestError(
                f"{len(params)} params for {len(asked)} prompts: give one for all or one each",
                "params",
            )
        names = [lora] * len(asked) if lora is None or isinstance(lora, str) else list(lora)
        if len(names) != len(asked):
            raise RequestError(
                f"{len(names)} adapters for {len(asked)} prompts: give one for all or one each",
                "lora",
            )
        outputs = [self._maker.output(p, own) for p, own in zip(asked, params, strict=True)]
        jobs = [
            job
            for output, own, name in zip(outputs, params, names, strict=True)
            for job in self._maker.jobs(output, own, name or "")
        ]
        for _ in self._run(jobs):
            pass
        return outputs

    def stream(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        chat: bool = False,
        lora: str | None = None,
    ) -> Iterator[str]:
        """Yields the text of one prompt piece by piece, as it appears. Leaving the iterator early
        drops the request.

        prompt: text or token ids. params: as in `generate`; `n` is 1. chat: the prompt is a user's
        message. lora: the name of an adapter.
        """
        if chat:
            (talk,) = conversations([{"role": "user", "content": prompt}])
            _, prompt = self._maker.chat(talk)
        (prompt,) = listed(prompt if isinstance(prompt, str) else [prompt])
        params = replace(params or SamplingParams(), n=1)
        output = self._maker.output(prompt, params)
        seen = 0
        # Closed by name: an iterator that is left early need not let go of it at once.
        with closing(self._run(self._maker.jobs(output, params, lora or ""))) as run:
            for job in run:
                if piece := job.completion.text[seen:]:
                    seen += len(piece)
                    yield piece

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        lora: str | Sequence[str | None] | None = None,
        **template_kwargs: Any,
    ) -> list[RequestOutput]:
        """`generate` on conversations rendered with the checkpoint's chat template.

        * messages: one conversation, or a list of them.
        * params, lora: as in `generate`.
        * tools: functions that may be called, as OpenAI's clients write them.
        * template_kwargs: reach the template.

        Each choice's `answer` tells reasoning, content and calls apart, by the model's own parsers.
        """
        chat = self._maker.chat
        prompts = [chat(c, tools, template_kwargs) for c in conversations(messages)]
        outputs = self.generate([ids for _, ids in prompts], params, lora)
        for output, (text, _) in zip(outputs, prompts, strict=True):
            output.prompt = text
            for choice in output.outputs:
                choice.parse(self._maker.parser(text, tools))
        return outputs

    def _run(self, jobs: Sequence[PendingChoice]) -> Generator[PendingChoice, None, None]:
        """Run jobs to their end; each again whenever it got tokens, also by another call's step."""
        engine = self._alive()
        call = PendingCall(self._registry, jobs)
        try:
            while not call.is_done:
                call.submit(engine)
                self._step()
                call.check()
                while call.news:
                    yield call.news.popleft()
        finally:
            call.drop(engine)

    def _step(self) -> None:
        engine = self._alive()
        with interrupt.deferred(), self._call():
            self._registry.take(engine, engine.step())

    @contextmanager
    def _call(self) -> Iterator[None]:
        """Around what the engine does. Where that fails, other than by a refusal, or another rank
        has died, nothing can be served any more.
        """
        group = self._group
        with nullcontext() if group is None else group.call():
            try:
                if group is not None and group.failure is not None:
                    raise group.failure
                yield
            except RequestError:
                raise
            except BaseException as e:
                self._fail(e)

    def _fail(self, error: BaseException) -> NoReturn:
        """End everything; the first cause is raised. What would end this process in silence, or
        pass by handlers of errors, is an error."""
        group, engine = self._group, self._engine
        first = None if group is None else group.fail(error)
        if first is None and not isinstance(error, Exception | KeyboardInterrupt):
            first = EngineDeadError(described(error, 0))
        self._broken = str(first or error) or type(error).__name__
        self._engine = None
        if engine is not None:
            engine.part()
        self._finalizer()
        if first is None or first is error or isinstance(error, KeyboardInterrupt):
            raise error
        raise first from error

    def _alive(self) -> Engine:
        if self._engine is None:
            raise EngineDeadError(f"this LLM is closed{_because(self._broken)}")
        return self._engine


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
