"""Templates of pages and of text, whose every value is printable, and the filters that format numbers.

In a page what is printed is escaped as well; ``value | isolated`` also keeps right-to-left text inside its place. Only
``Markup``, which charts are, is printed as it is.
"""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from ...units import plural, readable_size, readable_time
from ..terminal.text import printable

TEMPLATES = Path(__file__).parent / "templates"
MAX_CHARS = 2000  # of one text, so that a caption of megabytes does not fill the page
Rows = dict[str, list[str]]
"""Lines by name."""


def environment(folder: Path = TEMPLATES, *, html: bool = True) -> jinja2.Environment:
    """The environment of a folder of templates, of pages or of text."""
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        autoescape=html,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=visible,
    )
    templates.filters |= {
        "isolated": isolated,
        "count": "{:,}".format,
        "counted": counted,
        "duration": readable_time,
        "mib": readable_size,
        "number": number,
        "percent": lambda value, digits=1: f"{value:.{digits}%}",
        "share": share,
        "plural": plural,
        "utc": utc,
    }
    return templates


def rows_of(template: str, **values: Any) -> dict[str, Rows]:
    """Fill in a text template of rows: its sections by name.

    A section begins with "= NAME", a row with "NAME: LINE", each further line of it with two spaces. No value can make
    one of these, since it has no line break.
    """
    sections, lines = dict[str, Rows](), list[str]()
    for line in environment(html=False).get_template(template).render(values).split("\n"):
        if line.startswith("= "):
            section = sections.setdefault(line[2:], {})
        elif line.startswith("  "):
            lines.append(line[2:])
        elif line:
            name, _, first = line.partition(": ")
            lines = section[name] = [first]
    return sections


def visible(value: Any) -> Any:
    """A text with its control characters and bidirectional marks escaped, cut at ``MAX_CHARS``; other values as is."""
    if not isinstance(value, str) or isinstance(value, Markup):
        return value
    shown = printable(value[:MAX_CHARS])
    return shown if len(value) <= MAX_CHARS else f"{shown}… ({len(value):,} characters)"


def isolated(value: object) -> Markup:
    """A text of a store or run as an element of its own, whose direction leaves its surroundings alone."""
    return Markup(f"<bdi>{escape(visible(str(value)))}</bdi>")


def number(value: float | None, digits: int = 4) -> str:
    """A number with so many significant digits; a hyphen for None."""
    return "-" if value is None else f"{value:.{digits}g}"


def counted(part: int, whole: int) -> str:
    """A count with its share: "12 (0.4 %)"."""
    return f"{part:,} ({share(part, whole)})" if part else "0"


def share(part: int, whole: int) -> str:
    """A share in percent, with two digits: "0.4 %"."""
    percent = 100 * part / max(1, whole)
    return f"{percent:.0f} %" if percent >= 10 or not part else f"{percent:.2g} %"


def utc(seconds: float) -> str:
    """A date and time: "2026-03-01 14:05:09 UTC"."""
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
