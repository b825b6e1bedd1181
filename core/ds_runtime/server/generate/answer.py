"""A job's way to its answer, whole or streamed; what every generating route ends with."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ds_runtime.server.generate.prepare import Job, Service
from ds_runtime.server.generate.run import Run
from ds_runtime.server.http.bodies import Bodies
from ds_runtime.server.http.stream import stream_response, until_disconnect
from ds_runtime.server.observe.request_record import exchange_of


async def answer(service: Service, request: Request, prefix: str, job: Job) -> Any:
    """Run the prompts and answer whole or as a stream; a client that leaves ends both."""
    exchange = exchange_of(request.scope)
    with job.names.kept():
        asked = exchange.caller, exchange.begin, exchange.asker
        run = exchange.run = Run(prefix, job.submission, service, *asked)
        exchange.stream = bool(job.stream)
        try:
            if job.stream:
                return await stream_response(run, job.form, request, job.names)
            await until_disconnect(request.receive, finish(run))
        except BaseException:
            run.close()
            raise
    run.close()
    numbers = sum(choice.num_logprobs() for choice in run.choices)
    bodies: Bodies = request.app.state.bodies
    return await bodies.word(numbers, lambda: as_json(job.form.reply(run)))


async def finish(run: Run) -> None:
    """Until every choice has ended, each with its text."""
    async for _ in run.pieces(whole=True):
        pass


def as_json(value: Any, status: int = 200) -> Response:
    """A JSON response; faster than the framework's."""
    return Response(msgspec.json.encode(value), status, media_type="application/json")
