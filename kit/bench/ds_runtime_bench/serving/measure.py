"""One measurement: ask the server what it takes, warm up, load it, report."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ds_runtime.errors import ConfigError
from ds_runtime_bench.record import environment
from ds_runtime_bench.serving.answer import Answer
from ds_runtime_bench.serving.client import Target
from ds_runtime_bench.serving.hits import hits
from ds_runtime_bench.serving.load import Load, run
from ds_runtime_bench.serving.prompts import Prompt
from ds_runtime_bench.serving.report import figures
from ds_runtime_bench.serving.sessions import Session

CHAT = "/v1/chat/completions"
_COUNTED = {"include_usage": True, "continuous_usage_stats": True}  # tokens of every event
_PLAIN = {"include_usage": True}
_FLUSHES = ("/flush_cache", "/reset_prefix_cache")  # ours first; the other is another engine's


@dataclass(frozen=True, slots=True)
class Asked:
    """What every request says besides its prompt. `extra` are further fields of the body, `ids`
    asks for token ids where the server knows how to return them."""

    endpoint: str = CHAT
    model: str | None = None
    stream: bool = True
    ids: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def chat(self) -> bool:
        """Whether prompts go as messages."""
        return self.endpoint.endswith("/chat/completions")


@dataclass(frozen=True, slots=True)
class Measured:
    """The report, and the answers that it was made of; `warm` were sent before."""

    report: dict[str, Any]
    answers: list[Answer]
    begin: float
    warm: list[Answer]


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
    sessions: Sequence[Session],
    load: Load,
    goodput: Mapping[str, float] | None = None,
    warmups: int = 1,
    flush: bool = False,
) -> Measured:
    """Load `target` with `sessions`, its prefix cache emptied before if `flush`. ConfigError when
    it refuses the first prompt already."""
    model = asked.model or await served_model(target)
    if flush:
        await _flush(target)
    options, warm = await _probe(target, asked, model, sessions, max(1, warmups))
    if any(s.first.ids and s.steps for s in sessions) and not all(a.has_ids for a in warm):
        raise ConfigError(
            f"{target.url}: returns no token ids, of which the next turn's prompt is made: leave "
            "--tokenizer out, or use --endpoint /v1/chat/completions"
        )
    weights = await _weights(target)

    async def send(prompt: Prompt, late: float) -> Answer:
        return await target.post(asked.endpoint, _body(asked, model, prompt, options), late)

    begin, cpu = time.perf_counter(), time.process_time()
    answers = await run(load, sessions, send)
    duration = time.perf_counter() - begin
    report = figures(answers, duration, goodput)
    report["client_cpu"] = (time.process_time() - cpu) / duration
    report |= hits(warm, answers)
    report |= {
        "unsent": sum(session.turns for session in sessions) - len(answers),
        "base_url": target.url,
        "endpoint": asked.endpoint,
        "model": model,
        "stream": asked.stream,
        "extra_body": dict(asked.extra),
        "load": asdict(load) | {"rate": None if load.rate == float("inf") else load.rate},
        **environment(),
        **weights,
    }
    return Measured(report, answers, begin, warm)


async def _flush(target: Target) -> None:
    """Empty the server's prefix cache; ConfigError where it cannot."""
    for path in _FLUSHES:
        status, body = await target.call("POST", path)
        if status == 200:
            return
        if status != 404:
            break
    said = body[:200].decode(errors="replace")
    raise ConfigError(
        f"{target.url}{path}: HTTP {status}: {said}: its prefix cache cannot be emptied; leave "
        "--flush-cache out, and restart the server"
    )


async def _weights(target: Target) -> dict[str, str]:
    """What a server says that runs on random weights; nothing of any other."""
    status, body = await target.get("/server_info")
    try:
        dummy = status == 200 and json.loads(body)["weights"] == "DUMMY"
    except (ValueError, LookupError, TypeError):
        dummy = False
    return {"weights": "DUMMY"} if dummy else {}


async def _probe(
    target: Target, asked: Asked, model: str, sessions: Sequence[Session], warmups: int
) -> tuple[Mapping[str, Any], list[Answer]]:
    """The fields that the server takes beside the prompt, and the answers of the warm-up."""
    for options in _options(asked):
        warm: list[Answer] = []
        while len(warm) < warmups:
            prompt = sessions[len(warm) % len(sessions)].first
            answer = await target.post(asked.endpoint, _body(asked, model, prompt, options))
            if answer.error is not None:
                break
            warm.append(answer)
        else:
            return options, warm
        if answer.status not in (400, 422):
            break
    raise ConfigError(f"{target.url}{asked.endpoint}: the first request failed: {answer.error}")


def _options(asked: Asked) -> list[dict[str, Any]]:
    """What to try, the most telling first."""
    streams: list[dict[str, Any]] = [{}]
    if asked.stream:
        streams = [{"stream": True, "stream_options": o} for o in (_COUNTED, _PLAIN)]
    ids = [{"return_token_ids": True}] if asked.ids else []
    return [stream | more for more in (*ids, {}) for stream in streams]


def _body(asked: Asked, model: str, prompt: Prompt, options: Mapping[str, Any]) -> dict[str, Any]:
    return {"model": model, **prompt.body(asked.chat), **options, **asked.extra}
