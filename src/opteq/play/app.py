"""The server of the page: three requests, four fixed files, and nothing else of the machine.

It serves files by exact name from this package, so that no path in a request reaches the file system. Requests are
limited in size and come from pages of this server alone: their ``Host`` and ``Origin`` are checked, so that another
site in the same browser cannot use it. Images are limited in pixels before they are decoded.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import inspect
import io
import json
from collections.abc import Callable
from contextlib import nullcontext
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opteq.common.errors import UserError, needs_extra
from opteq.common.files import check_readable
from opteq.data.readers.decode import open_image
from opteq.models.denoiser import Denoiser, holds_denoiser
from opteq.models.pretrained import released_folder
from opteq.play.classifier import ClassifierSession
from opteq.play.denoiser import DenoiserSession

with needs_extra("play"):
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route

if TYPE_CHECKING:
    from PIL.Image import Image

LARGEST_REQUEST = 4 * 2**20
"""Bytes of a request."""

LARGEST_IMAGE = 4096 * 4096
"""Pixels of an image."""

HOSTS = ["127.0.0.1", "localhost"]

_FILES = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/show.js": ("show.js", "text/javascript; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}

Session = ClassifierSession | DenoiserSession


def open_session(run: Path) -> Session:
    """The session for the folder of a run or a saved model, or for weights of the package by their name."""
    run = released_folder(run)
    check_readable(run)
    name = run.resolve().name
    if holds_denoiser(run):
        return DenoiserSession(Denoiser.load(run, on_failure="ignore"), name)
    from opteq.inference.predict import load

    return ClassifierSession(load(run, "cpu"), name)


def make_app(session: Session) -> Starlette:
    """The application for one model."""

    async def describe(_request: Request) -> Response:
        return JSONResponse(session.describe(), headers=_HEADERS)

    routes = [Route(path, _file(*place), methods=["GET"]) for path, place in _FILES.items()]
    routes += [
        Route("/api/model", describe, methods=["GET"]),
        Route("/api/solve", _post_handler(session.answer), methods=["POST"]),
    ]
    if isinstance(session, ClassifierSession):
        routes.append(Route("/api/certificate", _post_handler(session.certify, queued=True), methods=["POST"]))
    return Starlette(routes=routes, middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=HOSTS)])


class _TooLargeError(UserError):
    """A request beyond the limits."""


def _file(name: str, kind: str) -> Any:
    content = (resources.files("opteq.play") / "web").joinpath(name).read_bytes()

    async def serve(_request: Request) -> Response:
        return Response(content, media_type=kind, headers=_HEADERS)

    return serve


def _post_handler(answer: Callable[..., Any], queued: bool = False) -> Any:
    """A handler of POST requests with an image and the other parameters of ``answer``.

    Where they are queued, one that a page has given up while it waited is passed over: its question has changed.
    """
    turn = asyncio.Lock() if queued else nullcontext()
    known = sorted(set(inspect.signature(answer).parameters) - {"image"})

    async def handle(request: Request) -> Response:
        try:
            parameters = await _read(request)
            image = _decode(parameters.pop("image", None))
            unknown = sorted(set(parameters) - set(known))
            if unknown:
                raise UserError(f"unknown option {unknown[0]!r}; known: {', '.join(known)}")
            async with turn:
                if queued and await request.is_disconnected():
                    return _error_response("the question was given up", 499)
                reply = await run_in_threadpool(answer, image, **parameters)
        except _TooLargeError as error:
            return _error_response(str(error), 413)
        except ValueError as error:
            return _error_response(str(error), 400)
        return JSONResponse(reply, headers=_HEADERS)

    return handle


async def _read(request: Request) -> dict[str, Any]:
    """The JSON object of a request of our own page, read up to the limit."""
    origin = request.headers.get("origin")
    if origin is not None and origin.partition("://")[2] != request.headers.get("host"):
        raise UserError("requests have to come from this server's own page")
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise UserError("the request should be application/json")
    content = bytearray()
    async for chunk in request.stream():
        content += chunk
        if len(content) > LARGEST_REQUEST:
            raise _TooLargeError(f"the request should have at most {LARGEST_REQUEST // 2**20} MB")
    try:
        parameters = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise UserError("the request is not valid JSON") from error
    if not isinstance(parameters, dict):
        raise UserError("the request should be a JSON object")
    return parameters


def _decode(image: Any) -> Image:
    """The image of a data URL, checked before its pixels are decoded."""
    from PIL import Image as Images

    if not isinstance(image, str) or not image.startswith("data:image/") or ";base64," not in image:
        raise UserError("give an image as a data URL: data:image/png;base64,...")
    try:
        content = base64.b64decode(image.partition(";base64,")[2], validate=True)
    except (ValueError, binascii.Error) as error:
        raise UserError("the image is not valid base64") from error
    try:
        with Images.open(io.BytesIO(content)) as opened:
            pixels = opened.width * opened.height
    except Exception as error:  # decoders raise OSError, SyntaxError, ValueError, struct.error and others
        raise UserError("this file can't be read as an image; use PNG, JPEG, WebP, GIF or BMP") from error
    if pixels > LARGEST_IMAGE:
        raise _TooLargeError(f"the image has {pixels} pixels, over {LARGEST_IMAGE}; make it smaller")
    return open_image(io.BytesIO(content), "the image")


def _error_response(message: str, status: int) -> Response:
    return JSONResponse({"error": message}, status_code=status, headers=_HEADERS)
