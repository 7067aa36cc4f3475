"""Answers that all sites give alike: errors as pages, and the style sheet and script."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.convertors import IntegerConvertor, register_url_convertor
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from ....datasets.errors import DamageError, LeanditError, RecipeError, RowOutOfRange, StoreError, UnknownKey
from .pages import render, static_file

STATUS = {RecipeError: 400, RowOutOfRange: 404, UnknownKey: 404, DamageError: 500, StoreError: 404}


class _Position(IntegerConvertor):
    """A number that fits into 64 bits. With more digits no route matches; Python refuses to parse 4,301 digits."""

    regex = "[0-9]{1,18}"


register_url_convertor("position", _Position())  # as in "/record/{index:position}"


def answer_errors(app: Starlette) -> Starlette:
    """Answer errors that a user can understand with a page that says them."""
    app.add_exception_handler(LeanditError, _problem)
    app.add_exception_handler(OSError, _problem)  # such as a folder that was removed
    app.add_exception_handler(HTTPException, _refusal)
    return app


def static_route() -> Route:
    """The route of the style sheet and the script."""
    return Route("/static/{name}", _static)


def _problem(request: Request, error: Exception) -> Response:
    status = next((code for kind, code in STATUS.items() if isinstance(error, kind)), 500)
    return HTMLResponse(_page(request, "This is not possible", str(error)), status_code=status)


def _refusal(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return HTMLResponse(_page(request, str(error.status_code), error.detail), status_code=error.status_code)


def _page(request: Request, title: str, problem: str) -> str:
    return render("problem.html", root=request.scope["root_path"], title=title, problem=problem)


def _static(request: Request) -> Response:
    try:
        content, kind = static_file(request.path_params["name"])
    except KeyError as error:
        raise HTTPException(404, "There is no such file.") from error
    return Response(content, media_type=kind)
