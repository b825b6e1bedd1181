"""One measurement: ask the server what it takes, warm up, load it, report."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ds_runtime.bench.record import environment
from ds_runtime.bench.serving.client import Answer, Target
from ds_runtime.bench.serving.load import Load, run
from ds_runtime.bench.serving.prompts import Prompt
from ds_runtime.bench.serving.report import figures
from ds_runtime.errors import ConfigError

CHAT = "/v1/chat/completions"
_COUNTED = {"include_usage": True, "continuous_usage_stats": True}  # tokens of every event
_PLAIN = {"include_usage": True}


@dataclass(frozen=True, slots=True)
class Asked:
    """What every request says beside its prompt. `extra` are further fields of the body."""

    endpoint: str = CHAT
    model: str | None = None
    stream: bool = True
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def chat(self) -> bool:
        """Whether prompts go as messages."""
        return self.endpoint.endswith("/chat/completions")


@dataclass(frozen=True, slots=True)
class Measured:
    """The report, and the answers that it was made of."""

    report: dict[str, Any]
    answers: list[Answer]
    begin: float


async def served_model(target: Target) -> str:
    """The first model that the server offers; ConfigError where it does not say."""
    status, body = await target.get("/v1/models")
    if status in (401, 403):
        raise ConfigError(f"{target.url}: HTTP {status}: pass the server's key with --api-key")
    try:
        return str(json.loads(body)["data"][0]["id"])
    except (ValueError, LookupError, TypeError) as e:
        raise ConfigError(
            f"{target.url}/v1/models: HTTP {status} names no model: pass --model NAME, and check "
            "that --base-url is that of an OpenAI-compatible server"
        ) from e


async def measure(
    target: Target,
    asked: Asked,
    prompts: Sequence[Prompt],
    load: Load,
    goodput: Mapping[str, float] | None = None,
    warmups: int = 1,
) -> Measured:
    """Load `target` with `prompts`. ConfigError when it refuses the first one already."""
    model = asked.model or await served_model(target)
    options = await _probe(target, asked, model, prompts, max(1, warmups))
    weights = await _weights(target)

    async def send(prompt: Prompt, late: float) -> Answer:
        return await target.post(asked.endpoint, _body(asked, model, prompt, options), late)

    begin, cpu = time.perf_counter(), time.process_time()
    answers = await run(load, prompts, send)
    duration = time.perf_counter() - begin
    report = figures(answers, duration, goodput)
    report["client_cpu"] = (time.process_time() - cpu) / duration
    report |= {
        "base_url": target.url,
        "endpoint": asked.endpoint,
        "model": model,
        "stream": asked.stream,
        "extra_body": dict(asked.extra),
        "load": asdict(load) | {"rate": None if load.rate == float("inf") else load.rate},
        **environment(),
        **weights,
    }
    return Measured(report, answers, begin)


async def _weights(target: Target) -> dict[str, str]:
    """What a server says that runs on random weights; nothing of any other."""
    status, body = await target.get("/server_info")
    try:
        dummy = status == 200 and json.loads(body)["weights"] == "DUMMY"
    except (ValueError, LookupError, TypeError):
        dummy = False
    return {"weights": "DUMMY"} if dummy else {}


async def _probe(
    target: Target, asked: Asked, model: str, prompts: Sequence[Prompt], warmups: int
) -> Mapping[str, Any] | None:
    """The stream options that the server takes, after as many warm-up requests."""
    tries: list[Mapping[str, Any] | None] = [_COUNTED, _PLAIN] if asked.stream else [None]
    for options in tries:
        for index in range(warmups):
            prompt = prompts[index % len(prompts)]
            answer = await target.post(asked.endpoint, _body(asked, model, prompt, options))
            if answer.error is not None:
                break
        else:
            return options
        if answer.status not in (400, 422):
            break
    raise ConfigError(f"{target.url}{asked.endpoint}: the first request failed: {answer.error}")


def _body(
    asked: Asked, model: str, prompt: Prompt, options: Mapping[str, Any] | None
) -> dict[str, Any]:
    body = {"model": model, **prompt.body(asked.chat)}
    if options is not None:
        body |= {"stream": True, "stream_options": options}
    return body | dict(asked.extra)
