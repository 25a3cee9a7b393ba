"""The page of a server: a conversation, and beside it the tokens that are held.

It loads files of this server only. Texts of models and users become text nodes, never markup.
"""

from collections.abc import Awaitable, Callable
from importlib.resources import files
from pathlib import PurePath

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response

from kvpolicy.serve.example import example_question
from kvpolicy.serve.plans import ServedModel

_OWN, _OF_REPORTS = files("kvpolicy.serve") / "assets", files("kvpolicy.lab.report") / "assets"

# Every file that the page loads; those of reports are shared with them.
_ASSETS = {
    "chat.css": _OWN,
    "chat.js": _OWN,
    "events.js": _OWN,
    "held.js": _OWN,
    "lane.js": _OWN,
    "colours.css": _OF_REPORTS,
    "dom.js": _OF_REPORTS,
    "kept.css": _OF_REPORTS,
    "keptdata.js": _OF_REPORTS,
    "theme.js": _OF_REPORTS,
}
_TYPES = {".css": "text/css", ".html": "text/html", ".js": "text/javascript"}

_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # another version of the server has other files
}


def page_router(model: ServedModel) -> APIRouter:
    """The paths of the page.

    Args:
        model: The model that it talks to.
    """
    router = APIRouter(include_in_schema=False)
    question = example_question(model)
    add = router.add_api_route
    add("/", _answering("page.html", _OWN.joinpath("page.html").read_bytes()))
    for name, folder in _ASSETS.items():
        add(f"/assets/{name}", _answering(name, folder.joinpath(name).read_bytes()))

    @router.get("/assets/example.json")
    async def example() -> JSONResponse:
        return JSONResponse({"question": question}, headers=_HEADERS)

    return router


def _answering(name: str, content: bytes) -> Callable[[], Awaitable[Response]]:
    media_type = _TYPES[PurePath(name).suffix]

    async def answer() -> Response:
        return Response(content, media_type=media_type, headers=_HEADERS)

    return answer
