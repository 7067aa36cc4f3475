"""HTML of the pages, by the environment of the reports: every text is escaped, its control characters are visible."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from .... import __version__
from ..report.page import environment

HERE = Path(__file__).parent
STATIC = {"view.css": "text/css", "view.js": "text/javascript", "view.svg": "image/svg+xml"}


def render(template: str, **values: Any) -> str:
    """Fill in a template of ``templates/``."""
    return _environment().get_template(template).render(version=__version__, **values)


def static_file(name: str) -> tuple[bytes, str]:
    """Content and type of a file of ``static/``.

    Raises: KeyError.
    """
    kind = STATIC[name]
    return (HERE / "static" / name).read_bytes(), kind


@functools.cache
def _environment() -> jinja2.Environment:
    found = environment()
    found.loader = jinja2.FileSystemLoader(HERE / "templates")
    found.filters["typed"] = typed
    return found


def typed(value: str) -> Markup:
    """What the user has typed, for the value of an input, unchanged."""
    return escape(value)
