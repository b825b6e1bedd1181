"""The page at `/`: files of this package, which ask nobody but this server."""

from __future__ import annotations

from importlib.resources import files

from fastapi import APIRouter
from starlette.responses import Response

from ds_runtime.server.errors import ApiError

_KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
_NAMES = ("style.css", "main.js", "live.js", "metrics.js", "chat.js", "stream.js")
OPEN = frozenset({"/", *(f"/dashboard/{name}" for name in _NAMES)})  # they hold no secret
_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def dashboard_routes() -> APIRouter:
    """`/` and what it loads. Names come from a list, so no path leads elsewhere."""
    router = APIRouter()
    folder = files("ds_runtime.server") / "pages"
    loaded = {name: (folder / name).read_bytes() for name in ("index.html", *_NAMES)}

    def page(name: str) -> Response:
        kind = _KINDS[name.rpartition(".")[2]]
        return Response(loaded[name], headers=_HEADERS, media_type=kind)

    @router.get("/", include_in_schema=False)
    async def dashboard() -> Response:
        """Live figures, the plan and a chat box."""
        return page("index.html")

    @router.get("/dashboard/{name}", include_in_schema=False)
    async def file(name: str) -> Response:
        """A file of the page."""
        if name not in _NAMES:
            raise ApiError(404, f"the dashboard has no file {name[:100]!r}", code="not_found")
        return page(name)

    return router
