"""The page of a report: one HTML file that loads nothing, whose every text is escaped.

Templates extend ``templates/page.html``. What a template prints is escaped and its control characters are made visible;
``value | isolated`` also keeps right-to-left text inside its place. Only ``Markup``, which charts are, is printed as it
is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from .... import __version__
from ....datasets.disk.files import write_atomic
from ....datasets.units import readable_size
from ...terminal.text import printable

mib = readable_size  # the filter's name
TEMPLATES = Path(__file__).parent / "templates"
MAX_CHARS = 2000  # of one text, so that a caption of megabytes does not fill the page


@dataclass(frozen=True)
class Alert:
    """Something that a reader must know first.

    Args:
      text: one sentence.
      section: id of the section that shows more; "" for none.
    """

    text: str
    section: str = ""


@dataclass(frozen=True)
class Section:
    """A section of a report, for the list of contents: the id of its element, and its title."""

    id: str
    title: str


def render_page(
    template: str,
    *,
    title: str,
    sections: Sequence[Section],
    alerts: Sequence[Alert] = (),
    page_version: str = "",
    **values: Any,
) -> str:
    """Fill in a template.

    Args:
      template: name of a file in ``templates/`` that extends ``page.html``.
      title: of the page; it may hold any text.
      sections: for the list of contents, in order.
      alerts: shown above everything else.
      page_version: of a page that ``leandit view`` serves, which reloads itself when there is another; "": a file.
      values: what the template prints; it may print nothing else.
    """
    page = environment().get_template(template)
    values |= {"title": title, "sections": sections, "alerts": alerts, "page_version": page_version}
    return page.render(version=__version__, **values)


def write_page(path: Path, html: str) -> int:
    """Write a report; returns its bytes."""
    content = html.encode()
    write_atomic(path, content)
    return len(content)


def environment() -> jinja2.Environment:
    """The templates' environment, with the filters ``isolated``, ``count``, ``mib`` and ``number``."""
    found = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=visible,
    )
    found.filters |= {"isolated": isolated, "count": count, "mib": mib, "number": number}
    return found


def visible(value: Any) -> Any:
    """A text with its control characters and bidirectional marks escaped, cut at ``MAX_CHARS``; other values as is."""
    if not isinstance(value, str) or isinstance(value, Markup):
        return value
    shown = printable(value[:MAX_CHARS])
    return shown if len(value) <= MAX_CHARS else f"{shown}… ({count(len(value))} characters)"


def isolated(value: object) -> Markup:
    """A text of a store or run as an element of its own, whose direction leaves its surroundings alone."""
    return Markup(f"<bdi>{escape(visible(str(value)))}</bdi>")


def count(value: int) -> str:
    """A whole number with separators: 1,281,167."""
    return f"{value:,}"


def several(number: int, thing: str) -> str:
    """A count of things: "1 record", "1,281,167 records"."""
    return f"{count(number)} {thing}{'' if number == 1 else 's'}"


def number(value: float | None, digits: int = 4) -> str:
    """A number with so many significant digits; a hyphen for None."""
    return "-" if value is None else f"{value:.{digits}g}"
