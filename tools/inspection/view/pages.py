"""What all pages of ``leandit view`` share: templates, errors as pages, the style sheet and the script."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from markupsafe import escape
from starlette.applications import Starlette
from starlette.convertors import IntegerConvertor, register_url_convertor
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import BaseRoute, Route

from .... import __version__
from ....errors import DamageError, LeanditError, RecipeError, RowOutOfRange, StoreError, UnknownKey
from ..templating import environment

HERE = Path(__file__).parent
STATIC = {"view.css": "text/css", "view.js": "text/javascript", "view.svg": "image/svg+xml"}
PAGES = environment(HERE / "templates")
PAGES.filters["typed"] = escape  # what the user has typed, for the value of an input: unchanged
STATUS = {RecipeError: 400, RowOutOfRange: 404, UnknownKey: 404, DamageError: 500, StoreError: 404}


class _Position(IntegerConvertor):
    """A number that fits into 64 bits. With more digits no route matches; Python refuses to parse 4,301 digits."""

    regex = "[0-9]{1,18}"


register_url_convertor("position", _Position())  # as in "/record/{index:position}"


def render(template: str, **values: Any) -> str:
    """Fill in a template of ``templates/``, with the environment of the reports: every text is escaped, its control
    characters are visible."""
    return PAGES.get_template(template).render(version=__version__, **values)


def application(routes: Sequence[BaseRoute], **options: Any) -> Starlette:
    """An application that answers errors with a page, if a user can understand them, and has the static files."""
    app = Starlette(routes=[*routes, Route("/static/{name}", _static)], **options)
    for kind in (LeanditError, OSError, HTTPException):  # OSError: such as a folder that was removed
        app.add_exception_handler(kind, _error_page)
    return app


def _error_page(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        title, problem, status = str(error.status_code), error.detail, error.status_code
    else:
        title, problem = "Request failed", str(error)
        status = next((code for kind, code in STATUS.items() if isinstance(error, kind)), 500)
    page = render("problem.html", root=request.scope["root_path"], title=title, problem=problem)
    return HTMLResponse(page, status_code=status)


def _static(request: Request) -> Response:
    name = request.path_params["name"]
    if name not in STATIC:
        raise HTTPException(404, "There is no such file.")
    return Response((HERE / "static" / name).read_bytes(), media_type=STATIC[name])
